"""Prefix trees on kernels: outputs and gradients against float64, and a model beside its sequences one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import attngen
from attngen import cli
from attngen.integrations.shared.catalogue import variant
from attngen.lab.bench.check import relative_error
from attngen.lab.bench.trees import CELLS, TreeCell
from attngen.runtime.registry.lookup import registry

families = pytest.importorskip("tests.integrations.transformers.families")

#: Tokens of a level in these tests: branches begin and end inside of tiles, and at their edges.
LEVELS = {
    "answers": ((1, 700), (5, 150)),
    "search": ((2, 128), (2, 37), (3, 64), (2, 1)),
    "many prompts": ((9, 40), (3, 70)),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and a registry that knows no package."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    registry.clear()
    with attngen.jit():
        yield
    registry.clear()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_outputs_and_gradients(head_dim: int, window: int | None) -> None:
    for name, levels in LEVELS.items():
        packed = TreeCell(name, levels).packed.to("cuda")
        arguments: dict[str, Any] = packed.arguments()
        if window is not None:
            position = packed.positions.to(torch.int32)
            arguments = {**arguments, "variant": variant("span_tree"), "left": window - 1, "position": position}
        torch.manual_seed(0)
        shapes = [(1, packed.ids.shape[1], heads, head_dim) for heads in (4, 2, 2)]
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        out = attngen.attention(*leaves, **arguments)
        wanted = attngen.attention(*exact, **arguments, backend="reference")
        dout = torch.randn_like(out)
        assert relative_error(out.detach(), wanted.detach()) < 1e-2, name
        gradients = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, exact, dout.double())
        for one, other in zip(*gradients, strict=True):
            assert relative_error(one, other) < 2e-2, name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_model_beside_its_sequences(family: str) -> None:
    """Log-probabilities in bf16: no further from those of each sequence in float32 than those of each in bf16."""
    packed = TreeCell("answers", ((1, 90), (4, 30))).packed
    ids = [(packed.ids[0, places] % families.VOCABULARY).tolist() for places in packed.places]
    packed = attngen.trees.pack_answers([one[:90] for one in ids[:1]], [[one[90:] for one in ids]], device="cuda")
    model = families.make(family, 64, "attngen", "cuda", torch.bfloat16, all_experts=True)
    dtypes = (torch.bfloat16, torch.float32)
    plain, exact = (families.make(family, 64, "eager", "cuda", dtype, all_experts=True) for dtype in dtypes)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
        own = torch.cat(packed.log_probs(model(**packed.inputs(), logits_to_keep=packed.rows).logits))
        apart = []
        for each in (plain, exact):
            rows = [each(input_ids=torch.tensor([one], device="cuda"), use_cache=False).logits[0, 89:-1] for one in ids]
            scores = [row.float().log_softmax(-1) for row in rows]
            targets = [torch.tensor(one[90:], device="cuda")[:, None] for one in ids]
            apart.append(torch.cat([s.gather(1, t)[:, 0] for s, t in zip(scores, targets, strict=True)]))
    error, least = ((one - apart[1]).square().mean().sqrt().item() for one in (own, apart[0]))
    assert error <= 1.5 * least, f"{error} against {least}"


def test_cells_of_the_trees_suite_agree(tmp_path: Path) -> None:
    """The suite itself checks a tree against its sequences apart."""
    figures = tmp_path / "trees.json"
    name = next(iter(CELLS))
    run = ["bench", "--suite", "trees", "--cell", name, "--rounds", "1", "--json", str(figures)]
    done = CliRunner().invoke(cli.group, run)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(figures.read_text())["rows"]
    assert {one["status"] for one in row["results"]} == {"measured"}
