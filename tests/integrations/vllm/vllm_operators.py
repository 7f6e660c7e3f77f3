"""Stand-ins in Python for the operators of vLLM's CUDA binaries that a model needs, and for modules that it imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

#: Extension module that vLLM's CUDA platform imports.
EXTENSION = "vllm._C_stable_libtorch"

#: Modules over extensions, of which layers import names that they do not call.
MOCKED = tuple(
    "vllm.vllm_flash_attn" + name
    for name in ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton", ".ops.triton.rotary")
)

#: Type strings of NumPy's array interface.
_TYPES = {
    torch.bool: "|b1", torch.uint8: "|u1", torch.int8: "|i1", torch.int16: "<i2", torch.int32: "<i4",
    torch.int64: "<i8", torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8",
}  # fmt: skip


class _Mapped:
    """Pinned memory as a CUDA array: with unified addressing, a GPU reads it at the host's address."""

    def __init__(self, pinned: Tensor) -> None:
        self.pinned = pinned  # stays alive with the view
        self.__cuda_array_interface__ = {
            "version": 2, "typestr": _TYPES[pinned.dtype], "shape": tuple(pinned.shape),
            "strides": tuple(stride * pinned.element_size() for stride in pinned.stride()),
            "data": (pinned.data_ptr(), False),
        }  # fmt: skip


def cuda_view(pinned: Tensor) -> Tensor:
    """A CUDA tensor over the memory of a pinned one."""
    if pinned.numel() == 0:
        return torch.empty(pinned.shape, dtype=pinned.dtype, device="cuda")
    view = torch.as_tensor(_Mapped(pinned), device="cuda")
    assert view.data_ptr() == pinned.data_ptr()
    return view


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(out: Tensor, x: Tensor) -> None:
        gate, value = x.chunk(2, -1)
        out.copy_(activation(gate) * value)

    return run


def rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``out`` = ``x`` divided by its root mean square, times ``weight``."""
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    out.copy_(normal.to(x.dtype) * (1 if weight is None else weight))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """``residual`` += ``x``; ``x`` = the norm of the sum."""
    residual.add_(x)
    rms_norm(x, residual.clone(), weight, epsilon)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cache: Tensor, is_neox: bool, *more: Any
) -> None:
    """Rotate queries and keys in place, in halves (``is_neox``) or in pairs."""
    cos, sin = cache.index_select(0, positions.flatten()).float()[:, None].chunk(2, -1)
    half = cos.shape[-1]
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(positions.numel(), -1, head_size)[..., : 2 * half]
        first, second = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        a, b = first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


_gelu = torch.nn.functional.gelu

#: Operators by their names in ``torch.ops._C``. Layers look them up even where they do not call them.
OPERATORS = {
    "get_cuda_view_from_cpu_tensor": cuda_view,
    "silu_and_mul": _gated(torch.nn.functional.silu),
    "gelu_and_mul": _gated(_gelu),
    "gelu_tanh_and_mul": _gated(lambda x: _gelu(x, approximate="tanh")),
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "rotary_embedding": rotary_embedding,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: False,
    "cutlass_scaled_mm_supports_fp8": lambda capability: False,
    "cutlass_scaled_mm_supports_fp4": lambda capability: False,
    "cutlass_sparse_scaled_mm_supported": lambda capability: False,
    "cutlass_group_gemm_supported": lambda capability: False,
}


def install() -> None:
    """Put the modules and operators in place; before vLLM's platform is looked up."""
    sys.modules.setdefault(EXTENSION, ModuleType(EXTENSION))
    for name in MOCKED:
        sys.modules.setdefault(name, MagicMock(name=name, __path__=[]))
    for name, function in OPERATORS.items():
        setattr(torch.ops._C, name, function)
