"""Masks that read a tensor over pairs of a query and a key."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.lab.bench.masks.cases.forms import MAX_PAIR_SEQLEN, PAIR, Forms, Register, Size, bools, floats, ints

case = Register()


@case("random bools", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    seen = size.uniform(size.seqlen, size.seqlen) < 0.5
    return Forms(
        lambda b, h, q, kv: seen[q, kv],
        mask="seen[q, kv]",
        declared={"seen": bools(*PAIR)},
        tensors={"seen": seen},
    )


def _bools_of_heads(seen: Tensor) -> Forms:
    return Forms(
        lambda b, h, q, kv: seen[b, h, q, kv],
        mask="seen[b, h, q, kv]",
        declared={"seen": bools("b", "h", *PAIR)},
        tensors={"seen": seen},
    )


@case("random bools of heads", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    return _bools_of_heads(size.uniform(1, size.heads, size.seqlen, size.seqlen) < 0.5)


@case("blocks of bools of heads", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    """Empty, full and mixed blocks of 64 for each head."""
    blocks = -(-size.seqlen // 64)
    kind = size.uniform(1, size.heads, blocks, blocks).repeat_interleave(64, 2).repeat_interleave(64, 3)
    kind = kind[:, :, : size.seqlen, : size.seqlen]
    mixed = size.uniform(size.seqlen, size.seqlen) < 0.5
    return _bools_of_heads((kind < 0.2) | ((kind < 0.3) & mixed))


@case("graph distances", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    """Graphormer: pairs at most two edges apart, with a bias for each distance."""
    distance = (size.uniform(size.seqlen, size.seqlen) * 5).to(torch.int8)
    table = size.normal(size.heads, 5)
    return Forms(
        lambda b, h, q, kv: distance[q, kv] <= 2,
        lambda s, b, h, q, kv: s + table[h, distance[q, kv].int()],
        mask="distance[q, kv] <= 2",
        score="s + table[h, distance[q, kv]]",
        declared={
            "distance": {"dtype": "int8", "shape": list(PAIR), "range": {"min": 0, "max": 4}},
            "table": floats("h", 5),
        },
        tensors={"distance": distance, "table": table},
    )


@case("order of a permutation")
def _(size: Size) -> Forms:
    """XLNet: a token sees those before it in a random order."""
    rank = torch.randperm(size.seqlen, generator=torch.Generator().manual_seed(size.seed), device="cpu")
    rank = rank.int().to(size.device)
    return Forms(
        lambda b, h, q, kv: rank[kv] <= rank[q],
        mask="rank[kv] <= rank[q]",
        declared={"rank": ints("seqlen_k")},
        tensors={"rank": rank},
    )
