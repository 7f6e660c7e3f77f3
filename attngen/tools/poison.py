"""Results that start as garbage, between guards that nothing may touch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.runtime.arguments import Call
from attngen.runtime.module import Kernel
from attngen.runtime.pinned import Buffers, map_shape

#: Bytes of a guard; every one holds _CANARY.
_GUARD_BYTES = 8192
_CANARY = 0xAA


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The buffers of a call, and the memory that out, lse and the tile map lie in."""

    buffers: Buffers
    _memory: dict[str, Tensor]

    def overrun(self) -> tuple[str, ...]:
        """Say around which of the results something was written; empty if nothing was."""
        found = []
        for name, memory in self._memory.items():
            guards = torch.cat([memory[:_GUARD_BYTES], memory[-_GUARD_BYTES:]])
            changed = int((guards != _CANARY).sum())
            if changed:
                found.append(f"{changed} bytes around {name} were written")
        return tuple(found)


def poisoned(kernel: Kernel, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Poisoned:
    """Return buffers whose out and lse are NaN, and whose tile map is 0xAA in every byte."""
    memory: dict[str, Tensor] = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        memory[name] = torch.full((size + 2 * _GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=call.device)
        return memory[name][_GUARD_BYTES : _GUARD_BYTES + size].view(dtype).view(shape)

    out = allocate("out", call.out_shape(), q.dtype).fill_(torch.nan)
    lse = allocate("the log-sum-exp", call.lse_shape(), torch.float32).fill_(torch.nan)
    shape = map_shape(kernel, call)
    words = None if shape is None else allocate("the tile map", shape, torch.int32)
    return Poisoned(Buffers(q, k, v, out, lse, words), memory)
