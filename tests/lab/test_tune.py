"""The search for the fastest choices, all of it but the GPU: candidates, times, the journal and the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from attngen import cli, resources
from attngen.build.pipeline import BuiltKernel, Failure, Prepared
from attngen.errors import CallError, CompileError, LoadError, SpecError
from attngen.families.hopper_backward.choices import TABLE as BACKWARD_TABLE
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.families.hopper_forward.choices import FACTS, TABLES
from attngen.lab.bench.cases import BenchCase
from attngen.lab.bench.grid import GridResult, GridRow
from attngen.lab.bench.kernels import Team
from attngen.lab.bench.runner import Bench
from attngen.lab.bench.timing import Timing
from attngen.lab.tune import run as tool
from attngen.lab.tune import search
from attngen.lab.tune.run import TuneOptions, TuneReport, tune
from attngen.lab.tune.tables import Searched, tables_of
from attngen.lab.verify.gpu import Gpu
from attngen.plan import Plan, plan
from attngen.schema import KernelSpec, expand, load_spec, load_spec_text
from attngen.schema.measured import ChoiceTable
from attngen.schema.tuned import load_tuned
from tests.lab.bench_support import FakeMonitor

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [full, causal], head_dim: 128, layout: [dense, varlen]}
  - {variant: causal, head_dim: 128, dtype: fp16, tile: {n: 64}}
  - {variant: causal, head_dim: 64, backend: triton, passes: [forward, backward]}
"""

#: Milliseconds of a kernel in a case, by its plan.
Speed = Callable[[Prepared, BenchCase], float]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU on which kernels take the time that ``speed`` says; those that it gives none are wrong.

    Kernels with ``refused`` in their names do not compile. ``seen`` counts the measurements.
    """
    card: dict[str, Any] = {"speed": lambda kernel, case: 1.0, "refused": "-", "seen": 0}

    def compile_kernels(prepared: Sequence[Prepared], **_: Any) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
        wrong = [kernel.plan.name for kernel in prepared if card["refused"] in kernel.plan.name]
        names = [kernel.plan.name for kernel in prepared if kernel.plan.name not in wrong]
        failures = tuple(Failure(name, CompileError(f"{name}: no")) for name in wrong)
        return {name: BuiltKernel(name, name, "built", {}) for name in names}, failures

    def measure(
        bench: Bench, team: Team, case: BenchCase, kernels: Mapping[str, Any], errors: Any, **_: Any
    ) -> GridRow:
        card["seen"] += 1
        times = {label: card["speed"](kernel, case) for label, kernel in team.members.items()}
        results = [
            GridResult(label, label, "measured" if t else "failed", timing=Timing((t,), 0.0, True) if t else None)
            for label, t in times.items()
        ]
        return GridRow(case=case, results=tuple(results))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Gpu, "current", lambda: Gpu(torch.device("cpu"), 90, "a stand-in"))
    monkeypatch.setattr(Gpu, "answers", lambda self: True)
    monkeypatch.setattr(search, "measure", measure)
    for name, value in {
        "compile_kernels": compile_kernels,
        "read_kernel": lambda folder: folder.name,
        "gpu_facts": lambda gpu: {"l2_bytes": 1},
        "Monitor": FakeMonitor,
    }.items():
        monkeypatch.setattr(tool, name, value)
    return card


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def searched(spec: Path, **options: Any) -> TuneReport:
    return tune(spec, spec.with_name("card.yaml"), TuneOptions(**options), lambda row, done, total: None)


def narrow_is_faster(kernel: Prepared, case: BenchCase) -> float:
    plan = kernel.plan
    return 1.0 + abs(plan.tile_n - 96) / 100 + (plan.stages == 3) / 10 + case.seqlen / 1e6


@pytest.mark.exhaustive
def test_the_fastest_of_all_is_chosen_and_built(spec: Path, card: dict[str, Any]) -> None:
    card["speed"] = narrow_is_faster
    report = searched(spec, variants=("full",))
    (row,) = report.rows
    assert row["kernel"] == "full forward, dense, bf16, head_dim 128, cuda, sm90a"
    assert row["choice"]["tile"] == {"n": 96}
    assert row["choice"]["pipeline"] == {"stages": 2}
    assert row["speedup"] > 1.2
    assert row["candidates"] > 20
    assert list(report.left_out.values()) == ["only dense calls are measured"]
    tuned, kernel = load_tuned(spec.with_name("card.yaml")), expand(load_spec(spec))[0]
    applied = tuned.applied(kernel)
    assert applied is not None
    assert plan(applied).tile_n == 96
    head = spec.with_name("card.yaml").read_text().partition("versions")[0]
    assert f"date: '{date.today().isoformat()}'\nmethod: attngen tune, medians of 5 rounds, 16384 tokens\n" in head
    assert not spec.with_name("card.yaml.journal").exists()


@pytest.mark.exhaustive
def test_the_plans_own_choice_stays_where_nothing_is_faster(spec: Path, card: dict[str, Any]) -> None:
    own = plan(expand(load_spec(spec))[0]).name
    card["speed"] = lambda kernel, case: 1.0 if kernel.plan.name == own else 0.995
    (row,) = searched(spec, variants=("full",)).rows
    assert row["choice"] == {}
    assert load_tuned(spec.with_name("card.yaml")).choices == {}


@pytest.mark.exhaustive
def test_wrong_and_refused_candidates_are_not_chosen(spec: Path, card: dict[str, Any]) -> None:
    card["refused"] = "n64s"
    card["speed"] = lambda kernel, case: 0.0 if kernel.plan.tile_n == 80 else 1.0 + kernel.plan.tile_n / 1000
    (row,) = searched(spec, variants=("full",)).rows
    assert row["refused"] > 0
    assert row["choice"]["tile"] == {"n": 32}


@pytest.mark.exhaustive
def test_launches_of_a_backward_kernel_are_chosen_one_after_the_other(spec: Path, card: dict[str, Any]) -> None:
    def speed(kernel: Prepared, case: BenchCase) -> float:
        given = kernel.spec.backward
        if given is None or kernel.plan.direction == "forward":
            return 1.0
        return 1.0 - 0.2 * (given.dkdv.tile_m == 32) - 0.2 * (given.dq.tile_n == 128)

    card["speed"] = speed
    (row,) = searched(spec, directions=("backward",)).rows
    assert row["choice"]["backward"]["dkdv"]["tile"]["m"] == 32
    assert row["choice"]["backward"]["dq"]["tile"]["n"] == 128
    assert row["speedup"] == pytest.approx(1 / 0.6, abs=1e-3)


BACKWARD = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [causal, softcap], head_dim: 128, passes: [forward, backward]}
  - {variant: causal, head_dim: 256, passes: [forward, backward]}
"""


def shallow_is_faster(kernel: Prepared, case: BenchCase) -> float:
    roles = kernel.plan.structure
    if kernel.plan.direction == "forward":
        return 1.0
    assert isinstance(roles, HopperBackward)
    return (
        1.0
        - 0.2 * (roles.q_stages == 2)
        - 0.2 * (roles.rows_ahead == 4)
        - 0.1 * (roles.overlap in ("gradients", "roles"))
    )


def test_a_backward_of_roles_is_searched_and_its_choice_is_a_row(
    spec: Path, card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of a choice are found one after the other, and the planner makes of the row what was measured."""
    spec.write_text(BACKWARD)
    card["speed"] = shallow_is_faster
    report = searched(spec, variants=("causal",), directions=("backward",), tables=spec.parent)
    choices = [row["choice"]["backward"]["dkdv"] for row in report.rows]
    assert choices[0] == {
        "tile": {"m": 64}, "stages": 2, "overlap": "gradients", "packed": False, "q_stages": 2, "rows_ahead": 4,
    }  # fmt: skip
    assert choices[1] == {"tile": {"m": 64}, "overlap": "roles"}
    assert list(report.tables.rows.values()) == ["hopper_backward.yaml"] * 2
    kernels = [kernel for kernel in expand(load_spec(spec)) if kernel.direction == "backward"]
    tuned = load_tuned(spec.with_name("card.yaml"))
    written = [plan_with(spec.parent, monkeypatch, kernel, BACKWARD_TABLE) for kernel in kernels]
    for kernel, planned in zip(kernels, written, strict=True):
        assert planned == plan(tuned.applied(kernel) or kernel)
        assert (planned == plan(kernel)) is (kernel.variant.name == "softcap")  # other work


@pytest.mark.exhaustive
def test_a_search_that_was_cut_goes_on(spec: Path, card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 700.0, 700.0, 700.0])
    monkeypatch.setattr(tool.time, "monotonic", lambda: next(moments, 700.0))
    first = searched(spec, directions=("forward",))
    assert len(first.rows) == 1
    assert len(first.left) == 2
    monkeypatch.undo()


@pytest.mark.exhaustive
def test_a_journal_is_taken_up_and_guarded(spec: Path, card: dict[str, Any]) -> None:
    cut = searched(spec, directions=("forward",), seconds=1e-9)
    assert len(cut.rows) == 0
    journal = spec.with_name("card.yaml.journal")
    assert journal.exists()
    (row,) = searched(spec, variants=("full",)).rows  # done, so that its journal is gone
    assert not journal.exists()
    searched(spec, directions=("forward",), seconds=1e-9)
    with journal.open("a") as stream:
        stream.write(f'{{"of": "{row["of"]}", "kernel": "kept", "choice": {{}}, "speedup": 1.0, "problem": ""}}\n{{"of')
    card["seen"] = 0
    rows = searched(spec, variants=("full",)).rows
    assert [one["kernel"] for one in rows] == ["kept"]
    assert card["seen"] == 0
    searched(spec, directions=("forward",), seconds=1e-9)
    spec.write_text(SPEC.replace("head_dim: 128, layout", "head_dim: 96, layout"))
    with pytest.raises(CallError, match="journal of another search: spec_hash was .* --restart begins again"):
        searched(spec)
    assert len(searched(spec, variants=("full",), restart=True).rows) == 1


def test_the_command(spec: Path, card: dict[str, Any]) -> None:
    card["speed"] = narrow_is_faster
    out = spec.with_name("mine.tuned.yaml")
    command = ["tune", str(spec), "--variant", "full", "--out", str(out), "--tables", str(spec.parent)]
    result = CliRunner().invoke(cli.group, command)
    assert result.exit_code == 0, result.output
    assert f"{out}: 1 choice for a stand-in, of 1 kernel searched" in result.output
    assert "tile n 96" in result.output
    own = plan(expand(load_spec(spec))[0]).name
    assert f"{spec.parent / 'hopper_forward.yaml'}: rows for {own}\n" in result.output
    planned = CliRunner().invoke(cli.group, ["tune", str(spec), "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "causal backward, dense, bf16, head_dim 64, triton, sm90a" in planned.output
    assert CliRunner().invoke(cli.group, ["build", str(spec), "--render-only", "--tuned", str(out)]).exit_code == 2


def rows_written(spec: Path) -> dict[str, list[str]]:
    """Rows of each table that a search wrote beyond those of the planner's, and rows that it took away."""
    return {
        path.name: [
            line for line in unified_diff(
                (resources.tuned_dir() / path.name).read_text().splitlines(), path.read_text().splitlines(), n=0
            ) if line[0] in "+-@"
        ][2:]
        for path in sorted(spec.parent.glob("hopper_*.yaml"))
    }  # fmt: skip


def plan_with(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: KernelSpec,
    table: ChoiceTable[Any] = TABLES["hopper_forward"],
) -> Plan:
    """The plan of a kernel where the tables of a folder are the planner's."""
    with monkeypatch.context() as patch:
        patch.setattr(resources, "tuned_dir", lambda: folder)
        table.forget()
        planned = plan(kernel)
    table.forget()
    return planned


@pytest.mark.exhaustive
def test_a_choice_is_a_row_of_the_table(spec: Path, card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the row that the table chose, with the work of its kernel; the planner then makes what was measured."""
    card["speed"] = narrow_is_faster
    report = searched(spec, variants=("full",), tables=spec.parent)
    assert list(report.tables.rows.values()) == ["hopper_forward.yaml"]
    where, *lines = rows_written(spec)["hopper_forward.yaml"]
    row = yaml.safe_load("\n".join(line[1:] for line in lines))[0]
    assert row["work"] == ["ranges", "dense", "one_head", "bounds", "few_intervals"]
    assert {*row["work"], *row["without"]} == {*FACTS}
    assert (row["beyond"], row["columns"], row["tile"]) == (96, 128, {"n": 96})
    assert (row["gpu"], row["date"]) == ("a stand-in", date.today().isoformat())
    assert row["method"] == "attngen tune, medians of 5 rounds, 16384 tokens"
    assert row["speedup"] == report.rows[0]["speedup"]
    old = (resources.tuned_dir() / "hopper_forward.yaml").read_text().splitlines()
    replaced = old[int(re.findall(r"-(\d+)", where)[0])]
    assert replaced.startswith("- {columns: 128, tile: {n: 128}, warps: {consumer: 2, schedule: pingpong},")
    kernel, tuned = expand(load_spec(spec))[0], load_tuned(spec.with_name("card.yaml"))
    assert plan_with(spec.parent, monkeypatch, kernel) == plan(tuned.applied(kernel) or kernel) != plan(kernel)


def test_a_row_that_would_slow_another_kernel_is_left_out() -> None:
    """Kernels without a mask and causal ones have the same work, and here not the same fastest choice."""
    full, _, causal, *_ = expand(load_spec_text(SPEC, "mine.yaml"))
    searched = [Searched("a", "full", full, replace(full, tile_n=96), 1.1), Searched("b", "causal", causal, causal)]
    tables = tables_of(searched, gpu="a stand-in", method="by hand")
    assert tables.texts == tables.rows == {}
    assert tables.left_out == {"a": "it would be for causal, too, whose fastest choice differs"}
    alike = replace(causal, tile_n=96)
    tables = tables_of([searched[0], replace(searched[1], fastest=alike)], gpu="a stand-in", method="by hand")
    assert tables.rows == dict.fromkeys("ab", "hopper_forward.yaml")


def test_a_later_search_replaces_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, table = expand(load_spec_text(SPEC, "mine.yaml"))[0], TABLES["hopper_forward"]
    numbers = []
    for tile_n in (None, 96, 112):
        if tile_n:
            one = Searched("own", "label", kernel, replace(kernel, tile_n=tile_n), 1.1)
            text = tables_of([one], gpu="a stand-in", method="by hand").texts[table.path.name]
            (tmp_path / table.path.name).write_text(text)
            monkeypatch.setattr(resources, "tuned_dir", lambda: tmp_path)
        table.forget()
        numbers.append((len(table.load()), plan(kernel).tile_n))
    monkeypatch.undo()
    table.forget()
    assert numbers[1:] == [(numbers[0][0] + 1, 96), (numbers[0][0] + 1, 112)]


def test_without_a_gpu_it_is_said(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="needs an NVIDIA GPU"):
        searched(spec)
    assert [*spec.parent.iterdir()] == [spec]
    with pytest.raises(SpecError, match="there is no file"):
        searched(spec.with_name("nothing.yaml"))
