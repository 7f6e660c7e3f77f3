"""``attngen bench``: the dry run, the tables, and the errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from click.testing import Result as Outcome

from attngen import cli
from attngen.commands import doctor
from attngen.lab.bench import runner
from attngen.lab.bench.figures import read_runs
from attngen.lab.bench.grid import GridReport, GridResult, GridRow, GridSuite
from attngen.lab.bench.ladder import RUNGS
from attngen.lab.bench.runner import BenchOptions, Observer
from attngen.lab.commands import bench as command
from tests.lab.bench_support import SCHEMA, backward_report, report, result, without_libraries

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [causal, alibi], head_dim: 64, backend: triton}
  - {variant: causal, head_dim: 64, layout: varlen, backend: triton}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    without_libraries(monkeypatch)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def run(*arguments: object, code: int = 0) -> Outcome:
    done = CliRunner().invoke(cli.group, ["bench", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_without_a_gpu_nothing_can_be_measured(spec: Path) -> None:
    done = run(spec, code=cli.EXIT_FAILURE)
    assert done.stderr == "bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the cases without one\n"


def test_a_dry_run_lists_cases_contenders_and_reasons(spec: Path, tmp_path: Path) -> None:
    output = run(spec, "--dry-run", "--json", tmp_path / "plan.json").stdout
    lines = output.splitlines()
    assert lines[0].split() == ["case", "shape", "FlexAttention", "attngen", "triton"]
    assert [line.split("  ")[0] for line in lines[2:7]] == [
        "causal d64 bf16 1k", "causal d64 bf16 4k", "causal d64 bf16 16k", "causal d64 bf16 h64/16 16k",
        "alibi d64 bf16 h64/16 16k",
    ]  # fmt: skip
    assert "b16 s1024 h32/32" in lines[2]
    assert "not in 5 cases: FlashAttention-3: not installed; pip install fa3-fwd" in lines
    assert "left out: 1 kernel: only dense calls are measured" in lines
    assert lines[-1] == "mine: 5 cases; nothing was measured"
    document = json.loads((tmp_path / "plan.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert len(document["rows"]) == 5


def test_options_choose_cases(spec: Path) -> None:
    output = run(spec, "--dry-run", "--variant", "causal", "--seqlen", 512, "--seqlen", 2048, "--tokens", 4096).stdout
    assert "mine: 4 cases" in output
    assert "b8 s512 h32/32" in output
    assert "mine: 1 case;" in run(spec, "--dry-run", "--kernel", "alibi").stdout
    assert "mine: 3 cases;" in run(spec, "--dry-run", "--suite", "grid").stdout
    assert "mine: 2 cases;" in run(spec, "--dry-run", "--suite", "variants").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--variant", "casual"), 2, "no kernel of variant 'casual'; did you mean 'causal'?"),
        (("--kernel", "d65"), 2, "no kernel 'd65'"),
        (("--seqlen", "0"), 2, "--seqlen"),
        (("--json", "no/such/folder/figures.json"), 2, "there is no folder no/such/folder"),
        (("--json", ""), 2, "the name of a file is empty"),
        (("--report", "report.json"), 2, "--report holds figures of one GPU"),
        (("--record", "speed.json", "--ladder"), 2, "--record keeps figures beside peers; leave it out, or --ladder"),
        (("--record", "s.json", "--suite", "small"), 2, "--record is not for the suite of small calls; leave it out"),
        (("--plot", "figures.txt"), 2, "--plot figures.txt: a picture's name ends in .png, .pdf, .svg"),
    ],
)
def test_mistakes(spec: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    assert says in run(spec, "--dry-run", *arguments, code=code).stderr


@pytest.mark.parametrize("before", [True, False])
def test_json_without_a_file_is_printed(spec: Path, tmp_path: Path, before: bool) -> None:
    """As by the other commands; what follows ``--json`` is a file only if it is no option and no spec."""
    run(spec, "--dry-run", "--json", tmp_path / "plan.json")
    printed = run(*(("--json", spec) if before else (spec, "--json")), "--dry-run").stdout
    assert json.loads(printed) == json.loads((tmp_path / "plan.json").read_text())
    wrong = run("--json", spec, "--dry-run", "--kernel", "d65", code=cli.EXIT_USAGE)
    assert "no kernel 'd65'" in json.loads(wrong.stdout)["errors"][0]["message"]


def test_json_without_a_file_is_printed_after_a_run(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, report())
    done = run(spec, "--json")
    assert json.loads(done.stdout) == report().to_dict()
    assert done.stderr.startswith("[1/")


def test_json_of_simulated_ranks(tmp_path: Path) -> None:
    suite = ("--suite", "parallel", "--dry-run", "--seqlen", "4096", "--json")
    document = json.loads(run(*suite).stdout)
    assert {row["variant"] for row in document["simulated"]} == {"causal", "sliding_window"}
    assert "4096 tokens a rank" in run(*suite, tmp_path / "ranks.json").stdout
    assert json.loads((tmp_path / "ranks.json").read_text()) == document


def test_json_overwrites_no_spec(spec: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SPEC)
    assert "the name of a spec" in run("--json", other, spec, "--dry-run", code=cli.EXIT_USAGE).stderr
    assert other.read_text() == SPEC


def test_a_spec_that_is_wrong(spec: Path) -> None:
    spec.write_text(SPEC.replace("variant:", "varaint:"))
    assert "did you mean 'variant'?" in run(spec, "--dry-run", code=cli.EXIT_USAGE).stderr


def test_a_picture_needs_matplotlib(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(command, "import_module", lacking)
    done = run(spec, "--plot", spec.with_suffix(".png"), code=cli.EXIT_FAILURE)
    assert done.stderr == "this needs matplotlib, which is not installed; pip install 'attngen[bench]'\n"


def measured(monkeypatch: pytest.MonkeyPatch, report: GridReport) -> list[BenchOptions]:
    """Let a run end with this report, case by case, and return the options that it had."""
    seen: list[BenchOptions] = []

    def bench(suite: GridSuite, observer: Observer) -> GridReport:
        seen.append(suite.options)
        for count, row in enumerate(report.rows, 1):
            observer(replace(report, rows=report.rows[:count]), f"[{count}/{len(report.rows)}] {row.line}")
        return report

    monkeypatch.setattr(runner, "bench", bench)
    return seen


def test_the_file_to_send_back(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured(monkeypatch, report())
    monkeypatch.setattr(doctor, "look", lambda: [doctor.Finding("run", "GPU 0", "ok", "some card")])
    run(spec, "--json", tmp_path / "figures.json", "--report", tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["bench"] == json.loads((tmp_path / "figures.json").read_text())
    assert document["findings"] == [{"part": "run", "name": "GPU 0", "state": "ok", "text": "some card"}]
    assert document["attngen"]


def test_runs_are_recorded(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured(monkeypatch, report())
    path = tmp_path / "speed.json"
    run(spec, "--record", path, "--suite", "grid", "--taken")
    forward, variants = read_runs(path)
    assert (forward.figures, variants.figures, forward.card) == ("forward", "variants forward", "a card")
    assert forward.source == f"attngen bench {spec} --suite grid --taken --rounds 7"
    path.write_text("{}")
    done = run(spec, "--record", path, code=cli.EXIT_USAGE)
    assert "speed.json holds no runs of benchmarks" in done.stderr
    assert path.read_text() == "{}"


def test_the_table(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = measured(monkeypatch, report())
    done = run(spec, "--no-check", "--rounds", 5, "--json", tmp_path / "figures.json")
    assert seen == [BenchOptions(rounds=5, check=False)]
    table = [line.split() for line in done.stdout.splitlines()]
    assert table[0] == [
        "TFLOP/s", "flash", "flex", "attngen", "cuda", "attngen", "triton", "cuda", "/", "best", "peer", "triton", "/",
        "best", "peer",
    ]  # fmt: skip
    assert table[2] == ["causal", "d128", "bf16", "1k", "400", "300", "600", "500", "1.50", "1.25"]
    assert table[4] == ["causal", "d128", "bf16", "16k", "600", "400", "480", "0.80"]
    assert table[5] == ["causal", "d128", "bf16:", "geometric", "mean", "1.10", "1.06"]
    assert table[8] == ["grid:", "geometric", "mean", "1.10", "1.06"]
    assert table[9] == ["variants:", "geometric", "mean", "1.48"]
    assert "not in 1 case: flash: knows no ALiBi" in done.stdout
    assert "mine on a card: bf16 matrix product 750 TFLOP/s, copy 4300 GB/s; medians of 3 rounds" in done.stdout
    assert "[1/5] causal d128 bf16 1k: flash 400, flex 300, attngen cuda 600, attngen triton 500" in done.stderr
    assert "bound by the host" not in done.stdout
    document = json.loads((tmp_path / "figures.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert len(document["rows"]) == 5
    assert document["gpu"] == {"name": "a card"}


def test_the_tables_of_both_directions(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = measured(monkeypatch, backward_report())
    output = run(spec, "--json", tmp_path / "figures.json").stdout
    assert seen[0].directions == ("forward", "backward")
    table = [line.split() for line in output.splitlines()]
    heads = [line for line in table if line[:1] == ["TFLOP/s"]]
    assert ["flash" in head for head in heads] == [True, False]  # nobody who was not measured
    figures = [line for line in table if line[:5] == ["causal", "d128", "bf16", "backward", "1k"]]
    assert figures[0] == ["causal", "d128", "bf16", "backward", "1k", "300", "600", "500", "2.00", "1.67"]
    assert figures[1][5:] == ["8.0", "8.0", "8.0", "9.0"]
    costs = [n for n, line in enumerate(table) if line[:5] == ["time", "per", "visible", "pair", "/"]]
    assert len(costs) == 2
    # attngen's 671: 1.10 times the 610 of flash, and 2.20 times the 305 of FlexAttention
    assert table[costs[0] + 2] == ["causal", "d128", "bf16", "h32/8", "16k", "1.10", "2.20", "1.00"]
    assert table[costs[0] + 3] == ["alibi", "d128", "bf16", "h32/8", "16k", "2.68", "1.34"]
    assert table[costs[1] + 2] == ["causal", "d128", "bf16", "h32/8", "backward", "16k", "2.20", "1.00"]
    assert ["grid", "backward:", "geometric", "mean", "1.49", "1.37"] in table
    (memory,) = [line for line in output.splitlines() if line.startswith("MiB besides inputs and gradients")]
    assert memory.split()[5:] == ["flex", "attngen", "cuda", "attngen", "triton", "attngen's", "bound"]
    document = json.loads((tmp_path / "figures.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert [row["direction"] for row in document["rows"]] == ["forward"] * 5 + ["backward"] * 5
    assert document["rows"][4]["to_causal"] == pytest.approx({"flex": 671 / 250, "attngen cuda": 671 / 500})
    assert document["rows"][0]["to_causal"] == {}
    last = document["rows"][-1]["results"][-1]
    assert (last["workspace_bytes"], last["workspace_bound_bytes"]) == (2**23, 9 * 2**20)


@pytest.mark.parametrize(
    ("given", "directions"),
    [
        ((), ("forward", "backward")),
        (("--pass", "both"), ("forward", "backward")),
        (("--pass", "backward"), ("backward",)),
        (("--pass", "forward"), ("forward",)),
        (("--ladder",), ("forward",)),
    ],
)
def test_passes_are_chosen(
    given: tuple[str, ...], directions: tuple[str, ...], spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured(monkeypatch, report())
    run(spec, *given)
    assert tuple(seen[0].directions) == directions
    if given == ("--ladder",):
        assert "a ladder leads to a forward kernel" in run(spec, *given, "--pass", "both", code=cli.EXIT_USAGE).stderr


def test_a_dry_run_of_backward_passes(spec: Path) -> None:
    spec.write_text(SPEC.replace("head_dim: 64, ", "head_dim: 64, passes: [forward, backward], ", 1))
    output = run(spec, "--dry-run", "--pass", "backward").stdout
    assert "mine: 5 cases" in output
    assert "alibi d64 bf16 h64/16 backward 16k" in output
    assert "left out: 2 kernels: only backward kernels are measured" in output
    assert "mine: 10 cases" in run(spec, "--dry-run").stdout
    spec.write_text(SPEC.replace("head_dim: 64, backend: triton}", "head_dim: 64, passes: backward}", 1))
    output = run(spec, "--dry-run").stdout
    assert "left out: 2 kernels: the spec has no dense forward that it could follow" in output


def test_a_kernel_that_fails(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = report().rows
    wrong = GridResult("attngen cuda", "fwd", "failed", "wrong: error 1.0e+00 exceeds 1e-02")
    measured(monkeypatch, report(rows=(*rows, GridRow(case=rows[0].case, results=(wrong,)))))
    done = run(spec, code=cli.EXIT_FAILURE)
    assert "causal d128 bf16 1k: attngen cuda: wrong: error 1.0e+00 exceeds 1e-02" in done.stderr


def test_nothing_measured(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, GridReport(left_out={"fwd": "built for sm80, this GPU is sm90"}))
    done = run(spec, code=cli.EXIT_FAILURE)
    assert done.stdout == "left out: 1 kernel: built for sm80, this GPU is sm90\n"
    assert done.stderr == "no kernel was measured\n"


def test_figures_that_the_host_bounds_are_marked(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = result("attngen cuda", 1e5, own=True)  # 15 µs, of which the host takes 12
    slow = result("flash", 1.2e5)
    measured(monkeypatch, GridReport(rows=(GridRow(case=report().rows[0].case, results=(slow, fast)),)))
    output = run(spec).stdout
    assert "120000*" in output
    assert "100000*" not in output
    assert "* bound by the host" in output


# --- the ladder -----------------------------------------------------------------------------------------------

CUDA = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: 64, backend: cuda}
  - {variant: dilated, head_dim: 64, backend: cuda}
  - {variant: causal, head_dim: 64, backend: triton}
"""


def test_a_dry_run_shows_what_changes_from_rung_to_rung(spec: Path, tmp_path: Path) -> None:
    spec.write_text(CUDA)
    output = run(spec, "--ladder", "--dry-run", "--seqlen", 512, "--json", tmp_path / "plan.json").stdout
    assert "ladder of fwd_sm90a_wgmma_bf16_d64_causal_m192n128s2c3" in output
    assert "  - variant: causal\n    head_dim: 64\n    arch: sm90a\n" in output
    assert "    loads: pointer\n" in output
    assert "warps: {producer: 1, schedule: cooperative, overlap: false}; loads: descriptor\n" in output
    line = next(line for line in output.splitlines() if line.startswith("persistent, longest first"))
    assert line.split(maxsplit=4)[-1].strip() == "persistent: true; order: longest_first"
    assert "left out: 1 kernel: only CUDA kernels have a ladder" in output
    assert "FlexAttention" not in output
    document = json.loads((tmp_path / "plan.json").read_text())
    jsonschema.validate(document, SCHEMA)
    causal, dilated = document["ladders"]
    assert causal["kernel"] == "fwd_sm90a_wgmma_bf16_d64_causal_m192n128s2c3"
    assert [rung["name"] for rung in causal["rungs"]] == list(RUNGS)
    assert [rung["name"] for rung in dilated["rungs"]] == list(RUNGS)
    assert [case["name"] for case in causal["cases"]] == ["causal d64 bf16 512"]


def test_the_table_of_a_ladder(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec.write_text(CUDA)
    planned = runner.dry_run(GridSuite(spec, BenchOptions(variants=("causal",), seqlens=(512,), ladder=True), None))
    (ladder,), (row,) = planned.ladders, planned.rows
    speeds = [400 + 50 * number for number in range(len(RUNGS))]
    results = [result(each.contender, speed, own=True) for each, speed in zip(row.results, speeds, strict=True)]
    results = [replace(new, kernel=old.kernel) for new, old in zip(results, row.results, strict=True)]
    names = [rung.plan.name for rung in ladder.rungs if rung.plan]
    used = {name: {"registers": 128} for name in names}
    measured(monkeypatch, replace(planned, rows=(replace(row, results=tuple(results)),), resources=used))
    output = run(spec, "--ladder", "--variant", "causal", "--json", tmp_path / "figures.json").stdout
    table = [line.split() for line in output.splitlines()]
    assert ["causal", "d64", "bf16", "512"] in table
    assert ["mma.sync", "400", "1.000", "0.533", "128", "49152"] in table
    warps = ["warps:", "{producer:", "1,", "schedule:", "cooperative,", "overlap:", "true}"]
    assert next(line for line in table if line[:2] == ["overlap", "500"])[2:] == [
        "1.250", "1.111", "0.667", "128,", "160", "to", "multiply", "115464", *warps,
    ]  # fmt: skip
    document = json.loads((tmp_path / "figures.json").read_text())
    jsonschema.validate(document, SCHEMA)
    last = document["ladders"][0]["cases"][0]["rungs"][-1]
    assert (last["tflops"], last["to_last"]) == (pytest.approx(750), 1.0)


def test_a_ladder_has_no_picture(spec: Path) -> None:
    done = run(spec, "--ladder", "--plot", spec.with_suffix(".png"), code=cli.EXIT_USAGE)
    assert "--plot draws attngen beside peers" in done.stderr
