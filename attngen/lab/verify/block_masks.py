"""Kernels that make block masks, compared with plain torch: the same bools, from right lists and from wrong ones."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from attngen.errors import LoadError
from attngen.inspect.contract import Deviation
from attngen.lab.verify.trial import Trial, try_cases
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.block_mask import kernel as block_masks
from attngen.runtime.operations.block_mask.arguments import BlockLists, check
from attngen.runtime.operations.block_mask.in_torch import block_mask
from attngen.runtime.operations.shared.records import addresses_of

#: Batch, heads and blocks of queries of a call.
_ROWS = (2, 3, 13)


def try_block_mask(kernel: Kernel, device: torch.device | str, seed: int, *, small: bool) -> Trial:
    """Run a kernel on lists of many lengths; ``small``: with few blocks of keys."""
    run = partial(_deviation, kernel, torch.device(device))
    widths = (1, 16, 37) if small else (1, 16, 37, 512, 2000, kernel.tile_n + 5)
    cases = [
        (f"{key_blocks} blocks of keys, lists of {capacity}", partial(run, key_blocks, capacity))
        for key_blocks, capacity in product(widths, (0, 1, 40, 300))
    ]
    return try_cases(cases, seed)


def _deviation(kernel: Kernel, device: torch.device, key_blocks: int, capacity: int, seed: int) -> Deviation:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator, dtype=torch.int32, device="cpu")
    indices = draw(-2, key_blocks + 2, (*_ROWS, capacity))  # some are no block
    counts = draw(-1, capacity + 2, _ROWS)
    call = BlockLists(indices.to(device), counts.to(device), key_blocks)
    sizes = check(call)
    prepared = block_masks.prepare_on(kernel, call, sizes, drivers.current())
    if isinstance(prepared, str):
        raise LoadError(prepared)
    actual = prepared.run(call, addresses_of((call.indices, call.counts)))
    expected = block_mask(BlockLists(indices, counts, key_blocks), sizes)
    # a bool is a byte of 0 or 1
    others = int((actual.view(torch.uint8).cpu() != expected.view(torch.uint8)).sum())
    wrong = (f"{others} of {actual.numel()} blocks are others than plain torch's",) if others else ()
    return Deviation(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, actual.numel(), 0, wrong)
