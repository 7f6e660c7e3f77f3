"""Shared memory of kernels whose blocks take ranges of a list of tiles of keys."""

from __future__ import annotations

WALK_BYTES = 24  # start of a block's work

COUNT_BYTES = 12  # of a warp: splits, work items, tiles of the longest work item
