"""The presets' meaning, written by hand in torch index arithmetic: nothing here knows the expression language.

``case(name, …)`` gives for one sequence the arguments of the call and two functions: which pairs are visible,
(heads, seqlen_q, seqlen_k) of bool, and what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hand:
    """One sequence of one preset: visible pairs and scores, both (heads, seqlen_q, seqlen_k)."""

    visible: Tensor
    score: Score
    sink: Tensor | None = None  # (heads,): one more logit of each row, without a value


def _grid(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Return the aligned position of each query (a column) and the position of each key (a row)."""
    return torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q), torch.arange(seqlen_k)[None, :]


def _same(logits: Tensor) -> Tensor:
    return logits


def arguments(name: str, batch: int, heads: int, seqlen_q: int, seqlen_k: int, seed: int = 0) -> dict[str, Any]:
    """Return scalars and tensors of a preset for a call of these sizes."""
    random = torch.Generator().manual_seed(seed)

    def ids(highest_step: int) -> Tensor:
        steps = torch.randint(0, 9, (batch, seqlen_k), generator=random) > 7
        return (steps * torch.randint(1, highest_step + 1, (batch, seqlen_k), generator=random)).cumsum(1).int()

    match name:
        case "alibi":
            return {"slope": torch.rand(heads, generator=random)}
        case "causal_sink":
            return {"sinks": torch.randn(heads, generator=random)}
        case "sliding_window_sink":
            return {"window": 6, "sinks": torch.randn(heads, generator=random)}
        case "allowed":
            return {"allowed": torch.rand(batch, seqlen_q, seqlen_k, generator=random) < 0.4}
        case "causal_packed":
            index = torch.arange(seqlen_k).expand(batch, -1)
            starts = torch.rand(batch, seqlen_k, generator=random) < 0.1
            return {"doc_start": torch.where(starts, index, 0).cummax(1).values.int()}
        case "chunked":
            return {"chunk": 7}
        case "dilated":
            return {"window": 5, "dilation": 3}
        case "neighbourhood_2d":
            return {"width": 6, "radius": 2}
        case "packed_bidirectional" | "packed_documents":
            return {"doc": ids(3)}
        case "prefix_lm":
            return {"prefix": torch.randint(0, seqlen_k + 1, (batch,), generator=random).int()}
        case "prefix_tree":
            ends = torch.arange(1, seqlen_k + 1) + torch.randint(0, 12, (batch, seqlen_k), generator=random)
            return {"subtree_end": ends.clamp(max=seqlen_k).int()}
        case "relative_bias":
            return {"radius": 4, "table": torch.randn(heads, 11, generator=random)}
        case "sink_window":
            return {"sinks": 3, "window": 6}
        case "triangle":
            bias = torch.randn(-(-batch // 2), heads, seqlen_q, seqlen_k + 3, generator=random)
            real = torch.rand(batch, seqlen_k, generator=random) < 0.7
            real[:, :1] = True
            return {"rows": 2, "bias": bias, "real": real}
        case "sliding_window":
            return {"window": 6}
        case "softcap":
            return {"cap": 1.5}
        case "softcap_window":
            return {"cap": 1.5, "window": 6}
        case "causal" | "causal_top_left" | "full":
            return {}
    raise AssertionError(f"preset '{name}' has no mask by hand: write one")


def hand(name: str, given: dict[str, Any], b: int, heads: int, seqlen_q: int, seqlen_k: int) -> Hand:
    """Return the visible pairs and the score of sequence ``b``."""
    pos, kv = _grid(seqlen_q, seqlen_k)
    row = torch.arange(seqlen_q)[:, None]
    causal = kv <= pos
    everything = torch.ones(heads, seqlen_q, seqlen_k, dtype=torch.bool)
    score: Score = _same
    match name:
        case "full":
            visible = everything
        case "causal" | "causal_sink":
            visible = causal
        case "causal_top_left":
            visible = kv <= row
        case "alibi":
            visible = causal
            distance = (kv - pos).to(given["slope"].dtype)
            score = lambda logits: logits + given["slope"].to(logits.dtype)[:, None, None] * distance  # noqa: E731
        case "allowed":
            visible = given["allowed"][b, :seqlen_q, :seqlen_k]
        case "causal_packed":
            start = given["doc_start"][b]
            visible = causal & (start[pos.clamp(0, start.numel() - 1)] <= kv)
        case "chunked":
            visible = causal & (torch.floor(pos / given["chunk"]) == torch.floor(kv / given["chunk"]))
        case "dilated":
            back = pos - kv
            seen = torch.zeros_like(back, dtype=torch.bool)
            for step in range(given["window"]):
                seen |= back == step * given["dilation"]
            visible = seen
        case "neighbourhood_2d":
            width, radius = given["width"], given["radius"]
            q_y, q_x = torch.div(row, width, rounding_mode="trunc"), row % width
            k_y, k_x = torch.div(kv, width, rounding_mode="trunc"), kv % width
            visible = ((q_y - k_y).abs() <= radius) & ((q_x - k_x).abs() <= radius)
        case "packed_bidirectional":
            doc = given["doc"][b]
            visible = (pos >= 0) & (doc[pos.clamp(0, doc.numel() - 1)] == doc[kv])
        case "packed_documents":
            doc = given["doc"][b]
            visible = causal & (doc[pos.clamp(0, doc.numel() - 1)] == doc[kv])
        case "prefix_tree":
            visible = causal & (pos < given["subtree_end"][b, :seqlen_k])
        case "prefix_lm":
            visible = (kv < given["prefix"][b]) | causal
        case "relative_bias":
            visible = everything
            entry = (kv - pos).clamp(-given["radius"], given["radius"]) + given["radius"]
            score = lambda logits: logits + given["table"].to(logits.dtype)[:, entry]  # noqa: E731
        case "triangle":
            visible = everything
            more = torch.where(given["real"][b, :seqlen_k], 0.0, -1e9)
            more = given["bias"][b // given["rows"], :, :seqlen_q, :seqlen_k] + more
            score = lambda logits: logits + more.to(logits.dtype)  # noqa: E731
        case "sink_window":
            visible = causal & ((kv < given["sinks"]) | (pos < kv + given["window"]))
        case "sliding_window" | "sliding_window_sink":
            visible = causal & (pos < kv + given["window"])
        case "softcap" | "softcap_window":
            visible = causal & (pos < kv + given["window"]) if name == "softcap_window" else causal
            score = lambda logits: given["cap"] * torch.tanh(logits / given["cap"])  # noqa: E731
        case _:
            raise AssertionError(f"preset '{name}' has no mask by hand: write one")
    return Hand(visible.expand(heads, seqlen_q, seqlen_k), score, given["sinks"] if name.endswith("_sink") else None)


def by_hand(
    name: str, given: dict[str, Any], b: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out (s, h, d) and lse (h, s) of one sequence: q (s, h, d), k and v (s, hk, d), in their own dtype."""
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    seqlen_q, seqlen_k = q.shape[0], k.shape[0]
    rule = hand(name, given, b, heads, seqlen_q, seqlen_k)
    outs, lses = [], []
    for h in range(heads):
        logits = (q[:, h] @ k[:, h // groups].T) * scale
        scores = rule.score(logits.expand(heads, -1, -1))[h].masked_fill(~rule.visible[h], float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        if rule.sink is not None:
            lse = torch.logaddexp(lse, rule.sink[h].to(lse.dtype))
        weights = torch.nan_to_num(torch.exp(scores - lse[:, None]), nan=0.0)
        outs.append(weights @ v[:, h // groups])
        lses.append(lse)
    return torch.stack(outs, dim=1), torch.stack(lses)
