"""A tile map from what the reference sees: the oracle of the generated classifiers."""

from __future__ import annotations

import torch

from attngen.lang.eager import evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.reference.eager import lengths, names_of


def eager_tile_map(call: Call, tile_m: int, tile_n: int, *, per_batch: bool, per_head: bool) -> torch.Tensor:
    """Return the words of a call's map from its mask as the reference sees it: the oracle of the classifier.

    A query tile counts the rows that exist; a KV tile is full or partial only if all its keys exist, since kernels
    run a ragged last tile by itself.
    """
    q_tiles, kv_tiles = -(-call.seqlen_q // tile_m), -(-call.seqlen_k // tile_n)
    words = -(-kv_tiles // 32)
    batch, heads = call.batch if per_batch else 1, call.heads if per_head else 1
    bits = torch.zeros((batch, heads, q_tiles, 2, 32 * words), dtype=torch.bool)
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)[:batch]):
        names = names_of(call, b, slice(0, rows), rows, keys, q_offset, k_offset)
        value = evaluate(call.variant.mask, names, call.tensors)
        visible = torch.as_tensor(value, dtype=torch.bool).broadcast_to((call.heads, rows, keys)).cpu()
        for tile in range(q_tiles):
            seen = visible[:heads, tile * tile_m : min((tile + 1) * tile_m, rows), : keys // tile_n * tile_n]
            if seen.shape[1] == 0:
                continue
            by_tile = seen.reshape(heads, seen.shape[1], -1, tile_n)
            full, some = by_tile.all(3).all(1), by_tile.any(3).any(1)
            bits[b, :, tile, 0, : full.shape[1]] = full
            bits[b, :, tile, 1, : full.shape[1]] = some & ~full
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    packed = (bits.reshape(batch, heads, q_tiles, 2, words, 32) * weights).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
