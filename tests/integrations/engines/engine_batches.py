"""Batches of a serving engine over a cache in blocks, and what they mean in float64, request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Whether a query at a position of a request sees a key at a position: (request, positions, keys) → bool tensors.
Seen = Callable[[int, Tensor, Tensor], Tensor]

#: Physical orders of the axes (block, KV head, row) of a cache.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2))


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, *, softcap: float = 0.0,
    slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q (queries, heads, d) to k and v (keys, kv_heads, d) in float64; ``seen`` is (queries, keys)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    s = q @ k.transpose(1, 2) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        rows = torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1]
        s = s - slopes.double().cpu()[:, None, None] * (rows - torch.arange(s.shape[2])).abs()
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().cpu()[:, None, None].expand(-1, s.shape[1], 1)], dim=-1)
    p = torch.softmax(s, -1).nan_to_num()[..., : k.shape[1]]
    return (p @ v).transpose(0, 1)


@dataclass
class Batch:
    """Requests with new tokens, ``queries`` of each, and ``lengths`` keys of each, the new ones included.

    ``cache`` is (blocks, kv_heads, rows, 2 d), in which keys of earlier tokens lie; ``k`` and ``v`` are the new ones.
    Blocks that no request has hold NaN. ``padded`` requests without tokens follow.
    """

    queries: list[int]
    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    cache: Tensor
    table: Tensor
    slots: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    padded: int
    rows: int
    before: tuple[Tensor, ...] = ()  # keys, values and slots of earlier tokens

    @property
    def starts(self) -> Tensor:
        """Start of each request's queries, with those of padding."""
        counts = [*self.queries, *[0] * self.padded]
        return torch.tensor([0, *counts]).cumsum(0).int()

    @property
    def used(self) -> Tensor:
        """Keys of each request, 0 for padding."""
        return torch.tensor([*self.lengths, *[0] * self.padded], dtype=torch.int32)

    def expected(self, seen: Seen, scale: float, **options: object) -> Tensor:
        """Outputs of all queries in float64."""
        outs, start = [], 0
        for b, (count, length) in enumerate(zip(self.queries, self.lengths, strict=True)):
            positions, keys = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            visible = seen(b, positions, keys)
            q = self.q[start : start + count].cpu()
            outs.append(attention(q, self.keys[b], self.values[b], visible, scale, **options))  # type: ignore[arg-type]
            start += count
        return torch.cat(outs)


def batch(
    queries: Sequence[int], lengths: Sequence[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 32,
    rows: int = 16, dtype: torch.dtype = torch.float32, fp8: Sequence[Tensor] | None = None, padded: int = 0,
    extra_tokens: int = 0, order: Sequence[int] = (0, 1, 2), seed: int = 0, device: str = "cpu", least_blocks: int = 0,
    shared: int = 0, scaled_rows: bool = False,
) -> Batch:  # fmt: skip
    """A random batch. ``fp8`` are scales of keys and values, () or (kv_heads,), of a cache in 8 bits (as uint8), which
    has ``least_blocks`` at least. With ``scaled_rows`` it has room for two scales in each row, and ``before`` has what
    it is to hold of earlier tokens. Requests begin with the same ``shared`` blocks, where earlier tokens fill them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-length // rows) for length in lengths]
    blocks = max(sum(counts) + 3, least_blocks)
    free = torch.randperm(blocks - 1, generator=generator) + 1  # block 0 is vLLM's null block
    width = max(counts) + 2
    table = torch.zeros(len(lengths) + padded, width, dtype=torch.int32)
    element = torch.uint8 if fp8 is not None or scaled_rows else dtype
    shape = [blocks, kv_heads, rows]
    stored = torch.empty([shape[axis] for axis in order] + [2 * dim + 8 * scaled_rows], dtype=element)
    back = [list(order).index(axis) for axis in range(3)]
    cache = stored.permute(*back, 3)
    cache.fill_(0x7F if element == torch.uint8 else torch.nan)
    keys, values, slots, new_k, new_v = [], [], [], [], []
    before: list[tuple[Tensor, Tensor, Tensor]] = []
    for b, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        own = free[: counts[b]]
        free = free[counts[b] :]
        k, v = random(length, kv_heads, dim), random(length, kv_heads, dim)
        if shared and b:
            common = min(shared, (length - count) // rows, lengths[0] // rows)
            own = torch.cat([table[0, :common].long(), own[common:]])
            k[: common * rows], v[: common * rows] = keys[0][: common * rows], values[0][: common * rows]
        table[b, : counts[b]] = own.int()
        new_k.append(k[length - count :])
        new_v.append(v[length - count :])
        place = torch.arange(length)
        slot = own[place // rows] * rows + place % rows
        slots.append(slot[length - count :])
        parts = []
        before.append((k[: length - count], v[: length - count], slot[: length - count]))
        for half, t in enumerate((k, v)):
            written = t
            if scaled_rows:
                scale = t.float().abs().amax(-1, keepdim=True) / 448
                parts.append((t.float() / scale).to(torch.float8_e4m3fn).float() * scale)
                continue
            if fp8 is not None:
                scale = fp8[half].reshape(-1, 1).float()
                eight = (t.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                written, t = eight.view(torch.uint8), (eight.float() * scale).to(torch.float32)
            parts.append(t)
            old = slot[: length - count]
            cache[old // rows, :, old % rows, half * dim : (half + 1) * dim] = written[: length - count]
        keys.append(parts[0])
        values.append(parts[1])
    q = random(sum(queries) + extra_tokens, heads, dim)
    pad = torch.full((extra_tokens,), -1)
    tail = random(extra_tokens, kv_heads, dim)
    made = Batch(
        list(queries), list(lengths), q.to(device), torch.cat([*new_k, tail]).to(device),
        torch.cat([*new_v, tail]).to(device), cache, table.to(device), torch.cat([*slots, pad]).to(device), keys,
        values, padded, rows, tuple(torch.cat(one).to(device) for one in zip(*before, strict=True)),
    )  # fmt: skip
    if device != "cpu":
        moved = stored.to(device).permute(*back, 3)
        made.cache = moved
    return made
