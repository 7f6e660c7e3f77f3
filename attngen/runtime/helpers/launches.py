"""Launches of a helper kernel: sizes and strides are packed once for a kind of call, addresses each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attngen.errors import LoadError
from attngen.manifest import Argument
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_BYTES

_WRITERS = {"i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


@dataclass(frozen=True, slots=True)
class Grid:
    """One launch of a call: entry point, blocks, threads of a block (None: those of the entry), and the sizes that
    other launches of the call do not have."""

    entry: Entry
    blocks: int
    threads: int | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operands:
    """Names of a kernel's tensors in the order of their addresses, sizes by name, strides by tensor and axis, and what
    makes the TMA descriptor of a tensor for a parameter."""

    tensors: Sequence[str]
    sizes: Mapping[str, float]
    strides: Mapping[tuple[str, Any], int]
    maps: Mapping[str, Callable[[Argument], TensorMap]] = field(default_factory=dict)


class HelperLaunches:
    """The launches of a helper kernel for one kind of call. Calling it enqueues them on the current stream."""

    __slots__ = ("_device", "_driver", "_free", "_launches", "label")

    def __init__(self, kernel: Kernel, operands: Operands, grids: Sequence[Grid], driver: Driver, device: int) -> None:
        """Raises LoadError if a cubin does not load, or its parameters are others."""
        self.label = kernel.full_name
        self._driver, self._device = driver, device
        self._launches = [_PackedLaunch(kernel.direction, operands, grid, driver, device) for grid in grids]
        #: Parameters that no launch is using. Threads take and return them atomically.
        self._free: list[tuple[list[Frame], list[Launch]]] = []

    def __call__(self, addresses: Sequence[int]) -> None:
        """Enqueue the launches; ``addresses`` in the order of the tensors, 0 for a tensor that is not given."""
        try:
            frames, launches = block = self._free.pop()
        except IndexError:
            frames, launches = block = self._new_block()
        for launch, frame in zip(self._launches, frames):  # noqa: B905
            words = frame.words
            for place, tensor in launch.pointers:
                words[place] = addresses[tensor]
            for offset, tensor, tensor_map in launch.descriptors:
                frame.bytes[offset : offset + DESCRIPTOR_BYTES] = tensor_map.at(addresses[tensor])
        self._driver.launch(launches, self._device)
        self._free.append(block)

    def _new_block(self) -> tuple[list[Frame], list[Launch]]:
        frames = [launch.frame() for launch in self._launches]
        launches = [
            (*launch.function, frame.pointers(launch.offsets))
            for launch, frame in zip(self._launches, frames, strict=True)
        ]
        return frames, launches


class _PackedLaunch:
    """One launch: its function, a template of its parameters, and the places of addresses in it."""

    __slots__ = ("_template", "descriptors", "function", "offsets", "pointers")

    def __init__(self, direction: str, operands: Operands, grid: Grid, driver: Driver, device: int) -> None:
        layout, tensors = grid.entry.layout, operands.tensors
        #: Index of 8 bytes and of a tensor for each address; byte and tensor of each descriptor, with its maker.
        self.pointers: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int, TensorMap]] = []
        packed = Frame(layout.size)
        sizes = {**operands.sizes, **grid.sizes}
        for parameter in layout.parameters:
            of = parameter.of or ""
            if parameter.kind == "pointer":
                if of not in tensors:
                    raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                self.pointers.append((parameter.offset // 8, tensors.index(of)))
                continue
            if parameter.kind == "descriptor" and of in operands.maps:
                self.descriptors.append((parameter.offset, tensors.index(of), operands.maps[of](parameter)))
                continue
            number = operands.strides.get((of, parameter.axis)) if parameter.kind == "stride" else sizes.get(of)
            if number is None or parameter.type not in _WRITERS:
                raise LoadError(f"parameter '{parameter.name}': {direction} has no such number")
            writer, size = _WRITERS[parameter.type]
            getattr(packed, writer)[parameter.offset // size] = number
        self.offsets, self._template = layout.offsets, bytes(packed.bytes)
        function, blocks, threads, shared, how = grid.entry.launch_on(driver, device, grid.blocks)
        self.function = function, blocks, grid.threads or threads, shared, how

    def frame(self) -> Frame:
        """Parameters without addresses."""
        frame = Frame(len(self._template))
        frame.bytes[: len(self._template)] = self._template
        return frame
