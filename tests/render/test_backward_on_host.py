"""Backwards by clusters, whole, on the CPU, as ``test_decode_on_host`` runs split-KV kernels.

Blocks that send each other sums, copies and signals all run, with every address that they use.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from attngen.render import render
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.render.test_decode_on_host import on_host
from tests.sampling import few

COMPILED = ("softmax.cuh", "ring.cuh", "expression.cuh", "schedule.cuh")

#: Batch, queries, keys, query heads, KV heads: ends within a block of keys and within a tile, blocks without keys, rows
#: that see nothing, groups.
CASES = ["1,70,200,2,1", "1,130,33,1,1"]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few("head_dim", [256, 512, 504], always=0, often=(0,))
def test_a_backward_runs_to_its_end_and_is_right(head_dim: int, tmp_path: Path) -> None:
    plan = planned("causal", head_dim=head_dim, passes="backward", backward="{backend: cuda}")
    text = render(plan).text.replace("extern __shared__ char shared_memory[];", "")
    (tmp_path / "kernel.inc").write_text(text)
    for name in COMPILED:
        (tmp_path / name).write_text(on_host(name, headers()[name].replace("#ifdef __CUDA_ARCH__", "#if 1")))
    preprocess = plan.launch("preprocess")
    defined = {
        **{launch.name.upper(): launch.symbol for launch in plan.launches},
        "HEAD_DIM": head_dim, "CLUSTER": plan.launch("dqkv").cluster,
        "PREPROCESS_ROWS": preprocess.tile_m, "PREPROCESS_THREADS": 32 * preprocess.num_warps,
    }  # fmt: skip
    program = tmp_path / "program"
    compile_host(HOST / "backward.cpp", program, tmp_path, define=defined)
    done = subprocess.run([program, *CASES], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
