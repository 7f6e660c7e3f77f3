"""Calls of helpers: a kernel, prepared once for each kind of call, or plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from attngen.runtime.arguments import arrays, torch_state
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.keys import note
from attngen.runtime.arguments.seen import SeenTensors
from attngen.runtime.autograd.transforms import refuse
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.interface import Driver
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.shared.records import Fields
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.select import against_device

if TYPE_CHECKING:
    from attngen.runtime.operations.shared.launches import Resized

Record = TypeVar("Record", bound="NamedTuple")
Sizes = TypeVar("Sizes")
Result = TypeVar("Result")

#: The record and the result where protocols take the one and give the other; and what a cache holds.
_Taken = TypeVar("_Taken", contravariant=True)
_Given = TypeVar("_Given", covariant=True)
_Entry = TypeVar("_Entry")


class PreparedHelper(Protocol[_Taken, _Given]):
    """A call of one form on a kernel."""

    def run(self, call: _Taken, addresses: list[int]) -> _Given:
        """Launch the call and return its results; ``addresses`` of the record's tensors, which may be changed."""


class Kind(NamedTuple):
    """All that a call is beside its sizes, as a key, and the addresses of the record's tensors."""

    key: tuple[object, ...]
    addresses: list[int]


class ResizedHelper(Protocol[_Taken, _Given]):
    """Launcher of all calls of a kind, which also takes what follows from their sizes."""

    def run(self, call: _Taken, addresses: list[int], resized: Resized) -> _Given:
        """Launch the call and return its results."""


class Resizable(Protocol[_Taken, _Given]):
    """Prepared launches for all calls of a kind."""

    @property
    def prepared(self) -> ResizedHelper[_Taken, _Given]:
        """Launcher of the calls; it also takes the result of ``ready``."""

    def ready(self, call: _Taken) -> Resized | None:
        """Values that follow from the sizes of a call of the kind; None where something about them needs a look."""


class Helper(ABC, Generic[Record, Sizes, Result]):
    """A helper as its calls need it. Calls are prepared once for their kind, if that has one, or for their sizes, too,
    and kept."""

    #: The function that programs call, and the record of its arguments.
    name: ClassVar[str]
    fields: ClassVar[Fields]

    def __init__(self) -> None:
        #: Calls with their sizes; a text is the reason why no kernel takes one.
        self.prepared: RecentCache[PreparedHelper[Record, Result] | str] = RecentCache(1024)
        self._kinds: RecentCache[Resizable[Record, Result]] = RecentCache(1024)
        #: Kinds of calls whose tensors are recognized in one step; False where they cannot be.
        self._seen: RecentCache[tuple[SeenTensors, Resizable[Record, Result]] | Literal[False]] = RecentCache(1024)

    @abstractmethod
    def check(self, call: Record) -> Sizes:
        """Check shapes, dtypes and devices. Raises CallError."""

    @abstractmethod
    def check_contents(self, call: Record, sizes: Sizes) -> None:
        """Check what the tensors hold. Raises CallError; waits for the GPU."""

    @abstractmethod
    def in_torch(self, call: Record, sizes: Sizes) -> Result:
        """Results of a checked call in plain torch."""

    @abstractmethod
    def prepare(self, call: Record, sizes: Sizes, driver: Driver) -> PreparedHelper[Record, Result] | str:
        """Launches of a checked call, or the reason why no kernel takes it."""

    def refuse(self, call: Record) -> None:
        """Raise CallError for what a call may not have, whatever its sizes; not asked of calls that are recognized."""

    def kind_of(self, call: Record) -> Kind | None:
        """Kind of a call; None if it is prepared with its sizes."""
        return None

    def seen(self, call: Record) -> SeenTensors | None:
        """The tensors by which calls of this call's kind are recognized; None where they cannot be."""
        raise NotImplementedError(f"{self.name} has no kinds of calls")

    def of_kind(self, call: Record, prepared: PreparedHelper[Record, Result]) -> Resizable[Record, Result]:
        """Prepared launches for all calls of the kind of one that is prepared."""
        raise NotImplementedError(f"{self.name} has no kinds of calls")

    def seen_key(self, call: Record) -> tuple[object, ...] | None:
        """Key under which the tensors of a call may have been seen, if it ``may_repeat``; None if they are not looked
        for."""
        return None

    def repeatable(self, call: Record) -> tuple[ResizedHelper[Record, Result], list[int], Resized] | None:
        """Launcher, addresses and sizes of a call that was made just now, to run it again with other addresses; None
        for a call that is of no kind."""
        kind = self.kind_of(call)
        calls = None if kind is None else _kept(self._kinds, kind.key)
        if kind is None or calls is None:
            return None
        resized = calls.ready(call)
        return None if resized is None else (calls.prepared, kind.addresses, resized)

    def serve(self, call: Record, traced: Callable[[Record], Result]) -> Result:
        """Run a call of a program now, or make it an operator by ``traced``, where a trace or a dispatch mode sees it
        whole."""
        first = call[0]
        if may_repeat(first):
            return self.run_as(call, repeats=True)
        return traced(call) if torch_state.is_traced(first) or torch_state.watching() else self.run(call)

    def run(self, call: Record) -> Result:
        """Run a call now, as operators do, in whatever state torch is."""
        return self.run_as(call, repeats=may_repeat(call[0]))

    def run_as(self, call: Record, *, repeats: bool) -> Result:
        """Run a call now; ``repeats``: as an earlier one, if there is one like it."""
        lookup = self.seen_key(call) if repeats else None
        if lookup is not None and (alike := _kept(self._seen, lookup)):
            addresses = alike[0].addresses(call)
            if addresses is not None:
                resized = alike[1].ready(call)
                if resized is not None:
                    return alike[1].prepared.run(call, addresses, resized)
        self.refuse(call)
        tensors = self.fields.tensors_of(call)
        if not repeats:
            refuse(self.name, tensors)
        leading: Tensor = tensors[0]
        on_gpu = torch_state.on_gpu(leading)
        key: list[object] = []
        addresses = []
        kind = self.kind_of(call) if on_gpu and repeats else None
        if kind is not None:
            calls = _kept(self._kinds, kind.key)
            resized = None if calls is None else calls.ready(call)
            if calls is not None and resized is not None:
                if lookup is not None and self._seen[lookup] is not False:
                    noted = self.seen(call)
                    self._seen.put(lookup, False if noted is None else (noted, calls))
                return calls.prepared.run(call, kind.addresses, resized)
        if on_gpu:
            settings = self.fields.settings_of(call)
            # Types are in the key because True equals 1, of which one is refused.
            key = [registry.generation, *settings, *map(type, settings)]
            for tensor in tensors:
                if tensor is None:
                    key.append(None)
                    addresses.append(0)
                else:
                    addresses.append(note(key, tensor))
            if repeats:
                prepared = _kept(self.prepared, tuple(key))
                if prepared is not None and not isinstance(prepared, str):
                    return prepared.run(call, addresses)
        if not on_gpu and arrays.is_array(leading):
            return arrays.serve(lambda **fields: self.run(call._replace(**fields)), call._asdict(), self.fields.written)
        sizes = self.check(call)
        if debugging.active() or leading.device.type == "cpu":
            self.check_contents(call, sizes)
        if on_gpu:
            prepared = self.prepared[tuple(key)]
            if prepared is None:
                prepared = self.prepare(call, sizes, drivers.current())
                if repeats:  # else the first call that does would find this, and not prepare its kind
                    self.prepared.put(tuple(key), prepared)
            if not isinstance(prepared, str):
                if kind is not None and (made := self.of_kind(call, prepared)).ready(call) is not None:
                    self._kinds.put(kind.key, made)
                return prepared.run(call, addresses)
        return self.in_torch(call, sizes)


def _kept(cache: RecentCache[_Entry], key: tuple[object, ...]) -> _Entry | None:
    """Entry of a key; None for an unknown one, and for one of arguments that are refused."""
    try:
        return cache[key]
    except TypeError:  # something that cannot be hashed stands where a name belongs
        return None


Launches = TypeVar("Launches")


def first_that_takes(
    kernels: Iterable[Kernel], device: int, driver: Driver, prepare: Callable[[Kernel], Launches | str | None],
    otherwise: str,
) -> Launches | str:  # fmt: skip
    """Launches of the first kernel that takes a call, else the last reason against one. ``prepare``: None for a kernel
    that would take the call but is slower."""
    reason = otherwise
    for kernel in kernels:
        against = against_device(kernel, device, driver)
        if against is not None:
            reason = f"{kernel.full_name}: {against}"
            continue
        prepared = prepare(kernel)
        if prepared is not None and not isinstance(prepared, str):
            return prepared
        reason = prepared or reason
    return reason


def kernels_of(direction: str, variant: str, dtype: torch.dtype | str) -> list[Kernel]:
    """The known kernels of a helper for rows of a dtype."""
    name = dtype if isinstance(dtype, str) else ATTENTION_DTYPES.get(dtype)
    return [
        kernel
        for _, package in registry.packages()
        for kernel in package.kernels(variant)
        if kernel.direction == direction and kernel.dtype == name
    ]
