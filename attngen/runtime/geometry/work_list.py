"""The rule by which workers cut a list of work, as kernels have it (``CutBy`` of ``work_list.cuh``).

A list has ``items``, and chunks of tiles that belong to them; ``longest`` are the tiles of the longest item.
"""

from __future__ import annotations

from attngen.manifest import WorkLimits


def cut_of(limits: WorkLimits, chunks: int, items: int, longest: int, split_tiles: int, most: int) -> tuple[int, int]:
    """Workers, up to ``most``, and splits: equal parts of each item, one for each worker; 0: workers have equal ranges
    of the list. ``split_tiles``: tiles of a chunk if the call fixes that, else 0."""
    tiles = chunks * split_tiles if split_tiles else chunks
    workers = min(max(tiles // limits.least_tiles, items), most)
    if split_tiles or not items:
        return workers, 0
    share = chunks // workers
    if items <= workers:
        cuts = workers // items
        slack = max(limits.cut_tiles, share // limits.one_of if share <= limits.whole_tiles else 0)
        return (items * cuts, cuts) if longest <= cuts * (share + slack) else (workers, 0)
    if share <= limits.whole_tiles and chunks == items * longest:  # equal items: whole ones, if few workers are idle
        each = -(-items // workers)
        takers = items // each
        if takers * each == items and limits.one_of * takers >= (limits.one_of - 1) * workers:
            return takers, 0
    return workers, 0


def stay_whole(limits: WorkLimits, items: int, tiles: int, most: int) -> bool:
    """Whether up to ``most`` workers share items of equally many tiles without cutting any."""
    workers, splits = cut_of(limits, items * tiles, items, tiles, 0, most)
    return tiles <= 1 or splits == 1 or (splits == 0 and items % max(workers, 1) == 0)
