"""The machine that a benchmark runs on: versions, the ceilings of the card, its clock and power meanwhile.

It only reads: no setting of the card is touched.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from attngen import __version__
from attngen.lab.bench.timing import Batches, Clock, Contender, interleaved
from attngen.lab.verify.gpu import Gpu

#: Side of the matrix product, and bytes of the copy, by which ceilings are measured.
MATRIX, COPY_BYTES = 8192, 2**30

#: Distributions whose versions a report holds, as far as they are installed.
DISTRIBUTIONS = (
    "torch", "triton", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python", "nvidia-cudnn-frontend",
    "cuequivariance-torch", "fastvideo-kernel", "flash-mla",
)  # fmt: skip

#: Milliseconds between two readings of the card.
_QUERY_MS = 20

#: Names in nvidia-smi of the power of this very moment, on cards that know it, and of the mean over a second or so.
_POWER, _MEAN_POWER = "power.draw.instant", "power.draw"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of the card: a bf16 matrix product (TFLOP/s), and a copy (GB/s, bytes read and written)."""

    matrix_tflops: float
    copy_gbps: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of the card at some moment, or over some time."""

    sm_mhz: float
    watts: float
    celsius: float


class Memory:
    """Blocks of device memory of some shapes, in which the next outputs of these shapes land: see ``Outputs``."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._new: list[Callable[[], Tensor]] = [
            partial(torch.full, shape, math.nan, dtype=dtype, device=device) for shape in shapes
        ]

    def poison(self) -> None:
        """Fill as many blocks with NaN as calls use in turn, and give them back to the allocator."""
        _ = [new() for new in self._new for _ in range(3)]

    def intact(self, out: Tensor | Sequence[Tensor]) -> bool:
        """Whether an output, or each of several, holds no NaN; inputs hold none either."""
        return not any(bool(one.isnan().any()) for one in ([out] if isinstance(out, Tensor) else out))


def ceilings(gpu: Gpu, clock: Clock, rounds: int) -> Ceilings:
    """Measure the ceilings on random numbers: on zeros a card draws less power, and runs faster."""
    a, b = (torch.randn(MATRIX, MATRIX, device=gpu.device, dtype=torch.bfloat16) for _ in "ab")
    source = torch.randn(COPY_BYTES // 2, device=gpu.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    contenders = [
        Contender("matrix product", [partial(torch.mm, a, b)]),
        Contender("copy", [partial(target.copy_, source)]),
    ]
    memory = Memory([tuple(a.shape)], a.dtype, gpu.device)
    samplers = [Batches(contender, clock, memory) for contender in contenders]
    product, copy = (timing.milliseconds for timing in interleaved(samplers, rounds, random.Random(0)))
    return Ceilings(2 * MATRIX**3 / product / 1e9, 2 * COPY_BYTES / copy / 1e6)


def versions() -> dict[str, str | None]:
    """Versions of attngen and of the libraries; None for those that are not installed."""
    installed: dict[str, str | None] = {"attngen": __version__}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    try:
        cudnn = torch.backends.cudnn.version()
    except (RuntimeError, ValueError):  # torch's CUDA builds ask the devices, and there is none
        cudnn = None
    return installed | {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def gpu_facts(gpu: Gpu) -> dict[str, Any]:
    """Facts about the card and its driver for a report."""
    properties = torch.cuda.get_device_properties(gpu.device)
    driver = _ask(gpu, "driver_version,power.limit,clocks.max.sm")
    return {
        "name": gpu.name,
        "capability": gpu.capability,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver[0] if driver else None,
        "power_limit_watts": _number(driver[1]) if driver else None,
        "max_sm_mhz": _number(driver[2]) if driver else None,
    }


def _command(gpu: Gpu, fields: str) -> list[str] | None:
    """Command that asks nvidia-smi about this card; None where there is no nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu.device).uuid}"
    return [tool, f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def _ask(gpu: Gpu, fields: str) -> list[str] | None:
    command = _command(gpu, fields)
    if command is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    return [part.strip() for part in done.stdout.split(",")] if done.returncode == 0 else None


def _number(text: str) -> float | None:
    """Number that nvidia-smi printed; None where it printed none."""
    try:
        return float(text)
    except ValueError:
        return None


class Monitor:
    """Reads clock, power and temperature in the background; nothing is read where there is no nvidia-smi."""

    def __init__(self, gpu: Gpu) -> None:
        answer = _ask(gpu, _POWER)
        power = _POWER if answer and _number(answer[0]) is not None else _MEAN_POWER
        self._command = _command(gpu, f"clocks.sm,{power},temperature.gpu")
        self._readings: list[tuple[float, Reading]] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        if self._command is not None:
            command = [*self._command, f"--loop-ms={_QUERY_MS}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert self._process.stdout is not None
            self._thread = threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def _collect(self, lines: Iterable[str]) -> None:
        for line in lines:
            reading = parse_reading(line)
            if reading is not None:
                self._readings.append((time.monotonic(), reading))

    def since(self, moment: float) -> Reading | None:
        """Medians of the readings since a moment of ``time.monotonic``; None if there are none."""
        return self.within([(moment, math.inf)])

    def within(self, spans: Sequence[tuple[float, float]]) -> Reading | None:
        """Medians of the readings in some spans of ``time.monotonic``; None if there are none."""
        readings = [each for when, each in list(self._readings) if any(low <= when <= high for low, high in spans)]
        if not readings:
            return None
        columns = zip(*((r.sm_mhz, r.watts, r.celsius) for r in readings), strict=True)
        return Reading(*(statistics.median(column) for column in columns))


def parse_reading(line: str) -> Reading | None:
    """Reading in a line of nvidia-smi; None for a line that holds anything but three numbers."""
    numbers = [_number(part) for part in line.split(",")]
    if len(numbers) != 3 or None in numbers:
        return None
    sm_mhz, watts, celsius = (float(number) for number in numbers if number is not None)
    return Reading(sm_mhz, watts, celsius)
