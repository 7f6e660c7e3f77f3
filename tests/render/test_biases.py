"""Elements of scores at [..., q, kv]: which of them come as tiles, by the loader of K and V, or of Q and dO."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.arch import ARCHES
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.families.hopper_forward.structure import HopperForward
from attngen.lang.biases import biases
from attngen.plan import Plan
from attngen.plan.attempts import attempts
from attngen.render import render
from tests.plan.specs import kernel_spec, planned
from tests.sampling import few

TABLE = "bias: {{dtype: {}}}, table: {{dtype: fp32, shape: [h, 6]}}"
OF_HEADS = "bias: {dtype: bf16, shape: [h, seqlen_q, seqlen_k]}"
OF_GROUPS = "bias: {dtype: bf16, shape: [groups, h, seqlen_q, seqlen_k]}"
OF_FLOATS = "bias: {dtype: fp32, shape: [h, seqlen_q, seqlen_k]}"


def scored(score: str, tensors: str, mask: str = "True", **fields: Any) -> Plan:
    """Return the plan of a Hopper forward with a score."""
    declared = f"variants:\n  own: {{mask: '{mask}', score: '{score}', tensors: {{{tensors}}}}}\n"
    given = {"dtype": "bf16", "head_dim": 128, "backend": "cuda", **fields}
    return planned("own", declared=declared, arch="sm90a", **given)


def tiled(plan: Plan) -> int:
    """Number of biases that come as tiles, which the source agrees with."""
    assert isinstance(plan.structure, HopperForward)
    text = render(plan).text
    assert ("biases_ring.wait();" in text) == ('#include "biases.cuh"' in text) == (plan.structure.biases > 0)
    return plan.structure.biases


@few(
    ("score", "tensors", "count"),
    [
        ("s + bias[h, q, kv]", OF_HEADS, 1),
        ("s + 0.5 * bias[q, kv]", "bias: {dtype: fp16, shape: [seqlen_q, seqlen_k]}", 1),
        ("s + bias[b, hk, q, kv]", "bias: {dtype: bf16, shape: [b, hk, seqlen_q, seqlen_k]}", 1),
        ("s + bias[0, q, kv] + bias[1, q, kv]", "bias: {dtype: bf16, shape: [2, seqlen_q, seqlen_k]}", 2),
        ("s + bias[b // 4, heads - 1 - h, q, kv]", OF_GROUPS, 1),
        ("s + bias[b * total_q, h, q, kv]", OF_GROUPS, 0),
        ("s + bias[int(h * 0.5), h, q, kv]", OF_GROUPS, 1),
        ("s + bias[first[b], h, q, kv]", f"{OF_GROUPS}, first: {{dtype: int32, shape: [b]}}", 0),  # read from memory
        ("s * exp(bias[h, q, kv]) + bias[h, q, kv]", OF_HEADS, 1),
        ("s + bias[h, q, kv]", "bias: {dtype: fp32, shape: [h, seqlen_q, seqlen_k]}", 1),
        ("s + 0.5 * bias[q, kv]", "bias: {dtype: int8, shape: [seqlen_q, seqlen_k]}", 1),
        ("s + table[h, bias[q, kv]]", TABLE.format("int32, shape: [seqlen_q, seqlen_k]"), 1),
        ("s + table[h, bias[q, kv]]", TABLE.format("int64, shape: [seqlen_q, seqlen_k]"), 0),  # 8 bytes
        # a tile has zeros beyond the tensor
        ("s + table[h, bias[q, kv]]", TABLE.format("int8, shape: [seqlen_q, seqlen_k], range: {min: 1, max: 5}"), 0),
        ("s + bias[h, q_pos, kv]", OF_HEADS, 0),
        ("s + bias[h, kv, q]", OF_HEADS, 0),
        ("s + bias[h, q, kv // 2]", OF_HEADS, 0),
        ("s + bias[kv % 2, q, kv]", OF_HEADS.replace("h,", "2,"), 0),  # another one for each key
        ("s + bias[h, kv]", "bias: {dtype: bf16, shape: [h, seqlen_k]}", 0),
    ],
    always=range(0, 999, 3),
)
def test_biases_that_come_as_tiles(score: str, tensors: str, count: int) -> None:
    plan = scored(score, tensors)
    assert tiled(plan) == len(biases(plan.variant)) == count


def test_the_loader_brings_them_and_consumers_read_no_element() -> None:
    text = render(scored("s + bias[b, h, q, kv]", "bias: {dtype: bf16, shape: [b, h, seqlen_q, seqlen_k]}")).text
    loader, consumer = text.split("// A consumer: 64 query rows.")
    assert "map_u_bias, biases_ring.full(), tile * kBlockN + key, q_start, bias_h, bias_b);" in loader
    assert "const int bias_h = stride_u_bias_1 == 0 && extent_u_bias_1 > 1 ? 0 : h;" in loader
    assert "u_bias[" not in text
    assert "element_of<bf16>(bias_pairs, i, row)" in consumer


def test_tiles_that_several_batch_entries_read_stay_in_l2() -> None:
    """The loader computes the index that they share, without a division."""
    rows = "scalars: {rows: {type: int32, min: 1}}"
    declared = f"variants:\n  own: {{score: 's + bias[b // rows, h, q, kv]', {rows}, tensors: {{{OF_GROUPS}}}}}\n"
    fields = {"head_dim": 32, "dtype": "bf16", "arch": "sm90a", "declared": declared}
    forward = render(planned("own", **fields, backend="cuda")).text
    passed = render(planned("own", **fields, passes="backward", backward="{backend: cuda}")).text
    for text in (forward, passed):
        group = "const int bias_b_div_rows = stride_u_bias_0 == 0 && extent_u_bias_0 > 1 ? 0 : b / by_u_rows;"
        assert text.count(group) == 1
        assert "q_start, bias_h, bias_b_div_rows);" in text
        assert "load_box_once(" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "paged"},
        {"pack_gqa": "true"},
        {"tile": "{m: 128, n: 80}"},  # copies bring 32 keys
        {"tile": "{m: 128, n: 128}"},  # no room
    ],
    ids=lambda fields: next(iter(fields.items())),
)
def test_consumers_load_elements_where_tiles_do_not_fit(fields: dict[str, str]) -> None:
    plan = scored("s + bias[h, q, kv]", OF_HEADS, **fields)
    assert tiled(plan) == 0
    assert "u_bias[" in render(plan).text or "+ u_bias" in render(plan).text


@few("head_dim", [64, 96, 128, 192, 256], always=range(0, 999, 3))
@pytest.mark.parametrize("mask", ["True", "kv <= q_pos", "0 <= q_pos - kv and q_pos - kv < 500"])
def test_tiles_fit_shared_memory(mask: str, head_dim: int) -> None:
    plan = scored("s + bias[h, q, kv]", OF_HEADS, mask, head_dim=head_dim)
    assert tiled(plan) == 1
    assert isinstance(plan.structure, HopperForward)
    (region,) = (one for one in plan.structure.shared if one.name == "biases")
    assert region.bytes == plan.structure.bias_stages * plan.tile_m * plan.tile_n * 2
    assert region.offset % 1024 == 0
    assert plan.structure.bias_stages >= 2
    assert plan.structure.shared_bytes <= ARCHES["sm90a"].shared_memory


@few(
    ("dtype", "more", "bounded"),
    [("bf16", "", True), ("fp32", "", True), ("bf16", ", range: {min: -100.0, max: 0.0}", False), ("fp16", "", False)],
    always=range(0, 999, 2),
)
def test_logits_are_bounded_where_a_bias_may_be_the_least_value_of_its_dtype(
    dtype: str, more: str, bounded: bool
) -> None:
    """The least value of fp16 is far above the bound."""
    bias = f"bias: {{dtype: {dtype}, shape: [h, seqlen_q, seqlen_k]{more}}}"
    for score in ("s + bias[h, q, kv]", "s + 0.5 * bias[h, q, kv]", "s + bias[h, q, kv] if h < 4 else s"):
        forward = render(scored(score, bias)).text
        declared = f"variants:\n  own: {{score: '{score}', tensors: {{{bias}}}}}\n"
        fields = {"passes": "backward", "backward": "{backend: cuda}", "declared": declared}
        backward = render(planned("own", head_dim=128, dtype="bf16", arch="sm90a", **fields)).text
        assert ("-131072.0f" in forward) == ("-131072.0f" in backward) == bounded


@pytest.mark.exhaustive
def test_a_sum_with_biases_alone_is_multiplied_once() -> None:
    text = render(scored("s + bias[h, q, kv]", OF_HEADS)).text
    assert "= x * softmax_scale + element_of<bf16>(bias_pairs, i, row);" in text
    assert "exponentiate<Element>(s, kLog2e, row_max, p, sum);" in text


@pytest.mark.parametrize(
    ("table", "mask", "held"),
    [
        ("table[h, bias[q, kv]]", "True", "entry_of_any(entry_1_held, element_of<signed char>(bias_pairs, i, row))"),
        (
            "table[h, bias[q, kv] + 6 if bias[q, kv] < 0 else bias[q, kv]]",
            "True",
            "entry_of_any(entry_1_held, from_end(element_of<signed char>(bias_pairs, i, row), 6))",
        ),
        ("table[h, bias[q, kv] + 1]", "True", ""),
        ("(table[h, bias[q, kv]] if q > kv else 0.0)", "True", ""),  # not all lanes ask
    ],
)
def test_entries_of_small_tables_are_held_by_lanes(table: str, mask: str, held: str) -> None:
    text = render(scored(f"s + {table}", TABLE.format("int8, shape: [seqlen_q, seqlen_k]"), mask)).text
    assert (held in text) if held else ("entry_of" not in text)


HIDING = "bias: {{dtype: int8, shape: [seqlen_q, seqlen_k]{}}}, table: {{dtype: fp32, shape: [h, 6]}}"
IN_RANGE = ", range: {min: 0, max: 4}"


@few(
    ("score", "mask", "values", "hides"),
    [
        ("s + table[h, bias[q, kv]]", "bias[q, kv] <= 2", IN_RANGE, True),
        ("s * 0.5 + (table[h, bias[q, kv]] - 1.0)", "bias[q, kv] != 1 and bias[q, kv] < 4", IN_RANGE, False),
        ("s * 0.5 + (table[h, bias[q, kv]] + 1.0)", "bias[q, kv] != 1 and bias[q, kv] < 4", IN_RANGE, True),
        ("s + table[h, bias[q, kv]]", "bias[q, kv] <= 2", "", False),  # any integer
        ("s + table[h, bias[q, kv]]", "bias[q, kv] <= 2 and kv <= q_pos", IN_RANGE, False),
        ("s + table[h, bias[q, kv]]", "True", IN_RANGE, False),
        ("s * table[h, bias[q, kv]]", "bias[q, kv] <= 2", IN_RANGE, False),
        ("s + table[h, bias[q, kv]] + tanh(table[h, bias[q, kv]])", "bias[q, kv] <= 2", IN_RANGE, False),
    ],
    always=range(0, 999, 2),
)
def test_entries_hide_pairs(score: str, mask: str, values: str, *, hides: bool) -> None:
    forward, passed = scored(score, HIDING.format(values), mask), backward(score, HIDING.format(values), mask)
    for plan in (forward, passed):
        assert plan.structure.hides_by_entries == hides
        text = render(plan).text
        assert (": -kInfinity;" in text) == hides
        assert ("Entries of the table hide pairs" in text) == hides


def test_a_single_number_beside_a_bias_is_no_table() -> None:
    tensors = f"{OF_HEADS}, gate: {{dtype: float32, shape: []}}"
    text = render(scored("s * gate + bias[h, q, kv]", tensors)).text
    assert "entry_of" not in text


@pytest.mark.exhaustive
def test_what_fits_comes_as_tiles() -> None:
    """Beside 128 columns a backward has room for four bytes of a pair."""
    both = f"{OF_FLOATS}, d: {{dtype: int8, shape: [seqlen_q, seqlen_k]}}"
    score = "s + bias[h, q, kv] + 0.1 * d[q, kv]"
    assert (tiled(scored(score, both)), scored(score, both).structure.bias_bytes) == (2, 5)
    assert backward(score, both, head_dim=64).structure.bias_bytes == 5
    plan = backward(score, both)
    assert (plan.structure.biases, plan.structure.bias_bytes) == (1, 4)
    text = render(plan).text
    assert "element_of<float>(bias_pairs, " in text
    assert "u_d[" in text


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dq_is_rounded_straight_from_l2_where_tiles_of_four_bytes_take_its_memory(dtype: str) -> None:
    plan = backward("s + bias[h, q, kv]", f"bias: {{dtype: {dtype}, shape: [h, seqlen_q, seqlen_k]}}")
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.stages_dq == (dtype == "bf16")
    assert ("DqBlockRing(slot" in render(plan).text) == plan.structure.stages_dq


def test_a_declared_range_spares_a_comparison() -> None:
    dtype = "int8, shape: [seqlen_q, seqlen_k], range: {min: 0, max: 5}"
    text = render(scored("s + table[h, bias[q, kv]]", TABLE.format(dtype))).text
    assert "entry_of_lane(entry_1_held, " in text
    assert "const float entry_1_held = u_table_h_lane * kLog2e;" in text


# --- backward ---------------------------------------------------------------------------------------------------


def backward(score: str, tensors: str, mask: str = "True", **fields: Any) -> Plan:
    """Return the plan of a backward with a score."""
    declared = f"variants:\n  own: {{mask: '{mask}', score: '{score}', tensors: {{{tensors}}}}}\n"
    given = {"dtype": "bf16", "head_dim": 128, "backward": "{backend: cuda}", "passes": "backward", **fields}
    return planned("own", declared=declared, arch="sm90a", **given)


def tiled_by_keys(plan: Plan) -> int:
    """Number of biases that come as tiles, which the source agrees with."""
    assert isinstance(plan.structure, HopperBackward)
    text = render(plan).text
    assert ("biases_ring.wait();" in text) == ('#include "bias_columns.cuh"' in text) == (plan.structure.biases > 0)
    return plan.structure.biases


@few(
    ("score", "tensors", "count"),
    [
        ("s + bias[h, q, kv]", OF_HEADS, 1),
        ("s + 0.5 * bias[q, kv]", "bias: {dtype: fp16, shape: [seqlen_q, seqlen_k]}", 1),
        ("s * exp(bias[h, q, kv]) + bias[h, q, kv]", OF_HEADS, 1),
        ("s + bias[h, q, kv] - slope[q]", f"{OF_HEADS}, slope: {{dtype: fp32, shape: [seqlen_q]}}", 1),
        ("s + bias[h, q, kv]", OF_FLOATS, 1),
        ("s + 0.5 * bias[q, kv]", "bias: {dtype: int8, shape: [seqlen_q, seqlen_k]}", 1),
        ("s + table[h, bias[q, kv]]", TABLE.format("int32, shape: [seqlen_q, seqlen_k]"), 1),
        ("s + table[h, bias[q, kv]]", TABLE.format("int64, shape: [seqlen_q, seqlen_k]"), 0),  # 8 bytes
        # a tile has zeros beyond the tensor
        ("s + table[h, bias[q, kv]]", TABLE.format("int8, shape: [seqlen_q, seqlen_k], range: {min: 1, max: 5}"), 0),
        ("s + bias[h, q_pos, kv]", OF_HEADS, 0),
        ("s + bias[b // 4, h, q, kv]", OF_GROUPS, 1),
    ],
    always=range(0, 999, 3),
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_that_come_as_tiles_in_a_backward(score: str, tensors: str, count: int, head_dim: int) -> None:
    assert tiled_by_keys(backward(score, tensors, head_dim=head_dim)) == count


def test_the_loader_of_queries_brings_them_for_each_consumer() -> None:
    tensors = "bias: {dtype: bf16, shape: [b, h, seqlen_q, seqlen_k]}"
    text = render(backward("s + bias[b, h, q, kv]", tensors)).text
    loader, consumer = text.split("// A consumer: 64 keys.")
    assert "load_box_once(to, map_u_bias, ring.full(), kv_start + 64 * consumer, q_start, bias_h, bias_b);" in loader
    assert "const int bias_h = stride_u_bias_1 == 0 && extent_u_bias_1 > 1 ? 0 : h;" in loader
    assert "u_bias[" not in text
    assert "element_of<bf16>(bias_pairs, 2 * i + j, row)" in consumer


def test_the_derivative_reads_the_same_tiles() -> None:
    text = render(backward("s * exp(bias[h, q, kv])", OF_HEADS)).text
    assert "u_bias[" not in text
    assert "const float derivative = " in text


@few("head_dim", [64, 80, 96, 128], always=range(0, 999, 3))
@pytest.mark.parametrize("mask", ["True", "kv <= q_pos", "0 <= q_pos - kv and q_pos - kv < 500"])
def test_tiles_of_a_backward_fit_shared_memory(mask: str, head_dim: int) -> None:
    plan = backward("s + bias[h, q, kv]", OF_HEADS, mask, head_dim=head_dim)
    assert tiled_by_keys(plan) == 1
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.pingpong
    (region,) = (one for one in plan.structure.shared if one.name == "biases")
    assert region.bytes == plan.structure.bias_stages * plan.tile_m * plan.tile_n * 2
    assert region.offset % 1024 == 0
    assert plan.structure.shared_bytes <= ARCHES["sm90a"].shared_memory


def test_clusters_load_elements() -> None:
    assert tiled_by_keys(backward("s + bias[h, q, kv]", OF_HEADS, head_dim=256)) == 0


@pytest.mark.parametrize(("dtype", "count"), [("bf16", 2), ("fp32", 1)])
def test_as_many_biases_come_as_tiles_as_there_is_room_for(dtype: str, count: int) -> None:
    tensors = f"bias: {{dtype: {dtype}, shape: [2, seqlen_q, seqlen_k]}}"
    assert tiled_by_keys(backward("s + bias[0, q, kv] + bias[1, q, kv]", tensors)) == count


def test_the_last_attempts_of_a_backward_load_elements() -> None:
    declared = f"variants:\n  own: {{score: 's + bias[h, q, kv]', tensors: {{{OF_HEADS}}}}}\n"
    spec = kernel_spec("own", declared=declared, passes="backward", backward="{backend: cuda}", head_dim=128)
    tiles = [plan.structure.biases for plan in attempts(spec) if isinstance(plan.structure, HopperBackward)]
    assert tiles == sorted(tiles, reverse=True)
    assert {0, 1} == {*tiles}


@few(
    ("tensors", "fields", "hides"),
    [
        (OF_HEADS, {}, False),  # what lies beyond the tensor arrives as zeros
        (OF_HEADS, {"layout": "varlen"}, True),
        ("bias: {dtype: bf16, shape: [h, rows, seqlen_k]}", {}, True),
    ],
    always=range(0, 999, 3),
)
def test_elements_of_other_queries_are_hidden(tensors: str, fields: dict[str, Any], hides: bool) -> None:
    text = render(backward("s + bias[h, q, kv]", tensors, **fields)).text
    assert ("if (8 * i + j >= queries_left) x = kMasked;" in text) == hides


def test_a_lane_of_a_backward_holds_two_entries_of_larger_tables() -> None:
    dtype = "int8, shape: [seqlen_q, seqlen_k], range: {min: 0, max: 39}"
    for entries, held in (
        (40, "entry_of_lane(entry_1_held, entry_1_held_above, "),
        (64, "entry_1_held_above"),
        (65, ""),
    ):
        tensors = TABLE.format(dtype).replace("shape: [h, 6]", f"shape: [h, {entries}]")
        text = render(backward("s + table[h, bias[q, kv]]", tensors)).text
        assert (held in text) if held else ("entry_of" not in text)
        assert "entry_of" not in render(scored("s + table[h, bias[q, kv]]", tensors)).text
    declared = TABLE.format("int8, shape: [seqlen_q, seqlen_k]").replace("shape: [h, 6]", "shape: [h, 40]")
    text = render(backward("s + table[h, bias[q, kv]]", declared)).text
    assert "entry_of_any(entry_1_held, entry_1_held_above, element_of<signed char>(" in text
    assert "u_lane_plus_32 < extent_u_table_1" in text  # no lane reads beyond the table
