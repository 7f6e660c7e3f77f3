"""Tokens of a grid in the order of boxes, and back: differentiable copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attngen.integrations.natten.boxes import BOX, Lengths
from attngen.runtime.arguments.guard import may_repeat

#: Elements that rows are copied as, the widest first: torch moves so many bytes for each thread.
_WIDE = (torch.complex128, torch.int64, torch.int32)


@dataclass(frozen=True)
class BoxOrder:
    """An order of the tokens of a grid: box by box, and within a box row by row.

    With a dilation, tokens whose coordinates along an axis are equal modulo it come together: an axis consists of its
    residues, each of ``extents`` places, some of them without a token, in boxes of ``lengths``.
    """

    tokens: Lengths
    dilations: Lengths
    extents: Lengths
    lengths: Lengths

    @property
    def boxes(self) -> Lengths:
        """Boxes along each axis."""
        axes = zip(self.dilations, self.extents, self.lengths, strict=True)
        first, second, third = (dilation * extent // length for dilation, extent, length in axes)
        return first, second, third

    @property
    def as_given(self) -> bool:
        """Whether the order is that of the grid: boxes are whole rows of it, or parts of one."""
        slowest = next((axis for axis in range(3) if self.tokens[axis] > 1), 2)  # its last box may be cut off
        whole = all(self._places[axis] == self.tokens[axis] for axis in range(3) if axis != slowest)
        in_order = all(self.lengths[i] == 1 or self.boxes[j] == 1 for i in range(3) for j in range(i + 1, 3))
        return whole and in_order and self.dilations == (1, 1, 1)

    @property
    def rows(self) -> int:
        """Places of the order; those without a token hold zeros."""
        return prod(self.tokens) if self.as_given else prod(self.boxes) * BOX

    def to_rows(self, grid: Tensor, more: Tensor | None = None) -> Tensor:
        """Rows (batch, rows, …) of a grid (batch, tokens along three axes, …), and ``more`` rows after them."""
        if self.as_given:
            rows = grid.flatten(1, 3)
        elif may_repeat(grid):
            copied: Tensor = _ToRows.apply(grid, more, self)
            return copied
        else:
            rows = self._plain_rows(grid)
        return rows if more is None else torch.cat([rows, more], dim=1)

    def to_grid(self, rows: Tensor) -> Tensor:
        """The grid of rows in this order, as ``to_rows`` takes it."""
        if self.as_given:
            return rows.unflatten(1, self.tokens)
        if may_repeat(rows):
            copied: Tensor = _ToGrid.apply(rows, self)
            return copied
        return self._plain_grid(rows)

    def _plain_rows(self, grid: Tensor) -> Tensor:
        """``to_rows`` in operators that torch differentiates and compiles."""
        ends = [place - token for place, token in zip(self._places, self.tokens, strict=True)]
        padding = [0, 0] * (grid.dim() - 4) + [side for end in reversed(ends) for side in (0, end)]
        cells = F.pad(grid, padding)
        for axis in (3, 2, 1):
            cells = cells.unflatten(axis, self._split(axis - 1))
        # j, s, r of each axis → r, j of each axis, then s of each
        rest = range(10, cells.dim())
        return cells.permute(0, 3, 1, 6, 4, 9, 7, 2, 5, 8, *rest).flatten(1, 9)

    def _plain_grid(self, rows: Tensor) -> Tensor:
        grid = self._cells(rows).flatten(7, 9).flatten(4, 6).flatten(1, 3)
        first, second, third = self.tokens
        return grid[:, :first, :second, :third]

    @property
    def _places(self) -> list[int]:
        return [dilation * extent for dilation, extent in zip(self.dilations, self.extents, strict=True)]

    def _split(self, axis: int) -> tuple[int, int, int]:
        """Boxes of a residue, tokens of a box and residues, from the slowest to the fastest along an axis."""
        return self.extents[axis] // self.lengths[axis], self.lengths[axis], self.dilations[axis]

    def _cells(self, rows: Tensor) -> Tensor:
        """A view of rows with three dimensions for each axis of the grid: box, token of the box, residue."""
        boxes = [self._split(axis) for axis in range(3)]
        sizes = [size for count, _, residues in boxes for size in (residues, count)]
        cells = rows.unflatten(1, (*sizes, *self.lengths))
        rest = range(10, cells.dim())
        return cells.permute(0, 2, 7, 1, 4, 8, 3, 6, 9, 5, *rest)

    def copy(self, rows: Tensor, grid: Tensor, *, back: bool) -> None:
        """Write rows from a grid, zeros in places without a token, or ``back``: a grid from rows."""
        cells = self._cells(rows)
        if all(places == tokens for places, tokens in zip(self._places, self.tokens, strict=True)):
            whole = grid
            for axis in (2, 1, 0):
                whole = whole.unflatten(1 + axis, self._split(axis))
            source, target = (cells, whole) if back else (whole, cells)
            target.copy_(source)
            return
        for at in product(*(self._runs(axis) for axis in range(3))):
            there, part = cells, grid
            for axis in (2, 1, 0):
                start, split, (box, token) = at[axis]
                part = part.narrow(1 + axis, start, prod(split)).unflatten(1 + axis, split)
                for offset, begin, count in zip(range(3), (box, token, 0), split, strict=True):
                    there = there.narrow(1 + 3 * axis + offset, begin, count)
            if back:
                part.copy_(there)
            else:
                there.copy_(part)
        if not back:
            for empty in self._empty(cells):
                empty.zero_()

    def _whole(self, axis: int) -> tuple[int, int, int]:
        """Boxes of an axis that have all tokens in all residues; then such rows of a box; then tokens of a row."""
        _, length, residues = self._split(axis)
        boxes, rest = divmod(self.tokens[axis], length * residues)
        return boxes, *divmod(rest, residues)

    def _runs(self, axis: int) -> Iterator[tuple[int, Lengths, tuple[int, int]]]:
        """Runs of coordinates that are whole boxes, whole rows of a box, or a part of one: start, split, first cell."""
        _, length, residues = self._split(axis)
        boxes, rows, tokens = self._whole(axis)
        start = boxes * length * residues
        if boxes:
            yield 0, (boxes, length, residues), (0, 0)
        if rows:
            yield start, (1, rows, residues), (boxes, 0)
        if tokens:
            yield start + rows * residues, (1, 1, tokens), (boxes, rows)

    def _empty(self, cells: Tensor) -> Iterator[Tensor]:
        """Views that cover the cells without a token."""
        for axis in range(3):
            count, length, residues = self._split(axis)
            boxes, rows, tokens = self._whole(axis)
            box, token, residue = (1 + 3 * axis + offset for offset in range(3))
            if boxes < count:
                last = cells.narrow(box, boxes, 1)
                begun = bool(rows or tokens)
                yield cells.narrow(box, boxes + begun, count - boxes - begun)
                if begun:
                    yield last.narrow(token, rows, 1).narrow(residue, tokens, residues - tokens)
                    yield last.narrow(token, rows + 1, length - rows - 1)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors with their last dimension as fewer and wider elements, where their strides and addresses allow it."""
    for dtype in _WIDE:
        size = dtype.itemsize
        if all(
            size >= one.element_size()
            and one.stride(-1) == 1
            and one.shape[-1] * one.element_size() % size == 0
            and one.data_ptr() % size == 0
            and all(stride * one.element_size() % size == 0 for stride in (one.storage_offset(), *one.stride()[:-1]))
            for one in tensors
        ):
            return [one.view(dtype) for one in tensors]
    return list(tensors)


class _ToRows(torch.autograd.Function):
    """Rows of a grid, with more rows after them."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, more: Tensor | None, order: BoxOrder) -> Tensor:
        ctx.order, ctx.more = order, more is not None
        count = 0 if more is None else more.shape[1]
        rows = grid.new_empty(grid.shape[0], order.rows + count, *grid.shape[4:])
        wide_rows, wide_grid = _wide(rows[:, : order.rows], grid)
        order.copy(wide_rows, wide_grid, back=False)
        if more is not None:
            rows[:, order.rows :] = more
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order = ctx.order
        more = gradient[:, order.rows :] if ctx.more else None
        return order.to_grid(gradient[:, : order.rows]), more, None


class _ToGrid(torch.autograd.Function):
    """The grid of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: BoxOrder) -> Tensor:
        ctx.order = order
        grid = rows.new_empty(rows.shape[0], *order.tokens, *rows.shape[2:])
        wide_rows, wide_grid = _wide(rows, grid)
        order.copy(wide_rows, wide_grid, back=True)
        return grid

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.order.to_rows(gradient), None
