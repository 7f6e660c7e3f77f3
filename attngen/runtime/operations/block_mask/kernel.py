"""The path of calls that make block masks."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.device.interface import Driver
from attngen.runtime.operations.block_mask.arguments import FIELDS, BlockLists, MaskSizes, check, check_contents
from attngen.runtime.operations.block_mask.in_torch import block_mask
from attngen.runtime.operations.shared.path import Helper, PreparedHelper


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

    def prepare(self, call: BlockLists, sizes: MaskSizes, driver: Driver) -> PreparedHelper[BlockLists, Tensor] | str:
        return "there is no kernel"


BLOCK_MASKS = BlockMaskHelper()
