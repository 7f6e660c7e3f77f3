"""Rows of tensors put together, or added up in float32 in a fixed order: on a GPU by one kernel.

Slices would take a launch each, and sums in float32 would pass through memory once for each addend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attngen.parallel.gather_launch import SOURCES, GatherForm, Launcher, columns_of, launcher_of, rows_of, takes


class Rows(NamedTuple):
    """Rows of a tensor, each in one piece: a window of (rows, batch, width). It is no view of torch, of which a launch
    would need several, each a microsecond or more."""

    tensor: Tensor
    begin: int  # element of the tensor
    shape: tuple[int, int, int]
    strides: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of (batch, rows, heads, head_dim), of a copy if they are not in one piece."""
        x = in_pieces(x)
        batch, rows, heads, head_dim = x.shape
        strides = x.stride()
        return cls(x, 0, (rows, batch, heads * head_dim), (strides[1], strides[0]))

    @classmethod
    def placed(cls, x: Tensor) -> Rows:
        """The rows of (batch, rows, heads, head_dim), to be written to."""
        assert in_pieces(x) is x, f"rows of shape {tuple(x.shape)} and strides {x.stride()} are not in one piece"
        return cls.of(x)

    def view(self) -> Tensor:
        """The window as a tensor."""
        begin = self.tensor.storage_offset() + self.begin
        return self.tensor.as_strided(self.shape, (*self.strides, 1), begin)


#: The rows of one tensor, or of two, such as K and V.
Sides = Sequence[Rows]


def in_pieces(x: Tensor) -> Tensor:
    """The tensor, (batch, rows, heads, head_dim), or a copy of it if its rows are not in one piece."""
    heads, head_dim = x.shape[2:]
    _, _, of_heads, of_elements = x.stride()
    return x if of_elements == 1 and (heads == 1 or of_heads == head_dim) else x.contiguous()


def of_each(*tensors: Tensor) -> list[Rows]:
    """The rows of each tensor, (batch, rows, heads, head_dim)."""
    return [Rows.of(x) for x in tensors]


def side_by_side(x: Tensor, widths: Sequence[int], *, batch_first: bool = False) -> Sides:
    """K and V that lie side by side in a contiguous tensor (rows, batch, width), or (batch, rows, width)."""
    first, second, width = x.shape
    strides = second * width, width
    (rows, batch), strides = ((second, first), strides[::-1]) if batch_first else ((first, second), strides)
    left, right = widths
    return Rows(x, 0, (rows, batch, left), strides), Rows(x, left, (rows, batch, right), strides)


def widths_of(k: Tensor, v: Tensor) -> tuple[int, int]:
    """Elements of a row of K and of V, (batch, rows, heads, head_dim)."""
    return k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]


class Gather:
    """Row r of the result is the sum of the rows that are listed for it, in their order; 0 if there is none.

    Sources count as one tensor, their rows one after the other.
    """

    def __init__(self, count: int, rows: np.ndarray, listed: np.ndarray, places: np.ndarray | None = None) -> None:
        """``listed`` are rows of the sources, and ``rows`` the rows of the result, fewer than ``count``, that each of
        them belongs to. ``places`` says which row of the output a row of the result is; by default it is the same."""
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        times = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        self._depth = int(times.max()) + 1 if len(times) else 1
        table: np.ndarray = np.full((self._depth, count), -1, dtype=np.int32)
        table[times, ordered] = listed[order]
        self._count, self._table, self._places = count, table, places
        self._on: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
        #: The launches of calls with such windows, or None where operators of torch compute them.
        self._prepared: dict[Any, list[_Launch] | None] = {}

    def __call__(self, out: Sides, *sources: Sides) -> None:
        """Compute rows of ``out``; each source has as many tensors. Where rows stay in their places, ``out`` may be one
        of the sources."""
        if not self._count:
            return
        sides = [*out]
        for source in sources:
            sides += source
        device = out[0].tensor.device
        key = (device, *[(rows.shape, rows.strides, rows.tensor.dtype) for rows in sides])
        try:
            launches = self._prepared[key]
        except KeyError:
            launches = self._prepared[key] = self._prepare(out, sources)
        if launches is not None:
            for launch in launches:
                launch(sides)
            return
        for n, side in enumerate(out):
            if side.shape[1] and side.shape[2]:
                self._compute(side, [source[n] for source in sources])

    def _prepare(self, out: Sides, sources: Sequence[Sides]) -> list[_Launch] | None:
        """Launches for both tensors together, if their windows are alike, or for one after the other."""
        to, each = out[0].tensor, (out, *sources)
        dtypes = {rows.tensor.dtype for side in each for rows in side}
        if not to.is_cuda or len(sources) > SOURCES or len(dtypes) > 1 or not takes(to.dtype):
            return None
        count = len(out)
        alike = all(side[0].shape == side[-1].shape and side[0].strides == side[-1].strides for side in each)
        groups = [range(count)] if alike else [range(n, n + 1) for n in range(count)]
        return [
            _Launch(
                [[side[n] for n in group] for side in each],
                [[place * count + n for n in group] for place in range(len(each))],
                self._count, self._depth, self._tables(to.device),
            )
            for group in groups
            if out[group[0]].shape[1] and out[group[0]].shape[2]
        ]  # fmt: skip

    def _compute(self, out: Rows, sources: Sequence[Rows]) -> None:
        """The same by operators of torch."""
        table, places = self._tables(out.tensor.device)
        rows, to = torch.cat([source.view() for source in sources]), out.view()
        if self._depth == 1 and bool((self._table >= 0).all()):
            total = rows.index_select(0, table[0])
        else:
            wide = torch.promote_types(rows.dtype, torch.float32)
            total = torch.zeros((self._count, *to.shape[1:]), dtype=wide, device=to.device)
            for each in self._table:
                some = torch.from_numpy(np.flatnonzero(each >= 0)).to(to.device)
                listed = torch.from_numpy(each[each >= 0]).to(to.device)
                total.index_add_(0, some, rows.index_select(0, listed).to(wide))
        if places is None:
            to[: self._count].copy_(total)
        else:
            to.index_copy_(0, places.long(), total.to(to.dtype))

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device not in self._on:
            places = None if self._places is None else torch.from_numpy(self._places.astype(np.int32)).to(device)
            self._on[device] = torch.from_numpy(self._table).to(device), places
        return self._on[device]


def copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same shape, 16 bytes at a time if possible: on a GPU that takes less time."""
    each = 16 // to.element_size()
    if to.dtype == source.dtype and _in_chunks(to, each) and _in_chunks(source, each):
        to, source = to.view(torch.complex128), source.view(torch.complex128)
    to.copy_(source)


def _in_chunks(x: Tensor, each: int) -> bool:
    strides = x.stride()
    return (
        strides[-1] == 1
        and x.shape[-1] % each == 0
        and x.storage_offset() % each == 0
        and x.data_ptr() % 16 == 0
        and all(stride % each == 0 for stride in strides[:-1])
    )


class _Launch:
    """A launch of the kernel for one tensor, or for two whose windows are alike, prepared for windows like these."""

    __slots__ = ("_blocks", "_form", "_index", "_itemsize", "_launchers", "_missing", "_numbers", "_of", "_tables")

    def __init__(
        self, each: list[list[Rows]], of: list[list[int]], count: int, depth: int,
        tables: tuple[Tensor, Tensor | None],
    ) -> None:  # fmt: skip
        """``each``: the windows of the output, then of each source; ``of``: their numbers among those of a call.
        ``count`` rows are sums of at most ``depth``."""
        to, sources = each[0][0], each[1:]
        (_, batch, width), dtype, device = to.shape, to.tensor.dtype, to.tensor.device
        self._missing = SOURCES - len(sources)  # the kernel does not read what stands for them
        padded = each + each[-1:] * self._missing
        columns, pairs = columns_of(width), len(each[0])
        row_blocks, column_blocks = -(-count // rows_of(columns)), -(-width // columns)
        first, second = (source[0].shape[0] for source in (sources[0], sources[min(1, len(sources) - 1)]))
        strides = [side[0].strides[0] for side in padded] + [side[0].strides[1] * (batch > 1) for side in padded]
        table, places = tables
        self._tables = table.data_ptr(), (table if places is None else places).data_ptr()
        self._numbers = (*strides, count, depth, width, first, first + second, row_blocks, column_blocks)
        self._blocks = row_blocks * column_blocks * batch * pairs
        self._of = [(side[0], side[-1]) for side in of]
        self._itemsize, self._index = to.tensor.element_size(), device.index
        aligned = not any(number % 16 for number in (width, *strides))
        self._form = GatherForm(dtype, len(sources), pairs == 2, depth == 1, places is not None, columns, aligned)
        self._launchers: list[Launcher | None] = [None, None]  # for addresses that are multiples of 16, and for others

    def __call__(self, sides: Sequence[Rows]) -> None:
        size, bits = self._itemsize, 0
        addresses: list[int] = []
        for pair in self._of:
            for number in pair:
                tensor, begin, _, _ = sides[number]
                address = tensor.data_ptr() + begin * size
                addresses.append(address)
                bits |= address
        odd = bits % 16 > 0
        launcher = self._launchers[odd]
        if launcher is None:
            launcher = launcher_of(self._form._replace(aligned=self._form.aligned and not odd), self._index)
            self._launchers[odd] = launcher
        launcher(self._blocks, (*addresses, *addresses[-2:] * self._missing, *self._tables, *self._numbers))
