"""Launches of a helper kernel: sizes and strides are packed once for a kind of call, addresses each time, and numbers
that change between calls of the kind for each set of sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from struct import Struct

from attngen.errors import LoadError
from attngen.manifest import Argument
from attngen.runtime.device.interface import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES, NUMBERS, Packer, lay_out


@dataclass(frozen=True, slots=True)
class Grid:
    """One launch of a call: entry point, blocks, threads of a block (None: those of the entry), and the sizes that
    other launches of the call do not have."""

    entry: Entry
    blocks: int
    threads: int | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchOperands:
    """Names of a kernel's tensors in the order of their addresses, sizes by name, strides by tensor and axis, and what
    makes the TMA descriptor of a tensor for a parameter."""

    tensors: Sequence[str]
    sizes: Mapping[str, float]
    strides: Mapping[tuple[str, str | int | None], int]
    maps: Mapping[str, Callable[[Argument], TensorMap]] = field(default_factory=dict)


#: The name of a size, or the tensor and the axis of a stride.
Key = str | tuple[str, str | int | None]

#: The launches of calls of some sizes: the blocks of each, and the numbers that change.
Resized = Sequence[tuple[int, bytes]]


def takes(kernel: Kernel, tensor: str) -> bool:
    """Whether a kernel has a parameter for a tensor. Kernels from an older attngen may lack it."""
    return any(one.of == tensor for one in kernel.main.entry.layout.parameters)


class HelperLaunches:
    """The launches of a helper kernel for one kind of call. Calling it enqueues them on the current stream.

    ``label`` is the kernel's name, by which tests on a GPU tell which one took a call.
    """

    __slots__ = ("_device", "_driver", "_first", "_free", "_launches", "label")

    def __init__(
        self, kernel: Kernel, operands: LaunchOperands, grids: Sequence[Grid], driver: Driver, device: int,
        changing: Collection[Key] = (),
    ) -> None:  # fmt: skip
        """``changing``: numbers in which calls may differ. Raises LoadError if a cubin does not load, or its parameters
        are others."""
        self.label = kernel.full_name
        self._driver, self._device = driver, device
        self._launches = [_PackedLaunch(kernel.direction, operands, grid, driver, device, changing) for grid in grids]
        numbers = {key: operands.sizes[key] if isinstance(key, str) else operands.strides[key] for key in changing}
        self._first: Resized = self.resized(numbers, [grid.blocks for grid in grids])
        #: Parameters that no launch is using. Threads take and return them atomically.
        self._free: list[_CallParameters] = []

    def resized(self, changes: Mapping[Key, float], blocks: Sequence[int]) -> Resized:
        """The launches of a call of so many blocks, with these numbers that change."""
        return [(count, one.numbers(changes)) for count, one in zip(blocks, self._launches)]  # noqa: B905

    def __call__(self, addresses: Sequence[int], resized: Resized | None = None) -> None:
        """Enqueue the launches; ``addresses`` in the order of the tensors, 0 for a tensor that is not given.
        ``resized``: those of a call of other sizes than the prepared one."""
        if resized is None:
            resized = self._first
        try:
            block = self._free.pop()
        except IndexError:
            block = _CallParameters(self._launches)
        if block.resized is not resized:
            block.resize(resized)
        for launch, frame in zip(self._launches, block.frames):  # noqa: B905
            launch.addresses.pack_into(frame.bytes, 0, *addresses)
            for offset, tensor, tensor_map in launch.descriptors:
                frame.bytes[offset : offset + DESCRIPTOR_BYTES] = tensor_map.at(addresses[tensor])
        self._driver.launch(block.launches, self._device)
        self._free.append(block)


class _CallParameters:
    """The parameters of all launches of a call, which keep their values until the next one."""

    __slots__ = ("_functions", "_pointers", "_starts", "frames", "launches", "resized")

    def __init__(self, launches: Sequence[_PackedLaunch]) -> None:
        self.frames = [Frame(launch.size) for launch in launches]
        for launch, frame in zip(launches, self.frames, strict=True):
            start = launch.addresses.size
            frame.bytes[start : start + len(launch.constants)] = launch.constants
        #: Offset of the size-dependent numbers of each launch.
        self._starts = [launch.addresses.size + len(launch.constants) for launch in launches]
        self._functions = [launch.function for launch in launches]
        self._pointers = [frame.pointers(launch.offsets) for launch, frame in zip(launches, self.frames, strict=True)]
        self.launches: list[Launch] = []
        self.resized: Resized | None = None

    def resize(self, resized: Resized) -> None:
        """Enter the numbers of a call of other sizes."""
        for frame, start, (_, numbers) in zip(self.frames, self._starts, resized):  # noqa: B905
            frame.bytes[start : start + len(numbers)] = numbers
        self.launches = [
            (function, blocks, threads, shared, how, pointers)
            for (function, threads, shared, how), (blocks, _), pointers in zip(self._functions, resized, self._pointers)  # noqa: B905
        ]
        self.resized = resized


class _PackedLaunch:
    """One launch: its function, its numbers, and where its parameters lie: behind the addresses of all tensors, those
    that change at the end."""

    __slots__ = ("_pack", "_read", "addresses", "constants", "descriptors", "function", "offsets", "size")

    def __init__(
        self,
        direction: str,
        operands: LaunchOperands,
        grid: Grid,
        driver: Driver,
        device: int,
        changing: Collection[Key],
    ) -> None:
        layout, tensors = grid.entry.layout, operands.tensors
        #: Packer of the addresses of all tensors.
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
        values: list[float] = []
        for parameter in grid.entry.packer.numbers:
            key = _key_of(parameter)
            number = sizes.get(key) if isinstance(key, str) else operands.strides.get(key)
            if number is None:
                raise LoadError(f"parameter '{parameter.name}': {direction} has no such number")
            values.append(number)
        self.constants = grid.entry.packer(values)
        follow = [
            (i, one) for i, one in enumerate(layout.parameters) if one.kind in NUMBERS and _key_of(one) in changing
        ]
        follow.sort(key=lambda one: -one[1].size)
        apart = lay_out(replace(parameter, offset=-1) for _, parameter in follow)
        end = self.addresses.size + len(self.constants)
        for (place, _), offset in zip(follow, apart.offsets, strict=True):
            self.offsets[place] = end + offset
        self._pack = Packer(apart)
        keys = [_key_of(parameter) for parameter in self._pack.numbers]
        self._read: Callable[[Mapping[Key, float]], Sequence[float]] = (
            itemgetter(*keys) if len(keys) > 1 else lambda changes: [changes[key] for key in keys]
        )
        self.size = end + self._pack.size
        function, _, threads, shared, how = grid.entry.launch_on(driver, device, grid.blocks)
        #: Driver arguments of a launch, without blocks and parameters.
        self.function = function, grid.threads or threads, shared, how

    def numbers(self, changes: Mapping[Key, float]) -> bytes:
        """The numbers that change, of a call that has these."""
        return self._pack(self._read(changes))


def _key_of(parameter: Argument) -> Key:
    of = parameter.of or ""
    return (of, parameter.axis) if parameter.kind == "stride" else of
