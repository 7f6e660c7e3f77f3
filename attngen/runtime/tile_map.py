"""Tile maps: which KV tiles each query tile has to visit, for masks that only the data knows.

A map is a tensor of int32 words (batch or 1, heads or 1, query tiles, 2, words): for each query tile the bits of
the tiles that every row sees whole, then the bits of the tiles that some row sees in part. Bit t % 32 of word
t // 32 stands for KV tile t. A generated classifier kernel computes it; a caller may keep it and pass it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngen.errors import CallError
from attngen.lang.eager import evaluate
from attngen.runtime.checked import Call
from attngen.runtime.module import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """A computed map, and what it was computed for. Its content follows the mask's tensors and scalars of that moment.

    ``words`` is None where no map is needed: on the CPU, and for kernels that bound their loops by other means.
    """

    variant: str | None
    words: torch.Tensor | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def of_words(cls, words: torch.Tensor) -> TileMap:
        """Return a map of which only the words are known, as they pass through a traced program."""
        return cls(None, words)

    def check(self, kernel: Kernel, call: Call, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the words if they fit a call of a kernel; CallError says what does not."""
        if self.words is None:
            raise CallError(f"tile_map: it holds no map, but {kernel.full_name} needs one; compute it on {call.device}")
        for label, found, wanted in (
            ("variant", self.variant, kernel.variant_name),
            ("tile_m", self.tile_m, kernel.tile_m),
            ("tile_n", self.tile_n, kernel.tile_n),
            ("seqlen_q", self.seqlen_q, call.seqlen_q),
            ("seqlen_k", self.seqlen_k, call.seqlen_k),
            ("shape", tuple(self.words.shape), shape),
            ("device", self.words.device, call.device),
        ):
            if found is not None and found != wanted:
                raise CallError(f"tile_map: its {label} is {found}, but {kernel.full_name} needs {wanted} in this call")
        return self.words


def eager_tile_map(call: Call, tile_m: int, tile_n: int, *, per_batch: bool, per_head: bool) -> torch.Tensor:
    """Return the words of a call's map from its mask as the reference sees it: the oracle of the classifier.

    A query tile counts the rows that exist; a KV tile is full or partial only if all its keys exist, since kernels
    run a ragged last tile by itself.
    """
    from attngen.runtime.reference import lengths, names_of

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
