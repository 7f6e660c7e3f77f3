"""Small calls without a GPU: their shapes, a whole run, and the kernel that is taken beside the fastest one."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.build.pipeline import prepare_unrendered
from attngen.lab.bench import graphs
from attngen.lab.bench.report import Result
from attngen.lab.bench.runner import BenchOptions, bench
from attngen.lab.bench.small import oracle as oracle_tool
from attngen.lab.bench.small import suite as tool
from attngen.lab.bench.small.fit import Timed, fit
from attngen.lab.bench.small.inputs import SmallInputs, call_of
from attngen.lab.bench.small.oracle import OracleSuite, compared
from attngen.lab.bench.small.shapes import WINDOW, Shape, oracle_shapes, small_shapes
from attngen.lab.bench.small.suite import SmallSuite
from attngen.lab.bench.timing import Timing, Work, sustain
from attngen.lab.verify.interpreter import kernel_of
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.prediction import Card, predict
from attngen.schema import load_spec_text, preset, tree
from attngen.schema.measured import checked
from attngen.schema.measured_times import TimesModel
from tests.lab.bench_support import FakeClock, StubPeer, compute_on_the_cpu
from tests.runtime.support import FakeDriver
from tests.sampling import few

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [full, causal], head_dim: 64, dtype: bf16, tile: [{m: 64}, {m: 128}, {m: 192}]}
  - {variant: causal, head_dim: 64, dtype: bf16, pack_gqa: true, split_kv: true}
  - {variant: causal, head_dim: 96, dtype: bf16}
"""
SHAPES = (Shape("full", 64, 2, 4, 2, 40, 40), Shape("causal", 64, 1, 2, 2, 33, 70))


def test_shapes_have_names_of_their_own_and_are_sixty() -> None:
    for shapes in (small_shapes(), oracle_shapes()):
        assert len({shape.name for shape in shapes}) == len(shapes)
    assert len(oracle_shapes()) == 60
    assert Shape("causal", 64, 2, 32, 8, 128, 8192).name == "causal d64 b2 32/8 128 at 8k"


@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1500, 1500), (7, 2000)])
def test_pairs_are_those_of_the_mask(variant: str, seqlen_q: int, seqlen_k: int) -> None:
    q, kv = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)[None]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool) if variant == "full" else q >= kv
    if variant == "sliding_window":
        visible &= q - kv < WINDOW
    shape = Shape(variant, 64, 2, 3, 1, seqlen_q, seqlen_k)
    assert shape.pairs == 6 * int(visible.sum())
    assert shape.flops == 4 * 64 * shape.pairs


# --- a whole run ------------------------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Iterator[Path]:
    """A spec, two small calls, and a GPU whose calls the CPU computes."""
    peers = (StubPeer("good"), StubPeer("wrong", lambda out: out + 1.0), StubPeer("gone", absent="no"))
    compute_on_the_cpu(monkeypatch)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(graphs, "_ENQUEUED", 1)
    monkeypatch.setattr(tool, "small_peers", lambda: peers)
    monkeypatch.setattr(tool, "small_shapes", lambda: SHAPES)
    monkeypatch.setattr(oracle_tool, "oracle_shapes", lambda: SHAPES)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    with drivers.use(FakeDriver()):
        yield path


@few("sustained", [False, True])
def test_a_whole_run(spec: Path, sustained: bool) -> None:
    seen: list[int] = []
    suite = SmallSuite(spec, BenchOptions(rounds=2, sustained=sustained), 90)
    report = bench(suite, lambda so_far, line: seen.append(len(so_far.rows)))
    assert seen == [1, 2]
    first = report.rows[0]
    statuses = {one.contender: one.status for one in first.results}
    assert statuses == {"good": "measured", "wrong": "unsupported", "gone": "unsupported", "attngen": "measured"} or (
        statuses == {"good": "measured", "wrong": "failed", "gone": "unsupported", "attngen": "measured"}
    )
    assert report.ok
    assert first.ratios == {"attngen": pytest.approx(1.0)}
    watts = [one.reading.watts for one in first.results if one.reading is not None]
    assert watts == ([600.0] * 2 if sustained else [])
    json.dumps(report.to_dict(), allow_nan=False)


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.group, ["bench", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_the_command_prints_tables_and_writes_the_document(spec: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    output = run(spec, "--suite", "small", "--rounds", 1, "--sustained", "--json", figures)
    assert "full d64 b2 4/2 40" in output
    assert "J / TFLOP" in output
    assert "wrong: wrong: error" in output
    assert json.loads(figures.read_text())["sustained"] is True
    output = run(spec, "--suite", "small", "--dry-run", "--cell", "causal")
    assert output.splitlines()[-1] == "mine: 1 call; nothing was measured"
    assert "did you mean" in run(spec, "--suite", "small", "--cell", "cousal d64 b1 2 33 at 70", code=2)
    assert "the spec has none" in run(spec, "--suite", "small", "--kernel", "d96", code=2)
    assert "no library has" in run(spec, "--suite", "small", "--peer", "cuttlas", code=2)
    assert "--tokens is not for the suite of small calls" in run(spec, "--suite", "small", "--tokens", 4, code=2)


# --- the kernel that is taken -------------------------------------------------------------------------------------


def test_the_kernel_taken_is_compared_with_the_fastest_one(spec: Path, tmp_path: Path) -> None:
    report = bench(OracleSuite(spec, BenchOptions(rounds=1), 90), lambda so_far, line: None)
    assert [row.shape for row in report.rows] == list(SHAPES)
    assert [len(row.measured) for row in report.rows] == [3, 4]  # what packs heads has nothing to pack there
    assert report.fit is not None
    figures = tmp_path / "figures.json"
    output = run(spec, "--oracle", "--rounds", 1, "--json", figures)
    assert "in the mean of 2 calls" in output
    assert len(json.loads(figures.read_text())["fit"]["rows"]) == 3
    times = output[output.index("tuned: 1\n") :]  # a file of its own
    assert len(checked(TimesModel, tree.parse(times.encode(), "times.yaml")).times) == 3
    assert "--cell is not for the comparison" in run(spec, "--oracle", "--cell", "a", code=2)


def kernels() -> list[Any]:
    return [kernel_of(one.plan) for one in prepare_unrendered(load_spec_text(SPEC)) if one.plan.head_dim_qk == 64]


def test_the_kernel_taken_costs_more_where_predictions_err() -> None:
    own = [kernel for kernel in kernels() if kernel.variant_name == "full"]
    shape = Shape("full", 64, 1, 16, 16, 2048, 2048)
    times = {kernel.name: 50.0 + kernel.tile_m for kernel in own}
    with drivers.use(FakeDriver()):
        results = [
            Result(name, name, "measured", timing=Timing((time / 1e3,), 1.0, True)) for name, time in times.items()
        ]
        row = compared(shape, own, results, Card(132))
    assert row.best == min(times, key=times.__getitem__)
    assert row.taken == min(row.predicted, key=row.predicted.__getitem__)
    assert row.taken is not None
    assert row.lost == pytest.approx(times[row.taken] / times[row.best] - 1)


def test_constants_are_recovered_from_times_that_follow_them() -> None:
    expected = {64: (2100.0, 900.0, 700.0), 128: (2100.0, 1100.0, 1200.0), 192: (2100.0, 1300.0, 1500.0)}
    timed = []
    for kernel in kernels():
        if kernel.split_kv or kernel.pack_gqa:
            continue
        for shape in oracle_shapes():
            if (shape.variant, shape.head_dim) == (kernel.variant_name, 64):
                call = call_of(shape, preset(shape.variant))
                prediction = predict(kernel, call, Card(132), expected[kernel.tile_m])
                assert prediction is not None
                timed.append(Timed(kernel, call, prediction.microseconds))
    fitted = fit(timed, Card(132))
    assert fitted.launch_ns == pytest.approx(2100, rel=0.02)
    assert fitted.error < 0.01
    for row in fitted.rows:
        assert row.step_ns == pytest.approx(expected[64 * row.warps.consumer][2], rel=0.01)
        assert row.work_tile_ns == pytest.approx(expected[64 * row.warps.consumer][1], rel=0.2)


def test_inputs_know_their_expected_output() -> None:
    inputs = SmallInputs(SHAPES[0], torch.device("cpu"), 10**5, torch.Generator().manual_seed(0))
    assert (len(inputs.sets) - 1) * SHAPES[0].input_bytes < 2 * 10**5 <= len(inputs.sets) * SHAPES[0].input_bytes
    q, k, v = (each.double() for each in inputs.sets[-1])
    from attngen.runtime.operations.attention.entry import attention

    out = attention(q, k, v, variant=preset("full"), backend="reference")
    assert isinstance(out, torch.Tensor)
    assert inputs.error(out) < 1e-12
    assert inputs.error(out * 1.5) == pytest.approx(0.5)


# --- without pauses -----------------------------------------------------------------------------------------------


def test_the_next_sample_is_enqueued_before_the_last_is_waited_for() -> None:
    log: list[str] = []

    class Logging(FakeClock):
        def milliseconds(self, start: float, end: float) -> float:
            log.append("wait")
            self.host += 1.0
            return end - start

    clock = Logging()

    def work(name: str, took: float) -> Work:
        def enqueue() -> None:
            log.append(name)
            clock.gpu += took

        return Work(enqueue, 4)

    one, other = sustain([work("a", 8.0), work("b", 20.0)], clock, 3, random.Random(0))
    assert one.samples == [2.0] * 3
    assert other.samples == [5.0] * 3
    assert log[0] != "wait"
    assert log[1] != "wait"
    assert log[2::2] == ["wait"] * 7
    assert log[-1] == "wait"
    spans = sorted(one.spans + other.spans)
    assert all(low < high for low, high in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
