"""Causal attention, windows and chunks."""

from __future__ import annotations

import torch

from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, causal, ints

case = Register()


@case("causal")
def _(size: Size) -> Forms:
    return Forms(causal, mask="q >= kv")


@case("sliding window")
def _(size: Size) -> Forms:
    window = size.fraction(8)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window),
        mask="q >= kv and q - kv < window",
        sizes={"window": window},
    )


@case("window on both sides")
def _(size: Size) -> Forms:
    radius = size.fraction(16)
    return Forms(lambda b, h, q, kv: (q - kv).abs() <= radius, mask="abs(q - kv) <= radius", sizes={"radius": radius})


@case("sinks and window")
def _(size: Size) -> Forms:
    """StreamingLLM."""
    window, sinks = size.fraction(8), 4
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q - kv < window) | (kv < sinks)),
        mask="q >= kv and (q - kv < window or kv < sinks)",
        sizes={"window": window, "sinks": sinks},
    )


@case("streaming speech")
def _(size: Size) -> Forms:
    """Chunks of frames that see themselves and some chunks before."""
    chunk, left = size.fraction(50), 8
    return Forms(
        lambda b, h, q, kv: (kv // chunk <= q // chunk) & (kv // chunk >= q // chunk - left),
        mask="kv // chunk <= q // chunk and kv // chunk >= q // chunk - left",
        sizes={"chunk": chunk, "left": left},
    )


@case("block causal")
def _(size: Size) -> Forms:
    chunk = size.fraction(16)
    return Forms(
        lambda b, h, q, kv: q // chunk >= kv // chunk, mask="q // chunk >= kv // chunk", sizes={"chunk": chunk}
    )


@case("chunked and causal")
def _(size: Size) -> Forms:
    """Llama 4: causal within chunks."""
    chunk = size.fraction(4)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q // chunk == kv // chunk),
        mask="q >= kv and q // chunk == kv // chunk",
        sizes={"chunk": chunk},
    )


@case("window of each query")
def _(size: Size) -> Forms:
    win = size.integers(size.fraction(128), size.fraction(8, 2), size.seqlen)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < win[q]),
        mask="q >= kv and q - kv < win[q]",
        declared={"win": ints("seqlen_q")},
        tensors={"win": win},
    )


@case("window of each head")
def _(size: Size) -> Forms:
    win = torch.tensor([size.fraction(2**n) for n in range(1, 9)], device=size.device, dtype=torch.int32)[: size.heads]
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < win[h]),
        mask="q >= kv and q - kv < win[h]",
        declared={"win": ints("h")},
        tensors={"win": win},
    )


@case("local and global heads", kv_heads=2)
def _(size: Size) -> Forms:
    window = size.fraction(16)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((h % 2 == 0) | (q - kv < window)),
        mask="q >= kv and (h % 2 == 0 or q - kv < window)",
        sizes={"window": window},
    )
