"""A case on the CPU, with contenders of all kinds, and the check of their outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.errors import NoKernelError
from attngen.lab.bench import grid as tool
from attngen.lab.bench import kernels as bench_kernels
from attngen.lab.bench.cases import BenchCase, bench_cases
from attngen.lab.bench.check import Oracle
from attngen.lab.bench.grid import GridSuite
from attngen.lab.bench.kernels import Team, teams
from attngen.lab.verify.interpreter import kernel_of
from attngen.schema import load_spec_text, preset
from tests.lab.bench_support import SPEC, StubPeer, bench_on_cpu, measured, workload_of


def raising(error: Exception) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        raise error

    return change


@pytest.fixture
def team(prepared: list[Prepared]) -> Team:
    return next(team for team in teams(prepared) if team.variant.name == "full")


@pytest.fixture
def small() -> BenchCase:
    return bench_cases("full", "fp16", 32, 16, tokens=48, seqlens=(24,))[0]


@pytest.mark.usefixtures("clean_registry")
def test_a_case_with_contenders_of_all_kinds(team: Team, small: BenchCase) -> None:
    results, row = measured(
        team,
        small,
        StubPeer("good"),
        StubPeer("absent", absent="not installed"),
        StubPeer("wrong", lambda out: out * 1.01),
        StubPeer("nan", lambda out: torch.full_like(out, torch.nan)),
        StubPeer("raises", raising(RuntimeError("no kernel for this\nand a trace"))),
    )
    assert results["absent"].reason == "not installed"
    assert results["raises"].reason == "RuntimeError: no kernel for this"
    assert [results[name].status for name in ("absent", "raises")] == ["unsupported"] * 2
    assert str(results["wrong"].reason).startswith("wrong: error 1.0e-02 exceeds 2e-03")
    assert results["nan"].reason == "wrong: error inf exceeds 2e-03"
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
    assert row.fastest_peer is good
    assert row.pairs == 2 * 64 * 24 * 24


@pytest.mark.usefixtures("clean_registry")
def test_only_the_kernel_that_a_call_takes(prepared: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    team = next(team for team in teams(prepared) if team.variant.name == "causal" and len(team.members) > 1)
    case = bench_cases("causal", "fp16", 32, 32, tokens=48, seqlens=(24,))[0]
    wanted = [*team.members.values()][-1].plan.name
    monkeypatch.setattr(
        bench_kernels, "explain", lambda *_, **given: SimpleNamespace(
            to_dict=lambda: {"kernel": f"{given['package']}/{wanted}"}
        ),
    )  # fmt: skip
    results, _ = measured(team, case, StubPeer("good"), taken=True)
    assert list(results) == ["good", "attngen"]
    assert (results["attngen"].kernel, results["attngen"].status) == (wanted, "measured")
    monkeypatch.setattr(bench_kernels, "explain", lambda *_, **given: SimpleNamespace(to_dict=lambda: {"kernel": None}))
    results, _ = measured(team, case, StubPeer("good"), taken=True)
    assert list(results) == ["good", *team.members]


@pytest.mark.usefixtures("clean_registry")
def test_kernels_of_attngen_that_fail(team: Team, small: BenchCase, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = [member.plan for member in team.members.values()]
    results, _ = measured(team, small, errors={plan.name: "it does not compile"})
    assert (results["attngen triton"].status, results["attngen triton"].reason) == ("failed", "it does not compile")
    for change, status, reason in (
        (lambda out: out + 1, "failed", "wrong: error"),
        (raising(RuntimeError("illegal address")), "failed", "RuntimeError: illegal address"),
        (raising(NoKernelError("needs more shared memory")), "unsupported", "NoKernelError: needs more shared"),
    ):
        stub = StubPeer("attngen triton", change)
        monkeypatch.setattr(
            bench_kernels, "enter", lambda label, kernel, work, inputs, _, s=stub: s.enter(work, work.terms, inputs)
        )
        results, row = measured(team, small, StubPeer("good"))
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
    results, _ = measured(team, small, *peers, check=False)
    assert results["wrong"].status == "measured"
    assert results["wrong"].error is None
    assert results["unwritten"].status == "failed"
    results, _ = measured(team, small, *peers)
    assert results["wrong"].status == "failed"
    assert results["unwritten"].reason == "an output holds a NaN, or was not all written"


@pytest.mark.usefixtures("clean_registry")
def test_a_case_that_breaks_off_has_no_figures(team: Team, small: BenchCase) -> None:
    calls = 0

    def later(out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise RuntimeError("an illegal memory access")
        return out

    results, _ = measured(team, small, StubPeer("good"), StubPeer("bad", later))
    assert {result.status for result in results.values()} == {"failed"}
    assert results["good"].reason == "RuntimeError: an illegal memory access"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("clean_registry")
def test_inputs_exceed_the_cache(team: Team, small: BenchCase) -> None:
    size = 48 * (64 * 32 + 64 * 32 + 64 * 16) * 2
    for l2_bytes, sets in ((1, 1), (size // 2, 1), (size, 2), (4 * size - 1, 8), (10**9, 64)):
        assert len(tool._inputs(bench_on_cpu(l2_bytes=l2_bytes), small)) == sets
    _, row = measured(team, small, l2_bytes=size)
    assert row.input_sets == 2


def test_a_case_that_cannot_be_called(small: BenchCase) -> None:
    text = SPEC.replace("alibi", "odd").replace(
        "kernels:",
        'variants:\n  odd: {mask: "flag[kv + 99]", tensors: {flag: {dtype: bool, shape: [seqlen_k]}}}\nkernels:',
    )
    (odd,) = [team for team in teams(prepare_unrendered(load_spec_text(text))) if team.variant.name == "odd"]
    results, row = measured(odd, small, StubPeer("good"))
    assert results["attngen triton"].status == "unsupported"
    assert "IndexError: tensor 'flag': index" in str(results["attngen triton"].reason)
    assert row.pairs is None


def test_a_dry_run_knows_who_is_in(team: Team, small: BenchCase) -> None:
    suite = GridSuite.__new__(GridSuite)
    suite.peers = [StubPeer("good"), StubPeer("absent", absent="not installed")]
    assert [(r.contender, r.status, r.reason, r.peer) for r in suite.planned((team, small)).results] == [
        ("good", "planned", None, True),
        ("absent", "unsupported", "not installed", True),
        ("attngen triton", "planned", None, False),
    ]


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("name", ["causal", "sliding_window", "alibi", "softcap", "packed_documents", "relative_bias"])
def test_the_oracle_agrees_with_the_reference(name: str) -> None:
    entry = f"{{variant: {name}, head_dim: {{qk: 32, v: 16}}, dtype: fp32, arch: sm80}}"
    (member,) = prepare_unrendered(load_spec_text(f"schema: 1\npackage: mine\nkernels:\n  - {entry}\n"))
    work, (one, _) = workload_of(preset(name), name, 50, torch.float32)
    out = bench_kernels.enter("attngen", kernel_of(member.plan), work, [one]).first()  # the reference, on the CPU
    oracle = Oracle(work, one.q, one.k, one.v)
    assert oracle.error(out) < 1e-6
    for spoiled in (out * 1.001, torch.where(out == out[1, -1, -1, 0], torch.nan, out)):
        assert oracle.error(spoiled) > 9e-4


def test_the_limit_of_an_error_is_that_of_the_dtype() -> None:
    work, (one, _) = workload_of(preset("full"), "full", 10)
    oracle = Oracle(work, one.q, one.k, one.v)
    assert oracle.limit == 2e-3
