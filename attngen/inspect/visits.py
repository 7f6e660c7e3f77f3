"""The KV tiles that each query tile visits, from the bands and classes that the kernel's loops use.

Memory is bounded whatever the length: masks are evaluated in blocks of queries and keys. So is the work: in a sequence
that would take too long, a sample of the query tiles stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attngen.inspect.assumed import extents_of
from attngen.lang.bands import Bands, bands, classify
from attngen.lang.eager import evaluate
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.ir import Expr, Load, children
from attngen.lang.searches import evaluate_bound
from attngen.lang.segments import segments
from attngen.lang.simplify import integer
from attngen.lang.spans import Interval
from attngen.parts.floors import ROWS
from attngen.plan.model import Plan

#: Bytes that the values of one block of pairs, of all nodes of an expression, may take together.
_BLOCK_BYTES = 2**26

#: The most nodes times pairs that are evaluated: some seconds on one core.
_WORK = 2**29

#: Its multiples are spread evenly over [0, 1), without a period.
_GOLDEN = (5**0.5 - 1) / 2

#: Nodes that a read along one axis counts for.
_LOAD = 8

#: The most bytes that an element of a block takes.
_ELEMENT = 8


#: Fields of ``Visits`` that add up over heads.
_COUNTS = ("visible_pairs", "full", "partial", "steps", "skipped")


@dataclass(frozen=True, slots=True)
class Visits:
    """Tiles and pairs that a kernel visits for some heads of sequences of ``seqlen`` queries and keys.

    ``full`` and ``partial`` count tiles that a block loads; a ragged last tile counts as partial. In a CUDA kernel each
    consumer takes a step for a tile, of ``step_pairs``, unless it skips it; elsewhere a tile is one step.
    """

    seqlen: int
    visible_pairs: int
    full: int
    partial: int
    steps: int
    skipped: int  # steps that consumers pass over
    step_pairs: int
    sampled: tuple[int, int] = (0, 0)  # query tiles that were looked at, of how many
    outside: str = ""  # what the mask reads outside of a tensor, where kernels find 0
    heads: int = 1  # of all sequences, which the counts add up

    @property
    def complete(self) -> bool:
        """Whether every query tile was looked at; else the figures are scaled up from some of them."""
        return self.sampled[0] == self.sampled[1]

    def __add__(self, other: Visits) -> Visits:
        """Add up the counts of other heads, at the same length."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in (*_COUNTS, "heads")}
        looked_at = (self.sampled[0] + other.sampled[0], self.sampled[1] + other.sampled[1])
        return replace(self, **sums, sampled=looked_at, outside=self.outside or other.outside)

    def of_heads(self, heads: int) -> Visits:
        """The counts of so many heads, as those of these are in the mean."""
        counts: dict[str, Any] = {name: round(getattr(self, name) * heads / self.heads) for name in _COUNTS}
        looked_at = (self.sampled[0], self.sampled[1] * heads // self.heads)
        return replace(self, **counts, sampled=looked_at, heads=heads)

    @property
    def efficiency(self) -> float:
        """Visible pairs over pairs that are multiplied; 1 where nothing is visible and nothing multiplied."""
        multiplied = self.steps * self.step_pairs
        return self.visible_pairs / multiplied if multiplied else 1.0


def visits(
    plan: Plan, seqlen: int, arguments: Mapping[str, Any], place: tuple[int, int] = (0, 0), of: int = 1
) -> Visits:
    """Count the tiles that a plan's kernel visits in one sequence and head, one ``of`` so many that share the work.

    ``arguments`` are scalars as a call passes them, and tensors, or what is read like them (``assumed.Assumed``). A
    kernel that packs the heads of a group is assumed to have groups of one head: with more, tiles hold fewer queries.
    """
    if plan.structure.map_rows:  # each consumer visits its own blocks, as if it had a tile of them alone
        alone = replace(plan.structure, consumers=1)
        if plan.direction == "forward" or plan.main == "dq":
            plan = replace(plan, tile_m=alone.map_rows, tile_n=alone.block_keys or plan.tile_n, structure=alone)
        else:
            plan = replace(plan, tile_n=alone.map_rows, structure=alone)
    tiles = -(-seqlen // plan.tile_m)
    some = _sample(tiles, plan.tile_m * seqlen * _cost(plan.variant.mask) * of)
    first = some * plan.tile_m
    grid = _Grid(plan, seqlen, arguments, first, place)
    visible, seen = grid.mask()
    if plan.iteration == "tile_map":
        # The map knows the whole tiles; a ragged last one is run where the bands reach it.
        whole = seen[:, : seqlen // plan.tile_n]
        full, partial = int((whole == 2).sum()), int((whole == 1).sum()) + grid.ragged()
    elif plan.iteration == "classified":
        full, partial = grid.classified()
    else:
        full, partial = grid.in_ranges()
    share = len(some) / tiles
    rows = int((seqlen - first).clamp(max=plan.tile_m).sum())
    loaded, consumers = full + partial, plan.structure.consumers if plan.direction == "forward" else 0
    visible = round(visible * seqlen / rows)
    full, partial = round(full / share), round(partial / share)
    sampled = (len(some), tiles)
    if not consumers:
        pairs = plan.tile_m * plan.tile_n
        return Visits(seqlen, visible, full, partial, full + partial, 0, pairs, sampled, grid.outside)
    every = consumers * loaded
    steps = _skipping_steps(plan, seqlen, arguments, first, place) if plan.structure.skips else every
    steps, skipped = round(steps / share), round((every - steps) / share)
    return Visits(seqlen, visible, full, partial, steps, skipped, ROWS * plan.tile_n, sampled, grid.outside)


def tile_kinds(
    plan: Plan, seqlen: int, arguments: Mapping[str, Any], place: tuple[int, int] = (0, 0)
) -> tuple[tuple[int, ...], ...]:
    """For each tile of queries and each of keys, 0 if no pair is visible, 1 if some are, 2 if all are."""
    first = torch.arange(-(-seqlen // plan.tile_m), device="cpu") * plan.tile_m
    return tuple(map(tuple, _Grid(plan, seqlen, arguments, first, place).mask()[1].tolist()))


def most_places(plan: Plan, seqlen: int) -> int:
    """Number of heads and sequences that can be looked at, at least one tile of queries of each."""
    return max(_WORK // (plan.tile_m * seqlen * _cost(plan.variant.mask)), 1)


def _sample(tiles: int, work: int) -> Tensor:
    """Return the query tiles to look at: all of them, or as many as the work of one allows.

    Each is from another part of the sequence, at a varying place within its part, since masks have periods.
    """
    count = min(tiles, max(_WORK // work, 1))
    if count == tiles:
        return torch.arange(tiles, device="cpu")
    part = torch.arange(count, dtype=torch.float64, device="cpu")
    return ((part + (part * _GOLDEN + 0.5).frac()) * (tiles / count)).to(torch.int64).clamp(max=tiles - 1)


def _nodes(expr: Expr) -> set[Expr]:
    """Return the distinct nodes of an expression."""
    nodes = {expr}
    open_ = [expr]
    while open_:
        new = set(children(open_.pop())) - nodes
        nodes |= new
        open_ += new
    return nodes


def _cost(expr: Expr) -> int:
    """The cost of a pair, in nodes."""
    return sum(1 + (_LOAD * len(node.indices) if isinstance(node, Load) else 0) for node in _nodes(expr))


def _skipping_steps(
    plan: Plan, seqlen: int, arguments: Mapping[str, Any], first: Tensor, place: tuple[int, int]
) -> int:
    """Count the tiles that consumers multiply where each skips what its own rows do not see."""
    consumers = plan.structure.consumers
    whole = _Grid(plan, seqlen, arguments, first, place)
    loaded = whole.loaded()
    starts = first[:, None] + ROWS * torch.arange(consumers, device="cpu")
    own = starts < seqlen  # consumers whose rows lie after the end see nothing
    seen = torch.zeros(*starts.shape, loaded.shape[1], dtype=torch.bool, device="cpu")
    offsets = whole.offsets[:, None].expand(starts.shape)[own]
    seen[own] = _Grid(replace(plan, tile_m=ROWS), seqlen, arguments, starts[own], place, offsets).loaded()
    return sum(
        _steps_of(rows[tiles].flip(0).tolist(), plan.stages)
        for tiles, consumers_seen in zip(loaded, seen, strict=True)
        for rows in consumers_seen
    )


def _steps_of(seen: Sequence[bool], stages: int) -> int:
    """Count the tiles that a consumer multiplies, of those of its block in the order in which they come.

    It skips any number before the first that it sees, and then at most ``stages - 1`` in a row, since it holds a tile
    of V. One that sees none at all multiplies all of them, under the mask.
    """
    if True not in seen:
        return len(seen)
    steps = skipped = 0
    for sees in seen[seen.index(True) :]:
        if sees or skipped == stages - 1:
            steps, skipped = steps + 1, 0
        else:
            skipped += 1
    return steps


class _Grid:
    """Some query tiles at once: their corners as a column of numbers."""

    def __init__(
        self, plan: Plan, seqlen: int, arguments: Mapping[str, Any], first: Tensor, place: tuple[int, int],
        offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``first`` are the first queries of the tiles; ``offsets`` say where keys begin, if not as their own would."""
        self._plan = plan
        self._seqlen = seqlen
        self._whole = seqlen // plan.tile_n
        self._facts = Facts.of(plan.variant)
        self._tensors = {name: value for name, value in arguments.items() if hasattr(value, "shape")}
        scalars = {name: value for name, value in arguments.items() if name not in self._tensors}
        extents = extents_of(plan.variant, seqlen, scalars, self._tensors)
        b, h = place
        hk = h // max(extents["heads"] // extents["kv_heads"], 1)
        self._plain: dict[str, Any] = {
            **extents,
            **{scalar.name: scalar.const for scalar in plan.variant.scalars if scalar.const is not None},
            **scalars, "b": b, "h": h, "hk": hk, "h_lo": h, "h_hi": h, Q_START.name: 0, KV_START.name: 0,
        }  # fmt: skip
        self._first = first
        self._tiles = len(first)
        together = plan.tile_m  # rows whose keys decide what is loaded
        begin = first // together * together
        last = (begin + together - 1).clamp(max=seqlen - 1)
        self._corners = {"q_lo": begin, "q_hi": last, "q_pos_lo": begin, "q_pos_hi": last}  # as many keys as queries
        self._bands: Bands = bands(plan.variant.mask, self._facts, over="kv", heads=plan.box_heads)
        self.outside = ""
        self._end_alignment = plan.structure.end_alignment
        #: Of the first key of each tile of keys from a multiple of their size.
        self.offsets = offsets if offsets is not None else self._own_offsets()

    def _own_offsets(self) -> Tensor:
        if not self._end_alignment:
            return torch.zeros(self._tiles, dtype=torch.int64, device="cpu")
        n, (lo, hi) = self._plan.tile_n, self._ends(self._bands.visible[0])
        last = -(-hi.clamp(0, self._seqlen) // self._end_alignment) * self._end_alignment
        return torch.where(lo >= n, last % n, 0)

    def mask(self) -> tuple[int, Tensor]:
        """Return the number of visible pairs, and for each tile 0 (nothing), 1 (part) or 2 (all of it visible)."""
        m, n, seqlen = self._plan.tile_m, self._plan.tile_n, self._seqlen
        rows = (self._first[:, None] + torch.arange(m, device="cpu")).flatten()
        tile = torch.arange(self._tiles, device="cpu").repeat_interleave(m)
        rows, tile = rows[rows < seqlen], tile[rows < seqlen]
        sums = torch.zeros(self._tiles, -(-seqlen // n), dtype=torch.int64, device="cpu")
        elements = max(_BLOCK_BYTES // (_ELEMENT * _cost(self._plan.variant.mask)), n)
        width = min(elements // n * n, sums.shape[1] * n)
        height = max(elements // width, 1)
        for start in range(0, len(rows), height):
            q = rows[start : start + height, None]
            for left in range(0, seqlen, width):
                kv = torch.arange(left, min(left + width, seqlen), device="cpu")[None, :]
                visible = self._visible(q, kv)
                padded = torch.nn.functional.pad(visible, (0, -visible.shape[1] % n)).unflatten(1, (-1, n)).sum(2)
                sums[:, left // n : left // n + padded.shape[1]].index_add_(0, tile[start : start + height], padded)
        lengths = torch.zeros(self._tiles, dtype=torch.int64, device="cpu").index_add_(0, tile, torch.ones_like(tile))
        seen = (sums > 0).to(torch.int8) + (sums == lengths[:, None] * n).to(torch.int8)
        return int(sums.sum()), seen

    def _visible(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return the mask of a block of pairs; what it reads outside of a tensor is 0, as in a kernel, and noted."""
        names = {**self._plain, "q": q, "q_pos": q, "q_global": q, "kv": kv, "kv_global": kv}
        mask, shape = self._plan.variant.mask, (len(q), kv.shape[1])
        if not self.outside:
            try:
                return evaluate(mask, names, self._tensors).broadcast_to(shape)
            except IndexError as error:
                self.outside = str(error)
        return evaluate(mask, names, self._tensors, checked=False).broadcast_to(shape)

    def in_ranges(self) -> tuple[int, int]:
        """Return full and partial tiles of a kernel that loops over ranges, and tests each tile for the full ones."""
        n = self._plan.tile_n
        if self._end_alignment:
            return self._in_end_aligned_ranges()
        tiles = torch.arange(self._whole, device="cpu")[None, :]
        visited = self._in_ranges(self._whole, self._whole * n)
        full = torch.zeros_like(visited)
        for interval in self._bands.full:
            first, last = self._ends(interval)
            full |= (tiles * n >= first[:, None]) & (tiles * n + n <= last[:, None])
        return int((visited & full).sum()), int((visited & ~full).sum()) + self.ragged()

    def _in_end_aligned_ranges(self) -> tuple[int, int]:
        """As ``in_ranges`` where the tiles of keys of a query tile begin anywhere."""
        visited = self.loaded()
        start = torch.arange(visited.shape[1], device="cpu")[None, :] * self._plan.tile_n + self.offsets[:, None]
        full = torch.zeros_like(visited)
        for interval in self._bands.full:
            first, last = self._ends(interval)
            full |= (start >= first[:, None]) & (start + self._plan.tile_n <= last[:, None].clamp(max=self._seqlen))
        return int((visited & full).sum()), int((visited & ~full).sum())

    def loaded(self) -> Tensor:
        """The tiles of keys, a ragged last one too, in the ranges of each query tile: bools (q_tiles, kv_tiles)."""
        return self._in_ranges(-(-self._seqlen // self._plan.tile_n), self._seqlen)

    def _in_ranges(self, count: int, extent: int) -> Tensor:
        bounded = Bands(self._bands.visible, (), exact=True)
        tiles = torch.arange(count, device="cpu")[None, :]
        if self._end_alignment:
            start, n = tiles * self._plan.tile_n + self.offsets[:, None], self._plan.tile_n
            lo, hi = (end[:, None].clamp(0, self._seqlen) for end in self._ends(self._bands.visible[0]))
            return (start + n > lo) & (start < hi) & (lo < hi)
        visited = torch.zeros(self._tiles, count, dtype=torch.bool, device="cpu")
        for lo, hi in segments(bounded, self._plan.tile_n, integer(extent), self._facts).partial:
            visited |= (tiles >= self._value(lo)[:, None]) & (tiles < self._value(hi)[:, None])
        return visited

    def classified(self) -> tuple[int, int]:
        """Return full and partial tiles of a kernel that looks at each tile within the hull of its bands."""
        n = self._plan.tile_n
        first = torch.arange(self._whole, device="cpu")[None, :] * n
        shape = (self._tiles, self._whole)
        classes = classify(self._plan.variant.mask, self._facts, heads=self._plan.box_heads)
        may, must = (self._classes(each, first) for each in classes)
        inside = torch.zeros(shape, dtype=torch.bool, device="cpu")
        if self._bands.visible:
            ends = [self._ends(interval) for interval in self._bands.visible]
            lo = torch.stack([end[0] for end in ends]).amin(0)[:, None]  # the hull
            hi = torch.stack([end[1] for end in ends]).amax(0)[:, None]
            inside = (first + n > lo) & (first < hi)
        return int((inside & must).sum()), int((inside & may & ~must).sum()) + self.ragged()

    def _classes(self, expr: Expr, first: Tensor) -> Tensor:
        """Return a condition on tiles, which start at keys ``first``, for each query tile: (q_tiles, kv_tiles)."""
        height = max(_BLOCK_BYTES // (_ELEMENT * _cost(expr) * max(first.shape[1], 1)), 1)
        classes = []
        for start in range(0, self._tiles, height):
            corners = {name: corner[start : start + height, None] for name, corner in self._corners.items()}
            corners |= {"kv_lo": first, "kv_hi": first + self._plan.tile_n - 1}
            rows = min(height, self._tiles - start)
            classes.append(self._evaluate(expr, corners).broadcast_to((rows, first.shape[1])))
        return torch.cat(classes)

    def ragged(self) -> int:
        """Count the query tiles that visit the ragged last tile, which always runs under the mask."""
        start = self._whole * self._plan.tile_n
        if start == self._seqlen:
            return 0
        reached = torch.zeros(self._tiles, dtype=torch.bool, device="cpu")
        for interval in self._bands.visible:
            lo, hi = self._ends(interval)
            reached |= (hi > start) & (lo < self._seqlen)
        return int(reached.sum())

    def _ends(self, interval: Interval) -> tuple[Tensor, Tensor]:
        lo = self._value(integer(0) if interval.lo is None else interval.lo)
        return lo, self._value(integer(self._seqlen) if interval.hi is None else interval.hi)

    def _value(self, expr: Expr) -> Tensor:
        """Return an expression's value for each query tile."""
        return self._evaluate(expr, self._corners).broadcast_to((self._tiles,))

    def _evaluate(self, expr: Expr, corners: Mapping[str, Tensor]) -> Tensor:
        return evaluate_bound(expr, {**self._plain, **corners}, self._tensors)
