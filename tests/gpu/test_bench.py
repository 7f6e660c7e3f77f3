"""``attngen bench`` on the card that is here: small cases, whatever peers are installed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.arch import arch_of
from attngen.runtime.registry import registry
from attngen.tools.bench.ladder import RUNGS
from tests.tools.bench_support import SCHEMA


def test_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    assert arch is not None
    spec, figures = tmp_path / "mine.yaml", tmp_path / "figures.json"
    entry = "{variant: [causal, alibi, allowed], head_dim: 64, backend: triton}"
    spec.write_text(f"schema: 1\npackage: mine\narch: {arch.name}\nkernels:\n  - {entry}\n")
    sizes = ("--tokens", "4096", "--seqlen", "2048", "--rounds", "2")
    registry.clear()
    done = CliRunner().invoke(cli.group, ["bench", str(spec), "--json", str(figures), *sizes])
    registry.clear()
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(figures.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["ok"]
    ceiling = document["ceilings"]["matrix_tflops"]
    for row in document["rows"]:
        ours = {result["contestant"]: result for result in row["results"]}["attngen triton"]
        assert ours["status"] == "measured", ours
        assert 0 < ours["tflops"] < 1.5 * ceiling
        assert ours["relative_error"] < 1e-2
        flex = {result["contestant"]: result for result in row["results"]}["FlexAttention"]
        assert (flex["status"] == "measured") == (row["variant"] != "allowed"), flex
    assert document["ceilings"]["copy_gbps"] > 0
    assert document["gpu"]["l2_bytes"] > 0


def test_a_race_of_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    major, minor = torch.cuda.get_device_capability()
    arch = arch_of(10 * major + minor)
    assert arch is not None
    spec, figures = tmp_path / "mine.yaml", tmp_path / "figures.json"
    entry = "{variant: [causal, alibi], head_dim: 64, passes: [forward, backward], backward: {backend: triton}}"
    spec.write_text(f"schema: 1\npackage: mine\narch: {arch.name}\nkernels:\n  - {entry}\n")
    sizes = ("--tokens", "4096", "--seqlen", "2048", "--rounds", "2", "--pass", "backward")
    registry.clear()
    done = CliRunner().invoke(cli.group, ["bench", str(spec), "--json", str(figures), *sizes])
    registry.clear()
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(figures.read_text())
    jsonschema.validate(document, SCHEMA)
    assert [(row["suite"], row["variant"], row["direction"]) for row in document["rows"]] == [
        ("grid", "causal", "backward"), ("variants", "causal", "backward"), ("variants", "alibi", "backward"),
    ]  # fmt: skip
    for row in document["rows"]:
        results = {result["contestant"]: result for result in row["results"]}
        ours, flex = results["attngen triton"], results["FlexAttention"]
        assert ours["status"] == flex["status"] == "measured", results
        assert max(ours["relative_error"], flex["relative_error"]) < 2e-2
        assert 0 < ours["tflops"] < 1.5 * document["ceilings"]["matrix_tflops"]
        assert 0 < ours["workspace_bytes"] <= ours["workspace_bound_bytes"]
        assert flex["workspace_bytes"] > 0
    causal, alibi = document["rows"][1:]
    assert causal["to_causal"]["attngen triton"] == 1.0
    assert alibi["to_causal"]["FlexAttention"] > 0


def test_a_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("CUDA kernels are for sm90a")
    spec, figures = tmp_path / "mine.yaml", tmp_path / "figures.json"
    entry = "{variant: causal, head_dim: 64, backend: cuda}"
    spec.write_text(f"schema: 1\npackage: mine\narch: sm90a\nkernels:\n  - {entry}\n")
    sizes = ("--tokens", "4096", "--seqlen", "2048", "--rounds", "2")
    registry.clear()
    done = CliRunner().invoke(cli.group, ["bench", str(spec), "--ladder", "--json", str(figures), *sizes])
    registry.clear()
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(figures.read_text())
    jsonschema.validate(document, SCHEMA)
    (ladder,), (row,) = document["ladders"], document["rows"]
    assert [result["status"] for result in row["results"]] == ["measured"] * len(RUNGS)
    assert max(result["relative_error"] for result in row["results"]) < 1e-2
    assert ladder["cases"][0]["rungs"][-1]["to_last"] == 1.0
    assert all(rung["registers"] > 0 for rung in ladder["rungs"])
