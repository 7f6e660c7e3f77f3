"""Rows of tensors put together, or added up in float32 in a fixed order: on a GPU by one kernel.

Slices would take a launch each, and sums in float32 would pass through memory once for each addend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: What the kernel adds up.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Most sources that the kernel reads.
_SOURCES = 3

#: Elements of a block of the kernel, and most columns of one.
_ELEMENTS, _COLUMNS = 4096, 512


class Gather:
    """Row r of the result is the sum of the rows that are listed for it, in their order; 0 if there is none.

    Sources count as one tensor, their rows one after the other. Tensors are (rows, batch, heads, head_dim).
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

    def __call__(self, out: Sequence[Tensor], *sources: Sequence[Tensor]) -> None:
        """Compute rows of ``out``, one tensor or two, such as K and V; each source has as many. Where rows stay in
        their places, ``out`` may be one of the sources."""
        if not self._count:
            return
        table, places = self._tables(out[0].device)
        if len(out) > 1 and _go_together(out, sources):
            _launch(out, sources, table, places)
            return
        for n, side in enumerate(out):
            of_side = [source[n] for source in sources]
            if not side.numel():
                continue
            if _kernel_takes(side, of_side):
                _launch([side], [[x] for x in of_side], table, places)
            else:
                self._compute(side, of_side, table, places)

    def _compute(self, out: Tensor, sources: Sequence[Tensor], table: Tensor, places: Tensor | None) -> None:
        """The same by operators of torch."""
        rows = torch.cat(list(sources))
        if self._depth == 1 and bool((self._table >= 0).all()):
            total = rows.index_select(0, table[0])
        else:
            wide = torch.promote_types(rows.dtype, torch.float32)
            total = torch.zeros((self._count, *out.shape[1:]), dtype=wide, device=out.device)
            for each in self._table:
                some = torch.from_numpy(np.flatnonzero(each >= 0)).to(out.device)
                listed = torch.from_numpy(each[each >= 0]).to(out.device)
                total.index_add_(0, some, rows.index_select(0, listed).to(wide))
        if places is None:
            out.copy_(total)
        else:
            out.index_copy_(0, places.long(), total.to(out.dtype))

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device not in self._on:
            places = None if self._places is None else torch.from_numpy(self._places.astype(np.int32)).to(device)
            self._on[device] = torch.from_numpy(self._table).to(device), places
        return self._on[device]


def _go_together(out: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]) -> bool:
    """Whether one launch computes both tensors of ``out``: the tensors of each pair have one shape and strides."""
    alike = all(len(x) == 2 and x[0].shape == x[1].shape and x[0].stride() == x[1].stride() for x in (out, *sources))
    return alike and bool(out[0].numel()) and all(_kernel_takes(out[n], [x[n] for x in sources]) for n in range(2))


def _kernel_takes(out: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the kernel adds up such tensors: on a GPU, each row in one piece, and of one dtype."""
    return (
        out.is_cuda
        and out.dtype in _DTYPES
        and len(sources) <= _SOURCES
        and all(x.dtype == out.dtype and _in_one_piece(x) for x in (out, *sources))
        and _compiled() is not None
    )


def _in_one_piece(x: Tensor) -> bool:
    heads, head_dim = x.shape[2:]
    return x.stride(3) == 1 and (heads == 1 or x.stride(2) == head_dim)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The kernel, or None without Triton."""
    try:
        from attngen.parallel.gather_kernel import gather
    except ImportError:
        return None
    return gather


def _launch(out: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], table: Tensor, places: Tensor | None) -> None:
    """Launch the kernel for one tensor and its sources, or for two."""
    depth, rows = table.shape
    to = out[0]
    width = to.shape[2] * to.shape[3]
    each = (*sources, *[sources[-1]] * (_SOURCES - len(sources)))
    (a, *_), (b, *_), (c, *_) = each
    columns = min(1 << (width - 1).bit_length(), _COLUMNS)
    of_block = _ELEMENTS // columns
    grid = (-(-rows // of_block), -(-width // columns) * len(out), to.shape[1])
    with _on(to.device):
        _compiled()[grid](
            to, out[-1], a, each[0][-1], b, each[1][-1], c, each[2][-1], table, table if places is None else places,
            rows, depth, width, len(a), len(a) + len(b), to.stride(0), a.stride(0), b.stride(0), c.stride(0),
            to.stride(1), a.stride(1), b.stride(1), c.stride(1),
            sources=len(sources), pairs=len(out) == 2, one=depth == 1, placed=places is not None, block_rows=of_block,
            block_columns=columns,
        )  # fmt: skip


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one, if it is another."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


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
