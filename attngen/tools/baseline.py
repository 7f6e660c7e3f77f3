"""What others compute on the same inputs in the same dtype: the yardsticks of a kernel's error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.lang.eager import evaluate
from attngen.runtime.arguments import Call
from attngen.runtime.dropout import kept, rate_of
from attngen.runtime.reference import lengths, names_of


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence with heads first: q (h, rows, d), k and v (h, keys, d), and which pairs the mask shows."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice
    visible: Tensor  # (h, rows, keys)
    names: dict[str, object]
    index: int


def plain(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of plain PyTorch: every step rounds to q's dtype, save the score, which is float32.

    Shapes as ``reference``. Rows that see nothing give 0 and −inf, or their sink.
    """

    return _over_sequences(call, q, k, v, lambda one: _attend(call, one, call.tensors))


def _with_sink(call: Call, scores: Tensor, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the logits (h, rows, keys) with one more behind them: the sink of the head, if there is one."""
    if call.variant.sink is None:
        return scores
    sink = evaluate(call.variant.sink, names, tensors).to(scores.dtype).to(scores.device)
    return torch.cat([scores, sink.broadcast_to(*scores.shape[:2], 1)], dim=-1)


def _attend(call: Call, one: _Sequence, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return out (h, rows, d) and lse (h, rows) of one sequence."""
    scores = (one.q @ one.k.transpose(1, 2)) * call.scale
    if call.variant.score is not None:
        names = {**one.names, "s": scores.float()}
        scores = evaluate(call.variant.score, names, tensors, guard=one.visible).to(one.q.dtype)
    scores = torch.where(one.visible, scores.broadcast_to(one.visible.shape), -math.inf)
    keys = scores.shape[-1]
    scores = _with_sink(call, scores, one.names, tensors)
    weights = torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)[..., :keys]  # dead rows
    if call.variant.dropout:
        stays = kept(call, one.index, slice(0, scores.shape[1]), keys)
        weights = torch.where(stays, weights * rate_of(call)[1], 0.0)
    return weights @ one.v, torch.logsumexp(scores.float(), dim=-1)


def gradients_of(
    results: Sequence[Tensor], leaves: Sequence[Tensor], above: Sequence[Tensor], *, keep: bool = False
) -> tuple[Tensor | None, ...]:
    """Return autograd's gradients, None where nothing depends on a leaf; a result may depend on none at all.

    ``keep``: more gradients of these results will be asked for.
    """
    pairs = [(result, gradient) for result, gradient in zip(results, above, strict=True) if result.requires_grad]
    if not pairs:
        return (None,) * len(leaves)
    kept, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(kept, leaves, gradients, allow_unused=True, retain_graph=keep)


def plain_gradients(
    call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the gradients of plain PyTorch by q, k, v and the variant's tensors ``names``, in their dtypes.

    Rows that see nothing pass none on, but for what their log-sum-exp owes to a sink.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in zip("qkv", (q, k, v), strict=True)}
    own = dict(call.tensors) | {name: call.tensors[name].detach().requires_grad_() for name in names}
    leaves |= {name: own[name] for name in names}
    total = {name: torch.zeros_like(leaf, memory_format=torch.contiguous_format) for name, leaf in leaves.items()}
    with torch.enable_grad():
        for b, one in _sequences(call, leaves["q"], leaves["k"], leaves["v"]):
            out, lse = _attend(call, one, own)
            varlen = call.layout == "varlen"
            above = dout[one.rows] if varlen else dout[b]
            above_lse = dlse[:, one.rows] if varlen else dlse[b]
            alive = one.visible.any(dim=-1)
            above = torch.where(alive[..., None], above.transpose(0, 1), 0.0)
            summed = alive if call.variant.sink is None else torch.isfinite(lse)
            results = (out, torch.where(summed, lse, 0.0))
            found = gradients_of(results, list(leaves.values()), (above, torch.where(summed, above_lse, 0.0)))
            for name, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    total[name] += gradient.nan_to_num(nan=0.0)
    return total


def sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Return out of ``scaled_dot_product_attention``'s fused kernels under a dense mask.

    None where these cannot serve: with a score, a sink or dropout, in float32 (where some round to TF32), off the GPU,
    or when none of them takes the shapes. Rows that see nothing are undefined.
    """
    own = call.variant.score is not None or call.variant.sink is not None or call.variant.dropout
    if own or q.dtype == torch.float32 or not q.is_cuda:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(one: _Sequence) -> tuple[Tensor, Tensor]:
        mask = None if not call.variant.masked else one.visible[None].contiguous()
        out = torch.nn.functional.scaled_dot_product_attention(
            one.q[None], one.k[None], one.v[None], attn_mask=mask, scale=call.scale
        )[0]
        return out, out.new_zeros(one.q.shape[:2], dtype=torch.float32)

    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return _over_sequences(call, q, k, v, attend)[0]
    except RuntimeError:  # no fused kernel for these shapes
        return None


def _over_sequences(
    call: Call, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[_Sequence], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run ``attend`` on each sequence and lay the results out as a call does."""
    out = torch.zeros(call.out_shape(), dtype=q.dtype, device=q.device)
    lse = torch.full(call.lse_shape(), -math.inf, device=q.device)
    with torch.no_grad():
        for b, one in _sequences(call, q, k, v):
            result, sums = attend(one)
            if call.layout == "varlen":
                out[one.rows], lse[:, one.rows] = result.transpose(0, 1), sums
            else:
                out[b], lse[b] = result.transpose(0, 1), sums
    return out, lse


def _sequences(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, _Sequence]]:
    """Yield the sequences that have queries, and keys or a sink, cut to their used keys."""
    groups = call.heads // call.kv_heads
    for b, (rows, keys, q_offset, k_offset) in enumerate(lengths(call)):
        if not rows or (not keys and call.variant.sink is None):
            continue
        if call.layout == "varlen":
            queries, used = slice(q_offset, q_offset + rows), slice(k_offset, k_offset + keys)
            parts = q[queries], k[used], v[used]
        else:
            queries, parts = slice(0, rows), (q[b], k[b, :keys], v[b, :keys])
        names = names_of(call, b, slice(0, rows), rows, keys, q_offset, k_offset)
        value = evaluate(call.variant.mask, names, call.tensors)
        visible = value.broadcast_to((call.heads, rows, keys)).to(q.device)
        heads_first = [part.transpose(0, 1) for part in parts]
        yield (
            b,
            _Sequence(
                heads_first[0],
                heads_first[1].repeat_interleave(groups, dim=0),
                heads_first[2].repeat_interleave(groups, dim=0),
                queries,
                visible,
                names,
                b,
            ),
        )
