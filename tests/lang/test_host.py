"""Bounds of keys as manifests hold them: written from expressions, checked, and computed for many tiles at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attngen.lang.bands import bands
from attngen.lang.facts import Facts
from attngen.lang.host import evaluate, is_bound, written
from attngen.schema import preset

NAMES = {"q_lo": [0, 64, 128], "q_hi": [63, 127, 191], "q_pos_lo": [5, 69, 133], "q_pos_hi": [68, 132, 196], "w": 100}


@pytest.mark.parametrize(
    ("bound", "values"),
    [
        (7, [7, 7, 7]),
        ("w", [100, 100, 100]),
        ("q_hi", [63, 127, 191]),
        (["add", "q_pos_hi", 1], [69, 133, 197]),
        (["max", ["sub", "q_pos_lo", "w"], 0], [0, 0, 33]),
        (["mul", ["floordiv", "q_lo", 100], 100], [0, 0, 100]),
        (["neg", ["mod", "q_hi", 10]], [-3, -7, -1]),
        (["select", ["lt", "q_lo", "w"], ["neg", 1], "q_hi"], [-1, -1, 191]),
        (["select", ["and", ["ge", "q_lo", 64], ["not", ["eq", "q_hi", 127]]], 1, 0], [0, 0, 1]),
        (None, None),
        ("unknown", None),
        (["add", "unknown", 1], None),
        (["mod", "q_lo", 0], None),
    ],
)
def test_values_of_bounds(bound: Any, values: list[int] | None) -> None:
    assert is_bound(bound)
    assert evaluate(json.loads(json.dumps(bound)), NAMES, 3) == values


@pytest.mark.parametrize(
    "bound",
    [True, 1.5, 2**63, [], ["add", 1], ["neg", 1, 2], ["select", 1, 2], ["pow", 2, 9],
     ["add", None, 1], [["add"], 1, 2], {"add": 1},
     ["add", "x", ["add", 1, 2.0]]],
)  # fmt: skip
def test_other_values_are_no_bounds(bound: Any) -> None:
    assert not is_bound(bound)


def test_bounds_do_not_go_deep() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = ["neg", deep]
    assert not is_bound(deep)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", [(None, None)]),
        ("causal", [(None, ["add", "q_pos_hi", 1])]),
        ("causal_top_left", [(None, ["add", "q_hi", 1])]),
        (
            "sliding_window",
            [(["add", ["sub", "q_pos_lo", ["min", "window", 1073741823]], 1], ["add", "q_pos_hi", 1])],
        ),
        ("chunked", [(["mul", ["floordiv", "q_pos_lo", "chunk"], "chunk"], ["add", "q_pos_hi", 1])]),
        ("prefix_lm", [(None, None)]),  # the end is in a tensor
        ("packed_documents", [(None, ["add", "q_pos_hi", 1])]),  # so is the beginning
    ],
)
def test_bounds_of_presets(name: str, expected: list[Any]) -> None:
    own = preset(name)
    bounds = [(written(each.lo), written(each.hi)) for each in bands(own.mask, Facts.of(own)).visible]
    assert bounds == expected
    assert all(is_bound(bound) for pair in bounds for bound in pair)
