"""Operands: what a plan says of bytes, copies, products and registers follows from the dtype of each matrix."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from attngen.dtypes import ATTENTION_DTYPES, DTYPES, PROBABILITY_DTYPE, QUANTIZED_DTYPES, dtype
from attngen.errors import PlanError
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.families.hopper_forward.structure import HopperForward
from attngen.parts.floors import floor
from attngen.plan import Plan
from attngen.plan.operands import Operands, operands_of
from tests.plan.one_byte import E4M3, READ, use_one_byte
from tests.plan.specs import kernel_spec, planned


def pair(**fields: object) -> tuple[Plan, Plan]:
    """Return the plan of a kernel of two-byte operands, and that of the same kernel of one-byte operands."""
    two = planned(**fields)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        return two, planned(**fields)  # type: ignore[arg-type]


WRITTEN = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
FORWARD = {"backend": "cuda", "head_dim": 128, "tile": "{m: 128, n: 128}", "pipeline": "{stages: 2}"}


@pytest.fixture(scope="module")
def forwards() -> tuple[Plan, Plan]:
    return pair(**FORWARD)


def regions(plan: Plan) -> dict[str, int]:
    assert isinstance(plan.structure, HopperForward | HopperBackward)
    return {region.name: region.bytes for region in plan.structure.shared}


# --- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_elements_of_chunks_and_registers_follow_from_the_bytes_of_a_dtype(name: str) -> None:
    row = dtype(name)
    for elements, of in ((row.chunk_elements, 16), (row.mma_k, 32)):
        assert elements * row.bytes == of
    assert row.register_elements == 4 // row.bytes


@pytest.mark.parametrize("name", ATTENTION_DTYPES)
def test_operands_of_a_spec_are_of_its_dtype(name: str) -> None:
    operands, written = operands_of(kernel_spec(dtype=name, backend="triton")), QUANTIZED_DTYPES.get(name, name)
    others = {"accumulator": "fp32", "p": PROBABILITY_DTYPE if name in QUANTIZED_DTYPES else name}
    assert {field.name: operands.of(field.name).name for field in fields(Operands)} == {
        field.name: others.get(field.name, name if field.name in ("q", "k", "v") else written)
        for field in fields(Operands)
    }
    plan = planned(dtype=name, backend="cuda" if name in QUANTIZED_DTYPES else "triton")
    assert plan.operands == operands
    assert plan.to_dict()["operands"] == operands.to_dict()


def test_operands_that_a_schedule_needs_alike_are_refused_if_they_differ() -> None:
    operands = replace(operands_of(kernel_spec()), v=dtype("fp16"))
    assert operands.shared("q", "k", "p").name == "bf16"
    with pytest.raises(ValueError, match="one dtype: q bf16, k bf16, v fp16"):
        operands.shared("q", "k", "v")


# --- CUDA forward kernels ------------------------------------------------------------------------------------------


def test_shared_memory_follows_from_each_operand(forwards: tuple[Plan, Plan]) -> None:
    two, one = map(regions, forwards)
    q_stages = [plan.structure.q_stages for plan in forwards]
    assert one["q"] / q_stages[1] == two["q"] / q_stages[0] / 2
    assert (one["k"], one["v"]) == (two["k"] // 2, two["v"] // 2)
    assert one["out"] == two["out"]  # its dtype is the same
    for name in ("work", "k_full", "tile_info"):
        assert one[name] == two[name]


def test_smaller_operands_leave_room_for_more_tiles_of_q() -> None:
    two, one = pair(backend="cuda", head_dim=256)
    assert (two.structure.q_stages, one.structure.q_stages) == (1, 2)


def test_a_copy_brings_as_many_bytes_and_twice_the_columns(forwards: tuple[Plan, Plan]) -> None:
    two, one = ({a.of: a for a in plan.arguments if a.kind == "descriptor"} for plan in forwards)
    for name in ("q", "k", "v"):
        assert one[name].swizzle == two[name].swizzle == 128
        assert (two[name].box[-1], one[name].box[-1]) == (64, 128)
        assert one[name].box[:-1] == two[name].box[:-1]
    assert one["out"] == two["out"]


@pytest.mark.parametrize(
    ("head_dim", "two_bytes", "one_byte"),
    [(64, (64, 128), (64, 64)), (80, (96, 64), (128, 128)), (192, (192, 128), (192, 64))],
)
def test_rows_are_padded_to_whole_copies(head_dim: int, two_bytes: tuple[int, int], one_byte: tuple[int, int]) -> None:
    for plan, wanted in zip(pair(backend="cuda", head_dim=head_dim), (two_bytes, one_byte), strict=True):
        assert (plan.columns_qk[0].width, plan.structure.box_bytes) == wanted


def test_products_sum_over_32_bytes(forwards: tuple[Plan, Plan]) -> None:
    two, one = (plan.launch("forward").products for plan in forwards)
    assert one is not None
    assert two == 2 * one


def test_keys_of_a_tile_are_whole_steps_of_its_products() -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        with pytest.raises(PlanError, match="48 is not a multiple of 32 from 32 to 256; nearest: 64"):
            planned(backend="cuda", tile="{m: 128, n: 48}")
    assert planned(backend="cuda", tile="{m: 128, n: 48}").tile_n == 48


def test_head_dims_are_whole_chunks_of_16_bytes() -> None:
    two, one = dtype("bf16"), E4M3
    assert (two.chunk_elements, one.chunk_elements) == (8, 16)
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        with pytest.raises(PlanError, match="head_dim 72 is not a multiple of 16 from 16 to 256; nearest: 80"):
            planned(backend="cuda", head_dim=72)


def test_probabilities_take_half_the_registers() -> None:
    """3 consumers of 160 registers hold S and O of 128 keys and 64 columns, P and the rest; of 80 columns not."""
    narrow = {"backend": "cuda", "warps": "{consumer: 3}", "head_dim": 80, "tile": "{m: 192, n: 128}"}
    with pytest.raises(PlanError, match=r"needs 168: S 64 \+ P 32 \+ O 48 \+ others 24"):
        planned(**narrow)
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        with pytest.raises(PlanError, match=r"needs 168: S 64 \+ P 16 \+ O 64 \+ others 24"):
            planned(**narrow)


def test_heads_in_l2_and_floors_follow_from_bytes(forwards: tuple[Plan, Plan]) -> None:
    two, one = forwards
    assert one.l2_keys == 2 * two.l2_keys
    before, after = floor(two), floor(one)
    assert (after.qk.clocks, after.pv.clocks) == (before.qk.clocks // 2, before.pv.clocks // 2)
    assert (after.qk.k, after.pv.k) == (32, 32)
    assert after.loaded == before.loaded // 2
    assert after.shared_reads == before.shared_reads // 2
    assert after.tile == before.tile * 3 // 4  # Q has half the bytes, O as many


# --- the others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_memory_of_backwards_follows_from_each_operand(head_dim: int) -> None:
    """The plan alone: the kernels need 16 bits, and a spec with others is refused."""
    two, one = pair(passes="backward", backward="{backend: cuda}", head_dim=head_dim)
    assert (one.tile_m, one.stages) == (two.tile_m, two.stages)
    before, after = regions(two), regions(one)
    assert after["q"] / one.structure.q_stages == before["q"] / two.structure.q_stages / 2
    for name in ("k", "v", "dout", "ds", "other_k", "other_ds"):
        assert after.get(name, 0) == before.get(name, 0) // 2
    for name in ("dq", "dq_block", "sum_tile"):
        assert after.get(name) == before.get(name)
    assert 2 * one.launch("dqkv").products == two.launch("dqkv").products


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_triton_kernels_take_the_dtype_of_each_operand(direction: str) -> None:
    given = (
        {"passes": "backward", "backward": "{backend: triton}"} if direction == "backward" else {"backend": "triton"}
    )
    two, one = pair(head_dim=128, **given)
    for plan, name in ((two, "bf16"), (one, E4M3.triton)):
        for launch in plan.launches:
            for argument in launch.arguments:
                if argument.of in READ and argument.kind in ("descriptor", "pointer"):
                    assert name in argument.type
                if argument.of in WRITTEN[direction] and argument.kind == "pointer":
                    assert argument.type == "*bf16"
    strides = {
        argument.of: argument.divisibility for argument in one.launches[-1].arguments if argument.kind == "stride"
    }
    assert {divisibility for of, divisibility in strides.items() if of in READ} <= {16}
    assert {divisibility for of, divisibility in strides.items() if of in WRITTEN[direction]} == {8}


def test_triton_products_of_one_byte_sum_over_32() -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_one_byte(patch)
        assert [block.width for block in planned(head_dim=80).columns_qk] == [64, 32]
        with pytest.raises(PlanError, match=r"tile\.n: 16 is not one of 32, 64, 128, 256"):
            planned(tile="{m: 64, n: 16}")
    assert [block.width for block in planned(head_dim=80).columns_qk] == [64, 16]
