"""Values for the scalars and tensors of a variant, chosen by its declarations: dtype, range, order, shape.

Nothing here knows a variant by name. What a declaration leaves open is filled so that masks get something to do:
integers of the size of a sequence, nondecreasing tensors as staircases, bools in blocks that make full, empty and
mixed tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attngen.dtypes import dtype as dtype_row
from attngen.inspect.cases import Case
from attngen.lang.biases import is_of_tile
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.intervals import bounds
from attngen.lang.ir import Expr, Load, walk
from attngen.lang.listed import EXTRA_INDICES, EXTRA_TOPK_LENGTH, INDICES, TOPK_LENGTH
from attngen.lang.ranges import DTYPE_RANGES, Range
from attngen.lang.variant import Bound, Scalar, Tensor, Variant

Number = bool | int | float

#: Largest tensor whose extents the call chooses; scalars that ask for more are chosen again.
_MAX_ELEMENTS = 2**24

#: Rows and columns of a bool tensor that share their kind: all true, all false, or mixed.
_BLOCK = 48


def arguments_of(
    variant: Variant,
    case: Case,
    layout: str,
    generator: torch.Generator,
    calm: float = 1.0,
    given: Mapping[str, Number] | None = None,
) -> dict[str, Any]:
    """Return every scalar and tensor that a call of the variant passes; tensors on the CPU.

    ``given`` fixes scalars.

    ``case.values`` picks random values, or the least or greatest that is declared. ``calm`` from 1 to 0 narrows
    integer tensors without a declared range from [0, seqlen_k] to 0: they may be indices of something smaller.

    Raises ValueError for a variant whose tensors are huge whatever its scalars are.
    """
    chooser = _Chooser(variant, case, layout, generator, calm, given or {})
    for values in (case.values, "random"):
        arguments = chooser.arguments(values)
        if arguments is not None:
            return arguments
    raise ValueError(f"{variant.name}: its tensors would have more than {_MAX_ELEMENTS:,} elements")


def extents_of(case: Case, layout: str) -> dict[str, int]:
    """Return the extents of a case by the names that shapes may use."""
    packed = layout != "dense"
    seqlen_k = case.max_pages * case.page_size if layout == "paged" else case.seqlen_k
    return {
        "b": case.batch, "h": case.heads, "hk": case.kv_heads, "heads": case.heads, "kv_heads": case.kv_heads,
        "seqlen_q": case.seqlen_q, "seqlen_k": seqlen_k,
        "total_q": sum(case.q_lengths) if packed else case.batch * case.seqlen_q,
        "total_k": sum(case.k_lengths) if packed else case.batch * case.seqlen_k,
    }  # fmt: skip


#: The extents of lists that tensors of lengths count the entries of.
_ENTRIES = {
    length.name: str(indices.shape[-1])
    for indices, length in ((INDICES, TOPK_LENGTH), (EXTRA_INDICES, EXTRA_TOPK_LENGTH))
}


class _Chooser:
    """The choices of one call, all from one generator."""

    def __init__(
        self,
        variant: Variant,
        case: Case,
        layout: str,
        generator: torch.Generator,
        calm: float,
        given: Mapping[str, Number],
    ) -> None:
        self._variant = variant
        self._case = case
        self._layout = layout
        self._generator = generator
        self._calm = calm
        self._given = given
        known = extents_of(case, layout).keys() | {scalar.name for scalar in variant.scalars}
        named = (extent for tensor in variant.tensors for extent in tensor.shape if isinstance(extent, str))
        self._free = frozenset(named) - known  # extents that the call binds
        by_rows = {extent for load in self._loads() for extent, index in self._indices(load)
                   if not is_of_tile(variant, index)}  # fmt: skip
        self._few = self._free - by_rows  # those of groups of sequences or heads

    def arguments(self, values: str) -> dict[str, Any] | None:
        """Return all arguments, or None if a tensor would be too large with such scalars."""
        self._values = values
        self._extents = extents_of(self._case, self._layout)
        self._extents |= dict.fromkeys(self._free, max(self._case.seqlen_k, 1)) | dict.fromkeys(self._few, 1)
        scalars = {scalar.name: self._scalar(scalar) for scalar in self._variant.scalars}
        shaping = {extent for tensor in self._variant.tensors for extent in tensor.shape}
        self._extents |= {name: int(value) for name, value in scalars.items() if name in shaping}
        self._widen_extents(scalars)
        shapes = {t.name: [self._extent(e) for e in t.shape] for t in self._variant.tensors}
        chosen = self._free | scalars.keys()
        if any(chosen & set(t.shape) and math.prod(shapes[t.name]) > _MAX_ELEMENTS for t in self._variant.tensors):
            return None
        passed = {scalar.name: scalars[scalar.name] for scalar in self._variant.arguments}
        return passed | {t.name: self._tensor(t, shapes[t.name]) for t in self._variant.tensors}

    # --- randomness -----------------------------------------------------------------------------------------

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float32, device="cpu"))

    def _integer(self, low: int, high: int) -> int:
        """Return an integer from low to high inclusive, small distances from low as likely as large ones."""
        return min(high, low + int(2 ** (self._uniform() * math.log2(high - low + 1))) - 1) if high > low else low

    # --- extents --------------------------------------------------------------------------------------------

    def _extent(self, extent: int | str) -> int:
        return extent if isinstance(extent, int) else self._extents[extent]

    def _widen_extents(self, scalars: Mapping[str, Number]) -> None:
        """Make extents that the call binds large enough for every index that an expression can form."""
        ranges = self._index_ranges() | {name: (value, value) for name, value in scalars.items()}
        ranges |= {tensor.name: self._limits(tensor) for tensor in self._variant.tensors}
        for load in self._loads():
            for extent, index in self._indices(load):
                if extent in self._free:
                    high = bounds(index, ranges)[1]
                    if math.isfinite(high):
                        self._extents[str(extent)] = max(self._extents[str(extent)], int(high) + 1)

    def _loads(self) -> Iterator[Load]:
        for expression in (self._variant.mask, self._variant.score, self._variant.sink):
            for node in walk(expression) if expression is not None else ():
                if isinstance(node, Load):
                    yield node

    def _indices(self, load: Load) -> Iterator[tuple[int | str, Expr]]:
        """Yield the extent of each axis, and the index along it."""
        yield from zip(self._variant.tensor(load.tensor).shape, load.indices, strict=True)

    def _index_ranges(self) -> dict[str, Range]:
        """Return the ranges of the indices in this call."""
        case, extents = self._case, self._extents
        used = case.k_lengths if case.used is None else case.used
        last_q, last_k = case.seqlen_q - 1, case.seqlen_k - 1
        shortest = min(k - q for q, k in zip(case.q_lengths, used, strict=True))
        ranges: dict[str, Range] = {
            "b": (0, case.batch - 1), "h": (0, case.heads - 1), "hk": (0, case.kv_heads - 1),
            "q": (0, last_q), "kv": (0, last_k), "q_pos": (shortest, last_k),
            "q_global": (0, extents["total_q"] - 1), "kv_global": (0, extents["total_k"] - 1),
            "seqlen_q": (1, case.seqlen_q), "seqlen_k": (1, case.seqlen_k),
        }  # fmt: skip
        return ranges | {name: (extents[name],) * 2 for name in ("total_q", "total_k", "heads", "kv_heads")}

    def _resolved(self, bound: Bound) -> float | None:
        return self._extents.get(bound, self._case.seqlen_k) if isinstance(bound, str) else bound

    # --- scalars --------------------------------------------------------------------------------------------

    def _scalar(self, scalar: Scalar) -> Number:
        if scalar.const is not None:
            return scalar.const
        if scalar == DROPOUT_P and scalar.name not in self._given:  # a rate near 1 leaves nothing to compare
            return {"least": 0.0, "most": 0.75}.get(self._values, int(512 * self._uniform()) / 1024)
        if scalar.name in self._given:
            return self._given[scalar.name]
        low, high = self._resolved(scalar.min), self._resolved(scalar.max)
        if scalar.dtype == "bool":
            return self._values == "most" or (self._values == "random" and self._uniform() < 0.5)
        if scalar.dtype == "fp32":
            return self._float(low, high)
        least, most = DTYPE_RANGES[scalar.dtype]
        if self._values == "least":
            return int(least if low is None else low)
        if self._values == "most":
            return int(most if high is None else high)
        reach = 2 * max(self._case.seqlen_q, self._case.seqlen_k) + 2
        first = 0 if low is None else int(low)
        if high is not None and high < first:
            first = int(high) - reach
        return self._integer(first, int(min(first + reach, most if high is None else high)))

    def _float(self, low: float | None, high: float | None) -> float:
        """Return a float within the declared range; open ends are taken to be a few units away."""
        if self._values == "least" and low is not None:
            return low
        if self._values == "most" and high is not None:
            return high
        distance = 2.0 ** (7 * self._uniform() - 2)
        if low is not None and high is not None:
            share = self._uniform()
            value = low * (high / low) ** share if low > 0 else low + (high - low) * share
        elif low is not None:
            value = low + distance
        else:
            value = high - distance if high is not None else 2 * self._uniform() - 1
        exact = float(torch.tensor(value, dtype=torch.float32, device="cpu"))  # as a kernel gets it
        return min(exact if low is None else max(exact, low), math.inf if high is None else high)

    # --- tensors --------------------------------------------------------------------------------------------

    def _limits(self, tensor: Tensor) -> Range:
        """Return the inclusive range of a tensor's elements, made finite for integers."""
        low, high = (self._resolved(bound) for bound in tensor.range or (None, None))
        least, most = DTYPE_RANGES[tensor.dtype]
        if dtype_row(tensor.dtype).kind != "int":
            return (least if low is None else low, most if high is None else high)
        first = int(max(least, 0 if low is None else low))
        high = self._extents.get(_ENTRIES.get(tensor.name, ""), high)
        if high is not None:
            return (int(min(first, high)) if low is None else first, int(min(most, high)))
        return (first, int(min(most, first + self._calm * self._case.seqlen_k)))

    def _tensor(self, tensor: Tensor, shape: list[int]) -> torch.Tensor:
        if tensor == RNG_STATE:
            return torch.randint(-(2**63), 2**63 - 1, shape, generator=self._generator, device="cpu")
        dtype = getattr(torch, dtype_row(tensor.dtype).torch)
        kind = dtype_row(tensor.dtype).kind
        if kind == "bool":
            return self._bools(shape)
        low, high = self._limits(tensor)
        if tensor.monotone is not None and tensor.monotone.runs is not None:
            return self._runs(shape, tensor.monotone.axis % len(shape), (low, high), tensor.monotone.runs).to(dtype)
        if self._values != "random" and math.isfinite(low if self._values == "least" else high):
            return torch.full(shape, low if self._values == "least" else high, dtype=dtype, device="cpu")
        if tensor.monotone is not None:
            axis = tensor.monotone.axis % len(shape)
            return self._staircase(shape, axis, (low, high), whole=kind == "int").to(dtype)
        if kind == "int":
            spread = (2, 4, int(high - low))[int(3 * self._uniform())]
            return torch.randint(
                int(low), int(min(high, low + spread)) + 1, shape, generator=self._generator, device="cpu"
            ).to(dtype)
        return self._floats(shape, low, high).to(dtype)

    def _floats(self, shape: list[int], low: float, high: float) -> torch.Tensor:
        if math.isfinite(low) and math.isfinite(high):
            return low + (high - low) * torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return (0.25 * torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")).clamp(
            low, high
        )

    def _runs(self, shape: list[int], axis: int, limits: Range, runs: int) -> torch.Tensor:
        """Return a tensor that goes up by one along ``axis`` within runs of ``runs`` elements, and at some of the first
        of a run by more: as far as the limits leave room."""
        length = shape[axis]
        places = torch.arange(length, device="cpu")
        low = int(limits[0]) if math.isfinite(limits[0]) else 0
        room = int(min(limits[1], low + 4 * self._case.seqlen_k)) - low - length + 1
        jumps = torch.zeros(-(-length // runs), dtype=torch.int64, device="cpu")
        for jump in torch.randint(0, max(len(jumps), 1), (3,), generator=self._generator, device="cpu").tolist():
            jumps[jump:] += runs * self._integer(0, max(room // (3 * runs), 0))
        line = low + places + jumps.repeat_interleave(runs)[:length]
        return line.view([length if n == axis else 1 for n in range(len(shape))]).expand(shape).contiguous()

    def _staircase(self, shape: list[int], axis: int, limits: Range, *, whole: bool) -> torch.Tensor:
        """Return a tensor that never decreases along ``axis``: a few steps in each row, of random places and heights.

        In half of the calls each height is the place of its step, as for the starts of documents.
        """
        length = shape[axis]
        others = [extent for n, extent in enumerate(shape) if n != axis]
        by_place = self._uniform() < 0.5
        rows = []
        for _ in range(math.prod(others)):
            steps = self._integer(1, min(6, max(length, 1)))
            places = torch.randint(0, max(length, 1), (steps,), generator=self._generator, device="cpu").sort().values
            places[0] = 0
            low, high = (limit if math.isfinite(limit) else other for limit, other in zip(limits, (0, 1), strict=True))
            shares = torch.rand(steps, generator=self._generator, dtype=torch.float32, device="cpu").sort().values
            heights = low + (high - low) * shares
            if whole:
                heights = heights.floor()
            if by_place:
                heights = (low + places).clamp(max=high).float()
            rows.append(heights[torch.searchsorted(places, torch.arange(length, device="cpu"), right=True) - 1])
        table = torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float32, device="cpu")
        return table.reshape(*others, length).movedim(-1, axis).contiguous()

    def _bools(self, shape: list[int]) -> torch.Tensor:
        if self._values != "random":
            return torch.full(shape, self._values == "most", dtype=torch.bool, device="cpu")
        noise = torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu") < 0.5
        coarse = [*shape[:-2], *(-(-extent // _BLOCK) for extent in shape[-2:])]
        kind = torch.randint(0, 3, coarse, generator=self._generator, device="cpu")
        for axis in range(max(len(shape) - 2, 0), len(shape)):
            kind = kind.repeat_interleave(_BLOCK, dim=axis).narrow(axis, 0, shape[axis])
        return torch.where(kind == 0, False, torch.where(kind == 1, True, noise))
