"""The scales that bring quantized q, k and v back to their units: checked and laid out as kernels read them.

An element of 8 bits times its scale is what it stands for. A scale is one number, or one for each batch entry and KV
head, whose query heads share that of q.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import DESCALES, QUANTIZED_DTYPES
from attngen.errors import CallError
from attngen.runtime.arguments import Call


def check_descales(call: Call, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the scales of a call by name, each (batch, kv_heads) float32; none where q is no quantized dtype.

    Raises CallError for scales that are missing, that nobody asked for, or of another form.
    """
    named = {name: given.get(name) for name in DESCALES}
    if call.dtype not in QUANTIZED_DTYPES:
        for name, value in named.items():
            if value is not None:
                raise CallError(f"{name} is of quantized tensors, but q has dtype {call.dtype}; leave it out")
        return {}
    return {name: _descale(call, name, value) for name, value in named.items()}


def _descale(call: Call, name: str, value: Any) -> Tensor:
    form = f"float32 of shape () or (batch, kv_heads) = ({call.batch}, {call.kv_heads})"
    if value is None:
        raise CallError(f"{name} is missing: {call.dtype} tensors need a scale, {form}; attngen.quantize makes it")
    if not isinstance(value, Tensor):
        raise CallError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.device != call.device:
        raise CallError(f"{name} is on {value.device}, but q is on {call.device}")
    wanted = (call.batch, call.kv_heads)
    if value.dtype != torch.float32 or tuple(value.shape) not in ((), (1,), wanted):
        raise CallError(f"{name} must be {form}, got {value.dtype} of shape {tuple(value.shape)}")
    return value.expand(wanted)


def dequantized(call: Call, name: str, rows: Tensor, b: int, compute: torch.dtype) -> Tensor:
    """Return rows (s, heads, head_dim) of q, k or v of sequence ``b`` in their own units."""
    rows = rows.to(compute)
    scale = call.descales.get(f"{name}_descale")
    if scale is None:
        return rows
    return rows * scale[b].to(compute).repeat_interleave(rows.shape[1] // call.kv_heads)[:, None]
