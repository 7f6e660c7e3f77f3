"""Kernels that are launched one after the other from one block of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING

from attngen.runtime.arguments.checked import FOLLOWS, Call
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.interface import Driver, Frame, Handle, Launch
from attngen.runtime.device.tensormap import TensorMap
from attngen.runtime.geometry.sizes import Geometry
from attngen.runtime.kernels.packing import DESCRIPTOR_ALIGNMENT, DESCRIPTOR_BYTES
from attngen.runtime.launch.packed_kernel import PackedKernel, ScalarDivision

if TYPE_CHECKING:
    from attngen.runtime.arguments.scalars import Number

#: Descriptors of all tensors of a launch that have one, by their addresses and rows: that many sets are kept.
#: Not measured: a bound of memory.
MAX_DESCRIBED = 4096

_DESCRIBED: RecentCache[bytes] = RecentCache(MAX_DESCRIBED)
_TOKENS = count()

#: Changes of a block's bytes: where, and to what.
Moves = Sequence[tuple[slice, bytes]]


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
        self.functions: Sequence[tuple[Handle, int, int, int, int]] = ()
        self.numbers = b""
        #: Rows of the tensor of each descriptor; 0: as many as it was made for.
        self.rows: tuple[int, ...] = ()


class Chain:
    """Kernels on one device that are launched one after the other, with the same addresses and scalars.

    Their parameters lie in one block: addresses, then descriptors, then what does not change between calls, then the
    numbers that follow from sizes. Descriptors are kept for the next call with the same addresses.
    """

    __slots__ = (
        "_addresses", "_described", "_descriptors", "_device", "_driver", "_free", "_kernels", "_token", "moving",
        "rows",
    )  # fmt: skip

    def __init__(self, kernels: Sequence[PackedKernel], addresses: int, driver: Driver, device: int) -> None:
        """``addresses``: how many a launch takes."""
        self._kernels, self._driver, self._device = kernels, driver, device
        self._descriptors = [descriptor for kernel in kernels for descriptor in kernel.descriptors]
        self._addresses = Struct(f"{addresses}Q{-8 * addresses % DESCRIPTOR_ALIGNMENT}x")
        #: The size that tells the rows of each descriptor; nothing if none does.
        self.rows = [rows for _, _, _, rows in self._descriptors]
        if not any(self.rows):
            self.rows = []
        #: The addresses of tensors that have descriptors.
        self._described: Callable[[Sequence[int]], int | tuple[int, ...]] | None = None
        if self._descriptors:
            self._described = itemgetter(*(position for _, _, position, _ in self._descriptors))
        self._token = next(_TOKENS)
        #: Bytes of addresses and descriptors.
        self.moving = self._addresses.size + DESCRIPTOR_BYTES * len(self._descriptors)
        #: Blocks that no launch is using, as many as launched at once at most. Threads take and return one atomically.
        self._free: list[Block] = []

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

    def __call__(self, addresses: Sequence[int], scale: float, scalars: Sequence[Number], sized: Sized) -> None:
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

    def take(self, sized: Sized) -> Block:
        """A block that no launch is using, with the numbers of these sizes."""
        try:
            block = self._free.pop()
        except IndexError:
            block = Block(self._kernels, self.moving)
        if block.sized is not sized:
            block.resize(sized)
        return block

    def give_back(self, block: Block) -> None:
        """Let others take a block."""
        self._free.append(block)

    def _describe(self, key: tuple[int, Sequence[int], object], addresses: Sequence[int]) -> bytes:
        described = self._descriptors_at(addresses, key[1])
        _DESCRIBED.put(key, described)
        return described

    def _descriptors_at(self, addresses: Sequence[int], rows: Sequence[int]) -> bytes:
        maps = self._descriptors
        if not rows:
            return b"".join([tensor_map.at(addresses[position]) for _, tensor_map, position, _ in maps])
        of = zip(maps, rows)  # noqa: B905
        return b"".join([tensor_map.at(addresses[position], count) for (_, tensor_map, position, _), count in of])

    def place(self, block: Block, addresses: Sequence[int], sized: Sized) -> None:
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

    def bound(self, block: Block, stream: int) -> Callable[[], None]:
        """A function that enqueues the kernels with what the block holds."""
        return self._driver.bound(block.launches, self._device, stream)


class Block:
    """The parameters of some kernels, which keep their values until the next launch: most are the same then."""

    __slots__ = (
        "_frame", "_numbers", "_pointers", "bytes", "divided_by", "divisors", "key", "launches", "scalars", "scales",
        "sized", "words",
    )  # fmt: skip

    def __init__(self, kernels: Sequence[PackedKernel], moving: int) -> None:
        """``moving``: bytes of the addresses and descriptors of all kernels."""
        numbers = moving + sum(len(kernel.constants) for kernel in kernels)
        self._frame = frame = Frame(numbers + sum(kernel.size_of_numbers for kernel in kernels))
        self._numbers, self.bytes, self.words = numbers, frame.bytes, frame.words
        self.key: tuple[object, ...] = ()  # what the launch before had descriptors of
        self.sized: Sized | None = None
        self.scales: list[tuple[memoryview[float], int]] = []
        self.scalars: list[tuple[memoryview[Number], int, int]] = []
        self.divisors: list[tuple[memoryview[int], int, ScalarDivision]] = []
        self.divided_by: tuple[Number, ...] = ()  # the scalars of the launch before
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

    def enter(self, scale: float, scalars: Sequence[Number]) -> None:
        """Enter the softmax scale, and the scalars in order of declaration."""
        for numbers, index in self.scales:
            numbers[index] = scale
        for numbers, index, position in self.scalars:
            numbers[index] = scalars[position]
        if self.divisors and self.divided_by != (known := tuple(scalars)):
            for words, index, divide in self.divisors:
                words[index], words[index + 1], words[index + 2] = divide(known)
            self.divided_by = known
