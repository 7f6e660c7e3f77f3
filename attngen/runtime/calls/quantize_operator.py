"""The operator of ``torch.library`` that quantizes: ``qkv__quantize`` in the namespace of this runtime.

No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.calls.operators import define_once
from attngen.runtime.helpers.quantize_arguments import GRANULARITIES, Quantize, check
from attngen.runtime.helpers.quantize_run import run

NAME = "qkv__quantize"

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, str granularity, bool hadamard, Tensor? signs, int seed, str layout, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, Tensor? rotary_offsets, ScalarType dtype) -> "
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale)"
)


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, _SCHEMA, _quantize, fake=_like)


def _given(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of an operator as ``quantize`` has them: blocks are numbers."""
    granularity = arguments[3]
    return [*arguments[:3], int(granularity) if granularity.isdecimal() else granularity, *arguments[4:]]


def _quantize(*arguments: Any) -> tuple[Tensor, ...]:
    return run(*_given(arguments))


def _like(*arguments: Any) -> tuple[Tensor, ...]:
    """Return results of the right shapes, for tracing."""
    call = Quantize(*_given(arguments))
    scales = check(call).scales
    values = [torch.empty(x.shape, dtype=call.dtype, device=x.device) for x in (call.q, call.k, call.v)]
    return (*values, *(call.q.new_empty(scales[name], dtype=torch.float32) for name in "qkv"))


def call(*given: Any) -> tuple[Tensor, ...]:
    """Call the operator with the arguments of ``quantize``, which were checked."""
    for granularity in GRANULARITIES:  # a tracer knows no text of a number that is not written in the program
        if granularity == given[3]:
            break
    found: tuple[Tensor, ...] = getattr(getattr(torch.ops, defined()), NAME)(*given[:3], str(granularity), *given[4:])
    return found
