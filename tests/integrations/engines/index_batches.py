"""Batches of an indexer as engines make them, and what they mean in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

PAGE = 64

#: Queries and keys of the requests of a batch: a prompt, a part of one, decoding, drafts.
MIXED = (70, 9, 1, 3), (70, 200, 33, 130)


@dataclass
class IndexBatch:
    """Requests over an indexer's cache of bytes (pages, ``PAGE``, 132): in each page keys in e4m3, then their scales.
    Bytes that no request has are those of NaN. ``out`` (tokens, k) int32 is where positions go."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    q: Tensor
    weights: Tensor
    pages: Tensor
    table: Tensor
    out: Tensor

    @property
    def starts(self) -> Tensor:
        """Start of each request's tokens (requests + 1,) int32."""
        return torch.tensor([0, *accumulate(self.queries)], dtype=torch.int32, device=self.q.device)

    @property
    def used(self) -> Tensor:
        """Keys of each request (requests,) int32."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)

    @property
    def seen(self) -> Tensor:
        """Keys that each token sees (tokens,) int32; 0 for tokens without a request."""
        ranges = [
            range(length - count + 1, length + 1) for count, length in zip(self.queries, self.lengths, strict=True)
        ]
        every = [number for numbers in ranges for number in numbers]
        return torch.tensor([*every, *[0] * (len(self.q) - len(every))], dtype=torch.int32, device=self.q.device)

    @property
    def request_of_token(self) -> Tensor:
        """Request of each token that has one (tokens,) int64."""
        return torch.repeat_interleave(torch.arange(len(self.queries)), torch.tensor(self.queries)).to(self.q.device)

    def to(self, device: str) -> IndexBatch:
        """The batch on a device."""
        return replace(self, **{name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)})

    def spread(self, gap: int) -> IndexBatch:
        """The batch with so many bytes of other layers between the pages of its cache."""
        wide = torch.full((len(self.pages), PAGE * 132 + gap), 0x7F, dtype=torch.uint8, device=self.q.device)
        wide[:, : PAGE * 132] = self.pages.flatten(1)
        return replace(self, pages=wide[:, : PAGE * 132].unflatten(1, (PAGE, 132)))

    def slots(self, positions: Tensor) -> Tensor:
        """Rows of the flat cache at positions (tokens, k) of the tokens that have a request; -1 stays."""
        own = self.table[self.request_of_token].long()
        places = positions.long().clamp(min=0)
        return (own.gather(1, places // PAGE) * PAGE + places % PAGE).where(positions >= 0, -1).int()

    def positions(self, slots: Tensor) -> Tensor:
        """Positions of the slots that ``slots`` gives."""
        own, listed = self.table[self.request_of_token], slots[: sum(self.queries)]
        page = (own[:, :, None] == (listed // PAGE)[:, None]).int().argmax(1)
        places = (page * PAGE + listed % PAGE).where(listed >= 0, -1).int()
        return torch.cat([places, slots[sum(self.queries) :]])

    def check(self, positions: Tensor) -> None:
        """Assert that positions (tokens, k) are those of the largest scores, up to differences that rounding makes."""
        bytes_of = self.pages.flatten(1).cpu()
        keys = bytes_of[:, : PAGE * 128].contiguous().view(torch.float8_e4m3fn).view(-1, PAGE, 128).double()
        keys *= bytes_of[:, PAGE * 128 :].contiguous().view(torch.float32).double()[..., None]
        table, k = self.table.cpu().long(), positions.shape[1]
        rows = zip(self.request_of_token.tolist(), self.seen.tolist(), positions.tolist(), strict=False)
        for token, (b, seen, chosen) in enumerate(rows):
            own = keys[table[b, : -(-seen // PAGE)]].flatten(0, 1)[:seen]
            products = (self.q[token].cpu().double() @ own.T).relu()
            scores = self.weights[token].cpu().double() @ products
            number = min(k, seen)
            assert chosen[number:] == [-1] * (k - number)
            assert chosen[:number] == sorted(set(chosen[:number]))
            if number:
                least = scores.topk(number).values[-1]
                assert scores[chosen[:number]].min() >= least - 1e-3 * scores.abs().max()
        assert (positions[sum(self.queries) :] == -1).all()


def index_batch(
    queries: tuple[int, ...] = MIXED[0], lengths: tuple[int, ...] = MIXED[1], *, heads: int = 4, topk: int = 24,
    extra_tokens: int = 0, width: int = 0, seed: int = 0,
) -> IndexBatch:  # fmt: skip
    """A random batch: pages in random order, then ``extra_tokens`` without a request; of each row of the page table
    entries behind the request's pages are of no page."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE) for length in lengths]
    pages = torch.full((sum(counts) + 2, PAGE * 132), 0x7F, dtype=torch.uint8)
    table = torch.full((len(lengths), max(max(counts), width)), 2**30, dtype=torch.int32)
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    for b, length in enumerate(lengths):
        own = [free.pop() for _ in range(counts[b])]
        table[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
        keys = torch.randn(len(own) * PAGE, 128, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(len(own) * PAGE, generator=generator) + 0.5
        scales[length:] = torch.nan
        keys[length:] = 0x7F
        pages[own, : PAGE * 128] = keys.view(len(own), PAGE * 128)
        pages[own, PAGE * 128 :] = scales.view(torch.uint8).view(len(own), PAGE * 4)
    tokens = sum(queries) + extra_tokens
    q = torch.randn(tokens, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, heads, generator=generator)
    out = torch.full((tokens, topk), 7, dtype=torch.int32)
    return IndexBatch(queries, lengths, q, weights, pages.unflatten(1, (PAGE, 132)), table, out)
