"""Calls of a drop-in that were made before: recognized by the tensors of its own arguments, and launched as they are.

What a drop-in makes of its arguments (views, checks, a call of attngen's) follows from their shapes and strides alone,
so that a call with tensors like those of an earlier one needs only their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.integrations.shared import choice
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.given import Given, maker, tensors_of
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.keys import PLAIN
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.cache import RecentCache
from attngen.runtime.launch.chain import Sized
from attngen.runtime.launch.prepared import PreparedCall
from attngen.runtime.operations.attention.recall import recognized
from attngen.runtime.registry.lookup import registry

#: Most times that the tensors of a key are noted: calls that differ in more than the key says would note them each
#: time.
_MOST_NOTED = 8

#: Makes what a launch reads of a call whose addresses are known: q, whose form the output may have, and the scale.
_launched = maker("q softmax_scale")

#: The tensors of a call by their places, at least one of them None; q is the first.
Record = tuple[Tensor | None, ...]

#: Maker of the tensor that stands for the argument of a place, from all arguments and the constants that are held.
Maker = tuple[int, Callable[[Any, Any], Tensor]]


class _Alike(NamedTuple):
    """The arguments of an earlier call, what stands for some, what ran it, and where its addresses come from."""

    tensors: SeenTensors
    makers: Sequence[Maker]
    prepared: PreparedCall
    sized: Sized | None  # its numbers, where it is one of a kind
    #: Addresses that a launch takes, 0 where the source says which argument's it is.
    addresses: list[int]
    sources: list[tuple[int, int]]


_KNOWN: RecentCache[_Alike] = RecentCache(512)
_NOTED: RecentCache[int] = RecentCache(512)


def key_of(record: Record, *settings: Any) -> tuple[Any, ...] | None:
    """Key of a call with these tensors and such settings; None for one that has to be looked at each time."""
    q = record[0]
    if q is None or not may_repeat(q):
        return None
    try:
        shapes = [None if tensor is None else tensor.shape for tensor in record]
        key = (registry.generation, torch.is_grad_enabled(), q.get_device(), *shapes, *settings)
        hash(key)
    except (AttributeError, RuntimeError, TypeError):  # something else than a tensor, or than a number
        return None
    return key


def again(
    key: tuple[Any, ...], record: Record, held: Mapping[Any, Tensor] | None, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """Make a call whose arguments are like earlier ones, and return output and log-sum-exp; else None."""
    alike = _KNOWN[key]
    if alike is None:
        return None
    pointers = alike.tensors.addresses(record)
    if pointers is None:
        return None
    made = []  # kept until the launch is enqueued
    for place, make_of in alike.makers:
        made.append(tensor := make_of(record, held))
        pointers[place] = tensor.data_ptr()
    addresses = alike.addresses.copy()
    for place, source in alike.sources:
        addresses[place] = pointers[source]
    out, lse = alike.prepared(_launched(record[0], scale), addresses, alike.sized)
    return out, lse


def note(key: tuple[Any, ...], record: Record, makers: Sequence[Maker], made: Sequence[Tensor], given: Given) -> None:
    """Remember the arguments of a call that became ``given``, if that was recognized when it was made."""
    count = _NOTED.get(key, 0)
    ready = recognized(given) if count < _MOST_NOTED and choice.on_gpu(given.q) else None
    if ready is None:
        return
    prepared, sized = ready
    if not isinstance(prepared, PreparedCall):  # more than a launch makes such calls
        return
    _NOTED.put(key, count + 1)
    own = tuple(tensor for tensor in given.arguments.values() if type(tensor) in PLAIN)
    places = [(place, tensor) for place, tensor in enumerate(tensors_of(given)) if tensor is not None]
    places += enumerate(own, len(FORWARD))
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in record]
    for (place, _), tensor in zip(makers, made, strict=True):
        pointers[place] = tensor.data_ptr()
    some = [pointer for pointer in pointers if pointer]
    if len(set(some)) < len(some):  # nothing tells such arguments apart
        return
    addresses, sources = [0] * (len(FORWARD) + len(own)), []
    for place, tensor in places:
        if tensor.data_ptr() not in some:  # a copy of an argument
            return
        sources.append((place, pointers.index(tensor.data_ptr())))
    noted = seen(record, (), range(len(record)), len(record), frozenset(), {})
    if noted is not None:
        _KNOWN.put(key, _Alike(noted, makers, prepared, sized, addresses, sources))
