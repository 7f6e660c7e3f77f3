"""Backward passes on the CPU: the contenders, how each is differentiated, its check, and its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.lab.bench import grid as tool
from attngen.lab.bench import kernels as bench_kernels
from attngen.lab.bench import peers as bench_peers
from attngen.lab.bench.cases import bench_cases
from attngen.lab.bench.check import GradientOracle
from attngen.lab.bench.gradients import differentiated
from attngen.lab.bench.grid import GridResult, GridRow
from attngen.lab.bench.kernels import Team, forward_kernels_of, teams
from attngen.lab.bench.memory import workspace, workspace_bound
from attngen.lab.bench.peers import Tensors
from attngen.lab.bench.timing import Contender
from attngen.lab.bench.workloads import Workload
from attngen.plan.model import Plan
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import reference
from attngen.runtime.registry.lookup import registry
from attngen.schema import load_spec_text, preset
from tests.lab.bench_support import StubPeer, measured, workload_of

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [full, causal], head_dim: {qk: 32, v: 16}, dtype: fp16, backend: triton, passes: [forward, backward]}
  - variant: full
    head_dim: {qk: 32, v: 16}
    dtype: fp16
    layout: varlen
    backend: triton
    passes: [forward, backward]
  - {variant: alibi, head_dim: 32, dtype: fp16, passes: backward, backward: {backend: triton}}
"""


@pytest.fixture
def prepared() -> list[Prepared]:
    return prepare_unrendered(load_spec_text(SPEC))


@pytest.fixture
def team(prepared: list[Prepared]) -> Team:
    kept = [one for one in prepared if one.plan.layout == "dense" and one.plan.direction == "backward"]
    return next(team for team in teams(kept, prepared) if team.variant.name == "full")


def of_seed(name: str, seqlen: int, dtype: torch.dtype = torch.float16) -> tuple[Workload, list[Tensors], list[Tensor]]:
    """Return a case with two sets of leaves, and gradients of the output for each."""
    torch.manual_seed(3)
    work, inputs = workload_of(preset(name), name, seqlen, dtype)
    leaves = [Tensors(*(t.requires_grad_() for t in one.bshd)) for one in inputs]
    above = [torch.randn(2, seqlen, 4, 16, dtype=dtype) for _ in leaves]
    return replace(work, case=replace(work.case, direction="backward")), leaves, above


# --- how each is differentiated -----------------------------------------------------------------------------


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("name", ["causal", "sliding_window", "alibi", "softcap", "packed_documents", "prefix_lm"])
def test_the_oracle_agrees_with_autograd_of_the_reference(name: str) -> None:
    work, (one, _), (dout, _) = of_seed(name, 70, torch.float32)
    call = bind(
        work.variant, *one.bshd, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=work.arguments,
    )  # fmt: skip
    gradients = torch.autograd.grad(reference(call, *one.bshd)[0], one.bshd, dout)
    oracle = GradientOracle(work, *one.bshd, dout)
    assert oracle.error(gradients) < 1e-5
    for index in range(3):
        spoiled = [1.001 * g if n == index else g for n, g in enumerate(gradients)]
        assert oracle.error(spoiled) == pytest.approx(1e-3, rel=0.1)
        spoiled[index] = torch.full_like(gradients[index], torch.nan)
        assert oracle.error(spoiled) == float("inf")
    assert oracle.limit == 4e-3  # the case is fp16


def test_pieces_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    work, (one, _), (dout, _) = of_seed("causal", 50, torch.float32)
    whole = GradientOracle(work, *one.bshd, dout)
    monkeypatch.setattr("attngen.lab.bench.check._ELEMENTS", 7 * 50)
    for a, b in zip(whole._expected, GradientOracle(work, *one.bshd, dout)._expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_forward_runs_once_and_is_differentiated_again_and_again(heads_first: bool) -> None:
    _, inputs, above = of_seed("full", 12)
    ran: list[int] = []

    def attend(number: int, leaves: tuple[Tensor, ...]) -> tuple[Tensor, str]:
        ran.append(number)
        q, _, v = leaves
        return q[..., :16] * v.sum(), "the log-sum-exp"

    leaves = [one.heads_first if heads_first else one.bshd for one in inputs]
    calls = [lambda n=n, each=each: attend(n, (each[0], each[0], each[2])) for n, each in enumerate(leaves)]
    as_bshd: Callable[[Any], Any] = (lambda t: t.transpose(1, 2)) if heads_first else (lambda t: t)
    with torch.no_grad():  # as benchmarks run
        contender = differentiated(Contender("one", calls, as_bshd=as_bshd, leaves=[(a, c) for a, _, c in leaves]),
                                    above)  # fmt: skip
        gradients = [call() for call in contender.calls for _ in range(2)]
    assert ran == [0, 1]
    for (dq, dv), one, dout in zip([contender.as_bshd(f) for f in gradients[::2]], inputs, above, strict=True):
        assert torch.equal(dq[..., :16], (dout * one.v.sum()))
        assert not dq[..., 16:].any()
        torch.testing.assert_close(dv, (dout * one.q[..., :16]).sum().expand_as(dv), rtol=1e-2, atol=1e-2)
    assert all(one.q.grad is None for one in inputs)


def test_what_autograd_does_not_know_is_no_contender() -> None:
    _, inputs, _ = of_seed("full", 12)
    plain = Contender("one", [lambda one=one: one.q.detach() for one in inputs], leaves=[one.bshd for one in inputs])
    with pytest.raises(RuntimeError, match="require grad"):
        differentiated(plain, [torch.randn(2, 12, 4, 32)] * 2).first()


@pytest.mark.parametrize("name", ["full", "causal"])
def test_sdpa_is_differentiated_in_its_own_order_of_axes(name: str) -> None:
    work, inputs, above = of_seed(name, 40, torch.float32)
    assert work.terms is not None
    forward = bench_peers.Sdpa("SDPA", "MATH").enter(work, work.terms, inputs)
    actual = differentiated(forward, above).first()
    assert [g.shape for g in actual] == [t.shape for t in inputs[0].bshd]
    assert GradientOracle(work, *inputs[0].bshd, above[0]).error(actual) < 1e-5


# --- contenders ---------------------------------------------------------------------------------------------


def test_a_backward_has_its_forwards_and_a_team_of_its_own(prepared: list[Prepared]) -> None:
    dense = [one for one in prepared if bench_kernels.reason_against(one.plan, 90) is None]
    actual = {(team.direction, team.variant.name): team for team in teams(dense, prepared, 90)}
    assert list(actual) == [
        (direction, name) for name in ("full", "causal") for direction in ("forward", "backward")
    ] + [("backward", "alibi")]  # fmt: skip
    for (direction, name), team in actual.items():
        assert list(team.members) == ["attngen triton"]
        followed = [one.plan.name for one in team.forward_kernels]
        if direction == "forward" or name == "alibi":
            assert followed == []
        else:
            assert followed == [one.plan.name for one in actual["forward", name].members.values()]
    (alibi,) = [one for one in prepared if one.plan.variant.name == "alibi"]
    assert forward_kernels_of(alibi.plan, prepared, 90) == []
    one = next(one for one in prepared if one.plan.direction == "backward" and one.plan.layout == "dense")
    assert forward_kernels_of(one.plan, prepared, 80) == []  # another GPU
    assert bench_kernels.reason_against(one.plan, 90, ("forward",)) == "only forward kernels are measured"


def measured_backward(team: Team, *peers: Any) -> tuple[dict[str, GridResult], GridRow]:
    (case,) = bench_cases("full", "fp16", 32, 16, tokens=48, seqlens=(24,), direction="backward")
    return measured(team, case, *peers)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of gradients that each contender returned when its memory was counted."""
    counts: list[int] = []

    def count(device: torch.device, call: Callable[[], Sequence[Tensor]]) -> int:
        counts.append(len(call()))
        return 1000 + len(counts)

    monkeypatch.setattr(tool, "workspace", count)
    return counts


class Wrong(torch.autograd.Function):
    """The identity with a gradient that a test asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.change(dout), None


def raising(dout: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.\nand advice")


@pytest.mark.usefixtures("clean_registry", "counted")
def test_a_case_with_contenders_of_all_kinds(team: Team) -> None:
    results, row = measured_backward(
        team,
        StubPeer("good"),
        StubPeer("absent", absent="not installed"),
        StubPeer("wrong", lambda out: Wrong.apply(out, lambda dout: dout * 1.01)),
        StubPeer("nan", lambda out: Wrong.apply(out, lambda dout: dout * torch.nan)),
        StubPeer("large", lambda out: Wrong.apply(out, raising)),
        StubPeer("forward only", lambda out: out.detach()),
    )
    assert {name: result.status for name, result in results.items()} == {
        "good": "measured", "absent": "unsupported", "wrong": "failed", "nan": "failed", "large": "unsupported",
        "forward only": "unsupported", "attngen triton": "measured",
    }  # fmt: skip
    assert str(results["wrong"].reason).startswith("wrong: error 1.0e-02 exceeds 4e-03")
    assert results["nan"].reason == "wrong: error inf exceeds 4e-03"
    assert results["large"].reason == "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB."
    assert "does not require grad" in str(results["forward only"].reason)
    own = results["attngen triton"]
    assert own.kernel == team.members["attngen triton"].plan.name
    assert own.error is not None
    assert own.error < 2e-3
    assert row.pairs == 2 * 64 * 24 * 24
    assert own.tflops == pytest.approx(2 * row.pairs * (3 * 32 + 2 * 16) / 10e-3 / 1e12)


@pytest.mark.usefixtures("clean_registry", "counted")
def test_attngen_is_called_with_its_own_backward_and_forward(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    dispatched = bench_kernels.attention

    def attention(*tensors: Tensor, variant: str, package: str, **arguments: Any) -> Any:
        seen.append([kernel.direction for kernel in registry.find(variant, package).kernels])
        return dispatched(*tensors, variant=variant, package=package, **arguments)

    monkeypatch.setattr(bench_kernels, "attention", attention)
    assert measured_backward(team)[0]["attngen triton"].status == "measured"
    assert seen == [["backward", "forward"]]  # once for the one set of inputs


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean_registry")
def test_memory_is_counted_of_each_contender_that_runs(team: Team, counted: list[int]) -> None:
    results, _ = measured_backward(team, StubPeer("good"), StubPeer("absent", absent="no"))
    assert counted == [3, 3]
    assert [results[name].workspace for name in ("good", "absent", "attngen triton")] == [1001, None, 1002]
    assert results["good"].workspace_bound is None
    bound = results["attngen triton"].workspace_bound
    (plan,) = [member.plan for member in team.members.values()]
    assert bound == workspace_bound(plan, batch=2, seqlen_q=24, seqlen_k=24, heads=64, kv_heads=64)


def test_what_a_call_holds_beside_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()  # a collection would look at all that lives for longer
    peak, held = 0, 5000

    def allocate(size: int) -> None:
        nonlocal peak, held
        held += size
        peak = max(peak, held)

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = held

    def call() -> tuple[Tensor, ...]:
        actual = torch.zeros(6, 10), torch.zeros(30)
        allocate(240 + 120)
        allocate(700)
        allocate(-700)
        return actual[0].T, actual[1], actual[0][2:]  # a gradient may be a view, of one more than once

    def statistics(device: torch.device) -> dict[str, int]:
        return {"requested_bytes.all.current": held, "requested_bytes.all.peak": peak}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats", statistics)
    allocate(10**6)
    allocate(-(10**6))
    assert workspace(torch.device("cuda"), call) == 700


def tiles(plan: Plan, m: int, n: int) -> Plan:
    return plan.with_launches(*(replace(launch, tile_m=m, tile_n=n) for launch in plan.launches))


def test_the_bound_by_hand(team: Team) -> None:
    (plan,) = [member.plan for member in team.members.values()]
    sizes = {"batch": 3, "seqlen_q": 130, "seqlen_k": 65, "heads": 4, "kv_heads": 4}
    rows, keys = 3 * 4 * 192, 3 * 4 * 128
    dq, sums, counters = rows * 32, 2 * rows, 3 * 4 * (1 + 3 + 2 * 1) + 8
    assert workspace_bound(tiles(plan, 64, 128), **sizes) == 4 * (dq + sums + counters)
    shared = workspace_bound(tiles(plan, 64, 128), **{**sizes, "kv_heads": 2})
    assert shared == 4 * (dq + sums + counters + keys // 2 * (32 + 16))
