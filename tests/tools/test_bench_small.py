"""Small calls without a GPU: their shapes, their race, and the kernel that is taken beside the fastest one."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.prediction import Card, predict
from attngen.schema import load_spec_text, preset
from attngen.tools.bench import kernels as bench_kernels
from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.serving import replay
from attngen.tools.bench.small import oracle as oracle_tool
from attngen.tools.bench.small import run as tool
from attngen.tools.bench.small.fit import Timed, fit
from attngen.tools.bench.small.inputs import Inputs, call_of
from attngen.tools.bench.small.oracle import compare, compared
from attngen.tools.bench.small.run import SmallOptions, bench_small
from attngen.tools.bench.small.shapes import WINDOW, Shape, oracle_shapes, small_shapes
from attngen.tools.bench.timing import Work, sustain
from attngen.tools.build.pipeline import BuiltKernel, Failure, Prepared, prepare
from attngen.tools.verify.gpu import Gpu
from attngen.tools.verify.interpreter import kernel_of
from tests.runtime.support import FakeDriver
from tests.tools.bench_support import FakeClock, StubPeer, TickClock
from tests.tools.test_bench import FakeMonitor
from tests.tools.test_bench_serving import replayed

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
    plans: dict[str, Any] = {}

    def compile_kernels(prepared: Sequence[Prepared], **_: Any) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
        plans.update({kernel.plan.name: kernel.plan for kernel in prepared})
        return {name: BuiltKernel(name, name, "built", {}) for name in plans}, ()

    class Monitor(FakeMonitor):
        def within(self, spans: Sequence[tuple[float, float]]) -> Reading:
            assert spans
            return Reading(1500.0, 600.0, 60.0)

    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Gpu, "current", lambda: Gpu(torch.device("cpu"), 90, "a stand-in"))
    monkeypatch.setattr(Gpu, "answers", lambda self: True)
    monkeypatch.setattr(bench_kernels, "compile_kernels", compile_kernels)
    monkeypatch.setattr(bench_kernels, "read_kernel", lambda folder: kernel_of(plans[folder.name]))
    monkeypatch.setattr(replay, "_ENQUEUED", 1)
    for module in (tool, oracle_tool):
        for name, value in {
            "gpu_facts": lambda gpu: {"name": gpu.name, "l2_bytes": 1},
            "ceilings": lambda gpu, clock, rounds: Ceilings(750.0, 4300.0),
            "small_peers": lambda: (
                StubPeer("good"), StubPeer("wrong", lambda out: out + 1.0), StubPeer("gone", absent="no"),
            ),
            "cuda_graph": replayed,
            "CudaClock": TickClock,
            "Monitor": Monitor,
            "small_shapes": lambda: SHAPES,
            "oracle_shapes": lambda: SHAPES,
        }.items():  # fmt: skip
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    with drivers.use(FakeDriver()):
        yield path


@pytest.mark.parametrize("sustained", [False, True])
def test_a_whole_run(spec: Path, sustained: bool) -> None:
    seen: list[int] = []
    options = SmallOptions(rounds=2, sustained=sustained)
    report = bench_small(spec, options, lambda so_far, total: seen.append(len(so_far.rows)))
    assert seen == [1, 2]
    first = report.rows[0]
    statuses = {one.contestant: one.status for one in first.results}
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
    found = tmp_path / "found.json"
    output = run(spec, "--suite", "small", "--rounds", 1, "--sustained", "--json", found)
    assert "full d64 b2 4/2 40" in output
    assert "J / TFLOP" in output
    assert "wrong: wrong: error" in output
    assert json.loads(found.read_text())["sustained"] is True
    output = run(spec, "--suite", "small", "--dry-run", "--cell", "causal")
    assert output.splitlines()[-1] == "mine: 1 call; nothing was measured"
    assert "did you mean" in run(spec, "--suite", "small", "--cell", "cousal d64 b1 2 33 at 70", code=2)
    assert "the spec has none" in run(spec, "--suite", "small", "--kernel", "d96", code=2)
    assert "no library has" in run(spec, "--suite", "small", "--peer", "cuttlas", code=2)
    assert "--tokens is not for the suite of small calls" in run(spec, "--suite", "small", "--tokens", 4, code=2)


# --- the kernel that is taken -------------------------------------------------------------------------------------


def test_the_fastest_is_found_and_the_loss_told(spec: Path, tmp_path: Path) -> None:
    report = compare(spec, None, 1, None, lambda so_far, total: None)
    assert [row.shape for row in report.rows] == list(SHAPES)
    assert [len(row.measured) for row in report.rows] == [3, 4]  # what packs heads has nothing to pack there
    assert report.fit is not None
    found = tmp_path / "found.json"
    output = run(spec, "--oracle", "--rounds", 1, "--json", found)
    assert "in the mean of 2 calls" in output
    assert len(json.loads(found.read_text())["fit"]["rows"]) == 3
    assert "--cell is not for the comparison" in run(spec, "--oracle", "--cell", "a", code=2)


def kernels() -> list[Any]:
    return [kernel_of(one.plan) for one in prepare(load_spec_text(SPEC)) if one.plan.head_dim_qk == 64]


def test_what_is_taken_costs_more_where_predictions_err() -> None:
    own = [kernel for kernel in kernels() if kernel.variant_name == "full"]
    shape = Shape("full", 64, 1, 16, 16, 2048, 2048)
    times = {kernel.name: 50.0 + kernel.tile_m for kernel in own}
    with drivers.use(FakeDriver()):
        row = compared(shape, own, times, Card(132))
    assert row.best == min(times, key=times.__getitem__)
    assert row.taken == min(row.predicted, key=row.predicted.__getitem__)
    assert row.lost == times[row.taken] / times[row.best] - 1


def test_constants_are_recovered_from_times_that_follow_them() -> None:
    wanted = {64: (2100.0, 900.0, 700.0), 128: (2100.0, 1100.0, 1200.0), 192: (2100.0, 1300.0, 1500.0)}
    timed = []
    for kernel in kernels():
        if kernel.split_kv or kernel.pack_gqa:
            continue
        for shape in oracle_shapes():
            if (shape.variant, shape.head_dim) == (kernel.variant_name, 64):
                call = call_of(shape, preset(shape.variant))
                found = predict(kernel, call, Card(132), wanted[kernel.tile_m])
                assert found is not None
                timed.append(Timed(kernel, call, found.microseconds))
    found = fit(timed, Card(132))
    assert found.launch == pytest.approx(2100, rel=0.02)
    assert found.error < 0.01
    for row in found.rows:
        assert row.step == pytest.approx(wanted[64 * row.consumers][2], rel=0.01)
        assert row.tile == pytest.approx(wanted[64 * row.consumers][1], rel=0.2)


def test_inputs_know_what_their_output_should_be() -> None:
    inputs = Inputs(SHAPES[0], torch.device("cpu"), 10**5, torch.Generator().manual_seed(0))
    assert (len(inputs.sets) - 1) * SHAPES[0].input_bytes < 2 * 10**5 <= len(inputs.sets) * SHAPES[0].input_bytes
    q, k, v = (each.double() for each in inputs.sets[-1])
    from attngen.runtime.calls.entry import attention

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
