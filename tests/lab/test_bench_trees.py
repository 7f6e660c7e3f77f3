"""The trees suite without a GPU: sizes of cells, a whole run that the CPU computes, and what its check sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attngen import cli
from attngen.errors import CallError
from attngen.lab.bench import trees as tool
from attngen.lab.bench.runner import BenchOptions, bench
from attngen.lab.bench.trees import AGREEMENT, APART, CELLS, TREE, TreeCell, TreeInputs, TreeSuite
from attngen.runtime.device import driver as drivers
from tests.lab.bench_support import compute_on_the_cpu
from tests.runtime.support import FakeDriver

TINY = {"3 answers of 5 to 7": ((1, 7), (3, 5)), "binary": ((1, 4), (2, 3), (2, 2))}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Iterator[None]:
    """Two tiny trees, and a GPU whose calls the CPU computes."""
    compute_on_the_cpu(monkeypatch)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tool, "CELLS", TINY)
    monkeypatch.setattr(tool, "HEAD_DIM", 8)
    with drivers.use(FakeDriver()):
        yield


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.group, ["bench", "--suite", "trees", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_sizes_of_trees() -> None:
    prompt, answers, length = 8192, 32, 512
    cell = TreeCell("32 answers of 512 to 8k", CELLS["32 answers of 512 to 8k"])
    assert cell.tokens == {TREE: prompt + answers * length, APART: answers * (prompt + length)}
    own = length * prompt + length * (length + 1) // 2
    assert cell.pairs == {
        TREE: prompt * (prompt + 1) // 2 + answers * own,
        APART: answers * (prompt * (prompt + 1) // 2 + own),
    }
    binary = TreeCell("", ((1, 4), (2, 3), (2, 2)))
    assert binary.lengths == [9, 9, 9, 9]
    assert binary.tokens == {TREE: 4 + 6 + 8, APART: 36}


def test_a_whole_run(tiny: None) -> None:
    seen: list[int] = []
    report = bench(TreeSuite(BenchOptions(rounds=1)), lambda so_far, line: seen.append(len(so_far.rows)))
    assert seen == [1, 2]
    assert report.ok
    for row in report.rows:
        assert [one.contender for one in row.results] == [
            "tree forward", "apart forward", "tree backward", "apart backward",
        ]  # fmt: skip
        assert [one.error is None for one in row.results] == [False, True, False, True]
        assert row.speed("forward") == row.speed("backward") == pytest.approx(1.0)
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["suite"], document["rows"][0]["tokens"]) == ("trees", {"tree": 22, "apart": 36})


def test_the_check_sees_other_outputs_and_gradients() -> None:
    cell = TreeCell("binary", TINY["binary"], head_dim=8, heads=4, kv_heads=2)
    sides = TreeInputs(cell, torch.device("cpu"), torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = sides.forward(TREE)
    gradients = sides.backward(TREE)()
    assert sides.error(out) < AGREEMENT / 2
    assert sides.error_of_gradients(gradients) < AGREEMENT / 2
    assert sides.error(out.roll(1, dims=1)) > AGREEMENT
    for place in range(3):
        wrong = [1.1 * one if i == place else one for i, one in enumerate(gradients)]
        assert sides.error_of_gradients(wrong) > AGREEMENT
    chain = replace(sides.packed, subtree_end=torch.full_like(sides.packed.subtree_end, cell.tokens[TREE]))
    sides.packed = chain
    with torch.no_grad():
        assert sides.error(sides.forward(TREE)) > AGREEMENT


def test_the_command(tiny: None, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    output = run("--rounds", 1, "--json", figures)
    assert "3 answers of 5 to 7, d8" in output
    assert "apart / tree" in " ".join(output.split())
    assert [row["name"] for row in json.loads(figures.read_text())["rows"]] == ["3 answers of 5 to 7, d8", "binary, d8"]
    planned = run("--dry-run", "--cell", "binary", "--head-dim", 16)
    assert planned.splitlines()[-1] == "trees: 1 cell; nothing was measured"
    assert "did you mean 'binary'" in run("--cell", "binery", code=2)
    assert "--limit is not for prefix trees" in run("--limit", 5, code=2)
    with pytest.raises(CallError, match="no cell of the trees suite"):
        TreeSuite(BenchOptions(cells=["other"]))
