"""The ladder: one choice more in each rung, entries that build the rungs, and refused steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.lab.bench.cases import bench_cases
from attngen.lab.bench.grid import GridReport, GridRow, steps
from attngen.lab.bench.ladder import RUNGS, Ladder, ladders, reason_against
from attngen.plan import plan
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, load_spec_text
from tests.lab.bench_support import result


def prepared(*entries: str) -> list[Prepared]:
    lines = "".join(f"  - {{{entry}, backend: cuda}}\n" for entry in entries)
    return prepare_unrendered(
        load_spec_text(f"schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n{lines}", "mine.yaml")
    )


def ladder_of(entry: str) -> Ladder:
    (ladder,) = ladders(prepared(entry))
    return ladder


def test_each_rung_changes_its_own_lines_only() -> None:
    ladder = ladder_of("variant: causal, head_dim: 128")
    assert tuple(rung.name for rung in ladder.rungs) == RUNGS
    first, *others = ladder.rungs
    assert first.changed == first.lines
    assert [rung.changed for rung in others] == [
        (
            "tile: {m: 128, n: 128}",
            "pipeline: {stages: 2}",
            "warps: {producer: 1, schedule: cooperative, overlap: false}",
            "loads: descriptor",
        ),
        ("warps: {producer: 1, schedule: cooperative, overlap: true}",),
        ("warps: {producer: 1, schedule: pingpong, overlap: true}",),
        ("epilogue: staged",),
        ("softmax: lazy",),
        ("softmax: first_max",),
        ("persistent: true", "order: longest_first"),
    ]
    plans = [rung.plan for rung in ladder.rungs]
    assert plans[-1] == ladder.of  # the kernel of the spec itself
    assert len({one.name for one in plans if one}) == len(RUNGS)
    assert plans[0] is not None
    assert (plans[0].schedule, plans[0].arch.name) == ("mma_forward", "sm90a")
    assert {one.schedule for one in plans[1:] if one} == {"hopper_forward"}
    assert len({(one.tile_m, one.tile_n, one.stages) for one in plans[1:] if one}) == 1


@pytest.mark.parametrize(
    "entry",
    [
        "variant: causal, head_dim: 128",
        "variant: full, head_dim: {qk: 192, v: 128}, dtype: fp16, fast_math: false, allow: [spill]",
        "variant: full, head_dim: 128, tile: {m: 192, n: 80}, warps: {registers: {producer: 24, consumer: 160}}",
    ],
)
def test_the_printed_entry_builds_the_rung(entry: str) -> None:
    for rung in ladder_of(entry).rungs:
        text = "\n    ".join(rung.lines)
        spec = load_spec_text(f"schema: 1\npackage: mine\nkernels:\n  - {text}\n", "mine.yaml")
        (kernel,) = expand(spec)
        assert plan(kernel) == rung.plan, rung.name


def test_a_refused_step_is_left_out_of_those_behind_it() -> None:
    rungs = {rung.name: rung for rung in ladder_of("variant: full, head_dim: 64, warps: {consumer: 1}").rungs}
    refused = rungs["ping-pong"]
    assert refused.kernel is None
    assert "pingpong needs at least 2 consumers" in str(refused.refusal)
    assert rungs["TMA store"].changed == ("epilogue: staged",)
    assert "schedule: cooperative" in " ".join(rungs["first max"].lines)


def test_a_ladder_begins_at_its_second_rung_where_mma_sync_cannot_follow() -> None:
    """The products of e5m2 are wgmma's alone."""
    text = "schema: 1\npackage: mine\narch: [sm90a]\nkernels:\n  - {variant: full, head_dim: 128, dtype: fp8_e5m2}\n"
    forward = prepare_unrendered(load_spec_text(text, "mine.yaml"))[0]
    first, second, *_ = ladders([forward])[0].rungs
    assert first.kernel is None
    assert "mma.sync take bf16, fp16 and fp8_e4m3; found fp8_e5m2" in str(first.refusal)
    assert second.kernel is not None
    assert second.changed == second.lines


def test_kernels_that_differ_in_a_rung_share_a_ladder() -> None:
    actual = ladders(prepared(
        "variant: causal, head_dim: 64", "variant: causal, head_dim: 64, softmax: lazy",
        "variant: causal, head_dim: 64, tile: {m: 128, n: 128}",
    ))  # fmt: skip
    assert [(ladder.of.tile_m, ladder.of.softmax) for ladder in actual] == [
        (192, "first_max"),
        (128, "first_max"),
    ]


def test_kernels_for_other_cards_have_none() -> None:
    text = "schema: 1\narch: [sm80, sm90a]\nkernels: [{variant: full, head_dim: 64, backend: cuda, loads: pointer}]\n"
    for kernel in prepare_unrendered(load_spec_text(text, "a.yaml")):
        assert reason_against(kernel.plan) == "a ladder leads to a kernel with warp specialization", kernel.plan.name


def test_triton_kernels_have_none() -> None:
    (triton,) = prepare_unrendered(
        load_spec_text("schema: 1\narch: sm90a\nkernels: [{variant: full, head_dim: 64, backend: triton}]\n", "a.yaml")
    )
    assert reason_against(triton.plan) == "only CUDA kernels have a ladder"
    assert reason_against(prepared("variant: full, head_dim: 64")[0].plan) is None


def test_the_shipped_ladder_is_that_of_its_last_kernel() -> None:
    shipped = [plan(kernel) for kernel in expand(load_spec(specs_dir() / "ladder.yaml"))]
    (ladder,) = ladders(prepared("variant: causal, head_dim: 128"))
    assert [one.name for one in shipped] == [rung.plan.name for rung in ladder.rungs if rung.plan]


# --- figures --------------------------------------------------------------------------------------------------


def test_ratios_to_the_first_rung_to_the_one_before_and_to_the_last() -> None:
    ladder = ladder_of("variant: causal, head_dim: 128")
    speeds = [400.0, 500.0, None, 600.0, 600.0, 660.0, 726.0, 800.0]
    results = [
        replace(result(rung.name, speed, own=True), kernel=rung.plan and rung.plan.name)
        for rung, speed in zip(ladder.rungs, speeds, strict=True)
    ]
    row = GridRow(case=bench_cases("causal", "bf16", 128, 128)[0], results=tuple(results))
    climbed = steps(ladder, row)
    to_previous = [None, 1.25, None, 1.2, 1.0, 1.1, 1.1, 800 / 726]
    assert [step.to_previous for step in climbed] == [ratio and pytest.approx(ratio) for ratio in to_previous]
    assert [step.to_first for step in climbed] == [speed and pytest.approx(speed / 400) for speed in speeds]
    assert [step.to_last for step in climbed] == [speed and pytest.approx(speed / 800) for speed in speeds]
    other = ladder_of("variant: causal, head_dim: 128, tile: {m: 192, n: 64}")
    report = GridReport(rows=(row,), ladders=(ladder, other))
    assert report.rows_of(ladder) == [row]
    assert report.rows_of(other) == []
    nothing = steps(ladder, GridRow(case=row.case, results=tuple(results[:-1])))
    assert {step.to_last for step in nothing} == {None}
    assert [step.to_first for step in nothing][-2:] == [pytest.approx(726 / 400), None]
    assert {step.to_first for step in steps(ladder, GridRow(case=row.case, results=tuple(results[1:])))} == {None}
