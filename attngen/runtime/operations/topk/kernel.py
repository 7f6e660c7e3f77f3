"""Selection of the largest scores of each row: arguments, the kernel's launch, and the same in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.operations import TOPK, TOPK_VARIANT
from attngen.runtime.arguments.checked import refuse_unreadable
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands
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


FIELDS = Fields(Topk)

#: Tensors of a launch, in the order of their addresses.
_TENSORS = (*FIELDS.tensors, "out")


@dataclass(frozen=True, slots=True)
class TopkSizes:
    """Rows, scores of each, and the shape of the result."""

    rows: int
    columns: int
    shape: tuple[int, ...]


def check(call: Topk) -> TopkSizes:
    """Check shapes, dtypes and devices. Raises CallError."""
    scores, k, lengths = call
    refuse_unreadable({"scores": scores, "lengths": lengths})
    if not isinstance(scores, Tensor):
        raise CallError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if scores.dtype != torch.float32:
        raise CallError(f"scores must be float32, got {scores.dtype}")
    if not scores.dim():
        raise CallError("scores must have a row, got a tensor without axes")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise CallError(f"k must be a positive integer, got {k!r}")
    outer, columns = tuple(scores.shape[:-1]), scores.shape[-1]
    if lengths is not None:
        if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32:
            kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
            raise CallError(f"lengths must be an int32 tensor, got {kind}")
        if lengths.device != scores.device:
            raise CallError(f"lengths are on {lengths.device}, but scores on {scores.device}")
        if tuple(lengths.shape) != outer:
            raise CallError(f"lengths must have shape {outer}, one for each row of scores, got {tuple(lengths.shape)}")
    rows = 1
    for extent in outer:
        rows *= extent
    return TopkSizes(rows, columns, (*outer, k))


def select(call: Topk, sizes: TopkSizes) -> Tensor:
    """The selection in torch: a stable sort, some rows at a time."""
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
        out: Tensor = call.scores.new_empty(self._shape, dtype=torch.int32)
        self._launches([*addresses, out.data_ptr()])
        return out


def prepare(call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
    """The launch of a checked call on the first kernel that takes it, or the reason why none does."""
    missing = "no package has a kernel that selects scores; an entry with 'passes: index_scores' brings one"
    device = call.scores.device.index or 0
    kernels = kernels_of(TOPK, TOPK_VARIANT, torch.float32)
    return first_that_takes(kernels, device, driver, lambda kernel: prepare_on(kernel, call, sizes, driver), missing)


def prepare_on(kernel: Kernel, call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
    """The launch of a checked call on one kernel, or the reason against it."""
    scores = call.scores
    if not sizes.rows or not sizes.columns:
        return "there is no score"
    stride = _row_stride(scores)
    if stride is None:
        return "rows of scores are not contiguous, or not evenly spaced"
    if call.lengths is not None and not call.lengths.is_contiguous():
        return "lengths are not contiguous"
    most = max(launch.tile_m for launch in kernel.launches)
    if call.k > most:
        return f"{kernel.full_name} selects at most {most} scores, not {call.k}"
    if sizes.rows > MOST or sizes.columns > MOST - 2 * kernel.tile_n:
        return "more scores than 32 bits count"
    launch = min((one for one in kernel.launches if one.tile_m >= call.k), key=lambda one: one.tile_m)
    operands = LaunchOperands(_TENSORS, {"columns": sizes.columns, "k": call.k}, {("scores", "row"): stride})
    grid = Grid(launch.entry, sizes.rows)
    return PreparedTopk(kernel, operands, grid, driver, scores.device.index or 0, sizes.shape)


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
        """Every score and every length has a meaning."""

    def in_torch(self, call: Topk, sizes: TopkSizes) -> Tensor:
        return select(call, sizes)

    def prepare(self, call: Topk, sizes: TopkSizes, driver: Driver) -> PreparedTopk | str:
        return prepare(call, sizes, driver)


SELECTION = TopkHelper()
