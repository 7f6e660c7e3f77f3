"""The path of a helper call: a kernel that is prepared once for its kind, else plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch.autograd import forward_ad

from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.arguments.keys import note
from attngen.runtime.autograd.transforms import refuse
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.driver import Driver
from attngen.runtime.helpers.records import Fields
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.select import against_device

Record = TypeVar("Record")
Sizes = TypeVar("Sizes")


class Prepared(Protocol):
    """A call of one kind on a kernel."""

    def run(self, call: Any, addresses: list[int]) -> Any:
        """Launch the call and return its results; ``addresses`` of the record's tensors, which may be changed."""


class Helper(ABC, Generic[Record, Sizes]):
    """A helper as its calls need it. Each kind of call is prepared once and kept."""

    #: The function that programs call, and the record of its arguments.
    name: ClassVar[str]
    fields: ClassVar[Fields]

    def __init__(self) -> None:
        #: Kinds of calls; a text is the reason why no kernel takes one.
        self.prepared: RecentCache[Prepared | str] = RecentCache(1024)

    @abstractmethod
    def check(self, call: Record) -> Sizes:
        """Check shapes, dtypes and devices. Raises CallError."""

    @abstractmethod
    def check_contents(self, call: Record, sizes: Sizes) -> None:
        """Check what the tensors hold. Raises CallError; waits for the GPU."""

    @abstractmethod
    def in_torch(self, call: Record, sizes: Sizes) -> Any:
        """Results of a checked call in plain torch."""

    @abstractmethod
    def prepare(self, call: Record, sizes: Sizes, driver: Driver) -> Prepared | str:
        """Launches of a checked call, or the reason why no kernel takes it."""

    def run(self, call: Record) -> Any:
        """Run a call now, whether it comes from a program or from an operator."""
        tensors = self.fields.tensors_of(call)
        if torch_state.transforms_active() or forward_ad._current_level >= 0:
            refuse(self.name, tensors)
        on_gpu, checked = torch_state.on_gpu(tensors[0]), debugging.active()
        key: list[Any] = []
        addresses: list[int] = []
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
            if not checked:
                prepared = self._kept(tuple(key))
                if prepared is not None and not isinstance(prepared, str):
                    return prepared.run(call, addresses)
        sizes = self.check(call)
        if checked or tensors[0].device.type == "cpu":
            self.check_contents(call, sizes)
        if on_gpu:
            prepared = self.prepared[tuple(key)]
            if prepared is None:
                prepared = self.prepare(call, sizes, drivers.current())
                self.prepared.put(tuple(key), prepared)
            if not isinstance(prepared, str):
                return prepared.run(call, addresses)
        return self.in_torch(call, sizes)

    def _kept(self, identity: tuple[Any, ...]) -> Prepared | str | None:
        """Entry of a key; None for an unknown one, and for one of arguments that are refused."""
        try:
            return self.prepared[identity]
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
