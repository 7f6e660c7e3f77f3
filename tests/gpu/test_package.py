"""A package on a GPU: by itself, with no compiler to import and nothing to reach, and beside others of its kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngen.arch import arch_of
from attngen.store.lock import Lock
from tests.packaging.support import WITHOUT_ANYTHING, install, make, run, write_spec

SPEC = """
schema: 1
package: {package}
arch: [{arch}]
kernels:
  - {{variant: [causal, sliding_window, allowed], head_dim: 128{backend}}}
  - {{variant: causal, head_dim: 128, layout: varlen{backend}}}
"""

#: The error of a call in bf16 is at most twice that of plain PyTorch in bf16, both against float64.
CALLS = """
import torch
from attngen_on_gpu import attention, attention_varlen, errors, explain, tile_map

torch.manual_seed(0)

def plain(q, k, v, visible, dtype):
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    logits = (q @ k.transpose(-1, -2)) / 128 ** 0.5
    seen = visible.any(-1, keepdim=True)
    weights = logits.masked_fill(~visible & seen, float("-inf")).softmax(-1)
    return ((weights * seen).to(dtype) @ v).transpose(1, 2).double()

def check(out, q, k, v, visible):
    exact = plain(q, k, v, visible, torch.float64)
    allowed = 2 * (plain(q, k, v, visible, torch.bfloat16) - exact).abs().max() + 2 ** -8 * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed
    assert out.isfinite().all()

def inputs(rows):
    return (torch.randn(2, rows, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))

for rows in (1, 127, 1000):
    q, k, v = inputs(rows)
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(rows, device="cuda")[None, :]
    check(attention(q, k, v, variant="causal"), q, k, v, i >= j)
    check(attention(q, k, v, variant="sliding_window", window=60), q, k, v, (i >= j) & (i - j < 60))
    allowed = torch.rand(2, rows, rows, device="cuda") < 0.1
    check(attention(q, k, v, variant="allowed", allowed=allowed), q, k, v, allowed[:, None])
    tiles = tile_map(q, k, variant="allowed", allowed=allowed)
    check(attention(q, k, v, variant="allowed", allowed=allowed, tile_map=tiles), q, k, v, allowed[:, None])
    cu = torch.tensor([0, rows, 2 * rows], device="cuda", dtype=torch.int32)
    out = attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, rows, rows, variant="causal")
    check(out.view_as(q), q, k, v, i >= j)

assert explain(q, k, v, variant="causal").runs == "kernel"
try:
    attention(q.half(), k.half(), v.half(), variant="causal")
except errors.NoKernelError as error:
    assert "dtype is bf16, the call has fp16" in str(error)
else:
    raise AssertionError("fp16 was not built")

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = attention(q, k, v, variant="causal")
for t in (q, k, v):
    t.copy_(torch.randn_like(t))
graph.replay()
assert torch.equal(captured, attention(q, k, v, variant="causal"))

@torch.compile(backend="eager", fullgraph=True)
def traced(q):
    return attention(q, k, v, variant="causal") * 2

assert torch.equal(traced(q), captured * 2)
"""

BESIDE = """
import torch, attngen, attngen_on_gpu, attngen_beside

q, k, v = (torch.randn(1, 300, 8, 128, device="cuda").bfloat16() for _ in range(3))
streams = [torch.cuda.Stream() for _ in range(3)]
calls = [
    lambda: attngen_on_gpu.attention(q, k, v, variant="causal"),
    lambda: attngen_beside.attention(q, k, v, variant="causal"),
    lambda: attngen.attention(q, k, v, variant="attngen_on_gpu/causal"),
]
wanted = calls[0]()
torch.cuda.synchronize()
outputs = []
for _ in range(50):
    for stream, call in zip(streams, calls):
        with torch.cuda.stream(stream):
            outputs.append(call())
torch.cuda.synchronize()
assert all(torch.equal(out, wanted) for out in outputs)
assert "attngen_on_gpu/" in str(attngen.explain(q, k, v, variant="causal", package="attngen_on_gpu"))
"""

ONE_OF_TWENTY = """
import torch
torch.cuda.init()
q, k, v = (torch.randn(1, 500, 8, 128, device="cuda").bfloat16() for _ in range(3))
import attngen_on_gpu
out = attngen_on_gpu.attention(q, k, v, variant="causal")
given = (t.double().transpose(1, 2) for t in (q, k, v))
exact = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
assert (out.double() - exact.transpose(1, 2)).abs().max() < 4e-2
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which two packages for this GPU are installed; workers of a run share it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _installed(tmp_path_factory.mktemp("package"))
    folder = tmp_path_factory.getbasetemp().parent / "package"
    folder.mkdir(exist_ok=True)
    lock = Lock(folder / "lock")
    assert lock.acquire(200)
    try:
        if not (folder / "installed").exists():
            _installed(folder)
            (folder / "installed").touch()
        return folder / "site"
    finally:
        lock.release()


def _installed(folder: Path) -> Path:
    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    assert arch is not None
    wheels = []
    for name in ("attngen_on_gpu", "attngen_beside"):
        backend = ", backend: cuda" if arch.wgmma else ""
        spec = write_spec(folder, SPEC.format(package=name, arch=arch.name, backend=backend), f"{name}.yaml")
        wheels.append(make(spec, folder / "dist").files[0])
    return install(folder / "site", *wheels)


def test_a_package_runs_with_no_compiler_and_no_network(site: Path) -> None:
    run(CALLS, site)


def test_packages_and_attngen_beside_each_other(site: Path) -> None:
    run(BESIDE, site, alone=False)


def test_twenty_processes_call_at_once(site: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_ANYTHING + ONE_OF_TWENTY]
    started = [
        subprocess.Popen(command, env=environment, cwd=site, stderr=subprocess.PIPE, text=True) for _ in range(20)
    ]
    failures = [errors for process in started for errors in [process.communicate()[1]] if process.returncode]
    assert not failures, failures[0]
