"""Prefixes of pages that sequences have in common, found on the device: nothing waits, and no size follows from them.

Each round finds one prefix among the sequences that have none yet. Which sequence it is compared with is found by
hashes of the first 1, 2, 4, … pages; that it has the same pages is looked at page by page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Factors of the hash of the pages before a place: of 62 bits. Sums wrap around. Not measured: any odd ones.
_OF_PLACE, _OF_SQUARE = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D


class Prefixes(NamedTuple):
    """Prefixes of sequences. ``pages`` of each, 0 for one that is not there, are those of the sequence ``leaders``; of
    a sequence, ``number`` is that of its prefix, or ``len(pages)``, and ``skipped`` the pages of that."""

    leaders: Tensor  # (prefixes,) int64
    pages: Tensor  # (prefixes,) int64
    number: Tensor  # (batch,) int64
    skipped: Tensor  # (batch,) int64


def find(page_table: Tensor, whole: Tensor, prefixes: int) -> Prefixes:
    """The prefixes of sequences of which ``whole`` pages, the first ones, may be in one."""
    batch, width = page_table.shape
    place = torch.arange(width, dtype=torch.int64, device=page_table.device)
    hashes = (page_table * (place * _OF_PLACE + place * place * _OF_SQUARE + 1)).cumsum(1)
    cuts = 1 << torch.arange(width.bit_length(), dtype=torch.int64, device=page_table.device)
    reached = cuts <= whole[:, None]
    hashes = hashes.index_select(1, cuts.clamp(max=width) - 1).T
    alike = (hashes[:, :, None] == hashes[:, None]) & reached.T[:, :, None] & reached.T[:, None]  # (cuts, batch, batch)
    number = torch.full((batch,), prefixes, dtype=torch.int64, device=page_table.device)
    skipped, leaders, lengths = torch.zeros_like(number), [], []
    for prefix in range(prefixes):
        # those that share a cut with most others, times its pages; of sequences that have a prefix, less than nothing
        leader = (cuts[:, None] * (alike.sum(2) - 1)).flatten().argmax(0, keepdim=True) % batch
        row, most = page_table.index_select(0, leader), whole.index_select(0, leader)
        same = (page_table == row) & (place < torch.minimum(whole, most)[:, None])
        matched = same.cumprod(1).sum(1)  # pages that each sequence begins with as the leader does
        saved, best = (matched * ((matched[:, None] <= matched).sum(1) - 1)).max(0, keepdim=True)
        pages = matched.index_select(0, best) * (saved > 0)
        has = (matched >= pages) & (pages > 0)
        skipped, number = torch.where(has, pages, skipped), torch.where(has, prefix, number)
        leaders.append(leader)
        lengths.append(pages)
        if prefix + 1 < prefixes:
            whole = whole.masked_fill(has, 0)
            alike = alike & (whole > 0)[:, None] & (whole > 0)
    return Prefixes(torch.cat(leaders), torch.cat(lengths), number, skipped)
