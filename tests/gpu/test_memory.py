"""Writes and reads out of bounds, races in shared memory, barriers, races under load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen.inspect.cases import Case
from attngen.runtime.launch.pinned import Buffers, Pinned, prepared_shapes
from tests.gpu.family import Run, bits, kernels, labels, left_out
from tests.gpu.sanitized import subjects
from tests.sampling import sampled

ALL = labels()
LEFT_OUT = left_out()
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_written_out_of_bounds(name: str) -> None:
    """Outputs are inner views of larger buffers: not a word around them changes."""
    case = Case("odd", (67, 3), (131, 20)) if "varlen" in name else Case("odd", (67,) * 2, (131,) * 2)
    run = Run.of(name, case)
    wanted, wanted_lse = run.results()
    canary = 77.0
    surrounded = torch.full([extent + 16 for extent in wanted.shape], canary, dtype=wanted.dtype, device="cuda")
    inner = tuple(slice(8, 8 + extent) for extent in wanted.shape)
    flat = torch.full((wanted_lse.numel() + 512,), canary, device="cuda")
    lse = flat[256:-256].view(wanted_lse.shape)
    shape = prepared_shapes(run.kernel, run.call)[1].get("forward")
    words = None if shape is None else torch.zeros(shape, dtype=torch.int32, device="cuda")
    inputs = run.inputs
    run.launch(Buffers(inputs.q, inputs.k, inputs.v, surrounded[inner], lse, words))
    assert torch.equal(bits(surrounded[inner]), bits(wanted))
    assert torch.equal(bits(lse), bits(wanted_lse))
    surrounded[inner] = canary
    assert (surrounded == canary).all()
    assert (flat[:256] == canary).all()
    assert (flat[-256:] == canary).all()


def sanitize(
    tool: str, *, program: str = "tests.gpu.sanitized", count: int, kernels: tuple[str, ...] = ("fwd_", "classify_")
) -> None:
    """Run a program under compute-sanitizer, and check ``kernels``, by parts of names; any report fails."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    # initcheck has to see the writes of torch's kernels as well
    ours = [] if tool == "initcheck" else [f"--kernel-name=kernel_substring={name}" for name in kernels]
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "10",
        "--report-api-errors", "no",  # cuda-bindings probes for functions that a driver may lack
        *ours,
        sys.executable, "-m", program, tool,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    text = done.stdout + done.stderr
    if "Device not supported" in text or "not supported on this device" in text:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, text[-6000:]
    assert f"{count} kernels ran" in text, text[-6000:]


def sanitize_forwards(tool: str) -> None:
    kernels()  # compiled before, so that the sanitizer sees no compiler
    sanitize(tool, count=len(subjects(tool)))


def test_nothing_is_read_out_of_bounds() -> None:
    """memcheck: inputs end with their allocation, in odd sizes."""
    sanitize_forwards("memcheck")


def test_no_races_in_shared_memory() -> None:
    sanitize_forwards("racecheck")


@pytest.mark.parametrize("tool", ["synccheck", "initcheck"])
def test_barriers_are_right_and_every_read_is_initialized(tool: str) -> None:
    sanitize_forwards(tool)


RACES = [
    "causal-bf16-d64-dense-descriptor",
    "sink_window-bf16-d64-dense-descriptor",
    "packed_documents-bf16-d64-dense-descriptor",
    "dilated-bf16-d64-dense-descriptor",
    "allowed-bf16-d128-dense-descriptor",
    "causal-bf16-d192x128-dense-descriptor",
    "causal-bf16-d64-varlen-descriptor",
    "causal-fp32-d64-dense-pointer",
    "sink_window-bf16-d80-dense-pointer",
    "causal-bf16-d64-dense-wgmma",
    "packed_documents-bf16-d64-varlen-wgmma",
    "allowed-bf16-d128-dense-wgmma",
    "causal-bf16-d192x128-dense-wgmma",
    "sink_window-bf16-d80-dense-wgmma",
    "sliding_window-bf16-d48-dense-wgmma",
    "sliding_window-bf16-d112-dense-wgmma",
    "causal-bf16-d128-dense-wgmma-pack",
    "sliding_window-bf16-d80-varlen-wgmma-pack",
]
REPEATS = 1000


@sampled(name=RACES, shape=[(1, 239), (239, 1), (113, 203), (500, 517), (2048, 2048)])
def test_no_races_under_load(name: str, shape: tuple[int, int]) -> None:
    """1,000 repeats beside a busy stream, on a GPU that is half full: every one gives the same bits."""
    rows, keys = shape
    run = Run.of(name, Case("race", (rows,), (keys,), heads=4, kv_heads=2))
    wanted, wanted_lse = (bits(result) for result in run.results())
    buffers = run.memory().buffers
    launch = Pinned(run.kernel, run.call, buffers)
    assert buffers.lse is not None
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    busy = torch.cuda.Stream()
    load = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for repeat in range(REPEATS):
        if repeat % 8 == 0:
            with torch.cuda.stream(busy):
                torch.mm(load, load)
        launch()
        differences += (bits(buffers.out) != wanted).any() | (bits(buffers.lse) != wanted_lse).any()
    torch.cuda.synchronize()
    assert int(differences) == 0
