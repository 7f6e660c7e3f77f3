"""The table of what was decided by hand: its pages have the figures, and each row is what some kernel meets."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import attngen
from attngen.errors import PlanError
from attngen.plan import plan
from attngen.plan.allowances import (
    ALL_OF_DQ,
    CACHE_SPILLS,
    LAST_SPILLS,
    LEFT_TO_OTHERS,
    MMA_BACKWARD_SPILLS,
    MMA_SPILLS,
    PINGPONG_SPILLS,
    SERIALIZED,
    SPILLS,
    SPLIT_SPILLS,
    TRITON_BACKWARD,
    LeftToOthers,
)
from attngen.resources import root
from attngen.schema import expand, load_spec_text

#: Where plans are made.
MODULES = sorted(
    path for part in ("plan", "parts", "families") for path in (Path(attngen.__file__).parent / part).rglob("*.py")
)


@pytest.mark.parametrize(
    "row",
    [
        SPILLS,
        PINGPONG_SPILLS,
        CACHE_SPILLS,
        MMA_SPILLS,
        MMA_BACKWARD_SPILLS,
        SPLIT_SPILLS,
        LAST_SPILLS,
        TRITON_BACKWARD,
        *SERIALIZED,
        *LEFT_TO_OTHERS,
    ],
    ids=lambda row: row.who,
)
def test_figures_stand_where_the_table_says(row: object) -> None:
    measured = row.measured  # type: ignore[attr-defined]
    if measured is not None:
        text = " ".join((root() / measured.page).read_text("utf-8").split())
        assert measured.figures in text


#: Sources of a variant's traits: its score, its mask, its declarations.
SCORES = {
    frozenset({"varying_derivative"}): "tanh(s)",
    frozenset({"both_read"}): "s + bias[kv]",
    frozenset(): "s",
}


def spec_of(traits: frozenset[str], head_dim: int) -> str:
    """Return a spec with just these traits, as far as they can be had alone."""
    mask = "q_pos >= kv"
    if "both_read" in traits:
        mask = "doc[b, q_pos] == doc[b, kv]"
    score = SCORES[traits & {"varying_derivative", "both_read"}]
    own = "" if "both_read" not in traits else (
        "    tensors: {doc: {dtype: int32, shape: [b, seqlen_k]}, bias: {dtype: fp32, shape: [seqlen_k]}}\n"
    )  # fmt: skip
    return (
        "schema: 1\narch: sm90a\nvariants:\n  own:\n"
        f'{own}    mask: "{mask}"\n    score: "{score}"\n'
        + ("    dropout: true\n" if "dropout" in traits else "")
        + f"kernels:\n  - {{variant: own, head_dim: {head_dim}, passes: backward, backward: {{backend: cuda}}"
        + (", deterministic: true" if "ordered" in traits else "")
        + "}\n"
    )


def refused(traits: frozenset[str], head_dim: int) -> str:
    (kernel,) = expand(load_spec_text(spec_of(traits, head_dim)))
    try:
        plan(kernel)
    except PlanError as error:
        return error.message
    return ""


@pytest.mark.parametrize("row", LEFT_TO_OTHERS, ids=lambda row: "-".join(sorted(row.traits)))
def test_rows_of_the_table_are_refused_and_nothing_beside_them(row: LeftToOthers) -> None:
    head_dim = row.beyond + 64
    assert row.says in refused(row.traits, head_dim)
    assert row.says not in refused(row.traits, ALL_OF_DQ) or row.beyond < ALL_OF_DQ
    for trait in row.traits:
        assert not refused(row.traits - {trait}, head_dim), f"without {trait}"


def test_decisions_by_hand_stand_in_the_table_alone() -> None:
    """No module of the plan allows a kernel what costs speed, or sets a number of spills, by itself."""
    for path in MODULES:
        if path.name == "allowances.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "max_spills":
                assert not isinstance(node.value, ast.Constant) or node.value.value is None, (
                    f"{path}:{node.value.lineno}"
                )
            if isinstance(node, ast.JoinedStr | ast.Constant):
                text = ast.unparse(node)
                assert "leave no registers" not in text, f"{path}:{node.lineno}"
