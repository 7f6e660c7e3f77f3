"""Heads of a call: of a group, at work, and side by side, so that L2 keeps what they read."""

from __future__ import annotations

from functools import lru_cache

from attngen.runtime.arguments.checked import Call
from attngen.runtime.geometry.cuts import alike, steps_of
from attngen.runtime.kernels.module import KernelLaunch


def group_of(call: Call) -> int:
    """Query heads of one KV head."""
    return call.heads // max(call.kv_heads, 1)


def tiles_of(call: Call, tile_m: int, *, pack_gqa: bool, seqlen_q: int | None = None) -> tuple[int, int]:
    """Return the tiles of query rows of a unit, and the units: heads, or KV heads with all rows of their group.

    ``seqlen_q`` stands for that of the call, which is the longest one where sequences are packed.
    """
    queries = call.seqlen_q if seqlen_q is None else seqlen_q
    rows, heads = (queries * group_of(call), call.kv_heads) if pack_gqa else (queries, call.heads)
    return -(-rows // tile_m), call.batch * heads


#: KV heads that a backward runs side by side, up to which all such groups are made about equal
#: (docs/notebook/hopper_backward.md, "Windows, documents and scores beside causal, again").
_FEW = 8
#: Blocks of an H100; and the most steps of a tile of keys over those of the mean one where all have about as many
#: (docs/notebook/hopper_backward.md, "What short rows wait for").
_H100_BLOCKS, _EVEN = 132, 1.25


def _is_even(launch: KernelLaunch, call: Call) -> bool:
    """Whether all tiles of keys have about as many steps, as under a window, and few of all."""
    if not launch.visible or launch.tile_map is not None or not alike(call):
        return False
    steps = steps_of(launch, call)
    most = max(steps, default=0)
    return 2 * most * launch.tile_m <= call.seqlen_q and most * len(steps) <= _EVEN * sum(steps)


def heads_in_l2(launch: KernelLaunch, call: Call, units: int, *, by_keys: bool) -> int:
    """Units, of all batches, that run side by side: as many as keep in L2 what their blocks read again.

    Blocks read K and V again; or, where blocks are tiles of keys, Q and dO of all heads of a KV head. Then KV heads are
    counted, at least ``least_heads_in_l2`` of them. A few may become half as many more, which L2 has room for; where
    more of them run side by side, their end matters less than that. If all tiles of keys have about as many steps, and
    few, no more heads than blocks need, or two: dQ of one group is rounded while the next one runs.
    """
    every = sequences_at_work(call) * call.kv_heads
    if by_keys:
        kv_heads = max(-(-launch.l2_keys // (call.seqlen_q * group_of(call) + 1)), launch.least_heads_in_l2)
        if _is_even(launch, call):
            kv_heads = min(kv_heads, max(_H100_BLOCKS // -(-call.seqlen_k // launch.tile_n), 2))
        return balanced(kv_heads, every, 3 * kv_heads // 2) if kv_heads <= _FEW else min(kv_heads, every)
    return forward_heads_in_l2(launch, every, call.seqlen_k, group_of(call), units)


def forward_heads_in_l2(launch: KernelLaunch, every: int, seqlen_k: int, group: int, units: int) -> int:
    """As above, of a forward pass; ``every``: KV heads of all sequences."""
    kv_heads = -(-launch.l2_keys // (seqlen_k + 1))
    kv_heads = balanced(kv_heads, every, kv_heads)
    return max(min(kv_heads * (1 if launch.pack_gqa else group), units), 1)


def prompts_of(total: int, batch: int, longest: int) -> int:
    """Sequences that are not done after one query, at least one, if all of these are as long as the longest one."""
    return max(-(-(total - batch) // max(longest - 1, 1)), 1)


def sequences_at_work(call: Call) -> int:
    """Sequences of a call; of those that it leaves out, as many as there probably are."""
    return prompts_of(call.total_q, call.batch, call.seqlen_q) if call.least_queries else call.batch


@lru_cache(1024)
def balanced(wanted: int, every: int, most: int) -> int:
    """Units that run side by side, out of ``every`` unit: between 5/8 of the wanted number and ``most``, the largest
    number that fills the last group best.

    A last group of few units begins its longest tiles when all others are nearly done, and blocks that find none of
    them wait.
    """
    wanted, most = max(min(wanted, every), 1), max(min(most, every), 1)
    if every % most == 0:
        return most
    least = -(-5 * wanted // 8)
    # of as many groups, those of the smallest size fill the last one best
    sizes = [max(-(-every // count), least) for count in range(-(-every // most), -(-every // least) + 1)]
    return max([(((every - 1) % size + 1) / size, size) for size in sizes])[1]
