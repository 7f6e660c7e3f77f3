"""The operator of ``torch.library`` that quantizes: ``qkv__quantize`` in the namespace of this runtime.

No variant can have its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.runtime.operations.quantize.arguments import FIELDS, GRANULARITIES, Quantize, check
from attngen.runtime.operations.quantize.path import QUANTIZE
from attngen.runtime.operations.shared.library import define_once

NAME = "qkv__quantize"
NAMES = (NAME,)

_RESULTS = "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale)"


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operator at the first use, and return its namespace."""
    return define_once(NAME, FIELDS.schema(_RESULTS), _quantize, fake=_like)


def _call_of(arguments: tuple[Any, ...]) -> Quantize:
    """The call of an operator's arguments: blocks are numbers."""
    call = Quantize(*arguments)
    granularity = str(call.granularity)
    return call._replace(granularity=int(granularity)) if granularity.isdecimal() else call


def _quantize(*arguments: Any) -> tuple[Tensor, ...]:
    return QUANTIZE.run(_call_of(arguments))


def _like(*arguments: Any) -> tuple[Tensor, ...]:
    """Results of the right shapes, for tracing."""
    call = _call_of(arguments)
    scales = check(call).scales
    values = [torch.empty(x.shape, dtype=call.dtype, device=x.device) for x in (call.q, call.k, call.v)]
    return (*values, *(call.q.new_empty(scales[name], dtype=torch.float32) for name in "qkv"))


def call(given: Quantize) -> tuple[Tensor, ...]:
    """Call the operator with a checked call."""
    for granularity in GRANULARITIES:  # a tracer knows no text of a number that is not written in the program
        if granularity == given.granularity:
            break
    operator = getattr(getattr(torch.ops, defined()), NAME)
    results: tuple[Tensor, ...] = operator(*given._replace(granularity=str(granularity)))
    return results
