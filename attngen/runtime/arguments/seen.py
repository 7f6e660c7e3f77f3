"""A check in C++ whether the tensors of a call are like those of an earlier one: models repeat their calls with other
addresses, and servers with other sizes.

It is the check that torch's compiler makes before it calls a compiled function. It takes half a microsecond, and spares
some fifty questions to tensors from Python. If torch does not have it, calls are recognized by their keys alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from attngen.runtime.arguments.keys import PLAIN

try:
    _TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
except AttributeError:  # not a public part of torch
    _TensorGuards = None

_address: Callable[[Tensor], int] = Tensor.data_ptr

#: Axes of a tensor whose extents, and axes whose strides, may differ between calls.
Free = tuple[tuple[int, ...], tuple[int, ...]]

#: Nothing may differ.
NONE_FREE: Free = (), ()

#: Alignment in bytes of the addresses of tensors, and of index vectors, which are int32.
_ROWS, _VECTORS = 16, 4


class SeenTensors:
    """The tensors of a checked call, without their addresses, to recognize others like them.

    Alike are types, dtypes, devices, shapes and strides (axes that are free aside), ``requires_grad`` and torch's
    modes; whether k and v begin at one address; and the alignment: 16 bytes, or 4 for index vectors.
    """

    __slots__ = (
        "_absent", "_absent_of", "_check", "_once", "_one", "_order", "_repeated", "_rows", "_tensors_of",
    )  # fmt: skip

    def __init__(
        self, record: Sequence[object], own: tuple[Tensor, ...], fields: Sequence[int], count: int,
        vectors: frozenset[int], free: Mapping[int, Free],
    ) -> None:  # fmt: skip
        """Note the tensors of a call: ``fields`` of its ``record`` (at least one is None), and its variant's ``own``.

        ``addresses`` will return ``count`` addresses in the order of the fields, 0 for those that are None, and then
        those of ``own``. Places ``vectors`` of this list are index vectors, and ``free`` says by place what may differ.
        """
        present = [place for place, field in enumerate(fields) if record[field] is not None]
        absent = [field for field in fields if record[field] is None]
        self._tensors_of = _all_of([fields[place] for place in present])
        self._absent_of, self._absent = _all_of(absent), (None,) * len(absent)
        tensors = self._tensors_of(record) + own
        axes = [free.get(place, NONE_FREE) for place in present] + [NONE_FREE] * len(own)
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(tensors)))}
        #: Places of a tensor that is passed twice, as k and v of a cache that holds both. torch's check takes it once.
        self._repeated = [(first[id(tensor)], at) for at, tensor in enumerate(tensors) if first[id(tensor)] != at]
        once = sorted(first.values())
        self._once = _all_of(once)
        if any(axes[at] != axes[again] for at, again in self._repeated):
            raise TypeError("a tensor is passed as two of which different axes are free")
        self._check = check_of([tensors[at] for at in once], [axes[at] for at in once])
        # places in the addresses of all tensors, which a 0 follows: the address of an absent one
        order = [present.index(place) if place in present else len(tensors) for place in range(count)]
        order += range(len(present), len(tensors))
        self._order = _all_of(order)
        self._rows = [at for at in range(len(tensors)) if at >= len(present) or present[at] not in vectors]
        self._one = tensors[1].data_ptr() == tensors[2].data_ptr()

    def addresses(self, record: Sequence[object], own: tuple[Tensor, ...] = ()) -> list[int] | None:
        """Addresses of another call's tensors, 0 of what it does not have; None if these are not like those before."""
        tensors = self._tensors_of(record) + own
        checked: Sequence[Tensor] = tensors
        if self._repeated:
            for first, again in self._repeated:
                if tensors[first] is not tensors[again]:
                    return None
            checked = self._once(tensors)
        if self._absent_of(record) != self._absent or not self._check(*checked):
            return None
        pointers = list(map(_address, tensors))
        bits = 0
        for address in pointers:
            bits |= address
        if bits % _ROWS:
            if bits % _VECTORS:
                return None
            for at in self._rows:
                if pointers[at] % _ROWS:
                    return None
        if (pointers[1] == pointers[2]) is not self._one:
            return None
        pointers.append(0)
        return list(self._order(pointers))


def _all_of(places: Sequence[int]) -> Callable[[Sequence[object]], tuple[Tensor, ...]]:
    """A function that returns what stands at these places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1)) if places else lambda _: ()


def check_of(tensors: Sequence[Tensor], axes: Sequence[Free]) -> Callable[..., bool]:
    """A function that tells whether as many tensors are like these, but for ``axes`` that are free. Raises TypeError
    where torch has no such check."""
    check: Callable[..., bool] = _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[_but(one.shape, extents) for one, (extents, _) in zip(tensors, axes, strict=True)],
        dynamic_dims_strides=[_but(one.stride(), steps) for one, (_, steps) in zip(tensors, axes, strict=True)],
    ).check
    return check


def _but(numbers: Sequence[int], free: Sequence[int]) -> list[int | None]:
    return [None if axis in free else number for axis, number in enumerate(numbers)]


def seen(
    record: Sequence[object], own: tuple[Tensor, ...], fields: Sequence[int], count: int, vectors: frozenset[int],
    free: Mapping[int, Free],
) -> SeenTensors | None:  # fmt: skip
    """The tensors of a call, as ``SeenTensors`` takes them; None where they could not be recognized."""
    tensors = [record[field] for field in fields if record[field] is not None]
    if _TensorGuards is None or len(tensors) == len(fields) or not all(type(tensor) in PLAIN for tensor in tensors):
        return None
    try:
        noted = SeenTensors(record, own, fields, count, vectors, free)
    except TypeError:  # another version's check takes other arguments
        return None
    return None if noted.addresses(record, own) is None else noted
