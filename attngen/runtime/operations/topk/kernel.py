"""Selection of the largest scores of each row: arguments, the kernel's launch, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.divisors import reciprocal
from attngen.operations import TOPK, TOPK_VARIANT
from attngen.runtime.arguments.checked import refuse_unreadable
from attngen.runtime.arguments.debug import check_offsets
from attngen.runtime.arguments.shapes import check_written
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands, takes
from attngen.runtime.operations.shared.operands import MOST
from attngen.runtime.operations.shared.path import Helper, first_that_takes, kernels_of
from attngen.runtime.operations.shared.records import Fields, Integer, OptionalTensor, TensorArgument

#: Elements that the selection in torch sorts at a time. Not measured: a bound of memory.
_SORTED = 2**26


class Topk(NamedTuple):
    """A call as its caller made it: see ``topk``."""

    scores: TensorArgument
    k: Integer
    lengths: OptionalTensor = None
    page_table: OptionalTensor = None
    cu_seqlens_q: OptionalTensor = None
    page_size: Annotated[int | None, "int?"] = None
    out: Annotated[Tensor | None, "Tensor(a!)?"] = None


FIELDS = Fields(Topk)

#: The grid of kernels for short rows, whose warps have a row each.
_BY_WARPS = "warp_rows"

#: Place of the result among the tensors of a call.
_OUT = FIELDS.tensors.index("out")


@dataclass(frozen=True, slots=True)
class TopkSizes:
    """Rows, scores of each, the shape of the result, and with a page table its rows, and those of scores for each."""

    rows: int
    columns: int
    shape: tuple[int, ...]
    batch: int = 0
    queries: int = 1


def check(call: Topk) -> TopkSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    scores, k, lengths = call[:3]
    refuse_unreadable({name: getattr(call, name) for name in FIELDS.tensors})
    if not isinstance(scores, Tensor):
        raise CallError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if scores.dtype != torch.float32:
        raise CallError(f"scores must be float32, got {scores.dtype}")
    if not scores.dim():
        raise CallError("scores must have a row, got a tensor without axes")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise CallError(f"k must be a positive integer, got {k!r}")
    outer, columns = tuple(scores.shape[:-1]), scores.shape[-1]
    for name in FIELDS.tensors[1:]:
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CallError(f"{name} must be an int32 tensor, got {kind}")
        if tensor.device != scores.device:
            raise CallError(f"{name} is on {tensor.device}, but scores on {scores.device}")
    if lengths is not None and tuple(lengths.shape) != outer:
        raise CallError(f"lengths must have shape {outer}, one for each row of scores, got {tuple(lengths.shape)}")
    if call.out is not None:
        if tuple(call.out.shape) != (*outer, k):
            raise CallError(f"out must have shape {(*outer, k)}, got {tuple(call.out.shape)}")
        check_written("out", call.out)
    rows = prod(outer)
    return TopkSizes(rows, columns, (*outer, k), *_check_table(call, outer, rows))


def _check_table(call: Topk, outer: tuple[int, ...], rows: int) -> tuple[int, int]:
    """Check the page table of a call. Returns its rows, and how many rows of scores each has, 1 for packed rows."""
    table, starts, page_size = call.page_table, call.cu_seqlens_q, call.page_size
    if table is None:
        for name in ("cu_seqlens_q", "page_size"):
            if getattr(call, name) is not None:
                raise CallError(f"{name} goes with page_table: without, the result is indices")
        return 0, 1
    if table.dim() != 2:
        raise CallError(f"page_table must have shape (batch, max_pages), got {tuple(table.shape)}")
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        raise CallError(f"page_size must be a positive integer with page_table, got {page_size!r}")
    batch, columns, room = table.shape[0], call.scores.shape[-1], table.shape[1] * page_size
    if columns > room:
        raise CallError(f"scores have {columns} columns, but rows of page_table have room for {room} keys")
    if starts is None:
        if not outer or outer[0] != batch:
            raise CallError(
                f"scores must have {batch} rows at first, as page_table has, or cu_seqlens_q says which are whose"
            )
        return batch, max(rows // max(batch, 1), 1)
    if len(outer) != 1 or tuple(starts.shape) != (batch + 1,):
        raise CallError(
            f"with cu_seqlens_q of shape (batch + 1,) = ({batch + 1},) scores are (total_q, columns), got "
            f"{tuple(starts.shape)} and {tuple(call.scores.shape)}"
        )
    return batch, 1


def select(call: Topk, sizes: TopkSizes) -> Tensor:
    """The selection in torch: a stable sort, some rows at a time."""
    indices = _indices(call, sizes)
    if call.page_table is not None:
        indices = _slots(call, sizes, indices)
    return indices if call.out is None else call.out.copy_(indices)


def _slots(call: Topk, sizes: TopkSizes, indices: Tensor) -> Tensor:
    """Slots of a cache for indices, -1 where these are."""
    assert call.page_table is not None
    assert call.page_size is not None
    row = torch.arange(sizes.rows, device=indices.device)
    if call.cu_seqlens_q is None:
        b = row // sizes.queries
    else:
        b = torch.searchsorted(call.cu_seqlens_q[:-1].contiguous(), row, right=True) - 1
    own = indices.view(sizes.rows, -1).long()
    entry = own.clamp(min=0) // call.page_size
    slots = call.page_table[b[:, None], entry] * call.page_size + own % call.page_size
    return slots.where(own >= 0, -1).to(torch.int32).view(indices.shape)


def _indices(call: Topk, sizes: TopkSizes) -> Tensor:
    """The selected indices in torch."""
    rows = call.scores.reshape(sizes.rows, sizes.columns)
    lengths = None if call.lengths is None else call.lengths.reshape(sizes.rows)
    step = max(_SORTED // max(sizes.columns, 1), 1)
    parts = [
        _selected(rows[first : first + step], call.k, None if lengths is None else lengths[first : first + step])
        for first in range(0, sizes.rows, step)
    ]
    out = torch.cat(parts) if parts else torch.empty((0, call.k), dtype=torch.int32, device=call.scores.device)
    return out.view(sizes.shape)


def _selected(scores: Tensor, k: int, lengths: Tensor | None) -> Tensor:
    """Indices of the k largest of some rows, ascending."""
    columns = scores.shape[1]
    scores = scores + 0.0  # sorts that compare bits would put -0 behind 0
    hidden = scores == -torch.inf
    if lengths is not None:
        hidden = hidden | (torch.arange(columns, device=scores.device) >= lengths[:, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]  # NaN comes first
    order = order.masked_fill(hidden.gather(1, order), columns).sort(dim=1).values
    order = order.masked_fill(order == columns, -1)
    return torch.nn.functional.pad(order, (0, k - order.shape[1]), value=-1).to(torch.int32)


class PreparedTopk:
    """A call of one form on a kernel."""

    __slots__ = ("_launches", "_shape")

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, grid: Grid, driver: Driver, device: int, shape: tuple[int, ...]
    ) -> None:
        """Raises LoadError if the cubin does not load."""
        self._launches, self._shape = HelperLaunches(kernel, operands, [grid], driver, device), shape

    def run(self, call: Topk, addresses: list[int]) -> Tensor:
        """Launch the call and return its result."""
        out = call.out
        if out is None:
            out = call.scores.new_empty(self._shape, dtype=torch.int32)
            addresses[_OUT] = out.data_ptr()
        self._launches(addresses)
        return out


def prepare(call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
    """The launch of a checked call on the first kernel that takes it, or the reason why none does."""
    missing = "no package has a kernel that selects scores; an entry with 'passes: index_scores' brings one"
    device = call.scores.device.index or 0
    kernels = sorted(kernels_of(TOPK, TOPK_VARIANT, torch.float32), key=most_columns)
    return first_that_takes(kernels, device, driver, lambda kernel: prepare_on(kernel, call, sizes, driver), missing)


def prepare_on(kernel: Kernel, call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
    """The launch of a checked call on one kernel, or the reason against it."""
    scores = call.scores
    if not sizes.rows or not sizes.columns:
        return "there is no score"
    stride = _row_stride(scores)
    if stride is None:
        return "rows of scores are not contiguous, or not evenly spaced"
    into = call.k if call.out is None else _row_stride(call.out)
    if into is None:
        return "rows of out are not contiguous, or not evenly spaced"
    for name in ("lengths", "cu_seqlens_q"):
        tensor = getattr(call, name)
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} is not contiguous"
    table = call.page_table
    if (table is not None or into != call.k) and not takes(kernel, "page_table"):
        return f"{kernel.full_name}, from an older attngen, takes no page table and no wider rows of out; rebuild it"
    if table is not None and table.shape[1] > 1 and table.stride(1) != 1:
        return "rows of page_table are not contiguous"
    if sizes.columns > most_columns(kernel):
        return f"{kernel.full_name} takes rows of at most {most_columns(kernel)} scores, not {sizes.columns}"
    by_warps = kernel.main.grid == _BY_WARPS
    most = MOST if by_warps else max(launch.tile_m for launch in kernel.launches)
    if call.k > most:
        return f"{kernel.full_name} selects at most {most} scores, not {call.k}"
    if sizes.rows > MOST or sizes.columns > MOST - 2 * kernel.tile_n:
        return "more scores than 32 bits count"
    least = sizes.columns if by_warps else call.k
    launch = min((one for one in kernel.launches if one.tile_m >= least), key=lambda one: one.tile_m)
    page_size = call.page_size or 1
    numbers = {
        "columns": sizes.columns, "k": call.k, "batch": sizes.batch, "queries": sizes.queries, "page_size": page_size,
        "page_size_reciprocal": reciprocal(page_size), "rows": sizes.rows,
    }  # fmt: skip
    strides: dict[tuple[str, str | int | None], int] = {
        ("scores", "row"): stride, ("out", "row"): into, ("page_table", "b"): 0 if table is None else table.stride(0),
    }  # fmt: skip
    operands = LaunchOperands(FIELDS.tensors, numbers, strides)
    grid = Grid(launch.entry, -(-sizes.rows // (launch.entry.threads // 32)) if by_warps else sizes.rows)
    return PreparedTopk(kernel, operands, grid, driver, scores.device.index or 0, sizes.shape)


def most_columns(kernel: Kernel) -> int:
    """The most scores of a row that a kernel takes."""
    return kernel.tile_m if kernel.main.grid == _BY_WARPS else MOST


def _row_stride(scores: Tensor) -> int | None:
    """Elements from a row to the next; None if that differs, or if rows are not contiguous."""
    if scores.shape[-1] > 1 and scores.stride(-1) != 1:
        return None
    stride: int | None = None
    rows = 1
    for extent, step in zip(reversed(scores.shape[:-1]), reversed(scores.stride()[:-1]), strict=True):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        if step != stride * rows:
            return None
        rows *= extent
    return stride or 0


class TopkHelper(Helper[Topk, TopkSizes, Tensor]):
    """Selecting the largest scores of rows; a call gives their indices."""

    name = "topk"
    fields = FIELDS

    def check(self, call: Topk) -> TopkSizes:
        return check(call)

    def check_contents(self, call: Topk, sizes: TopkSizes) -> None:
        """Check where packed rows begin: every score, length and page number has a meaning."""
        if call.cu_seqlens_q is not None:
            check_offsets("cu_seqlens_q", call.cu_seqlens_q.tolist(), sizes.rows)

    def in_torch(self, call: Topk, sizes: TopkSizes) -> Tensor:
        return select(call, sizes)

    def prepare(self, call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
        return prepare(call, sizes, driver)


SELECTION = TopkHelper()
