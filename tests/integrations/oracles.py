"""Dense attention in float64, from the documentation of flash-attn, torch and cuEquivariance, not from attngen's
variants."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attention_chunk: int = 0,
    factors: Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return out (b, sq, h, d) and lse (b, h, sq) as flash-attn documents them; without a key 0 and −inf.

    Dropout multiplies the probabilities by ``factors`` (b, h, sq, sk). ``compute`` is the dtype of every step: that of
    q gives the error that plain PyTorch makes.
    """
    groups = q.shape[2] // k.shape[2]
    k, v = (t.to(compute).repeat_interleave(groups, dim=2) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(compute), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[-2:]
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None, :]  # > 0: the key lies before
    distance = distance.to(q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(compute).expand(q.shape[0], q.shape[2])
        scores = scores - slopes[:, :, None, None] * distance.abs()
    left, right = (-1 if side is None else side for side in window_size)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance <= left
    if causal:
        visible &= distance >= 0
    elif right >= 0:
        visible &= -distance <= right
    if attention_chunk:
        start = torch.arange(rows, device=q.device)[:, None] + keys - rows
        start = start - start % attention_chunk
        column = torch.arange(keys, device=q.device)
        visible &= (column >= start) & (column < start + attention_chunk)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores.to(torch.promote_types(compute, torch.float32)), dim=-1)
    p = torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
    if factors is not None:
        p = p * factors.to(compute)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return torch's own result in float64; its math backend serves all options."""
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=mask, **options
        )


class Triangle(NamedTuple):
    """Output (B, N, H, Q, d), log-sum-exp and largest logit (B, N, H, Q)."""

    out: Tensor
    lse: Tensor
    most: Tensor


def triangle(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Triangle:
    """Triangle attention as cuEquivariance documents it, of (B, N, H, tokens, d), in the dtype of q."""
    logits = torch.einsum("bnhqd,bnhkd->bnhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if mask is not None:
        logits = torch.where(mask, logits, max(-1e9, torch.finfo(logits.dtype).min))
    out = torch.einsum("bnhqk,bnhkd->bnhqd", logits.softmax(-1), v)
    return Triangle(out, logits.logsumexp(-1), logits.amax(-1))


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centered: bool) -> Tensor:
    """Layer norm of the last axis, or, not ``centered``, the norm by the root mean square."""
    x = x - x.mean(-1, keepdim=True) if centered else x
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return (x if weight is None else x * weight) + (0 if bias is None else bias)


def gated_pair_bias(
    s: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    bias: Tensor,
    mask: Tensor | None,
    gate: tuple[Tensor, Tensor | None],
    output: tuple[Tensor, Tensor | None],
    scale: float | None = None,
) -> Tensor:
    """Attention with a bias of pairs, gated and projected, as cuEquivariance documents it, in the dtype of s.

    q, k and v are (B · M, H, tokens, d), the bias (B, H, queries, keys), and the mask has a row for each of B or B · M.
    """
    q, k, v = heads
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q @ k.mT * scale + bias.repeat_interleave(len(q) // len(bias), 0)
    if mask is not None:
        real = mask.bool().repeat_interleave(len(q) // len(mask), 0)[:, None, None]
        logits = torch.where(real, logits, max(-1e9, torch.finfo(logits.dtype).min))
    mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    (by_gate, plus_gate), (by_output, plus_output) = gate, output
    opened = (s @ by_gate.mT + (0 if plus_gate is None else plus_gate)).sigmoid()
    return (opened * mixed) @ by_output.mT + (0 if plus_output is None else plus_output)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    softmax_scale: float | None = None,
    factors: Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return out (b, h, sq, d) and natural lse (b, h, sq) of q, k and v (b, h, s, d), without a key 0 and −inf.

    ``seen`` (b or 1, h or 1, sq, sk) is true for pairs that are seen. Dropout multiplies the probabilities by
    ``factors``.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (t.to(compute).repeat_interleave(groups, dim=1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = ((q.to(compute) @ k.mT) * scale).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores.to(torch.promote_types(compute, torch.float32)), dim=-1)
    p = torch.softmax(scores, dim=-1).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
    return (p if factors is None else p * factors.to(compute)) @ v, lse


def pairs_of_blocks(shown: Tensor, rows: int, columns: int, queries: int, keys: int) -> Tensor:
    """Pairs (b, h, queries, keys) of a block mask with blocks of ``rows`` queries and ``columns`` keys."""
    return shown.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[..., :queries, :keys]


def lists_of(shown: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Lists of blocks in random order, int32, and their lengths; entries that do not count name no block."""
    counts = shown.sum(-1)
    order = torch.where(shown, torch.rand(shown.shape, device=shown.device), 2.0).argsort(-1)[..., :capacity]
    listed = torch.arange(capacity, device=shown.device) < counts[..., None]
    return torch.where(listed, order, 99999).int(), counts.int()
