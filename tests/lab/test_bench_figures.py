"""Files of runs: what a benchmark writes, ratios from it, and what takes the place of what."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen import resources
from attngen.lab.bench.figures import SPEED, TIME, BenchRun, clean_commit, json_of, read_runs, runs_of, write_runs
from tests.lab.bench_support import backward_report, report


def made(**fields: Any) -> BenchRun:
    given = {
        "figures": "forward", "card": "a card", "date": "2026-01-31", "commit": "0ed1462e", "source": "by hand",
        "unit": SPEED, "cells": {"causal d128": {"flash": 200, "flex": 300, "attngen": 330, "attngen, other": 900}},
    }  # fmt: skip
    return BenchRun(**{**given, **fields})


def test_a_ratio_is_to_the_fastest_peer_or_to_one() -> None:
    assert made().ratios() == pytest.approx({"causal d128": 1.1})
    assert made().ratios(peer="flash") == pytest.approx({"causal d128": 1.65})
    assert made(unit=TIME).ratios() == pytest.approx({"causal d128": 200 / 330})
    assert made().ratios("d64") == {}


@pytest.mark.parametrize(
    "cell", [{"flash": 200, "attngen": None}, {"flash": None, "attngen": 1}, {"flash": 1}, {"attngen": 1}]
)
def test_what_was_not_measured_has_no_ratio(cell: dict[str, float | None]) -> None:
    assert made(cells={"one": cell}).ratios() == {}


def test_one_kernel_of_attngen_is_attngen_and_of_several_none() -> None:
    cell = {"flash": 100, "attngen cuda": 150}
    assert made(cells={"one": cell}).ratios() == {"one": 1.5}
    assert made(cells={"one": {**cell, "attngen triton": 120}}).ratios() == {}


def test_runs_of_the_grid_have_their_speeds_by_direction() -> None:
    document = backward_report().to_dict()
    runs = {run.figures: run for run in runs_of(document, None, "attngen bench")}
    assert set(runs) == {"forward", "variants forward", "backward", "variants backward"}
    assert runs["forward"].commit == "unknown"
    assert runs["forward"].unit == SPEED
    assert list(runs["backward"].cells) == ["causal d128 bf16 1k", "causal d128 bf16 4k", "causal d128 bf16 16k"]
    by_hand = {row["name"]: row for row in document["rows"]}
    first = {one["contender"]: one["tflops"] for one in by_hand["causal d128 bf16 backward 1k"]["results"]}
    assert runs["backward"].cells["causal d128 bf16 1k"] == pytest.approx(first, rel=1e-3)


def test_runs_of_masks_have_times_of_both_directions() -> None:
    results = [
        {"contender": "FlexAttention", "forward": {"milliseconds": 0.30001}, "backward": {"milliseconds": 0.9}},
        {"contender": "attngen", "forward": {"milliseconds": 0.1}},
    ]
    rows = [{"name": "sliding d128 8k", "case": "sliding", "head_dim": 128, "results": results}]
    document = {
        "suite": "masks",
        "gpu": {"name": "a card"},
        "versions": {"torch": "2.11", "fa3-fwd": None},
        "rows": rows,
    }
    forward, backward = runs_of(document, "0ed1462e", "attngen bench --suite masks")
    assert (forward.figures, forward.unit, forward.commit) == ("masks forward", TIME, "0ed1462e")
    assert forward.versions == {"torch": "2.11"}
    assert forward.cells == {"sliding d128": {"FlexAttention": 0.3, "attngen": 0.1}}
    assert forward.ratios(peer="FlexAttention") == pytest.approx({"sliding d128": 3.0})
    assert backward.cells == {"sliding d128": {"FlexAttention": 0.9, "attngen": None}}
    assert backward.ratios() == {}


def test_a_run_takes_the_place_of_one_of_its_kind_and_card(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    assert read_runs(path) == []
    old, other = made(), made(card="another")
    write_runs(path, [old, other])
    assert read_runs(path) == [old, other]
    write_runs(path, [replace(old, commit="new")])
    assert [(run.card, run.commit) for run in read_runs(path)] == [("a card", "new"), ("another", "0ed1462e")]
    assert path.read_text() == json_of(read_runs(path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{"card": 1}]}', "\0"])
def test_a_file_that_holds_no_runs_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"speed\.json holds no runs of benchmarks"):
        read_runs(path)


def test_the_commit_is_that_of_a_checkout_without_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    assert clean_commit() is None
    for command in (
        ("init", "-q"),
        ("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "One", "--allow-empty"),
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = clean_commit()
    assert commit is not None
    assert len(commit) == 12
    (tmp_path / "changed").touch()
    assert clean_commit() is None


def test_the_documents_of_reports_are_json(tmp_path: Path) -> None:
    """Figures that are no numbers would make the file unreadable."""
    (run, *_) = runs_of(report().to_dict(), None, "attngen bench")
    assert json.loads(json_of([run]))["runs"][0]["cells"] == {name: dict(cell) for name, cell in run.cells.items()}
