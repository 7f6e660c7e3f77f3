"""Explanations of backward kernels by ``attngen explain``: derivatives, and floors by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.inspect.explanation import PlanExplanation
from attngen.inspect.gradients import GradientFloors
from attngen.inspect.of_spec import explain_spec
from attngen.inspect.visits import visits
from tests.plan.specs import planned
from tests.sampling import few

TILES = "{dkdv: {tile: {m: 32, n: 64}, stages: 2, warps: 4}, dq: {tile: {m: 128, n: 64}, stages: 2, warps: 8}}"
SPEC = f"""
schema: 1
package: mine
kernels:
  - {{variant: softcap, head_dim: {{qk: 64, v: 32}}, arch: sm90a, passes: backward, backward: {TILES}}}
  - {{variant: full, head_dim: 64, arch: [sm90a, sm80], dtype: [bf16, fp32], passes: backward}}
"""


@pytest.fixture
def explained(tmp_path: Path) -> dict[str, PlanExplanation]:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return {one.plan.name: one for one in explain_spec(path, seqlens=(1024,))}


@pytest.fixture
def softcap(explained: dict[str, PlanExplanation]) -> GradientFloors:
    (kernel,) = [one.gradients for name, one in explained.items() if "softcap" in name]
    assert kernel is not None
    return kernel


def test_floors_by_hand(softcap: GradientFloors) -> None:
    dkdv, dq = softcap.kernels
    # Q Kᵀ and dSᵀ Q of 64 columns, dO Vᵀ and Pᵀ dO of 32
    assert dkdv.flops == 2 * 32 * 64 * (64 + 64 + 32 + 32)
    assert dkdv.parts == {"products": 192, "exponentials": 32 * 64 // 16}
    assert dkdv.loaded == 32 * (64 + 32) * 2 + 32 * 2 * 4  # Q and dO, log-sum-exp and D
    assert dkdv.kept == 2 * 64 * (64 + 32) * 2  # K, V, dK and dV
    # Q Kᵀ and dS K of 64 columns, dO Vᵀ of 32
    assert dq.flops == 2 * 128 * 64 * (64 + 64 + 32)
    assert dq.parts == {"products": 640, "exponentials": 512}
    assert dq.loaded == 64 * (64 + 32) * 2
    assert dq.kept == 128 * (64 + 32 + 64) * 2 + 128 * 2 * 4
    assert [low.binding for low in softcap.kernels] == [("products",)] * 2
    assert dkdv.cached_share == pytest.approx(1 - 192 / (6400 / (4.8e12 / (132 * 1.98e9))))


def test_steps_of_consumers_that_visit_their_own_blocks_count_half() -> None:
    declared = "variants:\n  blocks: {mask: 'sel[q // 64, kv // 64]', tensors: {sel: {dtype: bool, shape: [m, n]}}}\n"
    plan = planned("blocks", passes="backward", backward="{backend: cuda}", head_dim=128, declared=declared)
    sel = torch.zeros(4, 4, dtype=torch.bool)
    sel[0, 1] = sel[2, 2] = sel[2, 3] = sel[3, 0] = True
    visited = visits(plan, 256, {"sel": sel})
    assert (visited.full, visited.partial, visited.efficiency) == (4, 0, 1.0)
    floors = GradientFloors.of(plan, lambda part: [visits(part, 256, {"sel": sel})])
    assert floors is not None
    assert floors.heads[0].steps == {"dkdv": 2, "dq": 2}  # of 64 x 128 pairs, or 128 x 64


def test_a_head_takes_all_kernels_one_after_the_other(softcap: GradientFloors) -> None:
    (head,) = softcap.heads
    # a tile of 64 keys is seen by all of the 32 tiles of 32 queries but for 2 j, one of 128 queries sees 2 (i + 1)
    assert head.steps == {"dkdv": sum(32 - 2 * j for j in range(16)), "dq": sum(2 * (i + 1) for i in range(8))}
    dkdv, dq = softcap.kernels
    sums = 1024 * (2 * 32 * 2 + 12) / 18.365
    assert head.clocks == pytest.approx(272 * dkdv.clocks + 72 * dq.clocks + sums, abs=2)
    flops = 2 * (1024 * 1025 / 2) * (3 * 64 + 2 * 32)
    assert head.tflops == pytest.approx(flops / (head.us / 1e6) / 1e12)
    assert head.us == pytest.approx(1e6 * head.clocks / (132 * 1.98e9))


def test_memory_is_a_floor_of_few_steps(softcap: GradientFloors) -> None:
    dkdv, _ = softcap.kernels
    assert dkdv.call(steps=1000, blocks=4) == 1000 * dkdv.clocks
    assert dkdv.call(steps=1, blocks=4) == pytest.approx(4 * dkdv.kept / 18.365, abs=1)


def test_only_where_the_rates_are_known(explained: dict[str, PlanExplanation]) -> None:
    with_floors = [name for name, one in explained.items() if one.gradients is not None]
    assert len(explained) == 5
    assert len(with_floors) == 2
    assert all("sm90a" in name and "bf16" in name for name in with_floors)


def test_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    done = CliRunner().invoke(cli.group, ["explain", str(path), "softcap", "--seqlen", "1024", "--full"])
    assert "  by s           1.0 / cap * (1.0 - tanh(s / cap) * tanh(s / cap)) * cap\n" in done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["floor", "of", "a", "step", "of", "dkdv", "in", "clocks:", "32", "queries", "x", "64", "keys"] in lines
    assert ["bound", "by", "192", "products"] in lines
    assert ["bound", "by", "640", "products"] in lines
    (head,) = [line for line in lines if line[:3] == ["seqlen", "1024:", "steps"]]
    assert head[3:8] == ["272", "of", "dkdv,", "72", "of"]


CUDA = """
schema: 1
package: mine
arch: sm90a
kernels:
  - {variant: causal, head_dim: [128, 192, 256], passes: backward, backward: {backend: cuda}}
"""


@pytest.mark.exhaustive
@few(
    ("head_dim", "roles"),
    [
        (128, [
            "producer: 1 warpgroup, 24 registers a thread: loads, adds up dQ and rounds it",
            "consumers: 2 warpgroups of 64 keys, 240 registers a thread",
            "loop: ranges; the softmax of a step runs under products of the other consumer: "
            "they take turns at the tensor cores",
            "heads of a group go through chunks of at most 8 query tiles together, the last ones first",
            "where blocks would wait for a few, the last tiles of keys are cut into parts of their steps",
            "in flight: 3 tiles of Q, 2 of dO, 2 of dS",
        ]),
        (192, [
            "a cluster of 2 blocks of 64 keys, in each of which 1 warpgroup",
            "loads: 40 registers a thread; a half of Q and dO for both blocks",
            "multiplies S and keeps dV: 192 registers a thread",
            "multiplies dP and keeps dK: 192 registers a thread",
            "multiplies 96 columns of dQ, 96 at once, and adds them to the dQ accumulator: 88 registers a thread",
            "loop: ranges; the softmax of a step runs under products of other warpgroups",
            "in flight: 3 tiles of Q, 2 of dO, 2 of dS",
        ]),
        (256, [
            "a cluster of 2 blocks of 64 keys, in each of which 1 warpgroup",
            "loads: 32 registers a thread; a half of Q and dO for both blocks",
            "multiplies S and keeps dV: 208 registers a thread",
            "multiplies dP and keeps dK: 208 registers a thread",
            "multiplies 128 columns of dQ, 64 at once, and adds them to the dQ accumulator: 64 registers a thread",
            "loop: ranges; the softmax of a step runs under dV of the one before, and products of other warpgroups",
            "in flight: 2 tiles of Q, 3 half ones of dO, 2 of dS",
        ]),
    ], always=(1,)
)  # fmt: skip
def test_roles_of_a_backward_in_cuda(tmp_path: Path, head_dim: int, roles: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CUDA)
    done = CliRunner().invoke(cli.group, ["explain", str(path), f"d{head_dim}", "--full"])
    lines = [line.strip() for line in done.output.splitlines()]
    (first,) = [number for number, line in enumerate(lines) if line.startswith("dqkv ")]
    assert lines[first + 1 : first + 1 + len(roles)] == roles
    (explained,) = [one for one in explain_spec(path, seqlens=()) if f"_d{head_dim}_" in one.plan.name]
    assert explained.shared_bytes == explained.plan.structure.shared_bytes
    assert lines[first + 1 + len(roles)].startswith(f"shared memory {explained.shared_bytes} B: k ")


def test_a_forward_mode_derivative_says_what_each_launch_keeps(tmp_path: Path) -> None:
    path = tmp_path / "moved.yaml"
    path.write_text("schema: 1\nkernels:\n  - {variant: causal, head_dim: 128, arch: sm90a, passes: jvp}\n")
    (one,) = explain_spec(path, seqlens=(1024,))
    told = "\n".join(text for _, text in one.facts())
    assert one.shared_bytes == 2 * 128 * 128 * 2 + 2 * 4 * 64 * 128 * 2
    assert "196608 B of 232448 B: Q and dQ 65536 + 2 stages x K, dK, V and dV 65536" in told
    assert "98304 B of 232448 B: Q and dQ 32768 + 2 stages x K and V 32768" in told
