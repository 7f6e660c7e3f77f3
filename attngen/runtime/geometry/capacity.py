"""Blocks that a device runs at once, for kernels whose blocks share keys or parts of tiles, or end together."""

from __future__ import annotations

from collections.abc import Callable

from attngen.manifest import GRID, SHARES
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.prediction import Card, may_share, shares
from attngen.runtime.geometry.splits import Capacity
from attngen.runtime.kernels.module import Kernel, KernelLaunch


def capacity_for(kernel: Kernel, call: Call, driver: Callable[[], Driver], device: int) -> Capacity:
    """Blocks that a device runs at once of a kernel whose blocks share keys or parts of tiles, or whose order depends
    on their number; and how many of them share the keys of a tile in this call.

    Loads a kernel that shares keys, to ask the driver; asks nothing about others.
    """
    for launch in kernel.launches:
        if launch.grid in (GRID, SHARES):
            return _capacity(kernel, launch, call, driver(), device)
        if launch.cuts or launch.short_early:
            return Capacity(driver().multiprocessors(device) * launch.blocks_at_once)
    return Capacity()


def _capacity(kernel: Kernel, launch: KernelLaunch, call: Call, driver: Driver, device: int) -> Capacity:
    entry, blocks = launch.entry, driver.multiprocessors(device)

    def clusters(size: int) -> int:
        return entry.clusters(driver, device, size) if size > 1 else blocks

    if launch.grid == GRID:
        left = max(blocks - call.sm_margin, 1)
        return Capacity(left, max(clusters(launch.cluster) * left // blocks, 1))
    if not may_share(kernel, call, clusters(2)):
        return Capacity(blocks)
    card = Card(blocks, driver.name(device), driver.bandwidth(device))
    return Capacity(blocks, shares=shares(kernel, call, card, clusters))
