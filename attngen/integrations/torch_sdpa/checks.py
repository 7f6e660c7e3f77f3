"""Calls of torch's scaled_dot_product_attention that attngen serves, and the variant of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from attngen.integrations.shared.choice import VariantCandidate
from attngen.integrations.shared.tensor_masks import candidate_of
from attngen.lang.dropout import MAX_RATE
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.arguments.scalars import FLOAT32_MAX
from attngen.runtime.autograd.training import carries_tangent

PLAIN = (torch.Tensor, torch.nn.Parameter)
MASK = 3  # the place of the tensor that may be missing


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is one of ``torch.nn.attention.bias``, a module that is not imported for that."""
    return type(mask).__name__ == "CausalBias" and type(mask).__module__ == "torch.nn.attention.bias"


def of_causal_bias(mask: Any, q: Any, k: Any, is_causal: bool) -> tuple[str | None, str | None]:
    """Return the variant that a ``CausalBias`` stands for, or the reason why torch has to serve the call.

    As torch reads it: one that starts at the upper left, or is square, is ``is_causal``, whatever its lengths.
    """
    if is_causal:
        return None, "there is both a CausalBias and is_causal"
    if mask.variant.name == "UPPER_LEFT" or mask.seq_len_q == mask.seq_len_kv:
        return "causal_top_left", None
    if not all(isinstance(tensor, Tensor) and tensor.dim() >= 2 for tensor in (q, k)):
        return None, "q and k are not tensors of queries and keys"
    if (mask.seq_len_q, mask.seq_len_kv) != (q.shape[-2], k.shape[-2]):
        expected = f"{mask.seq_len_q} queries and {mask.seq_len_kv} keys"
        return None, f"the CausalBias is for {expected}, and the call has {q.shape[-2]} and {k.shape[-2]}"
    return "causal", None


def odd_option(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> str | None:
    """The option that is not a number, so that torch has to judge it, or None."""
    numbers = {"dropout_p": dropout_p, "scale": 0.0 if scale is None else scale}
    for name, value in numbers.items():
        if type(value) not in (float, int):
            return f"{name} is a {type(value).__name__}"
    for name, value in {"is_causal": is_causal, "enable_gqa": enable_gqa}.items():
        if type(value) is not bool:
            return f"{name} is a {type(value).__name__}"
    return None


def unusual(*tensors: Any) -> str | None:
    """The reason why these cannot be passed to a kernel at all, or None."""
    for place, tensor in enumerate(tensors):
        if tensor is None and place == MASK:
            continue
        if type(tensor) not in PLAIN:
            return f"there is a {type(tensor).__name__} among the tensors"
        if tensor.is_nested or tensor.layout is not torch.strided:
            return "there is a nested or sparse tensor"
        if tensor.is_meta:
            return "there is a tensor without data"
        if tensor.is_neg():
            return "there is a tensor whose sign is changed when it is read"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is active"
    if forward_ad._current_level >= 0 and carries_tangent(*tensors):
        return "forward-mode differentiation is active"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        mode = _mode()
        if mode is not None:
            return f"the mode {type(mode).__name__} is active"
    return "torch.jit.trace is active" if torch._C._is_tracing() else None


def _mode() -> Any:
    """Return an active mode that would change or record torch's function, and so must see it, or None.

    The default device changes no existing tensor. Dispatch modes that only watch operators see attngen's instead.
    """
    for place in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(place)
        if not isinstance(mode, DeviceContext):
            return mode
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
    return next((mode for mode in modes if getattr(mode, "_mode_key", None) is not None), None)


def autocast(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as autocast passes it on: torch lists this function among those that run in lower precision."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def disagreement(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> str | None:
    """The fault of shapes, dtypes or devices, so that torch has to judge it, or None."""
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (3, 4):
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions; 4, or 3, can be routed"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in ATTENTION_DTYPES:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}"
    if any(tensor.device != q.device for tensor in (k, v, mask) if tensor is not None):
        return "the tensors are on several devices"
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        return "the shapes of q, k and v disagree, or broadcast"
    if q.dim() == 4:
        heads, kv_heads = q.shape[1], k.shape[1]
        if kv_heads != v.shape[1]:
            return "k and v have different numbers of heads"
        if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
            return f"q has {heads} heads, k and v have {kv_heads}" + ("" if enable_gqa else ", without enable_gqa")
    if any(tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in (q, k, v)):
        return "the last dimension of q, k or v is not contiguous"
    if mask is not None and mask.dtype not in (torch.bool, q.dtype, torch.float32):
        return f"the mask is {mask.dtype}"
    return None


def option_against(dropout_p: float, causal: str | None, mask: Tensor | None, scale: float | None) -> str | None:
    if dropout_p and not 0 < dropout_p <= MAX_RATE:
        return f"dropout_p is {dropout_p}, and kernels take 0 to below 1"
    if causal is not None and mask is not None:
        return "there is both a mask and is_causal"
    if scale is not None and not 0 < scale <= FLOAT32_MAX:
        return f"scale is {scale}, and kernels take a positive number"
    return None


def candidate_for(q: Tensor, k: Tensor, mask: Tensor | None, causal: str | None, three: bool) -> VariantCandidate | str:
    """Return the variant of a call: q is (b, h, L, E), k (b, hk, S, E), the mask broadcasts to (b, h, L, S)."""
    if mask is None:
        return VariantCandidate(causal or "full")
    given = tuple(mask.shape)
    if len(given) not in ((2, 3) if three else (2, 3, 4)):
        return f"the mask has {len(given)} dimensions"
    if three and len(given) == 3:
        mask = mask.unsqueeze(1)
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if any(size not in (1, wanted) for size, wanted in zip(mask.shape, shape, strict=True)):
        return f"the mask of shape {given} does not broadcast to {shape}"
    return candidate_of(mask, shape)


def shapes_of(q: Any, k: Any, v: Any, mask: Any) -> str:
    parts = [f"{name} {_shape(tensor)}" for name, tensor in (("q", q), ("k", k), ("v", v))]
    if isinstance(mask, Tensor):
        kind = mask.variant.name.lower() if is_causal_bias(mask) else str(mask.dtype).removeprefix("torch.")
        parts.append(f"mask {_shape(mask)} {kind}")
    return ", ".join(parts)


def _shape(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if is_causal_bias(tensor):
        return f"{tensor.seq_len_q}x{tensor.seq_len_kv}"
    return "nested" if tensor.is_nested else "x".join(map(str, tensor.shape))
