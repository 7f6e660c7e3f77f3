"""Split-KV launches: the sizes that follow from the shapes of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from attngen.dtypes import LATENT_ROWS, MERGED_ROWS
from attngen.lang.divisors import reciprocal
from attngen.lang.listed import EXTRA_INDICES, INDICES, LISTS
from attngen.manifest import LaunchFields

if TYPE_CHECKING:
    from attngen.runtime.arguments.checked import Call

#: Tiles of keys for which one more cluster pays: those of each block that the plan calls ``least_tiles``.
_LEAST_TILES_OF_BLOCK = 8

#: The same of kernels by wgmma, whose tiles have four times as many keys, and of those among them that convert rows of
#: two caches, whose tiles take longer.
_LEAST_WIDE_TILES, _LEAST_CONVERTED_TILES = 2, 1

#: Blocks that are enough to keep memory busy, and tiles of the longest sequence which are read so soon that this does
#: not matter; measured.
_BUSY_BLOCKS = 64
_SHORT_TILES = 512


#: Warps with rows of their own where a call fixes the size of splits. The other warps of a block share the keys of a
#: row, and their number decides its bits, so that it must not depend on the other sequences. Two cost decoding 3 % of
#: the time that the best number takes (one: nothing), and prompts 10 % (one: 50 %). Measured on an H100, 32 and 8 heads
#: of 128.
_FIXED_ROW_WARPS = 2


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a device for a split-KV launch, or for one that cuts tiles: blocks at once, or clusters of blocks
    that work together. Where blocks share the keys of a tile of queries: how many do so in a call."""

    blocks: int = 1
    clusters: int = 1
    shares: int = 1


#: Clusters of each size that an H100 of 132 multiprocessors runs at once, each in one part of the chip.
_MULTIPROCESSORS = 132
_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


def clusters_at_once(blocks: int, size: int) -> int:
    """Clusters of ``size`` blocks that a card probably runs at once, from the number of blocks that it runs at once.

    Cards differ in the multiprocessors of each GPC; a launch asks the driver.
    """
    return max(_AT_ONCE[size] * blocks // _MULTIPROCESSORS, 1)


def split_sizes(launch: LaunchFields, call: Call, capacity: Capacity) -> dict[str, int]:
    """Return the numbers by the names that manifests use.

    ``row_warps`` (two to the ``row_bits``) warps have a unit of query rows, of which a KV head has ``row_units`` in
    each sequence. ``split_tiles`` tiles of keys are a split if the call fixes that, and 0 if blocks get equal shares; a
    sequence has at most ``max_splits`` of them. ``split_blocks`` are launched, in clusters of ``split_cluster``;
    partial results take ``split_slots`` places, and who comes last is found by ``split_counters``, which are 0 before
    and after each launch; or ``merge_blocks`` add them up. With keys by index, a unit has rows of a single query, whose
    heads are padded to ``query_rows`` rows.
    """
    batch, kv_heads, tile_m, split_size = call.batch, call.kv_heads, launch.tile_m, call.split_size
    group = call.heads // max(kv_heads, 1)
    listed = call.variant.keys is not None
    shared = launch.row_blocks == 1  # the blocks of a cluster share the keys of a unit, or its rows
    rows = group if listed else call.seqlen_q * group
    together = max(-(-group // tile_m), _FIXED_ROW_WARPS) if split_size and shared else 0
    row_bits, row_units, query_rows = _rows_of_units(rows, tile_m, launch.row_warps, together)
    if listed:
        row_units *= call.seqlen_q
    units = batch * kv_heads * row_units
    kv_tiles = (_listed_tiles(launch, call) if listed else -(-call.seqlen_k // launch.tile_n)) or 1
    split_tiles, max_splits = 0, 1
    if split_size:
        split_tiles = -(-split_size // launch.tile_n)
        max_splits = -(-kv_tiles // split_tiles)
    elif call.num_splits:
        split_tiles = -(-kv_tiles // call.num_splits)
        max_splits = -(-kv_tiles // split_tiles)
    if shared:
        clustered = not split_tiles and _clustered(units, kv_tiles, launch.cluster, capacity)
        size, least = launch.cluster, _LEAST_TILES_OF_BLOCK * (launch.cluster if clustered else 1)
    else:
        clustered, size, least = row_bits > 0, launch.row_blocks, _least_wide_tiles(call)
    cluster, at_once = (size, capacity.clusters) if clustered else (1, capacity.blocks)
    if clustered and launch.cluster == 1:
        at_once = capacity.blocks // size
    useful = max(-(-units * kv_tiles // least), units, 1)
    blocks = cluster * min(at_once, useful)
    # by a launch, so that nobody has to find out who comes last
    merged = not shared and not split_tiles and not launch.merges
    if launch.merges:
        counters = 2 * units * cluster  # how many parts are there, and how many blocks have left
    elif split_tiles:
        counters = units * (1 if shared else cluster)
    else:
        counters = 0 if merged else blocks
    return {
        "row_bits": row_bits,
        "row_warps": 1 << row_bits,
        "row_units": row_units,
        "query_rows": query_rows,
        "split_tiles": split_tiles,
        "max_splits": max_splits,
        "split_blocks": blocks,
        "split_cluster": min(cluster, launch.cluster),
        "split_slots": units * max_splits if split_tiles else 2 * blocks // (1 if shared else cluster),
        "split_counters": counters,
        "merge_blocks": blocks // cluster * (tile_m << row_bits) // MERGED_ROWS if merged else 0,
        "batch_reciprocal": reciprocal(batch),
        "row_units_reciprocal": reciprocal(row_units),
        "query_rows_reciprocal": reciprocal(query_rows),
        "split_tiles_reciprocal": reciprocal(split_tiles),
    }


def _listed_tiles(launch: LaunchFields, call: Call) -> int:
    """Tiles of the keys that a call lists; each has keys of one list."""
    lists = LISTS[str(call.variant.keys)]
    keys = [call.tensors[INDICES.name].shape[-1] * lists.block]
    if lists.extra:
        keys.append(call.tensors[EXTRA_INDICES.name].shape[-1])
    return sum(-(-each // launch.tile_n) for each in keys)


def _least_wide_tiles(call: Call) -> int:
    """Tiles of keys for which one more cluster of a kernel by wgmma pays."""
    row = LATENT_ROWS.get(call.kv_dtype) if EXTRA_INDICES.name in call.tensors else None
    return _LEAST_CONVERTED_TILES if row is not None and row.scales_after_rows else _LEAST_WIDE_TILES


@lru_cache(1024)
def _rows_of_units(rows: int, tile_m: int, row_warps: int, together: int) -> tuple[int, int, int]:
    """Bits of the number of warps with rows of their own, units of a KV head's ``rows``, and the rows of all of them.
    ``together``: so many warps as a call fixes; 0: what the rows fill."""
    blocks = max(-(-rows // tile_m), 1)
    row_bits = min(((together or blocks) - 1).bit_length(), row_warps.bit_length() - 1)
    row_units = -(-blocks // (1 << row_bits))
    return row_bits, row_units, row_units * tile_m << row_bits


def _clustered(units: int, kv_tiles: int, cluster: int, capacity: Capacity) -> bool:
    """Whether the blocks of a cluster work together: they exchange results faster than blocks through memory, but only
    if units keep most of the multiprocessors busy, or the work is short anyway."""
    if cluster == 1 or units > capacity.clusters:
        return False
    return units * cluster >= _BUSY_BLOCKS or kv_tiles <= _SHORT_TILES
