"""cuEquivariance's ``triangle_attention``: rows of a pair representation share a bias of pairs.

The rows are entries of a batch, of which ``rows`` in a row read the same bias, so that nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attngen.errors import CallError
from attngen.integrations.shared.arguments import contiguous_last, tensor
from attngen.integrations.shared.choice import VariantCandidate, attend
from attngen.integrations.shared.tensor_masks import BIAS

__all__ = ["triangle_attention"]

#: The spec that builds the variants of these calls.
_SPEC = "cuequivariance"

#: Columns of a bias are a multiple of this, so that kernels load its rows and add to those of its gradient as they are.
_COLUMNS = 8

#: Most logits that are in memory at a time where their maxima are asked for.
_MOST_LOGITS = 1 << 24

#: What is added to the logit of a key that is not real.
_HIDDEN = -1e9


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of each of N rows over its own keys, with a bias of pairs that the rows share: (B, N, H, Q, d).

    q is (B, N, H, Q, d), k and v are (B, N, H, K, d) in bfloat16, float16 or float32, and bias is (B, 1, H, Q, K), in
    any of these dtypes; with B = 1 each may lack its first axis. ``mask`` (B, N, 1, 1, K) is true for real keys: the
    others get -1e9 more, so that a row without real keys gives the mean of v. ``kv_lengths`` (B, N, 1, 1, 1) int32
    counts the keys of each row instead: the others are not visited, and a row of length 0 gives 0. ``scale`` is
    1 / sqrt(d) by default. With ``return_aux`` also the natural log-sum-exp and the largest logit of each query,
    (B, N, H, Q) in float32; the latter has no gradient, and is computed by torch in more time than attention takes.

    q, k, v and bias get gradients. Raises CallError for shapes and dtypes that disagree, and NoKernelError if no kernel
    is built for the call.
    """
    q, k, v, bias = (_with_batch(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)))
    _check(q, k, v, bias)
    (batch, rows), keys = q.shape[:2], k.shape[3]
    bias = _in_kernel_dtype(bias, q)
    if mask is not None and kv_lengths is not None:
        raise CallError("mask and kv_lengths exclude each other: pass one of them")
    real = None if mask is None else _real(mask, (batch, rows, 1, 1, keys))
    lengths = None if kv_lengths is None else _lengths(kv_lengths, (batch, rows, 1, 1, 1), keys)
    name = "triangle_unmasked" if real is None else "triangle"
    kind = BIAS[bias.dtype]
    own = {"rows": rows, "bias": _in_whole_columns(bias.squeeze(1))}
    candidate = VariantCandidate(
        name if kind == "fp32" else f"{name}_{kind}", own if real is None else {**own, "real": real}
    )
    flat = [contiguous_last(x.flatten(0, 1)) for x in (q, k, v)]
    result = attend(
        [candidate], *flat, spec=_SPEC, softmax_scale=scale, seqused_k=lengths, return_lse=return_aux, heads_first=True
    )
    if not return_aux:
        return result.view(batch, rows, *result.shape[1:])
    out, lse = (one.view(batch, rows, *one.shape[1:]) for one in result)
    most = _largest(q, k, bias, real, lengths, q.shape[-1] ** -0.5 if scale is None else scale)
    if lengths is not None:  # a row of length 0 has zeros there, too
        empty = (lengths <= 0).view(batch, rows, 1, 1)
        lse, most = lse.masked_fill(empty, 0.0), most.masked_fill(empty, 0.0)
    elif real is not None:  # kernels bound logits that are this small
        lse = lse.masked_fill(~real.any(-1).view(batch, rows, 1, 1), _HIDDEN)
    return out, lse, most


def _with_batch(name: str, given: Tensor) -> Tensor:
    """A tensor of five axes: one of four gets a batch axis."""
    if tensor(name, given).dim() not in (4, 5):
        raise CallError(f"{name} must have 5 axes, or 4 where the batch is 1, got the shape {tuple(given.shape)}")
    return given if given.dim() == 5 else given[None]


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    batch, rows, heads, queries, head_dim = q.shape
    keys = k.shape[3]
    if 0 in (batch, rows):
        raise CallError(f"q must have rows, got the shape {tuple(q.shape)}")
    for name, given, wanted in (
        ("k", k, (batch, rows, heads, keys, head_dim)),
        ("v", v, (batch, rows, heads, keys, head_dim)),
        ("bias", bias, (batch, 1, heads, queries, keys)),
    ):
        if tuple(given.shape) != wanted:
            raise CallError(f"{name} must have the shape {wanted}, to match q and k, got {tuple(given.shape)}")
    if bias.dtype not in BIAS:
        raise CallError(f"bias must be in float32, bfloat16 or float16, got {bias.dtype}")


def _in_kernel_dtype(bias: Tensor, q: Tensor) -> Tensor:
    """The bias in float32, or as it is if it has the dtype that q has in kernels: autocast's if that is on."""
    dtype = q.dtype
    device = "cpu" if q.is_meta else q.device.type  # torch has no autocast of the meta device
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return bias if bias.dtype == dtype else bias.float()


def _in_whole_columns(bias: Tensor) -> Tensor:
    """A bias (B, H, Q, K) whose rows kernels load as they are: a copy with more columns if need be."""
    missing = -bias.shape[-1] % _COLUMNS
    return contiguous_last(pad(bias, (0, missing)) if missing else bias)  # pad keeps the order of the axes in memory


def _real(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Whether the keys of each row are real, (B · N, K)."""
    given = _with_batch("mask", mask)
    if tuple(given.shape) != shape:
        raise CallError(f"mask must have the shape {shape}, to match q and k, got {tuple(given.shape)}")
    return contiguous_last(given.to(torch.bool).reshape(-1, shape[-1]))


def _lengths(kv_lengths: Tensor, shape: tuple[int, ...], keys: int) -> Tensor:
    """The number of keys of each row, (B · N,); one beyond all keys counts as these."""
    if tuple(tensor("kv_lengths", kv_lengths).shape) != shape or kv_lengths.dtype != torch.int32:
        got = f"{tuple(kv_lengths.shape)} of {kv_lengths.dtype}"
        raise CallError(f"kv_lengths must have the shape {shape} and the dtype torch.int32, got {got}")
    return kv_lengths.flatten().clamp(max=keys)


@torch.no_grad()
def _largest(q: Tensor, k: Tensor, bias: Tensor, real: Tensor | None, lengths: Tensor | None, scale: float) -> Tensor:
    """The largest logit of each query, (B, N, H, Q) in float32: a few rows at a time."""
    batch, rows, heads, queries, _ = q.shape
    keys = k.shape[3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if real is None and lengths is not None:
        real = torch.arange(keys, device=q.device) < lengths[:, None]
    hidden = None
    if real is not None:
        value = _HIDDEN if lengths is None else -torch.inf
        hidden = torch.zeros_like(real, dtype=dtype).masked_fill_(~real, value).view(batch, rows, 1, 1, keys)
    most = q.new_empty((batch, rows, heads, queries), dtype=torch.float32)
    step = max(1, _MOST_LOGITS // max(1, heads * queries * keys))
    for entry in range(batch):
        for first in range(0, rows, step):
            chosen = slice(first, first + step)
            logits = (q[entry, chosen].to(dtype) @ k[entry, chosen].to(dtype).mT) * scale + bias[entry]
            if hidden is not None:
                logits += hidden[entry, chosen]
            most[entry, chosen] = logits.amax(-1)
    return most
