"""The memory that a backward pass takes besides its inputs and results, and the bound that attngen's keep to."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngen.parts.columns import padded_width
from attngen.plan.model import Plan
from attngen.runtime.geometry.cuts import MOST_PARTS

_FLOAT32 = 4


def workspace(device: torch.device, call: Callable[[], Sequence[Tensor]]) -> int:
    """Count the most bytes that a call held besides its results and all that was allocated before it.

    Memory that the call frees and an earlier one kept does not count as allocated before. Requests to torch's allocator
    on a GPU are counted, before rounding; the call must have run before, or what it keeps for later ones counts, too.
    """
    gc.collect()  # nothing else may be freed meanwhile
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    results = call()
    torch.cuda.synchronize(device)
    storages = {each.data_ptr(): each.nbytes() for each in (result.untyped_storage() for result in results)}
    stats = torch.cuda.memory_stats(device)
    held = sum(storages.values())
    kept = min(before, stats["requested_bytes.all.current"] - held)
    return int(stats["requested_bytes.all.peak"]) - kept - held


def workspace_bound(plan: Plan, *, batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int) -> int:
    """Bound of the bytes that a backward kernel of attngen holds besides inputs and gradients in a dense call.

    That is one float32 dQ, the row statistics (two float32 numbers for each query row), counters for each head and each
    of its tiles and a few more; where query heads share KV heads, one float32 dK and dV, too, and where tiles of keys
    may be cut, one for each part. Rows and columns are padded to tiles. Tile maps and the gradients of a variant's own
    tensors come on top.
    """
    tile_m = max((launch.tile_m for launch in plan.launches), default=plan.tile_m)
    tile_n = max((launch.tile_n for launch in plan.launches), default=plan.tile_n)
    q_tiles, kv_tiles = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
    width_qk, width_v = padded_width(plan.columns_qk), padded_width(plan.columns_v)
    width_dq = plan.sum_columns or width_qk
    rows, keys = batch * heads * q_tiles * tile_m, batch * kv_heads * kv_tiles * tile_n
    numbers = rows * width_dq + 2 * rows + batch * heads * (1 + q_tiles + 2 * kv_tiles) + 8
    parts = MOST_PARTS if any(one.name == "partials" for one in plan.workspaces) else int(heads != kv_heads)
    numbers += parts * keys * (width_qk + width_v)
    return _FLOAT32 * numbers
