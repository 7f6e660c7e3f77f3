"""Launches of a helper kernel: sizes and strides are packed once for a kind of call, addresses each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from attngen.errors import LoadError
from attngen.manifest import Argument
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES, NUMBERS


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


#: Numbers that differ between calls, by the name of a size, or the tensor and the axis of a stride.
Changes = Mapping[str | tuple[str, Any], int]

#: The launches of calls of some sizes: the blocks and the numbers of each.
Resized = Sequence[tuple[int, bytes]]


class HelperLaunches:
    """The launches of a helper kernel for one kind of call. Calling it enqueues them on the current stream."""

    __slots__ = ("_device", "_driver", "_first", "_free", "_launches", "label")

    def __init__(self, kernel: Kernel, operands: Operands, grids: Sequence[Grid], driver: Driver, device: int) -> None:
        """Raises LoadError if a cubin does not load, or its parameters are others."""
        self.label = kernel.full_name
        self._driver, self._device = driver, device
        self._launches = [_PackedLaunch(kernel.direction, operands, grid, driver, device) for grid in grids]
        self._first: Resized = self.resized({}, [grid.blocks for grid in grids])
        #: Parameters that no launch is using. Threads take and return them atomically.
        self._free: list[_Block] = []

    def resized(self, changes: Changes, blocks: Sequence[int]) -> Resized:
        """The launches of a call that differs in these numbers and these blocks from the one that was prepared."""
        return [(count, one.numbers(changes)) for count, one in zip(blocks, self._launches, strict=True)]

    def __call__(self, addresses: Sequence[int], resized: Resized | None = None) -> None:
        """Enqueue the launches; ``addresses`` in the order of the tensors, 0 for a tensor that is not given.
        ``resized``: those of a call of other sizes than the prepared one."""
        if resized is None:
            resized = self._first
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(self._launches)
        if block.resized is not resized:
            block.resize(resized)
        for launch, frame in zip(self._launches, block.frames):  # noqa: B905
            launch.addresses.pack_into(frame.bytes, 0, *addresses)
            for offset, tensor, tensor_map in launch.descriptors:
                frame.bytes[offset : offset + DESCRIPTOR_BYTES] = tensor_map.at(addresses[tensor])
        self._driver.launch(block.launches, self._device)
        self._free.append(block)


class _Block:
    """The parameters of all launches of a call, which keep their values until the next one."""

    __slots__ = ("_functions", "_pointers", "_start", "frames", "launches", "resized")

    def __init__(self, launches: Sequence[_PackedLaunch]) -> None:
        self._start = launches[0].addresses.size
        self.frames = [Frame(launch.size) for launch in launches]
        self._functions = [launch.function for launch in launches]
        self._pointers = [frame.pointers(launch.offsets) for launch, frame in zip(launches, self.frames, strict=True)]
        self.launches: list[Launch] = []
        self.resized: Resized | None = None

    def resize(self, resized: Resized) -> None:
        """Enter the numbers of a call of other sizes; descriptors have to be written again."""
        for frame, (_, numbers) in zip(self.frames, resized):  # noqa: B905
            start = self._start
            frame.bytes[start : start + len(numbers)] = numbers
        self.launches = [
            (function, blocks, *how, pointers)
            for (function, *how), (blocks, _), pointers in zip(self._functions, resized, self._pointers)  # noqa: B905
        ]
        self.resized = resized


class _PackedLaunch:
    """One launch: its function, its numbers, and where its parameters lie: behind the addresses of all tensors."""

    __slots__ = ("_pack", "_places", "_values", "addresses", "descriptors", "function", "offsets", "size")

    def __init__(self, direction: str, operands: Operands, grid: Grid, driver: Driver, device: int) -> None:
        layout, tensors = grid.entry.layout, operands.tensors
        #: What packs the addresses of all tensors.
        self.addresses = Struct(f"{len(tensors)}Q{-8 * len(tensors) % DESCRIPTOR_ALIGNMENT}x")
        self.offsets = [self.addresses.size + offset for offset in layout.offsets]
        #: Byte and tensor of each descriptor, with its maker.
        self.descriptors: list[tuple[int, int, TensorMap]] = []
        sizes = {**operands.sizes, **grid.sizes}
        for place, parameter in enumerate(layout.parameters):
            of = parameter.of or ""
            if parameter.kind == "pointer":
                if of not in tensors:
                    raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                self.offsets[place] = 8 * tensors.index(of)
            elif parameter.kind == "descriptor" and of in operands.maps:
                self.descriptors.append((self.offsets[place], tensors.index(of), operands.maps[of](parameter)))
            elif parameter.kind not in NUMBERS:
                raise LoadError(f"parameter '{parameter.name}': {direction} has no such number")
        self._pack = grid.entry.packer
        self._values: list[float] = []
        self._places: dict[str | tuple[str, Any], int] = {}
        for parameter in self._pack.numbers:
            of = parameter.of or ""
            number = operands.strides.get((of, parameter.axis)) if parameter.kind == "stride" else sizes.get(of)
            if number is None:
                raise LoadError(f"parameter '{parameter.name}': {direction} has no such number")
            self._places[(of, parameter.axis) if parameter.kind == "stride" else of] = len(self._values)
            self._values.append(number)
        self.size = self.addresses.size + self._pack.size
        function, _, threads, shared, how = grid.entry.launch_on(driver, device, grid.blocks)
        #: What the driver takes of a launch, without blocks and parameters.
        self.function = function, grid.threads or threads, shared, how

    def numbers(self, changes: Changes) -> bytes:
        """The block of parameters without addresses, after some changes."""
        values, places = self._values, self._places
        if changes:
            values = values.copy()
            for name, value in changes.items():
                if name in places:
                    values[places[name]] = value
        return self._pack(values)
