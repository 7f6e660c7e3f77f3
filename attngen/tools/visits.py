"""How many KV tiles each query tile visits, from the bands and classes that the kernel's loops are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.eager import evaluate
from attngen.lang.facts import Facts
from attngen.lang.ir import Expr, Search, Var, rewrite
from attngen.lang.segments import segments
from attngen.lang.simplify import integer
from attngen.lang.spans import Interval
from attngen.plan.floors import ROWS
from attngen.plan.model import Plan

#: Query rows whose mask is evaluated at a time.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Visits:
    """What one head of one sequence of ``seqlen`` queries and keys takes, in pairs of a query and a key.

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

    @property
    def efficiency(self) -> float:
        """Visible pairs by pairs that are multiplied; 1 where nothing is visible and nothing multiplied."""
        multiplied = self.steps * self.step_pairs
        return self.visible_pairs / multiplied if multiplied else 1.0


def visits(plan: Plan, seqlen: int, arguments: Mapping[str, Any]) -> Visits:
    """Count the tiles that a plan's kernel visits in head 0 of sequence 0. ``arguments`` as a call passes them.

    A kernel that packs the heads of a group is taken to have one head in each: with more, tiles hold fewer queries.
    """
    grid = _Grid(plan, seqlen, arguments)
    visible, seen = grid.mask()
    if plan.driver == "tile_map":
        # The map knows the whole tiles; a ragged last one is run where the bands reach it.
        whole = seen[:, : seqlen // plan.tile_n]
        full, partial = int((whole == 2).sum()), int((whole == 1).sum()) + grid.ragged()
    elif plan.driver == "classified":
        full, partial = grid.classified()
    else:
        full, partial = grid.in_ranges()
    tiles, hopper = full + partial, plan.hopper
    if hopper is None:
        return Visits(seqlen, visible, full, partial, tiles, 0, plan.tile_m * plan.tile_n)
    every = hopper.consumers * tiles
    steps = _skipping_steps(plan, seqlen, arguments) if hopper.skips else every
    return Visits(seqlen, visible, full, partial, steps, every - steps, ROWS * plan.tile_n)


def _skipping_steps(plan: Plan, seqlen: int, arguments: Mapping[str, Any]) -> int:
    """Count the tiles that consumers multiply where each passes over what its own rows do not see."""
    assert plan.hopper is not None
    consumers = plan.hopper.consumers
    loaded = _Grid(plan, seqlen, arguments).loaded()
    seen = _Grid(replace(plan, tile_m=ROWS), seqlen, arguments).loaded()
    rows_left = len(loaded) * consumers - len(seen)  # consumers whose rows lie behind the end see nothing
    seen = torch.nn.functional.pad(seen, (0, 0, 0, rows_left)).unflatten(0, (len(loaded), consumers))
    return sum(
        _steps_of(rows[tiles].flip(0).tolist(), plan.stages)
        for tiles, own in zip(loaded, seen, strict=True)
        for rows in own
    )


def _steps_of(seen: Sequence[bool], stages: int) -> int:
    """Return the tiles that a consumer multiplies, of those of its block in the order in which they come.

    It passes over any number before the first that it sees, and then over at most ``stages - 1`` in a row, since it
    holds a tile of V. One that sees none at all multiplies all of them, under the mask.
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
    """Every query tile at once: its corners as a column of numbers."""

    def __init__(self, plan: Plan, seqlen: int, arguments: Mapping[str, Any]) -> None:
        self._plan = plan
        self._seqlen = seqlen
        self._whole = seqlen // plan.tile_n
        self._facts = Facts.of(plan.variant)
        self._tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        constants = {scalar.name: scalar.const for scalar in plan.variant.scalars if scalar.const is not None}
        scalars = {name: value for name, value in arguments.items() if name not in self._tensors}
        extents = {
            extent: self._tensors[tensor.name].shape[axis]
            for tensor in plan.variant.tensors
            for axis, extent in enumerate(tensor.shape)
            if isinstance(extent, str) and tensor.name in self._tensors
        }
        self._plain: dict[str, Any] = {
            **extents, **constants, **scalars, "b": 0, "h": 0, "hk": 0, "h_lo": 0, "h_hi": 0, "heads": 1, "kv_heads": 1,
            "seqlen_q": seqlen, "seqlen_k": seqlen, "total_q": seqlen, "total_k": seqlen, "q_start": 0, "kv_start": 0,
        }  # fmt: skip
        first = torch.arange(0, seqlen, plan.tile_m)
        last = (first + plan.tile_m - 1).clamp(max=seqlen - 1)
        self._tiles = len(first)
        self._corners = {"q_lo": first, "q_hi": last, "q_pos_lo": first, "q_pos_hi": last}  # as many keys as queries
        self._found: Bands = bands(plan.variant.mask, self._facts, over="kv", heads=plan.box_heads)

    def mask(self) -> tuple[int, Tensor]:
        """Return the number of visible pairs, and for each tile 0 (nothing), 1 (part) or 2 (all of it visible)."""
        m, n = self._plan.tile_m, self._plan.tile_n
        total = 0
        seen = torch.zeros(self._tiles, -(-self._seqlen // n), dtype=torch.int8)
        kv = torch.arange(self._seqlen)[None, :]
        step = max(_ROWS // m, 1) * m
        for start in range(0, self._seqlen, step):
            q = torch.arange(start, min(start + step, self._seqlen))[:, None]
            names = {**self._plain, "q": q, "q_pos": q, "q_global": q, "kv": kv, "kv_global": kv}
            value = evaluate(self._plan.variant.mask, names, self._tensors)
            visible = value.broadcast_to((len(q), self._seqlen))
            total += int(visible.sum())
            for offset in range(0, len(q), m):
                rows = visible[offset : offset + m]
                padded = torch.nn.functional.pad(rows.sum(0), (0, seen.shape[1] * n - self._seqlen))
                sums = padded.reshape(-1, n).sum(1)
                tile = (start + offset) // m
                seen[tile] = (sums > 0).to(torch.int8) + (sums == rows.shape[0] * n).to(torch.int8)
        return total, seen

    def in_ranges(self) -> tuple[int, int]:
        """Return full and partial tiles of a kernel that loops over ranges, and tests each tile for the full ones."""
        n = self._plan.tile_n
        tiles = torch.arange(self._whole)[None, :]
        visited = self._in_ranges(self._whole, self._whole * n)
        full = torch.zeros_like(visited)
        for interval in self._found.full:
            first, last = self._ends(interval)
            full |= (tiles * n >= first[:, None]) & (tiles * n + n <= last[:, None])
        return int((visited & full).sum()), int((visited & ~full).sum()) + self.ragged()

    def loaded(self) -> Tensor:
        """Return which tiles of keys, a ragged last one too, the ranges of a query tile hold: (q_tiles, kv_tiles)."""
        return self._in_ranges(-(-self._seqlen // self._plan.tile_n), self._seqlen)

    def _in_ranges(self, count: int, extent: int) -> Tensor:
        bounded = Bands(self._found.visible, (), exact=True)
        tiles = torch.arange(count)[None, :]
        visited = torch.zeros(self._tiles, count, dtype=torch.bool)
        for lo, hi in segments(bounded, self._plan.tile_n, integer(extent), self._facts).partial:
            visited |= (tiles >= self._value(lo)[:, None]) & (tiles < self._value(hi)[:, None])
        return visited

    def classified(self) -> tuple[int, int]:
        """Return full and partial tiles of a kernel that looks at each tile within the hull of its bands."""
        n = self._plan.tile_n
        first = torch.arange(self._whole)[None, :] * n
        corners = {name: corner[:, None] for name, corner in self._corners.items()}
        corners |= {"kv_lo": first, "kv_hi": first + n - 1}
        shape = (self._tiles, self._whole)
        may, must = (
            self._evaluate(e, corners).broadcast_to(shape)
            for e in classify(self._plan.variant.mask, self._facts, heads=self._plan.box_heads)
        )
        inside = torch.zeros(shape, dtype=torch.bool)
        if self._found.visible:
            ends = [self._ends(interval) for interval in self._found.visible]
            lo = torch.stack([end[0] for end in ends]).amin(0)[:, None]  # the hull
            hi = torch.stack([end[1] for end in ends]).amax(0)[:, None]
            inside = (first + n > lo) & (first < hi)
        return int((inside & must).sum()), int((inside & may & ~must).sum()) + self.ragged()

    def ragged(self) -> int:
        """Return how many query tiles visit the ragged last tile, which always runs under the mask."""
        start = self._whole * self._plan.tile_n
        if start == self._seqlen:
            return 0
        reached = torch.zeros(self._tiles, dtype=torch.bool)
        for interval in self._found.visible:
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
        names: dict[str, Any] = {**self._plain, **corners}
        numbers = count()

        def found(node: Expr) -> Expr | None:
            """Replace a search by a name whose value is what it finds."""
            if not isinstance(node, Search):
                return None
            name = f"found_{next(numbers)}"
            names[name] = self._search(node, names)
            return Var(name, node.type)

        replaced = rewrite(expr, found)  # bottom up: searches inside searches come first
        return evaluate(replaced, names, self._tensors)

    def _search(self, node: Search, names: Mapping[str, Any]) -> Tensor:
        others = [evaluate(i, names, self._tensors) for n, i in enumerate(node.indices) if n != node.axis]
        length = int(evaluate(node.length, names, self._tensors))
        value = evaluate(node.value, names, self._tensors)
        rows = self._tensors[node.tensor].movedim(node.axis, -1)[..., :length]
        for index in others:  # one value for all tiles: others never vary over a box
            rows = rows[int(index.reshape(-1)[0])]
        return torch.searchsorted(rows.contiguous().to(torch.int64), value.contiguous(), right=node.strict)
