"""The calls into ``cuda.bindings``: that they exist, what they are given, and what becomes of their errors."""

from __future__ import annotations

import ctypes
import enum
import struct
import sys
import threading
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.dtypes import DTYPES
from attngen.errors import LoadError
from attngen.runtime.device import driver as drivers
from attngen.runtime.device.driver import COOPERATIVE, DEPENDENT, PLAIN, CudaDriver
from attngen.runtime.device.interface import Frame
from attngen.runtime.device.tensormap import TensorMap


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_LAUNCH_FAILED = 719


#: Calls that fail in a thread without a context.
_IN_CONTEXT = {"cuTensorMapEncodeTiled", "cuLaunchKernel", "cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent"}


class Pointer(int):
    """A handle of the stub."""


class Stub:
    """The part of ``cuda.bindings.driver`` that is used, writing down each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Status] = {}
        self.context = 7
        self.sizes = [8, 4]
        self.maps: list[Any] = []
        for name in (
            "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle", "CUtensorMapL2promotion",
            "CUtensorMapFloatOOBfill", "CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureMode",
            "CUlaunchAttributeID",
        ):  # fmt: skip
            setattr(self, name, _Names(name))
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))
        self.cuuint64_t = self.cuuint32_t = self.CUevent = self.CUstream = int

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            status = self.fails.get(name, Status.CUDA_SUCCESS)
            if name in _IN_CONTEXT and not self.context:
                status = Status.CUDA_ERROR_INVALID_CONTEXT
            return (status, *self._results(name, arguments))

        return call

    def _results(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        match name:
            case "cuDriverGetVersion":
                return (13000,)
            case "cuGetErrorString":
                return (f"words of {arguments[0].name}".encode(),)
            case "cuCtxGetCurrent":
                return (Pointer(self.context),)
            case "cuCtxSetCurrent":
                self.context = int(arguments[0])
                return ()
            case "cuDevicePrimaryCtxRetain":
                return (Pointer(9),)
            case "cuKernelGetParamInfo":
                return (0, self.sizes[arguments[1]]) if arguments[1] < len(self.sizes) else (None, None)
            case "cuTensorMapEncodeTiled":
                buffer = ctypes.create_string_buffer(b"\xff" * 128, 128)
                self.maps.append(buffer)
                return (SimpleNamespace(getPtr=lambda: ctypes.addressof(buffer)),)
            case "cuLaunchKernel" | "cuLaunchKernelEx" | "cuEventRecord" | "cuStreamWaitEvent" | "cuFuncSetAttribute":
                return ()
        return (Pointer(1),)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


class _Names:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> str:
        return name


class ParamStub(Stub):
    """As the driver: asking for one parameter too many is an error."""

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name != "cuKernelGetParamInfo":
            return call

        def query(kernel: Any, index: int) -> tuple[Any, ...]:
            _, *results = call(kernel, index)
            return (Status.CUDA_SUCCESS if index < len(self.sizes) else Status.CUDA_ERROR_LAUNCH_FAILED, *results)

        return query


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """``cuda.bindings.driver`` and the parts of torch.cuda that are used, on a machine without either."""
    made = ParamStub()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)  # type: ignore[arg-type]
    current = [0]

    class Guard:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device

        def __exit__(self, *args: Any) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda device: None, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device == 0 else (10, 0))
    return made


def test_a_frame_is_aligned_and_has_pointers_to_its_parameters() -> None:
    frame = Frame(100)
    assert frame.address % 64 == 0
    assert len(frame.bytes) == 128
    frame.words[1] = 2**63
    frame.float32[5] = 0.5
    arrays = [frame.pointers(offsets) for offsets in ((8, 20), (16,))]
    pointers = (ctypes.c_uint64 * 2).from_address(arrays[0])
    assert ctypes.c_uint64.from_address(pointers[0]).value == 2**63
    assert ctypes.c_float.from_address(pointers[1]).value == 0.5


def test_load(stub: Stub) -> None:
    driver = CudaDriver()
    image = b"cubin"
    driver.load(image, "kernel", 0, 1000, [8, 4])
    driver.load(image, "other", 0, 200_000, [8, 4])
    (loaded,) = stub.named("cuLibraryLoadData")
    assert loaded == (image, None, None, 0, None, None, 0)
    assert [call[1] for call in stub.named("cuLibraryGetKernel")] == [b"kernel", b"other"]
    ((_, attribute, size),) = stub.named("cuFuncSetAttribute")
    assert (attribute, size) == ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 200_000)
    modes = stub.named("cuThreadExchangeStreamCaptureMode")
    assert modes[0] == ("CU_STREAM_CAPTURE_MODE_RELAXED",)
    assert len(modes) == 4


def test_clusters_of_another_size_are_another_library(stub: Stub) -> None:
    """The size of clusters is a property of a loaded kernel."""
    driver, image = CudaDriver(), b"cubin"
    for cluster in (1, 8, 8):
        driver.load(image, "kernel", 0, 100, [8, 4], cluster)
    assert len(stub.named("cuLibraryLoadData")) == 2
    attributes = [(name, value) for _, name, value in stub.named("cuFuncSetAttribute")]
    assert attributes[:3] == [
        ("CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH", 8),
        ("CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT", 1),
        ("CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH", 1),
    ]


@pytest.mark.parametrize(("told", "expected"), [((2_619_000, 5120), 3352.32), ((0, 5120), inf), ((2_619_000, 0), inf)])
def test_a_driver_may_not_tell_the_clock_of_memory(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, told: tuple[int, int], expected: float
) -> None:
    """Predictions divide by what memory moves."""
    values = dict(
        zip(("CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE", "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH"), told, strict=True)
    )
    monkeypatch.setattr(
        stub, "cuDeviceGetAttribute", lambda name, _: (Status.CUDA_SUCCESS, values[name]), raising=False
    )
    assert CudaDriver().bandwidth(0) == pytest.approx(expected)


@pytest.mark.parametrize("fit", [0, 15])
def test_clusters_at_once(stub: Stub, monkeypatch: pytest.MonkeyPatch, fit: int) -> None:
    """On a part of a card there may be none."""
    asked: list[Any] = []

    def answer(*arguments: Any) -> tuple[Status, int]:
        asked.append(arguments)
        return Status.CUDA_SUCCESS, fit

    monkeypatch.setattr(stub, "cuOccupancyMaxActiveClusters", answer, raising=False)
    driver = CudaDriver()
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    assert driver.clusters("function", 8, 384, 200_000, 0) == fit
    ((function, config),) = asked
    assert (function, config.gridDimX, config.blockDimX, config.sharedMemBytes) == ("function", 8 * 132, 384, 200_000)
    assert config.attrs[0].value.clusterDim.x == 8


def test_a_parameter_list_that_differs_is_refused(stub: Stub) -> None:
    driver = CudaDriver()
    for sizes in ([8], [8, 8], [8, 4, 4]):
        with pytest.raises(
            LoadError, match=r"'kernel': the manifest lists \d parameters .* but the cubin has \[8, 4\] B"
        ):
            driver.load(b"cubin", "kernel", 0, 0, sizes)


def test_launch(stub: Stub) -> None:
    driver = CudaDriver()
    for _ in range(2):
        driver.launch([("function", 12, 128, 4096, False, 5555), ("other", 3, 64, 0, False, 7777)], 0)
    first, second = (
        ("function", 12, 1, 1, 128, 1, 1, 4096, 1000, 5555, 0),
        ("other", 3, 1, 1, 64, 1, 1, 0, 1000, 7777, 0),
    )
    assert stub.named("cuLaunchKernel") == [first, second] * 2
    assert len(stub.named("cuCtxGetCurrent")) == 2  # the thread's context is looked at once


def test_a_launch_may_start_before_the_work_ahead_is_done(stub: Stub) -> None:
    driver = CudaDriver()
    for _ in range(2):
        driver.launch([("function", 12, 128, 4096, True, 5555)], 0)
    (config, *rest), again = stub.named("cuLaunchKernelEx")
    assert again[0] is config
    assert rest == ["function", 5555, 0]
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, config.hStream) == (12, 128, 4096, 1000)
    (attribute,) = config.attrs
    assert attribute.id == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert attribute.value.programmaticStreamSerializationAllowed == config.numAttrs == 1
    assert not stub.named("cuLaunchKernel")


def test_launches_of_other_grids_change_the_attributes_of_their_thread(stub: Stub) -> None:
    """To make the attributes takes longer than the launch. Bound launches and other threads have their own."""
    driver, seen = CudaDriver(), []
    enqueue = driver.bound([(6, 9, 256, 64, 1, 2000)], 0, 1000)

    def launch(grid: int) -> None:
        driver.launch([("function", grid, 256, 64, 1, 5555)], 0)
        config = stub.named("cuLaunchKernelEx")[-1][0]
        seen.append((config, config.gridDimX))

    launch(12)
    launch(40)
    thread = threading.Thread(target=launch, args=(7,))
    thread.start()
    thread.join()
    enqueue()
    bound = stub.named("cuLaunchKernelEx")[-1][0]
    assert [grid for _, grid in seen] == [12, 40, 7]
    assert seen[0][0] is seen[1][0]
    assert len({id(config) for config in (seen[1][0], seen[2][0], bound)}) == 3
    assert bound.gridDimX == 9


def test_a_launch_of_both_kinds(stub: Stub) -> None:
    driver, attributes = CudaDriver(), []
    for how in (DEPENDENT, COOPERATIVE, DEPENDENT | COOPERATIVE):
        driver.launch([("function", 12, 128, 4096, how, 5555)], 0)
        config = stub.named("cuLaunchKernelEx")[-1][0]
        assert config.numAttrs == len(config.attrs)
        attributes.append({attribute.id.removeprefix("CU_LAUNCH_ATTRIBUTE_") for attribute in config.attrs})
    assert attributes == [one := {"PROGRAMMATIC_STREAM_SERIALIZATION"}, two := {"COOPERATIVE"}, one | two]


def test_events(stub: Stub) -> None:
    driver = CudaDriver()
    record, wait = driver.recorder(5, 77), driver.waiter(5, 78)
    record()
    wait()
    assert (stub.named("cuEventRecord"), stub.named("cuStreamWaitEvent")) == ([(5, 77)], [(78, 5, 0)])
    stub.fails["cuEventRecord"] = Status.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LoadError, match="CUDA_ERROR_LAUNCH_FAILED"):
        record()


def in_a_thread(work: Any) -> list[Any]:
    """Results and errors of a function in a thread that has made no call before."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(work())
        except LoadError as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return results


def test_a_device_that_is_ready_has_a_context(stub: Stub) -> None:
    stub.context = 0
    driver = CudaDriver()
    assert not driver.ready(1)
    assert stub.context == 0
    assert driver.ready(0)
    assert stub.context == 9
    assert driver.ready(0)
    assert len(stub.named("cuCtxGetCurrent")) == 2  # the thread's context is looked at once


@pytest.mark.parametrize("device", [0, 1])
def test_the_first_descriptor_of_a_thread_gets_a_context(stub: Stub, device: int) -> None:
    """Another thread may have loaded the kernel, so that nothing of CUDA was called in this one before."""
    driver = CudaDriver()
    driver.launch([("function", 1, 128, 0, PLAIN, 5555)], device)
    stub.context = 0

    def encode() -> bytes:
        return driver.encode_tensor_map("bf16", 4096, (64, 4, 8, 2), (128, 512, 65536), (64, 1, 32, 1), 128, device)

    (encoded,) = in_a_thread(encode)
    assert isinstance(encoded, bytes), encoded
    assert stub.context == 9
    assert torch._C._cuda_getDevice() == 0


def test_bound_launches(stub: Stub) -> None:
    """They go to the stream that was named, each time with what their parameters hold then."""
    plain, dependent = (5, 7, 128, 0, 0, 1000), (6, 9, 256, 64, 1, 2000)
    enqueue = CudaDriver().bound([plain, dependent], 0, 77)
    assert not stub.named("cuLaunchKernel")
    for count in (1, 2):
        enqueue()
        assert stub.named("cuLaunchKernel") == [(5, 7, 1, 1, 128, 1, 1, 0, 77, 1000, 0)] * count
        config, *rest = stub.named("cuLaunchKernelEx")[-1]
        assert (config.gridDimX, config.hStream, rest) == (9, 77, [6, 2000, 0])
    stub.fails["cuLaunchKernelEx"] = Status.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LoadError, match="launch of 9 blocks of 256 threads with 64 B of shared memory failed"):
        enqueue()


def test_bound_launches_of_other_sizes_share_their_attributes(stub: Stub) -> None:
    """Launches with the same parameters do, which are never made at the same time; others have their own."""
    driver, seen = CudaDriver(), []
    for grid, parameters in ((9, 2000), (30, 2000), (9, 3000)):
        driver.bound([(6, grid, 256, 64, 1, parameters)], 0, 77)()
        config = stub.named("cuLaunchKernelEx")[-1][0]
        seen.append((config, config.gridDimX))
    assert [grid for _, grid in seen] == [9, 30, 9]
    assert seen[0][0] is seen[1][0] is not seen[2][0]


def test_bound_launches_in_a_thread_without_a_context(stub: Stub) -> None:
    stub.context = 0
    driver = CudaDriver()
    enqueue = driver.bound([(5, 7, 128, 0, 0, 1000)], 0, 77)

    def launch() -> None:
        assert driver.ready(0)
        enqueue()

    assert in_a_thread(launch) == [None]


def test_launch_on_another_device(stub: Stub) -> None:
    driver = CudaDriver()
    driver.launch([("function", 1, 128, 0, False, 5555)], 1)
    assert stub.named("cuLaunchKernel")[0][8] == 1001
    assert torch._C._cuda_getDevice() == 0


def test_a_thread_without_a_context_gets_the_primary_one(stub: Stub) -> None:
    stub.context = 0
    CudaDriver().launch([("function", 1, 128, 0, False, 5555)], 0)
    assert stub.context == 9


def test_errors_have_the_drivers_words(stub: Stub) -> None:
    driver = CudaDriver()
    stub.fails["cuLaunchKernel"] = Status.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LoadError, match=r"CUDA_ERROR_LAUNCH_FAILED \(words of CUDA_ERROR_LAUNCH_FAILED\)"):
        driver.launch([("function", 1, 128, 0, False, 5555)], 0)
    stub.fails["cuLibraryLoadData"] = Status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(LoadError, match="cubin of 'kernel': CUDA_ERROR_NO_BINARY_FOR_GPU"):
        driver.load(b"cubin", "kernel", 0, 0, [8, 4])
    stub.fails["cuTensorMapEncodeTiled"] = Status.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LoadError, match=r"TMA descriptor refused by the driver: .* extents \[64, 4, 8\], strides"):
        driver.encode_tensor_map("bf16", 4096, (64, 4, 8), (128, 512), (64, 1, 8), 128, 0)


def test_descriptors(stub: Stub) -> None:
    driver = CudaDriver()
    hopper = driver.encode_tensor_map("bf16", 4096, (64, 4, 8, 2), (128, 512, 4096), (64, 1, 32, 1), 128, 0)
    assert hopper == b"\xff" * 128
    (call,) = stub.named("cuTensorMapEncodeTiled")
    assert call[0] == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"
    assert call[1:7] == (4, 4096, [64, 4, 8, 2], [128, 512, 4096], [64, 1, 32, 1], [1, 1, 1, 1])
    assert call[8] == "CU_TENSOR_MAP_SWIZZLE_128B"
    # Blackwell, small and not dense: NVIDIA's workaround clears bit 85.
    blackwell = driver.encode_tensor_map("bf16", 4096, (64, 4, 8, 2), (128, 512, 4096), (64, 1, 32, 1), 128, 1)
    assert int.from_bytes(blackwell, "little") == (2**1024 - 1) & ~(1 << 85)


def layout(size_bits: bool, *arguments: Any) -> bytes:
    """A descriptor as a driver might encode it; ``size_bits``: with a bit that follows from the number of bytes."""
    _, rank, address, extents, strides, box, *_ = arguments
    span = sum((n - 1) * s for n, s in zip(extents[1:], strides, strict=True))
    fields = [address >> 32 << 32 | address & 0xFFFFFFFF, *strides, *[0] * (5 - rank)]
    encoded = struct.pack(f"<{len(fields)}Q", *fields) + struct.pack(f"<{2 * rank}I", *[n - 1 for n in extents], *box)
    return encoded + bytes([size_bits and span < 2**36]) + bytes(127 - len(encoded))


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_where_descriptors_have_their_extents(stub: Stub, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """It is found by descriptors that differ, once; not where an extent changes another byte, and not on Blackwell."""
    sizes, made = [False], []

    def encode(*arguments: Any) -> tuple[Any, ...]:
        made.append(ctypes.create_string_buffer(layout(sizes[0], *arguments), 128))
        return Status.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(made[-1]))

    monkeypatch.setattr(stub, "cuTensorMapEncodeTiled", encode, raising=False)
    driver = CudaDriver()
    for axis in range(rank):
        assert driver.extent_at(rank, axis, 0) == 40 + 4 * axis
    count = len(made)
    assert driver.extent_at(rank, 0, 0) == 40
    assert len(made) == count
    sizes[0] = True
    assert CudaDriver().extent_at(rank, rank - 1, 0) is None
    count = len(made)
    assert CudaDriver().extent_at(rank, 2, 1) is None
    assert len(made) == count
    stub.fails["cuTensorMapEncodeTiled"] = Status.CUDA_ERROR_LAUNCH_FAILED
    monkeypatch.delattr(stub, "cuTensorMapEncodeTiled")
    assert CudaDriver().extent_at(rank, 2, 0) is None


@pytest.mark.parametrize(("window", "group"), [(None, None), (128, None), (None, 4)])
def test_descriptors_of_other_rows_and_addresses(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, window: int | None, group: int | None
) -> None:
    """They are copies of the first one, and what the driver would encode."""
    made = []

    def encode(*arguments: Any) -> tuple[Any, ...]:
        made.append(ctypes.create_string_buffer(layout(False, *arguments), 128))
        return Status.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(made[-1]))

    monkeypatch.setattr(stub, "cuTensorMapEncodeTiled", encode, raising=False)
    box = (128, 1, 64) if window is None else (1, 128, 1, 64)

    def described(rows: int) -> TensorMap:
        return TensorMap(CudaDriver(), 0, "bf16", (rows, 8, 64), (512, 64, 1), box, 128, window, group)

    one = described(300)
    one.at(2**30)
    count = len(made)
    for address in (2**30, 0x7F0123456780):
        for rows in (2, 300, 70_000):
            assert one.at(address, rows) == (ours := one.at(address, rows))
            assert len(made) == count, "the driver was asked again"
            assert ours == (described(rows).at(address))
            count = len(made)
        assert one.at(address) == described(300).at(address)
        count = len(made)


def test_a_machine_without_driver_or_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="needs the package 'cuda-bindings'"):
        CudaDriver()


def test_the_real_bindings_have_what_is_used() -> None:
    cu = pytest.importorskip("cuda.bindings.driver")
    for name in (
        "cuDriverGetVersion", "cuGetErrorString", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetDevice", "cuDeviceGet",
        "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuLibraryLoadData", "cuLibraryGetKernel",
        "cuKernelGetFunction", "cuFuncSetAttribute", "cuLaunchKernel", "cuTensorMapEncodeTiled",
        "cuThreadExchangeStreamCaptureMode", "cuuint64_t", "cuuint32_t",
    ):  # fmt: skip
        assert hasattr(cu, name)
    for pick in drivers._SWIZZLES.values():
        assert pick(cu) is not None
    for name in (row.tensor_map for row in DTYPES.values() if row.tensor_map):
        assert hasattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
    assert cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    assert cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
    assert cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE == 0
    assert cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
    assert cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE == 0
    assert issubclass(cu.CUresult, int)  # success is false, as a condition
