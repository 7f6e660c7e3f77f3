"""The user's mathematics as CUDA lines: the logits of a tile, and which tiles a row box sees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.emit import Binding
from attngen.lang.facts import index
from attngen.lang.folding import PRODUCT, fold_logit, split_keys
from attngen.lang.intervals import bounds
from attngen.lang.ir import MAX_SEQLEN, Expr, Op, Type, names, walk
from attngen.lang.ranges import INT32
from attngen.lang.rows import own_intervals
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE, integer, maximum, minimum
from attngen.plan.model import Plan
from attngen.render.expressions import (
    CUDA,
    KEYS,
    QUERIES,
    SEQLEN_K,
    Along,
    corner_bindings,
    emit_for,
    emit_named,
    facts_of,
    hull_ends,
    inward,
    known_ranges,
    numbered,
    scalar_bindings,
    settled,
)

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_QUERY_NAMES = ("q_row", "q_pos", "q_packed")
#: What the mask and the score call keys.
_KEY_NAMES = frozenset({"kv", "kv_global"})
_KV_FIRST, _KEY = index("kv_first"), index("key")


@dataclass(frozen=True, slots=True)
class Steps:
    """What happens to the elements ``x`` of a tile: lines for the tile, for each row, each key, and each element.

    ``row_values`` are the values of a row that its elements use, each with its type. No lines for elements: nothing
    happens to them.
    """

    tile: tuple[str, ...]
    row: tuple[str, ...]
    row_values: tuple[tuple[str, str], ...]
    key: tuple[str, ...]
    element: tuple[str, ...]

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join([*self.tile, *self.row, *self.key, *self.element])


@dataclass(frozen=True, slots=True)
class Logits:
    """How products become logits: lines once for a tile of work, the steps of partial and of full tiles, the factor
    that leads to units of log2, and whether the key alone may decide that an element's product does not count."""

    work: tuple[str, ...]
    partial: Steps
    full: Steps
    multiplier: str
    drops_products: bool


@dataclass(frozen=True, slots=True)
class Sink:
    """The sink of the head of a row: the lines that compute it, and its text."""

    lines: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which tiles a box of rows sees: the lines that find it out, and the ends of ranges by the names of their
    fields."""

    lines: tuple[str, ...]
    visible: tuple[tuple[str, str], ...]
    full: tuple[tuple[str, str], ...]
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Word:
    """The lines that list 32 tiles as bits: ``visible_word``, and ``partial_word`` of those that need the mask."""

    lines: tuple[str, ...]


def logits(plan: Plan) -> Logits:
    """Return the lines of the logits."""
    variant = plan.variant
    folded = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math, heads=plan.box_heads)
    value = split_keys(folded.value, _KV_FIRST, _KEY) if plan.fast_math else folded.value
    work: dict[str, None] = {}
    steps = []
    multiplier = ""
    for partial in (True, False):
        bound = _elements(plan, ragged=partial)
        scored = emit_for(plan, CUDA, [value, folded.multiplier], bound)
        hoisted, body = list(scored.hoisted), list(scored.body)
        if variant.score is not None:
            body.append(f"x = {scored.results[0]};")
        if partial:
            mask = masking(plan, bound, declared([*hoisted, *body]))
            hoisted += [line for line in (*mask.hoisted, *mask.ends) if line not in hoisted]
            body += [*mask.body, mask.test]
        row, tile, shared = _split(plan, hoisted)
        work |= dict.fromkeys(shared)
        steps.append(_steps(plan, tile, row, body))
        multiplier = scored.results[1]
    lines = list(work)
    if variant.score is None:
        lines, multiplier = ["const float scale_log2e = softmax_scale * kLog2e;", *lines], "scale_log2e"
    elif not re.fullmatch(r"[\w.]+", multiplier):
        lines, multiplier = [*lines, f"const float scale_log2e = {multiplier};"], "scale_log2e"
    return Logits(tuple(lines), steps[0], steps[1], multiplier, _drops_products(folded.value))


def _drops_products(value: Expr) -> bool:
    """Whether a condition that asks for the key has an arm without the product.

    What the compiler knows of a lane's keys, such as that they are even, would decide it for half of the elements: what
    these hold, it would write between the products, and ptxas would serialize them.
    """
    return any(
        isinstance(node, Op)
        and node.op == "select"
        and names(node.args[0]) & _KEY_NAMES
        and any(PRODUCT.name not in names(arm) for arm in node.args[1:])
        for node in walk(value)
    )


def sink(plan: Plan, before: Iterable[str]) -> Sink | None:
    """Return the sink of a row of the tile ``work``, or None; ``before`` are lines whose names are not used again."""
    if plan.variant.sink is None:
        return None
    own = {"h": "h", "hk": "work.hk"} if plan.pack_gqa else {"h": "work.h", "hk": "(work.h / group)"}
    bound = {name: Binding(text) for name, text in {"b": "work.b", **own}.items()}
    code = emit_for(plan, CUDA, [plan.variant.sink], scalar_bindings(plan, CUDA) | bound, taken=declared(before))
    return Sink((*code.hoisted, *code.body), code.results[0])


def _steps(plan: Plan, tile: Sequence[str], row: Sequence[str], body: Sequence[str]) -> Steps:
    """Return the lines of a tile, each where it runs least often."""
    varying = {"x", *_row_names(plan), *declared(row)}
    key, element = [], []
    for line in body:
        if varying & set(re.findall(r"\w+", line)):
            element.append(line)
            varying.update(declared([line]))
        else:
            key.append(line)
    key = used(key, element)
    row = used(row, element)
    row = [*_row_lines(plan, "\n".join([*row, *element])), *row]
    texts = set(re.findall(r"\w+", "\n".join(element)))
    return Steps(
        tile=tuple(used(tile, [*row, *key, *element])),
        row=tuple(row),
        row_values=tuple((type, name) for type, name in declarations(row) if name in texts),
        key=(*_key_lines("\n".join([*key, *element])), *key),
        element=tuple(element),
    )


@dataclass(frozen=True, slots=True)
class Masking:
    """Lines that stand before the loop over keys or queries; those of what it goes along; those that say, by ``ends``,
    which keys a query sees; and the line that masks an element."""

    hoisted: Sequence[str]
    body: Sequence[str]
    ends: Sequence[str]
    test: str


def masking(
    plan: Plan, bound: Mapping[str, Binding], taken: Iterable[str], *, key: str = "key", along: Along = KEYS
) -> Masking:
    """Return the lines that mask an element: by the keys that its query sees, and what else the mask asks for.

    Ends are counted from the first key of a lane, so that an element compares them with constants: ``key`` is its
    distance from that.
    """
    intervals, rest = own_intervals(plan.variant.mask, facts_of(plan))
    ends: dict[str, Expr] = {}
    seen, hidden = [], []
    for number, interval in enumerate(intervals):
        suffix = f"_{number}" if len(intervals) > 1 else ""
        below, above = f"visible_from{suffix}", f"visible_to{suffix}"
        if interval.lo is not None:
            ends[below] = interval.lo
        ends[above] = SEQLEN_K if interval.hi is None else minimum(interval.hi, SEQLEN_K)
        seen.append(f"{key} >= {below} && {key} < {above}" if below in ends else f"{key} < {above}")
        hidden.append(f"{key} < {below} || {key} >= {above}" if below in ends else f"{key} >= {above}")
    exprs = [Op("sub", (from_zero(plan, end), _KV_FIRST), Type.INT) for end in ends.values()]
    code = emit_for(plan, CUDA, [*exprs, rest], bound, taken=taken, inner=along.axis)
    *texts, condition = code.results
    lines = [f"const int {name} = {text};" for name, text in zip(ends, texts, strict=True)]
    if len(seen) == 1 and rest == TRUE:
        test = hidden[0]
    else:
        if len(seen) > 1:
            seen = [" || ".join(f"({each})" if "&&" in each else each for each in seen)]
        if rest != TRUE:
            seen.append(f"({condition})" if "||" in condition or "?" in condition else condition)
        test = f"!({' && '.join(seen)})"
    return Masking(code.hoisted, code.body, lines, f"if ({test}) x = kMasked;")


def from_zero(plan: Plan, end: Expr) -> Expr:
    """Return the end of an interval such that any key can be subtracted from it in int32: all ends before the first key
    are alike, and so are all behind the last one."""
    lowest, highest = bounds(end, known_ranges(plan))
    end = end if highest <= INT32[1] else minimum(end, SEQLEN_K)
    return end if lowest - MAX_SEQLEN >= INT32[0] else maximum(end, integer(0))


def _elements(plan: Plan, *, ragged: bool) -> dict[str, Binding]:
    """Return the bindings of an element. Rows beyond the end repeat the last one; keys may lie beyond it if ragged."""
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    heads = {"h": Binding("h", _Q)} if plan.pack_gqa else {}
    rows = {
        "q": Binding("q_row", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _Q, below=frozenset({"total_q"})),
        "kv": Binding("kv", _KV, below=keys),
        "kv_global": Binding("kv_packed", _KV, below=keys),
        PRODUCT.name: Binding("x", _Q | _KV),
        _KV_FIRST.name: Binding("kv_first", _Q),
        _KEY.name: Binding("key", _KV),
        "q_start": Binding("q_begin"),
        "kv_start": Binding("k_begin"),
    }
    return scalar_bindings(plan, CUDA) | heads | rows


def _key_lines(texts: str) -> list[str]:
    """Return the lines that say which key an element belongs to, as far as these texts use it."""
    lines = []
    if re.search(r"\b(key|kv|kv_packed)\b", texts):
        lines.append("const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane")
    if re.search(r"\bkv(_packed)?\b", texts):
        lines.append("const int kv = kv_first + key;")
    if re.search(r"\bkv_packed\b", texts):
        lines.append("const int kv_packed = k_begin + kv;")
    return lines


def used(lines: Sequence[str], users: Iterable[str]) -> list[str]:
    """Return the declarations whose names are used by later ones or by the users."""
    kept: list[str] = []
    words = set(re.findall(r"\w+", "\n".join(users)))
    for line in reversed(lines):
        if not declared([line]) or words.intersection(declared([line])):
            kept.insert(0, line)
            words |= set(re.findall(r"\w+", line))
    return kept


def queries(plan: Plan, rows: str) -> str:
    """Return the text of how many queries so many rows hold: each has one, or all heads of a group have one."""
    return f"({rows} >> group_bits)" if plan.pack_gqa else rows


def _row_lines(plan: Plan, texts: str) -> list[str]:
    """Return the lines that name the query of a row and, where rows are of several heads, its head."""
    asked = [name for name in (*_QUERY_NAMES, "h") if re.search(rf"\b{name}\b", texts)]
    first, lines = "q_first + 8 * row", []
    if plan.pack_gqa:
        first = "q_first + (row_in_group + 8 * row >> group_bits)"
        if "h" in asked:
            lines.append("const int h = (hk << group_bits) + (row_in_group + 8 * row & group - 1);")
    if set(asked) <= {"h"}:
        return lines
    lines.append(f"const int q_row = min({first}, seqlen_q - 1);  // rows behind the end repeat the last one")
    if "q_pos" in asked:
        lines.append("const int q_pos = q_row + (seqlen_k - seqlen_q);")
    if "q_packed" in asked:
        lines.append("const int q_packed = q_begin + q_row;")
    return lines


def _row_names(plan: Plan) -> tuple[str, ...]:
    """Return the names that differ from row to row."""
    return (*_QUERY_NAMES, "h") if plan.pack_gqa else _QUERY_NAMES


def _split(plan: Plan, lines: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the lines that depend on the row, those that are the same for all rows of a tile of keys, and those that
    are the same for a tile of work."""
    row_names, tile_names = set(_row_names(plan)), {_KV_FIRST.name}
    row, tile, work = [], [], []
    for line in lines:
        words = set(re.findall(r"\w+", line))
        if words & row_names:
            row.append(line)
            row_names.update(declared([line]))
        elif words & tile_names:
            tile.append(line)
            tile_names.update(declared([line]))
        else:
            work.append(line)
    return row, tile, work


_DECLARATION = re.compile(r"(const )([\w ]+?)( ?[ *] ?)(\w+) = ")


def _declaration(line: str) -> tuple[str, str]:
    """Return the type of a field that can hold what a line declares, and its name."""
    found = _DECLARATION.match(line)
    assert found is not None, line
    return f"const {found[2]}*" if "*" in found[3] else found[2], found[4]


def declarations(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return what lines that declare something declare: a type that can hold it, and its name."""
    return [_declaration(line) for line in lines]


def declared(lines: Iterable[str]) -> list[str]:
    """Return the names that statements declare."""
    return [found[4] for line in lines if (found := _DECLARATION.match(line))]


@dataclass(frozen=True, slots=True)
class Elements:
    """The mask of one element of the classifier: what comes before all, lines for the element, and the test."""

    hoisted: tuple[str, ...]
    lines: tuple[str, ...]
    visible: str


def elements(plan: Plan) -> Elements:
    """Return the mask of one pair of row and key, neither of which need be inside the sequence."""
    bound = _elements(plan, ragged=True)
    masked = emit_for(plan, CUDA, [plan.variant.mask], bound)
    row, _, work = _split(plan, masked.hoisted)
    texts = "\n".join([*row, *masked.body, *masked.results])
    lines = []
    if re.search(r"\bq_pos\b", texts):
        lines.append("const int q_pos = q_row + (seqlen_k - seqlen_q);")
    if re.search(r"\bq_packed\b", texts):
        lines.append("const int q_packed = q_begin + q_row;")
    if re.search(r"\bkv_packed\b", texts):
        lines.append("const int kv_packed = k_begin + kv;")
    return Elements(tuple(work), (*lines, *row, *masked.body), masked.results[0])


# --- which tiles a box of rows sees -------------------------------------------------------------------------


def tiles(plan: Plan, along: Along = KEYS) -> Tiles:
    """Return the ranges of visible and of full tiles along an axis, or the hull that a listing goes through."""
    found = bands(plan.variant.mask, facts_of(plan), over=along.axis, heads=plan.box_heads)
    if plan.driver != "ranges":
        texts, lines = emit_named(plan, CUDA, hull_ends(plan, found, along), along)
        lines += [f"const int {name} = {text};" for name, text in texts.items() if text != name]
        return Tiles(with_corners(lines, along=along), (("visible_lo", "visible_hi"),), (), texts)
    bounded = Bands(found.visible, (), exact=True)
    nothing = (integer(0), integer(0))  # where the mask is false whatever is called: one range, without a tile
    visible = list(segments(bounded, along.tile, along.length, facts_of(plan)).partial) or [nothing]
    full = [inward(plan, interval, along) for interval in found.full]
    ends = numbered("visible", visible) | numbered("full", full)
    texts, lines = emit_named(plan, CUDA, {name: settled(plan, end, along) for name, end in ends.items()}, along)
    fields = list(ends)
    pairs = [(fields[i], fields[i + 1]) for i in range(0, len(fields), 2)]
    corners = with_corners(lines, list(texts.values()), along=along)
    return Tiles(corners, tuple(pairs[: len(visible)]), tuple(pairs[len(visible) :]), texts)


def with_corners(lines: Sequence[str], others: Sequence[str] = (), *, along: Along = KEYS) -> tuple[str, ...]:
    """Return the lines behind definitions of the corners that they, or the ``others``, use."""
    texts = "\n".join([*lines, *others])
    if along is QUERIES:
        # a tile behind the used keys has a key of its own all the same, which a mask may ask about
        hi = "const int kv_hi = max(min(kv_start + kBlockN, seqlen_k) - 1, kv_start);"
        return (*([hi] if "kv_hi" in texts else []), *lines)
    corners = []
    if "q_pos_lo" in texts:
        corners.append("const int q_pos_lo = q_start + (seqlen_k - seqlen_q);")
    if "q_pos_hi" in texts:
        corners.append("const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);")
    if re.search(r"\bh_(lo|hi)\b", texts):
        corners.append("const int h_lo = hk << group_bits, h_hi = h_lo + (group - 1);")
    return (*corners, *lines)


def word(plan: Plan) -> Word:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.driver == "tile_map":
        rows = "b * stride_tile_map_b + h * stride_tile_map_h + q_start / kBlockM * stride_tile_map_q"
        return Word(
            (
                f"const int* tile_map = tile_map_ptr + {rows};",
                "const uint32_t partial_word = tile_map[words + word];",
                "const uint32_t visible_word = tile_map[word] | partial_word;",
            )
        )
    may, must = classify(plan.variant.mask, facts_of(plan), heads=plan.box_heads)
    code = emit_for(plan, CUDA, [may, must], corner_bindings(plan, CUDA), prefix="tiles_")
    lines = ["const int candidate = 32 * word + lane;"]
    if {"kv_lo", "kv_hi"} & (names(may) | names(must)):
        lines += ["const int kv_lo = candidate * kBlockN, kv_hi = kv_lo + (kBlockN - 1);"]
    listed = "candidate >= visible_lo && candidate < visible_hi"
    seen = listed if may == TRUE else f"{listed} && ({code.results[0]})"
    # the mask's code runs in the ragged last tile too, since keys end in it
    whole = "false" if must == FALSE else f"({code.results[1]}) && (candidate + 1) * kBlockN <= seqlen_k"
    lines += [
        *code.hoisted,
        f"const bool seen = {seen};",
        "const uint32_t visible_word = __ballot_sync(~0u, seen);",
        f"const uint32_t partial_word = __ballot_sync(~0u, !({whole}));",
    ]
    return Word(with_corners(lines))
