"""Numbers that headers of kernels and the host both know are the same."""

from __future__ import annotations

import re

import pytest

from attngen.manifest import STRUCTS
from attngen.plan.pipes import ROW_PADDING
from attngen.runtime.geometry.map_shape import SLOTS_OF_WORD
from tests.render.headers import headers


@pytest.mark.parametrize(
    ("header", "pattern", "number"),
    [
        ("tile_map.cuh", r"kSlotsOfWord = (\d+);", SLOTS_OF_WORD),
        ("split.cuh", r"kFloats = kWidth \+ (\d+);", ROW_PADDING),
    ],
)
def test_a_constant_of_a_header_is_that_of_the_host(header: str, pattern: str, number: int) -> None:
    assert re.findall(pattern, headers()[header]) == [str(number)]


def test_a_divisor_has_the_bytes_that_the_host_passes() -> None:
    (fields,) = re.findall(r"struct Divisor \{\n(.*?)\n\n", headers()["divisor.cuh"], re.DOTALL)
    assert re.findall(r"(?:int|uint32_t) (\w+);", fields) == ["value", "multiplier", "shift"]
    assert STRUCTS["divisor"] == (3 * 4, 4)
