"""What a mask loads for keys comes with a tile of K, and what it loads for rows stays for a tile of work."""

from __future__ import annotations

import pytest

from attngen.plan.schedules.structures import HopperBackward, HopperForward
from attngen.render import render
from tests.plan.specs import planned


def masked(mask: str, tensors: str, **fields: str) -> tuple[int, str]:
    """Return how many values of a key the plan has room for, and the kernel's source."""
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


def test_in_8_bits_too() -> None:
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
def test_which_values_come_with_the_queries_of_a_backward(mask: str, tensors: str, count: int) -> None:
    declared = f"variants:\n  own: {{mask: '{mask}', tensors: {{{tensors}}}}}\n"
    plan = planned("own", declared=declared, passes="backward", head_dim=128, backward="{backend: cuda}")
    assert isinstance(plan.structure, HopperBackward)
    assert plan.structure.query_values == count
    assert ("QueryValues values[kBlockM / 32];" in render(plan).text) == (count > 0)


def test_what_such_a_value_needs_is_computed_where_it_is_loaded() -> None:
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
    found, text = masked(mask, tensors)
    assert found == (count if "KeyValues" in text else 0)
    assert (count > 0) == ("struct KeyValues" in text)


def test_if_one_needs_another_statement_all_are_read_by_pairs() -> None:
    tensors = "x: {dtype: fp32, shape: [seqlen_k]}, y: {dtype: bf16, shape: [n]}"
    planned, text = masked("x[kv] > y[kv + 1]", tensors)
    assert planned == 2
    assert "struct KeyValues" not in text
    assert all(f"{name}[static_cast<long long>(" in text for name in ("u_x", "u_y"))


def test_those_of_a_head_differ_between_rows_of_packed_heads() -> None:
    own = "of_head[h, kv] > 0", "of_head: {dtype: int32, shape: [h, seqlen_k]}"
    assert masked(*own)[0] == 1
    assert masked(*own, pack_gqa="true", tile_map="never")[0] == 0
