"""Small tables that a score reads at computed indices: which ones, and where the entry of a pair lies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from attngen.lang.ir import Expr
from attngen.lang.printing import canonical
from attngen.lang.tables import ENTRY_BYTES, MOST_ENTRIES, Table, tables, with_places, without_tables
from attngen.lang.variant import Variant
from tests.plan.specs import planned
from tests.sampling import few

LET = "near(d): 'clamp(d, -16, 15) + 16', y(i): 'i % 49 // 7', x(i): 'i % 7', end(i): 'i + 40 if i < 0 else i'"
HELD = [
    ("table[h, near(q // 64 - kv // 64), near(q % 64 - kv % 64)]", (1, 2), (32, 32)),
    ("table[h, 0, (y(q) - y(kv) + 6) * 13 + (x(q) - x(kv) + 6)]", (2,), (169,)),
    ("table[y(q) - y(kv) + 6, x(q) - x(kv) + 6, h]", (0, 1), (13, 13)),
    ("table[min(max(q - 2 * kv, -3), 4) + 3, q % 4, kv % 8]", (0, 1, 2), (8, 4, 8)),
    ("table[h, q % 49, kv % 49]", (1, 2), (49, 49)),
    ("table[max(min(q_pos // 3 - kv // 5, 9), 0), h, 2]", (0,), (10,)),
    ("table[(3 if q % 2 == kv % 2 else q % 3) + 1, h, 2]", (0,), (5,)),
    ("table[h, hk, min(abs(q // 8 - kv // 8), 20)]", (2,), (21,)),
    ("table[h, (end(q // 3 % 8 + kv % 2)), 2]", (1,), (9,)),  # as torch's indices are read
]


def scored(score: str, **fields: Any) -> Variant:
    declared = (
        f"variants:\n  own:\n    score: '{score}'\n    let: {{{LET}}}\n"
        "    tensors: {table: {dtype: fp32, shape: [rows, columns, more]}, far: {dtype: int32, shape: [seqlen_k]}}\n"
    )
    return planned("own", declared=declared, backend="cuda", arch="sm90a", **fields).variant


def found(score: str) -> tuple[Table, ...]:
    variant = scored(score)
    assert variant.score is not None
    return tables(variant.score, variant)


def value(expr: Expr, **names: int) -> int:
    def select(condition: bool, a: int, b: int) -> int:
        return a if condition else b

    result: int = eval(canonical(expr), {"select": select, **names})
    return result


@few(("element", "axes", "extents"), HELD, always=range(0, 999, 2))
def test_the_place_of_an_entry_is_that_of_its_indices(
    element: str, axes: tuple[int, ...], extents: tuple[int, ...]
) -> None:
    (table,) = found(f"s + {element}")
    assert (table.axes, table.extents) == (axes, extents)
    rng = random.Random(0)
    for _ in range(300):
        names = {"q": rng.randrange(5000), "kv": rng.randrange(5000), "h": rng.randrange(8), "hk": 1, "b": 0}
        names["q_pos"] = names["q"] + 40
        number = 0
        for axis, extent in zip(axes, extents, strict=True):
            index = value(table.load.indices[axis], **names)
            assert 0 <= index < extent
            number = number * extent + index
        assert value(table.place, **names) == ENTRY_BYTES * number
        others = [axis for axis in range(3) if axis not in axes]
        entry = table.entry(table.load.indices[axes[0]])  # any expression may stand for the number
        assert all(entry.indices[axis] == table.load.indices[axis] for axis in others)


@pytest.mark.parametrize(
    "element",
    [
        "table[h, near(q // 64 - kv // 64), q - kv]",  # any number
        "table[h, clamp(q // 2 - kv, 0, 70), clamp(q - kv // 2, 0, 70)]",  # too many
        "table[h, q % 64, 3]",  # of the query alone
        "table[h, 1, far[kv] % 8 + q % 8]",  # of a tensor
        "table[h, clamp(q // 8 - kv // 8, -3, 3), 0]",  # from the end
    ],
)
def test_tables_that_are_not_held(element: str) -> None:
    assert found(f"s + {element}") == ()


def test_the_largest_tables_that_fit_together() -> None:
    both = found("s + table[h, q % 64, kv % 63] + table[h, q % 7, kv % 9] + table[h, q % 2, kv % 2]")
    assert [each.entries for each in both] == [64 * 63, 63]
    assert sum(each.entries for each in both) <= MOST_ENTRIES


def test_expressions_without_the_loads() -> None:
    variant = scored("s + 2.0 * table[h, q % 49, kv % 49]")
    assert variant.score is not None
    held = tables(variant.score, variant)
    assert canonical(without_tables(variant.score, held)) == "s + 2.0 * s"
    assert canonical(with_places(variant.score, held)) == "s + 2.0 * (q % 49 * 196 + kv % 49 * 4)"
