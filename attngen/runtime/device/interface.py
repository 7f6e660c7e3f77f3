"""Interface to a CUDA driver, and the block of parameters that it passes to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

#: Most bytes of a kernel's parameters. CUDA C++ Programming Guide, "Function parameters" (sm70 and later).
MAX_PARAMETER_BYTES = 32764

_BLOCK_ALIGNMENT = 64


class Frame:
    """The values of kernels' parameters in memory, and pointers to them, which is what the driver takes.

    The views share one block of memory and write numbers of one size each; indices count elements of that size. The
    driver takes pointers rather than the block itself, since where the compiler put the parameters is its own affair:
    ptxas aligns TMA descriptors in the constant bank as a whole, whose start is not a multiple of 64.
    """

    __slots__ = ("_arrays", "_buffer", "address", "bytes", "float32", "int8", "int32", "int64", "words")

    def __init__(self, size: int) -> None:
        """``size`` bytes, which start at a multiple of 64."""
        size = -(-max(size, 1) // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        self._buffer = (ctypes.c_char * (size + _BLOCK_ALIGNMENT))()
        start = -ctypes.addressof(self._buffer) % _BLOCK_ALIGNMENT
        raw = memoryview(self._buffer).cast("B")[start : start + size]
        self.bytes = raw
        self.words = raw.cast("Q")
        self.int64 = raw.cast("q")
        self.int32 = raw.cast("i")
        self.int8 = raw.cast("b")
        self.float32 = raw.cast("f")
        self.address = ctypes.addressof(self._buffer) + start
        self._arrays: list[ctypes.Array[ctypes.c_void_p]] = []

    def pointers(self, offsets: Sequence[int]) -> int:
        """Return the address of an array of pointers to what lies at these offsets; it lives as long as the frame."""
        array = (ctypes.c_void_p * len(offsets))(*(self.address + offset for offset in offsets))
        self._arrays.append(array)
        return ctypes.addressof(array)


#: Handle of a loaded kernel, which only its driver can read.
Handle = object

#: A kernel to launch: its handle, blocks, threads of a block, bytes of dynamic shared memory, how it is launched, and
#: the address of an array of pointers, one to each parameter.
Launch = tuple[Handle, int, int, int, int, int]


class Driver(Protocol):
    """CUDA driver calls of loading and launching. Devices are torch's indices; handles are opaque."""

    def version(self) -> int:
        """CUDA version of the driver: 1000 * major + 10 * minor."""

    def capability(self, device: int) -> int:
        """10 * major + minor of the device."""

    def shared_memory(self, device: int) -> int:
        """Most shared memory of one block, in bytes."""

    def multiprocessors(self, device: int) -> int:
        """Number of multiprocessors of the device."""

    def bandwidth(self, device: int) -> float:
        """Peak bytes per nanosecond of the device's memory, from its clock and bus width; infinity where the driver
        does not tell these."""

    def name(self, device: int) -> str:
        """Name of the device, as its driver has it."""

    def stream(self, device: int) -> int:
        """Handle of the caller's current stream on the device."""

    def zeros(self, size: int, device: int) -> int:
        """Return the address of ``size`` bytes of zeros, cleared on the caller's current stream, or, where that records
        a graph, before this returns.

        They live as long as the process, outside of torch's memory: where torch is about to record a graph, what it
        allocates goes to the graph's pool, and nothing in there may outlive the call.
        """

    def load(
        self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1
    ) -> Handle:
        """Load a cubin and return one of its kernels, ready to launch with ``shared`` bytes of dynamic memory, and in
        clusters of ``cluster`` blocks unless that is fixed in the cubin.

        ``sizes`` lists the bytes of each parameter; LoadError if the cubin's own list differs.
        """

    def clusters(self, function: Handle, size: int, threads: int, shared: int, device: int) -> int:
        """Number of clusters of ``size`` blocks of a loaded kernel that run at once: a few blocks less than there are
        multiprocessors, since a cluster lies in one part of the chip; 0 where none fits."""

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        """Enqueue kernels, one after the other, on the caller's current stream of a device; never synchronizes."""

    def bound(self, kernels: Sequence[Launch], device: int, stream: int) -> Callable[[], None]:
        """A function that enqueues kernels on a stream of the device, which must be ``ready``. Their parameters may
        change in place between calls."""

    def ready(self, device: int) -> bool:
        """Whether a device is the current one; this thread has a context of it then."""

    def recorder(self, event: int, stream: int) -> Callable[[], None]:
        """A function that records an event on a stream of a device that is ``ready``."""

    def waiter(self, event: int, stream: int) -> Callable[[], None]:
        """A function that makes a stream of a device that is ``ready`` wait for an event."""

    def encode_tensor_map(
        self,
        dtype: str,
        address: int,
        extents: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        device: int,
    ) -> bytes:
        """Encode a TMA descriptor; axes fastest first, ``strides`` in bytes without that of the fastest axis."""

    def extent_at(self, rank: int, axis: int, device: int) -> int | None:
        """Byte of a descriptor of ``rank`` axes from where four hold the extent of an axis less 1, while the first
        eight bytes of all are the address; None unless descriptors are seen to differ in nothing else."""
