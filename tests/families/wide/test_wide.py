"""Plans of head dims beyond 256: the forward, what it refuses, padding, and the backwards in CUDA and in Triton."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.dtypes import WIDE_HEAD_DIMS, dtype
from attngen.errors import PlanError
from attngen.families.triton.tiles import gradient_columns
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from attngen.schema.kernel_spec import KernelSpec
from tests.sampling import few

BACKWARD = "passes: backward"


def specs(entry: str = "variant: causal", *, head_dim: str = "512", arch: str = "sm90a") -> tuple[KernelSpec, ...]:
    variants = '{dropped: {mask: "q_pos >= kv", dropout: true}, listed: {keys: index}}'
    text = f"schema: 1\narch: [{arch}]\nvariants: {variants}\nkernels:\n  - {{head_dim: {head_dim}, {entry}}}\n"
    return expand(load_spec_text(text))


def planned(entry: str = "variant: causal", **fields: str) -> Plan:
    (kernel,) = specs(entry, **fields)
    return plan(kernel)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("causal", "dense"),
        ("sliding_window", "varlen"),
        ("softcap", "paged"),
        ("causal_sink", "paged"),
        ("allowed", "dense"),
    ],
)
def test_every_layout_and_mask_has_one_kernel_that_shares_keys(layout: str, variant: str) -> None:
    kernel = planned(f"variant: {variant}, layout: {layout}")
    assert (kernel.schedule, kernel.backend, kernel.split_kv) == ("hopper_wide", "cuda", True)
    launch, merge = kernel.launches
    assert (launch.grid, launch.cluster, merge.grid) == ("splits", 2, "merged_rows")
    assert [argument.of for argument in launch.arguments if argument.kind == "descriptor"] == ["k", "v"]
    assert "named_arrive(Named::kPublished" in render(kernel).text


def test_split_kv_asks_for_the_same_kernel() -> None:
    assert specs() == specs("variant: causal, split_kv: true")


@pytest.mark.parametrize("dim", [264, 320, 384, 512, "{qk: 512, v: 64}", "{qk: 40, v: 504}", "{qk: 264, v: 264}"])
def test_memory_and_registers_fit(dim: int | str) -> None:
    """Q that is not in registers, a tile of K, 1.5 of V, two of P, beside a kilobyte that the system takes."""
    kernel = planned(head_dim=str(dim))
    structure, width = kernel.structure, kernel.columns_qk[0].width
    assert structure.shared_bytes <= ARCHES["sm90a"].shared_memory - 1024
    assert kernel.head_dim_qk <= width < kernel.head_dim_qk + 128
    regions = {region.name: region for region in structure.shared}
    assert regions["keys"].bytes == 64 * width * 2
    assert regions["values"].bytes == 3 * 64 * 512
    assert regions["p"].bytes == 2 * 64 * 64 * 2
    assert regions["q"].bytes + structure.register_boxes * 64 * 64 * 2 == 64 * width * 2
    assert all(regions[name].offset % 1024 == 0 for name in ("q", "keys", "values", "p"))
    assert sum(32 * role.warps * role.registers for role in structure.warp_roles) <= 64 * 1024


@pytest.mark.parametrize(
    ("entry", "head_dim", "field", "reason"),
    [
        ("variant: causal", "513", "head_dim", "513 is not a multiple of 8 from 8 to 512; nearest: 512"),
        ("variant: causal", "258", "head_dim", "nearest: 256"),
        ("variant: causal", "600", "head_dim", "nearest: 512"),
        ("variant: causal, backend: triton", "512", "head_dim", "beyond 256; allowed: head_dim 256, backend: cuda"),
        ("variant: causal, dtype: fp32", "512", "dtype", "bf16 and fp16; found fp32"),
        ("variant: causal, dtype: fp8_e5m2", "512", "dtype", "no kernel reads a cache of fp8_e5m2"),
        ("variant: causal, kv_dtype: fp8_e4m3", "264", "head_dim", "not a multiple of 16 from 16 to 512; nearest: 272"),
        ("variant: causal, kv_dtype: fp8_e4m3, descale: 64", "512", "descale", "allowed: head, page"),
        ("variant: causal, alignment: 8", "512", "alignment", "alignment 16; found 8"),
        ("variant: causal, tile: {m: 128, n: 64}", "512", "tile.m", "have one tile"),
        ("variant: causal, pack_gqa: false", "512", "pack_gqa", "found false; allowed: true"),
        ("variant: causal, tile_map: always", "512", "tile_map", "allowed: auto, never"),
        ("variant: dropped", "512", "variant.dropout", "dropout shares random numbers among rows of one head"),
        ("variant: listed", "512", "head_dim", "from 8 to 256; nearest: 256"),
        (f"variant: causal, {BACKWARD}, dtype: fp32", "512", "dtype", "bf16 and fp16; found fp32"),
        (f"variant: causal, {BACKWARD}, backward: {{backend: cuda}}", "520", "head_dim", "from 8 to 512; nearest: 512"),
    ],
)
def test_what_is_not_served_is_refused_by_name(entry: str, head_dim: str, field: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        planned(entry, head_dim=head_dim)
    assert caught.value.field == field


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm120a", "sm100a"])
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_other_architectures_name_the_widest_head_dim(arch: str, passes: str) -> None:
    with pytest.raises(PlanError, match="256"):
        planned(f"variant: causal, passes: {passes}", arch=arch)


@pytest.mark.parametrize(
    ("variant", "layout"), [("causal", "varlen"), ("softcap", "dense"), ("dropped", "dense"), ("allowed", "dense")]
)
def test_a_backward_in_triton_has_a_kernel_for_each_gradient(variant: str, layout: str) -> None:
    kernel = planned(f"variant: {variant}, layout: {layout}, {BACKWARD}, backward: {{backend: triton}}")
    assert (kernel.schedule, kernel.main) == ("triton_backward", "dk")
    launches = [launch for launch in kernel.launches if launch.grid in ("keys", "queries")]
    assert [launch.name for launch in launches] == ["dv", "dk", "dq"]
    names = [{argument.name for argument in launch.arguments} for launch in launches]
    assert [{name for name in ("dq_ptr", "dk_ptr", "dv_ptr") if name in own} for own in names] == [
        {"dv_ptr"}, {"dk_ptr"}, {"dq_ptr"},
    ]  # fmt: skip
    assert "v_ptr" not in names[0]
    assert "delta_ptr" not in names[0]
    text = render(kernel).text
    own = text[text.index(launches[0].symbol) : text.index(launches[1].symbol)]
    assert "dv = tl.dot(" in own
    assert not re.search(r"\b(ds|dp|delta|dk)\b", own)


@few(
    "head_dim",
    [*WIDE_HEAD_DIMS, "{qk: 512, v: 64}", "{qk: 40, v: 504}", "{qk: 8, v: 264}", "{qk: 320, v: 512}"],
    always=range(0, 36, 4),
)
def test_two_pairs_of_blocks_divide_the_columns_of_a_backward(head_dim: int | str) -> None:
    kernel = planned(f"variant: causal, {BACKWARD}", head_dim=str(head_dim))
    roles, (columns_qk,), (columns_v,) = kernel.structure, kernel.columns_qk, kernel.columns_v
    assert (kernel.schedule, roles.cluster, roles.key_blocks, kernel.threads) == ("hopper_cluster", 4, 2, 512)
    assert roles.overlap == "roles"
    qk, v = roles.columns_of(kernel.columns_qk), roles.columns_of(kernel.columns_v)
    assert 2 * qk == columns_qk.width == roles.sum_columns == 4 * roles.dq_columns >= kernel.head_dim_qk
    assert 2 * v == columns_v.width >= kernel.head_dim_v
    assert roles.shared_bytes <= ARCHES["sm90a"].shared_memory
    box = roles.box_bytes // 2
    assert roles.dq_columns % roles.dq_part == roles.dq_part % box == 0
    assert all(each // roles.parts_of(each) % box == 0 for each in (qk, v))
    assert kernel.stages >= roles.parts_of(v)
    assert sum(roles.registers_of(name) for name in ("query_loader", "values", "keys", "queries")) <= 512
    regions = {region.name: region for region in roles.shared}
    assert regions["part"].bytes == 4 * 64 * 64
    assert all(regions[name].offset % 1024 == 0 for name in ("k", "v", "other_k", "q", "dout", "ds", "other_ds"))
    end = -(-kernel.head_dim_qk // box) * box
    outside = f"kQkEnd = {end}," in render(kernel).text
    assert outside or end == columns_qk.width


def test_twins_send_their_sums_by_every_warp() -> None:
    text = render(planned(f"variant: causal, {BACKWARD}")).text
    assert "__cluster_dims__(4, 1, 1)" in text
    assert text.count("add_twin(") == 2  # S, dP
    assert "load_box_to(\n                3 << pair, " in text
    narrow = render(planned(f"variant: causal, {BACKWARD}", head_dim="256")).text
    assert not any(name in narrow for name in ("twin", "half, ", "uint32_t kPart"))


@pytest.mark.parametrize("head_dim", WIDE_HEAD_DIMS)
def test_no_copy_of_64_columns_brings_padding_alone(head_dim: int) -> None:
    blocks = gradient_columns(head_dim, dtype("bf16"), wgmma=True)
    assert [block.start for block in blocks] == [sum(one.width for one in blocks[:i]) for i in range(len(blocks))]
    assert sum(block.used for block in blocks) == head_dim
    assert all(block.used > block.width - 64 for block in blocks)
