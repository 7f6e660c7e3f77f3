"""The serving suite without a GPU: its cells and their contents, replays, reports, and the choice of cells."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import attngen
from attngen import cli
from attngen.build.pipeline import prepare_unrendered
from attngen.lab.bench import graphs
from attngen.lab.bench.graphs import Replays
from attngen.lab.bench.runner import BenchOptions, bench
from attngen.lab.bench.serving import peers as serving
from attngen.lab.bench.serving import suite as tool
from attngen.lab.bench.serving.cells import (
    LATENT_DIMS,
    WINDOW,
    CacheShape,
    Lane,
    Problem,
    ServingCell,
    ancestors,
    cells,
)
from attngen.lab.bench.serving.contents import ServingInputs, ServingOracle
from attngen.lab.bench.serving.peers import FlashMla, ServingSdpa, serving_peers
from attngen.lab.bench.serving.report import ServingReport, ServingResult, ServingRow
from attngen.lab.bench.serving.suite import ServingSuite
from attngen.lab.bench.timing import Contender, Timing, interleaved
from attngen.lab.verify.interpreter import kernel_of
from attngen.operations import APPEND_VARIANT
from attngen.schema import load_spec_text
from tests.lab.bench_support import FakeClock, TickClock, compute_on_the_cpu, replayed
from tests.sampling import sampled

SPEC = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: [causal, softcap], head_dim: 128, dtype: bf16, layout: [dense, paged], split_kv: true}
  - {variant: causal, head_dim: 64, dtype: bf16, layout: paged}
"""
LATENT = """
schema: 1
package: mine
arch: [sm90a]
kernels:
  - {variant: causal, head_dim: {qk: 576, v: 512}, v: key, layout: [dense, paged]}
"""
SMALL = Problem(4, 2, (37, 64, 12), 3)


def contents(problem: Problem = SMALL, l2_bytes: int = 1) -> ServingInputs:
    return ServingInputs(problem, torch.device("cpu"), l2_bytes, torch.Generator().manual_seed(0))


# --- cells ------------------------------------------------------------------------------------------------------


def test_every_cell_has_its_own_name_and_lanes_are_beside_others_of_it() -> None:
    every = cells()
    assert len({cell.name for cell in every}) == len(every)
    for cell in every:
        names = [lane.name for lane in cell.lanes]
        assert len(set(names)) == len(names)
        assert {lane.beside for lane in cell.lanes} <= {None, *names}
    assert len([cell for cell in every if cell.group == "decode"]) == 10


@pytest.mark.parametrize("variant", ["causal", "sliding_window", "tree", "softcap"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_pairs_and_bytes_are_those_of_the_mask(variant: str, tokens: int) -> None:
    problem = Problem(2, 1, (1500, 40), tokens, variant)
    pairs, seen = 0, 0
    tree = ancestors(tokens)
    for length in problem.lengths:
        q = torch.arange(tokens)[:, None]
        position, kv = q + length - tokens, torch.arange(length)[None]
        visible = position >= kv
        if variant == "sliding_window":
            visible &= position - kv < WINDOW
        if variant == "tree":
            own = torch.zeros(tokens, length, dtype=torch.bool)
            own[:, length - tokens :] = torch.tensor(tree)
            visible = (kv < length - tokens) | own
        pairs += 2 * int(visible.sum())
        seen += int(visible.any(dim=0).sum())
    assert problem.pairs == pairs
    assert problem.cache_bytes == seen * 2 * 128 * 2
    assert problem.flops == 4 * 128 * pairs


def test_drafts_see_themselves_and_what_is_above_them() -> None:
    assert [[j for j, seen in enumerate(row) if seen] for row in ancestors(7)] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6],
    ]  # fmt: skip


# --- contents ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_sets_exceed_twice_the_cache() -> None:
    for l2_bytes in (1, 10**5, 10**9):
        held = contents(l2_bytes=l2_bytes)
        assert held.sets * SMALL.cache_bytes > 2 * l2_bytes or held.sets == 64
        assert (held.sets - 1) * SMALL.cache_bytes < 2 * l2_bytes or held.sets == 1


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("page_size", [None, 16, 64, 256])
def test_each_form_reads_a_sequence_as_its_table_says(page_size: int | None, heads_first: bool) -> None:
    held, form = contents(), CacheShape(page_size, heads_first)
    k_cache, _ = held.cache(0, form)
    assert k_cache.data_ptr() == held.cache(0, CacheShape())[0].data_ptr()
    for b, length in enumerate(SMALL.lengths):
        keys, values = held.of_sequence(0, form, b, 1)
        assert keys.shape == values.shape == (length, 128)
        for j in (0, length // 2, length - 1):
            entry, row = b, j
            if page_size is not None:
                entry, row = int(held.pages(page_size).table[b, j // page_size]), j % page_size
            place = k_cache[entry, 1, row] if heads_first else k_cache[entry, row, 1]
            assert torch.equal(keys[j], place)


def test_caches_in_8_bits_have_half_the_bytes_and_scales() -> None:
    narrow = replace(SMALL, kv_dtype="fp8_e4m3")
    held, both = contents(narrow), contents(replace(narrow, dtype="fp8_e4m3"))
    assert 2 * narrow.cache_bytes == SMALL.cache_bytes
    assert narrow.flops == SMALL.flops
    assert (held.queries[0].dtype, held.cache(0, CacheShape())[0].dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    assert set(held.scales) == {"k_descale", "v_descale"}
    assert set(both.scales) == {"q_descale", "k_descale", "v_descale"}
    assert both.queries[0].dtype == torch.float8_e4m3fn
    assert held.of_sequence(0, CacheShape(16), 0, 1)[0].shape == (37, 128)
    for cell in cells():
        if cell.group == "e4m3":
            assert not cell.problems_of_peers
            assert {lane.problem.kv_dtype for lane in cell.lanes} == {"bf16", "fp8_e4m3"}


def test_pages_are_told_in_two_ways_that_agree() -> None:
    pages = contents().pages(16)
    assert pages.starts.tolist() == [0, 3, 7, 8]
    assert pages.last.tolist() == [5, 16, 12]
    assert len(set(pages.listed.tolist())) == 8
    for b in range(3):
        own = pages.listed[pages.starts[b] : pages.starts[b + 1]]
        assert torch.equal(pages.table[b, : len(own)], own)


@pytest.fixture
def package(clean_registry: None) -> str:
    from attngen.build.pipeline import prepare_unrendered
    from attngen.runtime.registry.lookup import package_of_kernels, registry
    from attngen.schema import load_spec_text

    registry.add(package_of_kernels([kernel_of(one.plan) for one in prepare_unrendered(load_spec_text(SPEC))], "here"))
    return "mine"


@sampled(form=[CacheShape(), CacheShape(16), CacheShape(64, heads_first=True)], variant=["causal", "softcap"])
def test_the_oracle_knows_outputs_and_notices_wrong_ones(form: CacheShape, variant: str, package: str) -> None:
    held = contents()
    oracle = ServingOracle(held, SMALL.of(variant), form, package)
    number = held.sets - 1
    out = torch.full((3, 3, 4, 128), math.nan)
    for b in range(3):
        for hk in range(2):
            k, v = (each[None, :, None].float() for each in held.of_sequence(number, form, b, hk))
            q = held.queries[number][b : b + 1, :, 2 * hk : 2 * hk + 2].float()
            own = {"cap": 30.0} if variant == "softcap" else {}
            out[b : b + 1, :, 2 * hk : 2 * hk + 2] = attngen.attention(q, k, v, variant=variant, package=package, **own)
    assert oracle.error(out) < 1e-5
    assert oracle.error(out + 0.1) > 1e-2
    out[2, 1, 3, 5] = math.nan
    assert oracle.error(out) == math.inf


@pytest.mark.parametrize("tokens", [1, 2])
def test_flash_mla_is_called_right(tokens: int, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> None:
    """A stub in its place computes what the arguments mean."""
    from attngen.runtime.registry.lookup import package_of_kernels, registry

    registry.add(
        package_of_kernels([kernel_of(one.plan) for one in prepare_unrendered(load_spec_text(LATENT))], "here")
    )
    problem = Problem(16, 1, (37, 300), tokens, head_dims=LATENT_DIMS)
    held, (form,) = contents(problem), FlashMla().forms(problem)
    monkeypatch.setattr(serving, "import_module", lambda name: StubFlashMla)
    contender = FlashMla().enter(held, form)
    assert ServingOracle(held, problem, form, "mine").error(contender.as_bshd(contender.calls[-1]())) < 1e-2


class StubFlashMla:
    """FlashMLA's two functions in plain torch, on full pages of the table."""

    @staticmethod
    def get_mla_metadata(*args: Any) -> tuple[str, None]:
        return "a schedule", None

    @staticmethod
    def flash_mla_with_kvcache(
        q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, head_dim_v: int, schedule: str, splits: None,
        *, causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (schedule, cache.shape[1:]) == ("a schedule", (64, 1, 576))
        rows = []
        for b, length in enumerate(lengths.tolist()):
            keys = cache[table[b].long()].flatten(0, 2)[:length].float()
            hidden = torch.ones(q.shape[1], length, dtype=torch.bool).triu(length - q.shape[1] + 1)
            logits = torch.einsum("qhd,kd->hqk", q[b].float(), keys) / 576**0.5
            weights = torch.softmax(logits.masked_fill(hidden & torch.tensor(causal), -math.inf), -1)
            rows.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :head_dim_v]))
        return torch.stack(rows), None


def test_latent_rows_are_read_once() -> None:
    problem = Problem(16, 1, (100, 300), head_dims=LATENT_DIMS)
    assert problem.cache_bytes == 400 * 576 * 2
    assert problem.flops == 2 * (576 + 512) * 16 * 400
    keys, values = contents(problem).cache(0, CacheShape(64))
    assert (keys.data_ptr(), values.shape[-1]) == (values.data_ptr(), 512)


def test_libraries_solve_problems_of_their_kind() -> None:
    """FlashMLA those of latent rows, and no other library."""
    for cell in cells():
        names = {peer.name for peer, _, _ in tool._peers_of(cell, serving_peers())}
        assert ("FlashMLA" in names) == (cell.group == "mla")
        assert cell.group != "mla" or names == {"FlashMLA"}


def test_kernels_of_latent_cells_are_those_of_their_head_dims() -> None:
    prepared = [*prepare_unrendered(load_spec_text(SPEC)), *prepare_unrendered(load_spec_text(LATENT))]
    chosen = [cell for cell in cells() if cell.group == "mla"]
    kernels = tool._kernels(prepared, chosen, BenchOptions(), 90)
    assert {(one.plan.head_dim_qk, one.plan.layout) for one in kernels} == {(576, "dense"), (576, "paged")}


# --- timing -----------------------------------------------------------------------------------------------------


def test_figures_are_those_of_calls() -> None:
    clock = FakeClock()

    def call(milliseconds: float) -> Tensor:
        clock.gpu += milliseconds
        clock.host += 0.02
        return torch.ones(2)

    times = (0.001, 0.5, 30.0)
    samplers = [Replays(Contender(str(each), [partial(call, each)] * 3), clock, replayed) for each in times]
    timings = interleaved(samplers, 3, random.Random(0))
    assert [one.milliseconds for one in timings] == [pytest.approx(each) for each in times]
    assert [one.host_us for one in timings] == [pytest.approx(20.0)] * 3
    assert all(len(one.samples) == 3 and one.intact for one in timings)


def test_rounds_are_in_random_order() -> None:
    clock, turns = TickClock(), []

    def call(name: str) -> Tensor:
        turns.append(name)
        return torch.ones(1)

    samplers = [Replays(Contender(name, [partial(call, name)]), clock, replayed) for name in "abcd"]
    interleaved(samplers, 12, random.Random(0))
    order = [name for name, before in zip(turns, [None, *turns], strict=False) if name != before]
    assert len({tuple(order[i : i + 4]) for i in range(4, 4 * 12, 4)}) > 3


def test_an_output_that_is_not_all_written_is_noticed() -> None:
    out = torch.ones(4)

    def part() -> Tensor:
        out[:3] = 1.0
        return out

    sampler = Replays(Contender("part", [part]), TickClock(), replayed)
    (timing,) = interleaved([sampler], 1, random.Random(0))
    assert not timing.intact


# --- figures ----------------------------------------------------------------------------------------------------


def rows() -> tuple[ServingRow, ...]:
    """A cell with contiguous caches and pages, twice, of which peers know the first, and one beside causal."""
    problem = Problem(32, 8, (4096,) * 8)

    def result(name: str, time: float | None, size: int | None, **more: Any) -> ServingResult:
        timing = None if time is None else Timing((time / 1e3, (time + 1) / 1e3, (time - 1) / 1e3), 9.0, True)
        status = "unsupported" if time is None else "measured"
        facts = {
            "problem": problem,
            "form": CacheShape(size),
            "status": status,
            "timing": timing,
            "flops": problem.flops,
        }
        return ServingResult(name, peer="lane" not in more, **facts, **more)

    def lane(name: str, size: int | None, beside: str | None = None) -> Lane:
        return Lane(name, problem, CacheShape(size), beside)

    decoded = ServingRow(cell=cells()[4], input_sets=4, results=(
        result("flash", 40.0, None), result("flash", 50.0, 64), result("flash", 44.0, 256), result("xqa", None, 64),
        result("attngen contiguous", 32.0, None, lane=lane("contiguous", None), kernel="fwd_split"),
        result("attngen pages 16", 40.0, 16, lane=lane("pages 16", 16, "contiguous"), kernel="fwd_paged"),
        result("attngen pages 64", 33.0, 64, lane=lane("pages 64", 64, "contiguous"), kernel="fwd_paged", error=1e-3),
    ))  # fmt: skip
    again = replace(decoded, cell=cells()[5])
    tree = Lane("tree", problem.of("tree"), CacheShape(64), "causal")
    failed = ServingResult("attngen tree", status="unsupported", problem=tree.problem, form=tree.form, lane=tree)
    return decoded, again, ServingRow(cell=cells()[-4], results=(failed,))


def test_ratios_are_to_the_best_peer_of_the_same_kind_and_to_the_lane_beside() -> None:
    row = rows()[0]
    assert row.ratios == pytest.approx({"contiguous": 40 / 32, "pages 16": 44 / 40, "pages 64": 44 / 33})
    assert [row.to_beside(result) for result in row.results[-3:]] == [
        None, pytest.approx(40 / 32), pytest.approx(33 / 32)
    ]  # fmt: skip
    assert row.to_peer(row.results[0]) is None
    assert row.results[4].tbps == pytest.approx(8 * 4096 * 8 * 2 * 256 / 32e-6 / 1e12)
    assert row.results[4].tflops == pytest.approx(4 * 128 * 8 * 4096 * 32 / 32e-6 / 1e12)
    assert rows()[2].ratios == {}


def test_means_are_over_groups() -> None:
    (mean,) = ServingReport(rows=rows()).means
    assert mean.of == "decode"
    assert mean.ratios["pages 64"] == pytest.approx(44 / 33)
    assert mean.cases["contiguous"] == 2


def test_the_document_is_json_and_says_what_was_measured() -> None:
    report = ServingReport(rows=rows(), left_out={"XQA": "not installed"}, rounds=3, seed=5)
    assert report.ok
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    jsonschema.validate(document, SCHEMA)
    last = document["rows"][0]["results"][-1]
    assert (last["microseconds"], last["host_microseconds"], last["best_peer"]) == (pytest.approx(33.0), 9.0, "flash")
    assert not replace(report, rows=report.rows[2:]).ok
    assert not replace(report, stopped="the GPU does not answer").ok


NUMBER, TEXT = {"type": ["number", "null"]}, {"type": ["string", "null"]}

#: The document that ``attngen bench --suite serving --json`` writes.
SCHEMA = {
    "type": "object",
    "required": ["format", "suite", "spec", "package", "ok", "stopped", "gpu", "versions", "ceilings", "rounds",
                 "seed", "rows", "means", "left_out"],
    "additionalProperties": {},
    "properties": {
        "format": {"const": 1}, "suite": {"const": "serving"}, "ok": {"type": "boolean"},
        "rows": {"type": "array", "items": {
            "type": "object", "required": ["name", "group", "input_sets", "gpu", "results"],
            "properties": {"results": {"type": "array", "items": {
                "type": "object", "additionalProperties": False, "properties": {
                    "contender": {"type": "string"}, "lane": TEXT, "kernel": TEXT, "variant": {"type": "string"},
                    "form": {"type": "string"}, "heads_first": {"type": "boolean"}, "batch": {"type": "integer"},
                    "seqlen_q": {"type": "integer"}, "lengths": {"type": "array", "items": {"type": "integer"}},
                    "heads": {"type": "integer"}, "kv_heads": {"type": "integer"},
                    "status": {"enum": ["measured", "planned", "unsupported", "failed"]}, "reason": TEXT,
                    "relative_error": NUMBER, "microseconds": NUMBER, "samples": {"type": "array"},
                    "host_microseconds": NUMBER, "tbps": NUMBER, "tflops": NUMBER, "best_peer": TEXT,
                    "to_peer": NUMBER, "beside": TEXT, "to_beside": NUMBER, "joules_per_tflop": NUMBER,
                    "gpu": {"type": ["object", "null"]},
                },
            }}},
        }},
    },
}  # fmt: skip


# --- a whole run ------------------------------------------------------------------------------------------------


@dataclass
class Stub:
    """A library that takes both forms, and does with the right output what a test asks for."""

    name: str
    change: Callable[[Tensor], Tensor] = lambda out: out
    absent: str | None = None
    latent: bool = False

    def missing(self) -> str | None:
        return self.absent

    def forms(self, problem: Problem) -> Sequence[CacheShape]:
        return CacheShape(), CacheShape(16)

    def enter(self, contents: ServingInputs, form: CacheShape) -> Contender:
        if form.page_size is None:
            calls = [
                partial(
                    attngen.attention,
                    q,
                    *contents.cache(i, form),
                    seqused_k=contents.lengths,
                    variant="causal",
                    package="mine",
                )
                for i, q in enumerate(contents.queries)
            ]
        else:
            table = contents.pages(form.page_size).table
            calls = [
                partial(
                    attngen.attention_paged,
                    q,
                    *contents.cache(i, form),
                    table,
                    contents.lengths,
                    variant="causal",
                    package="mine",
                )
                for i, q in enumerate(contents.queries)
            ]
        return Contender(self.name, calls, as_bshd=self.change)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Path:
    """A spec, small cells, and a GPU whose calls the CPU computes."""
    lanes = [
        Lane(CacheShape(size).name, SMALL, CacheShape(size), None if size is None else "contiguous")
        for size in (None, 16)
    ]
    tree, new = replace(SMALL, variant="tree"), Problem(4, 2, (64, 64), 3, APPEND_VARIANT)
    own = (
        ServingCell("decode", "small", tuple(lanes)),
        ServingCell("variants", "scores", (lanes[1], Lane("softcap", SMALL.of("softcap"), CacheShape(16), "pages 16"))),
        ServingCell("variants", "trees", (lanes[1], Lane("tree", tree, CacheShape(16), "pages 16"))),
        ServingCell(
            "append_kv",
            "writes",
            (Lane("contiguous", new, CacheShape()), Lane("pages 16", new, CacheShape(16), "contiguous")),
        ),
    )
    peers = (
        Stub("good"), Stub("wrong", lambda out: out + 1.0), Stub("bad", lambda out: 1 / 0), Stub("gone", absent="no"),
    )  # fmt: skip
    compute_on_the_cpu(monkeypatch)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(graphs, "_ENQUEUED", 2)
    monkeypatch.setattr(tool, "serving_peers", lambda: peers)
    monkeypatch.setattr(tool, "cells", lambda: own)
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.exhaustive
def test_a_whole_run(spec: Path) -> None:
    seen: list[int] = []
    report = bench(ServingSuite(spec, BenchOptions(rounds=2), 90), lambda so_far, line: seen.append(len(so_far.rows)))
    assert seen == [1, 2, 3, 4]
    small, scores, trees, writes = report.rows
    statuses = {(one.contender, one.form.name): one.status for one in small.results}
    assert statuses == {
        ("good", "contiguous"): "measured", ("good", "pages 16"): "measured",
        ("wrong", "contiguous"): "failed", ("wrong", "pages 16"): "failed",
        ("bad", "contiguous"): "unsupported", ("bad", "pages 16"): "unsupported",
        ("attngen contiguous", "contiguous"): "measured", ("attngen pages 16", "pages 16"): "measured",
    }  # fmt: skip
    assert small.ratios == {"contiguous": 1.0, "pages 16": 1.0}
    assert [one.status for one in scores.results] == ["measured", "measured"]  # no peers there
    assert [one.status for one in trees.results] == ["measured", "unsupported"]
    assert [(one.status, one.error, one.kernel) for one in writes.results] == [
        ("measured", 0.0, "mine/append_sm90a_bf16")
    ] * 2
    assert writes.results[0].tflops == 0.0
    assert max(one.error or 0.0 for one in report.results if one.status == "measured") < 1e-2
    assert report.left_out == {"gone": "no"}
    assert report.ok
    jsonschema.validate(json.loads(json.dumps(report.to_dict(), allow_nan=False)), SCHEMA)


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.group, ["bench", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_the_command_prints_a_table_and_writes_the_document(spec: Path, tmp_path: Path) -> None:
    output = run(spec, "--suite", "serving", "--rounds", 1, "--json", tmp_path / "figures.json")
    lines = [line.split() for line in output.splitlines()]
    own = next(line for line in lines if line[:4] == ["attngen", "pages", "16", "pages"])
    assert own[5:] == [own[5], own[6], own[7], "1.000", "1.000", own[10]]
    document = json.loads((tmp_path / "figures.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert len(document["rows"]) == 4
    assert "left out: gone: no" in output
    assert "small: wrong, pages 16: wrong: error" in output


def test_cells_and_kernels_are_chosen(spec: Path) -> None:
    output = run(spec, "--suite", "serving", "--dry-run", "--cell", "mal", "--cell", "tre")
    assert output.splitlines()[-1] == "mine: 2 cells; nothing was measured"
    assert "no kernel of tree in bf16 at head_dim 128 is chosen from the spec" in output
    output = run(spec, "--suite", "serving", "--dry-run", "--variant", "softcap")
    assert "no kernel of causal" in output
    assert "did you mean 'small'" in run(spec, "--suite", "serving", "--cell", "smal2", code=2)
    assert "the spec has none" in run(spec, "--suite", "serving", "--kernel", "d64", code=2)


def test_what_widens_a_cache_in_8_bits_is_there_for_many_queries() -> None:
    kernel = "variant: causal, head_dim: 128, dtype: bf16, layout: paged"
    spec = f"{SPEC}  - {{{kernel}}}\n  - {{{kernel}, kv_dtype: fp8_e4m3, split_kv: true}}\n"
    prepared = prepare_unrendered(load_spec_text(spec))
    chosen = [cell for cell in cells() if cell.group == "e4m3"]
    kernels = tool._kernels(prepared, chosen, BenchOptions(), 90)
    assert [kernel.plan.direction for kernel in kernels].count("widen") == 1


@pytest.mark.parametrize(
    "options", [("--tokens", 4), ("--seqlen", 4), ("--ladder",), ("--pass", "forward"), ("--plot", "a.png")], ids=str
)
def test_options_of_other_suites_are_refused(options: tuple[object, ...], spec: Path) -> None:
    assert f"{options[0]} is not for the serving suite" in run(spec, "--suite", "serving", *options, code=2)


def test_cells_are_of_the_serving_suite(spec: Path) -> None:
    assert "add --suite serving" in run(spec, "--cell", "decode", code=2)


# --- libraries --------------------------------------------------------------------------------------------------


def test_libraries_that_are_not_here_say_so() -> None:
    reasons = {peer.name: peer.missing() for peer in serving_peers()}
    assert reasons["SDPA cuDNN"] is None
    assert reasons["XQA"] == "not installed: flashinfer"
    assert reasons["FlashMLA"] == "not installed: flash_mla"
    assert reasons["FlashAttention-3"] == "not installed: flash_attn_interface or fa3_fwd_interface"


@pytest.mark.parametrize("tokens", [1, 64])
def test_sdpa_is_called_right(tokens: int, package: str) -> None:
    problem = Problem(4, 2, (64, 64), tokens)
    held, (form,) = contents(problem), ServingSdpa("SDPA math", "MATH").forms(problem)
    contender = ServingSdpa("SDPA math", "MATH").enter(held, form)
    with contender.session():
        out = contender.as_bshd(contender.calls[-1]())
    assert ServingOracle(held, problem, form, package).error(out) < 1e-2
    assert not ServingSdpa("SDPA math", "MATH").forms(Problem(4, 2, (64, 63), 1))
    assert not ServingSdpa("SDPA math", "MATH").forms(Problem(4, 2, (64, 64), 2))
