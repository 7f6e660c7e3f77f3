"""One call that quantizes, run now: by a kernel where one takes it, else in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.keys import note
from attngen.runtime.autograd.transforms import refuse
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.helpers import quantize_torch
from attngen.runtime.helpers.quantize_arguments import TENSORS, Quantize, check
from attngen.runtime.helpers.quantize_kernel import prepare
from attngen.runtime.helpers.quantize_launch import LAUNCHED, PreparedQuantize
from attngen.runtime.registry.lookup import registry

#: What is kept of a kind of call: how it is launched, or why no kernel takes it; and the shapes of its scales.
_Kept = tuple[PreparedQuantize | str, tuple[tuple[int, ...], ...]]

_PREPARED: RecentCache[_Kept] = RecentCache(1024)


def run(*given: Any) -> tuple[Tensor, ...]:
    """Quantize now, whether the call comes from a program or from an operator; arguments as ``Quantize`` has them."""
    call = Quantize(*given)
    if torch_state.transforms_active() or forward_ad._current_level >= 0:
        refuse("quantize", given)
    on_gpu, checked = torch_state.on_gpu(call.q), debugging.active()
    key: list[Any] = []
    if on_gpu:
        # Types are in the key because True equals 1, of which one is refused.
        key = [
            call.granularity, call.hadamard, call.seed, call.layout, call.rotary_interleaved, call.dtype,
            registry.generation, type(call.granularity), type(call.hadamard), type(call.seed),
            type(call.rotary_interleaved),
        ]  # fmt: skip
        for name in TENSORS:
            note(key, getattr(call, name))
        kept = None if checked else _kept(tuple(key))
        if kept is not None and isinstance(kept[0], PreparedQuantize):
            return launched(kept[0], call, kept[1])
    sizes = check(call)
    if checked or call.q.device.type == "cpu":
        quantize_torch.check_contents(call, sizes)
    if on_gpu:
        kept = _PREPARED[tuple(key)]
        if kept is None:
            kept = prepare(call, sizes, drivers.current()), tuple(sizes.scales[name] for name in "qkv")
            _PREPARED.put(tuple(key), kept)
        if isinstance(kept[0], PreparedQuantize):
            return launched(kept[0], call, kept[1])
    return quantize_torch.quantize(call, sizes)


def launched(prepared: PreparedQuantize, call: Quantize, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Launch a call; ``shapes`` are those of its scales."""
    device = call.q.device
    values = [torch.empty(x.shape, dtype=call.dtype, device=device) for x in (call.q, call.k, call.v)]
    scales = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    maxima = torch.zeros(prepared.maxima, dtype=torch.int32, device=device) if prepared.maxima else None
    signs = None if call.signs is None else call.signs.to(torch.float32).contiguous()
    tensors = (
        call.q, call.k, call.v, *values, *scales, maxima, signs, call.rotary_cos, call.rotary_sin, call.rotary_offsets,
    )  # fmt: skip
    assert len(tensors) == len(LAUNCHED)
    prepared([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    return (*values, *scales)


def _kept(identity: tuple[Any, ...]) -> _Kept | None:
    """Return what was prepared for a key; None for an unknown one, and for one of arguments that are refused."""
    try:
        return _PREPARED[identity]
    except TypeError:  # something that cannot be hashed stands where a name belongs
        return None
