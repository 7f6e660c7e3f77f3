"""Differences of a call from the float64 reference, by head, row and tile.

Chosen rows alone are computed again, so that long calls can be looked at. How much a result may differ is what
``attngen verify`` allows: a multiple of the error of plain PyTorch in the same dtype, on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.inspect.contract import (
    LSE_TOLERANCE,
    MAX_ERROR_FACTOR,
    QUANTIZED_LSE_TOLERANCE,
    SCORED_MAX_ERROR_FACTOR,
    exact_float32,
)
from attngen.inspect.gradient_contract import units_of_sums
from attngen.inspect.heat_map import HeatMap
from attngen.inspect.scores import Chosen, bound, numbers, sequence_of
from attngen.lang.dropout import RNG_STATE
from attngen.lang.eager import evaluate
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import Call, out_dtype_of
from attngen.runtime.arguments.dropout import draw, kept, rate_of
from attngen.runtime.arguments.given import Given
from attngen.runtime.launch.gradients import differentiable
from attngen.runtime.operations.attention import entry as calls
from attngen.runtime.operations.attention import introspection
from attngen.runtime.reference.eager import OneSequence, attend_rows, names_of, scores_of, weights_of, without_keys

#: Logits of all chosen rows and heads up to which all rows are compared, where the caller names none, and how many rows
#: of each sequence otherwise.
ALL_ROWS, SAMPLED = {"cpu": 2**25, "cuda": 2**33}, 256

#: Logits that are held at a time.
_CHUNK = {"cpu": 2**22, "cuda": 2**27}

#: Rows and columns of a tile where no kernel says it.
TILE = 128

#: Gradients may be off by this many roundings of their largest element: a kernel rounds P, dS and what it writes.
GRADIENT_ROUNDINGS = 4.0

#: Relative error of the hardware's approximate functions in a score (PTX ISA, tanh.approx.f32), in kernels of 16 bits.
_APPROXIMATE = 2.0**-11

#: Tiles that are listed.
_LISTED = 12


@dataclass(frozen=True)
class Difference:
    """A tile in which something differs by more than is allowed; ``row`` is its worst: a query, of dk and dv a key."""

    what: str
    b: int
    head: int
    tile: int
    rows: tuple[int, int]  # of the tile, the last one included
    row: int
    error: float
    allowed: float
    count: int  # rows that differ

    def __str__(self) -> str:
        kind = "keys" if self.what in ("dk", "dv") else "queries"
        return (
            f"{self.what}: sequence {self.b}, head {self.head}, tile {self.tile} ({kind} {self.rows[0]} to "
            f"{self.rows[1]}): {self.count} differ, most of all {self.row} by {self.error:.2e}, "
            f"allowed {self.allowed:.2e}"
        )


@dataclass(frozen=True)
class Part:
    """One result of one sequence: ``error`` is the largest of each row, (heads, rows), float64; infinite for a NaN."""

    what: str
    b: int
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    error: Tensor
    allowed: float
    tile: int

    @property
    def largest(self) -> float:
        """The largest error."""
        return float(self.error.max()) if self.error.numel() else 0.0

    def differences(self) -> Iterator[Difference]:
        """Yield the tiles in which something is wrong."""
        wrong = self.error > self.allowed
        if not wrong.any():
            return
        tiles = torch.tensor(self.rows, dtype=torch.int64, device="cpu") // self.tile
        for place, head in enumerate(self.heads):
            for tile in tiles[wrong[place]].unique().tolist():
                inside = tiles == tile
                errors = torch.where(inside, self.error[place], -1.0)
                worst = int(errors.argmax())
                yield Difference(
                    self.what, self.b, head, tile, (tile * self.tile, (tile + 1) * self.tile - 1), self.rows[worst],
                    float(errors[worst]), self.allowed, int((wrong[place] & inside).sum()),
                )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Result of ``attngen.debug.compare``. It prints; ``ok`` says whether nothing differs by more than is allowed."""

    name: str
    ran: str
    parts: tuple[Part, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether every row that was compared is within what is allowed."""
        return not self.differences

    @property
    def differences(self) -> list[Difference]:
        """The tiles in which something differs by more than is allowed, worst first."""
        differences = [one for part in self.parts for one in part.differences()]
        return sorted(differences, key=lambda one: one.error / (one.allowed or 1e-300), reverse=True)

    def plot(self, what: str = "out", *, b: int | None = None) -> HeatMap:
        """Return the heat map of errors in terms of what is allowed, heads down and rows across, of one sequence.

        ``what`` is out or lse, or a gradient that was compared; the full shade is what is allowed and more. Without
        ``b``, of the sequence in which it differs most. Raises CallError.
        """
        known = [part for part in self.parts if part.what == what and b in (None, part.b)]
        if not known:
            names = sorted({f"{part.what} of sequence {part.b}" for part in self.parts})
            raise CallError(f"{what} was not compared; compared: {', '.join(names) or 'nothing'}")
        part = max(known, key=lambda one: one.largest)
        values = torch.where(part.error.isinf(), 1e30, part.error) / (part.allowed or 1e-300)
        title = f"{self.name}, error of {what} of sequence {part.b} by what is allowed"
        across = "keys" if what in ("dk", "dv") else "queries"
        return HeatMap(title, values, "heads", across, tuple(map(str, part.heads)), 1.0)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.ran}"] + ([self.note] if self.note else [])
        for what in dict.fromkeys(part.what for part in self.parts):
            parts = [part for part in self.parts if part.what == what]
            worst = max(parts, key=lambda one: one.largest / (one.allowed or 1e-300))
            rows = sum(part.error.numel() for part in parts)
            lines.append(
                f"  {what:8s} largest error {worst.largest:.2e}, allowed {worst.allowed:.2e}, of {rows} rows of heads"
            )
        differences = self.differences
        lines += [f"  {one}" for one in differences[:_LISTED]]
        if len(differences) > _LISTED:
            lines.append(f"  and {len(differences) - _LISTED} tiles more")
        return "\n".join(lines)

    __repr__ = __str__


def compare(
    q: Tensor, k: Tensor, v: Tensor, *, variant: str | Variant = "full", rows: Chosen = None, heads: Chosen = None,
    b: Chosen = None, gradients: bool = False, dout: Tensor | None = None, **options: Any,
) -> Comparison:  # fmt: skip
    """Run a call as ``attngen.attention`` would, and compare chosen rows with the reference in float64.

    Takes the arguments of a call. ``rows``, ``heads`` and sequences ``b`` are a number, a slice, several, or all if
    left out; of calls with very many logits, rows are then taken from all over each sequence. With ``gradients`` those
    of q, k, v and of tensors with ``grad: true`` are compared, too: dq of the chosen rows, the others in full. ``dout``
    is that of the output, random if left out. Waits for the GPU. Raises what the call raises.
    """
    given_options = dict(options)
    call, given = bound(q, k, v, variant, options)
    if RNG_STATE.name in given.arguments:  # the call and the reference drop the same pairs
        state = options.get(RNG_STATE.name)
        given_options[RNG_STATE.name] = draw(q.device) if state is None else state
        call, given = bound(q, k, v, variant, given_options)
    if gradients and call.layout == "paged":
        raise CallError("keys in pages have no gradient to compare")
    if dout is not None and (not isinstance(dout, Tensor) or tuple(dout.shape) != tuple(call.out_shape())):
        got = tuple(dout.shape) if isinstance(dout, Tensor) else type(dout).__name__
        raise CallError(f"dout must be a torch.Tensor of shape {tuple(call.out_shape())}, as the output, got {got}")
    if gradients and call.descales:
        raise CallError("quantized tensors have no gradient to compare")
    ran, tile_m, tile_n = _who(call, given, variant, options)
    with exact_float32():
        out, lse = _run(given, given_options, variant, lse=call.variant.has_lse)
        sampled = False
        parts: list[Part] = []
        chosen_heads = numbers("heads", heads, call.heads)
        for sequence in numbers("b", b, call.batch):
            with torch.no_grad():
                one = sequence_of(call, given, sequence, torch.float64)
                some = _rows(rows, one, len(chosen_heads), tile_m, call.device.type)
                sampled |= rows is None and len(some) < one.q.shape[0]
                parts += _compare_rows(call, one, given.q.dtype, some, chosen_heads, out, lse, tile_m, ran.kernel)
        if gradients:
            parts += _compare_gradients(call, given, given_options, variant, dout, rows, heads, b, (tile_m, tile_n))
    note = "rows are a sample, from all over each sequence; rows= names others" if sampled else ""
    return Comparison(call.variant.name, ran.text, tuple(parts), note)


@dataclass(frozen=True)
class _Ran:
    text: str
    kernel: bool


def _who(call: Call, given: Given, variant: Any, options: dict[str, Any]) -> tuple[_Ran, int, int]:
    """The kernel that runs the call, and the rows and columns of its tiles."""
    if not torch_state.on_gpu(given.q) or given.backend == "reference":
        why = "as backend= says" if torch_state.on_gpu(given.q) else f"q is on {call.device.type}"
        text = f"the reference in {_short(given.q.dtype)} beside float64, since {why}"
        return _Ran(text.replace("since as", "as"), False), TILE, TILE
    keywords = {name: value for name, value in options.items() if name not in ("tile_map", "dropout_p")}
    explanation = introspection.explain(given.q, given.k, given.v, variant=variant, **keywords)
    kernel = explanation.kernel
    if kernel is None:
        return _Ran(f"{explanation.runs}: {explanation.reason.splitlines()[0]}", True), TILE, TILE
    group = call.heads // call.kv_heads if kernel.pack_gqa else 1
    tile_m = max(kernel.tile_m // group, 1)
    return _Ran(f"{kernel.full_name}, tiles of {tile_m} x {kernel.tile_n}", True), tile_m, kernel.tile_n


def _run(given: Given, options: dict[str, Any], variant: Any, *, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return out and log-sum-exp of the call, None without ``lse``."""
    keywords = {name: value for name, value in options.items() if name != "return_lse"}
    results: Any
    with torch.no_grad():
        if given.form == "paged":
            rest = {
                n: t
                for n, t in keywords.items()
                if n not in ("page_table", "seqused_k", "max_seqlen_k", "deterministic")
            }
            results = calls.attention_paged(
                given.q, given.k, given.v, keywords["page_table"], keywords["seqused_k"], variant=variant,
                return_lse=lse, **rest,
            )  # fmt: skip
        else:
            results = _attend((given.q, given.k, given.v), keywords, variant, lse=lse)
    return results if lse else (results, None)


def _attend(inputs: Sequence[Tensor], options: dict[str, Any], variant: Any, *, lse: bool = False) -> Any:
    """Call ``attention``, or ``attention_varlen`` where there are offsets."""
    (q, k, v), rest = inputs, dict(options)
    if rest.get("cu_seqlens_q") is None:
        return calls.attention(q, k, v, variant=variant, return_lse=lse, **rest)
    packing = [rest.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    return calls.attention_varlen(q, k, v, *packing, variant=variant, return_lse=lse, **rest)


def _rows(chosen: Chosen, one: OneSequence, heads: int, tile: int, device: str) -> tuple[int, ...]:
    """Return the rows to compare: those that were chosen, all, or of very many some: beside the edges of tiles, too."""
    count, keys = one.q.shape[0], one.k.shape[0]
    if chosen is not None or count * keys * heads <= ALL_ROWS.get(device, ALL_ROWS["cuda"]):
        return numbers("rows", chosen, count)
    edges = [edge for start in range(0, count, tile) for edge in (start, min(start + tile, count) - 1)]
    step = max(2 * len(edges) // SAMPLED, 1)
    spread = torch.linspace(0, count - 1, SAMPLED // 2, dtype=torch.float32, device="cpu").long().tolist()
    return tuple(sorted({*edges[::step], *spread, 0, count - 1}))


def _compare_rows(
    call: Call, one: OneSequence, dtype: torch.dtype, rows: Sequence[int], heads: Sequence[int], out: Tensor,
    lse: Tensor | None, tile: int, kernel: bool,
) -> list[Part]:  # fmt: skip
    """Errors of out and log-sum-exp, if there is one, of some rows of a sequence against the reference."""
    which = torch.tensor(heads, device=call.device, dtype=torch.int64)
    found_out, found_lse = _of_sequence(call, out, lse, one)
    errors, lse_errors = [], []
    plain_error = largest = largest_lse = logit = 0.0
    step = max(_CHUNK.get(call.device.type, _CHUNK["cuda"]) // max(len(heads) * one.k.shape[0], 1), 1)
    for first in range(0, len(rows), step):
        where = torch.tensor(rows[first : first + step], device=call.device, dtype=torch.int64)
        exact, exact_lse = _exact(call, one, where, which)
        plain = _plain(call, one, where, which, dtype) if one.k.shape[0] else exact
        errors.append(_apart(found_out[where][:, which].double(), exact).amax(-1).T)
        if found_lse is not None:
            lse_errors.append(_apart(found_lse[which][:, where].double(), exact_lse))
        plain_error = max(plain_error, _largest(_apart(plain.double(), exact)))
        largest = max(largest, _largest(exact.abs()))
        finite = exact_lse[exact_lse.isfinite()].abs()
        largest_lse = max(largest_lse, _largest(finite))
        if call.variant.score is not None and one.k.shape[0]:
            seen, logits = scores_of(call, one, where, torch.float64, heads=which)
            logit = max(logit, _largest(torch.where(seen, logits, 0.0).abs()))
    scored = call.variant.score is not None
    factor = SCORED_MAX_ERROR_FACTOR if scored else MAX_ERROR_FACTOR
    half = dtype in (torch.bfloat16, torch.float16)
    approximate = factor * _APPROXIMATE * logit if scored and half and kernel else 0.0
    unit = torch.finfo(out_dtype_of(dtype)).eps
    allowed = factor * plain_error + (unit + approximate) * largest
    tolerance = QUANTIZED_LSE_TOLERANCE if call.descales else LSE_TOLERANCE
    lse_allowed = tolerance * (1 + largest_lse) + approximate
    if dtype == torch.float64:
        lse_allowed = torch.finfo(dtype).eps * 64 * (1 + largest_lse)
    shape = len(heads), len(rows)
    part = Part("out", one.index, tuple(heads), tuple(rows), _joined(errors, shape), allowed, tile)
    if lse is None:
        return [part]
    sums = replace(part, what="lse", error=_joined(lse_errors, shape), allowed=lse_allowed)
    return [part, sums]


def _joined(parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    return torch.cat(list(parts), dim=1).cpu() if parts else torch.zeros(shape, dtype=torch.float64, device="cpu")


def _exact(call: Call, one: OneSequence, where: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (rows, heads, d) and lse (heads, rows) in float64."""
    if one.k.shape[0]:
        return attend_rows(call, one, where, torch.float64, heads=which)
    return without_keys(call, one, len(where), torch.float64, heads=which)


def _of_sequence(call: Call, out: Tensor, lse: Tensor | None, one: OneSequence) -> tuple[Tensor, Tensor | None]:
    """Return the results of one sequence: (queries, heads, d), and (heads, queries) if there is a log-sum-exp."""
    if call.order == "thd":
        place = slice(one.q_offset, one.q_offset + one.q.shape[0])
        return out[place], None if lse is None else lse[:, place]
    own = out[one.index]
    return own.transpose(0, 1) if call.order == "bhsd" else own, None if lse is None else lse[one.index]


def _apart(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of each element; 0 where both are the same infinity, infinite where one is NaN."""
    return torch.where(actual == expected, 0.0, (actual - expected).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _plain(call: Call, one: OneSequence, where: Tensor, which: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out (rows, heads, d) of plain PyTorch, which rounds each step to the dtype of q, save the score."""
    compute = torch.float32 if call.descales else dtype
    groups = call.heads // call.kv_heads
    visible, _ = scores_of(call, one, where, torch.float64, heads=which)
    q = one.q[where][:, which].to(compute).transpose(0, 1)
    k, v = (t[:, which // groups].to(compute).transpose(0, 1) for t in (one.k, one.v))
    s = (q @ k.transpose(1, 2)) * call.scale
    if call.variant.score is not None:
        place = one.q.shape[0], one.k.shape[0], one.q_offset, one.k_offset
        names = names_of(call, one.index, where, *place, heads=which)
        s = evaluate(call.variant.score, {**names, "s": s.float()}, call.tensors, guard=visible).to(compute)
    s = torch.where(visible, s.broadcast_to(visible.shape), -math.inf)
    if call.variant.sink is not None:
        from attngen.runtime.reference.sinks import sinks

        sink = sinks(call, torch.float32)[one.index][which].to(compute)
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:2], 1)], dim=-1)
    if call.variant.has_lse:
        weights = torch.softmax(s, dim=-1).nan_to_num(nan=0.0)[..., : one.k.shape[0]]
    else:
        weights = weights_of(call.variant, s)
    if call.variant.dropout:
        stays = kept(call, one.index, where, one.k.shape[0])[which]
        weights = torch.where(stays, weights * rate_of(call)[1], 0.0)
    if call.descales:
        weights = weights.to(torch.float8_e4m3fn).to(compute)
    out: Tensor = (weights @ v).transpose(0, 1)
    return out


def _compare_gradients(
    call: Call, given: Given, options: dict[str, Any], variant: Any, dout: Tensor | None, rows: Chosen, heads: Chosen,
    b: Chosen, tiles: tuple[int, int],
) -> list[Part]:  # fmt: skip
    """Errors of the gradients against those of the reference in float64."""
    out_dtype = out_dtype_of(given.q.dtype)
    if dout is None:
        generator = torch.Generator(call.device).manual_seed(0)
        dout = torch.randn(call.out_shape(), generator=generator, device=call.device, dtype=torch.float32).to(out_dtype)
    learned = [name for name in differentiable(call) if name in options]

    def differentiated(dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (given.q, given.k, given.v)]
        own = {name: options[name].detach().to(dtype or options[name].dtype).requires_grad_() for name in learned}
        keywords = {**options, **own}
        if dtype is not None:
            keywords["backend"] = "reference"
        out = _attend(leaves, keywords, variant)
        return list(torch.autograd.grad(out, [*leaves, *own.values()], dout.to(out.dtype), allow_unused=True))

    exact, actual = differentiated(torch.float64), differentiated(None)
    roundings, lost = GRADIENT_ROUNDINGS * torch.finfo(out_dtype).eps, {}
    if out_dtype != torch.float64:
        roundings += units_of_sums(call) * torch.finfo(torch.float32).eps
        lost = _cancelled(call, given, dout)
    parts = []
    for what, one, other, tile in zip(("dq", "dk", "dv"), actual, exact, (tiles[0], *[tiles[1]] * 2), strict=False):
        error = _apart(one.double(), other).amax(-1)
        count = call.heads if what == "dq" else call.kv_heads
        groups = call.heads // call.kv_heads
        query_heads = numbers("heads", heads, call.heads)
        which = query_heads if what == "dq" else tuple(dict.fromkeys(head // groups for head in query_heads))
        assert count >= len(which)
        allowed = roundings * _largest(other.abs()) + lost.get(what, 0.0)
        for sequence in numbers("b", b, call.batch):
            of_one = _of_gradient(call, error, sequence, what)
            some = numbers("rows", rows if what == "dq" else None, of_one.shape[1])
            picked = of_one[list(which)][:, list(some)].cpu()
            parts.append(Part(what, sequence, which, some, picked, allowed, tile))
    for name, one, other in zip(learned, actual[3:], exact[3:], strict=True):
        error = _apart(one.double(), other).reshape(1, -1).cpu()
        everywhere = tuple(range(error.shape[1]))
        parts.append(Part(f"d{name}", 0, (0,), everywhere, error, roundings * _largest(other.abs()), TILE))
    return parts


def _cancelled(call: Call, given: Given, dout: Tensor) -> dict[str, float]:
    """The error of dq and dk that rounding of dP and D to float32 explains.

    Where a row sees one key these cancel: its dq, and that key's dk, are exactly 0.
    """
    q, k, v = (_largest(t.detach().double().abs()) for t in (given.q, given.k, given.v))
    each = 2 * torch.finfo(torch.float32).eps * _largest(dout.double().abs().sum(-1)) * v * call.scale
    rows = dout.shape[:-1].numel() / max(call.heads, 1)
    return {"dq": each * k, "dk": each * q * math.sqrt(rows)}


def _of_gradient(call: Call, error: Tensor, b: int, what: str) -> Tensor:
    """Return the errors of the rows of one sequence, (heads, rows)."""
    if call.order == "bhsd":
        return error[b]
    if call.order == "bshd":
        return error[b].T
    starts = call.cu_seqlens_q if what == "dq" else call.cu_seqlens_k
    assert starts is not None
    return error[int(starts[b]) : int(starts[b + 1])].T


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
