"""``attngen bench`` on the card that is here: small cases, whatever peers are installed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from click.testing import CliRunner

from attngen import cli, resources
from attngen.arch import arch_of
from attngen.lab.bench.ladder import RUNGS
from attngen.lab.bench.masks.report import FLEX
from attngen.runtime.registry.lookup import registry
from tests.lab.bench_support import SCHEMA
from tests.lab.test_bench_serving import SCHEMA as SERVING

pytestmark = pytest.mark.alone


def test_forward_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        own = {result["contender"]: result for result in row["results"]}["attngen triton"]
        assert own["status"] == "measured", own
        assert 0 < own["tflops"] < 1.5 * ceiling
        assert own["relative_error"] < 1e-2
        flex = {result["contender"]: result for result in row["results"]}["FlexAttention"]
        assert (flex["status"] == "measured") == (row["variant"] != "allowed"), flex
    assert document["ceilings"]["copy_gbps"] > 0
    assert document["gpu"]["l2_bytes"] > 0


def test_backward_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        results = {result["contender"]: result for result in row["results"]}
        own, flex = results["attngen triton"], results["FlexAttention"]
        assert own["status"] == flex["status"] == "measured", results
        assert max(own["relative_error"], flex["relative_error"]) < 2e-2
        assert 0 < own["tflops"] < 1.5 * document["ceilings"]["matrix_tflops"]
        assert 0 < own["workspace_bytes"] <= own["workspace_bound_bytes"]
        assert flex["workspace_bytes"] > 0
    causal, alibi = document["rows"][1:]
    assert causal["to_causal"]["attngen triton"] == 1.0
    assert alibi["to_causal"]["FlexAttention"] > 0


def test_a_server(tmp_path: Path) -> None:
    """Some cells of the serving suite: attngen is right, measured, and on the expected kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("CUDA kernels are for sm90a")
    figures = tmp_path / "figures.json"
    chosen = ("decode b8 32/8 4k", "decode b64 32/8 128", "prefill 4k", "window", "tree", "scores", "append_kv")
    cells = [part for cell in chosen for part in ("--cell", cell)]
    options = ("--suite", "serving", "--rounds", "2", "--json", str(figures), *cells)
    registry.clear()
    done = CliRunner().invoke(cli.group, ["bench", str(resources.specs_dir() / "serving.yaml"), *options])
    registry.clear()
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads(figures.read_text())
    jsonschema.validate(document, SERVING)
    names = [row["name"] for row in document["rows"]]
    assert all(any(cell in name for name in names) for cell in chosen), names
    for row in document["rows"]:
        for own in (result for result in row["results"] if result["lane"] is not None):
            assert own["status"] == "measured", own
            assert own["relative_error"] < 1e-2
            assert 0 < own["tbps"] < 2 * document["ceilings"]["copy_gbps"] / 1e3
            if row["group"] == "append_kv":
                assert "/append_sm90a_" in own["kernel"]
            else:
                if own["seqlen_q"] in (1, 4096):
                    assert (own["seqlen_q"] == 1) == ("_decode_" in own["kernel"]), own
                assert ("_paged_" in own["kernel"]) == own["form"].startswith("pages")
            assert own["host_microseconds"] > 0


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


def test_masks_beside_flex_attention(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    cells = ("--cell", "longformer", "--cell", "documents that come back", "--cell", "relative table, learned")
    sizes = ("--seqlen", "1024", "--head-dim", "64", "--rounds", "2", "--jobs", "3")
    registry.clear()
    done = CliRunner().invoke(cli.group, ["bench", "--suite", "masks", "--json", str(figures), *cells, *sizes])
    registry.clear()
    document = json.loads(figures.read_text())
    failed = [
        result
        for row in document["rows"]
        for result in row["results"]
        # torch 2.11's FlexAttention asks for more shared memory than an H100 has in one of these cells
        if result["status"] != "measured"
        and result["contender"] != FLEX
        # a library that serves the mask may be missing
        and not str(result["reason"]).startswith("not installed")
    ]
    assert not failed, "\n".join(map(str, failed))
    assert done.exit_code == 0, (done.output, done.exception)
    assert len(document["rows"]) == 3
    measured = [{one["contender"] for one in row["results"] if one["status"] == "measured"} for row in document["rows"]]
    reasons = [one["reason"] for row in document["rows"] for one in row["results"] if one["contender"] == FLEX]
    assert any(FLEX in names for names in measured), reasons
    for row, names in zip(document["rows"], measured, strict=True):
        assert "attngen" in names
        assert all(one["first_seconds"] > 0 for one in row["results"] if one["contender"] in names)
        assert FLEX not in names or row["speed"]["attngen"]["forward"] > 0
    assert not document["not_run"]
