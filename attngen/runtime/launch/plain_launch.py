"""One launch of a kernel that is not attention: its numbers are packed once for a kind of call, addresses each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attngen.errors import LoadError
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.kernels.module import Kernel

_WRITERS = {"i32": ("int32", 4), "i64": ("int64", 8)}


class PlainLaunch:
    """A kernel with the numbers of one kind of call. Calling it enqueues one launch on the current stream."""

    __slots__ = ("_device", "_driver", "_free", "_function", "_offsets", "_places", "_template", "label")

    def __init__(
        self, kernel: Kernel, numbers: Mapping[tuple[str, Any], int], tensors: Sequence[str], blocks: int,
        driver: Driver, device: int,
    ) -> None:  # fmt: skip
        """``numbers``: sizes by (name, None), strides by (tensor, axis). ``tensors``: what addresses are given of, in
        their order. Raises LoadError if no cubin loads, or its parameters are others."""
        entry = kernel.main.entry
        packed = Frame(entry.layout.size)
        #: The place in the frame of each address, and which of the tensors it is of.
        self._places: list[tuple[int, int]] = []
        for parameter in entry.layout.parameters:
            if parameter.kind == "pointer":
                if parameter.of not in tensors:
                    raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                self._places.append((parameter.offset // 8, tensors.index(parameter.of)))
                continue
            key = (parameter.of or "", parameter.axis if parameter.kind == "stride" else None)
            if key not in numbers or parameter.type not in _WRITERS:
                raise LoadError(f"parameter '{parameter.name}': {kernel.direction} has no such number")
            writer, size = _WRITERS[parameter.type]
            getattr(packed, writer)[parameter.offset // size] = numbers[key]
        self.label = kernel.full_name
        self._offsets, self._template = entry.layout.offsets, bytes(packed.bytes)
        self._driver, self._device = driver, device
        self._function = entry.launch_on(driver, device, blocks)
        #: Blocks of parameters that no launch is using. Threads take and return one atomically.
        self._free: list[tuple[Frame, list[Launch]]] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Enqueue the launch; ``addresses`` in the order of the tensors, 0 for what is not given."""
        try:
            frame, launches = self._free.pop()
        except IndexError:
            frame = Frame(len(self._template))
            frame.bytes[: len(self._template)] = self._template
            launches = [(*self._function, frame.pointers(self._offsets))]
        words = frame.words
        for place, tensor in self._places:
            words[place] = addresses[tensor]
        self._driver.launch(launches, self._device)
        self._free.append((frame, launches))
