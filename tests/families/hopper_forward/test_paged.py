"""The Hopper forward over pages: what a copy brings, who loads, and which specs it refuses."""

from __future__ import annotations

from math import gcd

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward import explain as hopper_forward
from attngen.families.hopper_forward.pipes import forward_pipes_of
from attngen.families.hopper_forward.structure import HopperForward
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few


@few("head_dim", range(8, 257, 8), always=range(0, 999, 4))
def test_a_copy_of_one_row_is_128_bytes(head_dim: int) -> None:
    """A page may have one key, and shared memory is written at multiples of 128 bytes; no copy brings padding alone."""
    plan = planned(head_dim=head_dim, backend="cuda", layout="paged")
    assert isinstance(plan.structure, HopperForward)
    assert plan.structure.box_bytes == 128
    for columns in (*plan.columns_qk, *plan.columns_v):
        assert columns.width % 64 == 0
        assert columns.used == head_dim
        assert columns.width - columns.used < 64


@pytest.mark.parametrize("tile_n", [16, 48, 80, 96, 128])
def test_boxes_fill_a_tile_and_never_leave_a_page(tile_n: int) -> None:
    plan = planned(head_dim=64, backend="cuda", layout="paged", tile=f"{{n: {tile_n}}}")
    k_map, v_map = (next(one for one in plan.arguments if one.name == f"{name}_map") for name in "kv")
    assert (k_map.box, k_map.window) == ((1, 1, tile_n, 64), None)
    assert (v_map.box, v_map.window) == ((1, 1, 1, tile_n, 64), tile_n)
    for page_size in range(1, 300):
        rows = gcd(page_size, tile_n)
        assert all(key // page_size == (key + rows - 1) // page_size for key in range(0, 4 * tile_n, rows))


@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_k_and_v_have_a_loader_each_over_pages_alone(layout: str) -> None:
    plan = planned(head_dim=128, backend="cuda", layout=layout)
    pipes = forward_pipes_of(plan)
    names = [role.name for role in pipes.roles]
    paged = layout == "paged"
    assert ("value_loader" in names) == paged
    assert pipes.ring("k").writers == ("the loader of K" if paged else "the loader of K and V")
    assert pipes.ring("v").writers == ("the loader of V" if paged else "the loader of K and V")
    readers = 4 * plan.structure.consumers + 1 + paged  # warps that say they have read a record of a work tile
    assert pipes.barrier("work_empty").signal.arrivals == readers
    text = render(plan).text
    assert text.count("work_ring.release()") == (3 if paged else 2)
    assert ("pages.cuh" in text) == paged


def test_loaders_as_explain_names_them() -> None:
    for layout, loads in (("varlen", "warp 9 loads K and V, and 10 Q"), ("paged", "warp 9 loads K, 10 Q, and 11 V,")):
        plan = planned(head_dim=128, backend="cuda", layout=layout)
        assert isinstance(plan.structure, HopperForward)
        assert any(loads in line for line in hopper_forward._roles(plan, plan.structure))


def test_arguments_of_a_paged_kernel() -> None:
    names = [one.name for one in planned(head_dim=128, backend="cuda", layout="paged").arguments]
    told = {"page_table_ptr", "page_table_stride", "page_size", "num_pages", "box_rows"}
    assert told | {"seqused_k_ptr", "cu_seqlens_q_ptr", "has_cu_seqlens_q"} <= {*names}
    assert not {"cu_seqlens_k_ptr", "has_seqused_k"} & {*names}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"backend": "triton"}, "triton forward kernels"),
    ],
)
def test_kernels_that_read_no_pages_refuse_them(fields: dict[str, str], what: str) -> None:
    with pytest.raises(PlanError, match=f"{what} do not take 'paged'; allowed: dense, varlen") as caught:
        planned(head_dim=64, layout="paged", **fields)
    assert caught.value.field == "layout"
