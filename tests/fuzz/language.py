"""Random masks of the whole expression language, by a seed: each is small, and a compile of it takes a second or two.

Beside the families of ``legal_masks`` there are compositions of arithmetic: one random function of a position, applied
to the query and to the key, whose results are compared; divisions and remainders by literals, constants, scalars of
the call and elements of tensors; ids that come back; windows and widths that each query reads, with a declared range
or without; scores that are −inf under a condition.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from attngen.errors import SpecError
from attngen.inspect.cases import Case
from attngen.lang.variant import Variant
from attngen.schema import load_spec_text
from attngen.schema.loading import Spec
from tests.fuzz.declared import Declared
from tests.fuzz.legal_masks import Masks

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_DRAWS = 40


@dataclass(frozen=True)
class Drawn:
    """A random variant as a spec declares it, the kernels to build for it, and the calls to make."""

    seed: int
    variant: Mapping[str, Any]
    runs: frozenset[str]  # tensors of ids that come in runs and come back
    head_dim: int
    dtype: str
    layouts: tuple[str, ...]  # the first has a backward
    cases: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)  # by layout

    @property
    def name(self) -> str:
        """The name of its variant."""
        return f"random_{self.seed}"

    @property
    def text(self) -> str:
        """The spec, as YAML."""
        kernels = [
            {"variant": self.name, "head_dim": self.head_dim, "dtype": self.dtype, "layout": layout}
            | ({"passes": ["forward", "backward"]} if layout != "paged" else {})
            for layout in self.layouts
        ]
        spec = {
            "schema": 1, "package": "random_masks", "arch": ["sm90a"], "variants": {self.name: dict(self.variant)},
            "kernels": kernels,
        }  # fmt: skip
        return yaml.safe_dump(spec, sort_keys=False, width=10_000)

    @property
    def spec(self) -> Spec:
        """The spec, loaded."""
        return load_spec_text(self.text, f"{self.name}.yaml")

    @property
    def checked(self) -> Variant:
        """The variant, parsed and typed."""
        return self.spec.variants[self.name].variant

    @property
    def line(self) -> str:
        """Mask, score and declarations in a line."""
        return ", ".join(f"{name}: {value}" for name, value in self.variant.items())


def drawn(seed: int) -> Drawn:
    """Return the variant of a seed; the same one on every machine."""
    chance = random.Random(f"mask {seed}")
    for _ in range(_DRAWS):
        made = _draw(chance, seed)
        try:
            variant = made.checked
        except SpecError as error:
            if not any(part in str(error) for part in ("beyond int64", "0 to 63", "0 to 31", "nodes")):
                raise
            continue
        if "paged" in made.layouts and variant.packed_keys() is not None:
            continue
        return made
    raise AssertionError(f"seed {seed}: no legal variant in {_DRAWS} draws")


def _draw(chance: random.Random, seed: int) -> Drawn:
    layouts = chance.choice((("dense",),) * 7 + (("varlen",),) * 2 + (("dense", "paged"),))
    words = Language(_Declared(chance), layouts[-1])
    variant: dict[str, Any] = {"mask": words.mask()}
    kind = chance.random()
    if kind < 0.3:
        variant["score"] = words.score()
        if kind < 0.04:  # hidden by the score alone
            variant["mask"] = True
    if words.let:
        variant["let"] = {head: _plain(body) for head, body in words.let.items()}
    variant |= {name: _plain(variant[name]) for name in ("mask", "score") if isinstance(variant.get(name), str)}
    said = f"{variant} {[tensor['shape'] for tensor in words.declared.tensors.values()]}"
    for group, values in (("scalars", words.declared.scalars), ("tensors", words.declared.tensors)):
        used = {name: fields for name, fields in values.items() if re.search(rf"\b{name}\b", said)}
        if used:
            variant[group] = used
    head_dim = chance.choice((64, 64, 64, 64, 64, 64, 128, 128, 96))
    dtype = chance.choice(("bf16", "bf16", "bf16", "fp16"))
    cases = {layout: tuple(_case(chance, layout, small) for small in (False, True)) for layout in layouts}
    return Drawn(seed, variant, frozenset(words.runs), head_dim, dtype, layouts, cases)


def _plain(text: str) -> str:
    """An expression without parentheses that change nothing."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _case(chance: random.Random, layout: str, small: bool) -> Case:
    """Return ragged sizes of a call: hundreds of tokens, or ``small`` ones; some are multiples of 16, as TMA needs."""
    even = chance.random() < 0.3

    def length(most: int) -> int:
        n = min(most, int(2 ** chance.uniform(0, 9.6))) if chance.random() < 0.3 else chance.randint(1, most)
        return -(-n // 16) * 16 if even else n

    heads, kv_heads = chance.choice(((1, 1), (2, 2), (2, 1), (4, 2), (3, 1)))
    most, least = (200, 1) if small else (700, 64)
    if layout == "dense":
        batch = chance.choice((1, 1, 2, 3))
        keys = max(least, length(most))
        rows = keys if chance.random() < 0.5 else max(least // 2, length(most))
        return Case("dense", (rows,) * batch, (keys,) * batch, heads, kv_heads)
    batch = chance.choice((1, 2, 3, 4))
    keys_of = tuple(max(least if not n else 0, length(most) - (not even)) for n in range(batch))
    equal = chance.random() < 0.4
    rows_of = keys_of if chance.random() < 0.5 else tuple(max(1, length(most // 2)) for _ in range(batch))
    if layout == "paged":
        rows_of = (chance.randint(1, 64),) * batch if equal else tuple(max(rows, 1) for rows in rows_of)
        return Case("paged", rows_of, keys_of, heads, kv_heads, page_size=chance.choice((16, 16, 32, 64, 128, 48)))
    return Case("varlen", rows_of, keys_of, heads, kv_heads)


class _Declared(Declared):
    """Declarations in which no tensor is shorter than what is read of it."""

    def length(self, of: str) -> str:
        return of if self.chance.random() < 0.8 else f"extent_{len(self.tensors)}"


class Language(Masks):
    """Writes masks and scores over the declarations of one variant, which it extends."""

    def __init__(self, declared: Declared, layout: str) -> None:
        super().__init__(declared, layout)
        self.let: dict[str, str] = {}
        self.runs: set[str] = set()

    def mask(self) -> str:
        """Return a mask: one condition, or several joined."""
        kind = self.chance.random()
        if kind < 0.3:
            return self.condition()
        return self.combined(1 if kind < 0.86 else 2)

    def combined(self, depth: int) -> str:
        """Return conditions joined by operators, ``depth`` levels of them."""
        if depth == 0:
            return f"({self.condition()})"
        kind = self.chance.random()
        parts = [self.combined(depth - 1) for _ in range(self.chance.choice((2, 2, 2, 3)))]
        if kind < 0.38:
            text = " and ".join(parts)
        elif kind < 0.72:
            text = " or ".join(parts)
        elif kind < 0.8:
            text = f"not {parts[0]} and {parts[1]}"
        elif kind < 0.86:
            text = f"{parts[0]} ^ {parts[1]}"
        elif kind < 0.92:
            text = f"{parts[0]} if {self.combined(0)} else {parts[1]}"
        elif kind < 0.96:
            text = f"{parts[0]} == {parts[1]}"
        else:
            text = f"not ({parts[0]} or {parts[1]}) or {self.uniform()}"
        return f"({text})"

    def condition(self) -> str:
        """Return one condition of any family."""
        kind = self.chance.random()
        if kind < 0.3:
            return super().condition()
        own = (
            self.function_of_both, self.function_of_both, self.function_of_both, self.apart, self.tiles, self.tiles,
            self.ids, self.ids, self.ids_of_place, self.windows, self.windows, self.between, self.arithmetic,
            self.arithmetic, self.quotients, self.blocks, self.from_table,
        )  # fmt: skip
        return self.chance.choice(own)()

    # --- arithmetic -----------------------------------------------------------------------------------------

    def position(self, depth: int) -> str:
        """Return a function of ``x``, a position that is not negative; its value is an integer."""
        chance = self.chance
        if depth == 0:
            return "x"
        inner, n = self.position(depth - 1), self.divisor()
        written = chance.choice(
            (
                f"({inner}) // {n}", f"({inner}) // {n}", f"({inner}) % {n}", f"({inner}) % {n}",
                f"clamp({inner}, {chance.choice((0, 2, 16, 64))}, {self.declared.reach()})",
                f"min({inner}, {self.declared.reach()})", f"max({inner}, {self.declared.reach()})",
                f"({inner}) + {self.declared.reach()}", f"({inner}) * {chance.choice((2, 3, -1))}",
                f"abs(({inner}) - {self.declared.reach()})",
                f"(({inner}) if x % {n} < {chance.choice((1, 2, 7))} else x // {chance.choice((2, 16))})",
                f"(x // {n} if x < {self.declared.reach()} else {inner})",
                f"({inner}) >> {chance.choice((1, 4, 5))}", f"({inner}) & {chance.choice((3, 15, 32, 96))}",
                f"({inner}) // {n} * {n}", f"-(-({inner}) // {n})",
            )
        )  # fmt: skip
        return f"({written})"

    def divisor(self) -> str:
        """Return an integer that is known not to be 0, most of them positive."""
        kind = self.chance.random()
        if kind < 0.75:
            return self.declared.divisor()
        if kind < 0.85:
            return str(self.chance.choice((-2, -3, -16, 5, 100, 128)))
        if kind < 0.93:
            positive = {"range": {"min": 1, "max": self.chance.choice((9, 100, 2**20))}}
            return f"{self.declared.tensor('stride', 'int32', ['h'], **positive)}[h]"
        scalar = self.declared.scalar("open", {"type": "int32"})
        return self.chance.choice((f"max({scalar}, 3)", f"(abs({scalar}) % 50 + 1)"))

    def applied(self) -> tuple[str, str]:
        """Return one random function at the query and at the key, through ``let`` or written out."""
        body = self.position(self.chance.choice((1, 1, 2, 2, 3)))
        row = self.chance.choice(("q", "q", "q", "max(q_pos, 0)", "q_pos", "q + 3"))
        if self.chance.random() < 0.6:
            name = f"f{len(self.let)}"
            self.let[f"{name}(x)"] = body
            return f"{name}({row})", f"{name}(kv)"
        return tuple(re.sub(r"\bx\b", f"({place})", body) for place in (row, "kv"))  # type: ignore[return-value]

    def function_of_both(self) -> str:
        """Return a comparison of a function at the query and at the key."""
        row, key = self.applied()
        sign = self.chance.choice(("==", "==", ">=", ">", "<=", "!="))
        return f"{row} {sign} {key}"

    def apart(self) -> str:
        """Condition that a function at query and key differs by little."""
        row, key = self.applied()
        return self.chance.choice(
            (
                f"abs({row} - {key}) <= {self.declared.reach()}",
                f"0 <= {row} - {key} < {self.declared.reach()}",
                f"{key} <= {row} + {self.declared.reach()}",
                f"({row} + {key}) % {self.divisor()} <= 1",
            )
        )

    def tiles(self) -> str:
        """Return neighbours in a space of two or three axes, of one size for each axis, with windows at the border."""
        count = len(self.let)
        size = [self.declared.scalar("size", {"type": "int32", "min": 1}) for _ in "xy"]
        if self.chance.random() < 0.4:
            size = [str(self.chance.choice((3, 5, 8, 12, 20))) for _ in "xy"]
        per = self.chance.choice(("", f" // {self.divisor()}"))
        x, y, near = (f"{name}{count}" for name in ("x_of", "y_of", "near"))
        self.let[f"{x}(i)"] = f"i{per} % {size[0]}"
        self.let[f"{y}(i)"] = f"i{per} // {size[0]}" + ("" if self.chance.random() < 0.5 else f" % {size[1]}")
        width = self.declared.reach()
        begin = f"clamp(i - {width} // 2, 0, n - {width})"
        self.let[f"{near}(i, j, n)"] = self.chance.choice(
            (
                f"abs(i - j) <= {width}",
                f"abs(clamp(i, {width} // 2, n - 1 - {width} // 2) - j) <= {width} // 2",
                f"{begin} <= j and j < {begin} + {width}",
            )
        )
        row = self.chance.choice(("q", "q", "max(q_pos, 0)"))
        parts = [f"{near}({x}({row}), {x}(kv), {size[0]})", f"{near}({y}({row}), {y}(kv), {size[1]})"]
        return " and ".join(parts if self.chance.random() < 0.8 else parts[:1])

    def arithmetic(self) -> str:
        """Return a comparison of an arithmetic expression of the query with one of the key, or of both with a bound."""
        row = re.sub(r"\bx\b", self.chance.choice(("q", "max(q_pos, 0)")), self.position(self.chance.choice((1, 2))))
        key = re.sub(r"\bx\b", "kv", self.position(self.chance.choice((0, 1, 2))))
        sign = self.chance.choice(_COMPARISONS)
        return self.chance.choice(
            (
                f"({row}) {sign} ({key})",
                f"({row}) * {self.chance.choice((2, 3))} {sign} ({key}) + {self.declared.reach()}",
                f"(({row}) - ({key})) % {self.divisor()} {sign} 2",
                f"min({row}, {key}) {sign} max(q - {self.declared.reach()}, 0)",
                f"({key}) {sign} clamp(q_pos, 0, seqlen_k // 2)",
            )
        )

    def quotients(self) -> str:
        """Return a comparison of floats that are exact, or rounded once."""
        n = self.declared.scalar("n", {"type": "int32", "min": 1})
        slope = self.declared.tensor("slope", "float32", ["h"])
        return self.chance.choice(
            (
                f"(kv + 1) / {n} < {self.chance.choice(('1.0', '2.5', '0.25'))}",
                f"floor((q + 1) / {n}) >= floor((kv + 1) / {n})",
                f"abs(q - kv) * 0.125 < {self.chance.choice(('1.0', '4.5', '20.0'))}",
                f"float(kv) <= {self.chance.choice(('0.5', '1.5'))} * q + 2.0",
                f"{slope}[h] > 0.0 and q_pos >= kv",
                f"int(kv * 0.5) % {self.divisor()} != 1",
                f"ceil(q / {n}) == ceil(kv / {n})",
            )
        )

    # --- tensors --------------------------------------------------------------------------------------------

    def id_tensor(self, shape: list[int | str]) -> str:
        """Declare ids in any order, which come in runs in most calls, with a range or without."""
        limits = self.chance.choice(({}, {}, {"range": {"min": 0, "max": 7}}, {"range": {"min": -1}}))
        name = self.declared.tensor("id", self.declared.integers(), shape, **limits)
        if self.chance.random() < 0.75:
            self.runs.add(name)
        return name

    def ids(self) -> str:
        """Condition that ids of query and key fit, of two tensors."""
        batched = self.chance.random() < 0.6
        lead, at = (["b"], "b, ") if batched else ([], "")
        of_q, of_k = self.id_tensor([*lead, "seqlen_q"]), self.id_tensor([*lead, "seqlen_k"])
        return self.chance.choice(
            (
                f"{of_q}[{at}q] == {of_k}[{at}kv]",
                f"{of_q}[{at}q] == {of_k}[{at}kv]",
                f"{of_q}[{at}q] {self.chance.choice(_COMPARISONS)} {of_k}[{at}kv]",
                f"{of_q}[{at}q] == {of_k}[{at}kv] and q_pos >= kv",
                f"{of_k}[{at}kv] == {self.chance.choice((0, 1, 2))} or {of_q}[{at}q] == {of_k}[{at}kv]",
                f"abs({of_q}[{at}q] - {of_k}[{at}kv]) <= 1",
            )
        )

    def ids_of_place(self) -> str:
        """Condition that the ids of query and key in one tensor fit."""
        batched = self.chance.random() < 0.6
        lead, at = (["b"], "b, ") if batched else ([], "")
        name = self.id_tensor([*lead, "seqlen_k"])
        divisor = self.chance.choice(("", "", f" // {self.chance.choice((2, 3))}", f" % {self.chance.choice((2, 3))}"))
        return f"q_pos >= 0 and {name}[{at}q_pos]{divisor} == {name}[{at}kv]{divisor}"

    def per_query(self, prefix: str, most: int | str) -> str:
        """Return an element that each query reads, with a declared range or without."""
        limits = self.chance.choice(({}, {}, {"range": {"min": 0, "max": most}}, {"range": {"min": 1}}))
        shape, index = self.chance.choice(
            ((["seqlen_q"], "q"), (["b", "seqlen_q"], "b, q"), (["h", "seqlen_q"], "h, q"), (["total_q"], "q_global"))
        )
        dtype = "int32" if isinstance(most, str) else self.declared.integers()
        return f"{self.declared.tensor(prefix, dtype, [*shape], **limits)}[{index}]"

    def windows(self) -> str:
        """Return a window that each query reads."""
        width, row = self.per_query("window", 300), self.row()
        return self.chance.choice(
            (
                f"{row} >= kv and {row} - kv < {width}",
                f"abs({row} - kv) <= {width} // {self.chance.choice((1, 2, 4))}",
                f"{row} - {width} <= kv and kv <= {row} + {self.per_query('ahead', 100)} % 40",
                f"kv // {self.divisor()} >= ({row} - {width}) // 8",
            )
        )

    def between(self) -> str:
        """Return keys between two ends that each query, head or batch entry reads."""
        first, last = self.per_query("first", "seqlen_k"), self.per_query("last", "seqlen_k")
        return self.chance.choice(
            (
                f"{first} <= kv < {last}",
                f"{first} - {self.declared.reach()} <= kv and kv < max({last}, q_pos)",
                f"kv < {last} and kv % {self.divisor()} != 1",
                f"not ({first} <= kv and kv < {last})",
                f"clamp({first}, q - 100, q) <= kv",
            )
        )

    def blocks(self) -> str:
        """Return bools of blocks of pairs, or of pairs."""
        if self.chance.random() < 0.5:
            lead, at = self.chance.choice((([], ""), (["h"], "h, "), (["b"], "b, "), (["b", "h"], "b, h, ")))
            name = self.declared.tensor("allowed", "bool", [*lead, "seqlen_q", "seqlen_k"])
            return f"{name}[{at}q, kv]"
        size = self.chance.choice((16, 48, 64, 128))
        name = self.declared.tensor("blocks", "bool", [f"rows_{size}", f"keys_{size}"])
        return f"{name}[q // {size}, kv // {size}]"

    def from_table(self) -> str:
        """Return a look-up in a table by distance or by remainder."""
        if self.chance.random() < 0.5:
            name = self.declared.tensor("near", "bool", [129])
            return f"{name}[clamp({self.row()} - kv, -64, 64) + 64]"
        n = self.chance.choice((3, 8, 17))
        name = self.declared.tensor("table", self.declared.integers(), [n])
        return f"{name}[kv % {n}] {self.chance.choice(('<=', '>', '=='))} {name}[q % {n}]"

    # --- scores ---------------------------------------------------------------------------------------------

    def score(self) -> str:
        """Return a score, which hides by −inf in most cases."""
        value = self.chance.choice(
            (
                "s", "s", "s", "s * 0.5", "s - abs(q - kv) * 0.0625", "s * 2.0 if kv % 3 == 0 else s",
                f"s + {self.declared.tensor('bias', self.declared.floats(), ['h', 'seqlen_k'])}[h, kv]",
                f"s * {self.declared.scalar('gain', {'type': 'float32', 'min': 0.5, 'max': 2.0})}",
                self.biased(), self.biased(),
            )
        )  # fmt: skip
        shown, hidden = self.combined(0), self.combined(0)
        return self.chance.choice(
            (
                f"({value}) if {shown} else -inf",
                f"({value}) if {shown} else -inf",
                f"-inf if {hidden} else ({value})",
                f"({value}) + (0.0 if {shown} else -inf)",
                f"(({value}) if {shown} else -inf) if {self.uniform()} else s",
                f"(-inf if {hidden} else s * 2.0) if {shown} else ({value})",
                value,
            )
        )

    def biased(self) -> str:
        """Return a score with a bias of every pair."""
        lead, at = self.chance.choice((([], ""), (["h"], "h, "), (["b"], "b, "), (["b", "h"], "b, h, ")))
        name = self.declared.tensor("pair_bias", self.declared.floats(), [*lead, "seqlen_q", "seqlen_k"])
        return f"s + {name}[{at}q, kv]"


def fill(made: Drawn, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return arguments of a call in which ids come in runs and come back."""
    generator = torch.Generator().manual_seed(seed)
    kinds = made.variant.get("tensors", {})
    for name in sorted(made.runs & arguments.keys()):
        tensor = arguments[name]
        length = tensor.shape[-1]
        least, most = (kinds[name].get("range", {}).get(end, other) for end, other in (("min", 0), ("max", 4)))
        run = int(torch.randint(3, 120, (), generator=generator))
        ids = torch.randint(least, most + 1, (*tensor.shape[:-1], length // run + 1), generator=generator)
        ids = ids.repeat_interleave(run, -1)[..., :length]
        arguments[name] = ids.to(dtype=tensor.dtype, device=tensor.device).contiguous()
    return arguments
