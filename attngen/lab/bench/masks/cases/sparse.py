"""Sparse patterns of long sequences."""

from __future__ import annotations

from typing import Any

import torch

from attngen.lab.bench.masks.cases.forms import Forms, Register, Size, bools, floats

case = Register()


@case("dilated window")
def _(size: Size) -> Forms:
    step, window = 4, size.fraction(8)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (q - kv < window) & ((q - kv) % step == 0),
        mask="q >= kv and q - kv < window and (q - kv) % step == 0",
        sizes={"step": step, "window": window},
    )


@case("sparse transformer, strided")
def _(size: Size) -> Forms:
    stride = size.fraction(16)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q - kv < stride) | ((q - kv) % stride == 0)),
        mask="q >= kv and (q - kv < stride or (q - kv) % stride == 0)",
        sizes={"stride": stride},
    )


@case("sparse transformer, fixed")
def _(size: Size) -> Forms:
    stride, summary = size.fraction(32, 16), 8
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((q // stride == kv // stride) | (kv % stride >= stride - summary)),
        mask="q >= kv and (q // stride == kv // stride or kv % stride >= stride - summary)",
        sizes={"stride": stride, "summary": summary},
    )


@case("longformer")
def _(size: Size) -> Forms:
    radius, first = size.fraction(32), size.fraction(64)
    return Forms(
        lambda b, h, q, kv: ((q - kv).abs() <= radius) | (kv < first) | (q < first),
        mask="abs(q - kv) <= radius or kv < first or q < first",
        sizes={"radius": radius, "first": first},
    )


@case("bigbird")
def _(size: Size) -> Forms:
    """A window of blocks, global blocks, and random blocks."""
    block = size.fraction(128)
    blocks = -(-size.seqlen // block)
    chosen = size.uniform(blocks, blocks) < 3 / 128

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        i, j = q // block, kv // block
        return ((i - j).abs() <= 1) | (i < 2) | (j < 2) | chosen[i, j]

    return Forms(
        mask_mod,
        mask="abs(i - j) <= 1 or i < 2 or j < 2 or chosen[i, j]",
        let={"i": "q // block", "j": "kv // block"},
        sizes={"block": block},
        declared={"chosen": bools("rows", "columns")},
        tensors={"chosen": chosen},
    )


@case("table of blocks, by head")
def _(size: Size) -> Forms:
    """Blocks that an indexer chose for each head, 128 a side."""
    block = size.fraction(64)
    blocks = -(-size.seqlen // block)
    chosen = size.uniform(size.heads, blocks, blocks) < 0.25
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (chosen[h, q // block, kv // block] | (q // block == kv // block)),
        mask="q >= kv and (chosen[h, q // block, kv // block] or q // block == kv // block)",
        sizes={"block": block},
        declared={"chosen": bools("h", "rows", "columns")},
        tensors={"chosen": chosen},
    )


@case("vertical and slash")
def _(size: Size) -> Forms:
    """MInference: keys that all see, and distances at which all see."""
    vertical, slash = size.uniform(2, size.seqlen) < 1 / 64
    slash[: size.fraction(64)] = True
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (vertical[kv] | slash[(q - kv).clamp(min=0)]),
        mask="q >= kv and (vertical[kv] or slash[q - kv])",
        declared={"vertical": bools("seqlen_k"), "slash": bools("seqlen_k")},
        tensors={"vertical": vertical, "slash": slash},
    )


@case("powers of two")
def _(size: Size) -> Forms:
    """LogSparse: a query sees keys at distances that are powers of two."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = q - kv
        return (distance >= 0) & ((distance & (distance - 1)) == 0)

    return Forms(mask_mod, mask="q >= kv and (q - kv) & (q - kv - 1) == 0")


@case("important keys")
def _(size: Size) -> Forms:
    """Recent keys, and those whose weight is large."""
    weight, window = size.uniform(size.seqlen), size.fraction(32)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & ((weight[kv] > 0.9) | (q - kv < window)),
        mask="q >= kv and (weight[kv] > 0.9 or q - kv < window)",
        sizes={"window": window},
        declared={"weight": floats("seqlen_k")},
        tensors={"weight": weight},
    )


@case("blocks of each query")
def _(size: Size) -> Forms:
    """MoBA: the best blocks of each query and head, and its own."""
    block = size.fraction(16)
    blocks = -(-size.seqlen // block)
    best = size.uniform(size.heads, size.seqlen, blocks).topk(min(3, blocks)).indices
    seen = torch.zeros(size.heads, size.seqlen, blocks, dtype=torch.bool, device=size.device).scatter_(2, best, True)
    return Forms(
        lambda b, h, q, kv: (q >= kv) & (seen[h, q, kv // block] | (q // block == kv // block)),
        mask="q >= kv and (seen[h, q, kv // block] or q // block == kv // block)",
        sizes={"block": block},
        declared={"seen": bools("h", "seqlen_q", "blocks")},
        tensors={"seen": seen},
    )
