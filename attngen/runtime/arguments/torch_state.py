"""Torch's state at a call: compiling, tracing, transforming or recording, and whether a tensor is on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from attngen.runtime.arguments.keys import PLAIN

_Value = TypeVar("_Value")

#: Looked up once: every call asks.
is_compiling = torch.compiler.is_compiling
is_tracing = torch._C._is_tracing
transforms_active = torch._C._are_functorch_transforms_active

#: The number of dispatch modes that are active, as those of selective checkpoints.
watching = torch._C._len_torch_dispatch_stack


def is_traced(tensor: Tensor) -> bool:
    """Whether a call with a tensor is traced: compiled, or the tensor has no data, as on the meta device."""
    if is_compiling():
        return True
    if type(tensor) in PLAIN:
        return tensor.is_meta
    return isinstance(tensor, Tensor) and not tensor.is_nested  # which is refused


def recording() -> AbstractContextManager[None]:
    """Context in which autograd records: also inside an operator, where torch leaves it out of dispatch, and in
    inference mode."""
    return torch.inference_mode(False)


def recordable(value: _Value) -> _Value:
    """A value that autograd may save: a copy of a tensor of inference mode, anything else as it is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def on_gpu(tensor: object) -> bool:
    """Whether a value is a tensor on a GPU."""
    return isinstance(tensor, Tensor) and tensor.is_cuda
