"""Sizes of calls of one kind whose lengths change from call to call, as those of servers do."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.manifest import GRID
from attngen.runtime.arguments.checked import Call
from attngen.runtime.geometry.heads_in_l2 import forward_heads_in_l2, group_of, prompts_of
from attngen.runtime.geometry.splits import SPLIT_NAMES, Capacity, SplitNumbers
from attngen.runtime.kernels.module import Kernel, KernelLaunch

#: Sizes that ``PlainSizes`` has of any launch, and of those whose blocks take tiles of queries. The places of the
#: split counters and clusters among those of launches whose blocks share keys.
_PLAIN = (
    "batch", "seqlen_q", "seqlen_k", "max_seqlen_q", "max_seqlen_k", "total_q", "total_k", "stride of page_table",
    "beside",
)  # fmt: skip
_OF_TILES = (*_PLAIN, "q_tiles", "heads_in_l2")
_OF_SPLITS = (*_PLAIN, *SPLIT_NAMES)
_BLOCKS, _CLUSTER, _COUNTERS = map(SPLIT_NAMES.index, ("split_blocks", "split_cluster", "split_counters"))


def plain_names(kernel: Kernel) -> Sequence[str]:
    """The names of what ``PlainSizes`` computes for a kernel, in order: nothing, if that does not serve it."""
    (launch, *others) = kernel.launches
    if others or launch.tile_map or launch.cuts or launch.by_keys or launch.short_early or launch.split:
        return ()
    if launch.grid == GRID:
        names: Sequence[str] = _OF_SPLITS
    elif launch.grid == "queries" and launch.persistent:
        names = _OF_TILES
    else:
        return ()
    factors = (factor for workspace in kernel.workspaces for term in workspace.terms for factor in term)
    return names if set(names).issuperset(factor for factor in factors if isinstance(factor, str)) else ()


class PlainSizes:
    """The sizes of a launch of which there are ``plain_names``, as a ``Geometry`` has them, for calls of one kind:
    servers change them with each call."""

    __slots__ = ("_group", "_heads", "_kv_heads", "_launch", "_least", "_multiprocessors", "_rows", "_split")

    def __init__(self, launch: KernelLaunch, call: Call, capacity: Capacity, multiprocessors: int) -> None:
        self._launch, self._multiprocessors = launch, multiprocessors
        self._split = SplitNumbers(launch, call, capacity) if launch.grid == GRID else None
        self._group, self._kv_heads, self._least = group_of(call), call.kv_heads, call.least_queries
        #: Rows of a tile of queries, and units of a sequence.
        self._rows, self._heads = (self._group, call.kv_heads) if launch.pack_gqa else (1, call.heads)

    def __call__(
        self, batch: int, seqlen_q: int, seqlen_k: int, total_q: int, total_k: int, table_stride: int, beside: int,
        blocks: int,
    ) -> tuple[tuple[int, ...], int, int, int]:  # fmt: skip
        """The sizes in the order of their names, blocks, blocks of a cluster, and split counters. ``blocks``: the most
        that are asked for, or 0."""
        plain = batch, seqlen_q, seqlen_k, seqlen_q, seqlen_k, total_q, total_k, table_stride, beside
        if self._split is not None:
            split = self._split(batch, seqlen_q, seqlen_k, blocks)
            return plain + split, split[_BLOCKS], split[_CLUSTER], split[_COUNTERS]
        q_tiles, units = -(-seqlen_q * self._rows // self._launch.tile_m), batch * self._heads
        sequences = prompts_of(total_q, batch, seqlen_q) if self._least else batch
        heads_in_l2 = forward_heads_in_l2(self._launch, sequences * self._kv_heads, seqlen_k, self._group, units)
        tiles, most = q_tiles * units, blocks or self._multiprocessors
        return (*plain, q_tiles, heads_in_l2), tiles if tiles < most else most, 1, 0
