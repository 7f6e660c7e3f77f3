"""The few CUDA driver calls that loading and launching need, behind one small object.

Everything above sees ``Driver``; tests put another in its place with ``use``. The real one needs ``cuda-bindings``,
which torch's CUDA builds install, and nothing that compiles.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from attngen.dtypes import dtype as dtype_row
from attngen.errors import REMEDY, LoadError
from attngen.runtime.cache import RecentCache
from attngen.runtime.device.interface import Driver, Launch

if TYPE_CHECKING:
    from cuda.bindings.driver import CUfunction, CUkernel, CUlaunchConfig, CUlibrary, CUresult

#: Launch configurations that are kept, in effect of each kernel and stream; and forms of descriptors.
#: Not measured: a bound of memory.
_MAX_CONFIGS = 1024

#: Launch attributes, as bits. Dependent: it may start before the work ahead of it is done. Cooperative: all of
#: its blocks run at the same time, or the launch fails.
PLAIN, DEPENDENT, COOPERATIVE = 0, 1, 2


class _Thread(threading.local):
    """State of a thread: whether the driver has set a context for it; and attributes of its launches through
    cuLaunchKernelEx, by all but the number of blocks, which a server's calls change each time."""

    def __init__(self) -> None:
        self.ready = False
        self.configs: RecentCache[CUlaunchConfig] = RecentCache(_MAX_CONFIGS)


class CudaDriver:
    """The driver of this machine, through ``cuda.bindings``.

    Raises LoadError if ``cuda-bindings`` or the driver library is missing.
    """

    def __init__(self) -> None:
        try:
            import cuda.bindings.driver as cu
        except ImportError as error:
            raise LoadError(
                f"running a kernel needs the package 'cuda-bindings', which torch's CUDA builds install: {error}"
            ) from error
        import torch

        self._cu = cu
        self._torch = torch
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        self._launch, self._launch_with = cu.cuLaunchKernel, cu.cuLaunchKernelEx
        self._bound = _Thread()
        self._configs: RecentCache[CUlaunchConfig] = RecentCache(_MAX_CONFIGS)
        self._libraries: dict[tuple[int, int], tuple[bytes, CUlibrary]] = {}
        self._lock = threading.Lock()
        self._shared: dict[int, int] = {}
        self._multiprocessors: dict[int, int] = {}
        self._capabilities: dict[int, int] = {}
        self._bandwidths: dict[int, float] = {}
        #: Arguments of TMA descriptors other than addresses and extents: it takes time to make these objects.
        self._tensor_map_forms: RecentCache[tuple[object, ...]] = RecentCache(_MAX_CONFIGS)
        self._extents_at: dict[tuple[int, int], int | None] = {}
        try:
            self._version = int(self._call(cu.cuDriverGetVersion))
        except RuntimeError as error:  # what cuda-bindings raises where libcuda is absent
            raise LoadError(f"no CUDA driver on this machine: {error}") from error

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: object, what: str = "") -> Any:
        """Call the driver and return its one result; LoadError with the driver's own words if it fails."""
        status, *results = function(*arguments)
        if status:
            raise LoadError(f"{what or function.__name__}: {self._describe(status)}")
        return results[0] if len(results) == 1 else tuple(results)

    def _describe(self, status: CUresult) -> str:
        _, text = self._cu.cuGetErrorString(status)
        return f"{status.name} ({text.decode() if text else 'unknown error'})"

    def version(self) -> int:
        """See ``Driver.version``."""
        return self._version

    def capability(self, device: int) -> int:
        """See ``Driver.capability``."""
        if device not in self._capabilities:
            major, minor = self._torch.cuda.get_device_capability(device)
            self._capabilities[device] = 10 * major + minor
        return self._capabilities[device]

    def shared_memory(self, device: int) -> int:
        """See ``Driver.shared_memory``."""
        if device not in self._shared:
            cu = self._cu
            with self._device(device):
                handle = self._call(cu.cuCtxGetDevice)
            attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            self._shared[device] = self._call(cu.cuDeviceGetAttribute, attribute, handle)
        return self._shared[device]

    def multiprocessors(self, device: int) -> int:
        """See ``Driver.multiprocessors``."""
        if device not in self._multiprocessors:
            properties = self._torch.cuda.get_device_properties(device)
            self._multiprocessors[device] = int(properties.multi_processor_count)
        return self._multiprocessors[device]

    def bandwidth(self, device: int) -> float:
        """See ``Driver.bandwidth``."""
        if device not in self._bandwidths:
            cu, of = self._cu, self._cu.CUdevice_attribute
            with self._device(device):
                handle = self._call(cu.cuCtxGetDevice)
            kilohertz, bits = (
                self._call(cu.cuDeviceGetAttribute, attribute, handle)
                for attribute in (
                    of.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, of.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
                )
            )  # fmt: skip
            self._bandwidths[device] = 2e-6 * kilohertz * bits / 8 or inf  # double data rate
        return self._bandwidths[device]

    def name(self, device: int) -> str:
        """See ``Driver.name``."""
        return str(self._torch.cuda.get_device_properties(device).name)

    def stream(self, device: int) -> int:
        """See ``Driver.stream``."""
        return int(self._raw_stream(device))

    @contextmanager
    def _device(self, device: int) -> Iterator[None]:
        """Make a device and its primary context current, and restore torch's device afterwards."""
        with self._torch.cuda.device(device):
            self._bind(device)
            yield

    def _bind(self, device: int) -> None:
        """Make sure that this thread has a context: torch sets one only when it first calls the CUDA runtime."""
        cu = self._cu
        self._torch.cuda.init()
        if not int(self._call(cu.cuCtxGetCurrent)):
            # cudaSetDevice binds the primary context since CUDA 12, also where the device is already the current one
            self._torch._C._cuda_setDevice(device)
        if not int(self._call(cu.cuCtxGetCurrent)):
            # torch's indices follow CUDA_VISIBLE_DEVICES as the driver's ordinals do
            handle = self._call(cu.cuDeviceGet, device)
            self._call(cu.cuCtxSetCurrent, self._call(cu.cuDevicePrimaryCtxRetain, handle))

    def zeros(self, size: int, device: int) -> int:
        """See ``Driver.zeros``."""
        cu = self._cu
        with self._device(device), self._relaxed_capture():
            address = int(self._call(cu.cuMemAlloc, size, what=f"{size} B of counters"))
            if not self._torch.cuda.is_current_stream_capturing():
                self._call(cu.cuMemsetD8Async, address, 0, size, self.stream(device))
            else:  # the graph must not clear at each replay what launches leave as they found it
                own = self._call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
                self._call(cu.cuMemsetD8Async, address, 0, size, own)
                self._call(cu.cuStreamSynchronize, own)
                self._call(cu.cuStreamDestroy, own)
        return address

    def load(
        self, image: bytes, symbol: str, device: int, shared: int, sizes: Sequence[int], cluster: int = 1
    ) -> CUfunction:
        """See ``Driver.load``."""
        cu = self._cu
        attribute = cu.CUfunction_attribute
        with self._lock, self._device(device), self._relaxed_capture():
            library = self._library(image, symbol, cluster)
            kernel = self._call(cu.cuLibraryGetKernel, library, symbol.encode(), what=f"symbol '{symbol}'")
            self._check_parameters(kernel, symbol, sizes)
            function = self._call(cu.cuKernelGetFunction, kernel, what=f"loading '{symbol}'")
            asked = {}
            if shared > 48 * 1024:  # beyond that, a kernel has to opt in
                asked[attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = shared
            if cluster > 1:
                asked[attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH] = cluster
                asked[attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT] = 1
                asked[attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH] = 1
            for name, value in asked.items():
                self._call(cu.cuFuncSetAttribute, function, name, value, what=f"'{symbol}', {name} = {value}")
            return function

    def _library(self, image: bytes, symbol: str, cluster: int) -> CUlibrary:
        """Load an image once per process for each size of clusters, which is a property of a loaded kernel; a library
        serves every context. The bytes are kept as long as it is."""
        key = id(image), cluster
        known = self._libraries.get(key)
        if known is None:
            library = self._call(
                self._cu.cuLibraryLoadData, image, None, None, 0, None, None, 0, what=f"cubin of '{symbol}'"
            )
            known = self._libraries[key] = (image, library)
        return known[1]

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Let a first call inside a CUDA graph capture load its kernel, which a capture otherwise forbids."""
        cu = self._cu
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        previous = self._call(cu.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            yield
        finally:
            self._call(cu.cuThreadExchangeStreamCaptureMode, previous)

    def _check_parameters(self, kernel: CUkernel, symbol: str, sizes: Sequence[int]) -> None:
        """Compare the manifest's parameter list with the cubin's: a shifted list would pass garbage, silently."""
        query = getattr(self._cu, "cuKernelGetParamInfo", None)
        if query is None or self._version < 12040:
            return
        actual = []
        for i in range(len(sizes) + 1):  # one more: the cubin must not have it
            status, _, size = query(kernel, i)
            if status:
                break
            actual.append(size)
        if actual != list(sizes):
            raise LoadError(
                f"'{symbol}': the manifest lists {len(sizes)} parameters of {list(sizes)} B, but the cubin has "
                f"{actual} B; {REMEDY}"
            )

    def clusters(self, function: CUfunction, size: int, threads: int, shared: int, device: int) -> int:
        """See ``Driver.clusters``."""
        cu = self._cu
        config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = size * self.multiprocessors(device), 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        with self._device(device):
            return int(self._call(cu.cuOccupancyMaxActiveClusters, function, config))

    def launch(self, kernels: Sequence[Launch], device: int) -> None:
        """See ``Driver.launch``."""
        if not self.ready(device):
            with self._device(device):
                self._bound.ready = True
                self.launch(kernels, device)
            return
        launch, stream, configs = self._launch, self._raw_stream(device), self._bound.configs
        for kernel in kernels:
            function, grid, threads, shared, how, parameters = kernel
            if how:
                key = threads, shared, stream, how
                config = configs[key]
                if config is None:
                    config = self._new_config(grid, *key)
                    configs.put(key, config)
                config.gridDimX = grid
                (status,) = self._launch_with(config, function, parameters, 0)
            else:
                (status,) = launch(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, 0)
            if status:
                raise self._failure(kernel, status)

    def bound(self, kernels: Sequence[Launch], device: int, stream: int) -> Callable[[], None]:
        """See ``Driver.bound``."""
        launches, grids = [], []
        for function, grid, threads, shared, how, parameters in kernels:
            if how:
                config = self._config(grid, threads, shared, stream, how, parameters)
                launches.append(partial(self._launch_with, config, function, parameters, 0))
                grids.append((config, grid))
            else:
                given = function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, 0
                launches.append(partial(self._launch, *given))

        def enqueue() -> None:
            for config, grid in grids:
                config.gridDimX = grid
            for place, launch in enumerate(launches):
                (status,) = launch()
                if status:
                    raise self._failure(kernels[place], status)

        return enqueue

    def recorder(self, event: int, stream: int) -> Callable[[], None]:
        """See ``Driver.recorder``."""
        return self._checked(self._cu.cuEventRecord, self._cu.CUevent(event), self._cu.CUstream(stream))

    def waiter(self, event: int, stream: int) -> Callable[[], None]:
        """See ``Driver.waiter``."""
        return self._checked(self._cu.cuStreamWaitEvent, self._cu.CUstream(stream), self._cu.CUevent(event), 0)

    def _checked(self, function: Callable[..., tuple[CUresult]], *arguments: object) -> Callable[[], None]:
        def checked() -> None:
            (status,) = function(*arguments)
            if status:
                raise LoadError(f"{function.__name__}: {self._describe(status)}")

        return checked

    def ready(self, device: int) -> bool:
        """See ``Driver.ready``."""
        return self._current_device() == device and (self._bound.ready or self._make_ready(device))

    def _make_ready(self, device: int) -> bool:
        with self._device(device):
            self._bound.ready = True
        return True

    def _failure(self, kernel: Launch, status: CUresult) -> LoadError:
        _, grid, threads, shared, *_ = kernel
        return LoadError(
            f"launch of {grid} blocks of {threads} threads with {shared} B of shared memory failed: "
            f"{self._describe(status)}; an error of earlier work on the device surfaces here too"
        )

    def _config(self, grid: int, threads: int, shared: int, stream: int, how: int, parameters: int) -> CUlaunchConfig:
        """Attributes of cuLaunchKernelEx for launches with parameters in one place, which one thread at a time makes.

        Those for other sizes differ in the number of blocks, which is entered before each launch: to make attributes
        takes as long as a launch, and twenty times as long where the host has done other work since.
        """
        key = threads, shared, stream, how, parameters
        config = self._configs[key]
        if config is None:
            config = self._new_config(grid, threads, shared, stream, how)
            self._configs.put(key, config)
        return config

    def _new_config(self, grid: int, threads: int, shared: int, stream: int, how: int) -> CUlaunchConfig:
        cu = self._cu
        config, attributes = cu.CUlaunchConfig(), []
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, stream
        if how & COOPERATIVE:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attributes[-1].value.cooperative = 1
        if how & DEPENDENT:
            attributes.append(cu.CUlaunchAttribute())
            attributes[-1].id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

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
        """See ``Driver.encode_tensor_map``."""
        cu = self._cu
        key = dtype, tuple(strides), tuple(box), swizzle
        fixed = self._tensor_map_forms[key]
        if fixed is None:
            fixed = (
                getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype_row(dtype).tensor_map}"),
                [cu.cuuint64_t(n) for n in strides],
                [cu.cuuint32_t(n) for n in box],
                [cu.cuuint32_t(1) for _ in box],
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                _SWIZZLES[swizzle](cu),
                cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            self._tensor_map_forms.put(key, fixed)
        element, *others = fixed
        if not self._bound.ready:  # a thread that has launched nothing yet may have no context, which encoding needs
            with self._device(device):
                pass
        status, tensor_map = cu.cuTensorMapEncodeTiled(
            element, len(extents), address, [cu.cuuint64_t(n) for n in extents], *others
        )
        if status:
            raise LoadError(
                f"TMA descriptor refused by the driver: {self._describe(status)}; {dtype}, address {address:#x}, "
                f"extents {list(extents)}, strides {list(strides)} B, box {list(box)}, swizzle {swizzle} B"
            )
        encoded = ctypes.string_at(tensor_map.getPtr(), 128)
        if self._version <= 13030 and self.capability(device) >= 100:
            # Drivers up to CUDA 13.3 encode a small tensor that is not dense wrongly on Blackwell; clearing bit 85 is
            # NVIDIA's workaround (release notes of driver 595.71, "Known issues").
            span = sum((n - 1) * s for n, s in zip(extents[1:], strides, strict=True))
            if span < 128 * 1024:
                encoded = encoded[:10] + bytes([encoded[10] & ~0x20]) + encoded[11:]
        return encoded

    def extent_at(self, rank: int, axis: int, device: int) -> int | None:
        """See ``Driver.extent_at``. The layout of descriptors is not documented, but PTX has instructions that change
        one extent of a descriptor, and its address."""
        key = rank, axis
        if key not in self._extents_at:
            at = None
            if self.capability(device) < 100:  # see ``encode_tensor_map``
                with suppress(LoadError):
                    at = self._find_extent(rank, axis, device)
            self._extents_at[key] = at
        return self._extents_at[key]

    def _find_extent(self, rank: int, axis: int, device: int) -> int | None:
        """The byte in which samples differ as they should; None if they differ in more."""
        strides = [4096 << 4 * i for i in range(rank - 1)]
        samples = {}
        for address in _SAMPLE_ADDRESSES:
            for extent in _SAMPLE_EXTENTS:
                extents, box = [64] * rank, [64] + [1] * (rank - 1)
                extents[axis], box[axis] = extent, 64
                samples[address, extent] = self.encode_tensor_map("bf16", address, extents, strides, box, 128, device)
        first = samples[_SAMPLE_ADDRESSES[0], _SAMPLE_EXTENTS[0]]
        for at in range(8, len(first) - 3, 4):
            if all(one == with_fields(first, at, address, extent - 1) for (address, extent), one in samples.items()):
                return at
        return None


def with_fields(encoded: bytes, at: int, address: int, last: int) -> bytes:
    """A descriptor with another address, and another extent less 1 at a byte."""
    return address.to_bytes(8, "little") + encoded[8:at] + last.to_bytes(4, "little") + encoded[at + 4 :]


#: Descriptors that are compared with each other: no byte of an address, or of an extent less 1, is the same in all.
_SAMPLE_ADDRESSES = 0x7F1234567800, 0x7E89ABCDEF00, 0x201000
_SAMPLE_EXTENTS = 65, 2, 0x10203, 0x1FEDCBA9

_SWIZZLES = {
    0: lambda cu: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: lambda cu: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: lambda cu: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: lambda cu: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}

_active: Driver | None = None
_active_pid = 0


def current() -> Driver:
    """Return the driver in use, made at the first call. A forked child makes its own."""
    global _active, _active_pid
    if _active is None or _active_pid != os.getpid():
        _active, _active_pid = CudaDriver(), os.getpid()
    return _active


@contextmanager
def use(driver: Driver) -> Iterator[None]:
    """Put another driver in place, for tests."""
    global _active, _active_pid
    saved = _active, _active_pid
    _active, _active_pid = driver, os.getpid()
    try:
        yield
    finally:
        _active, _active_pid = saved
