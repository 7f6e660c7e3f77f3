"""Figures of a report: ratios, geometric means, the JSON document, the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from attngen.lab.bench.cases import bench_cases
from attngen.lab.bench.grid import GridReport, GridResult, GridRow
from attngen.lab.bench.report import mean_of
from tests.lab.bench_support import SCHEMA, backward_report, report, result


def test_ratios_are_to_the_best_peer_of_the_case() -> None:
    rows = report().rows
    assert [row.fastest_peer and row.fastest_peer.contender for row in rows] == ["flash"] * 4 + ["flex"]
    assert rows[0].ratios == pytest.approx({"attngen cuda": 600 / 400, "attngen triton": 500 / 400})
    assert rows[2].ratios == pytest.approx({"attngen cuda": 480 / 600})
    assert rows[4].ratios == pytest.approx({"attngen cuda": 2.0})


def test_no_peer_no_ratio() -> None:
    row = GridRow(case=report().rows[0].case, results=(result("flash", None), result("attngen cuda", 500, own=True)))
    assert row.fastest_peer is None
    assert row.ratios == {}


def test_geometric_means() -> None:
    means = {mean.of: mean for mean in report().means}
    assert set(means) == {"causal d128 bf16", "grid", "variants"}
    grid = means["grid"]
    assert grid.ratios["attngen cuda"] == pytest.approx((1.5 * 1.1 * 0.8) ** (1 / 3))
    assert grid.ratios["attngen triton"] == pytest.approx((1.25 * 0.9) ** 0.5)
    assert grid.least == pytest.approx({"attngen cuda": 0.8, "attngen triton": 0.9})
    assert grid.cases == {"attngen cuda": 3, "attngen triton": 2}
    assert means["variants"].ratios == {"attngen cuda": pytest.approx((1.1 * 2) ** 0.5)}
    assert mean_of("one", report().rows[:1]) is None


def test_a_report_is_good_if_something_was_measured_and_nothing_failed() -> None:
    assert report().ok
    assert not report(stopped="the GPU does not answer").ok
    rows = report().rows
    assert not GridReport().ok
    assert not GridReport(rows=(GridRow(case=rows[0].case, results=(result("flash", 400),)),)).ok
    failed = GridResult("attngen triton", "fwd", "failed", "wrong")
    assert not GridReport(rows=(*rows, GridRow(case=rows[0].case, results=(failed,)))).ok
    of_peer = GridResult("flash", None, "failed", "wrong", peer=True)
    assert GridReport(rows=(*rows, GridRow(case=rows[0].case, results=(of_peer,)))).ok


def test_the_document_keeps_its_schema() -> None:
    document = json.loads(json.dumps(report().to_dict(), allow_nan=False))
    jsonschema.validate(document, SCHEMA)
    first = document["rows"][0]
    assert (first["name"], first["batch"], first["seqlen"]) == ("causal d128 bf16 1k", 16, 1024)
    assert first["flops"] == 4 * 1e9 * 128
    assert first["gpu"] == {"sm_mhz": 1500.0, "watts": 690.0, "celsius": 60.0}
    assert first["best_peer"] == "flash"
    flash = first["results"][0]
    assert (flash["milliseconds"], flash["samples"]) == (3.75, [2.5, 5.0, 3.75])
    assert (flash["host_bound"], flash["status"], flash["kernel"]) == (False, "measured", None)
    assert document["ceilings"] == {"matrix_tflops": 750.0, "copy_gbps": 4300.0}
    results = (GridResult("flash", peer=True),)
    planned = GridReport(rows=(GridRow(case=report().rows[0].case, results=results),)).to_dict()
    jsonschema.validate(json.loads(json.dumps(planned, allow_nan=False)), SCHEMA)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from attngen.lab.bench.plot import plot

    path = tmp_path / "figures.png"
    plot(report(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (case,) = bench_cases("alibi", "bf16", 64, 64)
    without = report(ceilings=None, gpu=None)
    other = GridRow(case=case, results=report().rows[4].results)
    plot(replace(without, rows=(*without.rows, other)), tmp_path / "figures.svg")
    drawn = (tmp_path / "figures.svg").read_text()
    assert drawn.count('id="matplotlib.axis_') == 2 * 3
    for text in ("causal d128 bf16", "variants d128 bf16 h32/8 16k", "variants d64 bf16 h64/16 16k", "attngen cuda"):
        assert f"<!-- {text} -->" in drawn
    assert "bf16 matrix product" not in drawn
    plot(backward_report(), tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert drawn.count('id="matplotlib.axis_') == 2 * 4
    for text in ("forward and backward attention, a card", "causal d128 bf16 backward",
                 "variants d128 bf16 h32/8 backward 16k", "bf16 matrix product"):  # fmt: skip
        assert f"<!-- {text} -->" in drawn
