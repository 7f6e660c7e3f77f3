"""The Hopper backward by blocks: which masks take it, its two kernels, and what their sources hold."""

from __future__ import annotations

import re

import pytest

from attngen.families.hopper_backward.blocks import queries_plan
from attngen.families.hopper_backward.blocks_structure import BlocksBackward
from attngen.plan import Plan
from attngen.plan.attempts import attempts
from attngen.render import render
from tests.plan.specs import kernel_spec, planned


def of_mask(mask: str, **fields: object) -> Plan:
    declared = f"variants:\n  blocks: {{mask: '{mask}', tensors: {{sel: {{dtype: bool, shape: [rows, columns]}}}}}}\n"
    return planned("blocks", passes="backward", backward="{backend: cuda}", declared=declared, **fields)


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        ("sel[q // 64, kv // 64]", {"head_dim": 128}),
        ("sel[q // 64, kv // 64] and q_pos >= kv", {"head_dim": 64, "layout": "varlen"}),
        ("sel[q // 128, kv // 64]", {"head_dim": 64}),
        ("sel[q // 64, kv // 128]", {"head_dim": 128}),
        ("sel[q // 64, kv // 64]", {"head_dim": 128, "deterministic": "true"}),
        ("sel[q // 64, kv // 64] and (q_pos >= kv or kv < 64)", {"head_dim": 128}),  # no global keys: sel hides some
    ],
)
def test_each_kernel_has_a_map_with_a_row_for_each_consumer(mask: str, fields: dict[str, object]) -> None:
    plan = of_mask(mask, **fields)
    assert [each.name for each in plan.launches] == ["preprocess", "classify_dkdv", "dkdv", "classify_dq", "dq"]
    dkdv, dq = plan.launch("dkdv"), plan.launch("dq")
    assert ((dkdv.tile_m, dkdv.tile_n), (dq.tile_m, dq.tile_n)) == ((64, 128), (128, 64))
    for launch in (dkdv, dq):
        assert launch.tile_map is not None
        assert (launch.tile_map.rows, launch.tile_map.bits, launch.tile_map.slots) == (64, 0, False)
    assert [workspace.name for workspace in plan.workspaces] == ["lse_log2", "delta"]  # nothing is added up in memory


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        ("sel[q // 128, kv // 128]", {"head_dim": 128}),  # constant on whole tiles
        ("sel[q // 64, kv // 32]", {"head_dim": 128}),
        ("sel[q // 128, kv // 128]", {"head_dim": 256}),
        ("sel[q // 64, kv // 64]", {"head_dim": 320}),
        ("sel[q // 64, kv // 64] or q // 64 < 2", {"head_dim": 64}),  # rows of global tokens would not be cut
        ("q_pos >= kv and (sel[q // 64, kv // 64] or kv // 64 < 2)", {"head_dim": 128}),
    ],
)
def test_other_masks_go_by_whole_tiles(mask: str, fields: dict[str, object]) -> None:
    assert not isinstance(of_mask(mask, **fields).structure, BlocksBackward)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_both_kernels_fill_shared_memory_with_steps(head_dim: int) -> None:
    plan = of_mask("sel[q // 64, kv // 64]", head_dim=head_dim)
    assert isinstance(plan.structure, BlocksBackward)
    for launch, regions in (
        (plan.launch("dkdv"), plan.structure.shared),
        (plan.launch("dq"), plan.structure.of_queries),
    ):
        sizes = {region.name: region.bytes for region in regions}
        assert launch.shared_bytes == regions[-1].offset + regions[-1].bytes <= plan.arch.shared_memory
        assert launch.stages == sizes["step"] // 8 == 5
    assert queries_plan(plan).structure.shared == plan.structure.of_queries


@pytest.mark.parametrize(
    ("head_dim", "keys", "queries", "stages"),
    [
        ("{qk: 192, v: 64}", 128, 128, (5, 5)),  # dK and dV have as many columns as at head dim 128
        ("160", 64, 128, (4, 3)),
        ("{qk: 192, v: 128}", 64, 128, (4, 3)),
        ("192", 64, 128, (3, 2)),
        ("{qk: 128, v: 256}", 64, 128, (3, 2)),
        ("256", 64, 64, (2, 2)),
    ],
)
def test_consumers_share_rows_where_their_sums_are_wide(
    head_dim: str, keys: int, queries: int, stages: tuple[int, int]
) -> None:
    plan = of_mask("sel[q // 64, kv // 64]", head_dim=head_dim)
    assert isinstance(plan.structure, BlocksBackward)
    dkdv, dq = plan.launch("dkdv"), plan.launch("dq")
    assert (dkdv.tile_m, dkdv.tile_n, dq.tile_m, dq.tile_n) == (64, keys, queries, 64)
    assert (dkdv.stages, dq.stages) == stages
    for launch, regions, rows in ((dkdv, plan.structure.shared, keys), (dq, plan.structure.of_queries, queries)):
        assert launch.shared_bytes == regions[-1].offset + regions[-1].bytes <= plan.arch.shared_memory
        assert ("p" in {region.name for region in regions}) == (rows == 64)  # P passes from one consumer to the other
        assert launch.tile_map is not None
        assert launch.tile_map.rows == 64


def test_both_kernels_share_rows_before_whole_tiles_are_tried() -> None:
    declared = "variants:\n  blocks: {mask: 'sel[q // 64, kv // 64]', tensors: {sel: {dtype: bool, shape: [r, c]}}}\n"
    fields = {"passes": "backward", "backward": "{backend: cuda}", "declared": declared, "head_dim": 192}
    first, apart, whole, *_ = attempts(kernel_spec("blocks", **fields))
    assert (first.tile_n, first.launch("dq").tile_m) == (64, 128)
    assert (apart.tile_n, apart.launch("dq").tile_m) == (64, 64)
    assert whole.schedule == "hopper_cluster"


def test_probabilities_are_computed_in_both_orders_and_multiplied_once() -> None:
    text = render(of_mask("sel[q // 64, kv // 64] and q_pos >= kv", head_dim=128)).text
    by_keys, by_queries = text.split("namespace by_queries {")
    assert set(re.findall(r"(issue_\w+)\(", by_keys)) == {"issue_s", "issue_dp", "issue_dv", "issue_dk"}
    assert set(re.findall(r"(issue_\w+)\(", by_queries)) == {"issue_s", "issue_dp", "issue_dq"}
    assert "add_floats" not in text
