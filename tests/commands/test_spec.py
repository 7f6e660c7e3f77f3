"""``attngen spec --from-flex``: YAML of functions, which builds what the functions mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngen.schema import expand, load_spec_text
from tests.commands.test_build import attngen

FUNCTIONS = """
import torch

doc = torch.tensor([0] * 20 + [1] * 30)
number = 3


def documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx])


def capped(score, b, h, q_idx, kv_idx, cap=5.0):
    return cap * torch.tanh(score / cap)


def sorted_keys(b, h, q_idx, kv_idx):
    return torch.stack((q_idx, kv_idx)).sort().values[0] == kv_idx


def two(q_idx, kv_idx):
    return q_idx >= kv_idx
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the folder that commands run in, another one in each test."""
    name = "functions_of_" + re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_a_mask_and_a_score_become_one_variant(here: str) -> None:
    done = attngen("spec", "--from-flex", f"{here}:documents", "--from-flex", f"{here}:capped")
    declared = load_spec_text(done.output).variants["documents"]
    assert declared.variant.score is not None
    assert declared.variant.tensor("doc").monotone is not None


def test_specs_are_for_hopper_unless_an_arch_is_named(here: str) -> None:
    done = attngen("spec", "--from-flex", f"{here}:capped", "--training")
    kernels = expand(load_spec_text(done.output))
    assert {(one.arch, one.head_dim_qk, one.direction) for one in kernels} == {
        ("sm90a", head_dim, direction) for head_dim in (64, 128) for direction in ("forward", "backward")
    }  # fmt: skip


def test_an_entry_builds_it(here: str) -> None:
    given = ("--name", "mine", "--arch", "sm90a", "--head-dim", "64", "--training")
    done = attngen("spec", "--from-flex", f"{here}:capped", *given)
    kernels = expand(load_spec_text(done.output))
    assert [(one.variant.name, one.head_dim_qk, one.direction) for one in kernels] == [
        ("mine", 64, "forward"), ("mine", 64, "backward"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{}:nothing", "has no attribute 'nothing'"),
        ("no_such_module_here:mask", "No module named 'no_such_module_here'"),
        ("{}", "takes MODULE:FUNCTION"),
        ("./{}.py:capped", "is not the name of a module"),
        ("..{}:capped", "is not the name of a module"),
        ("broken:mask", "importing broken raises ZeroDivisionError: division by zero"),
        ("ends:mask", "importing ends raises SystemExit: 3"),
        ("{}:number", "takes functions, got int"),
        ("{}:two", "got 2 arguments"),
        ("{}:sorted_keys", "aten.stack.default has no equivalent in attngen's language"),
    ],
)
def test_names_of_no_function_are_refused(here: str, place: str, reason: str) -> None:
    done = attngen("spec", "--from-flex", place.format(here), code=2)
    assert reason in done.output


def test_one_of_each_kind(here: str) -> None:
    done = attngen("spec", "--from-flex", f"{here}:documents", "--from-flex", f"{here}:documents", code=2)
    assert "one mask_mod and one score_mod at most" in done.output
