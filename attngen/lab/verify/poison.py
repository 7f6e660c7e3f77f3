"""Results that start as garbage, between guards that nothing may write to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.runtime.arguments.checked import Call
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.gradients import GradientBuffers, differentiable, gradient_shapes
from attngen.runtime.launch.pinned import Buffers, prepared_shapes

#: Bytes of a guard; every one holds _CANARY.
_GUARD_BYTES = 8192
_CANARY = 0xAA


class Guarded:
    """Memory between guards, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose bytes are all 0xAA."""
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * _GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=self._device)
        self._memory[name] = memory
        return memory[_GUARD_BYTES : _GUARD_BYTES + size].view(dtype).view(shape)

    def overrun(self) -> tuple[str, ...]:
        """The results around which something was written, a line each."""
        overrun = []
        for name, memory in self._memory.items():
            guards = torch.cat([memory[:_GUARD_BYTES], memory[-_GUARD_BYTES:]])
            changed = int((guards != _CANARY).sum())
            if changed:
                overrun.append(f"{changed} bytes around {name} were written")
        return tuple(overrun)


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The buffers of a call, and the memory that holds out, lse and the tile map."""

    buffers: Buffers
    _memory: Guarded

    def overrun(self) -> tuple[str, ...]:
        """The results around which something was written, a line each."""
        return self._memory.overrun()


def poisoned(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Poisoned:
    """Return buffers whose out and lse are NaN, and whose tile map is 0xAA in every byte."""
    memory = Guarded(call.device)
    out = memory.allocate("out", call.out_shape(), call.out_dtype).fill_(torch.nan)
    lse = memory.allocate("the log-sum-exp", call.lse_shape(), torch.float32).fill_(torch.nan)
    lse = lse.as_strided(call.lse_shape(), call.lse_strides())
    sizes, maps = prepared_shapes(kernel, call)
    words = {owner: memory.allocate("the tile map", shape, torch.int32) for owner, shape in maps.items()}
    return Poisoned(Buffers(q, k, v, out, lse, words.get("forward"), _workspaces(memory, sizes)), memory)


def poisoned_gradients(
    kernel: Kernel, call: Call, inputs: Mapping[str, Tensor], dlse: Tensor | None
) -> tuple[GradientBuffers, Guarded]:
    """Return buffers of a backward whose results and workspaces are NaN, and whose tile maps are 0xAA in every byte.

    The gradients of the variant's own tensors are added to, and start at 0. ``inputs`` are q, k, v, out, lse, dout.
    """
    memory = Guarded(call.device)
    dtype = inputs["q"].dtype
    results = {
        name: memory.allocate(name, shape, dtype).fill_(torch.nan) for name, shape in gradient_shapes(call).items()
    }
    sizes, maps = prepared_shapes(kernel, call)
    gradients = {
        name: memory.allocate(f"the gradient of {name}", tuple(call.tensors[name].shape), torch.float32).zero_()
        for name in differentiable(call)
    }
    words = {name: memory.allocate(f"the tile map of {name}", shape, torch.int32) for name, shape in maps.items()}
    workspaces = _workspaces(memory, sizes)
    buffers = GradientBuffers(**inputs, **results, dlse=dlse, workspaces=workspaces, gradients=gradients, words=words)
    return buffers, memory


def poisoned_tangents(
    kernel: Kernel, call: Call, given: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[GradientBuffers, Guarded]:
    """Return buffers of a forward-mode derivative whose results are NaN, and whose tile map is 0xAA in every byte.

    ``given`` are q, k and v, ``directions`` their tangents.
    """
    memory = Guarded(call.device)
    results = {
        name: memory.allocate(name, call.out_shape(), call.out_dtype).fill_(torch.nan) for name in ("out", "dout")
    }
    for name in ("lse", "dlse"):
        sums = memory.allocate(name, call.lse_shape(), torch.float32).fill_(torch.nan)
        results[name] = sums.as_strided(call.lse_shape(), call.lse_strides())
    _, maps = prepared_shapes(kernel, call)
    words = {name: memory.allocate(f"the tile map of {name}", shape, torch.int32) for name, shape in maps.items()}
    named = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (*given, *directions), strict=True))
    return GradientBuffers(**named, **results, workspaces={}, words=words), memory


def _workspaces(memory: Guarded, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return workspaces of a call, all NaN."""
    return {
        name: memory.allocate(f"workspace {name}", (size,), torch.float32).fill_(torch.nan)
        for name, size in sizes.items()
    }
