"""Trees of answers and of draft tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.masks.cases.forms import MAX_PAIR_SEQLEN, PAIR, Forms, Register, Size, bools, ints

case = Register()


@case("tree of answers")
def _(size: Size) -> Forms:
    """A tree of answers in depth-first order: a token sees those whose interval holds its own."""
    level = [size.fraction(2 ** (2 * n)) for n in range(5)]
    leave = torch.zeros_like(size.positions())
    for n, span in enumerate(level):  # the last quarter of a node's interval is that of its children
        inner = size.positions() % span
        own = inner < max(span // 4, 1) if n < len(level) - 1 else torch.ones_like(inner, dtype=torch.bool)
        leave = torch.where(own & (leave == 0), size.positions() // span * span + span, leave)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q < leave[kv]),
        mask="q >= kv and q < leave[kv]",
        declared={"leave": ints("seqlen_k")},
        tensors={"leave": leave.int()},
    )


def _ancestors(size: Size, nodes: int) -> Tensor:
    """A random tree as bools (node, ancestor); a node is its own ancestor."""
    parents = (size.uniform(nodes) * torch.arange(nodes, device=size.device)).int().tolist()
    seen = torch.eye(nodes, dtype=torch.bool, device="cpu")
    for node in range(1, nodes):
        seen[node] |= seen[parents[node]]
    return seen.to(size.device)


@case("ancestors in a tree", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    """Trees of 256 tokens that a root each begins, as one matrix of bools."""
    nodes = min(256, size.seqlen)
    tree = _ancestors(size, nodes)
    seen = torch.block_diag(*[tree] * -(-size.seqlen // nodes))[: size.seqlen, : size.seqlen].bool()
    seen[:, : size.fraction(16)] |= size.positions()[:, None] >= size.positions()[: size.fraction(16)]
    return Forms(
        lambda b, h, q, kv: seen[q, kv],
        mask="seen[q, kv]",
        declared={"seen": bools(*PAIR)},
        tensors={"seen": seen},
    )


@case("drafts of speculation")
def _(size: Size) -> Forms:
    """A prompt, and at its end a tree of drafts that see their ancestors."""
    drafts = size.fraction(16)
    prompt, seen = size.seqlen - drafts, _ancestors(size, drafts)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        inner = seen[(q - prompt).clamp(min=0), (kv - prompt).clamp(min=0)]
        return torch.where(kv < prompt, q >= kv, (q >= prompt) & inner)

    return Forms(
        mask_mod,
        mask="q >= kv if kv < prompt else q >= prompt and seen[q - prompt, kv - prompt]",
        sizes={"prompt": prompt},
        declared={"seen": bools("drafts", "drafts")},
        tensors={"seen": seen},
    )
