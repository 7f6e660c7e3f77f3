"""Batches of sparse latent attention as engines make them, and what they mean in float64, query by query.

Requests of many kinds stand beside each other: a whole prompt, a part of one, decoding, drafts, and padding. Each query
lists some of the keys up to its own, in any order, and -1 between and after them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tests.integrations.vllm.vllm_mla_cases import packed_rows

RANK, WIDE = 512, 576
BLOCK = 16

#: Queries and keys of the requests of a batch: a prompt, a part of one, decoding, drafts.
MIXED = (9, 5, 1, 3), (9, 40, 33, 50)


@dataclass
class SparseBatch:
    """Requests over a cache of latent rows (blocks, ``BLOCK``, columns), of which unused ones hold NaN.

    ``topk`` (tokens, width) int32 lists positions within a request. Requests without tokens follow, ``padded`` of them,
    then tokens without a request, ``extra_tokens``, whose lists are empty.
    """

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    q: Tensor
    cache: Tensor
    table: Tensor
    topk: Tensor
    padded: int = 0
    extra_tokens: int = 0
    bytes_of_rows: Tensor | None = None  # of a cache in 8 bits, in whose place ``cache`` has its numbers

    @property
    def starts(self) -> Tensor:
        """Start of each request's queries (requests + 1,) int32 on the host, with those of padding."""
        return torch.tensor([0, *accumulate([*self.queries, *[0] * self.padded])], dtype=torch.int32)

    @property
    def used(self) -> Tensor:
        """Keys of each request (requests,) int32 on the host, 0 for padding."""
        return torch.tensor([*self.lengths, *[0] * self.padded], dtype=torch.int32)

    @property
    def stored(self) -> Tensor:
        """The cache as the engine has it."""
        return self.cache if self.bytes_of_rows is None else self.bytes_of_rows

    def to(self, device: str) -> SparseBatch:
        """The batch on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def requests_of_tokens(self) -> Tensor:
        """Request of each token (tokens,) int32; 0 for tokens without one."""
        counts = torch.tensor([*self.queries])
        own = torch.repeat_interleave(torch.arange(len(self.queries)), counts)
        return torch.cat([own, torch.zeros(self.extra_tokens, dtype=torch.int64)]).int().to(self.q.device)

    def slots(self) -> Tensor:
        """Rows of the flat cache that each query lists, in the places of ``topk``; -1 stays."""
        blocks = self.table.long()[self.requests_of_tokens().long()]
        place = self.topk.long().clamp(min=0)
        slots = blocks.gather(1, place // BLOCK) * BLOCK + place % BLOCK
        return torch.where(self.topk >= 0, slots, -1).int()

    def slots_of_tokens(self) -> Tensor:
        """Rows of the flat cache where the keys of the queries' own positions lie (tokens,)."""
        own = []
        for row, count, length in zip(self.table.long(), self.queries, self.lengths, strict=False):
            place = torch.arange(length - count, length, device=row.device)
            own.append(row[place // BLOCK] * BLOCK + place % BLOCK)
        return torch.cat(own)

    def packed(self) -> SparseBatch:
        """The batch in bf16, over a cache of 656 bytes a token; ``cache`` keeps what that holds."""
        columns = self.cache.shape[-1]
        rows = torch.nn.functional.pad(self.cache, (0, WIDE - columns))  # rotary columns of other models are 0
        packed, held = packed_rows(rows)
        return replace(self, q=self.q.bfloat16(), cache=held[..., :columns], bytes_of_rows=packed)

    def in_e4m3(self, scale: float) -> SparseBatch:
        """The batch in bf16, over a cache in e4m3; ``cache`` keeps what that holds."""
        eight = (self.cache / scale).to(torch.float8_e4m3fn)
        return replace(self, q=self.q.bfloat16(), cache=eight.float() * scale, bytes_of_rows=eight)

    def expected(self, scale: float) -> tuple[Tensor, Tensor]:
        """Outputs (tokens, heads, 512) and log-sum-exps (tokens, heads) in float64, by the definition."""
        rows, slots = self.cache.flatten(0, -2).cpu().double(), self.slots().cpu()
        outs = torch.zeros(*self.q.shape[:2], RANK, dtype=torch.float64)
        sums = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        for token, (query, listed) in enumerate(zip(self.q.cpu().double(), slots, strict=True)):
            keys = rows[listed[listed >= 0].long()]
            if len(keys):
                logits = query @ keys.T * scale
                outs[token], sums[token] = logits.softmax(-1) @ keys[:, :RANK], logits.logsumexp(-1)
        return outs, sums

    def check(self, out: Tensor, lse: Tensor | None, scale: float, *, tolerance: float) -> None:
        """Assert that a layer gives what the batch means."""
        wanted, sums = self.expected(scale)
        assert out.shape == wanted.shape
        torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
        if lse is not None:
            torch.testing.assert_close(lse.double().cpu(), sums, atol=tolerance, rtol=tolerance)


def sparse_batch(
    queries: tuple[int, ...] = MIXED[0], lengths: tuple[int, ...] = MIXED[1], *, heads: int = 3, columns: int = WIDE,
    topk: int = 24, padded: int = 0, extra_tokens: int = 0, holes: bool = True, seed: int = 0,
) -> SparseBatch:  # fmt: skip
    """A random batch: pages in random order, each query with up to ``topk`` of the keys that it may see; with
    ``holes``, -1 also stands between them, and one query lists nothing."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // BLOCK) for length in lengths]
    cache = torch.full((sum(pages) + 2, BLOCK, columns), torch.nan)
    table = torch.zeros(len(lengths) + padded, max(pages) + 3, dtype=torch.int32)
    free = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    lists: list[Tensor] = []
    for b, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        own = [free.pop() for _ in range(pages[b])]
        table[b, : pages[b]] = torch.tensor(own, dtype=torch.int32)
        rows = torch.full((pages[b] * BLOCK, columns), torch.nan)
        rows[:length] = torch.randn(length, columns, generator=generator)
        cache[own] = rows.view(pages[b], BLOCK, columns)
        for position in range(length - count, length):
            chosen = torch.randperm(position + 1, generator=generator)[:topk].int()
            padding = torch.full((topk - len(chosen),), -1, dtype=torch.int32)
            row = torch.cat([chosen, padding])
            lists.append(row[torch.randperm(topk, generator=generator)] if holes else row)
    if holes:
        lists[len(lists) // 2].fill_(-1)
    lists += [torch.full((topk,), -1, dtype=torch.int32)] * extra_tokens
    q = torch.randn(sum(queries) + extra_tokens, heads, columns, generator=generator)
    return SparseBatch(queries, lengths, q, cache, table, torch.stack(lists), padded, extra_tokens)
