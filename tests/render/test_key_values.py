"""A mask's values of keys come with a tile of K, and its values of rows stay for a work tile."""

from __future__ import annotations

import re

import pytest

from attngen.families.hopper_backward.structure import HopperBackward
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.model import Plan
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few


def masked(mask: str, tensors: str, **fields: str) -> tuple[int, str]:
    """Number of values of a key that the plan has room for, and the kernel's source."""
    declared = f"variants:\n  own: {{mask: '{mask}', tensors: {{{tensors}}}}}\n"
    plan = planned("own", declared=declared, backend="cuda", arch="sm90a", **{"dtype": "bf16", **fields})
    assert isinstance(plan.structure, HopperForward)
    return plan.structure.key_values, render(plan).text


DOCUMENTS = (
    "doc[b, q_pos] == doc[b, kv]",
    "doc: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1, order: nondecreasing}}",
)


def test_the_loader_loads_for_keys_and_consumers_for_rows_once() -> None:
    count, text = masked(*DOCUMENTS)
    loader, consumer = text.split("// A consumer: 64 query rows.")
    assert count == 1
    assert "key_values[i] = {u_doc_kv};" in loader
    assert "const auto [u_doc_kv] = of_key(key);" in consumer
    assert "const int u_doc_kv =" not in consumer
    once, steps = consumer.split("const auto finish_logits")
    assert "const int u_doc_q_pos =" in once
    assert "u_doc[" not in steps


def test_values_of_keys_in_8_bits() -> None:
    count, text = masked(*DOCUMENTS, dtype="fp8_e4m3")
    assert count == 1
    assert "key_values[i] = {u_doc_kv};" in text


def test_in_a_backward_they_come_with_the_queries() -> None:
    plan = planned("packed_documents", passes="backward", head_dim=128, backward="{backend: cuda}")
    loader, consumer = render(plan).text.split("// A consumer: 64 keys.")
    assert "values[i] = {u_doc_q_pos};" in loader
    assert "const auto [u_doc_q_pos] = of_query(8 * i + j);" in consumer
    assert "const int u_doc_q_pos =" not in consumer


@pytest.mark.parametrize(
    ("mask", "tensors", "count"),
    [
        ("x[q] > y[kv]", "x: {dtype: fp32, shape: [seqlen_q]}, y: {dtype: bf16, shape: [seqlen_k]}", 1),
        ("q_pos - kv <= w[h, q]", "w: {dtype: int32, shape: [h, seqlen_q]}", 1),
        ("x[q] > y[q]", "x: {dtype: fp32, shape: [seqlen_q]}, y: {dtype: fp32, shape: [seqlen_q]}", 0),  # one has room
        ("x[q] > 0", "x: {dtype: int64, shape: [seqlen_q]}", 0),  # 8 bytes
        ("far[q, kv] > 0", "far: {dtype: int32, shape: [seqlen_q, seqlen_k]}", 0),  # one for each pair
        ("seen[b, kv]", "seen: {dtype: bool, shape: [b, seqlen_k]}", 0),
    ],
)
def test_values_that_come_with_the_queries_of_a_backward(mask: str, tensors: str, count: int) -> None:
    declared = f"variants:\n  own: {{mask: '{mask}', tensors: {{{tensors}}}}}\n"
    plan = planned(
        "own", declared=declared, passes="backward", head_dim=128, backward="{backend: cuda}", tile_map="never"
    )
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == count
    assert ("QueryValues values[kBlockM / 32];" in render(plan).text) == (count > 0)


def test_values_that_decide_nothing_are_not_loaded() -> None:
    """Both arms show the same keys, which are an interval."""
    mask = "kv <= q_pos if x[{0}] > 0 else kv <= q_pos"
    assert masked(mask.format("kv"), "x: {dtype: int32, shape: [n]}")[0] == 0
    declared = f"variants:\n  own: {{mask: '{mask.format('q')}', tensors: {{x: {{dtype: int32, shape: [n]}}}}}}\n"
    plan = planned("own", declared=declared, passes="backward", head_dim=128, backward="{backend: cuda}")
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == 0
    assert "u_x[" not in render(plan).text


def test_the_index_of_a_value_is_computed_where_it_is_loaded() -> None:
    plan = planned("causal_packed", passes="backward", head_dim=128, backward="{backend: cuda}")
    loader, consumer = render(plan).text.split("// A consumer: 64 keys.")
    assert "const int u_q_pos_max_0 = max(q_pos, 0);" in loader
    assert "u_doc_start[" not in consumer


@pytest.mark.parametrize(
    ("mask", "tensors", "count"),
    [
        (*DOCUMENTS, 1),
        ("seen[b, kv]", "seen: {dtype: bool, shape: [b, seqlen_k]}", 1),
        ("x[kv] > y[kv]", "x: {dtype: fp32, shape: [seqlen_k]}, y: {dtype: bf16, shape: [n]}", 2),
        ("place[b, kv] <= q_pos", "place: {dtype: int64, shape: [b, seqlen_k]}", 0),  # 8 bytes
        ("rank[of[kv]] == 1", "rank: {dtype: int32, shape: [n]}, of: {dtype: int32, shape: [seqlen_k]}", 0),
        ("far[q, kv] > 0", "far: {dtype: int32, shape: [seqlen_q, seqlen_k]}", 0),  # one for each pair
        ("lengths[b] > kv", "lengths: {dtype: int32, shape: [b]}", 0),
    ],
)
def test_values_of_at_most_a_word_that_all_rows_share(mask: str, tensors: str, count: int) -> None:
    words, text = masked(mask, tensors, tile_map="never")
    assert words == (count if "KeyValues" in text else 0)
    assert (count > 0) == ("struct KeyValues" in text)


@pytest.mark.parametrize(
    ("mask", "tensors", "count", "line"),
    [
        ("x[kv] > y[kv + 1]", "x: {dtype: fp32, shape: [seqlen_k]}, y: {dtype: bf16, shape: [n]}", 2, "kv + 1"),
        (
            "x[kv] > 0 and y[kv] < q_pos",  # read only where the first one shows the key
            "x: {dtype: int32, shape: [seqlen_k]}, y: {dtype: int32, shape: [seqlen_k]}",
            2,
            "u_x_kv > 0;",
        ),
        (
            "y[kv] < q_pos if kv % 3 == 0 and seqlen_q > 5 else x[b, kv_global // 4] > q",
            "x: {dtype: int32, shape: [b, total_k]}, y: {dtype: int32, shape: [seqlen_k]}",
            3,  # and whether 3 divides the key
            "kv_packed",
        ),
    ],
)
def test_the_loader_computes_what_loads_need(mask: str, tensors: str, count: int, line: str) -> None:
    planned, text = masked(mask, tensors, layout="varlen" if "global" in mask else "dense", tile_map="never")
    loader, consumer = text.split("// A consumer: 64 query rows.")
    assert planned == count
    assert line in loader.split("KeyValues key_values[")[1].split("key_values[i] = {")[0]
    assert "const auto [u_" in consumer
    assert "u_x[" not in consumer
    assert "u_y[" not in consumer


def scored(score: str, tensors: str, *, mask: str = "q >= kv", **fields: object) -> Plan:
    """Return the plan of a score over declared tensors and the scalar ``w``."""
    scalars = "scalars: {w: {type: float32}, n: {type: int32, min: 1, max: 4096}}, "
    declared = f"variants:\n  own: {{mask: '{mask}', score: '{score}', {scalars}tensors: {{{tensors}}}}}\n"
    return planned("own", declared=declared, **{"backend": "cuda", "dtype": "bf16", "tile_map": "never", **fields})


FORGETTING = "s + (f[h, q] - f[h, kv])", "f: {dtype: fp32, shape: [h, seqlen_k]}"


def parts(plan: Plan) -> tuple[str, str, str]:
    """Return the loader of a forward, and its consumer before and in the steps."""
    loader, consumer = render(plan).text.split("// A consumer: 64 query rows.")
    once, steps = consumer.split("const auto finish_logits")
    return loader, once, steps


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_loader_computes_what_a_score_takes_of_a_key(head_dim: int) -> None:
    plan = scored(*FORGETTING, head_dim=head_dim)
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.key_values == 1
    loader, once, steps = parts(plan)
    assert "u_f_h_kv_times_LOG2E = u_f_h_kv * kLog2e;" in loader
    assert "key_values[i] = {u_f_h_kv_times_LOG2E};" in loader
    assert "of_rows[row] = {u_f_h_q};" in once
    assert steps.count("const auto [u_f_h_kv_times_LOG2E] = of_key(key);") == 2  # partial tiles and full ones
    assert steps.count("(u_row_value - u_f_h_kv_times_LOG2E);") == 2
    assert steps.count("const float u_row_value = u_f_h_q * kLog2e - counted_from[row];") == 2
    assert "u_f_h[" not in steps


def test_what_is_unknown_of_a_tensor_costs_its_loads_alone() -> None:
    """The kernel of a FlexAttention score_mod, whose tensors declare no extents, has the same steps."""
    declared = FORGETTING[1].replace("[h, seqlen_k]", "[f_0, f_1]")
    steps, other = parts(scored(*FORGETTING))[2], parts(scored(FORGETTING[0], declared))[2]
    assert other == steps


@few(
    ("score", "tensors", "fields"),
    [
        ("s + f[kv]", "f: {dtype: int32, shape: [n_keys]}", ["u_f_kv_float_times_LOG2E"]),
        ("s * g[b, kv] + w * f[kv]", "f: {dtype: fp16, shape: [n_keys]}, g: {dtype: bf16, shape: [b, n_keys]}",
         ["u_g_kv", "u_f_kv_times_w_times_LOG2E"]),
        ("s + table[id[kv]]", "table: {dtype: fp32, shape: [64]}, id: {dtype: int32, shape: [n_keys]}",
         ["u_table_id_kv_times_LOG2E"]),
        ("s - 2 * exp(w * kv)", "", ["u_value_of_key"]),  # functions, too
        ("s * f[kv] + f[kv]", "f: {dtype: fp32, shape: [n_keys]}", ["u_f_kv", "u_f_kv_times_LOG2E"]),
        ("s - w * (kv - q)", "", []),  # sums and products alone: consumers know their keys
        ("s + f[q, kv]", "f: {dtype: fp32, shape: [seqlen_q, n_keys]}", []),  # one for each pair
        ("s + f[q]", "f: {dtype: fp32, shape: [seqlen_q]}", []),
        ("s if f[kv] > 0 else 0.5 * s", "f: {dtype: int64, shape: [n_keys]}", []),  # 8 bytes
    ], always=range(0, 999, 2))  # fmt: skip
def test_which_parts_of_a_score_are_values_of_a_key(score: str, tensors: str, fields: list[str]) -> None:
    plan = scored(score, tensors)
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.key_values == len(fields)
    loader, _, steps = parts(plan)
    assert (f"key_values[i] = {{{', '.join(fields)}}};" in loader) == bool(fields)
    if fields:
        assert f"const auto [{', '.join(fields)}] = of_key(key);" in steps
    assert not re.search(r"u_(f|g|table|id)(_b)?\[\w*kv", steps) or not fields


def test_a_tile_map_leaves_the_score_to_values_of_a_key() -> None:
    plan = scored("s + f[kv]", "doc: {dtype: int32, shape: [seqlen_k]}, f: {dtype: fp32, shape: [seqlen_k]}",
                  mask="doc[q] == doc[kv]", tile_map="always")  # fmt: skip
    assert isinstance(plan.structure, HopperForward)
    assert plan.iteration == "tile_map"
    assert plan.structure.key_values == 1
    assert "Values that the score reads of a key" in render(plan).text


def test_packed_heads_have_values_of_their_own() -> None:
    for pack, count in (("true", 0), ("false", 1)):
        plan = scored(*FORGETTING, pack_gqa=pack)
        assert isinstance(plan.structure, HopperForward)
        assert plan.structure.key_values == count


def test_there_is_room_for_values_of_mask_and_score() -> None:
    tensors = "{doc: {dtype: int32, shape: [b, seqlen_k]}, bias: {dtype: fp32, shape: [seqlen_k]}}"
    declared = f"variants:\n  own: {{mask: 'doc[b, kv] <= q', score: 's + bias[kv]', tensors: {tensors}}}\n"
    plan = planned("own", declared=declared, backend="cuda", dtype="bf16", tile_map="never")
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.key_values == 2
    text = render(plan).text
    assert "Values that mask and score read of a key" in text
    assert "key_values[i] = {u_doc_kv, u_bias_kv_times_LOG2E};" in text
    # full tiles take that of the score
    assert text.count("const auto [u_doc_kv, u_bias_kv_times_LOG2E] = of_key(key);") == 2


def test_values_of_a_head_do_not_come_with_packed_heads() -> None:
    own = "of_head[h, kv] > 0", "of_head: {dtype: int32, shape: [h, seqlen_k]}"
    assert masked(*own, tile_map="never")[0] == 1
    assert masked(*own, pack_gqa="true", tile_map="never")[0] == 0


def divided(mask: str, **fields: object) -> Plan:
    """Return the plan of a mask over three sizes that the call gives."""
    sizes = ", ".join(f"{name}: {{type: int32, min: 1, max: 4096}}" for name in ("n", "m", "w") if name in mask)
    declared = f"variants:\n  own: {{mask: '{mask}', scalars: {{{sizes}}}}}\n"
    given = {"backend": "cuda"} if fields.get("passes") != "backward" else {"backward": "{backend: cuda}"}
    return planned("own", declared=declared, dtype="bf16", tile_map="never", **given, **fields)


@few(
    ("mask", "head_dim", "values"),
    [
        ("(q_pos - kv) % n == 0", 128, ["u_kv_mod_n"]),
        ("abs(q % n - kv % n) <= w and abs(q // n % m - kv // n % m) <= w", 64,
         ["u_kv_mod_n", "u_kv_div_n_mod_m"]),
        # the costlier one has room
        ("abs(q % n - kv % n) <= w and abs(q // n % m - kv // n % m) <= w", 128, ["u_kv_div_n_mod_m"]),
        ("q_pos // n == kv // n", 128, []),  # a range of keys, which rows know
        ("kv // 64 % 4 == q % 4", 128, []),
    ], always=range(0, 999, 3))  # fmt: skip
def test_the_loader_divides_for_keys(mask: str, head_dim: int, values: list[str]) -> None:
    plan = divided(mask, head_dim=head_dim)
    loader, consumer = render(plan).text.split("// A consumer: 64 query rows.")
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.key_values == len(values)
    if values:
        assert f"key_values[i] = {{{', '.join(values)}}};" in loader
        assert f"const auto [{', '.join(values)}] = of_key(key);" in consumer
        assert not any(f"{name} =" in consumer for name in values)


@pytest.mark.parametrize(
    ("mask", "values"),
    [
        ("(q_pos - kv) % n == 0", ["u_q_pos_mod_n"]),
        ("q_pos >= kv and q_pos // n == kv // n", ["u_q_pos_div_n_times_n"]),
        ("abs(q // n - kv // n) <= w", ["u_q_div_n"]),  # a comparison costs less than the ends of its keys
        ("q_pos >= kv", []),
    ],
)
def test_in_a_backward_the_loader_divides_for_queries(mask: str, values: list[str]) -> None:
    plan = divided(mask, head_dim=64, passes="backward")
    loader, consumer = render(plan).text.split("// A consumer: 64 keys.")
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == len(values)
    if values:
        assert f" = {{{', '.join(values)}}};" in loader
        assert f"const auto [{', '.join(values)}] = of_query(8 * i + j);" in consumer


@pytest.mark.parametrize(
    ("mask", "score", "values"),
    [
        ("q_pos >= kv and q_pos // n == kv // n", "s + x[q] + y[kv]", ["u_q_pos_div_n_times_n"]),
        ("x[q] > kv and (q - kv) % n == 0", "s", ["u_x_q"]),  # what is loaded comes first
        ("x[q] // n == kv // n", "s", ["u_x_q"]),
    ],
)
def test_in_a_backward_with_tensors(mask: str, score: str, values: list[str]) -> None:
    tensors = "x: {dtype: int32, shape: [seqlen_q]}, y: {dtype: fp32, shape: [seqlen_k]}"
    declared = (
        f"variants:\n  own: {{mask: '{mask}', score: '{score}', tensors: {{{tensors}}}, "
        "scalars: {n: {type: int32, min: 1}}}\n"
    )
    plan = planned(
        "own", declared=declared, passes="backward", backward="{backend: cuda}", dtype="bf16", tile_map="never"
    )
    assert f" = {{{', '.join(values)}}};" in render(plan).text


@pytest.mark.exhaustive
def test_no_kernel_divides_by_scalars() -> None:
    """All roles multiply by reciprocals instead."""
    for mask in ("(q_pos - kv) % n == 0", "abs(q // (n * m) - kv // (n * m)) <= w", "q_pos // n == kv // n"):
        for fields in ({}, {"passes": "backward"}, {"layout": "varlen"}, {"split_kv": True, "passes": "forward"}):
            text = render(divided(mask, head_dim=64, **fields)).text
            assert "const Divisor by_u_n" in text
            assert not re.search(r"[/%] \(?u_[nm]\b|floor_(div|mod)\([^;]*, u_|floor_(div|mod)\(static_cast", text)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_in_a_backward_the_loader_computes_what_a_score_takes_of_a_query(head_dim: int) -> None:
    plan = scored(*FORGETTING, head_dim=head_dim, passes="backward", backend=None, backward="{backend: cuda}")
    loader, consumer = render(plan).text.split("// A consumer: 64 keys.")
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == 1
    assert plan.structure.pingpong
    assert "values[i] = {u_f_h_q_times_LOG2E};" in loader
    assert consumer.count("const auto [u_f_h_q_times_LOG2E] = of_query(8 * i + j);") == 2
    assert "u_f_h_q =" not in consumer


@pytest.mark.parametrize(
    ("score", "mask", "count"),
    [
        ("s + f[q_pos]", "q >= kv", 1),
        ("s + f[q] * exp(w * q)", "q >= kv", 1),
        ("s + f[q] * f[kv]", "q >= kv", 1),
        ("s + f[q] - f[q_pos]", "q >= kv", 0),  # one has room
        ("s * f[q]", "q >= kv", 0),  # its derivative varies
        ("s + f[kv]", "q >= kv", 0),
        ("s + f[q]", "f[q_pos] > kv", 0),  # both read it
        ("s + exp(w * q)", "q >= kv", 0),  # consumers have the registers for that
    ],
)
def test_which_parts_of_a_score_are_values_of_a_query(score: str, mask: str, count: int) -> None:
    plan = scored(score, "f: {dtype: fp32, shape: [n_keys]}", mask=mask, passes="backward", backend=None,
                  backward="{backend: cuda}")  # fmt: skip
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == count
    assert ("Values that the score reads of a query" in render(plan).text) == (count > 0)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_values_of_distances_come_with_a_tile(passes: str) -> None:
    declared = (
        "variants:\n  own: {score: 's + t[h, clamp(q - kv, 0, 9)]', tensors: {t: {dtype: fp32, shape: [h, 10]}}}\n"
    )
    fields = {"backend": "cuda"} if passes == "forward" else {"passes": "backward", "backward": "{backend: cuda}"}
    plan = planned("own", declared=declared, head_dim=128, **fields)
    loader, consumer = render(plan).text.split("// A consumer: 64 ")
    assert plan.structure.distance_values == 1
    assert "of_distance(key - 8 * row)" in consumer or "of_distance(row, 8 * i + j)" in consumer
    assert "u_t" not in consumer.replace("u_t_", "")
    assert "min(max(distance, 0), 9)" in loader


def test_values_of_distances_beside_values_of_keys_know_their_key() -> None:
    """Also in full tiles, where nothing else reads the place of a key."""
    declared = (
        "variants:\n  own:\n    mask: 'q_pos >= kv and doc[b, q_pos] == doc[b, kv]'\n"
        "    score: 's + t[h, clamp(q_pos - kv, 0, 9)]'\n    tensors:\n      t: {dtype: fp32, shape: [h, 10]}\n"
        "      doc: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1}}\n"
    )
    plan = planned("own", declared=declared, backend="cuda")
    consumer = render(plan).text.split("// A consumer: 64 ")[1]
    assert plan.structure.distance_values == plan.structure.key_values == 1
    assert consumer.count("of_distance(key - 8 * row)") == consumer.count("const int key = 8 * (i / 2)") == 2


def test_values_of_distances_of_heads_that_share_rows_are_of_each_pair() -> None:
    declared = "variants:\n  own: {score: 's + t[clamp(q - kv, 0, 9)]', tensors: {t: {dtype: fp32, shape: [10]}}}\n"
    plan = planned("own", declared=declared, backend="cuda", pack_gqa="true")
    assert plan.structure.distance_values == 0
