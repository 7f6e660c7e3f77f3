"""Bounds by which kernels classify 32 tiles at a time read no tensor after the last key of a sequence."""

from __future__ import annotations

import pytest

from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few

DOCUMENTS = "doc: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1}}"
CLIPPED = "kv_hi = min(kv_lo + kBlockN, seqlen_k) - 1"


@few("tile_map", ["auto", "never"])
@pytest.mark.parametrize(
    ("mask", "tensors", "clipped"),
    [
        ("(q ^ kv) & 3 != 2 and q_pos >= 0 and doc[b, q_pos] == doc[b, kv]", DOCUMENTS, True),
        ("(q ^ kv) & 3 != 2 and kv % n == 0", "", False),
    ],
)
def test_the_last_key_of_a_tile_exists_where_a_tensor_is_read_there(
    mask: str, tensors: str, clipped: bool, tile_map: str
) -> None:
    declared = (
        f"variants:\n  own: {{mask: '{mask}', tensors: {{{tensors}}}, scalars: {{n: {{type: int32, min: 1}}}}}}\n"
    )
    plan = planned("own", declared=declared, backend="cuda", arch="sm90a", dtype="bf16", tile_map=tile_map)
    assert (CLIPPED in render(plan).text) == (clipped and tile_map == "never")  # a map is made by statistics


def test_a_tile_map_of_a_mask_that_reads_a_tensor_without_axes() -> None:
    declared = (
        "variants:\n  own: {mask: '(q ^ kv) & 3 != 2 and kv >= start', tensors: {start: {dtype: int32, shape: []}}}\n"
    )
    plan = planned("own", declared=declared, backend="cuda", arch="sm90a", dtype="bf16")
    assert "// Makes the tile map" in render(plan).text


ALLOWED = "allowed: {dtype: bool, shape: [seqlen_q, columns]}"
SELECTED = "allowed: {dtype: bool, shape: [rows, columns]}"


@few(
    ("mask", "tensors", "cell"),
    [
        ("doc[b, q] == doc[b, kv]", "doc: {dtype: int32, shape: [b, seqlen_k]}", (32, 32)),
        ("allowed[q, kv // 128]", ALLOWED, (1, 128)),
        ("q >= kv and allowed[q, kv // 128]", ALLOWED, (1, 128)),
        ("allowed[q // 32, kv // 128]", SELECTED, (32, 128)),  # bounds leave nothing open
        ("q >= kv and allowed[q // 32, kv // 128]", SELECTED, (32, 32)),
        (
            " and ".join(f"abs(q // n % {m} - kv // n % {m}) < n" for m in (3, 5, 7, 11, 13)),
            "",
            (128, 128),
        ),  # long bounds
    ],
    always=range(0, 999, 3),
)
def test_cells_of_tiles(mask: str, tensors: str, cell: tuple[int, int]) -> None:
    declared = (
        f"variants:\n  own: {{mask: '{mask}', tensors: {{{tensors}}}, scalars: {{n: {{type: int32, min: 1}}}}}}\n"
    )
    plan = planned("own", declared=declared, backend="cuda", arch="sm90a", dtype="bf16", tile_map="always")
    assert (plan.tile_m, plan.tile_n) == (128, 128)
    assert "kCellRows = {}, kCellKeys = {};".format(*cell) in render(plan).text


@few(
    ("mask", "scanned", "in_order"),
    [
        ("allowed[q, kv]", True, True),
        ("not allowed[q - n, kv + 32 * n] or q == kv", True, True),
        ("allowed[q // 2, kv - 16]", True, False),
        ("allowed[q, 2 * kv]", False, False),
        ("allowed[q, kv + q]", False, False),
        ("allowed[kv, q]", False, False),
    ],
    always=range(0, 999, 3),
)
def test_bools_of_pairs_are_read_16_at_a_time_where_keys_follow_each_other(
    mask: str, scanned: bool, in_order: bool
) -> None:
    declared = (
        f"variants:\n  own: {{mask: '{mask}', tensors: {{allowed: {{dtype: bool, shape: [rows, columns]}}}}, "
        "scalars: {n: {type: int32, min: 1}}}\n"
    )
    text = render(planned("own", declared=declared, backend="cuda", arch="sm90a", dtype="bf16", tile_map="always")).text
    assert ("reinterpret_cast<const uint4*>(keys)" in text, "has_row(" in text) == (scanned, in_order)


def test_positions_that_a_mask_hides_do_not_widen_ranges() -> None:
    declared = (
        "variants:\n  own: {mask: 'q >= kv or id[q] > 0 and id[q] == id[kv]', "
        "tensors: {id: {dtype: int32, shape: [n]}}}\n"
    )
    text = render(planned("own", declared=declared, backend="cuda", arch="sm90a", dtype="bf16", tile_map="always")).text
    assert "if (u_id_q_gt_0) of_queries_1.take(u_id_q);" in text
    assert " of_keys_0.take(u_id_kv);" in text
