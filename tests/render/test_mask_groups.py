"""In 8 bits, keys are masked in groups, and a group that all rows of a warp see whole is left alone."""

from __future__ import annotations

import re

import pytest

from attngen.render import render
from tests.plan.specs import planned

#: Keys of a lane in a group of 16, from its own first one.
LANE_KEYS = (0, 1, 8, 9)


def source(variant: str, **fields: str) -> str:
    return render(planned(variant, backend="cuda", arch="sm90a", **{"dtype": "fp8_e4m3", **fields})).text


@pytest.mark.parametrize("variant", ["causal", "sliding_window"])
def test_a_group_is_left_alone_if_and_only_if_it_is_seen_whole(variant: str) -> None:
    found = re.search(r"if \((.*first \+ kMaskGroup.*)\) continue;", source(variant))
    assert found is not None
    asked = re.fullmatch(r"(first >= all_visible_from && )?first \+ kMaskGroup - (\d+) < all_visible_to", found[1])
    assert asked is not None
    ends_below = asked[1] is not None
    assert ends_below == (variant == "sliding_window")
    for lower in range(-2, 20) if ends_below else (-1000,):
        for upper in range(-2, 20):
            alone = lower <= 0 and 16 - int(asked[2]) < upper
            assert alone == all(lower <= key < upper for key in LANE_KEYS)


def test_ends_are_those_of_all_rows_of_a_warp() -> None:
    text = source("sliding_window")
    assert "__reduce_max_sync(~0u, max(rows[0].visible_from, rows[1].visible_from))" in text
    assert "__reduce_min_sync(~0u, min(rows[0].visible_to, rows[1].visible_to))" in text


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("full", {}),  # but for keys after the end, all are seen
        ("softcap", {}),  # all elements are computed
        ("packed_documents", {}),  # the mask asks for more than two ends
        ("sink_window", {}),
        ("causal", {"dtype": "bf16"}),
    ],
)
def test_other_masks_have_no_groups(variant: str, fields: dict[str, str]) -> None:
    assert "kMaskGroup" not in source(variant, **fields)
