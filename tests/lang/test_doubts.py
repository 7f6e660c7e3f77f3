"""Expressions that are legal and probably not meant: which are reported, where, and that no shipped one is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from attngen import resources
from attngen.schema import doubts_of_fields, load_spec, preset_names
from attngen.schema.lint import doubtful
from attngen.schema.presets import declared_preset
from tests.sampling import few

FIELDS: Mapping[str, Any] = {
    "scalars": {
        "window": {"type": "int32", "min": 1},
        "small": {"type": "int32", "min": 0, "max": 63},
        "zero": {"type": "int32", "const": 0},
    },
    "tensors": {
        "doc": {"dtype": "int32", "shape": ["b", "seqlen_k"], "range": {"min": 0}},
        "allowed": {"dtype": "bool", "shape": ["b", "seqlen_k"]},
    },
}


def doubts(mask: str, **fields: Any) -> list[tuple[str, str]]:
    """Message and marked text of each doubt about a mask."""
    reported = []
    for doubt in doubts_of_fields("mine", {"mask": mask, **FIELDS, **fields}):
        message, shown, caret = doubt.message.rsplit("\n", 2)
        reported.append((message, shown[caret.index("^") : len(caret)]))
    return reported


@pytest.mark.parametrize(
    ("mask", "message", "marked"),
    [
        ("q_pos >= kv & q_pos - kv < 5", "'&' binds tighter than '>='", "kv & q_pos - kv"),
        ("q_pos >= kv | kv < 4", "join conditions with 'or'", "kv | kv"),
        ("kv % 2 == 0 & q_pos >= kv", "'&' binds tighter than '=='", "0 & q_pos"),
        ("allowed[b, kv] & kv < 5", "'&' binds tighter than '<'", "allowed[b, kv] & kv"),
        ("~q_pos >= kv", "'~' binds tighter than '>='", "~q_pos"),
        ("kv < 0", "'kv < 0' is never true: kv is at least 0", "kv < 0"),
        ("q_pos >= kv and kv < 0", "'kv < 0' is never true", "kv < 0"),
        ("q_pos >= kv and kv >= 0", "'kv >= 0' is always true", "kv >= 0"),
        ("q_pos >= kv and kv < seqlen_k", "'kv < seqlen_k' is always true", "kv < seqlen_k"),
        ("q_pos >= kv and window > 0", "always true: window is at least 1", "window > 0"),
        ("q_pos >= kv and small < 64", "always true: small is at least 0 and at most 63", "small < 64"),
        ("doc[b, kv] < 0", "never true: doc is at least 0", "doc[b, kv] < 0"),
        ("kv == kv", "'kv == kv' is always true", "kv == kv"),
        ("5 < 3", "'5 < 3' is never true", "5 < 3"),
        ("q_pos >= kv and q_pos < kv", "exclude each other", "q_pos >= kv and q_pos < kv"),
        ("q_pos >= kv or q_pos < kv", "always holds", "q_pos >= kv or q_pos < kv"),
        ("0 <= q_pos - kv < 0", "exclude each other", "0 <= q_pos - kv < 0"),
        ("q_pos - kv < window and q_pos - kv >= window", "exclude each other",
         "q_pos - kv < window and q_pos - kv >= window"),
        ("kv == 3 and kv == 5", "exclude each other", "kv == 3 and kv == 5"),
        ("q_pos >= kv and q // seqlen_q == 0", "'q // seqlen_q' is always 0", "q // seqlen_q"),
        ("q_pos >= kv and kv % seqlen_k == q", "'kv % seqlen_k' is always 'kv'", "kv % seqlen_k"),
        ("small // 64 == kv", "'small // 64' is always 0", "small // 64"),
        ("q_pos >= kv and q_pos - kv < zero", "exclude each other", "q_pos >= kv and q_pos - kv < zero"),
    ],
)  # fmt: skip
def test_probable_mistakes_are_marked(mask: str, message: str, marked: str) -> None:
    ((text, place),) = doubts(mask)
    assert message in text
    assert place == marked


@pytest.mark.parametrize(
    "mask",
    [
        "(q_pos >= kv) & (q_pos - kv < 5)",
        "(kv & 3) == 0 and q_pos >= kv",
        "kv & 1 == 0",  # of an integer: as Python reads it
        "~(q_pos >= kv)",
        "allowed[b, kv] & (kv < 5)",
        "q_pos >= kv and kv < small or q_pos - kv < window",
        "0 <= q_pos - kv < window",
        "q_pos >= kv and q_pos // 128 == kv // 128",
        "zero <= 0 or q_pos - kv < zero",  # a constant switches a part off
        "q_pos >= 0 and doc[b, max(q_pos, 0)] == doc[b, kv]",
        "kv % 64 < small",
        "q_pos >= kv and small < 63",
        "True",
        "False",
    ],
)
def test_intended_conditions_are_not_marked(mask: str) -> None:
    assert doubts(mask) == []


def test_mistakes_in_scores_and_values_are_marked() -> None:
    ((text, place),) = doubts("q_pos >= kv", score="s if kv >= 0 else -inf")
    assert "always true" in text
    assert place == "kv >= 0"
    ((text, _),) = doubts("early and q_pos >= kv", let={"early": "kv < 0"})
    assert "'kv < 0' is never true" in text
    ((text, _),) = doubts("f(kv)", let={"f(x)": "x >= q & x < 5"})
    assert "'&' binds tighter" in text
    assert doubts("not on or q_pos >= kv", let={"on": "True"}) == []
    ((text, _),) = doubts("on and q_pos >= kv", let={"on": "False"})
    assert "the mask is never true, so no query sees a key" in text


@pytest.mark.parametrize(
    ("extent", "meant"),
    [
        ("seq_k", "seqlen_k"), ("seqlenk", "seqlen_k"), ("kv_len", "seqlen_k"), ("seqlen_kk", "seqlen_k"),
        ("head", "h"), ("num_heads", "h"), ("kv_head", "hk"), ("batch", "b"), ("toal_q", "total_q"),
        ("widht", "width"),
        ("width", None), ("docs", None), ("n", None), ("buckets", None),
    ],
)  # fmt: skip
def test_an_extent_that_is_nearly_a_known_one(extent: str, meant: str | None) -> None:
    fields = {
        "mask": "kv < t[0] + width",
        "scalars": {"width": {"type": "int32"}},
        "tensors": {"t": {"dtype": "int32", "shape": [extent]}},
    }
    reported = doubts_of_fields("mine", fields)
    assert [doubt.field for doubt in reported] == ([] if meant is None else ["tensors.t.shape"])
    if meant is not None:
        assert f"the extent '{extent}' is new, of any length that a call brings" in reported[0].message
        assert f"did you mean '{meant}'?" in reported[0].message


@few("name", preset_names(), always=range(0, 999, 3))
def test_no_preset_is_doubted(name: str) -> None:
    assert doubtful(declared_preset(name)) == []


@pytest.mark.exhaustive
def test_no_shipped_spec_is_doubted() -> None:
    paths = sorted(resources.specs_dir().rglob("*.yaml"))
    assert len(paths) > 20
    for path in paths:
        spec = load_spec(path)
        assert [str(remark) for one in spec.variants.values() for remark in doubtful(one)] == [], path
