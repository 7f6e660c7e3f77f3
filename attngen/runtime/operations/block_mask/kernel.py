"""The kernel that makes block masks, its launch, and the path of calls to it."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.operations import BLOCK_MASK, BLOCK_MASK_VARIANT
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.splits import reciprocal
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.block_mask.arguments import FIELDS, BlockLists, MaskSizes, check, check_contents
from attngen.runtime.operations.block_mask.in_torch import block_mask
from attngen.runtime.operations.shared.launches import Grid, HelperLaunches, LaunchOperands
from attngen.runtime.operations.shared.operands import MOST
from attngen.runtime.operations.shared.path import Helper, first_that_takes, kernels_of

#: Tensors of a launch, in the order of their addresses.
_TENSORS = (*FIELDS.tensors, "out")


class PreparedBlockMask(HelperLaunches):
    """The launch of calls of one form."""

    __slots__ = ("_shape",)

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, sizes: MaskSizes, rows: int, driver: Driver, device: int
    ) -> None:
        """Raises LoadError as its base does."""
        self._shape = sizes.shape
        super().__init__(kernel, operands, [Grid(kernel.main.entry, -(-rows // kernel.tile_m))], driver, device)

    def run(self, call: BlockLists, addresses: list[int]) -> Tensor:
        """Launch the call and return its mask."""
        out: Tensor = call.indices.new_empty(self._shape, dtype=torch.bool)
        self([*addresses, out.data_ptr()])
        return out


def prepare(call: BlockLists, sizes: MaskSizes, driver: Driver) -> PreparedBlockMask | str:
    """The launch of a checked call on the first kernel that takes it, or the reason why none does."""
    missing = "no package has a kernel that makes block masks; a variant with 'blocks' brings one"
    device = call.indices.device.index or 0
    kernels = kernels_of(BLOCK_MASK, BLOCK_MASK_VARIANT, torch.float32)
    return first_that_takes(kernels, device, driver, lambda kernel: prepare_on(kernel, call, sizes, driver), missing)


def prepare_on(kernel: Kernel, call: BlockLists, sizes: MaskSizes, driver: Driver) -> PreparedBlockMask | str:
    """The launch of a checked call on one kernel, or the reason against it."""
    (batch, heads, query_blocks), capacity, key_blocks = sizes
    rows = batch * heads * query_blocks
    if not rows or not key_blocks:
        return "there is no block"
    if max(rows + kernel.tile_m, capacity + kernel.tile_n, key_blocks + kernel.tile_n) > MOST:
        return "more blocks than 32 bits count"
    divisors = {"heads": heads, "query_blocks": query_blocks}
    numbers = {
        "rows": rows, "capacity": capacity, "key_blocks": key_blocks, **divisors,
        **{f"{name}_reciprocal": reciprocal(value) for name, value in divisors.items()},
    }  # fmt: skip
    counts = (0, 0, 0) if call.counts is None else call.counts.expand(sizes.rows).stride()
    strides: dict[tuple[str, str | int | None], int] = {}
    strides |= {("counts", axis): step for axis, step in zip("bhq", counts, strict=True)}
    lists = call.indices.expand(*sizes.rows, capacity).stride()
    strides |= {("indices", axis): step for axis, step in zip(("b", "h", "q", "entry"), lists, strict=True)}
    if max(strides.values()) > MOST:
        return "steps of more elements than 32 bits count"
    operands = LaunchOperands(_TENSORS, numbers, strides)
    return PreparedBlockMask(kernel, operands, sizes, rows, driver, call.indices.device.index or 0)


class BlockMaskHelper(Helper[BlockLists, MaskSizes, Tensor]):
    """Making block masks; a call gives its mask."""

    name = "block_mask"
    fields = FIELDS

    def check(self, call: BlockLists) -> MaskSizes:
        return check(call)

    def check_contents(self, call: BlockLists, sizes: MaskSizes) -> None:
        check_contents(call, sizes)

    def in_torch(self, call: BlockLists, sizes: MaskSizes) -> Tensor:
        return block_mask(call, sizes)

    def prepare(self, call: BlockLists, sizes: MaskSizes, driver: Driver) -> PreparedBlockMask | str:
        return prepare(call, sizes, driver)


BLOCK_MASKS = BlockMaskHelper()
