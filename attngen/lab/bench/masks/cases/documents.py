"""Packed documents and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, bools, ints

case = Register()


def document_ids(size: Size, mean: int) -> Tensor:
    """Numbers of documents whose lengths vary around ``mean``; they never decrease."""
    starts = size.uniform(size.seqlen) < 1 / mean
    return starts.cumsum(0).int()


@case("documents, causal")
def _(size: Size) -> Forms:
    doc = document_ids(size, size.fraction(12))
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        mask="q >= kv and doc[q] == doc[kv]",
        declared={"doc": ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )


@case("documents of an encoder")
def _(size: Size) -> Forms:
    doc = document_ids(size, size.fraction(12))
    return Forms(
        lambda b, h, q, kv: doc[q] == doc[kv],
        mask="doc[q] == doc[kv]",
        declared={"doc": ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )


@case("documents that come back")
def _(size: Size) -> Forms:
    run = size.fraction(32)
    seg = size.integers(0, 6, size.seqlen // run + 1).repeat_interleave(run)[: size.seqlen].contiguous()
    return Forms(
        lambda b, h, q, kv: seg[q] == seg[kv],
        mask="seg[q] == seg[kv]",
        declared={"seg": ints("seqlen_k")},
        tensors={"seg": seg},
    )


@case("packed ids with padding")
def _(size: Size) -> Forms:
    """Ids of a packed batch, in any order; padding between and after them has the id 0."""
    run = size.fraction(24)
    ids = torch.randperm(25, generator=torch.Generator().manual_seed(size.seed), device="cpu").int().to(size.device)
    ids[ids % 5 == 4] = 0
    seg = ids.repeat_interleave(run)[: size.seqlen]
    seg = torch.cat([seg, seg.new_zeros(size.seqlen - len(seg))])
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (seg[q] == seg[kv]) & (seg[kv] > 0),
        mask="q >= kv and seg[q] == seg[kv] and seg[kv] > 0",
        declared={"seg": ints("seqlen_k")},
        tensors={"seg": seg},
    )


@case("jagged, window in each")
def _(size: Size) -> Forms:
    """A window from the beginning of each document, by its offset."""
    doc = document_ids(size, size.fraction(6))
    first = torch.searchsorted(doc, torch.arange(int(doc[-1]) + 1, device=size.device, dtype=torch.int32)).int()
    window = size.fraction(32)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = (q >= kv) & (doc[q] == doc[kv])
        return same & ((q - kv < window) | (kv - first[doc[kv]] < window))

    return Forms(
        mask_mod,
        mask="q >= kv and doc[q] == doc[kv] and (q - kv < window or kv - first[doc[kv]] < window)",
        sizes={"window": window},
        declared={"doc": ints("seqlen_k", monotone={"axis": 0}), "first": ints("documents")},
        tensors={"doc": doc, "first": first},
    )


@case("padding on both sides")
def _(size: Size) -> Forms:
    ends = (size.fraction(9), size.seqlen - size.fraction(7))
    first, end = (torch.tensor([at], device=size.device, dtype=torch.int32) for at in ends)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (kv >= first[b]) & (kv < end[b]) & (q >= first[b]) & (q < end[b])

    return Forms(
        mask_mod,
        mask="q >= kv and kv >= first[b] and kv < end[b] and q >= first[b] and q < end[b]",
        declared={"first": ints("b"), "end": ints("b")},
        tensors={"first": first, "end": end},
    )


@case("padding by a mask of keys")
def _(size: Size) -> Forms:
    """The attention mask of a tokenizer: a bool for each key of each sequence."""
    keep = ((size.positions() < size.seqlen - size.fraction(5)) & (size.positions() >= size.fraction(11)))[None]
    return Forms(
        lambda b, h, q, kv: keep[b, kv],
        mask="keep[b, kv]",
        declared={"keep": bools("b", "seqlen_k")},
        tensors={"keep": keep},
    )
