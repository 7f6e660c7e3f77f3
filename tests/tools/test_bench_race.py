"""A case on the CPU, with contestants of all kinds, and the check of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.errors import NoKernelError
from attngen.runtime.kernels.module import Kernel
from attngen.schema import load_spec_text, preset
from attngen.tools.bench import kernels as bench_kernels
from attngen.tools.bench.cases import BenchCase, bench_cases
from attngen.tools.bench.check import Oracle
from attngen.tools.bench.kernels import Team, teams
from attngen.tools.bench.peers import Peer
from attngen.tools.bench.race import Track, foresee
from attngen.tools.bench.report import Result
from attngen.tools.build.pipeline import Prepared, prepare
from attngen.tools.verify.interpreter import kernel_of
from tests.tools.bench_support import SPEC, StubPeer, TickClock, racing


def raising(error: Exception) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        raise error

    return change


def track(*peers: Peer, check: bool = True, l2_bytes: int = 1) -> Track:
    generator = torch.Generator().manual_seed(5)
    return Track(torch.device("cpu"), l2_bytes, TickClock(), peers, 3, check, generator, lambda moment: None)


@pytest.fixture
def team(prepared: list[Prepared]) -> Team:
    return next(team for team in teams(prepared) if team.variant.name == "full")


@pytest.fixture
def small() -> BenchCase:
    return bench_cases("full", "fp16", 32, 16, tokens=48, seqlens=(24,))[0]


def measured(at: Track, team: Team, case: BenchCase, **errors: str) -> tuple[dict[str, Result], Any]:
    kernels: dict[str, Kernel] = {m.plan.name: kernel_of(m.plan) for m in team.members.values()} if not errors else {}
    row = at.measure(team, kernels, errors, case)
    return {result.contestant: result for result in row.results}, row


@pytest.mark.usefixtures("clean_registry")
def test_a_case_with_contestants_of_all_kinds(team: Team, small: BenchCase) -> None:
    results, row = measured(
        track(
            StubPeer("good"),
            StubPeer("absent", absent="not installed"),
            StubPeer("wrong", lambda out: out * 1.01),
            StubPeer("nan", lambda out: torch.full_like(out, torch.nan)),
            StubPeer("raises", raising(RuntimeError("no kernel for this\nand a trace"))),
        ),
        team,
        small,
    )
    assert results["absent"].reason == "not installed"
    assert results["raises"].reason == "RuntimeError: no kernel for this"
    assert [results[name].status for name in ("absent", "raises")] == ["unsupported"] * 2
    assert str(results["wrong"].reason).startswith("wrong: relative error 1.0e-02 exceeds 2e-03")
    assert results["nan"].reason == "wrong: relative error inf exceeds 2e-03"
    assert results["nan"].to_dict()["relative_error"] is None  # JSON has no infinity
    for name in ("good", "attngen triton"):
        assert results[name].status == "measured"
        assert results[name].error is not None
        assert results[name].error < 1e-3
    assert results["attngen triton"].kernel == team.members["attngen triton"].plan.name
    good = results["good"]
    assert good.timing is not None
    assert good.timing.samples == (10.0, 10.0, 10.0)
    assert good.tflops == pytest.approx(2 * (2 * 64 * 24 * 24) * (32 + 16) / 10e-3 / 1e12)
    assert row.best_peer is good
    assert row.pairs == 2 * 64 * 24 * 24


@pytest.mark.usefixtures("clean_registry")
def test_only_the_kernel_that_a_call_takes(prepared: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    team = next(team for team in teams(prepared) if team.variant.name == "causal" and len(team.members) > 1)
    case = bench_cases("causal", "fp16", 32, 32, tokens=48, seqlens=(24,))[0]
    at = replace(track(StubPeer("good")), taken=True)
    wanted = [*team.members.values()][-1].plan.name
    monkeypatch.setattr(
        bench_kernels, "explain", lambda *_, **given: SimpleNamespace(
            to_dict=lambda: {"kernel": f"{given['package']}/{wanted}"}
        ),
    )  # fmt: skip
    results, _ = measured(at, team, case)
    assert list(results) == ["good", "attngen"]
    assert (results["attngen"].kernel, results["attngen"].status) == (wanted, "measured")
    monkeypatch.setattr(bench_kernels, "explain", lambda *_, **given: SimpleNamespace(to_dict=lambda: {"kernel": None}))
    results, _ = measured(at, team, case)
    assert list(results) == ["good", *team.members]


@pytest.mark.usefixtures("clean_registry")
def test_kernels_of_ours_that_fail(team: Team, small: BenchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = [member.plan for member in team.members.values()]
    results, _ = measured(track(), team, small, **{plan.name: "it does not compile"})
    assert (results["attngen triton"].status, results["attngen triton"].reason) == ("failed", "it does not compile")
    for change, status, reason in (
        (lambda out: out + 1, "failed", "wrong: relative error"),
        (raising(RuntimeError("illegal address")), "failed", "RuntimeError: illegal address"),
        (raising(NoKernelError("needs more shared memory")), "unsupported", "NoKernelError: needs more shared"),
    ):
        stub = StubPeer("attngen triton", change)
        monkeypatch.setattr(
            bench_kernels, "enter", lambda label, kernel, work, inputs, _, s=stub: s.enter(work, work.terms, inputs)
        )
        results, row = measured(track(StubPeer("good")), team, small)
        assert results["attngen triton"].status == status
        assert str(results["attngen triton"].reason).startswith(reason)
        assert results["good"].status == "measured"
        assert row.ratios == {}


@pytest.mark.usefixtures("clean_registry")
def test_without_the_check_only_a_nan_is_noticed(team: Team, small: BenchCase) -> None:
    def spoil(out: torch.Tensor) -> torch.Tensor:
        out[1, 3, 2, 1] = torch.nan  # of no head that the check looks at
        return out

    peers = StubPeer("wrong", lambda out: out * 2), StubPeer("unwritten", spoil)
    results, _ = measured(track(*peers, check=False), team, small)
    assert results["wrong"].status == "measured"
    assert results["wrong"].error is None
    assert results["unwritten"].status == "failed"
    results, _ = measured(track(*peers), team, small)
    assert results["wrong"].status == "failed"
    assert results["unwritten"].reason == "an output holds a NaN, or was not all written"


@pytest.mark.usefixtures("clean_registry")
def test_a_race_that_breaks_off_has_no_figures(team: Team, small: BenchCase) -> None:
    calls = 0

    def later(out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise RuntimeError("an illegal memory access")
        return out

    results, _ = measured(track(StubPeer("good"), StubPeer("bad", later)), team, small)
    assert {result.status for result in results.values()} == {"failed"}
    assert results["good"].reason == "RuntimeError: an illegal memory access"


@pytest.mark.usefixtures("clean_registry")
def test_inputs_exceed_the_cache(team: Team, small: BenchCase) -> None:
    size = 48 * (64 * 32 + 64 * 32 + 64 * 16) * 2
    for l2_bytes, sets in ((1, 1), (size // 2, 1), (size, 2), (4 * size - 1, 8), (10**9, 64)):
        assert len(track(l2_bytes=l2_bytes)._inputs(small)) == sets
    _, row = measured(track(l2_bytes=size), team, small)
    assert row.input_sets == 2


def test_a_case_that_cannot_be_called(small: BenchCase) -> None:
    text = SPEC.replace("alibi", "odd").replace(
        "kernels:",
        'variants:\n  odd: {mask: "flag[kv + 99]", tensors: {flag: {dtype: bool, shape: [seqlen_k]}}}\nkernels:',
    )
    (odd,) = [team for team in teams(prepare(load_spec_text(text))) if team.variant.name == "odd"]
    results, row = measured(track(StubPeer("good")), odd, small)
    assert results["attngen triton"].status == "unsupported"
    assert "IndexError: tensor 'flag': index" in str(results["attngen triton"].reason)
    assert row.pairs is None


def test_a_dry_run_knows_who_is_in(team: Team, small: BenchCase) -> None:
    row = foresee(team, [StubPeer("good"), StubPeer("absent", absent="not installed")], small)
    assert [(r.contestant, r.status, r.reason, r.ours) for r in row.results] == [
        ("good", "planned", None, False),
        ("absent", "unsupported", "not installed", False),
        ("attngen triton", "planned", None, True),
    ]


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("name", ["causal", "sliding_window", "alibi", "softcap", "packed_documents", "relative_bias"])
def test_the_oracle_agrees_with_the_reference(name: str) -> None:
    entry = f"{{variant: {name}, head_dim: {{qk: 32, v: 16}}, dtype: fp32, arch: sm80}}"
    (member,) = prepare(load_spec_text(f"schema: 1\npackage: mine\nkernels:\n  - {entry}\n"))
    work, (one, _) = racing(preset(name), name, 50, torch.float32)
    out = bench_kernels.enter("ours", kernel_of(member.plan), work, [one]).first()  # the reference, on the CPU
    oracle = Oracle(work, one.q, one.k, one.v)
    assert oracle.error(out) < 1e-6
    for spoiled in (out * 1.001, torch.where(out == out[1, -1, -1, 0], torch.nan, out)):
        assert oracle.error(spoiled) > 9e-4


def test_an_error_is_judged_by_dtype() -> None:
    work, (one, _) = racing(preset("full"), "full", 10)
    oracle = Oracle(work, one.q, one.k, one.v)
    assert oracle.problem(1.9e-3) is None
    assert oracle.problem(2.1e-3) == "wrong: relative error 2.1e-03 exceeds 2e-03"
