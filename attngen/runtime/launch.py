"""A kernel launch prepared for one set of shapes: what stays the same is packed once, a call fills in the rest.

A call then takes a block of parameters, and writes the scalars, and the addresses and descriptors if they differ from
those of the block's last launch. Kernels that follow each other share a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from struct import Struct
from typing import Any, Protocol

from attngen.errors import LoadError
from attngen.runtime.arguments import Call, View, contiguous_view
from attngen.runtime.cache import RecentCache
from attngen.runtime.driver import Driver, Frame, Launch
from attngen.runtime.module import Entry
from attngen.runtime.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES, Parameter
from attngen.runtime.tensormap import TensorMap, usable_strides, windowed

#: Order of the addresses that a launch takes; those of the variant's tensors follow, in an order that the call chose.
ADDRESSES = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "tile_map", "tile_counter")

#: What sets of addresses make of the parameters of a launch: that many are kept, of about a kilobyte each.
MAX_PLACED = 4096

_PLACED: RecentCache[bytes] = RecentCache(MAX_PLACED)
_TOKENS = count()

#: Manifest type → the view of a frame that writes it, and the bytes of one element.
_WRITERS = {"i1": ("int8", 1), "i8": ("int8", 1), "i32": ("int32", 4), "i64": ("int64", 8), "fp32": ("float32", 4)}


class MapShape:
    """Shape of a tile map: (batch, heads, rows, 2, words) of int32; batch or heads are 1 where shared.

    A row is a tile of queries and its bits are those of the tiles of keys; ``by_keys`` it is the other way round.
    """

    __slots__ = ("batch", "heads", "rows", "words")

    def __init__(self, kernel: Tiled, call: Call, *, by_keys: bool = False) -> None:
        per_batch, per_head = kernel.map_axes
        # Lengths of its own for each sequence make a map for each sequence, whatever the mask reads.
        per_batch = per_batch or call.layout == "varlen" or call.seqused_k is not None
        self.batch = call.batch if per_batch else 1
        self.heads = call.heads if per_head else 1
        q_tiles, kv_tiles = -(-call.seqlen_q // kernel.tile_m), -(-call.seqlen_k // kernel.tile_n)
        self.rows, listed = (kv_tiles, q_tiles) if by_keys else (q_tiles, kv_tiles)
        self.words = -(-listed // 32)

    def tensor_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the tensor: for each row the bits of full tiles, then those of partial tiles."""
        return (self.batch, self.heads, self.rows, 2, self.words)

    def stride(self, axis: str) -> int:
        """Stride along b, h or the rows (q or kv) in words; 0 along an axis that is shared."""
        row = 2 * self.words
        if axis in ("q", "kv"):
            return row
        if axis == "h":
            return row * self.rows if self.heads > 1 else 0
        return row * self.rows * self.heads if self.batch > 1 else 0


def group_of(call: Call) -> int:
    """Return the query heads of one KV head."""
    return call.heads // max(call.kv_heads, 1)


def tiles_of(call: Call, tile_m: int, *, pack_gqa: bool) -> tuple[int, int]:
    """Return the tiles of query rows of a unit, and the units: heads, or KV heads with all rows of their group."""
    rows, heads = (call.seqlen_q * group_of(call), call.kv_heads) if pack_gqa else (call.seqlen_q, call.heads)
    return -(-rows // tile_m), call.batch * heads


def _section(kernel: Tiled, call: Call, units: int, *, by_keys: bool) -> int:
    """Return how many units, of all batches, run side by side: as many as keep in L2 what their blocks read again.

    That are K and V; or Q and dO of all heads of a KV head, where blocks are tiles of keys and KV heads are counted:
    at least ``section_heads`` of these.
    """
    if by_keys:
        kv_heads = -(-kernel.section_keys // (call.seqlen_q * group_of(call) + 1))
        return max(min(max(kv_heads, kernel.section_heads), call.batch * call.kv_heads), 1)
    kv_heads = -(-kernel.section_keys // (call.seqlen_k + 1))
    return max(min(kv_heads * (1 if kernel.pack_gqa else group_of(call)), units), 1)


class Tiled(Protocol):
    """What the numbers of a call depend on of a kernel, or of a part of a backward."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def section_keys(self) -> int: ...
    @property
    def section_heads(self) -> int: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def pack_gqa(self) -> bool: ...
    @property
    def needs_tile_map(self) -> bool: ...
    @property
    def map_axes(self) -> tuple[bool, bool]: ...


class Geometry:
    """Every number of a call that depends on shapes and strides only, by what a manifest calls it."""

    def __init__(self, kernel: Tiled, call: Call, *, by_keys: bool = False) -> None:
        """``by_keys``: blocks are tiles of keys, not of queries."""
        self.kernel = kernel
        self.call = call
        self.map = MapShape(kernel, call, by_keys=by_keys) if kernel.needs_tile_map else None
        out = contiguous_view(call.out_shape(), call.order)
        self.views: dict[str, View] = {"q": call.q, "k": call.k, "v": call.v, "out": out}
        q_tiles, units = tiles_of(call, kernel.tile_m, pack_gqa=kernel.pack_gqa)
        group = group_of(call)
        self.sizes: dict[str, int] = {
            "batch": call.batch, "heads": call.heads, "kv_heads": call.kv_heads,
            "group": group, "group_bits": group.bit_length() - 1,
            "section": _section(kernel, call, units, by_keys=by_keys),
            "seqlen_q": call.seqlen_q, "seqlen_k": call.seqlen_k,
            "max_seqlen_q": call.seqlen_q, "max_seqlen_k": call.seqlen_k,
            "total_q": call.total_q, "total_k": call.total_k,
            "head_dim_qk": call.head_dim_qk, "head_dim_v": call.head_dim_v,
            "q_tiles": q_tiles, "kv_tiles": -(-call.seqlen_k // kernel.tile_n),
        }  # fmt: skip
        if self.map is not None:
            self.sizes |= {"map_batch": self.map.batch, "map_heads": self.map.heads, "words": self.map.words}
        self.tiles = q_tiles * units
        self.absent: dict[str, bool] = {}  # whether something that a call may leave out is left out

    def blocks(self, driver: Driver, device: int) -> int:
        """Blocks of the kernel: one for each query tile, or as many as run at once where each takes tile after tile."""
        return min(self.tiles, driver.multiprocessors(device)) if self.kernel.persistent else self.tiles

    @property
    def classifier_blocks(self) -> int:
        """Blocks of the classifier: one for each word of the map."""
        assert self.map is not None
        return self.map.words * self.map.rows * self.map.heads * self.map.batch

    def number(self, parameter: Parameter) -> int:
        """Return the value of a stride, extent, size or presence; LoadError for one that is not known."""
        match parameter.kind:
            case "stride":
                return self._stride(parameter)
            case "extent":
                return int(self.call.tensors[self._tensor(parameter)].shape[int(parameter.axis or 0)])
            case "size":
                name = parameter.of or parameter.name
                if name not in self.sizes:
                    raise LoadError(f"parameter '{parameter.name}': no size is called '{name}'")
                return self.sizes[name]
            case "present":
                return int(self._present(parameter))
            case "descriptor_shape":
                return self._described_form(parameter)[0][self._axis(parameter)]
            case "descriptor_stride":
                return usable_strides(*self._described_form(parameter), self.kernel.element_bytes)[
                    self._axis(parameter)
                ]
            case _:
                raise LoadError(f"parameter '{parameter.name}': kind '{parameter.kind}' is not a number")

    def _stride(self, parameter: Parameter) -> int:
        of, axis = parameter.of, parameter.axis
        if of in self.views:
            seen = self.views[of]
            name = str(axis) if isinstance(axis, str) else seen.axes[int(axis or 0)]
            # Along an axis of extent 1 nothing steps, and torch's stride there is arbitrary.
            one = name in seen.axes and seen.shape[seen.axes.index(name)] == 1
            return 0 if one else seen.stride(name)
        if of == "lse":
            return self._lse_stride(str(axis))
        if of == "tile_map" and self.map is not None:
            return self.map.stride(str(axis))
        tensor = self.call.tensors[self._tensor(parameter)]
        index = int(axis or 0)
        return 0 if tensor.shape[index] == 1 else tensor.stride(index)

    def _lse_stride(self, axis: str) -> int:
        rows = self.call.total_q if self.call.layout == "varlen" else self.call.seqlen_q
        by_axis = {"s": 1, "h": rows, "b": 0 if self.call.layout == "varlen" else rows * self.call.heads}
        return by_axis[axis]

    def _tensor(self, parameter: Parameter) -> str:
        name = parameter.tensor
        if name is None or name not in self.call.tensors:
            raise LoadError(f"parameter '{parameter.name}': the variant has no tensor for '{parameter.of}'")
        return name

    def _present(self, parameter: Parameter) -> bool:
        if parameter.of == "lse":
            return self.call.return_lse
        if parameter.of == "seqused_k":
            return self.call.seqused_k is not None
        if parameter.of in self.absent:
            return not self.absent[parameter.of]
        raise LoadError(f"parameter '{parameter.name}': presence of '{parameter.of}' is not known")

    def _described(self, parameter: Parameter) -> View:
        if parameter.of not in self.views:
            raise LoadError(f"parameter '{parameter.name}': '{parameter.of}' has no descriptor")
        return self.views[parameter.of]

    def _described_form(self, parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a descriptor as the kernel knows it."""
        described = self._described(parameter)
        if parameter.window is None:
            return described.shape, described.strides
        strides = usable_strides(described.shape, described.strides, self.kernel.element_bytes)
        return windowed(described.shape, strides, parameter.window)

    def _axis(self, parameter: Parameter) -> int:
        axis = parameter.axis
        return self._described(parameter).axes.index(axis) if isinstance(axis, str) else int(axis or 0)


class PreparedKernel:
    """One kernel with one geometry on one device: what of its parameters stays the same, and where the rest stands."""

    __slots__ = ("addresses", "descriptors", "function", "offsets", "scalars", "scales", "template")

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
                case _:
                    _write(packed, parameter, geometry.number(parameter))
        self.offsets, self.template = entry.layout.offsets, bytes(packed.bytes)
        #: What the driver takes of a launch before the parameters.
        self.function = entry.function(driver, device), blocks, entry.threads, entry.shared_memory


class PreparedLaunch:
    """Kernels on one device that are launched one behind the other, with the same addresses and scalars.

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

    @classmethod
    def of(
        cls, entry: Entry, blocks: int, geometry: Geometry, tensor_names: Sequence[str], driver: Driver, device: int
    ) -> PreparedLaunch:
        """Return the launch of one kernel, which takes the addresses of ``ADDRESSES`` and of the variant's tensors.

        Raises LoadError.
        """
        names = (*ADDRESSES, *(f"tensor:{name}" for name in tensor_names))
        position = {name: i for i, name in enumerate(names)}
        return cls([PreparedKernel(entry, blocks, geometry, position, driver, device)], len(names), driver, device)

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
        self._driver.launch(block.launches, self._device)
        self._free.append(block)

    def _place(self, key: tuple[int, ...], addresses: Sequence[int]) -> bytes:
        """Return the part of a block that addresses decide."""
        described = [tensor_map.at(addresses[position]) for _, tensor_map, position in self._descriptors]
        placed = b"".join((self._addresses.pack(*addresses), *described))
        _PLACED.put(key, placed)
        return placed


class _Block:
    """The parameters of some kernels, which keep their values until the next launch: most are the same then."""

    __slots__ = ("_frame", "bytes", "key", "launches", "scalars", "scales")

    def __init__(self, kernels: Sequence[PreparedKernel], moving: int) -> None:
        """``moving``: bytes of the addresses and descriptors of all kernels."""
        self._frame = frame = Frame(moving + sum(len(kernel.template) for kernel in kernels))
        self.bytes = frame.bytes
        self.key: tuple[int, ...] = ()  # what the launch before was given
        self.scales: list[tuple[memoryview[float], int]] = []
        self.scalars: list[tuple[memoryview[Any], int, int]] = []
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
            self.launches.append((*kernel.function, frame.pointers(offsets)))
            start += len(kernel.template)


def _write(packed: Frame, parameter: Parameter, value: int) -> None:
    """Write a number of a geometry into the template; LoadError if it does not fit."""
    writer, size = _WRITERS[parameter.type]
    try:
        getattr(packed, writer)[parameter.offset // size] = value
    except ValueError:
        raise LoadError(f"parameter '{parameter.name}': {value} does not fit {parameter.type}") from None


def _descriptor(
    parameter: Parameter, geometry: Geometry, driver: Driver, device: int, position: Mapping[str, int]
) -> tuple[TensorMap, int]:
    of = parameter.of
    if of not in geometry.views:
        raise LoadError(f"parameter '{parameter.name}': '{of}' cannot have a descriptor")
    described = geometry.views[of]
    tensor_map = TensorMap(
        driver, device, geometry.kernel.dtype, described.shape, described.strides, parameter.box, parameter.swizzle,
        parameter.window, group_of(geometry.call) if parameter.packed else None,
    )  # fmt: skip
    return tensor_map, position[of]
