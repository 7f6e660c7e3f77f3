"""Backward kernels in CUDA add up the gradients of a variant's tensors."""

from __future__ import annotations

from random import Random

import pytest

from attngen.families.hopper_backward.structure import HopperBackward
from attngen.lang.ir import Const, Expr, Op, Var
from attngen.lang.simplify import FOLD
from attngen.plan import Plan
from attngen.plan.own_gradients import APART, Way, gradients_of, stored_gradients
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few

DECLARED = """variants:
  own:
    mask: "q_pos >= kv"
    score: "{score}"
    tensors:
      gate: {{dtype: float32, shape: [h], grad: true}}
      table: {{dtype: float32, shape: [h, 257], grad: true}}
      grid: {{dtype: float32, shape: [15, 15], grad: true}}
      keys: {{dtype: bf16, shape: [b, seqlen_k], grad: true}}
      packed: {{dtype: float32, shape: [total_k], grad: true}}
      rows: {{dtype: float32, shape: [h, seqlen_q], grad: true}}
      bias: {{dtype: bf16, shape: [h, seqlen_q, seqlen_k], grad: true}}
      wide: {{dtype: float32, shape: [b, h, seqlen_q, seqlen_k], grad: true}}
      bucket: {{dtype: int32, shape: [512]}}
"""


def backward(score: str, **fields: object) -> Plan:
    """Return the backward of a score, in the backend that is the fastest."""
    return planned("own", passes="backward", backward=None, declared=DECLARED.format(score=score), **fields)


@few(
    ("score", "ways"),
    [
        ("s + gate[h]", [Way.HEAD]),
        ("s * sigmoid(gate[h])", [Way.HEAD]),
        ("s + gate[h] * (kv - q_pos)", [Way.HEAD]),
        ("s + keys[b, kv]", [Way.KEY]),
        ("s + packed[kv_global] - packed[total_k - 1 - kv_global]", [Way.KEY, Way.KEY]),
        ("s + rows[h, q]", [Way.ROW]),
        ("s + rows[h, q] - rows[h, kv]", [Way.ROW, Way.KEY]),
        ("s + table[h, clamp(q_pos - kv + 128, 0, 256)]", [Way.DIAGONAL]),
        ("s + table[h, min(abs(q - kv), 256)]", [Way.DIAGONAL]),
        ("s + table[h, bucket[clamp(2 * kv - 2 * q_pos + 255, 0, 511)]] / (1 + abs(q_pos - kv))", [Way.DIAGONAL]),
        ("s + grid[clamp(q // 8 - kv // 8, -7, 7) + 7, clamp(q % 8 - kv % 8, -7, 7) + 7]", [Way.EACH]),
        ("s + grid[q // 64 % 15, kv // 8 % 15] * (kv // 24)", [Way.BLOCK]),
        ("s + table[h, bucket[min(q // 128 + 3 * (kv // 128), 511)]]", [Way.BLOCK]),
        ("s + grid[q // 64 % 15, kv // 4 % 15]", [Way.EACH]),
        ("s + grid[q_pos // 64 % 15, kv // 64 % 15]", [Way.EACH]),
        ("s + table[h, min(q_pos - kv, 128) + (128 if kv > q_pos else 0)]", [Way.DIAGONAL]),
        ("s + table[h, clamp(q + kv, 0, 256)]", [Way.EACH]),
        ("s + table[h, clamp(q_pos - kv, 0, 256)] * q", [Way.EACH]),
        ("s + bias[h, q, kv]", [Way.PAIR]),
        ("s + 0.5 * wide[b, h, q, kv]", [Way.PAIR]),
        ("s + wide[b // 4, h % 2, q, kv]", [Way.PAIR]),
        ("s + wide[q // 4, h, q, kv]", [Way.EACH]),
        ("s + wide[b, h, q, kv] * wide[b, h, q, kv]", [Way.EACH]),
        ("s * table[h, clamp(q_pos - kv, 0, 256)]", [Way.EACH]),
        ("s * gate[h] + bias[h, q, kv]", [Way.HEAD, Way.EACH]),
        ("tanh(s + rows[h, q])", [Way.EACH]),
    ],
    always=range(0, 999, 3),
)
def test_ways(score: str, ways: list[Way]) -> None:
    kernel = backward(score, head_dim=64)
    assert kernel.backend == "cuda"
    gradients = gradients_of(kernel.variant, fast_math=True)
    assert [each.way for each in gradients] == ways
    assert isinstance(kernel.structure, HopperBackward)
    by_consumers = [each.in_registers or each.by_warps for each in gradients]
    assert kernel.structure.reads_ds == (not all(by_consumers))
    text = render(kernel).text
    assert ("tensor_sum_0" in text) == any(each.in_registers for each in gradients)
    assert ("ds_ring.wait();" in text) == kernel.structure.reads_ds
    assert render(backward(score, head_dim=64)).text == text


@pytest.mark.parametrize(
    "index",
    [
        "q_pos - kv", "q - kv", "3 * (kv - q_pos) + 7 * h", "q - kv + (q_pos - kv)",
        "abs(q - kv) // 3 + seqlen_k - q + kv",
        "min(2 * kv + 5 - q - q_pos, kv - q) % 17", "-(q - (kv + h)) * 4",
        "min(abs(q - kv), 9) + (10 if kv > q else 0) + (20 if q_pos == kv + 3 else 0)",
    ],
)  # fmt: skip
def test_differences_of_query_and_key(index: str) -> None:
    """The index as a function of the difference has the values of the index."""
    (gradient,) = gradients_of(backward(f"s + table[h, clamp({index}, 0, 256)]").variant, fast_math=True)
    assert gradient.way is Way.DIAGONAL
    random = Random(index)
    for _ in range(200):
        seqlen_q, seqlen_k = random.randint(1, 90), random.randint(1, 90)
        q, kv, h = random.randrange(seqlen_q), random.randrange(seqlen_k), random.randrange(4)
        q_pos = q + seqlen_k - seqlen_q
        values = {"q": q, "q_pos": q_pos, "kv": kv, "h": h, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        moved = value_of(
            gradient.indices[1], {APART.name: q_pos - kv, "h": h, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        )
        assert moved == value_of(gradient.load.indices[1], values)


def value_of(node: Expr, values: dict[str, int]) -> int:
    """Return the value of an integer expression."""
    if isinstance(node, Const):
        return int(node.value)
    if isinstance(node, Var):
        return values[node.name]
    assert isinstance(node, Op)
    return int(FOLD[node.op](*(value_of(argument, values) for argument in node.args)))


@few(
    ("score", "way"),
    [
        ("s + gate[h]", Way.DIAGONAL),
        ("s + gate[h] * (kv - q_pos)", Way.DIAGONAL),
        ("s - gate[h] * abs(q_pos - kv)", Way.DIAGONAL),
        ("s + keys[b, kv] * gate[h]", None),
        ("s + packed[kv_global]", Way.COLUMN),
        ("s + rows[h, q]", Way.ROW),
        ("s + table[h, min(abs(q - kv), 256)]", Way.DIAGONAL),
        ("s + bias[h, q, kv]", Way.PAIR),
        ("s * sigmoid(gate[h])", None),
        ("s + gate[h] * kv", None),
        ("s + table[h, clamp(q + kv, 0, 256)]", None),
        ("s + table[h, min(q // 128 + 3 * (kv // 128), 256)]", Way.BLOCK),
        ("tanh(s + rows[h, q])", None),
    ],
    always=range(0, 999, 3),
)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_heads_have_what_tiles_of_ds_give(score: str, way: Way | None, head_dim: int) -> None:
    kernel = backward(score, head_dim=head_dim)
    if way is None:
        assert kernel.backend == "triton"
        assert "own tensors (grad: true) beyond head dim 128" in kernel.backend_reason
        return
    assert kernel.backend == "cuda"
    assert {each.way for each in gradients_of(kernel.variant, fast_math=True, tiles_only=True)} == {way}
    assert kernel.structure.registers_of("tensor_adder") >= 32
    text = render(kernel).text
    assert "tensor_sum_0" not in text
    assert "const DsRing ds_ring(buffer, phase, here);" in text


def test_gradients_of_biases_are_cleared_by_kernels_whose_mask_may_hide_tiles() -> None:
    kernel = backward("s + bias[h, q, kv]")
    assert isinstance(kernel.structure, HopperBackward)
    assert kernel.structure.clears
    assert "cleared_u_bias" in {one.name for one in kernel.arguments}
    assert "clear(tile)" in render(kernel).text
    for score, fields in (("s + bias[h, q, kv]", {"layout": "varlen"}), ("s + 2.0 * bias[h, q, kv]", {})):
        assert "cleared_u_bias" not in {one.name for one in backward(score, **fields).arguments}


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_consumers_take_turns_though_a_derivative_is_kept_until_dp_is_there(head_dim: int) -> None:
    structure = backward("s * sigmoid(gate[h])", head_dim=head_dim).structure
    assert isinstance(structure, HopperBackward)
    assert structure.overlap == "pingpong"


def test_places_of_large_gradients_are_counted_in_64_bits() -> None:
    keys = render(backward("s + keys[b, kv]")).text
    assert "gradient_u_keys + static_cast<long long>(b) * extent_u_keys_1 + kv" in keys
    each = render(backward("s * wide[b, h, q, kv]")).text
    assert "const long long entry = " in each
    assert "const int entry = " in render(backward("s * table[h, clamp(q_pos - kv, 0, 256)]")).text


def test_gradients_of_biases_that_are_stored_as_they_are() -> None:
    (bias,) = stored_gradients(backward("s + bias[h, q, kv]"))
    assert bias.prefix == {"h"}
    for score in ("s + wide[b, h, q, kv]", "s + 0.5 * wide[b, h, q, kv]"):  # in float32
        assert [each.prefix for each in stored_gradients(backward(score))] == [{"b", "h"}]
    for score in ("s + 2.0 * bias[h, q, kv]", "s + bias[0, q, kv] + bias[1, q, kv]", "s * wide[b, h, q, kv]"):
        assert stored_gradients(backward(score)) == ()
    assert stored_gradients(backward("s + bias[h, q, kv]", dtype="fp16")) == ()
    with_sink = DECLARED.replace("    tensors:", "    sink: bias[h, 0, 0]\n    tensors:")
    with_sink = with_sink.format(score="s + bias[h, q, kv]")
    assert stored_gradients(planned("own", passes="backward", backward=None, declared=with_sink)) == ()
    arguments = {one.name: one for one in backward("s + bias[h, q, kv]").arguments}
    assert arguments["stored_u_bias"].axis == "h"


def test_kernels_without_gradients_of_tensors_have_none_of_it() -> None:
    text = render(planned("causal", passes="backward")).text
    for word in ("tensor", "DsStep", "dlogit"):
        assert word not in text


@pytest.mark.parametrize(
    ("index", "repeats"),
    [
        ("clamp(q - kv + 128, 0, 256)", True),
        ("(q - kv) // 4", True),
        ("q - kv + 128", False),
        ("3 * (kv - q_pos)", False),
    ],
)
def test_diagonals_with_entries_of_their_own_are_known(index: str, repeats: bool) -> None:
    (gradient,) = gradients_of(backward(f"s + table[h, {index}]").variant, fast_math=True)
    assert (gradient.way, gradient.repeats) == (Way.DIAGONAL, repeats)


@pytest.mark.parametrize(
    ("score", "head_dim", "by_warps"),
    [
        ("s + table[h, q - kv + 128]", 128, True),
        ("s + grid[q // 128 % 15, kv // 16 % 15]", 64, True),
        ("s + grid[q // 64 % 15, kv // 16 % 15]", 128, True),
        ("s + grid[q // 48 % 15, kv // 16 % 15]", 128, True),
        ("s + grid[q // 8 % 15, kv // 64 % 15]", 128, False),
        ("s + grid[q // 64 % 15, kv // 8 % 15]", 128, False),
        ("s + table[h, q - kv + 128] + rows[h, q]", 128, True),
        ("s + table[h, q - kv + 128]", 256, False),
    ],
)
def test_consumers_add_up_diagonals_and_blocks_of_their_warps(score: str, head_dim: int, by_warps: bool) -> None:
    kernel = backward(score, head_dim=head_dim)
    text = render(kernel).text
    assert ("DiagonalsOfWarp" in text or "_sums[16 * i" in text) == by_warps
    assert ("ds_ring.wait();" in text) == (not by_warps or "rows" in score)
