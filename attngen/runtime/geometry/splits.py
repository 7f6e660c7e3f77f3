"""Split-KV launches: the sizes that follow from the shapes of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from attngen.dtypes import LATENT_ROWS, MERGED_ROWS
from attngen.lang.divisors import reciprocal
from attngen.lang.listed import EXTRA_INDICES, INDICES, LISTS
from attngen.runtime.geometry.work_list import stay_whole

if TYPE_CHECKING:
    from attngen.runtime.arguments.checked import Call
    from attngen.runtime.kernels.module import KernelLaunch

#: Blocks that are enough to keep memory busy, and tiles of the longest sequence which are read so soon that this does
#: not matter (docs/notebook/hopper_decode.md, "The schedule, second form").
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


#: Clusters of each size that an H100 of 132 multiprocessors runs at once, each in one part of the chip
#: (docs/notebook/hopper_forward.md, "Sharing the keys of a tile").
_MULTIPROCESSORS = 132
_AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


def clusters_at_once(blocks: int, size: int) -> int:
    """Clusters of ``size`` blocks that a card probably runs at once, from the number of blocks that it runs at once.

    Cards differ in the multiprocessors of each GPC; a launch asks the driver.
    """
    return max(_AT_ONCE[size] * blocks // _MULTIPROCESSORS, 1)


#: Rows that a launch merges at once for each block that splits keys, where its warps search for them. Not measured.
_MERGED_ROWS = 8

#: Names of the numbers of a split-KV launch in manifests, in the order of ``SplitNumbers``.
SPLIT_NAMES = (
    "row_bits", "row_warps", "row_units", "query_rows", "split_tiles", "max_splits", "split_blocks", "split_cluster",
    "split_slots", "split_counters", "merge_blocks", "batch_reciprocal", "row_units_reciprocal",
    "query_rows_reciprocal", "split_tiles_reciprocal",
)  # fmt: skip


def split_sizes(launch: KernelLaunch, call: Call, capacity: Capacity) -> dict[str, int]:
    """Return the numbers by the names that manifests use.

    ``row_warps`` (two to the ``row_bits``) warps have a unit of query rows, of which a KV head has ``row_units`` in
    each sequence. ``split_tiles`` tiles of keys are a split if the call fixes that, and 0 if blocks get equal shares; a
    sequence has at most ``max_splits`` of them. ``split_blocks`` are launched, in clusters of ``split_cluster``;
    partial results take ``split_slots`` places, and who comes last is found by ``split_counters``, which are 0 before
    and after each launch; or ``merge_blocks`` add them up. With keys by index, a unit has rows of a single query, whose
    heads are padded to ``query_rows`` rows.
    """
    numbers = SplitNumbers(launch, call, capacity)(call.batch, call.seqlen_q, call.seqlen_k, call.blocks)
    return dict(zip(SPLIT_NAMES, numbers, strict=True))


class SplitNumbers:
    """The numbers of ``split_sizes`` for calls that differ in sequences, queries and keys only."""

    __slots__ = (
        "_asked", "_blocks", "_cluster", "_clusters", "_either", "_fixed", "_group", "_kv_heads", "_limits", "_listed",
        "_listed_tiles", "_merges", "_searches", "_shared", "_split_size", "_tile_m", "_tile_n", "_together", "_warps",
    )  # fmt: skip

    def __init__(self, launch: KernelLaunch, call: Call, capacity: Capacity) -> None:
        self._tile_m, self._tile_n, self._warps = launch.tile_m, launch.tile_n, launch.row_warps
        self._kv_heads, self._group = call.kv_heads, call.heads // max(call.kv_heads, 1)
        self._listed = call.variant.keys is not None
        self._listed_tiles = _listed_tiles(launch, call) if self._listed else 0
        #: Whether the blocks of a cluster share the keys of a unit, or its rows.
        self._shared = launch.row_blocks == 1
        self._cluster, self._fixed = launch.cluster, launch.cluster if self._shared else launch.row_blocks
        self._merges, self._split_size, self._asked = launch.merges, call.split_size, call.num_splits
        #: Whether warps of the launch that merges search the list of items that workers have begun.
        self._searches = call.kv_dtype in LATENT_ROWS
        #: Whether the call decides if a kernel merges in place or by a launch, whose numbers are the same.
        self._either = self._searches and EXTRA_INDICES.name in call.tensors
        self._together = 0
        if call.split_size and self._shared:
            self._together = max(-(-self._group // launch.tile_m), _FIXED_ROW_WARPS)
        self._limits = launch.limits
        self._blocks, self._clusters = capacity.blocks, capacity.clusters

    def __call__(self, batch: int, seqlen_q: int, seqlen_k: int, blocks: int = 0) -> tuple[int, ...]:
        """The numbers in the order of ``SPLIT_NAMES``. ``blocks``: at most so many, if that is not 0; those beyond what
        runs at once take turns."""
        at_once, clusters = self._blocks, self._clusters
        if blocks:
            at_once, clusters = blocks, clusters * blocks // at_once if blocks <= at_once else 0
        rows = self._group if self._listed else seqlen_q * self._group
        row_bits, row_units, query_rows, of_units, of_rows = _rows_of_units(
            rows, self._tile_m, self._warps, self._together, seqlen_q if self._listed else 1
        )
        units = batch * self._kv_heads * row_units
        kv_tiles = (self._listed_tiles if self._listed else -(-seqlen_k // self._tile_n)) or 1
        split_tiles, max_splits = 0, 1
        if self._split_size:
            split_tiles = -(-self._split_size // self._tile_n)
            max_splits = -(-kv_tiles // split_tiles)
        elif self._asked:
            split_tiles = -(-kv_tiles // self._asked)
            max_splits = -(-kv_tiles // split_tiles)
        shared, least, most, size = self._shared, self._limits.least_tiles, self._cluster, self._fixed
        if not shared:
            size, clustered = min(size, 1 << row_bits), row_bits > 0
        elif split_tiles or most == 1 or units > clusters:
            clustered = False
        else:
            # the blocks of a cluster exchange results faster than blocks through memory, but only if units keep most of
            # the multiprocessors busy, or the work is short anyway
            clustered = units * most >= _BUSY_BLOCKS or kv_tiles <= _SHORT_TILES
        cluster = 1
        if clustered:
            cluster, at_once = size, clusters if most > 1 else at_once // size
            if shared:
                least *= most
        useful = max(-(-units * kv_tiles // least), units, 1)
        blocks = cluster * (at_once if at_once < useful else useful)
        # by a launch, so that nobody has to find out who comes last; but it takes 3 us where no item is cut
        if self._either:
            in_place = not split_tiles and stay_whole(self._limits, units, kv_tiles, blocks // cluster)
        else:
            in_place = self._merges
        merged = not shared and not split_tiles and not in_place
        if in_place:
            max_splits = 0 if self._either else max_splits
            counters = 2 * units * cluster  # how many parts are there, and how many blocks have left
        elif split_tiles:
            counters = units * (1 if shared else cluster)
        else:
            counters = 0 if merged else blocks
        merged_rows = (blocks // cluster * self._tile_m << row_bits) if merged else 0
        if self._searches:
            merged_rows = min(merged_rows, units * self._tile_m << row_bits, _MERGED_ROWS * self._blocks)
        return (
            row_bits, 1 << row_bits, row_units, query_rows, split_tiles, max_splits, blocks,
            cluster if cluster < most else most,
            units * max_splits if split_tiles else 2 * blocks // (1 if shared else cluster), counters,
            -(-merged_rows // MERGED_ROWS), reciprocal(batch), of_units,
            of_rows, reciprocal(split_tiles) if split_tiles else 0,
        )  # fmt: skip


def _listed_tiles(launch: KernelLaunch, call: Call) -> int:
    """Tiles of the keys that a call lists; each has keys of one list."""
    lists = LISTS[str(call.variant.keys)]
    keys = [call.tensors[INDICES.name].shape[-1] * lists.block]
    if lists.extra:
        keys.append(call.tensors[EXTRA_INDICES.name].shape[-1])
    return sum(-(-each // launch.tile_n) for each in keys)


@lru_cache(1024)
def _rows_of_units(
    rows: int, tile_m: int, row_warps: int, together: int, queries: int
) -> tuple[int, int, int, int, int]:
    """Bits of the number of warps with rows of their own, units of a KV head's ``rows``, all of their rows, and the
    reciprocals of both. ``together``: so many warps as a call fixes; 0: what the rows fill. ``queries`` have units of
    their own."""
    blocks = max(-(-rows // tile_m), 1)
    row_bits = min(((together or blocks) - 1).bit_length(), row_warps.bit_length() - 1)
    row_units = -(-blocks // (1 << row_bits))
    query_rows = row_units * tile_m << row_bits
    row_units *= queries
    return row_bits, row_units, query_rows, reciprocal(row_units), reciprocal(query_rows)
