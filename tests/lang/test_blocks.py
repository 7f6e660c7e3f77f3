"""Blocks of pairs on which masks are constant, and masks as one pair of a block evaluates them."""

from __future__ import annotations

import pytest

from attngen.lang.blocks import Block, at_corner, block_of
from attngen.lang.check import compile_variant
from attngen.lang.facts import Facts
from attngen.lang.ir import Expr
from attngen.lang.printing import canonical
from attngen.lang.statistics import separated
from attngen.lang.variant import Tensor

TENSORS = (
    Tensor("sel", "bool", ("h", "rows", "columns")), Tensor("by_row", "bool", ("rows", "columns")),
    Tensor("kind", "int32", ("rows",)), Tensor("sees", "bool", ("kinds", "kinds")),
)  # fmt: skip


def mask_of(text: str) -> Expr:
    return compile_variant("test", text, None, (), TENSORS).mask


@pytest.mark.parametrize(
    ("mask", "block", "corner"),
    [
        ("sel[h, q // 64, kv // 64]", (64, 64), "sel[h, q_lo // 64, kv_lo // 64]"),
        ("sel[h, q >> 6, kv // 32] and kv <= q", (64, 32), "sel[h, q_lo >> 6, kv_lo // 32] and kv <= q"),
        ("sel[h, q // 256, kv // 256]", (128, 128), "sel[h, q_lo // 256, kv_lo // 256]"),
        ("sel[h, q // 96, kv // 64]", (32, 64), "sel[h, q_lo // 96, kv_lo // 64]"),
        ("by_row[q, kv // 64]", (1, 64), "by_row[q_lo, kv_lo // 64]"),
        ("by_row[q_pos, kv // 64]", (1, 64), "by_row[q_pos_lo, kv_lo // 64]"),
        ("by_row[(q + 32) // 64, kv // 64]", (32, 64), "by_row[(q_lo + 32) // 64, kv_lo // 64]"),
        ("by_row[q // 64 % 4, kv // 64]", (64, 64), "by_row[q_lo // 64 % 4, kv_lo // 64]"),
        ("kind[q // 64] == kind[kv // 64]", (64, 64), "kind[q_lo // 64] == kind[kv_lo // 64]"),
        ("sees[kind[q // 64], kind[kv // 32]]", (64, 32), "sees[kind[q_lo // 64], kind[kv_lo // 32]]"),
        # a condition of pairs is left to them
        ("sel[h, q // 64, kv // 64] or by_row[q, kv]", (64, 64), "sel[h, q_lo // 64, kv_lo // 64] or by_row[q, kv]"),
        ("sel[h, q // 64, kv // 64] and q // 32 >= kv // 32", (64, 64),
         "sel[h, q_lo // 64, kv_lo // 64] and q // 32 >= kv // 32"),
        ("by_row[q, kv]", None, None),
        ("by_row[q // 2, kv // 4]", None, None),
        ("kind[q // 64] > 3", None, None),
        ("q // 64 >= kv // 64", None, None),
        ("by_row[q_pos // 64, kv // 64]", (1, 64), "by_row[q_pos_lo // 64, kv_lo // 64]"),
    ],
)  # fmt: skip
def test_a_block_is_one_element_of_each_tensor(mask: str, block: Block | None, corner: str | None) -> None:
    parsed = mask_of(mask)
    assert block_of(parsed, (128, 128)) == block
    if block is not None:
        assert canonical(at_corner(parsed, block)) == corner


def test_what_differs_from_block_to_block_is_no_statistic() -> None:
    mask = at_corner(mask_of("by_row[q // 128, kv // 8] or by_row[q, kv // 8]"), (128, 8))
    facts = Facts.of(compile_variant("test", "True", None, (), TENSORS))
    assert not separated(mask, facts).statistics
