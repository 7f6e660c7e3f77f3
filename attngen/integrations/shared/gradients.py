"""The gradients of a call from a given output and log-sum-exp, which need not be those of the call.

Ring attention needs that: each device has a part of the keys, but the softmax is over all of them. With the output and
the log-sum-exp of all keys, the gradients of a part are its share of the total.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.shared import choice
from attngen.integrations.shared.arguments import tensor
from attngen.integrations.shared.catalogue import variant
from attngen.integrations.shared.choice import Packing, VariantCandidate
from attngen.runtime.arguments.given import Given
from attngen.runtime.arguments.torch_state import recordable
from attngen.runtime.autograd import training
from attngen.runtime.autograd.derivatives import reference_gradients
from attngen.runtime.operations.attention import entry as calls

_HALVES = (torch.bfloat16, torch.float16)


@torch.compiler.disable  # in a trace nothing has an address
@torch.no_grad()
def gradients_of(
    candidates: Sequence[VariantCandidate],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    spec: str,
    packing: Packing | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in q's dtype: P = exp(score − lse), dS = P ∘ (dout vᵀ − rowsum(dout ∘ out)).

    q is (b, sq, h, d), out and dout are (b, sq, h, d of v), lse is float32 (b, h, sq); with ``packing`` (total, h, …)
    and (h, total). The first candidate that a backward kernel takes serves the call. Raises NoKernelError, which names
    the shipped ``spec``, if none does, and CallError for shapes that disagree.
    """
    _check(q, v, out, lse, dout)
    out, dout = (t.to(q.dtype).resolve_neg() for t in (out, dout))
    lse = lse.resolve_neg().to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()
    starts_q, starts_k, longest_q, longest_k = packing or (None,) * 4
    form, layout = ("dense", "bshd") if packing is None else ("varlen", "varlen")
    call = Given(
        q=q, k=k, v=v, seqused_k=seqused_k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, softmax_scale=softmax_scale, deterministic=deterministic, form=form, layout=layout,
        return_lse=True,
    )  # fmt: skip
    if not choice.on_gpu(q):
        return _of_reference(_of_candidate(call, candidates[0]), out, lse, dout)
    out = out if _aligned(out) else out.contiguous()
    error: NoKernelError | None = None
    for candidate in candidates:
        try:
            dq, dk, dv, _ = training.differentiate(_of_candidate(call, candidate), out, lse, dout, None, ())
        except NoKernelError as refused:
            error = refused
            continue
        return dq, dk, dv
    raise choice.none_takes(candidates, spec, error)


def write(gradients: Sequence[Tensor], into: Sequence[Tensor | None]) -> None:
    """Copy gradients into the tensors that a caller gave for them; CallError for one of another shape."""
    for name, one, given in zip(("dq", "dk", "dv"), gradients, into, strict=True):
        if given is None:
            continue
        if tensor(name, given).shape != one.shape:
            raise CallError(f"{name} must have shape {tuple(one.shape)}, got {tuple(given.shape)}")
        with torch.no_grad():
            given.copy_(one)


def row_sums(out: Tensor, dout: Tensor) -> Tensor:
    """Return rowsum(dout ∘ out) in the form of a log-sum-exp: float32 (b, h, sq), or (h, total)."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out).sum(dim=-1).transpose(-1, -2)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention whose softmax has sinks, from the one without: out (…, s, h, d), lse and sinks (…, h, s).

    Σ exp(s) / (Σ exp(s) + exp(sink)) = sigmoid(lse − sink), so that the forward is exact, and autograd gives the
    gradients of q, k, v and of the sinks through out and lse.
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype))
    return (out * share.transpose(-1, -2).unsqueeze(-1)).to(out.dtype)


def _check(q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> None:
    rows = (*q.shape[:-1], v.shape[-1])
    of_rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, given, wanted in (("out", out, rows), ("dout", dout, rows), ("softmax_lse", lse, of_rows)):
        if not isinstance(given, Tensor) or tuple(given.shape) != wanted or given.device != q.device:
            got = f"{tuple(given.shape)} on {given.device}" if isinstance(given, Tensor) else type(given).__name__
            raise CallError(f"{name} must be a tensor of shape {wanted} on {q.device}, to match q and v, got {got}")


def _aligned(given: Tensor) -> bool:
    """Whether kernels take a tensor as it is: strides and address are multiples of 16 bytes."""
    steps = [stride for extent, stride in zip(given.shape[:-1], given.stride()[:-1], strict=True) if extent > 1]
    size = given.element_size()
    return given.stride(-1) == 1 and given.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in steps)


def _of_candidate(call: Given, candidate: VariantCandidate) -> Given:
    return call._replace(variant=variant(candidate.variant), arguments=candidate.own())


def _of_reference(given: Given, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate the reference of the call itself, whose probabilities are weighted by exp(its own lse − lse).

    The weighted probabilities are exp(score − lse), with a constant ``lse``: the gradient of rowsum(dout ∘ out of the
    call) · w − rowsum(dout ∘ out) · w, where w is that weight, is that of the given log-sum-exp.
    """
    inputs = given.q, given.k, given.v
    wide = torch.float32 if given.q.dtype in _HALVES else given.q.dtype

    def weighted(wider: Given) -> tuple[Tensor, Tensor]:
        whole_out, whole_lse, above = map(recordable, (out, lse, dout))
        own_out, own_lse = calls.run_or_trace(wider)
        dead = own_lse.isneginf()  # rows that see no key of the call
        share = (own_lse.masked_fill(dead, 0.0) - whole_lse.masked_fill(dead, 0.0)).exp().masked_fill(dead, 0.0)
        return ((row_sums(own_out, above) - row_sums(whole_out, above)) * share).sum(), own_lse

    q, k, v = (tensor.to(wide) for tensor in inputs)
    one = torch.ones((), dtype=lse.dtype, device=lse.device)
    gradients = reference_gradients(weighted, given._replace(q=q, k=k, v=v), one, None, ())
    dq, dk, dv = (gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, inputs, strict=True))
    return dq, dk, dv
