"""The tile map as the reference sees it, against bits counted one by one."""

from __future__ import annotations

import pytest
import torch

from attngen.lang.variant import Tensor as Declared
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.cache import RecentCache
from tests.runtime.eager_map import eager_tile_map
from tests.runtime.support import variant

TILE_M, TILE_N = 8, 4
ALLOWED = variant(
    "allowed", "allowed[b, h, q, kv]", tensors=[Declared("allowed", "bool", ("b", "h", "seqlen_q", "seqlen_k"))]
)


def bind_call(seen: torch.Tensor, packing: Packing | None = None, used: torch.Tensor | None = None) -> Call:
    """Return a call in which exactly ``seen`` (b, h, s, t) is visible."""
    batch, heads, rows, keys = seen.shape
    q, k = (torch.zeros(batch, n, heads, 16) for n in (rows, keys))
    if packing is not None:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    return bind(
        ALLOWED, q, k, k, packing, softmax_scale=None, seqused_k=used, return_lse=False, layout="bshd",
        arguments={"allowed": seen},
    )  # fmt: skip


def blocks(batch: int, heads: int, rows: int, keys: int) -> torch.Tensor:
    """Return random pairs that come in blocks, so that full, partial and empty tiles all occur."""
    torch.manual_seed(rows + keys)
    coarse = torch.rand(batch, heads, rows // TILE_M + 1, keys // TILE_N + 1) < 0.5
    fine = coarse.repeat_interleave(TILE_M, 2).repeat_interleave(TILE_N, 3)[:, :, :rows, :keys]
    return fine ^ (torch.rand(batch, heads, rows, keys) < 0.01)


def by_counting(seen: torch.Tensor, kv_tiles: int) -> torch.Tensor:
    """Return (heads, q_tiles, 2, words) for the pairs (heads, rows, keys) of one sequence."""
    heads, rows, keys = seen.shape
    words = -(-kv_tiles // 32)
    bits = torch.zeros(heads, -(-rows // TILE_M), 2, words, dtype=torch.int64)
    for h in range(heads):
        for i in range(bits.shape[1]):
            for t in range(keys // TILE_N):
                tile = seen[h, i * TILE_M : (i + 1) * TILE_M, t * TILE_N : (t + 1) * TILE_N]
                if tile.all():
                    bits[h, i, 0, t // 32] |= 1 << t % 32
                elif tile.any():
                    bits[h, i, 1, t // 32] |= 1 << t % 32
    return bits


def unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.long() & 0xFFFFFFFF


@pytest.mark.parametrize("keys", [30, 150])
def test_every_bit(keys: int) -> None:
    seen = blocks(2, 2, 21, keys)
    words = eager_tile_map(bind_call(seen), TILE_M, TILE_N, per_batch=True, per_head=True)
    assert words.dtype == torch.int32
    assert words.shape == (2, 2, 3, 2, -(-keys // 128))
    for b in range(2):
        assert torch.equal(unsigned(words[b]), by_counting(seen[b], -(-keys // TILE_N)))


def test_shared_axes_are_one() -> None:
    seen = blocks(1, 1, 16, 40).expand(2, 3, -1, -1)
    words = eager_tile_map(bind_call(seen), TILE_M, TILE_N, per_batch=False, per_head=False)
    assert words.shape == (1, 1, 2, 2, 1)
    assert torch.equal(unsigned(words[0]), by_counting(seen[0, :1], 10))


def test_lengths_of_their_own() -> None:
    seen = blocks(2, 1, 20, 40)
    used = torch.tensor([40, 18], dtype=torch.int32)
    words = eager_tile_map(bind_call(seen, used=used), TILE_M, TILE_N, per_batch=True, per_head=True)
    assert torch.equal(unsigned(words[1]), by_counting(seen[1, :, :, :18], 10))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 30], [0, 40, 57]))
    packed = bind_call(seen, Packing(cu_q, cu_k, 20, 40))
    words = eager_tile_map(packed, TILE_M, TILE_N, per_batch=True, per_head=True)
    alone = by_counting(seen[1, :, :10, :17], 10)
    assert torch.equal(unsigned(words[1, :, :2]), alone)
    assert not words[1, :, 2:].any()


def test_the_cache_keeps_what_was_used_last() -> None:
    cache: RecentCache[int] = RecentCache(6)
    for key in range(100):
        cache.put(key, -key)
        assert cache.get(0) == 0  # used all the time
        assert cache.get(max(key - 1, 0)) == -max(key - 1, 0)
        assert len(cache) <= 6
    assert cache.get(50) is None
    cache.clear()
    assert cache.get(99) is None
    assert len(cache) == 0
