"""The Hopper schedule: what a spec says of roles lands in the plan, budgets are kept, and refusals show their sums."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward import registers as forward_registers
from attngen.families.hopper_forward.choices import TABLES
from attngen.families.hopper_forward.structure import HopperForward
from attngen.parts.boxes import widths
from attngen.plan import Plan
from attngen.plan.choices import L2_BYTES, ONE_HEAD
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few, sampled

HEAD_DIMS = range(8, 257, 8)
MATRICES = ("q", "k", "v", "out")


def on_hopper(variant: str = "causal", **fields: object) -> Plan:
    return planned(variant, backend="cuda", **fields)


def roles_of(plan: Plan) -> HopperForward:
    assert isinstance(plan.structure, HopperForward)
    return plan.structure


# --- what a spec says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "own"),
    [
        ("sel[q // 64, kv // 64]", True),
        ("sel[q // 64, kv // 64] or kv < 64", True),
        ("sel[q // 64, kv // 64] and (q_pos >= kv or q < 64)", True),
        ("sel[q // 64, kv // 64] or q < 64", False),  # rows that see all keys are cut into parts of whole tiles
        ("sel[q // 128, kv // 64]", False),
    ],
)
def test_consumers_visit_their_own_blocks_without_global_queries(mask: str, own: bool) -> None:
    declared = f"variants:\n  own: {{mask: '{mask}', tensors: {{sel: {{dtype: bool, shape: [rows, columns]}}}}}}\n"
    assert bool(roles_of(on_hopper("own", declared=declared)).map_rows) == own


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_consumers_and_rows_follow_from_each_other(consumers: int) -> None:
    by_roles = on_hopper(warps=f"{{consumer: {consumers}}}")
    by_rows = on_hopper(tile=f"{{m: {64 * consumers}}}")
    for plan in (by_roles, by_rows):
        assert roles_of(plan).consumers == consumers
        assert (plan.tile_m, plan.threads) == (64 * consumers, 128 * (consumers + 1))
        assert roles_of(plan).pingpong == (consumers > 1)
    assert by_roles == by_rows


@pytest.mark.parametrize(("schedule", "pingpong"), [("pingpong", True), ("cooperative", False)])
def test_the_schedule_is_that_of_the_spec(schedule: str, pingpong: bool) -> None:
    assert roles_of(on_hopper(warps=f"{{schedule: {schedule}}}")).pingpong == pingpong


def test_every_choice_of_a_spec_lands_in_the_plan() -> None:
    plan = on_hopper(
        tile="{m: 128, n: 80}",
        pipeline="{stages: 3}",
        warps="{overlap: false, registers: {producer: 24, consumer: 240}}",
        softmax="lazy",
        persistent="false",
    )
    roles = roles_of(plan)
    assert (plan.tile_m, plan.tile_n, plan.stages, plan.softmax) == (128, 80, 3, "lazy")
    assert (roles.registers_of("loader"), roles.registers_of("consumers")) == (24, 240)
    assert not roles.overlap
    assert not roles.persistent
    assert "tile_counter" not in [argument.name for argument in plan.arguments]
    assert "work_asked" not in [region.name for region in roles.shared]


def test_open_fields_of_a_spec_are_chosen() -> None:
    plan = on_hopper()
    roles = roles_of(plan)
    assert plan.backend == "cuda"
    assert plan.loads == "descriptor"
    assert plan.softmax == roles.softmax == "first_max"
    assert roles.overlap
    assert roles.persistent
    assert plan.to_dict()["structure"]["persistent"] is True
    assert "tile_counter" in [argument.name for argument in plan.arguments]


def test_names_tell_choices_apart() -> None:
    choices: tuple[dict[str, object], ...] = (
        {},
        {"head_dim": 80},
        {"dtype": "fp16"},
        {"layout": "varlen"},
        {"warps": "{consumer: 1}"},
        {"warps": "{schedule: cooperative}"},
        {"warps": "{overlap: false}"},
        {"softmax": "lazy"},
        {"softmax": "exact_max"},
        {"persistent": "false"},
        {"order": "natural"},
        {"epilogue": "direct"},
        {"tile": "{n: 64}"},
        {"pipeline": "{stages: 3}"},
        {"fast_math": "false"},
        {"variant": "full"},
        {"variant": "allowed"},
        {"variant": "allowed", "tile_map": "never"},
    )
    plans = [on_hopper(**choice) for choice in choices]  # type: ignore[arg-type]
    for one, other in itertools.combinations(plans, 2):
        assert one.name != other.name
    assert all(kernel.name.isidentifier() and len(kernel.name) < 120 for kernel in plans)


# --- budgets --------------------------------------------------------------------------------------------------


@sampled(
    always=2,
    dtype=["bf16", "fp16"],
    variant=["causal", "full", "alibi", "packed_documents", "allowed", "relative_bias"],
)
def test_every_head_dim_has_a_tile_that_fits(variant: str, dtype: str) -> None:
    for head_dim in HEAD_DIMS:
        plan = on_hopper(variant, dtype=dtype, head_dim=head_dim)
        roles = roles_of(plan)
        assert roles.shared_bytes <= plan.arch.shared_memory, plan.name
        threads = 128 * (roles.consumers + 1)
        launched = min(65536 // threads // 8 * 8, 256)
        granted = 128 * (roles.registers_of("loader") + roles.consumers * roles.registers_of("consumers"))
        assert granted <= threads * launched <= 65536


@few("warps", ["{overlap: false}", "{consumer: 1}", "{consumer: 2}", "{consumer: 3}"], always=range(0, 999, 2))
def test_roles_of_a_spec_leave_no_head_dim_without_a_tile(warps: str) -> None:
    """Keys that nobody asked for are not what fails: but three consumers take no products of more than 192 columns."""
    for head_dim in [d for d in HEAD_DIMS if d <= 192] if "3" in warps else HEAD_DIMS:
        plan = on_hopper(head_dim=head_dim, warps=warps)
        assert roles_of(plan).shared_bytes <= plan.arch.shared_memory, plan.name
        assert plan.tile_n <= on_hopper(head_dim=head_dim).tile_n


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 160, 192, 256])
def test_regions_of_shared_memory_follow_each_other(head_dim: int, layout: str) -> None:
    plan = on_hopper(head_dim=head_dim, layout=layout)
    regions = roles_of(plan).shared
    end = 0
    for region in regions:
        assert region.offset == end, region.name
        assert region.bytes > 0
        assert region.offset % (1024 if region.name in MATRICES else 4) == 0, region.name
        if region.name.endswith(("_full", "_empty", "_asked")):
            assert region.offset % 8 == 0, region.name
        if region.name == "work":
            assert region.offset % 16 == 0
        end = region.offset + region.bytes
    assert roles_of(plan).shared_bytes == end
    assert [region.name for region in regions][:4] == list(MATRICES)
    size = {region.name: region.bytes for region in regions}
    width = widths(head_dim, plan.operands.q).width
    assert size["k"] == plan.stages * plan.tile_n * width * 2
    assert size["q"] == roles_of(plan).q_stages * plan.tile_m * width * 2
    assert size["k_full"] == size["v_empty"] == 8 * plan.stages


@few("head_dim", HEAD_DIMS, always=range(0, 999, 4))
def test_padded_head_dims(head_dim: int) -> None:
    plan = on_hopper(head_dim=head_dim)
    (columns,) = plan.columns_qk
    roles = roles_of(plan)
    assert (columns.start, columns.used) == (0, head_dim)
    assert columns.width % 32 == 0
    assert 0 <= columns.width - head_dim < 32
    box = roles.box_bytes // plan.operands.q.bytes
    assert columns.width % box == 0
    assert columns.width - head_dim < box  # no copy lies outside of a windowed descriptor
    assert columns.width % roles.out_columns == 0
    boxes = {a.of: (a.box, a.swizzle, a.window) for a in plan.arguments if a.kind == "descriptor"}
    assert boxes["q"] == ((1, plan.tile_m, 1, box), roles.box_bytes, None)
    assert boxes["v"] == ((1, 1, plan.tile_n, 1, box), roles.box_bytes, plan.tile_n)


def test_outputs_that_leave_from_registers_take_no_shared_memory() -> None:
    staged, direct = on_hopper(), on_hopper(epilogue="direct")
    assert "out_map" in [argument.name for argument in staged.arguments]
    assert "out_map" not in [argument.name for argument in direct.arguments]
    assert "out" not in [region.name for region in roles_of(direct).shared]
    assert roles_of(direct).shared_bytes < roles_of(staged).shared_bytes


def test_packed_rows_of_packed_heads_are_stored_without_a_descriptor() -> None:
    for fields in ({}, {"layout": "varlen"}, {"pack_gqa": "true"}):
        described = [a.of for a in on_hopper(**fields).arguments if a.kind == "descriptor"]
        assert described == ["q", "k", "v", "out"]
    packed = on_hopper(layout="varlen", pack_gqa="true")
    assert [a.of for a in packed.arguments if a.kind == "descriptor"] == ["q", "k", "v"]


# --- orders ---------------------------------------------------------------------------------------------------


def test_heads_of_unmasked_attention_come_one_after_the_other() -> None:
    assert on_hopper("full").l2_bytes == ONE_HEAD
    for fields in (
        {"variant": "causal"},
        {"variant": "full", "layout": "varlen"},
        {"variant": "full", "head_dim": 256},
        {"variant": "alibi"},
    ):
        assert on_hopper(**fields).l2_bytes == L2_BYTES


@pytest.mark.parametrize(
    ("mask", "from_first"),
    [
        ("q_pos >= kv", False),
        ("kv >= q", True),
        ("abs(q - kv) <= w or kv < n", False),
        ("abs(q - kv) <= w or kv < n or q < n", True),
        ("q_pos < n or q_pos >= kv", False),
    ],
)
def test_the_queries_that_see_the_most_keys_come_first(mask: str, from_first: bool) -> None:
    declared = (
        f"variants:\n  own:\n    mask: '{mask}'\n    scalars: {{w: {{type: int32, max: 512}}, n: {{type: int32}}}}\n"
    )
    plan = on_hopper("own", declared=declared)
    assert (plan.iteration, roles_of(plan).from_first) == ("ranges", from_first)
    assert ("q_tile = q_tiles - 1 - q_tile;" in render(plan).text) == from_first
    assert not roles_of(on_hopper("own", declared=declared, order="natural")).from_first


@pytest.mark.parametrize(
    ("mask", "score", "iteration", "nearest_first"),
    [
        ("True", "s - abs(q - kv)", "ranges", True),
        ("ids[q] == ids[kv]", "s - abs(q - kv)", "tile_map", True),
        ("ids[q] == ids[kv]", "s + 0.1 * kv", "tile_map", False),
        ("True", "s + table[min(abs(q - kv), 127)]", "ranges", False),  # may be largest anywhere
        ("ids[q] == ids[kv]", "s", "tile_map", False),
        ("q_pos >= kv", "s - sqrt(float(q_pos - kv))", "ranges", False),  # the nearest tile is the last one
    ],
)
def test_scores_by_distance_begin_with_the_nearest_tile(
    mask: str, score: str, iteration: str, nearest_first: bool
) -> None:
    tensors = "    tensors: {ids: {dtype: int32, shape: [seqlen_k]}, table: {dtype: float32, shape: [128]}}\n"
    declared = f"variants:\n  own:\n    mask: '{mask}'\n    score: '{score}'\n{tensors}"
    plan = on_hopper("own", declared=declared)
    assert (plan.iteration, roles_of(plan).nearest_first) == (iteration, nearest_first)
    assert ("nearest" in render(plan).text) == nearest_first


# --- packed heads ---------------------------------------------------------------------------------------------


def test_heads_are_packed_where_the_spec_says() -> None:
    packed = on_hopper(pack_gqa="true")
    assert packed.pack_gqa
    assert packed.name.endswith("_pack")
    assert packed.to_dict()["pack_gqa"] is True
    assert roles_of(packed).consumers == 1
    assert not roles_of(packed).pingpong
    wide = on_hopper(pack_gqa="true", tile="{m: 128}")
    assert (wide.tile_m, roles_of(wide).consumers, roles_of(wide).pingpong) == (128, 2, True)
    assert on_hopper(pack_gqa="false") == on_hopper()
    assert not on_hopper().pack_gqa


@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_only_maps_of_queries_are_packed(layout: str) -> None:
    plan = on_hopper(pack_gqa="true", layout=layout)
    packed = [argument.of for argument in plan.arguments if argument.packed]
    assert packed == (["q", "out"] if layout == "dense" else ["q"])
    written = {row["of"] for row in plan.to_dict()["launches"][-1]["parameters"] if row.get("packed")}
    assert written == set(packed)
    assert "group_bits" in plan.signature
    assert not [argument for argument in on_hopper(layout=layout).arguments if argument.packed]
    assert "group_bits" not in on_hopper(layout=layout).signature


@pytest.mark.parametrize(
    ("mask", "apart", "packed"),
    [
        ("kv <= q_pos - h", "ranges", "ranges"),
        ("kv < limits[hk]", "ranges", "ranges"),
        ("ends[h, kv] <= q_pos", "ranges", "classified"),  # a search for each head
        ("ends[hk, kv] <= q_pos", "ranges", "ranges"),
    ],
)
def test_the_iteration_knows_that_heads_differ(mask: str, apart: str, packed: str) -> None:
    declared = (
        f'variants:\n  own:\n    mask: "{mask}"\n    tensors:\n      limits: {{dtype: int32, shape: [hk]}}\n'
        "      ends: {dtype: int32, shape: [h, seqlen_k], monotone: {axis: 1}}\n"
    )
    assert on_hopper("own", declared=declared, tile_map="never").iteration == apart
    assert on_hopper("own", declared=declared, tile_map="never", pack_gqa="true").iteration == packed


def test_a_tile_map_is_not_for_packed_heads() -> None:
    with pytest.raises(PlanError, match=r"test\.yaml:8: pack_gqa: a tile map lists .* true with tile_map: never"):
        on_hopper("allowed", pack_gqa="true")
    assert on_hopper("allowed", pack_gqa="true", tile_map="never").iteration == "classified"


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"warps": "{consumer: 1, schedule: pingpong}"},
            r"pingpong needs at least 2 consumers .* allowed: cooperative",
        ),
        ({"warps": "{consumer: 4}"}, r"4 consumers are not allowed; allowed: 1, 2, 3: .* 8 of its 32 lanes"),
        ({"warps": "{producer: 2}"}, r"2 producers are not allowed; allowed: 1"),
        ({"warps": 8}, r"cuda kernels have roles: give producer, consumer and schedule, not a count"),
        ({"warps": "{registers: {consumer: 100}}"}, r"100 registers are not a multiple of 8 from 24 to 256"),
        ({"tile": "{n: 72}"}, r"tile\.n: 72 is not a multiple of 16 from 16 to 256; nearest: (64|80)"),
        ({"tile": "{n: 512}"}, r"tile\.n: 512 is not a multiple of 16 from 16 to 256; nearest: 256"),
        ({"tile": "{m: 96}"}, r"tile\.m: 96 is not allowed; allowed: 64, 128, 192 \(64 rows per consumer\)"),
        ({"tile": "{m: 192}", "warps": "{consumer: 2}"}, r"192 rows are not 2 consumers x 64; nearest: 128"),
        ({"pipeline": "{stages: 1}"}, r"pipeline\.stages: 1 is not allowed; allowed: 2 to 8"),
        ({"arch": "sm100a"}, r"backend: cuda has no forward for sm100a; allowed: backend: triton; arch sm80, "),
        ({"dtype": "fp32"}, r"dtype: cuda kernels take bf16 and fp16; found fp32"),
        ({"loads": "pointer", "softmax": "first_max"}, r"loads: cuda kernels load through tensor descriptors; "),
        ({"alignment": "element"}, r"alignment: tensor descriptors need alignment 16; found 2"),
        ({"softmax_scale": 0.5}, r"softmax_scale: the scale is an argument of the call"),
        ({"head_dim": 74}, r"head_dim 74 is not a multiple of 8 from 8 to 256; nearest: 72"),
    ],
    ids=str,
)
def test_impossible_fields_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        on_hopper(**fields)  # type: ignore[arg-type]
    assert str(caught.value).startswith("test.yaml:")


def test_packed_heads_with_dropout_are_refused() -> None:
    declared = "variants: {dropped: {dropout: true}}\n"
    with pytest.raises(PlanError, match="pack_gqa: dropout shares random numbers among rows of one head"):
        on_hopper("dropped", declared=declared, pack_gqa="true")
    assert on_hopper("dropped", declared=declared).variant.dropout


def test_more_registers_than_a_launch_reserves_are_refused_with_their_sum() -> None:
    with pytest.raises(PlanError) as caught:
        on_hopper(warps="{consumer: 2, registers: {producer: 40, consumer: 240}}")
    match = re.search(
        r"128 threads x \((\d+) \+ (\d+) x (\d+)\) = (\d+) registers; a launch of (\d+) threads reserves (\d+) each, "
        r"(\d+) in all",
        str(caught.value),
    )
    assert match is not None
    producer, consumers, consumer, total, threads, each, pool = map(int, match.groups())
    assert (producer, consumers, consumer, threads) == (40, 2, 240, 384)
    assert 128 * (producer + consumers * consumer) == total > pool == threads * each
    assert pool <= 65536


def test_a_consumer_without_room_for_its_tile_is_refused_with_the_sum() -> None:
    fields: dict[str, object] = {"head_dim": 256, "tile": "{m: 128, n: 112}"}
    with pytest.raises(PlanError) as caught:
        on_hopper(**fields)  # type: ignore[arg-type]
    match = re.search(
        r"a consumer has (\d+) registers and needs (\d+): S (\d+) \+ P (\d+) \+ O (\d+) \+ others (\d+)",
        str(caught.value),
    )
    assert match is not None
    has, needs, s, p, o, others = map(int, match.groups())
    assert (s, p, o) == (112 // 2, 112 // 4, 256 // 2)
    assert s + p + o + others == needs
    assert needs > has


@pytest.mark.parametrize(("v", "refused"), [(192, False), (200, True)])
def test_three_consumers_have_too_few_registers_for_wide_products(v: int, refused: bool) -> None:
    fields = {"head_dim": f"{{qk: 64, v: {v}}}", "tile": "{n: 16}", "warps": "{consumer: 3}"}
    if not refused:
        assert on_hopper(**fields).tile_m == 192  # type: ignore[arg-type]
        return
    with pytest.raises(PlanError, match="warps: a launch of 512 threads reserves 128 registers each"):
        on_hopper(**fields)  # type: ignore[arg-type]


def test_more_shared_memory_than_there_is_is_refused_with_its_sum() -> None:
    with pytest.raises(PlanError) as caught:
        on_hopper(head_dim=128, tile="{m: 128, n: 128}", pipeline="{stages: 4}")
    message = str(caught.value)
    assert message.startswith("test.yaml:8: tile: ")
    match = re.search(
        r"Shared memory (\d+) B exceeds (\d+) B on sm90a: Q (\d+) \+ K (\d+) \+ V (\d+) \((\d) stages\) \+ O (\d+)",
        message,
    )
    assert match is not None
    total, limit, q, k, v, stages, out = map(int, match.groups())
    assert limit == 227 * 1024 < total
    assert (q, k, v, stages) == (128 * 128 * 2, 4 * 128 * 128 * 2, 4 * 128 * 128 * 2, 4)
    assert 0 < total - (q + k + v + out) < 1024  # barriers and records


def test_memory_is_given_up_in_order() -> None:
    """Q twice where there is room, then once, then parts of O."""
    small, large = roles_of(on_hopper(head_dim=64)), roles_of(on_hopper(head_dim=256))
    assert (small.q_stages, small.out_columns) == (2, 64)
    assert large.q_stages == 1
    assert large.shared_bytes <= 227 * 1024


def test_no_table_has_more_consumers_than_a_warp_has_lanes_for() -> None:
    """The scheduler has eight lanes for each consumer, and eight for all rows: tables must not have more."""
    most = HopperForward.most_consumers
    assert most == 32 // 8 - 1
    assert set(forward_registers.REGISTERS) == set(forward_registers._SEARCHING_REGISTERS)
    assert max(forward_registers.REGISTERS) == most
    assert max(row.consumers for table in TABLES.values() for row in table.load()) <= most
    roles = roles_of(on_hopper())
    for consumers in (0, most + 1):
        with pytest.raises(ValueError, match=f"{consumers} consumers, of 1 to {most}"):
            replace(roles, consumers=consumers)


@few("consumers", [1, 2, 3], always=range(0, 999, 2))
def test_each_part_of_a_warp_finds_what_one_consumer_sees(consumers: int) -> None:
    text = render(on_hopper(warps=f"{{consumer: {consumers}}}")).text
    assert "const int part = lane / 8;" in text
    assert "8 * kConsumers" in text
    assert 8 * (consumers + 1) <= 32
