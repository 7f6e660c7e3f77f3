"""Layouts: what the plan refuses, and which arguments find queries and keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward import schedule as hopper_forward
from attngen.plan import arguments, plan
from attngen.plan.catalogue import candidates, named, schedules, with_schedule
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule
from attngen.schema import expand, load_spec_text
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.models import KernelModel
from tests.plan.specs import planned


def kernels(entry: str, variants: str = "{}") -> tuple[KernelSpec, ...]:
    head = f"schema: 1\narch: sm90a\nvariants: {variants}\nkernels:\n"
    return expand(load_spec_text(f"{head}  - {{head_dim: 64, {entry}}}\n"))


def serving(name: str, *, split_kv: bool = False) -> Schedule:
    """A schedule that says it has kernels for every layout."""
    return replace(named(name), name=f"{name}_serving", layouts=tuple(LAYOUTS), split_kv=split_kv)


def of_layout(layout: str) -> Plan:
    return replace(planned(layout="dense"), layout=layout)


def signature(kernel: Plan, **more: object) -> list[str]:
    operands = [arguments.tensor_map(kernel, name, 64, 64) for name in "qkv"]
    return [one.name for one in arguments.signature(kernel, operands, tiles="q_tiles", strided=("out",), **more)]


def test_every_layout_of_a_spec_has_a_row() -> None:
    for layout in LAYOUTS:
        assert load_spec_text(f"schema: 1\narch: sm90a\nkernels: [{{variant: full, head_dim: 64, layout: {layout}}}]\n")
    from attngen.schema.export import json_schema

    allowed = json_schema()["$defs"][KernelModel.__name__]["properties"]["layout"]
    assert all(f"'{layout}'" in str(allowed) for layout in LAYOUTS)


@pytest.mark.parametrize(
    "row", [row.name for row in schedules("forward") + schedules("backward") if set(LAYOUTS) - set(row.layouts)]
)
def test_a_schedule_is_never_asked_for_a_layout_that_it_lacks(row: str) -> None:
    """Such a schedule would plan something, and read keys where none are."""
    schedule = named(row)
    lacking = [layout for layout in LAYOUTS if layout not in schedule.layouts]
    (spec,) = kernels("variant: causal")
    for layout in lacking:
        asked = replace(spec, layout=layout, backend=schedule.backend, direction=schedule.direction)
        if any(layout in other.layouts for other in candidates(asked, schedule.backend)):
            continue
        with pytest.raises(PlanError, match=f"do not take '{layout}'; allowed: dense, varlen") as caught:
            plan(asked)
        assert (caught.value.field, caught.value.location.line) == ("layout", 5)


def test_split_kv_is_for_schedules_that_do_it() -> None:
    ordinary, split = kernels("variant: causal, split_kv: true")
    schedule = serving("hopper_forward", split_kv=True)
    with with_schedule(schedule, before="hopper_forward"):
        assert plan(split).split_kv
        assert not plan(ordinary).split_kv
    if not any(row.split_kv for row in schedules("forward", backend="triton")):
        with pytest.raises(PlanError, match=r"^spec.yaml:5: split_kv: triton has no forward whose blocks share"):
            plan(replace(split, backend="triton"))


@pytest.mark.parametrize(
    ("variant", "used"),
    [
        ('{mask: "t[kv_global] > 0", tensors: {t: {dtype: int32, shape: [total_q]}}}', "kv_global"),
        ('{score: "s + bias[kv]", tensors: {bias: {dtype: float32, shape: [total_k]}}}', "total_k"),
        ('{mask: "kv < n", scalars: {n: {type: int32, max: total_k}}}', "total_k"),
        ('{mask: "kv < n[h]", tensors: {n: {dtype: int32, shape: [h], range: {min: 0, max: total_k}}}}', "total_k"),
        ('{mask: "kv < total_k"}', "total_k"),
    ],
)  # fmt: skip
def test_pages_refuse_the_place_of_keys_in_a_packed_tensor(variant: str, used: str) -> None:
    (spec,) = kernels("variant: a, layout: paged", f"{{a: {variant}}}")
    with with_schedule(serving("hopper_forward")), pytest.raises(PlanError, match=f"reads '{used}'") as caught:
        plan(spec)
    assert caught.value.field == "layout"
    (varlen,) = kernels("variant: a, layout: varlen", f"{{a: {variant}}}")
    assert plan(varlen).layout == "varlen"


def test_arguments_of_pages() -> None:
    paged, varlen = of_layout("paged"), of_layout("varlen")
    names, others = signature(paged), signature(varlen)
    assert [name for name in names if name not in others] == [
        "page_table_ptr", "page_table_stride", "page_size", "num_pages", "box_rows", "has_cu_seqlens_q",
    ]  # fmt: skip
    assert [name for name in others if name not in names] == ["cu_seqlens_k_ptr", "has_seqused_k"]
    assert {"cu_seqlens_q_ptr", "seqused_k_ptr", "max_seqlen_q", "max_seqlen_k", "stride_out_s"} <= set(names)
    assert "stride_out_b" not in names


def test_tensor_maps_of_pages() -> None:
    """Over (page, KV head, row, column) whatever the order in memory; a window follows the axis of rows."""
    paged = of_layout("paged")
    for window, box in ((None, (1, 1, 128, 64)), (128, (1, 1, 1, 128, 64))):
        for name in "kv":
            tensor_map = arguments.tensor_map(paged, name, 128, 128, window=window)
            assert (tensor_map.box, tensor_map.window, tensor_map.paged) == (box, window, True)
            assert tensor_map.to_dict()["paged"] is True
    q = arguments.tensor_map(paged, "q", 128, 128)
    assert q == arguments.tensor_map(of_layout("varlen"), "q", 128, 128)
    assert "paged" not in q.to_dict()


def test_strides_of_pages() -> None:
    paged = of_layout("paged")
    names = [one.name for one in arguments.strides_of(paged, ("q", "k", "v", "out"))]
    assert names == [
        "stride_q_s", "stride_q_h", "stride_k_page", "stride_k_s", "stride_k_h", "stride_v_page", "stride_v_s",
        "stride_v_h", "stride_out_s", "stride_out_h",
    ]  # fmt: skip


def test_names_and_manifests_tell_layouts_apart() -> None:
    ordinary = kernels("variant: causal, layout: [dense, varlen, paged]")
    with with_schedule(serving("hopper_forward"), before="hopper_forward"):
        plans = [plan(spec) for spec in ordinary]
    assert len({one.name for one in plans}) == 3
    assert "_paged_" in plans[2].name
    assert [one.to_dict()["key_access"] for one in plans] == ["contiguous", "ragged", "paged"]
    assert hopper_forward.SCHEDULE in schedules("forward")
