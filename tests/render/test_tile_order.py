"""Order in which a Hopper forward goes through the tiles of keys that its rows see."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace

import pytest

from attngen.render import render
from tests.plan.specs import planned


def source(variant: str = "causal", m: int = 128, n: int = 128, **fields: str) -> str:
    tile = f"{{m: {m}, n: {n}}}"
    return render(planned(variant, backend="cuda", arch="sm90a", dtype="bf16", tile=tile, **fields)).text


def visited(text: str, lo: int, hi: int, full_lo: int, full_hi: int) -> list[int]:
    """Return the tiles in the order of the kernel's own lines, run as Python."""
    (any_whole,) = re.findall(r"const bool any_whole = (.+);", text)
    (first,) = re.findall(r"const int first = \(any_whole \? (.+) : (.+)\) - 1;", text)
    (place,) = re.findall(r"const int place = (.+);", text)
    names = {"every": SimpleNamespace(visible_lo=lo, visible_hi=hi, full_lo=full_lo, full_hi=full_hi), "tiles": hi - lo}

    def number(line: str) -> int:
        return int(eval(line.replace("all.", "every."), {"min": min, "max": max}, names))

    names["first"] = number(first[0] if number(any_whole) else first[1]) - 1
    assert "const int tile = remaining == tiles ? first : place + (place >= first);" in text
    order = []
    for remaining in range(hi - lo, 0, -1):
        names["remaining"] = remaining
        at = number(place)
        order.append(names["first"] if remaining == hi - lo else at + (at >= names["first"]))
    return order


def test_each_tile_comes_once_and_a_whole_one_first() -> None:
    text = source()
    for lo, hi, full_lo, full_hi in product(range(3), range(1, 6), range(6), range(6)):
        if hi <= lo:
            continue
        order = visited(text, lo, hi, full_lo, full_hi)
        whole = [tile for tile in range(lo, hi) if full_lo <= tile < full_hi]
        first = whole[-1] if whole else hi - 1
        assert order == [first, *(tile for tile in range(hi - 1, lo - 1, -1) if tile != first)]


@pytest.mark.parametrize("layout", ["varlen", "paged"])
def test_loaders_of_all_layouts_agree(layout: str) -> None:
    text = source(layout=layout)
    loaders = 2 if layout == "paged" else 1
    assert text.count("const int first = ") == text.count("const int place = ") == loaders


def test_the_order_is_the_keys_where_nothing_is_gained() -> None:
    """Every tile is whole; the consumers skip tiles of their own; there are two ranges of tiles."""
    for text in (source("full"), source(m=192, n=80), source("sink_window")):
        assert "const int first = " not in text
