"""Order in which a Hopper forward goes through the tiles of keys that its rows see."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.lang.statements import Statement
from attngen.render import render
from attngen.render.cuda_math import logits
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


def test_a_whole_tile_of_the_last_range_comes_first() -> None:
    text = source("sink_window")
    (any_whole,) = re.findall(r"const bool any_whole = (.+);", text)
    (first,) = re.findall(r"const int first = any_whole \? (.+) : tiles - 1;", text)
    assert "const int place = remaining == tiles ? first : remaining - 1 + (remaining > first);" in text
    assert "if (place >= before) tile = all.visible_lo_1 + place - before;" in text
    for hi_0, lo_1, hi_1, full_lo, full_hi in product(range(3), range(2, 4), range(2, 7), range(2, 7), range(2, 7)):
        tiles = [*range(hi_0), *range(lo_1, hi_1)]
        ends = SimpleNamespace(
            visible_lo_0=0,
            visible_hi_0=hi_0,
            visible_lo_1=lo_1,
            visible_hi_1=hi_1,
            full_lo_1=full_lo,
            full_hi_1=full_hi,
        )
        of_kernel = {"min": min, "max": max, "every": ends}
        whole = eval(any_whole.replace("all.", "every."), of_kernel)
        at = eval(first.replace("all.", "every."), of_kernel) if whole else len(tiles) - 1
        order = [tiles[at if left == len(tiles) else left - 1 + (left > at)] for left in range(len(tiles), 0, -1)]
        seen = [tile for tile in range(lo_1, hi_1) if full_lo <= tile < full_hi]
        begin = (seen or tiles)[-1:]
        assert order == [*begin, *(tile for tile in reversed(tiles) if tile not in begin)]


def test_simpler_tests_of_a_partial_tile_hide_the_same_keys() -> None:
    """Wherever their condition holds for the ends of both rows, which count from the first key of a lane."""
    steps = logits(planned("sink_window", backend="cuda", arch="sm90a", dtype="bf16", tile="{m: 128, n: 16}")).partial
    keys = [8 * (i // 2) + i % 2 for i in range(16 // 4)]
    names = [name for _, name in steps.row_values]
    assert names == ["visible_to_0", "visible_from_1", "visible_to_1"]
    assert len(steps.cases) == 4

    def number(code: str, **values: Any) -> bool:
        for c, python in (("||", " or "), ("&&", " and "), ("!(", " not (")):
            code = code.replace(c, python)
        return bool(eval(code, {"kBlockN": 16, **values}))

    def hidden(element: tuple[Statement, ...], row: tuple[int, ...]) -> list[bool]:
        (line,) = element
        (test,) = re.findall(r"^if \((.+)\) x = kMasked;$", line.text)
        return [number(test, key=key, **dict(zip(names, row, strict=True))) for key in keys]

    ends = (-3, 0, 1, 9, 15, 16, 20)
    taken = set()
    for row in product(ends, repeat=3):
        rows = [SimpleNamespace(**dict(zip(names, row, strict=True)))] * 2
        for index, (condition, element) in enumerate(steps.cases):
            if number(condition, rows=rows):
                taken.add(index)
                assert hidden(element, row) == hidden(steps.element, row)
    assert taken == {0, 1, 2, 3}


def test_the_order_is_the_keys_where_nothing_is_gained() -> None:
    """Every tile is whole; the consumers skip tiles of their own; packed sequences have two ranges of tiles."""
    for text in (source("full"), source(m=192, n=80), source("sink_window", layout="varlen")):
        assert "const int first = " not in text
