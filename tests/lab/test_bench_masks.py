"""The masks suite without a GPU: each case is one function in both forms; times, ratios and limits; the time limit."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from attngen import cli
from attngen.errors import CallError
from attngen.lab.bench import runner
from attngen.lab.bench.machine import Ceilings
from attngen.lab.bench.masks import contenders, first_calls, maps, rivals
from attngen.lab.bench.masks import suite as tool
from attngen.lab.bench.masks.cases import mask_cases
from attngen.lab.bench.masks.cases.forms import Forms, MaskCase, Size
from attngen.lab.bench.masks.contenders import Contenders
from attngen.lab.bench.masks.report import (
    CAUSAL,
    CONSTANTS,
    CUDNN_BLOCKS,
    CUDNN_FLEX,
    CUEQUIVARIANCE,
    FASTVIDEO,
    FLEX,
    FRONT_END,
    RIVALS,
    SCALARS,
    UNLEARNED,
    MaskCell,
    MaskReport,
    MaskResult,
    MaskRow,
)
from attngen.lab.bench.masks.suite import MaskSuite, Ready, cells_of, compare, row_of, timed
from attngen.lab.bench.runner import BenchOptions
from attngen.lab.bench.timing import Timing
from attngen.lab.commands import bench_masks as command
from attngen.store.jobs import JobResult
from tests.lab.bench_support import FakeMonitor, StubCudnn, TickClock, bench_on_cpu, masked, of_lists, without_libraries
from tests.sampling import few

CPU = torch.device("cpu")
CASES = {case.name: case for case in mask_cases()}


def small(case: MaskCase) -> MaskCell:
    """A cell that plain torch computes in no time; videos need some tokens for each of their tiles, and pairs have as
    many rows as tokens."""
    return MaskCell(case, 24 if case.rows_of_pairs else 192 if case.seqlen else 100, 8, 8)


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, enable_gqa: bool, fault: float = 0.0
) -> Tensor:
    """FlexAttention's definition in plain torch: torch itself has no gradients on the CPU."""
    heads, seqlen = q.shape[1], q.shape[2]
    if enable_gqa:
        k, v = (one.repeat_interleave(heads // k.shape[1], 1) for one in (k, v))
    b = torch.arange(q.shape[0], dtype=torch.int32)[:, None, None, None]
    h = torch.arange(heads, dtype=torch.int32)[:, None, None]
    row, column = torch.arange(seqlen, dtype=torch.int32)[:, None], torch.arange(seqlen, dtype=torch.int32)[None]
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if score_mod is None else score_mod(s, b, h, row, column)
    seen = torch.isfinite(s)
    if block_mask is not None:
        seen = seen & block_mask.mask_mod(b, h, row, column)
    p = torch.where(seen, s - s.detach().masked_fill(~seen, 0).amax(-1, keepdim=True), 0).exp() * seen
    return p / p.sum(-1, keepdim=True).clamp(min=1e-300) @ v + fault


@pytest.fixture
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.of_torch, "flex_attention", dense)


# --- cases --------------------------------------------------------------------------------------------------------


def test_there_are_enough_cases_with_names_of_their_own() -> None:
    assert len(mask_cases()) >= 40
    assert len({case.identifier for case in mask_cases()}) == len(CASES) == len(mask_cases())


@few("name", CASES, always=(0, 36), often=range(0, 99, 3))
def test_both_forms_are_one_function(name: str, plain_flex: None) -> None:
    """Outputs and gradients of all attngen rows are those of FlexAttention's form, in float64."""
    cell = small(CASES[name])
    ready = compare(cell, CPU, {})
    assert set(ready.results) == {*ready.contenders.names(), *RIVALS}
    for each in ready.results.values():
        if each.contender in RIVALS:
            continue
        assert each.status == "compared", each.reason
        assert (each.error is None) == (each.contender in (FLEX, CAUSAL))
        assert (each.error or 0) < 1e-6  # scores in float32 in one of the forms
    assert 0 < row_of(ready).tiles <= 4 * 8 * cell.batch
    forms = ready.contenders.forms
    seen = forms.hides or forms.mask_mod
    if seen is not None:
        rows = torch.arange(cell.seqlen, dtype=torch.int32)
        pairs = seen(torch.zeros(1, dtype=torch.int32), torch.arange(8)[:, None, None], rows[:, None], rows)
        assert 0 < pairs.float().mean() < 1


def test_a_wrong_form_is_noticed(plain_flex: None) -> None:
    cell = small(CASES["sliding window"])
    make = cell.case.make
    other = replace(cell.case, make=lambda size: replace(make(size), mask="q >= kv and q - kv <= window"))
    ready = compare(replace(cell, case=other), CPU, {})
    reasons = {name: each.reason for name, each in ready.results.items() if each.status == "failed"}
    assert set(reasons) == {CONSTANTS, SCALARS}
    assert "differs from FlexAttention by" in str(reasons[CONSTANTS])
    assert FRONT_END in ready.runnable


def test_wrong_gradients_of_learned_tensors_are_noticed(plain_flex: None) -> None:
    cell = small(CASES["gate of each head, learned"])
    make = cell.case.make

    def wrong(size: Size) -> Forms:
        forms = make(size)
        gate = forms.tensors["gate"]
        return replace(forms, score_mod=lambda s, b, h, q, kv: s * torch.sigmoid(2 * gate[h] - gate[h].detach()))

    ready = compare(replace(cell, case=replace(cell.case, make=wrong)), CPU, {})
    assert "gradients of its tensors differ" in str(ready.results[CONSTANTS].reason)
    assert ready.results[UNLEARNED].status == "compared"


# --- other libraries ----------------------------------------------------------------------------------------------


class StubLibrary(StubCudnn):
    """All libraries in plain torch; ``fault`` is added to their outputs."""

    fault = 0.0

    @classmethod
    def flex_attn_func(cls, *args: Any, **options: Any) -> Tensor:
        return StubCudnn.flex_attn_func(*args, **options) + cls.fault

    @staticmethod
    def block_sparse_attn_from_indices(
        q: Tensor, k: Tensor, v: Tensor, lists: Tensor, counts: Tensor, sizes: Tensor
    ) -> tuple[Tensor, None]:
        (block,) = set(sizes.tolist())
        assert len(sizes) * block == k.shape[2]
        return masked(q, k, v, of_lists(lists, counts, block, q.shape[2])), None

    @staticmethod
    def triangle_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        batch, rows, heads, seqlen, _ = q.shape
        assert bias.shape == (batch, 1, heads, seqlen, seqlen)
        assert mask.shape == (batch, rows, 1, 1, seqlen)
        every = [masked(q[:, row], k[:, row], v[:, row], mask[:, row], bias[:, 0]) for row in range(rows)]
        return torch.stack(every, 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[StubLibrary]:
    """As if every library were installed."""
    own = type("Library", (StubLibrary,), {})
    monkeypatch.setattr(rivals, "lacking", lambda *names: None)
    monkeypatch.setattr(rivals, "import_module", lambda name: own)
    return own


def taken(name: str, side: int | None = None) -> dict[str, MaskResult]:
    """The results of the libraries that take a case, in which blocks have ``side`` tokens."""
    cell = small(CASES[name]) if side is None else MaskCell(CASES[name], 4 * side, 8, 2)
    results = compare(cell, CPU, {}).results
    assert {one.status for one in results.values() if not one.peer} == {"compared"}
    return {one: results[one] for one in RIVALS if results[one].status != "unsupported"}


@pytest.mark.usefixtures("plain_flex", "library")
@few(
    ("name", "side", "names"),
    [
        ("sliding window", None, {CUDNN_FLEX}),
        ("window of each head", None, {CUDNN_FLEX}),
        ("blocks of 64 by lists", 64, {CUDNN_FLEX, CUDNN_BLOCKS, FASTVIDEO}),
        ("blocks of 128 by lists", 128, {CUDNN_FLEX, CUDNN_BLOCKS}),
        ("pair bias of folding, learned", None, {CUEQUIVARIANCE}),
        ("triangle attention, learned", None, {CUEQUIVARIANCE}),
        ("ALiBi", None, set()),
    ],
    always=(2, 6),
)
def test_libraries_compute_what_they_take(name: str, side: int | None, names: set[str]) -> None:
    """Outputs and all gradients are those of FlexAttention's form, in float64."""
    results = taken(name, side)
    assert set(results) == names
    assert all(one.status == "compared" and one.error is not None and one.error < 1e-6 for one in results.values())


@pytest.mark.usefixtures("plain_flex")
def test_a_library_that_is_wrong_or_raises_is_left_out(library: Any) -> None:
    library.fault = 0.1
    assert "differs from FlexAttention" in str(taken("sliding window")[CUDNN_FLEX].reason)
    library.flex_attn_func = None
    results = compare(small(CASES["sliding window"]), CPU, {}).results
    assert (results[CUDNN_FLEX].status, results[CUDNN_FLEX].peer) == ("unsupported", True)
    assert str(results[CUDNN_FLEX].reason).startswith("TypeError")
    assert results[CUDNN_BLOCKS].reason == "takes lists of blocks only"
    assert MaskReport(rows=(row_of(compare(small(CASES["sliding window"]), CPU, {})),)).ok


def test_libraries_that_are_not_installed_say_how_to_get_them(
    plain_flex: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_libraries(monkeypatch)
    suite = MaskSuite(BenchOptions(cells=("sliding window",)))
    command.print_plan(runner.dry_run(suite))
    printed = capsys.readouterr().out
    assert "cuDNN flex: not installed; pip install nvidia-cudnn-frontend" in printed
    assert "FastVideo: not installed; pip install fastvideo-kernel" in printed
    assert "cuEquivariance: not installed; pip install cuequivariance-torch" in printed


def test_what_failed_in_another_process_is_not_called_here(plain_flex: None) -> None:
    ready = compare(small(CASES["sliding window"]), CPU, {CONSTANTS: "CrashError: died", SCALARS: 1.5})
    assert ready.results[CONSTANTS] == MaskResult(CONSTANTS, status="failed", reason="CrashError: died")
    assert ready.results[SCALARS].first == 1.5
    assert CONSTANTS not in ready.runnable


def test_tiles_are_those_of_the_mask() -> None:
    """Also of a mask that heads do not share, and of one that a score stands for."""
    for name in ("sliding window", "window of each head", "documents in the score", "tanh", "sliding tiles"):
        cell = MaskCell(CASES[name], 700, 16, 8)
        made = Contenders.of(cell, CPU)
        seen = made.forms.hides or made.forms.mask_mod or (lambda b, h, q, kv: q == q + 0 * kv)
        rows = torch.arange(768, dtype=torch.int32).clamp(max=699)
        heads = torch.arange(8)[:, None, None]
        pairs = seen(torch.zeros(1, dtype=torch.int32), heads, rows[:, None], rows).expand(8, 768, 768)
        assert made.tiles() == int(pairs.view(8, 6, 128, 6, 128).any(4).any(2).sum()), name


def test_bytes_of_tensors_over_pairs_are_those_of_visited_tiles() -> None:
    for name, size in (("random bools", 1), ("random bools of heads", 8), ("bias of pairs", 2), ("ALiBi", 0)):
        made = Contenders.of(MaskCell(CASES[name], 256, 16, 8), CPU)
        assert made.pair_bytes(8 * 3) == size * 3 * 128 * 128


# --- times --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_cell_is_timed_in_both_directions(plain_flex: None) -> None:
    row = timed(bench_on_cpu(rounds=2, pauseless_ms=15.0), compare(small(CASES["relative table, learned"]), CPU, {}))
    measured = [one for one in row.results if one.status == "measured"]
    assert {one.contender for one in measured} == {FLEX, CONSTANTS, FRONT_END, UNLEARNED, CAUSAL}
    assert all("not installed" in str(one.reason) for one in row.results if one not in measured)
    for one in measured:
        assert {each: len(timing.samples) for each, timing in one.timings.items()} == {"forward": 2, "backward": 2}
    assert row.learns
    assert row.scored


def test_a_cell_that_raises_has_no_times(plain_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = compare(small(CASES["causal"]), CPU, {})
    monkeypatch.setattr(runner, "without_pauses", lambda *_: 1 / 0)
    row = timed(bench_on_cpu(rounds=2, pauseless_ms=15.0), ready)
    assert {one.status for one in row.results} == {"failed"}
    assert not MaskReport(rows=(row,)).ok


def test_one_that_fails_when_it_is_timed_is_named(plain_flex: None) -> None:
    ready = compare(small(CASES["causal"]), CPU, {})
    ready.runnable[FLEX] = replace(ready.runnable[FLEX], call=lambda: 1 / 0)
    row = timed(bench_on_cpu(rounds=2, pauseless_ms=15.0), ready)
    failed = [(one.contender, one.reason) for one in row.results if one.status == "failed"]
    assert failed == [(FLEX, "ZeroDivisionError: division by zero")]


class HeldClock(TickClock):
    """Marks are as far apart as the calls between them; counts the calls that were held."""

    held = 0

    def hold(self, milliseconds: float) -> None:
        self.held += 1


class MadeMaps(dict[object, Any]):
    """Kept maps, by a call that makes those of two launches if they were dropped."""

    clear_count = 0

    def clear(self) -> None:
        self.clear_count += 1
        super().clear()

    def call(self) -> None:
        for number, milliseconds in enumerate((0.5, 0.25)):
            self.setdefault(number, SimpleNamespace(times=[(1.0, 1.0 + milliseconds)]))


def test_maps_are_timed_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed call makes its maps again; those of all launches of a backward pass count."""
    made, clock = MadeMaps(), HeldClock()
    monkeypatch.setattr(maps, "KEPT", made)
    monkeypatch.setattr(maps, "kept_maps", lambda: made)
    assert maps.milliseconds_of_maps(made.call, clock) == pytest.approx(0.75)
    assert made.clear_count == clock.held + 1 > 5
    assert not made
    assert maps.milliseconds_of_maps(lambda: None, clock) is None


def test_masks_whose_maps_may_change_are_those_that_read_tensors() -> None:
    for name, reads in {"radial": False, "bigbird": True, "FIRE": False, "documents in the score": True}.items():
        assert Contenders.of(small(CASES[name]), CPU).mask_reads_tensors() == reads


def test_times_of_maps_are_in_the_document_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    own = replace(result(CONSTANTS, 0.5, 0.5, ("forward",)), maps={"forward": 0.125})
    report = MaskReport(rows=(row(own, reads=True), row(own)))
    first, second = report.to_dict()["rows"]
    assert (first["mask_reads_tensors"], second["mask_reads_tensors"]) == (True, False)
    assert first["results"][0]["forward"]["map_milliseconds"] == 0.125
    assert first["results"][0]["backward"]["map_milliseconds"] is None
    command.print_masks(report)
    printed = capsys.readouterr().out
    assert "0.125" in printed
    assert printed.count("0.125 once") == 1


def result(name: str, forward: float, backward: float, mapped: Sequence[str] = ()) -> MaskResult:
    timings = {"forward": Timing((forward,) * 3, 1.0, True), "backward": Timing((backward,) * 3, 1.0, True)}
    return MaskResult.of(name, status="measured", timings=timings, mapped=frozenset(mapped))


CELL = MaskCell(CASES["sliding window"], 1024, 128, 8)  # 36 * 8 tiles of causal


def row(*results: MaskResult, **facts: Any) -> MaskRow:
    causal = result(CAUSAL, 0.36, 0.72)
    return MaskRow(cell=CELL, results=(*results, causal), **{"tiles": 18 * 8, **facts})


def test_ratios_to_flex_attention_and_to_causal() -> None:
    first = row(result(FLEX, 0.4, 1.0), result(CONSTANTS, 0.2, 1.25), result(UNLEARNED, 0.1, 0.1))
    own = first.results[1]
    assert first.speed(own, "forward") == pytest.approx(2.0)
    assert first.speed(own, "backward") == pytest.approx(0.8)
    assert first.to_causal(own, "forward") == pytest.approx(0.2 / 0.36 * 2)
    assert first.speed(first.results[2], "backward") is None  # it computes less than FlexAttention does
    report = MaskReport(rows=(first, row(result(FLEX, 0.8, 1.0), result(CONSTANTS, 0.1, 1.0))))
    assert report.mean(CONSTANTS, "forward") == pytest.approx((4.0, 2.0, 2))
    assert report.mean(SCALARS, "forward") is None
    assert report.slower == ["sliding window d128 1k: attngen, backward: 0.80 x"]


@pytest.mark.parametrize(
    ("facts", "mapped", "head_dim", "limit"),
    [
        ({}, (), 128, 1.25),
        ({}, ("forward",), 128, 1.4),
        ({"scored": True}, (), 128, 1.35),
        ({"scored": True}, (), 64, 1.5),
        ({"scored": True}, ("forward",), 128, 1.4),
        ({"pair_bytes": 1}, ("forward",), 128, 1.6),
        ({"pair_bytes": 720_000_000}, (), 128, 2.5),  # 0.45 ms at 80 % of 2 TB/s
    ],
)
def test_limits_of_a_tile(facts: dict[str, Any], mapped: Sequence[str], head_dim: int, limit: float) -> None:
    one = replace(row(result(CONSTANTS, 0.45, 0.1, mapped), **facts), cell=replace(CELL, head_dim=head_dim))
    assert one.limit(one.results[0], "forward", 2000.0) == pytest.approx(limit)
    lines = one.beyond(2000.0)
    assert len(lines) == (limit < 2.5)
    if lines:
        assert lines[0].endswith(f"attngen, forward: 2.50 x causal per tile, limit {limit:.2f}")


def test_learned_tensors_are_compared_with_the_same_backward_without_them() -> None:
    one = row(result(CONSTANTS, 0.1, 0.6), result(UNLEARNED, 0.1, 0.4), learns=True)
    assert one.beyond(None) == [
        "sliding window d128 1k: attngen, backward: 1.50 x without gradients of its tensors, limit 1.30"
    ]
    assert replace(one, pair_bytes=1).beyond(None) == []


def test_the_document_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    failed = MaskResult(FRONT_END, status="failed", reason="CallError: no")
    own = replace(result(CONSTANTS, 0.5, 0.5), first=2.0, second=0.6, error=1e-3)
    report = MaskReport(
        rows=(row(result(FLEX, 0.4, 1.0), own, failed),),
        ceilings=Ceilings(700, 4000), not_run=("tanh d128 8k",), rounds=3,
    )  # fmt: skip
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["means"][CONSTANTS]["forward"] == {
        "mean": pytest.approx(0.8),
        "least": pytest.approx(0.8),
        "cells": 1,
    }
    assert document["rows"][0]["speed"][CONSTANTS]["backward"] == 2.0
    assert document["rows"][0]["results"][1]["forward"]["milliseconds"] == 0.5
    assert document["not_run"] == ["tanh d128 8k"]
    assert not report.ok
    command.print_masks(report)
    captured = capsys.readouterr()
    assert "slower than FlexAttention: 1\n  sliding window d128 1k: attngen, forward: 0.80 x" in captured.out
    assert "beyond the limits of a tile: 2" in captured.out
    assert "not run, for lack of time: 1\n  tanh d128 8k" in captured.out
    assert "sliding window d128 1k: attngen, front end: CallError: no" in captured.err


# --- cells and time -----------------------------------------------------------------------------------------------


def test_cells_are_chosen_by_parts_of_their_names() -> None:
    every = cells_of(BenchOptions())
    assert len(every) == len(CASES)
    assert {cell.name for cell in every} >= {"sliding tiles d128 69376", "natten 3-D d128 24k", "tanh d128 8k"}
    named = cells_of(BenchOptions(cells=("tiles", "tanh"), seqlens=(8192, 16384), head_dims=(64, 128)))
    assert [cell.name for cell in named] == [
        "sliding tiles d64 69376", "tanh d64 8k", "tanh d64 16k", "sliding tiles d128 69376", "tanh d128 8k",
        "tanh d128 16k",
    ]  # fmt: skip
    with pytest.raises(CallError, match="no cell of the masks suite has 'tahn' in its name; did you mean 'tanh'"):
        cells_of(BenchOptions(cells=("tahn",)))


def test_tensors_over_pairs_end_at_16k() -> None:
    assert not cells_of(BenchOptions(seqlens=(32768,)))[0].case.max_seqlen
    with pytest.raises(CallError, match="no cell"):
        cells_of(BenchOptions(cells=("random bools",), seqlens=(32768,)))


@pytest.mark.exhaustive
def test_processes_stop_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished processes return their results when time is up, and the others are killed."""
    monkeypatch.setattr(first_calls, "_LOAD", "time:sleep")  # fails, which is no error
    monkeypatch.setattr(first_calls, "_FIRST", "tests.lab.test_bench_masks:sleep_but_once")
    cells = [MaskCell(CASES[name], 128, 8, 8) for name in ("tanh", "causal", "softcap")]
    began = time.monotonic()
    ends, results = [began + 60], []
    for one in first_calls.in_processes(cells, {}, 2, lambda: ends[-1]):
        results.append(one.value)
        ends.append(time.monotonic() + 1)
    assert results == [{FLEX: 1.0}]
    assert time.monotonic() - began < 60


def sleep_but_once(environment: dict[str, str], sizes: tuple[str, int, int], last: bool) -> dict[str, float | str]:
    if sizes[0] != "tanh":
        time.sleep(100)
    return {FLEX: 1.0}


def test_cells_without_time_are_not_prepared(plain_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing ends while there is time to measure what is prepared; a process that died fails its cell."""
    ends: list[float] = []

    def in_processes(cells: Sequence[MaskCell], environment: Any, jobs: Any, until: Any) -> Any:
        ends.append(until())
        yield JobResult(0, value={})
        ends.append(until())
        yield JobResult(1, error=CallError("died of SIGSEGV"))

    monkeypatch.setattr(first_calls, "in_processes", in_processes)
    monkeypatch.setattr(MaskSuite, "_read_kernels", lambda self: None)
    suite = MaskSuite(BenchOptions(rounds=2))
    suite.cells = [small(CASES[name]) for name in ("tanh", "causal", "softcap")]
    suite._deadline = 1000.0
    first, second = suite.prepared(CPU)
    assert ends == [1000.0, pytest.approx(1000.0 - tool.expected_seconds(first, 2))]
    assert tool.expected_seconds(first, 2) > 0
    assert second.results[CONSTANTS].reason == "CallError: died of SIGSEGV"
    assert isinstance(second, Ready)
    assert not timed(bench_on_cpu(), second).tiles


@dataclass(frozen=True)
class FakeGpu:
    device: torch.device = CPU

    def answers(self) -> bool:
        return True


@pytest.mark.exhaustive
@pytest.mark.usefixtures("plain_flex")
def test_a_whole_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cells are compared and timed in turn, reports are written meanwhile, and what there is no time for is named."""

    def in_processes(cells: Sequence[MaskCell], environment: Any, jobs: Any, until: Any) -> Any:
        yield JobResult([cell.case.name for cell in cells].index("sliding window"), value={CONSTANTS: 2.5})
        yield JobResult([cell.case.name for cell in cells].index("tanh"), value={FRONT_END: "CallError: no"})

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(runner.Gpu, "current", FakeGpu)
    monkeypatch.setattr(runner, "gpu_facts", lambda gpu: {"name": "a card", "l2_bytes": 1})
    monkeypatch.setattr(runner, "ceilings", lambda *_: Ceilings(700, 4000))
    monkeypatch.setattr(runner, "Monitor", FakeMonitor)
    monkeypatch.setattr(runner, "CudaClock", TickClock)
    monkeypatch.setattr(first_calls, "in_processes", in_processes)
    chosen = (
        "--cell",
        "tanh",
        "--cell",
        "sliding window",
        "--cell",
        "board of pairs",
        "--seqlen",
        100,
        "--head-dim",
        8,
    )
    path = tmp_path / "masks.json"
    output = run("--suite", "masks", *chosen, "--rounds", 2, "--json", path, code=cli.EXIT_FAILURE)
    assert "[1/3] compared sliding window d8 100" in output
    assert "[2/2] tanh d8 100: FlexAttention " in output
    assert "not run, for lack of time: 1\n  checkerboard of pairs d8 100" in output
    assert "tanh d8 100: attngen, front end: CallError: no" in output
    document = json.loads(path.read_text())
    assert [one["name"] for one in document["rows"]] == ["sliding window d8 100", "tanh d8 100"]
    by_name = {one["contender"]: one for one in document["rows"][0]["results"]}
    assert by_name[CONSTANTS]["first_seconds"] == 2.5
    assert {by_name[name]["status"] for name in by_name.keys() - set(RIVALS)} == {"measured"}
    assert {by_name[name]["status"] for name in RIVALS} == {"unsupported"}
    assert document["means"][CONSTANTS]["backward"]["cells"] == 2


# --- the command --------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.group, ["bench", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_a_dry_run_lists_cells(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output = run("--suite", "masks", "--dry-run", "--cell", "natten", "--head-dim", 64, "--json", path)
    assert "natten 3-D dilated d64 24k" in output
    assert "masks: 4 cells; nothing was measured" in output
    assert [one["name"] for one in json.loads(path.read_text())["rows"]][:2] == [
        "natten 3-D d64 24k", "natten 3-D dilated d64 24k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--suite", "grid"), "Missing argument 'SPEC'; only --suite masks and trees take none"),
        (("specs/hopper.yaml", "--suite", "masks"), "SPEC is not for masks"),
        (("--suite", "masks", "--ladder"), "--ladder is not for masks"),
        (("specs/hopper.yaml", "--limit", 9), "--limit is for masks"),
        (("specs/hopper.yaml", "--suite", "small", "--head-dim", 64), "--head-dim is for masks"),
    ],
)
def test_options_that_do_not_fit(arguments: Sequence[object], says: str) -> None:
    assert says in run(*arguments, code=2)


def test_without_a_gpu_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "bench needs an NVIDIA GPU" in run("--suite", "masks", code=cli.EXIT_FAILURE)
