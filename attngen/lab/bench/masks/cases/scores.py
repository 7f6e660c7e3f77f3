"""Functions of the logits."""

from __future__ import annotations

import torch

from attngen.lab.bench.masks.cases.documents import document_ids
from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, causal, ints

case = Register()


@case("softcap")
def _(size: Size) -> Forms:
    cap = 30.0
    return Forms(
        causal,
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        mask="q >= kv",
        score="cap * tanh(s / cap)",
        sizes={"cap": cap},
    )


@case("softcap with a window")
def _(size: Size) -> Forms:
    """Gemma 2."""
    cap, window = 50.0, size.fraction(2)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window),
        lambda s, b, h, q, kv: cap * torch.tanh(s / cap),
        mask="q >= kv and q - kv < window",
        score="cap * tanh(s / cap)",
        sizes={"cap": cap, "window": window},
    )


@case("tanh")
def _(size: Size) -> Forms:
    return Forms(None, lambda s, b, h, q, kv: torch.tanh(s), score="tanh(s)")


@case("sigmoid")
def _(size: Size) -> Forms:
    return Forms(None, lambda s, b, h, q, kv: torch.sigmoid(s), score="sigmoid(s)")


@case("silu")
def _(size: Size) -> Forms:
    return Forms(causal, lambda s, b, h, q, kv: torch.nn.functional.silu(s), mask="q >= kv", score="silu(s)")


@case("cosine of the distance")
def _(size: Size) -> Forms:
    rate = 0.01
    return Forms(
        causal,
        lambda s, b, h, q, kv: s * torch.cos((q - kv) * rate),
        mask="q >= kv",
        score="s * cos((q - kv) * rate)",
        sizes={"rate": rate},
    )


@case("window in the score")
def _(size: Size) -> Forms:
    radius = size.fraction(16)
    return Forms(
        None,
        lambda s, b, h, q, kv: torch.where((q - kv).abs() <= radius, s, -float("inf")),
        score="s if abs(q - kv) <= radius else -inf",
        hides=lambda b, h, q, kv: (q - kv).abs() <= radius,
        sizes={"radius": radius},
    )


@case("documents in the score")
def _(size: Size) -> Forms:
    """A mask that is added, as 0 or −inf."""
    doc = document_ids(size, size.fraction(12))
    return Forms(
        None,
        lambda s, b, h, q, kv: s + torch.where((q >= kv) & (doc[q] == doc[kv]), 0.0, -float("inf")),
        score="s + (0.0 if q >= kv and doc[q] == doc[kv] else -inf)",
        hides=lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv]),
        declared={"doc": ints("seqlen_k", monotone={"axis": 0})},
        tensors={"doc": doc},
    )
