"""Values that ``attngen explain`` assumes for the tensors of a mask: computed where they are read, never stored.

A tensor of every pair of 30,000 queries and keys would take gigabytes, so an element is a function of its index, the
seed and the declaration. One sentence for each kind of values says what was assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngen.dtypes import dtype as dtype_row
from attngen.errors import CallError
from attngen.inspect.predicted import BATCH, HEADS, KV_HEADS
from attngen.lang.intervals import bounds
from attngen.lang.ir import Load, walk
from attngen.lang.ranges import DTYPE_RANGES, Range
from attngen.lang.variant import Tensor, Variant

#: Rows and columns of a bool tensor that share their kind: all true, all false, or mixed.
BLOCK = 48

#: Names by which a mask differs from head to head.
HEAD_NAMES = frozenset(("h", "hk", "heads", "kv_heads"))

#: Steps of a tensor that never decreases.
STEPS = 6

#: Multipliers and shifts of SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Assumed:
    """A tensor whose elements are computed when they are read; indexed like a torch tensor, with an index per axis."""

    declared: Tensor
    shape: tuple[int, ...]
    limits: Range
    seed: int

    def __getitem__(self, places: Sequence[torch.Tensor | slice | int]) -> torch.Tensor:
        """The elements at broadcast indices, or of a slice along one axis: int64, float32 or bool."""
        indices = [
            torch.arange(extent, device="cpu")[place] if isinstance(place, slice) else _tensor(place)
            for place, extent in zip(places, self.shape, strict=True)
        ]
        if self.declared.dtype == "bool":
            return self._bools(indices)
        if self.declared.monotone is not None and self.declared.monotone.runs is not None:
            return indices[self.declared.monotone.axis] + int(self.limits[0])
        if self.declared.monotone is not None:
            return self._staircase(indices, self.declared.monotone.axis)
        share = _uniform(_hashed(self.seed, indices))
        low, high = self.limits
        if self._whole:
            steps = torch.exp2(share * math.log2(high - low + 1)).to(torch.int64) - 1
            return (steps + int(low)).clamp(int(low), int(high))
        return (low + (high - low) * share).to(torch.float32)

    @property
    def _whole(self) -> bool:
        return dtype_row(self.declared.dtype).kind == "int"

    def to(self, device: torch.device) -> Assumed:
        """The tensor itself: elements are made on the device of the indices."""
        del device
        return self

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """The values in a sentence."""
        low, high = (int(end) if self._whole else end for end in self.limits)
        if self.declared.dtype == "bool":
            return f"random: blocks of {BLOCK} elements along the last axes all true, all false, or mixed, a third each"
        if self.declared.monotone is not None and self.declared.monotone.runs is not None:
            return f"growing by one along axis {self.declared.monotone.axis}, from {low}"
        if self.declared.monotone is not None:
            values = f"{low} to {high}" if not self._by_place else "each step as high as the place where it starts"
            return (
                f"never decreasing along axis {self.declared.monotone.axis}: {STEPS} steps at random places, {values}"
            )
        if self._whole:
            return f"random integers from {low} to {high}, small ones more often"
        return f"random numbers from {low:g} to {high:g}"

    @property
    def _by_place(self) -> bool:
        """Whether the limits leave room for steps that are as high as their places, as the starts of documents are."""
        assert self.declared.monotone is not None
        return self._whole and self.limits[1] - self.limits[0] >= self.shape[self.declared.monotone.axis] - 1

    def _bools(self, indices: Sequence[torch.Tensor]) -> torch.Tensor:
        coarse = [index if n < len(indices) - 2 else index // BLOCK for n, index in enumerate(indices)]
        kind = _hashed(self.seed, coarse).remainder(3)
        noise = _hashed(self.seed + 1, indices) < 0
        return (kind == 1) | ((kind == 2) & noise)

    def _staircase(self, indices: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        others = [index for n, index in enumerate(indices) if n != axis]
        along, length = indices[axis], max(self.shape[axis], 1)
        low, high = self.limits
        reached = torch.zeros_like(along)  # steps that start at or before the index
        place = torch.zeros_like(along)  # where the last of them starts
        for step in range(1, STEPS):
            start = _hashed(self.seed + step, others).remainder(length) if others else _place(self.seed + step, length)
            passed = start <= along
            reached = reached + passed
            place = torch.where(passed, torch.maximum(place, start), place)
        if self._by_place:
            return place + int(low)
        if self._whole:
            return int(low) + torch.div(reached * int(high - low), STEPS - 1, rounding_mode="floor")
        return (low + (high - low) * reached / (STEPS - 1)).to(torch.float32)


def _tensor(place: torch.Tensor | int) -> torch.Tensor:
    return place if isinstance(place, torch.Tensor) else torch.tensor(place, device="cpu")


def _place(seed: int, length: int) -> torch.Tensor:
    return _mixed(torch.tensor(seed, device="cpu")).remainder(length)


def _hashed(seed: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 64 random bits for each index. Axes along which an index only repeats are left out."""
    bits = _mixed(torch.tensor(seed, device="cpu"))
    for index in indices:
        bits = _mixed(bits + _narrow(index))
    return bits


def _narrow(index: torch.Tensor) -> torch.Tensor:
    for axis, stride in enumerate(index.stride()):
        if stride == 0 and index.shape[axis] > 1:
            index = index.narrow(axis, 0, 1)
    return index


def _mixed(value: torch.Tensor) -> torch.Tensor:
    """Return the finalizer of SplitMix64; products wrap."""
    value = value + _INCREMENT
    for multiplier, shift in zip((*_MULTIPLIERS, 1), _SHIFTS, strict=True):
        value = (value ^ ((value >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    return value


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Return doubles of [0, 1) from 64 random bits."""
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


# --- what is declared ---------------------------------------------------------------------------------------


def read_by(variant: Variant) -> tuple[Tensor, ...]:
    """Return the tensors that the mask of a variant reads, in order of declaration."""
    named = {node.tensor for node in walk(variant.mask) if isinstance(node, Load)}
    return tuple(tensor for tensor in variant.tensors if tensor.name in named)


@dataclass(frozen=True, slots=True)
class Heads:
    """The sequences and heads of the call that is looked at: those of given tensors, or assumed ones."""

    batch: int = BATCH
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @classmethod
    def of(cls, variant: Variant, given: Mapping[str, Any]) -> Heads:
        """Those that the axes of ``given`` tensors say, and for what none says as many as usual."""
        lengths = {
            extent: length
            for tensor in read_by(variant)
            if tensor.name in given
            for extent, length in zip(tensor.shape, given[tensor.name].shape, strict=True)
        }
        heads, kv_heads = lengths.get("h"), lengths.get("hk")
        if heads is None:
            heads = HEADS if kv_heads is None else kv_heads * (HEADS // KV_HEADS)
        if kv_heads is None:
            kv_heads = KV_HEADS if heads % KV_HEADS == 0 else heads
        return cls(lengths.get("b", BATCH), heads, kv_heads)

    def places(self, variant: Variant, b: int | None, h: int | None) -> list[tuple[int, int]]:
        """Every sequence and head that a mask tells apart, or those of ``b`` and ``h``. Raises CallError."""
        for label, place, count in (("--batch", b, self.batch), ("--head", h, self.heads)):
            if place is not None and not 0 <= place < count:
                raise CallError(f"{label} must be 0 to {count - 1}, got {place}")
        read = variant.uses(variant.mask)[0]
        sequences = [b] if b is not None else range(self.batch if "b" in read else 1)
        heads = [h] if h is not None else range(self.heads if read & HEAD_NAMES else 1)
        return [(sequence, head) for sequence in sequences for head in heads]

    def text(self, variant: Variant, b: int | None, h: int | None) -> str:
        """The heads and sequences that are looked at, in words."""
        read = variant.uses(variant.mask)[0]
        head = "one head"
        if read & HEAD_NAMES:
            head = f"all {self.heads} heads" if h is None else f"head {h} of {self.heads}"
            head += f" ({self.kv_heads} KV heads)" if self.kv_heads != self.heads else ""
        sequence = "one sequence"
        if "b" in read and self.batch > 1:
            sequence = f"all {self.batch} sequences" if b is None else f"sequence {b} of {self.batch}"
        return f"{head} of {sequence}"


def assume(
    variant: Variant, seqlen: int, scalars: Mapping[str, Any], given: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return every tensor that the mask reads, for sequences of ``seqlen`` queries and keys.

    ``given`` has the real ones by name. An extent that is named in shapes only is as long as its indices require.
    """
    tensors = read_by(variant)
    extents = extents_of(variant, seqlen, scalars, given)
    return {
        tensor.name: given[tensor.name]
        if tensor.name in given
        else Assumed(
            tensor, tuple(_extent(e, extents) for e in tensor.shape), _limits(tensor, extents, seqlen), seed + 64 * n
        )
        for n, tensor in enumerate(tensors)
    }


def extents_of(variant: Variant, seqlen: int, scalars: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """The extent of each name of a shape."""
    of = Heads.of(variant, given)
    extents = {"b": of.batch, "h": of.heads, "heads": of.heads, "hk": of.kv_heads, "kv_heads": of.kv_heads}
    extents |= dict.fromkeys(("seqlen_q", "seqlen_k", "total_q", "total_k"), seqlen)
    fixed = {scalar.name: scalar.const for scalar in variant.scalars if scalar.const is not None}
    extents |= {name: max(int(value), 0) for name, value in {**fixed, **scalars}.items() if math.isfinite(value)}
    tensors = read_by(variant)
    for tensor in tensors:
        if tensor.name in given:
            extents |= {e: n for e, n in zip(tensor.shape, given[tensor.name].shape, strict=True) if isinstance(e, str)}
    free = {e for tensor in tensors for e in tensor.shape if isinstance(e, str)} - extents.keys()
    ranges = _ranges(variant, seqlen, extents, scalars)
    longest = dict.fromkeys(free, 0)
    for node in walk(variant.mask):
        if not isinstance(node, Load):
            continue
        for extent, index in zip(variant.tensor(node.tensor).shape, node.indices, strict=True):
            if extent in free:
                most = bounds(index, ranges)[1]
                longest[str(extent)] = max(longest[str(extent)], int(most) + 1 if most < 2**31 else seqlen)
    return extents | {name: max(length, 1) for name, length in longest.items()}


def _ranges(variant: Variant, seqlen: int, extents: Mapping[str, int], scalars: Mapping[str, Any]) -> dict[str, Range]:
    """Return the ranges of a mask's names in this call."""
    ranges: dict[str, Range] = {name: (0, extents[name] - 1) for name in ("b", "h", "hk")}
    ranges |= dict.fromkeys(("q", "kv", "q_pos", "q_global", "kv_global"), (0, seqlen - 1))
    ranges |= {name: (extent, extent) for name, extent in extents.items() if name not in ranges}
    ranges |= {name: (value, value) for name, value in scalars.items()}
    return ranges | {tensor.name: _limits(tensor, extents, seqlen) for tensor in read_by(variant)}


def _extent(extent: int | str, extents: Mapping[str, int]) -> int:
    return extent if isinstance(extent, int) else extents[extent]


def _limits(tensor: Tensor, extents: Mapping[str, int], seqlen: int) -> Range:
    """Return the least and greatest value of a tensor: as declared, open ends a sequence, or one unit, away."""
    least, most = DTYPE_RANGES[tensor.dtype]
    low, high = (extents.get(b, seqlen) if isinstance(b, str) else b for b in tensor.range or (None, None))
    reach = seqlen if dtype_row(tensor.dtype).kind == "int" else 1.0
    if low is None:
        low = max(least, 0 if high is None else min(0, high - reach))
    if high is None:
        high = min(most, low + reach)
    return low, min(max(high, low), low + 2**52)  # doubles hold integers up to there
