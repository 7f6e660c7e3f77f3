"""The kernel that merges two results: which calls it is for, its launch, and the path of calls to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from attngen.dtypes import CHUNK_BYTES
from attngen.errors import CallError
from attngen.operations import MERGE, MERGE_VARIANT
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.merge.arguments import FIELDS, Merge, MergeSizes, check
from attngen.runtime.operations.merge.in_torch import merge
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, Key, LaunchOperands, Resized
from attngen.runtime.operations.shared.operands import MOST, against_rows
from attngen.runtime.operations.shared.path import Helper, Kind, PreparedHelper, first_that_takes, kernels_of
from attngen.runtime.registry.lookup import registry

#: Tensors of a launch, in the order of their addresses.
_TENSORS = (*FIELDS.tensors, "out", "lse")

#: Axes of rows of which kernels take strides: batch, then seqlen and heads in the order of the outputs.
_AXES = ("outer", "middle", "inner")

#: Shapes that are kept for each kind. Not measured: a bound of memory.
_KEPT_SIZES = 1024

#: Types of tensors that kernels, or traces, take; torch knows what others, as DTensor, make of its operations.
_TYPES = (*PLAIN, FakeTensor)

#: Dtypes of outputs that kernels merge.
_DTYPES = frozenset({torch.bfloat16, torch.float16})


def is_for_kernel(parts: Sequence[Tensor], logs: Sequence[Tensor]) -> bool:
    """Whether results may be merged by a kernel: two on a GPU, of which nobody wants a gradient or a tangent, and which
    no transform and no other class of tensors has wrapped."""
    if len(parts) != 2 or len(logs) != 2 or not torch_state.on_gpu(parts[0]) or parts[0].dtype not in _DTYPES:
        return False
    tensors = (*parts, *logs)
    if any(log.dtype != torch.float32 for log in logs):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    if any(type(tensor) not in _TYPES for tensor in tensors):
        return False
    if torch_state.transforms_active() or forward_ad._current_level >= 0:
        return False
    return torch_state.is_compiling() or not torch_state.is_tracing()


class PreparedMerge(HelperLaunches):
    """The launch of calls of one dtype on one device, whatever their sizes."""

    __slots__ = ("threads",)

    def __init__(self, kernel: Kernel, numbers: Mapping[Key, int], driver: Driver, device: int) -> None:
        """``numbers``: all of a call. Raises LoadError as its base does."""
        #: Threads of a block.
        self.threads = kernel.tile_m
        operands = LaunchOperands(
            _TENSORS,
            {key: number for key, number in numbers.items() if isinstance(key, str)},
            {key: number for key, number in numbers.items() if not isinstance(key, str)},
        )
        grid = Grid(kernel.main.entry, -(-numbers["count"] // self.threads))
        super().__init__(kernel, operands, [grid], driver, device, tuple(numbers))

    def resize(self, numbers: Mapping[Key, int]) -> Resized:
        """The launch of a call with other numbers."""
        return self.resized(numbers, [-(-numbers["count"] // self.threads)])

    def run(self, call: Merge, addresses: list[int], resized: Resized | None = None) -> tuple[Tensor, Tensor]:
        """Launch the call and return its results."""
        shared = call.out_0.shape[0] == 1  # by all sequences of the other part, which may be one
        out_like, lse_like = (call.out_1, call.lse_1) if shared else (call.out_0, call.lse_0)
        out, lse = out_like.new_empty(out_like.shape), lse_like.new_empty(lse_like.shape)
        self([*addresses, out.data_ptr(), lse.data_ptr()], resized)
        return out, lse


class MergeCalls:
    """Prepared launches for all calls of a kind."""

    __slots__ = ("_kept", "prepared")

    def __init__(self, prepared: PreparedMerge) -> None:
        self.prepared = prepared
        #: The launches of shapes and strides that calls had before; False where kernels do not take them.
        self._kept: RecentCache[Resized | Literal[False]] = RecentCache(_KEPT_SIZES)

    def ready(self, call: Merge) -> Resized | None:
        """The launch of a call of the kind; None where something about its shapes needs a look."""
        out_0, out_1, lse_0, lse_1, _ = call
        key = (
            out_0.shape, out_0.stride(), out_1.shape, out_1.stride(), lse_0.shape, lse_0.stride(), lse_1.shape,
            lse_1.stride(),
        )  # fmt: skip
        known = self._kept[key]
        if known is None:
            try:
                numbers = numbers_of(call, check(call), self.prepared.threads)
            except CallError:
                return None
            known = False if isinstance(numbers, str) else self.prepared.resize(numbers)
            self._kept.put(key, known)
        return known or None


def kind_of(call: Merge) -> Kind | None:
    """Kind of a call: its dtype, device and layout; None if it has none."""
    out_0, out_1, lse_0, lse_1, layout = call
    dtype, device = out_0.dtype, out_0.get_device()
    addresses = []
    try:
        for tensor in (out_0, out_1, lse_0, lse_1):
            if tensor.get_device() != device or tensor.is_neg():
                return None
            addresses.append(tensor.data_ptr())
    except RuntimeError:  # no memory
        return None
    if out_1.dtype != dtype or lse_0.dtype != torch.float32 or lse_1.dtype != torch.float32:
        return None
    if (addresses[0] | addresses[1]) % CHUNK_BYTES:
        return None
    return Kind((registry.generation, device, dtype, layout), addresses)


def prepare(call: Merge, sizes: MergeSizes, driver: Driver) -> PreparedMerge | str:
    """The launch of a checked call on the first kernel that takes it, or the reason why none does."""
    missing = f"no package has a kernel that merges outputs in {call.out_0.dtype}; kernels with pages bring one"
    device = call.out_0.device.index or 0
    kernels = kernels_of(MERGE, MERGE_VARIANT, call.out_0.dtype)
    return first_that_takes(kernels, device, driver, lambda kernel: prepare_on(kernel, call, sizes, driver), missing)


def prepare_on(kernel: Kernel, call: Merge, sizes: MergeSizes, driver: Driver) -> PreparedMerge | str:
    """The launch of a checked call on one kernel, or the reason against it."""
    numbers = numbers_of(call, sizes, kernel.tile_m)
    return numbers if isinstance(numbers, str) else PreparedMerge(kernel, numbers, driver, call.out_0.device.index or 0)


def numbers_of(call: Merge, sizes: MergeSizes, threads: int) -> dict[Key, int] | str:
    """Sizes and strides of a checked call as a kernel with blocks of so many threads takes them, or the reason against
    it."""
    if any(tensor is None or tensor.layout != torch.strided or tensor.is_neg() for tensor in FIELDS.tensors_of(call)):
        return "one of the tensors is sparse, or its memory holds numbers of the other sign"
    outs, logs = {"out_0": call.out_0, "out_1": call.out_1}, {"lse_0": call.lse_0, "lse_1": call.lse_1}
    reason = against_rows(outs, call.out_0.element_size())
    if reason is not None:
        return reason
    outer, middle, inner = (1, *sizes.out[:-1])[-3:]
    vectors = sizes.out[-1] * call.out_0.element_size() // CHUNK_BYTES
    count = outer * middle * inner * vectors
    if not count:
        return "there is no row"
    if count + threads > MOST:
        return "more rows than 32 bits count"
    numbers: dict[Key, int] = {"count": count}
    for name, value in (("vectors", vectors), ("inner", inner), ("middle", middle)):
        numbers[name], numbers[f"{name}_reciprocal"] = value, reciprocal(value)
    turned = len(sizes.out) == 3 or call.layout == "bshd"  # log-sum-exps have heads first
    rows = {name: (out.shape[:-1], out.stride()[:-1]) for name, out in outs.items()}
    rows |= {name: (log.shape, log.stride()) for name, log in logs.items()}
    rows["lse"] = sizes.lse, (sizes.lse[-2] * sizes.lse[-1], sizes.lse[-1], 1)[-len(sizes.lse) :]
    for name, (extents, steps) in rows.items():
        by_axis = [step if extent > 1 else 0 for extent, step in zip(extents, steps, strict=True)]
        if turned and name not in outs:
            by_axis[-2:] = by_axis[:-3:-1]
        if len(by_axis) == 2:
            by_axis.insert(0, 0)
        for axis, step in zip(_AXES, by_axis, strict=True):
            numbers[name, axis] = step
    if max(numbers.values()) > MOST:
        return "steps of more elements than 32 bits count"
    return numbers


class MergeHelper(Helper[Merge, MergeSizes, tuple[Tensor, Tensor]]):
    """Merging two results; a call gives the output and its log-sum-exp."""

    name = "merge"
    fields = FIELDS

    def check(self, call: Merge) -> MergeSizes:
        return check(call)

    def check_contents(self, call: Merge, sizes: MergeSizes) -> None:
        """Every output and every log-sum-exp has a meaning."""

    def in_torch(self, call: Merge, sizes: MergeSizes) -> tuple[Tensor, Tensor]:
        return merge((call.out_0, call.out_1), (call.lse_0, call.lse_1), call.layout)

    def kind_of(self, call: Merge) -> Kind | None:
        return kind_of(call)

    def of_kind(self, call: Merge, prepared: PreparedHelper[Merge, tuple[Tensor, Tensor]]) -> MergeCalls:
        assert isinstance(prepared, PreparedMerge)
        return MergeCalls(prepared)

    def prepare(self, call: Merge, sizes: MergeSizes, driver: Driver) -> PreparedMerge | str:
        return prepare(call, sizes, driver)


MERGES = MergeHelper()
