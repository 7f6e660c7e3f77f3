"""Kernels that a traced call lacks, made while it is traced: fake tensors tell shapes, strides and dtypes.

A compiled program then finds them when it first runs, also where that is inside the capture of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from attngen.errors import CallError
from attngen.runtime.arguments.given import TENSORS, Given, tensors_of
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.autograd.training import asks_for_determinism, of_backward
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.expanded import are_one_head, need_copies, with_copies, with_one_head
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import bind_call
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.no_kernel import describe
from attngen.runtime.registry.select import Request, first_that_fits

#: Requests that could not be met.
_FAILED: RecentCache[bool] = RecentCache(256)

#: Assumed alignment of addresses, in bytes, as torch's allocations have it.
_ALIGNED = 512


def prepare(given: Given, on_gpu: Callable[[object], bool], direction: str = "forward") -> None:
    """Have the kernel that a traced call, or its backward, lacks made now.

    Does nothing unless ``attngen.jit`` is on and a compiled program is traced. What fails here is left to the call that
    runs, which says why.
    """
    if on_demand.maker is None or TracingContext.try_get() is None:
        return
    if not on_gpu(given.q) or given.backend == "reference" or given.package is not None:
        return
    device = given.q.device.index or 0
    try:
        with _without_tracing():
            _make(_concrete(of_backward(given) if direction == "backward" else given), device, direction)
    except (CallError, _UnknownError):  # NoKernelError among them
        return


class _UnknownError(Exception):
    """A size that only the running program knows."""


def _without_tracing() -> AbstractContextManager[None]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _make(given: Given, device: int, direction: str) -> None:
    call, resolved = bind_call(in_rows(given))
    if call.empty:
        return
    if need_copies(call) or are_one_head(call):
        one_head = direction == "forward" and are_one_head(call)
        given = with_one_head(given) if one_head else with_copies(given)
        call, resolved = bind_call(in_rows(given))
    call.return_lse = True
    own = {name: value for name, value in given.arguments.items() if isinstance(value, Tensor)}
    known = {name: _address(tensor) for name, tensor in zip(TENSORS, tensors_of(given), strict=True)}
    known |= {f"tensor:{name}": _address(tensor) for name, tensor in own.items()}
    if direction == "backward":
        ordered = given.deterministic or asks_for_determinism() == 2
        request = Request(call, device, known, dict(call.scalars), None, direction, ordered)
    else:
        passed = {name: call.scalars[name] for name in given.arguments if name in call.scalars}
        request = Request(call, device, known, passed, given.backend)
    if first_that_fits(resolved.kernels, request, drivers.current()) is not None:
        return
    asked = call.variant.definition, describe(call, direction), tuple(known.values()), registry.generation
    if _FAILED.get(asked) is None:
        _FAILED.put(asked, True)  # until something is made: a trace asks several times
        on_demand.make(request)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _ALIGNED + int(tensor.storage_offset()) * tensor.itemsize


def _concrete(given: Given) -> Given:
    """Return a call with tensors without data, of the sizes that the trace was begun with."""
    named = {name: _like(value) for name, value in given.arguments.items()}
    fields = {name: _like(getattr(given, name)) for name in TENSORS}
    numbers = {name: _hint(getattr(given, name)) for name in ("max_seqlen_q", "max_seqlen_k", "num_splits")}
    return given._replace(**fields, **numbers, split_size=_hint(given.split_size), arguments=named, tile_map=None)


def _like(value: Any) -> Any:
    """Return a tensor on no device in the form of another one; a number as what it is known to be."""
    if not isinstance(value, Tensor):
        return _hint(value)
    shape, strides = ([_hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    offset = _hint(value.storage_offset())
    span = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    whole = torch.empty(max(span, 0) if 0 not in shape else offset, dtype=value.dtype, device="meta")
    return whole.as_strided(shape, strides, offset)


def _hint(value: Any) -> Any:
    """Value of a symbol when its trace began, without making the program depend on that."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    node: Any = value.node
    if not node.has_hint():
        raise _UnknownError
    return node.hint
