"""A kernel launch prepared once: what stays the same is packed then, a call fills in the rest.

What follows from the sizes of a call is packed once for these sizes (``Sized``). A call then takes a block of
parameters, and writes addresses and scalars; and the numbers of its sizes, and descriptors, if they differ from those
of the block's last launch. Kernels that follow each other share a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attngen.manifest import SHARES
from attngen.operations import JVP
from attngen.runtime.arguments.addresses import BACKWARD, FORWARD, SPLIT_COUNTERS, TILE_COUNTER
from attngen.runtime.arguments.checked import Call, View
from attngen.runtime.arguments.kinds import resize_tensors
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import counters
from attngen.runtime.device.interface import Driver
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.map_shape import MapShape
from attngen.runtime.geometry.plain_sizes import PlainSizes, plain_names
from attngen.runtime.geometry.sizes import Geometry, by_chunks, geometries, map_shapes, workspace_sizes
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.chain import Chain, Sized
from attngen.runtime.launch.packed_kernel import PackedKernel

if TYPE_CHECKING:
    from attngen.runtime.arguments.scalars import Number

#: Addresses of a tile map: itself, hashes of its tiles, and a list of tiles whose visible pairs are wanted.
MAP_PARTS = ("tile_map", "tile_hashes", "tile_list")


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
        self._factors: Callable[[Sequence[int]], Hashable] = itemgetter(*factors) if factors else bool
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
        only: str | None = None,
    ) -> None:
        """Pack what does not change between calls. Raises LoadError if a cubin does not load.

        ``views``: as those of a Geometry. ``tensor_names``: the call's own tensors in the order in which it lists their
        addresses. ``absent``: whether something that a backward may go without is missing. ``only``: the launch that
        runs, of a kernel whose launches are alternatives; None for all.
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
            *(BACKWARD if kernel.direction in ("backward", JVP) else FORWARD),
            *(f"tensor:{name}" for name in tensor_names),
            *(f"gradient:{tensor.name}" for tensor in call.variant.tensors if backward and tensor.grad),
            *self.sizes,
            *(f"{part}:{owner}" for part in MAP_PARTS for owner in self.maps),
        )
        kernels: list[PackedKernel] = []
        self._launched: list[int] = []  # the places of these kernels among the launches of a call
        classifiers: dict[str, tuple[PackedKernel, Geometry]] = {}
        for place, geometry in enumerate(shapes):
            launch = geometry.launch
            if geometry.blocks(driver, device) and (only in (None, launch.name) or launch.classifies):
                position = {name: i for i, name in enumerate(self.names)}
                if geometry.map is not None:
                    position |= {part: position[f"{part}:{geometry.map.owner}"] for part in MAP_PARTS}
                prepared = PackedKernel(launch.entry, geometry, position, driver, device)
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

    def __call__(
        self, addresses: list[int], scale: float, scalars: Sequence[Number], sized: Sized | None = None
    ) -> None:
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

    def classify(self, owner: str, addresses: Sequence[int], scale: float, scalars: Sequence[Number]) -> None:
        """Enqueue what makes the tile map of the launch ``owner``, whose addresses are entered."""
        self._classify[owner](addresses, scale, scalars, self._of_maps[owner])


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
