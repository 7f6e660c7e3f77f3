"""Constant int32 tensors that drop-ins pass to kernels, kept for the calls of a stream.

A launch that fills a tensor takes as long on the host as one of attention. A kept tensor is read on the stream that
filled it, so that nothing has to wait. Calls in a graph, in a trace and under torch's modes make tensors of their own:
a kept one might be replaced before a graph runs again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.integrations.shared import choice
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.map_cache import in_graph_pool

#: Device, number and value of the elements; None for the integers from 0 on.
Key = tuple[int, int, int | None]

#: Kept tensors by device, stream and what they hold.
_KEPT: RecentCache[Tensor] = RecentCache(256)


def filled(like: Tensor, count: int, value: int, held: dict[Key, Tensor] | None = None) -> Tensor:
    """Tensor (1, count) of one value, on the device of ``like``. Not to be written.

    ``held`` gets the tensors of calls outside of graphs. Calls in a graph take theirs from it: a caller who passes it
    keeps it as long as the graph.
    """
    return _kept(like, count, value, held)


def counted(like: Tensor, count: int, held: dict[Key, Tensor] | None = None) -> Tensor:
    """Integers below ``count`` as a tensor (1, count), kept as by ``filled``."""
    return _kept(like, count, None, held)


def _kept(like: Tensor, count: int, value: int | None, held: dict[Key, Tensor] | None) -> Tensor:
    if not choice.on_gpu(like) or not may_repeat(like):
        return _made(like.device, count, value)
    index = like.get_device()
    if torch.cuda.is_current_stream_capturing():
        tensor = None if held is None else held.get((index, count, value))
        return _made(like.device, count, value) if tensor is None else tensor
    stream = drivers.current().stream(index)
    key = index, stream, count, value
    tensor = _KEPT[key]
    if tensor is None:
        with torch.inference_mode(False):  # a later call may save it for a backward
            tensor = _made(like.device, count, value)
        if in_graph_pool(like.device, stream):
            return tensor
        _KEPT.put(key, tensor)
    if held is not None:
        held.setdefault((index, count, value), tensor)  # a graph may read the first one as long as it lives
    return tensor


def _made(device: torch.device, count: int, value: int | None) -> Tensor:
    if value is None:
        return torch.arange(count, dtype=torch.int32, device=device)[None]
    return torch.full((1, count), value, dtype=torch.int32, device=device)
