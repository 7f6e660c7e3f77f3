"""How the keys of a call are shared among blocks: the numbers of a split-KV launch that follow from its shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from attngen.runtime.arguments import Call
from attngen.runtime.driver import Driver
from attngen.runtime.module import Kernel, Launch

#: What a block of such a launch is called in manifests.
GRID = "splits"

#: Tiles of keys for which one more cluster pays: a few for each block.
_LEAST_TILES_OF_BLOCK = 8


class Splitting(Protocol):
    """What these numbers depend on of a launch."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def cluster(self) -> int: ...


def clusters_at_once(kernel: Kernel, driver: Callable[[], Driver], device: int) -> int:
    """Return how many clusters of a split-KV kernel, which is loaded for that, run at once; 1 for other kernels."""
    return min((_clusters(one, driver(), device) for one in kernel.launches if one.grid == GRID), default=1)


def _clusters(launch: Launch, driver: Driver, device: int) -> int:
    entry = launch.entry
    return driver.clusters(entry.function(driver, device), launch.cluster, entry.threads, entry.shared_memory, device)


def split_sizes(launch: Splitting, call: Call, clusters: int) -> dict[str, int]:
    """Return the numbers by the names that manifests use.

    ``row_warps`` (two to the ``row_bits``) warps have the query rows of one KV head, ``split_tiles`` tiles of keys are
    a split if the call fixes that, and 0 if blocks get equal shares; a sequence has at most ``max_splits`` of them.
    ``split_blocks`` are launched, of which ``clusters`` run at once; partial results take ``split_slots`` places, and
    who comes last is found by ``split_counters``, which are 0 before and after each launch.
    """
    rows = call.seqlen_q * (call.heads // max(call.kv_heads, 1))
    blocks_of_rows = max(-(-rows // launch.tile_m), 1)
    row_bits = min((blocks_of_rows - 1).bit_length(), max(launch.warps // 2, 1).bit_length() - 1)
    units = call.batch * call.kv_heads * -(-blocks_of_rows // (1 << row_bits))
    kv_tiles = max(-(-call.seqlen_k // launch.tile_n), 1)
    split_tiles = 0
    if call.split_size:
        split_tiles = -(-call.split_size // launch.tile_n)
    elif call.num_splits:
        split_tiles = -(-kv_tiles // call.num_splits)
    max_splits = -(-kv_tiles // split_tiles) if split_tiles else 1
    useful = max(-(-units * kv_tiles // (_LEAST_TILES_OF_BLOCK * launch.cluster)), units, 1)
    blocks = launch.cluster * min(clusters, useful)
    return {
        "row_bits": row_bits,
        "row_warps": 1 << row_bits,
        "split_tiles": split_tiles,
        "max_splits": max_splits,
        "split_blocks": blocks,
        "split_slots": units * max_splits if split_tiles else 2 * blocks,
        "split_counters": units if split_tiles else blocks,
    }
