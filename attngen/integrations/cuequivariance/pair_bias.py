"""cuEquivariance's ``attention_pair_bias``: attention with a bias projected from pairs, gated and projected.

Its attention is that of triangles: samples that share a pair representation are rows that share a bias. The rest is
torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm

from attngen.errors import CallError
from attngen.integrations.cuequivariance.triangle import triangle_attention
from attngen.integrations.shared.arguments import tensor

__all__ = ["attention_pair_bias"]

#: Least ``inf``: kernels give masked keys no weight, as any number does that is far beyond the logits.
_LEAST_INF = 1e3


def attention_pair_bias(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention with a bias of pairs, of AlphaFold 3: the output (B · M, N, D), and the projected pairs if asked for.

    M samples share the pairs of each of B sequences, so that kernels read one bias for them. Both argument lists of
    cuEquivariance are taken, by position or by name. Since 0.11, where norm and projections come with the call:

        single_repr, pair_repr, mask, num_heads, w_ln_a, b_ln_a, w_proj_q, b_proj_q, w_proj_k, w_proj_v, w_proj_g,
        w_proj_o, w_proj_z=None, b_proj_o=None, b_proj_z=None, w_ln_z=None, b_ln_z=None, inf=1e6, eps=1e-5,
        attn_scale=None, return_z_proj=False, is_cached_z_proj=False, *, b_proj_k=None, b_proj_v=None, w_ln_q=None,
        b_ln_q=None, w_ln_k=None, b_ln_k=None, b_proj_g=None, norm_kind="layer_norm"

    and up to 0.10, with the heads (B · M, H, tokens, d), and an ``s`` (B · M, queries, D) that only the gate reads:

        s, q, k, v, z, mask, num_heads, w_proj_z, w_proj_g, w_proj_o, w_ln_z=None, b_ln_z=None, b_proj_z=None,
        b_proj_g=None, b_proj_o=None, inf=1e6, eps=1e-5, attn_scale=None, return_z_proj=True, is_cached_z_proj=False

    The pairs are (B, queries, keys, channels), or (B, H, queries, keys) with ``is_cached_z_proj``, as
    ``return_z_proj`` returned them; kernels read the bias in float32, or in the dtype of q. ``mask``, (B, keys) or
    (B · M, keys), is 0 for keys that are not real: they get no weight whatever ``inf`` is, and a sequence without real
    keys the mean of v. ``attn_scale`` is 1 / sqrt(d) by default. All tensors but the mask get gradients. Raises
    CallError for arguments that disagree, and NoKernelError if no kernel is built for the call.
    """
    of_heads = "v" in kwargs or (len(args) > 3 and isinstance(args[3], Tensor))
    return (_of_heads if of_heads else _of_singles)(*args, **kwargs)


def _of_singles(
    single_repr: Tensor,
    pair_repr: Tensor,
    mask: Tensor | None,
    num_heads: int,
    w_ln_a: Tensor,
    b_ln_a: Tensor | None,
    w_proj_q: Tensor,
    b_proj_q: Tensor | None,
    w_proj_k: Tensor,
    w_proj_v: Tensor,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_proj_z: Tensor | None = None,
    b_proj_o: Tensor | None = None,
    b_proj_z: Tensor | None = None,
    w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: Tensor | None = None,
    b_proj_v: Tensor | None = None,
    w_ln_q: Tensor | None = None,
    b_ln_q: Tensor | None = None,
    w_ln_k: Tensor | None = None,
    b_ln_k: Tensor | None = None,
    b_proj_g: Tensor | None = None,
    norm_kind: str = "layer_norm",
) -> tuple[Tensor, Tensor | None]:
    if tensor("single_repr", single_repr).dim() != 3:
        raise CallError(f"single_repr must have 3 axes, got the shape {tuple(single_repr.shape)}")
    if w_proj_q.shape[0] % num_heads:
        raise CallError(f"w_proj_q must have rows for {num_heads} heads, got the shape {tuple(w_proj_q.shape)}")
    single = _normalized(single_repr, w_ln_a, b_ln_a, eps, norm_kind)
    v = _projected(single, w_proj_v, b_proj_v)
    q, k = _projected(single, w_proj_q, b_proj_q), _projected(single, w_proj_k, b_proj_k)
    if w_ln_q is not None or b_ln_q is not None:
        q = _normalized(q, w_ln_q, b_ln_q, eps, norm_kind).to(v.dtype)  # autocast has norms in float32
    if w_ln_k is not None or b_ln_k is not None:
        k = _normalized(k, w_ln_k, b_ln_k, eps, norm_kind).to(v.dtype)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return _of_heads(
        single, q, k, v, pair_repr, mask, num_heads, w_proj_z, w_proj_g, w_proj_o, w_ln_z, b_ln_z, b_proj_z, b_proj_g,
        b_proj_o, inf, eps, attn_scale, return_z_proj, is_cached_z_proj, norm_kind=norm_kind,
    )  # fmt: skip


def _of_heads(
    s: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    mask: Tensor | None,
    num_heads: int,
    w_proj_z: Tensor | None,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None,
    b_proj_z: Tensor | None = None,
    b_proj_g: Tensor | None = None,
    b_proj_o: Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = True,
    is_cached_z_proj: bool = False,
    *,
    norm_kind: str = "layer_norm",
) -> tuple[Tensor, Tensor | None]:
    for name, given in (("s", s), ("q", q), ("k", k), ("v", v), ("z", z)):
        axes = 3 if name == "s" else 4
        if tensor(name, given).dim() != axes:
            raise CallError(f"{name} must have {axes} axes, got the shape {tuple(given.shape)}")
    entries, heads, queries, _ = q.shape
    if heads != num_heads:
        raise CallError(f"q must have num_heads = {num_heads} heads, got the shape {tuple(q.shape)}")
    sequences, keys = z.shape[0], k.shape[2]
    if not sequences or entries % sequences:
        raise CallError(f"the batch of q must be a multiple of that of the pairs, {sequences}, got {entries}")
    if not inf >= _LEAST_INF:
        raise CallError(f"inf must be at least {_LEAST_INF:.0f}, since kernels give masked keys no weight, got {inf}")
    bias = z if is_cached_z_proj else _bias(z, w_proj_z, b_proj_z, w_ln_z, b_ln_z, eps, norm_kind)
    wanted = sequences, heads, queries, keys
    if tuple(bias.shape) != wanted:
        raise CallError(f"the pairs must give a bias of the shape {wanted}, to match q and k, got {tuple(bias.shape)}")
    samples = entries // sequences
    real = None if mask is None else _real(mask, sequences, samples, keys)
    q, k, v = (x.unflatten(0, (sequences, samples)) for x in (q, k, v))
    out = triangle_attention(q, k, v, bias[:, None], real, attn_scale)
    assert isinstance(out, Tensor)
    mixed = out.flatten(0, 1).transpose(1, 2).flatten(2)
    gated = _projected(s, w_proj_g, b_proj_g).sigmoid() * mixed
    return _projected(gated, w_proj_o, b_proj_o), bias if return_z_proj else None


def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm_kind: str) -> Tensor:
    """The layer norm, or root mean square norm, of the last axis."""
    shape = x.shape[-1:]
    weight = None if weight is None else weight.to(x.dtype)
    if norm_kind == "layer_norm":
        return layer_norm(x, shape, weight, None if bias is None else bias.to(x.dtype), eps)
    if norm_kind != "rms_norm":
        raise CallError(f"norm_kind must be 'layer_norm' or 'rms_norm', got {norm_kind!r}")
    if bias is not None:
        raise CallError("norm_kind 'rms_norm' has weights alone: b_ln_a, b_ln_q, b_ln_k and b_ln_z must be None")
    return rms_norm(x, shape, weight, eps)


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of the last axis, whose parameters may have another dtype."""
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _bias(
    z: Tensor,
    w_proj_z: Tensor | None,
    b_proj_z: Tensor | None,
    w_ln_z: Tensor | None,
    b_ln_z: Tensor | None,
    eps: float,
    norm_kind: str,
) -> Tensor:
    """The pairs as a bias of each head, (B, H, queries, keys), contiguous, so that it serves calls as it is."""
    if w_proj_z is None:
        raise CallError("w_proj_z is needed unless the pairs are projected already (is_cached_z_proj)")
    pairs = _normalized(z, w_ln_z, b_ln_z, eps, norm_kind)
    return _projected(pairs, w_proj_z, b_proj_z).permute(0, 3, 1, 2).contiguous()


def _real(mask: Tensor, sequences: int, samples: int, keys: int) -> Tensor:
    """Whether the keys of each sample are real, (B, M, 1, 1, keys)."""
    shapes = (sequences, keys), (sequences * samples, keys)
    if tuple(tensor("mask", mask).shape) not in shapes:
        raise CallError(f"mask must have the shape {shapes[0]} or {shapes[1]}, got {tuple(mask.shape)}")
    if mask.requires_grad:
        raise CallError("mask has no gradient: kernels read whether it is 0")
    return mask.unflatten(0, (sequences, -1))[:, :, None, None].expand(-1, samples, -1, -1, -1)
