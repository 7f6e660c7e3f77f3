"""A kernel launch prepared for one set of shapes: what stays the same is packed once, a call fills in the rest.

A call then takes a block of parameters, and writes the scalars, and the addresses and descriptors if they differ from
those of the block's last launch. Kernels that follow each other share a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from struct import Struct
from typing import Any

from attngen.errors import LoadError
from attngen.lang.divisors import division, divisors
from attngen.manifest import Argument
from attngen.runtime.arguments.addresses import BACKWARD, FORWARD, SPLIT_COUNTERS, TILE_COUNTER
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import counters
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap, of_own_tensor
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.sizes import Geometry, MapShape, geometries, group_of, map_shapes, workspace_sizes
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES

#: What sets of addresses make of the parameters of a launch: that many are kept, of about a kilobyte each.
MAX_PLACED = 4096

_PLACED: RecentCache[bytes] = RecentCache(MAX_PLACED)
_TOKENS = count()

#: What a tile map has addresses of: itself, hashes of its tiles, and a list of tiles whose visible pairs are wanted.
MAP_PARTS = ("tile_map", "tile_hashes", "tile_list")

#: Manifest type → the view of a frame that writes it, and the bytes of one element.
_WRITERS = {"i1": ("int8", 1), "i8": ("int8", 1), "i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


class Division:
    """A divisor of a kernel, computed from the scalars of a call in order of declaration."""

    __slots__ = ("_divisor", "_names")

    def __init__(self, call: Call, parameter: Argument) -> None:
        """Raises LoadError if the variant does not divide by what the parameter is of."""
        known = {divisor.text: divisor for divisor in divisors(call.variant)}
        if parameter.of not in known:
            raise LoadError(f"parameter '{parameter.name}': the variant does not divide by '{parameter.of}'")
        self._divisor = known[parameter.of]
        self._names = [rule.name for rule in call.rules]

    def __call__(self, scalars: Sequence[Any]) -> tuple[int, int, int]:
        return division(self._divisor.value(dict(zip(self._names, scalars, strict=True))))


class PreparedKernel:
    """One kernel with one geometry on one device: what of its parameters stays the same, and where the rest stands."""

    __slots__ = ("addresses", "descriptors", "divisors", "function", "offsets", "scalars", "scales", "template")

    def __init__(
        self, entry: Entry, blocks: int, geometry: Geometry, position: Mapping[str, int], driver: Driver, device: int
    ) -> None:
        """Pack what does not change between calls; the cubin is loaded here. Raises LoadError.

        ``position`` is where each address stands in the list that a launch takes.
        """
        scalar_position = {rule.name: i for i, rule in enumerate(geometry.call.rules)}
        packed = Frame(entry.layout.size)
        #: Index of each parameter that is an address or a descriptor, and the position of the address.
        self.addresses: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, TensorMap, int]] = []
        self.scales: list[int] = []
        self.scalars: list[tuple[str, int, int, int]] = []
        self.divisors: list[tuple[int, Division]] = []
        for index, parameter in enumerate(entry.layout.parameters):
            match parameter.kind:
                case "pointer":
                    if parameter.of is None or parameter.of not in position:
                        raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                    self.addresses.append((index, position[parameter.of]))
                case "scratch":
                    packed.words[parameter.offset // 8] = 0
                case "descriptor":
                    self.descriptors.append((index, *_descriptor(parameter, geometry, driver, device, position)))
                case "scale":
                    self.scales.append(parameter.offset)
                case "scalar":
                    writer, size = _WRITERS[parameter.type]
                    name = parameter.of or parameter.name
                    if name not in scalar_position:
                        raise LoadError(f"parameter '{parameter.name}': the variant has no scalar '{name}'")
                    self.scalars.append((writer, size, parameter.offset, scalar_position[name]))
                case "divisor":
                    self.divisors.append((parameter.offset, Division(geometry.call, parameter)))
                case _:
                    _write(packed, parameter, geometry.number(parameter))
        self.offsets, self.template = entry.layout.offsets, bytes(packed.bytes)
        #: What the driver takes of a launch before the parameters.
        self.function = entry.launch_on(driver, device, blocks, geometry.cluster)


class PreparedLaunch:
    """Kernels on one device that are launched one after the other, with the same addresses and scalars.

    Their parameters lie in one block: addresses, then descriptors, which is what changes between calls, then the rest
    of each kernel's. What the addresses of a call make of the first two is kept for the next call with the same ones.
    """

    __slots__ = ("_addresses", "_descriptors", "_device", "_driver", "_free", "_kernels", "_moving", "_token")

    def __init__(self, kernels: Sequence[PreparedKernel], addresses: int, driver: Driver, device: int) -> None:
        """``addresses``: how many a launch takes."""
        self._kernels, self._driver, self._device = kernels, driver, device
        self._descriptors = [descriptor for kernel in kernels for descriptor in kernel.descriptors]
        self._addresses = Struct(f"{addresses}Q{-8 * addresses % DESCRIPTOR_ALIGNMENT}x")
        self._moving = slice(0, self._addresses.size + DESCRIPTOR_BYTES * len(self._descriptors))
        self._token = next(_TOKENS)
        #: Blocks that no launch is using, as many as launched at once at most. Threads take and return one atomically.
        self._free: list[_Block] = []

    def __call__(self, addresses: Sequence[int], scale: float, scalars: Sequence[Any]) -> None:
        """Enqueue the kernels. ``scalars`` in order of declaration."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(self._kernels, self._moving.stop)
        key = (self._token, *addresses)
        if block.key != key:
            block.bytes[self._moving] = _PLACED[key] or self._place(key, addresses)
            block.key = key
        for numbers, index in block.scales:
            numbers[index] = scale
        for numbers, index, position in block.scalars:
            numbers[index] = scalars[position]
        if block.divisors and block.divided_by != (known := tuple(scalars)):
            for words, index, divide in block.divisors:
                words[index], words[index + 1], words[index + 2] = divide(known)
            block.divided_by = known
        self._driver.launch(block.launches, self._device)
        self._free.append(block)

    def _place(self, key: tuple[int, ...], addresses: Sequence[int]) -> bytes:
        """Return the part of a block that addresses decide."""
        described = [tensor_map.at(addresses[position]) for _, tensor_map, position in self._descriptors]
        placed = b"".join((self._addresses.pack(*addresses), *described))
        _PLACED.put(key, placed)
        return placed


class PreparedLaunches:
    """The launches of a kernel with one set of shapes on one device, and what each address is of that they take."""

    __slots__ = (
        "_classify", "_counted", "_device", "_driver", "_launch", "_split_counters", "direct", "first_map", "maps",
        "names", "sizes",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        call: Call,
        views: Mapping[str, View],
        tensor_names: Iterable[str],
        driver: Driver,
        device: int,
        *,
        absent: Mapping[str, bool] | None = None,
    ) -> None:
        """Pack what does not change between calls. Raises LoadError if a cubin does not load.

        ``views``: as those of a Geometry. ``tensor_names``: the call's own tensors in the order in which it lists their
        addresses. ``absent``: whether something that a backward may go without is missing.
        """
        capacity = capacity_for(kernel, call, lambda: driver, device)
        launches = geometries(kernel, call, views, absent=absent, capacity=capacity)
        #: Elements of 4 bytes of each workspace, and the shape of each tile map by the launch that reads it.
        self.sizes = workspace_sizes(kernel, launches)
        self.maps: Mapping[str, MapShape] = map_shapes(launches)
        backward = kernel.direction == "backward"
        self.names = (
            *(BACKWARD if backward else FORWARD),
            *(f"tensor:{name}" for name in tensor_names),
            *(f"gradient:{tensor.name}" for tensor in call.variant.tensors if backward and tensor.grad),
            *self.sizes,
            *(f"{part}:{owner}" for part in MAP_PARTS for owner in self.maps),
        )
        kernels: list[PreparedKernel] = []
        classifiers: dict[str, PreparedKernel] = {}
        for launch, geometry in zip(kernel.launches, launches, strict=True):
            if blocks := geometry.blocks(driver, device):
                position = {name: i for i, name in enumerate(self.names)}
                if geometry.map is not None:
                    position |= {part: position[f"{part}:{geometry.map.owner}"] for part in MAP_PARTS}
                prepared = PreparedKernel(launch.entry, blocks, geometry, position, driver, device)
                if launch.classifies and geometry.map is not None:
                    classifiers[geometry.map.owner] = prepared
                else:
                    kernels.append(prepared)
        count = len(self.names)
        self._launch = PreparedLaunch(kernels, count, driver, device) if kernels else None
        self._classify = {owner: PreparedLaunch([one], count, driver, device) for owner, one in classifiers.items()}
        #: Where the addresses of tile maps begin: one of each map, then of its hashes, then of its list of tiles.
        self.first_map = count - len(MAP_PARTS) * len(self.maps)
        self._counted = any(launch.counted for launch in kernel.launches)
        self._split_counters = max(geometry.sizes.get("split_counters", 0) for geometry in launches)
        self._driver, self._device = driver, device
        #: What a call may use in place of this: the launches alone, where no counter has to be filled in.
        self.direct = None if self._counted or self._split_counters else self._launch

    def __call__(self, addresses: list[int], scale: float, scalars: Sequence[Any]) -> None:
        """Enqueue all launches on the current stream, but for those that make tile maps.

        ``addresses`` are of what ``names`` says; that of the counter of tiles is filled in here.
        """
        if self._counted:
            addresses[TILE_COUNTER] = counters.address(self._driver.stream(self._device), self._device)
        if self._split_counters:
            stream = self._driver.stream(self._device)
            addresses[SPLIT_COUNTERS] = counters.of_splits(self._split_counters, stream, self._device)
        if self._launch is not None:
            self._launch(addresses, scale, scalars)

    def stream(self) -> int:
        """Return the current stream, on which launches are enqueued."""
        return self._driver.stream(self._device)

    def classifies(self, owner: str) -> bool:
        """Whether there is a launch that makes the tile map of the launch ``owner``."""
        return owner in self._classify

    def classify(self, owner: str, addresses: Sequence[int], scale: float, scalars: Sequence[Any]) -> None:
        """Enqueue what makes the tile map of the launch ``owner``, whose addresses are entered."""
        self._classify[owner](addresses, scale, scalars)


class _Block:
    """The parameters of some kernels, which keep their values until the next launch: most are the same then."""

    __slots__ = ("_frame", "bytes", "divided_by", "divisors", "key", "launches", "scalars", "scales")

    def __init__(self, kernels: Sequence[PreparedKernel], moving: int) -> None:
        """``moving``: bytes of the addresses and descriptors of all kernels."""
        self._frame = frame = Frame(moving + sum(len(kernel.template) for kernel in kernels))
        self.bytes = frame.bytes
        self.key: tuple[int, ...] = ()  # what the launch before was given
        self.scales: list[tuple[memoryview[float], int]] = []
        self.scalars: list[tuple[memoryview[Any], int, int]] = []
        self.divisors: list[tuple[memoryview[int], int, Division]] = []
        self.divided_by: tuple[Any, ...] = ()  # the scalars of the launch before
        self.launches: list[Launch] = []
        start, described = moving, moving - DESCRIPTOR_BYTES * sum(len(kernel.descriptors) for kernel in kernels)
        for kernel in kernels:
            frame.bytes[start : start + len(kernel.template)] = kernel.template
            offsets = [start + offset for offset in kernel.offsets]
            for index, position in kernel.addresses:
                offsets[index] = 8 * position
            for index, _, _ in kernel.descriptors:
                offsets[index] = described
                described += DESCRIPTOR_BYTES
            self.scales += [(frame.float32, (start + offset) // 4) for offset in kernel.scales]
            self.scalars += [
                (getattr(frame, writer), (start + offset) // size, position)
                for writer, size, offset, position in kernel.scalars
            ]
            self.divisors += [(frame.int32, (start + offset) // 4, divide) for offset, divide in kernel.divisors]
            self.launches.append((*kernel.function, frame.pointers(offsets)))
            start += len(kernel.template)


def _write(packed: Frame, parameter: Argument, value: int) -> None:
    """Write a number of a geometry into the template; LoadError if it does not fit."""
    writer, size = _WRITERS[parameter.type]
    try:
        getattr(packed, writer)[parameter.offset // size] = value
    except ValueError:
        raise LoadError(f"parameter '{parameter.name}': {value} does not fit {parameter.type}") from None


def _descriptor(
    parameter: Argument, geometry: Geometry, driver: Driver, device: int, position: Mapping[str, int]
) -> tuple[TensorMap, int]:
    of = parameter.of
    if parameter.tensor is not None and parameter.tensor in geometry.call.tensors:
        own = geometry.call.tensors[parameter.tensor]
        element = next(one.dtype for one in geometry.call.variant.tensors if one.name == parameter.tensor)
        shape, strides = of_own_tensor(own.shape, own.stride())
        return TensorMap(driver, device, element, shape, strides, parameter.box, parameter.swizzle), position[str(of)]
    if of not in geometry.views:
        raise LoadError(f"parameter '{parameter.name}': '{of}' cannot have a descriptor")
    described = geometry.views[of]
    tensor_map = TensorMap(
        driver, device, geometry.launch.dtype_of(of).name, described.shape, described.strides, parameter.box,
        parameter.swizzle, parameter.window, group_of(geometry.call) if parameter.packed else None,
        in_pages=parameter.paged, transposed=parameter.transposed,
    )  # fmt: skip
    return tensor_map, position[of]


def laid_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each of several parts of a block of memory, and the size of all, in elements of 4 bytes.

    Each begins at a multiple of 16 bytes.
    """
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // 4) * 4
    return offsets, end
