"""A kernel launch prepared once: what stays the same is packed then, a call fills in the rest.

What follows from the sizes of a call is packed once for these sizes (``Sized``). A call then takes a block of
parameters, and writes addresses and scalars; and the numbers of its sizes, and descriptors, if they differ from those
of the block's last launch. Kernels that follow each other share a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import itemgetter
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from attngen.errors import LoadError
from attngen.lang.divisors import division, divisors
from attngen.manifest import SHARES, Argument
from attngen.runtime.arguments.addresses import BACKWARD, FORWARD, SPLIT_COUNTERS, TILE_COUNTER
from attngen.runtime.arguments.checked import FOLLOWS, Call, View
from attngen.runtime.arguments.kinds import resize_tensors
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import counters
from attngen.runtime.device.driver import Driver, Frame, Launch
from attngen.runtime.device.tensormap import TensorMap, of_own_tensor
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.sizes import (
    Geometry,
    MapShape,
    PlainSizes,
    by_chunks,
    geometries,
    group_of,
    map_shapes,
    plain_names,
    workspace_sizes,
)
from attngen.runtime.kernels.module import Entry, Kernel
from attngen.runtime.kernels.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES, Packer, lay_out

#: Descriptors of all tensors of a launch that have one, by their addresses and rows: that many sets are kept.
MAX_DESCRIBED = 4096

_DESCRIBED: RecentCache[bytes] = RecentCache(MAX_DESCRIBED)
_TOKENS = count()

#: Addresses of a tile map: itself, hashes of its tiles, and a list of tiles whose visible pairs are wanted.
MAP_PARTS = ("tile_map", "tile_hashes", "tile_list")

#: Changes of a block's bytes: where, and to what.
Moves = Sequence[tuple[slice, bytes]]

#: Manifest type → the view of a frame that writes it, and the bytes of one element.
_WRITERS = {"i1": ("int8", 1), "i8": ("int8", 1), "i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}

#: Sizes that calls of one kind share, whatever their lengths: see ``arguments.kinds``.
_OF_KIND = frozenset({
    "heads", "kv_heads", "group", "group_bits", "group_reciprocal", "head_dim_qk", "head_dim_v", "page_size",
    "page_size_reciprocal", "num_pages", "box_rows", "asked_splits", "asked_split_size", "least_queries",
    "most_queries",
})  # fmt: skip


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


class Sized:
    """Values that follow from the sizes of a call: the shapes of its results, the memory that its launches share, and
    their grids and numbers."""

    __slots__ = (
        "functions", "lane", "lse_shape", "lse_strides", "numbers", "out_shape", "rows", "split_counters", "words",
        "workspaces",
    )  # fmt: skip

    def __init__(self, call: Call, workspaces: Sequence[int] = (), words: int = 0, split_counters: int = 0) -> None:
        """``workspaces``: where they begin, in bytes from the start of all, which have so many ``words``."""
        #: Shapes of the results that the call has to allocate.
        self.out_shape = call.out_shape() if call.out is None else ()
        self.lse_shape, self.lse_strides = (call.lse_shape(), call.lse_strides()) if call.return_lse else ((), ())
        self.split_counters = split_counters
        self.workspaces, self.words = workspaces, words
        #: Whether the launch runs beside others of its stream, and has counters and workspaces of its own.
        self.lane = int(call.beside == FOLLOWS)
        #: Of the kernels in their order: what the driver takes of a launch before the parameters, and the numbers that
        #: follow from sizes.
        self.functions: Sequence[tuple[Any, int, int, int, int]] = ()
        self.numbers = b""
        #: Rows of the tensor of each descriptor; 0: as many as it was made for.
        self.rows: tuple[int, ...] = ()


class _PackedKernel:
    """One kernel on one device for calls of one kind: parameters that stay the same, and the places of the others."""

    __slots__ = (
        "_entry", "_pack", "addresses", "constants", "descriptors", "divisors", "of_sizes", "offsets", "scalars",
        "scales", "size_of_numbers",
    )  # fmt: skip

    def __init__(
        self, entry: Entry, geometry: Geometry, position: Mapping[str, int], driver: Driver, device: int
    ) -> None:
        """Compute the numbers that do not change between calls; the cubin is loaded here. Raises LoadError.

        ``position`` is where each address stands in the list that a launch takes.
        """
        scalar_position = {rule.name: i for i, rule in enumerate(geometry.call.rules)}
        self._entry = entry
        #: Index of each parameter that is an address or a descriptor, and the position of the address; the size that
        #: tells the rows of a descriptor, if calls of the kind differ in these.
        self.addresses: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, TensorMap, int, str]] = []
        self.scales: list[int] = []
        self.scalars: list[tuple[str, int, int, int]] = []
        self.divisors: list[tuple[int, Division]] = []
        follow: list[tuple[int, Argument]] = []
        for index, parameter in enumerate(entry.layout.parameters):
            match parameter.kind:
                case "pointer":
                    if parameter.of is None or parameter.of not in position:
                        raise LoadError(f"parameter '{parameter.name}': no tensor is called '{parameter.of}'")
                    self.addresses.append((index, position[parameter.of]))
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
                case _ if _follows_sizes(parameter):
                    follow.append((index, parameter))
        self.offsets = entry.layout.offsets
        #: The block of parameters with all numbers; those that follow from sizes lie elsewhere.
        self.constants = entry.packer([geometry.number(parameter) for parameter in entry.packer.numbers])
        follow.sort(key=lambda one: -one[1].size)
        of_sizes = lay_out(replace(parameter, offset=-1) for _, parameter in follow)
        #: Index of each parameter that follows from sizes, and its offset among these.
        self.of_sizes = list(zip((index for index, _ in follow), of_sizes.offsets, strict=True))
        self._pack = Packer(of_sizes)
        self.size_of_numbers = self._pack.size
        self.function(geometry, driver, device)

    def function(self, geometry: Geometry, driver: Driver, device: int) -> tuple[Any, int, int, int, int]:
        """Driver arguments of a launch, up to its parameters."""
        return self._entry.launch_on(driver, device, geometry.blocks(driver, device), geometry.cluster)

    def numbers(self, geometry: Geometry) -> bytes:
        """The numbers that follow from the sizes of a call of the kind; LoadError for one that does not fit its
        type."""
        return self._pack([geometry.number(parameter) for parameter in self._pack.numbers])

    def packer_of(self, names: Sequence[str]) -> Callable[[Sequence[int]], bytes] | None:
        """Packer of ``numbers`` from sizes of these names, in their order; None if others are needed."""
        pack = self._pack
        wanted = [f"{'' if one.kind == 'size' else f'{one.kind} of '}{one.of or one.name}" for one in pack.numbers]
        if len(wanted) < 2 or not set(names).issuperset(wanted):
            return None
        read = itemgetter(*map(names.index, wanted))
        return lambda sizes: pack(read(sizes))


def _follows_sizes(parameter: Argument) -> bool:
    """Whether a number differs between calls of one kind."""
    match parameter.kind:
        case "size":
            return (parameter.of or parameter.name) not in _OF_KIND
        case "stride":
            return parameter.of in ("page_table", "tile_map")
        case kind:
            return kind == "descriptor_shape"


class Chain:
    """Kernels on one device that are launched one after the other, with the same addresses and scalars.

    Their parameters lie in one block: addresses, then descriptors, then what does not change between calls, then the
    numbers that follow from sizes. Descriptors are kept for the next call with the same addresses.
    """

    __slots__ = (
        "_addresses", "_described", "_descriptors", "_device", "_driver", "_free", "_kernels", "_token", "moving",
        "rows",
    )  # fmt: skip

    def __init__(self, kernels: Sequence[_PackedKernel], addresses: int, driver: Driver, device: int) -> None:
        """``addresses``: how many a launch takes."""
        self._kernels, self._driver, self._device = kernels, driver, device
        self._descriptors = [descriptor for kernel in kernels for descriptor in kernel.descriptors]
        self._addresses = Struct(f"{addresses}Q{-8 * addresses % DESCRIPTOR_ALIGNMENT}x")
        #: The size that tells the rows of each descriptor; nothing if none does.
        self.rows = [rows for _, _, _, rows in self._descriptors]
        if not any(self.rows):
            self.rows = []
        #: The addresses of tensors that have descriptors.
        self._described: Callable[[Sequence[int]], Any] | None = None
        if self._descriptors:
            self._described = itemgetter(*(position for _, _, position, _ in self._descriptors))
        self._token = next(_TOKENS)
        #: Bytes of addresses and descriptors.
        self.moving = self._addresses.size + DESCRIPTOR_BYTES * len(self._descriptors)
        #: Blocks that no launch is using, as many as launched at once at most. Threads take and return one atomically.
        self._free: list[_Block] = []

    def fill(self, sized: Sized, shapes: Sequence[Geometry], *, resized: bool = False) -> None:
        """Enter the numbers of all kernels, whose geometries are given. ``resized``: in a call of other sizes than that
        for which this was prepared."""
        of = list(zip(self._kernels, shapes, strict=True))
        sized.numbers = b"".join(kernel.numbers(shape) for kernel, shape in of)
        sized.functions = tuple([kernel.function(shape, self._driver, self._device) for kernel, shape in of])
        if resized:
            sized.rows = self.rows_of(shapes[0].sizes)

    def rows_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Rows of the tensor of each descriptor in a call of the kind, 0 for as many as it was made for; nothing if
        this is so of all."""
        return tuple([sizes[rows] if rows else 0 for rows in self.rows])

    def __call__(self, addresses: Sequence[int], scale: float, scalars: Sequence[Any], sized: Sized) -> None:
        """Enqueue the kernels. ``scalars`` in order of declaration."""
        block = self.take(sized)
        self._addresses.pack_into(block.bytes, 0, *addresses)
        described = self._described
        if described is not None:
            key = (self._token, sized.rows, described(addresses))
            if block.key != key:
                block.bytes[self._addresses.size : self.moving] = _DESCRIBED[key] or self._describe(key, addresses)
                block.key = key
        block.enter(scale, scalars)
        self._driver.launch(block.launches, self._device)
        self._free.append(block)

    def take(self, sized: Sized) -> _Block:
        """A block that no launch is using, with the numbers of these sizes."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(self._kernels, self.moving)
        if block.sized is not sized:
            block.resize(sized)
        return block

    def give_back(self, block: _Block) -> None:
        """Let others take a block."""
        self._free.append(block)

    def _describe(self, key: tuple[Any, ...], addresses: Sequence[int]) -> bytes:
        described = self._descriptors_at(addresses, key[1])
        _DESCRIBED.put(key, described)
        return described

    def _descriptors_at(self, addresses: Sequence[int], rows: Sequence[int]) -> bytes:
        maps = self._descriptors
        if not rows:
            return b"".join([tensor_map.at(addresses[position]) for _, tensor_map, position, _ in maps])
        of = zip(maps, rows)  # noqa: B905
        return b"".join([tensor_map.at(addresses[position], count) for (_, tensor_map, position, _), count in of])

    def place(self, block: _Block, addresses: Sequence[int], sized: Sized) -> None:
        """Enter addresses and descriptors into a block that others change, too."""
        self._addresses.pack_into(block.bytes, 0, *addresses)
        block.bytes[self._addresses.size : self.moving] = self._descriptors_at(addresses, sized.rows)
        block.key = ()

    def moves(self, addresses: Mapping[int, int]) -> Moves:
        """The changes of a block by which tensors lie elsewhere, given by the positions of their addresses. Descriptors
        of these tensors do not depend on the sizes of a call."""
        moves = [(8 * position, address.to_bytes(8, "little")) for position, address in sorted(addresses.items())]
        start = self._addresses.size
        for _, tensor_map, position, rows in self._descriptors:
            if position in addresses:
                assert not rows, "the rows of such a tensor differ between calls"
                moves.append((start, tensor_map.at(addresses[position])))
            start += DESCRIPTOR_BYTES
        joined: list[tuple[int, bytes]] = []
        for begin, content in moves:
            if joined and joined[-1][0] + len(joined[-1][1]) == begin:
                begin, content = joined[-1][0], joined.pop()[1] + content
            joined.append((begin, content))
        return [(slice(begin, begin + len(content)), content) for begin, content in joined]

    def maps_of(self, positions: Sequence[int], sized: Sized) -> list[tuple[slice, TensorMap, int, int]]:
        """Descriptors of some tensors: where they lie in a block, what makes them, which tensor's it is, and rows."""
        start, maps = self._addresses.size, []
        given = sized.rows or [0] * len(self._descriptors)
        for (_, tensor_map, position, _), rows in zip(self._descriptors, given, strict=True):
            if position in positions:
                maps.append((slice(start, start + DESCRIPTOR_BYTES), tensor_map, positions.index(position), rows))
            start += DESCRIPTOR_BYTES
        return maps

    def bound(self, block: _Block, stream: int) -> Callable[[], None]:
        """A function that enqueues the kernels with what the block holds."""
        return self._driver.bound(block.launches, self._device, stream)


class _PlainLaunch:
    """Makes the numbers of calls of a kind that launch a single kernel, from the few sizes in which they differ."""

    __slots__ = ("_device", "_driver", "_entry", "_factors", "_names", "_pack", "_places", "_rows", "_sizes", "_spaces")

    def __init__(
        self, kernel: Kernel, names: Sequence[str], sizes: PlainSizes, pack: Callable[[Sequence[int]], bytes],
        rows: Sequence[str], driver: Driver, device: int,
    ) -> None:  # fmt: skip
        """``names`` of ``sizes``, in their order, which ``pack`` reads; ``rows`` as those of a chain."""
        self._names, self._sizes, self._pack, self._driver, self._device = names, sizes, pack, driver, device
        self._entry, self._spaces = kernel.main.entry, kernel.workspaces
        terms = [term for workspace in kernel.workspaces for term in workspace.terms]
        factors = sorted({names.index(factor) for term in terms for factor in term if isinstance(factor, str)})
        #: Sizes on which workspaces depend, and the offsets of workspaces by these sizes.
        self._factors: Callable[[Sequence[int]], Any] = itemgetter(*factors) if factors else bool
        self._places: RecentCache[tuple[Sequence[int], int]] = RecentCache(256)
        self._rows = [names.index(name) if name else -1 for name in rows]

    def __call__(self, call: Call) -> Sized:
        table = call.page_table
        sizes, blocks, cluster, counters = self._sizes(
            call.batch, call.seqlen_q, call.seqlen_k, call.total_q, call.total_k,
            0 if table is None else table.stride(0), call.beside, call.blocks,
        )  # fmt: skip
        factors = self._factors(sizes)
        places = self._places[factors]
        if places is None:
            named = dict(zip(self._names, sizes, strict=True))
            places = places_of({one.name: one.elements(named) for one in self._spaces})
            self._places.put(factors, places)
        sized = Sized(call, places[0], places[1], counters)
        sized.functions = (self._entry.launch_on(self._driver, self._device, blocks, cluster),)
        sized.numbers = self._pack(sizes)
        if self._rows:
            sized.rows = tuple([sizes[place] if place >= 0 else 0 for place in self._rows])
        return sized


class Launches:
    """The launches of a kernel on one device for calls of one kind, and the names of the addresses that they take."""

    __slots__ = (
        "_capacity", "_classify", "_counted", "_device", "_driver", "_kernel", "_launch", "_launched",
        "_of_maps", "_plain", "_torch_device", "first", "first_map", "maps", "names", "sizes",
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
        self._kernel, self._driver, self._device, self._torch_device = kernel, driver, device, call.device
        self._capacity = capacity_for(kernel, call, lambda: driver, device)
        shapes = geometries(kernel, call, views, absent=absent, capacity=self._capacity)
        #: Elements of 4 bytes of each workspace, and the shape of each tile map by the launch that reads it.
        self.sizes = workspace_sizes(kernel, shapes)
        shapes = by_chunks(shapes)
        self.maps: Mapping[str, MapShape] = map_shapes(shapes)
        backward = kernel.direction == "backward"
        self.names = (
            *(BACKWARD if backward else FORWARD),
            *(f"tensor:{name}" for name in tensor_names),
            *(f"gradient:{tensor.name}" for tensor in call.variant.tensors if backward and tensor.grad),
            *self.sizes,
            *(f"{part}:{owner}" for part in MAP_PARTS for owner in self.maps),
        )
        kernels: list[_PackedKernel] = []
        self._launched: list[int] = []  # the places of these kernels among the launches of a call
        classifiers: dict[str, tuple[_PackedKernel, Geometry]] = {}
        for place, geometry in enumerate(shapes):
            launch = geometry.launch
            if geometry.blocks(driver, device):
                position = {name: i for i, name in enumerate(self.names)}
                if geometry.map is not None:
                    position |= {part: position[f"{part}:{geometry.map.owner}"] for part in MAP_PARTS}
                prepared = _PackedKernel(launch.entry, geometry, position, driver, device)
                if launch.classifies and geometry.map is not None:
                    classifiers[geometry.map.owner] = prepared, geometry
                else:
                    kernels.append(prepared)
                    self._launched.append(place)
        count = len(self.names)
        self._launch = Chain(kernels, count, driver, device) if kernels else None
        #: Makes the numbers of the only kernel from few sizes, if these suffice.
        self._plain: _PlainLaunch | None = None
        if self._launch is not None and (plain := plain_names(kernel)):
            pack = kernels[0].packer_of(plain)
            if pack is not None:
                numbers = PlainSizes(kernel.main, call, self._capacity, driver.multiprocessors(device))
                self._plain = _PlainLaunch(kernel, plain, numbers, pack, self._launch.rows, driver, device)
        #: The numbers of the call for which this was prepared, and those of the launches that make its tile maps.
        self.first = self._sized(call, shapes)
        self._classify: dict[str, Chain] = {}
        self._of_maps: dict[str, Sized] = {}
        for owner, (one, geometry) in classifiers.items():
            self._classify[owner] = Chain([one], count, driver, device)
            self._of_maps[owner] = Sized(call)
            self._classify[owner].fill(self._of_maps[owner], [geometry])
        #: Index of the first address of tile maps: one of each map, then of its hashes, then of its list of tiles.
        self.first_map = count - len(MAP_PARTS) * len(self.maps)
        self._counted = any(launch.counted for launch in kernel.launches)

    def _sized(self, call: Call, shapes: Sequence[Geometry], *, resized: bool = False) -> Sized:
        split_counters = max([geometry.sizes.get("split_counters", 0) for geometry in shapes])
        sized = Sized(call, *places_of(shapes[0].workspaces), split_counters)
        if self._launch is not None:
            self._launch.fill(sized, [shapes[place] for place in self._launched], resized=resized)
        return sized

    def resize(self, call: Call) -> Sized:
        """The numbers of a forward pass of the kind without tile maps, in which there is something to compute; the
        call's tensors may have other rows."""
        if self._plain is not None:
            return self._plain(call)
        capacity = self._capacity
        resize_tensors(call)
        if self._kernel.main.grid == SHARES:
            capacity = capacity_for(self._kernel, call, lambda: self._driver, self._device)
        return self._sized(call, geometries(self._kernel, call, {}, capacity=capacity), resized=True)

    def __call__(self, addresses: list[int], scale: float, scalars: Sequence[Any], sized: Sized | None = None) -> None:
        """Enqueue all launches on the current stream, but for those that make tile maps.

        ``addresses`` are of what ``names`` says; that of the counter of tiles is filled in here. ``sized``: the numbers
        of a call of other sizes than that for which this was prepared.
        """
        if sized is None:
            sized = self.first
        chain = self.ready(addresses, sized)
        if chain is not None:
            chain(addresses, scale, scalars, sized)

    def ready(self, addresses: list[int], sized: Sized) -> Chain | None:
        """Enter the addresses of the counters for a launch on the current stream, and return what enqueues it; None if
        there is nothing to compute."""
        device = self._device
        if self._counted:
            addresses[TILE_COUNTER] = counters.address(self._driver.stream(device), device, sized.lane)
        if sized.split_counters:
            addresses[SPLIT_COUNTERS] = counters.of_splits(
                sized.split_counters, self._driver.stream(device), device, sized.lane
            )
        return self._launch

    def enter_workspaces(self, addresses: list[int], sized: Sized) -> Tensor | None:
        """Append the addresses of workspaces for a launch on the current stream. Returns their memory, unless the
        stream keeps it."""
        device, start, own = self._device, 0, None
        if len(sized.functions) == 1:  # else another thread may launch on the stream between these
            start = counters.workspace(4 * sized.words, self._driver.stream(device), device, sized.lane)
        if not start:
            own = torch.empty(sized.words, dtype=torch.float32, device=self._torch_device)
            start = own.data_ptr()
        addresses += [start + offset for offset in sized.workspaces]
        return own

    def device_is_ready(self) -> bool:
        """Whether launches that were bound to a stream may be enqueued: their device is the current one."""
        return self._driver.ready(self._device)

    def stream(self) -> int:
        """Return the current stream, on which launches are enqueued."""
        return self._driver.stream(self._device)

    def classifies(self, owner: str) -> bool:
        """Whether there is a launch that makes the tile map of the launch ``owner``."""
        return owner in self._classify

    def classify(self, owner: str, addresses: Sequence[int], scale: float, scalars: Sequence[Any]) -> None:
        """Enqueue what makes the tile map of the launch ``owner``, whose addresses are entered."""
        self._classify[owner](addresses, scale, scalars, self._of_maps[owner])


class _Block:
    """The parameters of some kernels, which keep their values until the next launch: most are the same then."""

    __slots__ = (
        "_frame", "_numbers", "_pointers", "bytes", "divided_by", "divisors", "key", "launches", "scalars", "scales",
        "sized", "words",
    )  # fmt: skip

    def __init__(self, kernels: Sequence[_PackedKernel], moving: int) -> None:
        """``moving``: bytes of the addresses and descriptors of all kernels."""
        numbers = moving + sum(len(kernel.constants) for kernel in kernels)
        self._frame = frame = Frame(numbers + sum(kernel.size_of_numbers for kernel in kernels))
        self._numbers, self.bytes, self.words = numbers, frame.bytes, frame.words
        self.key: tuple[Any, ...] = ()  # what the launch before had descriptors of
        self.sized: Sized | None = None
        self.scales: list[tuple[memoryview[float], int]] = []
        self.scalars: list[tuple[memoryview[Any], int, int]] = []
        self.divisors: list[tuple[memoryview[int], int, Division]] = []
        self.divided_by: tuple[Any, ...] = ()  # the scalars of the launch before
        self.launches: list[Launch] = []
        self._pointers: list[int] = []
        start, described = moving, moving - DESCRIPTOR_BYTES * sum(len(kernel.descriptors) for kernel in kernels)
        for kernel in kernels:
            offsets = [start + offset for offset in kernel.offsets]
            for index, position in kernel.addresses:
                offsets[index] = 8 * position
            for index, *_ in kernel.descriptors:
                offsets[index] = described
                described += DESCRIPTOR_BYTES
            for index, offset in kernel.of_sizes:
                offsets[index] = numbers + offset
            self.scales += [(frame.float32, (start + offset) // 4) for offset in kernel.scales]
            self.scalars += [
                (getattr(frame, writer), (start + offset) // size, position)
                for writer, size, offset, position in kernel.scalars
            ]
            self.divisors += [(frame.int32, (start + offset) // 4, divide) for offset, divide in kernel.divisors]
            self._pointers.append(frame.pointers(offsets))
            frame.bytes[start : start + len(kernel.constants)] = kernel.constants
            start += len(kernel.constants)
            numbers += kernel.size_of_numbers

    def resize(self, sized: Sized) -> None:
        """Enter the numbers of a call of other sizes."""
        self.bytes[self._numbers : self._numbers + len(sized.numbers)] = sized.numbers
        functions = sized.functions
        if len(functions) == 1:
            self.launches = [(*functions[0], self._pointers[0])]
        else:
            self.launches = [(*function, at) for function, at in zip(functions, self._pointers)]  # noqa: B905
        self.sized = sized

    def enter(self, scale: float, scalars: Sequence[Any]) -> None:
        """Enter the softmax scale, and the scalars in order of declaration."""
        for numbers, index in self.scales:
            numbers[index] = scale
        for numbers, index, position in self.scalars:
            numbers[index] = scalars[position]
        if self.divisors and self.divided_by != (known := tuple(scalars)):
            for words, index, divide in self.divisors:
                words[index], words[index + 1], words[index + 2] = divide(known)
            self.divided_by = known


def _descriptor(
    parameter: Argument, geometry: Geometry, driver: Driver, device: int, position: Mapping[str, int]
) -> tuple[TensorMap, int, str]:
    """Descriptor of a tensor, the position of its address, and the size that tells its rows, if that may differ."""
    of = parameter.of
    if parameter.tensor is not None and parameter.tensor in geometry.call.tensors:
        own = geometry.call.tensors[parameter.tensor]
        element = next(one.dtype for one in geometry.call.variant.tensors if one.name == parameter.tensor)
        shape, strides = of_own_tensor(own.shape, own.stride())
        return (
            TensorMap(driver, device, element, shape, strides, parameter.box, parameter.swizzle),
            position[str(of)],
            "",
        )
    if of not in geometry.views:
        raise LoadError(f"parameter '{parameter.name}': '{of}' cannot have a descriptor")
    described = geometry.views[of]
    tensor_map = TensorMap(
        driver, device, geometry.launch.dtype_of(of).name, described.shape, described.strides, parameter.box,
        parameter.swizzle, parameter.window, group_of(geometry.call) if parameter.packed else None,
        in_pages=parameter.paged, transposed=parameter.transposed,
    )  # fmt: skip
    ragged = geometry.call.ragged and not parameter.paged
    return tensor_map, position[of], ("total_k" if of in ("k", "v") else "total_q") if ragged else ""


def places_of(elements: Mapping[str, int]) -> tuple[Sequence[int], int]:
    """Offsets of workspaces of so many ``elements``, in bytes from the start of all, and the words of all."""
    offsets, words = laid_out(elements)
    return [4 * offset for offset in offsets.values()], words


def laid_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offset of each of several parts of a block of memory, and the size of all, in elements of 4 bytes.

    Each begins at a multiple of 16 bytes.
    """
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // 4) * 4
    return offsets, end
