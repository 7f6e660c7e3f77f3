"""Schedules, alignment and KV iterations: what is chosen, and what is refused and why."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan import plan
from attngen.plan.catalogue import schedules
from attngen.resources import templates_dir
from attngen.schema import expand, load_spec_text, preset_names
from tests.plan.specs import planned
from tests.sampling import few

ITERATIONS = {
    "dilated": "classified",
    "neighbourhood_2d": "classified",
    "allowed": "tile_map",
    "prefix_tree": "tile_map",
}


@few("name", preset_names(), always=range(0, 999, 3))
def test_the_iteration_of_each_preset(name: str) -> None:
    plan = planned(name)
    assert plan.iteration == ITERATIONS.get(name, "ranges")
    assert plan.has_launch("classify") == (plan.iteration == "tile_map")


def test_a_tile_map_is_used_or_avoided_as_the_spec_says() -> None:
    always = planned("causal", tile_map="always")
    assert always.iteration == "tile_map"
    assert always.launch("classify").symbol == f"classify_{always.name}"
    never = planned("allowed", tile_map="never")
    assert never.iteration == "classified"
    assert not never.has_launch("classify")


def test_rows_that_see_many_intervals_take_a_tile_map() -> None:
    three = "kv < 4 or kv >= 512 and kv < 520 or q - kv < 1024 and q >= kv"
    four = f"{three} or kv >= 3000 and kv < 3004"
    by_tensor = f"({four}) and kv < lengths[b]"
    lengths = "    tensors: {lengths: {dtype: int32, shape: [b]}}\n"
    for mask, tensors, iteration in (
        (three, "", "ranges"),
        (four, "", "tile_map"),
        (by_tensor, lengths, "ranges"),  # a map of tensors is made again when they change
    ):
        declared = f'variants:\n  own:\n    mask: "{mask}"\n{tensors}'
        assert planned("own", declared=declared, backend="cuda").iteration == iteration, mask
        assert planned("own", declared=declared, backend="cuda", tile_map="never").iteration == "ranges"
        assert planned("own", declared=declared, backend="cuda", layout="varlen").iteration == "ranges"


@pytest.mark.parametrize(
    ("mask", "batch", "heads"),
    [
        ("allowed[b, q, kv]", True, False),
        ("allowed[0, q, kv]", False, False),
        ("allowed[h, q, kv]", False, True),
        ("allowed[hk, q, kv] and b < 2", True, True),
    ],
)
def test_a_map_is_shared_where_the_mask_allows(mask: str, batch: bool, heads: bool) -> None:
    declared = (
        f'variants:\n  own:\n    mask: "{mask}"\n'
        "    tensors: {allowed: {dtype: bool, shape: [n, seqlen_q, seqlen_k]}}\n"
    )
    plan = planned("own", declared=declared)
    axes = plan.launch("classify").tile_map
    assert axes is not None
    assert (axes.owner, axes.batch, axes.heads) == ("forward", batch, heads)
    packed = planned("own", declared=declared, layout="varlen")
    axes = packed.launch("classify").tile_map
    assert axes is not None
    assert axes.batch  # lengths differ from sequence to sequence


@pytest.mark.parametrize("variant", ["full", "sliding_window", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_of_a_tile_fill_rows_of_v_in_8_bits(variant: str, head_dim: int) -> None:
    """Copies bring rows of 64 keys at least, where V comes with keys along its rows; what is transposed may have 32."""
    entries = ("", ", transposed_v: true", ", tile: {n: 32}", ", transposed_v: groups")
    lines = "".join(f"  - {{variant: {variant}, head_dim: {head_dim}, dtype: fp8_e4m3{more}}}\n" for more in entries)
    text = f"schema: 1\npackage: tested\narch: [sm90a]\nkernels:\n{lines}"
    usual, columns, narrow, groups = (plan(spec) for spec in expand(load_spec_text(text, "test.yaml"))[:4])
    assert usual.tile_n % 32 == columns.tile_n % 64 == 0
    assert (groups.tile_n, groups.name) == (usual.tile_n, f"{usual.name}_groupedv")
    assert isinstance(groups.structure, HopperForward)
    assert not groups.structure.transposes
    assert isinstance(narrow.structure, HopperForward)
    assert narrow.structure.ahead == 2  # fragments of 16 keys in flight


@pytest.mark.parametrize(("head_dim", "keeps"), [("64", True), ("128", False)])
def test_turns_in_8_bits_last_until_products_are_done_where_these_are_short(head_dim: str, keeps: bool) -> None:
    kernel = planned("causal", backend="cuda", dtype="fp8_e4m3", head_dim=head_dim)
    assert isinstance(kernel.structure, HopperForward)
    assert kernel.structure.pingpong
    assert kernel.structure.keeps_turn == keeps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"passes": "backward", "backward": "{backend: cuda, dq: {warps: 4}}"},
            r"test\.yaml:8: backward\.dq: in cuda the kernel by tiles of keys computes dQ, too; leave it out",
        ),
        (
            {"passes": "backward", "backward": "{backend: triton, dq: {warps: 3}}"},
            r"backward\.dq\.warps: 3 is not one of .* nearest: 2",
        ),
        (
            {"passes": "backward", "backward": "{backend: triton, dkdv: {tile: {m: 256, n: 256}, stages: 4}}"},
            r"backward\.dkdv: Shared memory \d+ B exceeds \d+ B on sm90a: K \d+ \+ V \d+ \+ 4 stages x \(Q",
        ),
        (
            {"softmax": "lazy"},
            r"test\.yaml:7: softmax: .* do not exist in Triton kernels; found lazy; allowed: exact_max",
        ),
        ({"warps": "{producer: 1, consumer: 2}"}, r"warps"),
        ({"persistent": "true"}, r"persistent"),
        (
            {"pack_gqa": "true"},
            r"pack_gqa: Triton kernels give each query head tiles of its own; found true; allowed: false",
        ),
        ({"dtype": "fp8"}, r"test\.yaml:7: dtype: .*bf16, fp16, fp32"),
        ({"arch": "sm80", "loads": "descriptor"}, r"sm80 has no tensor descriptors; use loads: pointer"),
        ({"alignment": 2, "loads": "descriptor"}, r"descriptors need alignment 16, not 2"),
        ({"alignment": 4}, r"alignment: 4 is not allowed; allowed: 16, 2 \(one element\)"),
    ],
)
def test_choices_that_do_not_exist_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**fields)  # type: ignore[arg-type]


def test_alignment_decides_the_loads() -> None:
    assert planned().loads == "descriptor"
    assert planned(alignment="element").loads == "pointer"
    assert planned(alignment="element").alignment == 2
    assert planned(loads="pointer").alignment == 16


def test_every_schedule_has_its_template() -> None:
    known = [*schedules("forward"), *schedules("backward")]
    for schedule in known:
        assert (templates_dir() / schedule.template).is_file()
        assert callable(resolve_name(schedule.view))
    assert len({schedule.name for schedule in known}) == len(known)
