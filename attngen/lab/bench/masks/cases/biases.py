"""Biases added to the logits: over pairs, by distance, learned ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from attngen.lab.bench.masks.cases.forms import (
    MAX_PAIR_SEQLEN,
    PAIR,
    Forms,
    Register,
    Size,
    bools,
    causal,
    floats,
    ints,
)

case = Register()


@case("bias of pairs", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    bias = size.normal(size.seqlen, size.seqlen, dtype=torch.bfloat16)
    return Forms(
        None,
        lambda s, b, h, q, kv: s + bias[q, kv],
        score="s + bias[q, kv]",
        declared={"bias": floats(*PAIR, dtype="bf16")},
        tensors={"bias": bias},
    )


@case("bias of pairs by head", max_seqlen=MAX_PAIR_SEQLEN)
def _(size: Size) -> Forms:
    bias = size.normal(size.heads, size.seqlen, size.seqlen, dtype=torch.bfloat16)
    return Forms(
        causal,
        lambda s, b, h, q, kv: s + bias[h, q, kv],
        mask="q >= kv",
        score="s + bias[h, q, kv]",
        declared={"bias": floats("h", *PAIR, dtype="bf16")},
        tensors={"bias": bias},
    )


@case("pair bias of folding, learned", seqlen=2048)
def _(size: Size) -> Forms:
    """AlphaFold 3: a bias for each pair and head, and padding of keys; the bias takes a gradient."""
    bias = size.normal(size.heads, size.seqlen, size.seqlen, dtype=torch.bfloat16).requires_grad_()
    keep = size.positions() < size.seqlen - size.fraction(9)
    return Forms(
        lambda b, h, q, kv: keep[kv],
        lambda s, b, h, q, kv: s + bias[h, q, kv],
        mask="keep[kv]",
        score="s + bias[h, q, kv]",
        declared={"bias": floats("h", *PAIR, dtype="bf16"), "keep": bools("seqlen_k")},
        tensors={"bias": bias, "keep": keep},
        learned=("bias",),
        pair_bias=("bias", "keep"),
    )


@case("triangle attention, learned", seqlen=512, rows_of_pairs=512)
def _(size: Size) -> Forms:
    """AlphaFold: the rows of a pair representation share a bias of pairs, and each has padding of its own."""
    bias = size.normal(1, size.heads, size.seqlen, size.seqlen).requires_grad_()
    ends = size.seqlen - size.integers(0, size.fraction(4), size.batch)
    real = size.positions() < ends[:, None]
    return Forms(
        None,
        lambda s, b, h, q, kv: s + bias[0, h, q, kv] + torch.where(real[b, kv], 0.0, -1e9),
        score="s + bias[b // rows, h, q, kv] + (0.0 if real[b, kv] else -1e9)",
        sizes={"rows": size.batch},
        declared={"bias": floats("groups", "h", *PAIR), "real": bools("b", "seqlen_k")},
        tensors={"bias": bias, "real": real},
        learned=("bias",),
        pair_bias=("bias", "real"),
    )


@case("ALiBi")
def _(size: Size) -> Forms:
    slope = torch.exp2(-8.0 * torch.arange(1, size.heads + 1, device=size.device) / size.heads)
    return Forms(
        causal,
        lambda s, b, h, q, kv: s + slope[h] * (kv - q),
        mask="q >= kv",
        score="s + slope[h] * (kv - q)",
        declared={"slope": floats("h")},
        tensors={"slope": slope},
    )


@case("ALiBi of documents")
def _(size: Size) -> Forms:
    """Without a direction, within documents that come back."""
    slope = torch.exp2(-8.0 * torch.arange(1, size.heads + 1, device=size.device) / size.heads)
    run = size.fraction(32)
    seg = size.integers(0, 6, size.seqlen // run + 1).repeat_interleave(run)[: size.seqlen].contiguous()
    return Forms(
        lambda b, h, q, kv: seg[q] == seg[kv],
        lambda s, b, h, q, kv: s - slope[h] * (q - kv).abs(),
        mask="seg[q] == seg[kv]",
        score="s - slope[h] * abs(q - kv)",
        declared={"seg": ints("seqlen_k"), "slope": floats("h")},
        tensors={"seg": seg, "slope": slope},
    )


@case("T5 buckets")
def _(size: Size) -> Forms:
    """T5's bias: 8 distances, then 8 buckets that grow to a distance of 128, in each direction.

    1e-4 keeps powers of two off the ends of buckets, where rounding of a logarithm decides.
    """
    table, rate = size.normal(size.heads, 32), 8 / math.log(16)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = (q - kv).abs()
        far = (8 + (torch.log(n.clamp(min=1) / 8.0) * rate + 1e-4).int()).clamp(max=15)
        return s + table[h, torch.where(n < 8, n, far) + torch.where(kv > q, 16, 0)]

    return Forms(
        None,
        score_mod,
        score="s + table[h, (n if n < 8 else far) + (16 if kv > q else 0)]",
        let={"n": "abs(q - kv)", "far": "min(8 + int(log(max(n, 1) / 8.0) * rate + 0.0001), 15)"},
        sizes={"rate": rate},
        declared={"table": floats("h", 32)},
        tensors={"table": table},
    )


@case("T5 buckets in a table")
def _(size: Size) -> Forms:
    """The same by a table of clamped distances, since buckets end at a distance of 128."""
    radius = 128
    apart = torch.arange(-radius, radius + 1, device="cpu")
    far = 8 + (torch.log(apart.abs().clamp(min=8) / 8) / math.log(radius / 8) * 8).int().clamp(max=7)
    bucket = torch.where(apart.abs() < 8, apart.abs(), far) + 16 * (apart > 0)
    table = size.normal(32, size.heads).T[:, bucket.to(size.device)].contiguous()
    return Forms(
        None,
        lambda s, b, h, q, kv: s + table[h, (kv - q).clamp(-radius, radius) + radius],
        score="s + table[h, clamp(kv - q, -radius, radius) + radius]",
        sizes={"radius": radius},
        declared={"table": floats("h", "distances")},
        tensors={"table": table},
    )


@case("relative table, learned")
def _(size: Size) -> Forms:
    table = size.normal(257).requires_grad_()
    return Forms(
        causal,
        lambda s, b, h, q, kv: s + table[(q - kv + 128).clamp(0, 256)],
        mask="q >= kv",
        score="s + table[clamp(q - kv + 128, 0, 256)]",
        declared={"table": floats(257)},
        tensors={"table": table},
        learned=("table",),
    )


@case("gate of each head, learned")
def _(size: Size) -> Forms:
    gate = size.normal(size.heads).requires_grad_()
    return Forms(
        causal,
        lambda s, b, h, q, kv: s * torch.sigmoid(gate[h]),
        mask="q >= kv",
        score="s * sigmoid(gate[h])",
        declared={"gate": floats("h")},
        tensors={"gate": gate},
        learned=("gate",),
    )


@case("forgetting")
def _(size: Size) -> Forms:
    """Forgetting Transformer: logits decay by sums of logarithms of gates."""
    total = torch.nn.functional.logsigmoid(size.normal(size.heads, size.seqlen) + 5).cumsum(1)
    return Forms(
        causal,
        lambda s, b, h, q, kv: s + (total[h, q] - total[h, kv]),
        mask="q >= kv",
        score="s + (total[h, q] - total[h, kv])",
        declared={"total": floats("h", "seqlen_k")},
        tensors={"total": total},
    )


@case("FIRE")
def _(size: Size) -> Forms:
    """FIRE: a small network of the logarithm of the distance, relative to that of the position."""
    inner, shift, outer = size.normal(4), size.normal(4).flip(0), size.normal(size.heads, 4)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = torch.log1p(0.1 * (q - kv).clamp(min=0)) / torch.log1p(0.1 * q.clamp(min=64))
        for i in range(4):
            s = s + outer[h, i] * torch.relu(inner[i] * x + shift[i])
        return s

    return Forms(
        causal,
        score_mod,
        mask="q >= kv",
        score="s + unit(0) + unit(1) + unit(2) + unit(3)",
        let={
            "x": "log1p(0.1 * max(q - kv, 0)) / log1p(0.1 * max(q, 64))",
            "y(i)": "inner[i] * x + shift[i]",
            "unit(i)": "outer[h, i] * (0.0 if y(i) <= 0.0 else y(i))",
        },
        declared={"inner": floats(4), "shift": floats(4), "outer": floats("h", 4)},
        tensors={"inner": inner, "shift": shift, "outer": outer},
    )


@case("time and positions")
def _(size: Size) -> Forms:
    """HSTU: buckets of the logarithm of the time between two events, and a bias of their distance."""
    times = (size.uniform(size.seqlen).sort().values * 1e5).int()
    of_time, of_distance = size.normal(128), size.normal(size.seqlen)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = (times[q] - times[kv]).abs().clamp(min=1)
        bucket = (torch.log(apart) / 0.301 + 0.001).int().clamp(0, 127)
        return torch.nn.functional.silu(s + of_time[bucket] + of_distance[(q - kv).clamp(min=0)])

    return Forms(
        causal,
        score_mod,
        mask="q >= kv",
        score="silu(s + of_time[bucket] + of_distance[max(q - kv, 0)])",
        let={"bucket": "clamp(int(log(max(abs(times[q] - times[kv]), 1)) / 0.301 + 0.001), 0, 127)"},
        declared={
            "times": ints("seqlen_k", range={"min": 0}),
            "of_time": floats(128),
            "of_distance": floats("seqlen_k"),
        },
        tensors={"times": times, "of_time": of_time, "of_distance": of_distance},
    )
