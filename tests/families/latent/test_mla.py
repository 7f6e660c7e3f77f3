"""Plans of latent attention (``v: key``): what they serve, what is refused, memory and copies."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError, SpecError
from attngen.families.latent.pipes import KEYS, ROWS
from attngen.families.latent_backward.schedule import MlaBackward
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from attngen.schema.kernel_spec import KernelSpec
from tests.sampling import few


def specs(entry: str = "", *, head_dim: str = "{qk: 576, v: 512}", arch: str = "sm90a") -> tuple[KernelSpec, ...]:
    variants = '{dropped: {mask: "q_pos >= kv", dropout: true}}'
    given = entry or "variant: causal"
    text = f"schema: 1\narch: [{arch}]\nvariants: {variants}\nkernels:\n  - {{v: key, head_dim: {head_dim}, {given}}}\n"
    return expand(load_spec_text(text))


def planned(entry: str = "", **fields: str) -> Plan:
    (kernel,) = specs(entry, **fields)
    return plan(kernel)


@few("layout", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "softcap", "causal_sink", "allowed"])
def test_every_layout_and_mask_has_one_kernel_that_reads_no_v(layout: str, variant: str) -> None:
    kernel = planned(f"variant: {variant}, layout: {layout}")
    assert (kernel.schedule, kernel.backend, kernel.split_kv, kernel.v_of_key) == ("hopper_mla", "cuda", True, True)
    (launch,) = kernel.launches
    assert (launch.grid, launch.row_blocks, launch.cluster, launch.merges) == ("splits", 4, 1, True)
    maps = [argument.of for argument in launch.arguments if argument.kind == "descriptor"]
    assert maps == ["k"]
    assert "v_ptr" not in render(kernel).text


def test_blocks_that_convert_rows_merge_partial_results_too() -> None:
    kernel = planned("variant: causal, kv_dtype: fp8_e4m3")
    (launch,) = kernel.launches
    assert (launch.cluster, launch.merges) == (1, True)


@pytest.mark.parametrize(
    ("entry", "few"),
    [
        ("variant: full", (16,)),
        ("variant: sliding_window, dtype: fp16", (16,)),
        ("variant: causal_sink, layout: varlen", (16,)),
        ("variant: softcap", ()),
        ("variant: causal, kv_dtype: fp8_e4m3", ()),
    ],
)
def test_products_of_few_rows_are_transposed(entry: str, few: tuple[int, ...]) -> None:
    """Not where scores expect logits by rows, nor where loaders convert keys."""
    kernel = planned(entry)
    assert kernel.structure.few_heads == few
    text = render(kernel).text
    assert [rows for rows in (16, 32) if f"most_rows <= {rows})" in text] == [*few]
    assert ("S^T = K Q^T" in text) == bool(few)


@pytest.mark.parametrize("head_dim", ["{qk: 576, v: 512}", "{qk: 512, v: 512}", "512"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_memory(head_dim: str, dtype: str) -> None:
    """Q, two tiles of K and P, in boxes that are multiples of 1024 bytes, beside a kilobyte that the system takes."""
    kernel = planned(f"variant: causal, dtype: {dtype}", head_dim=head_dim)
    regions = {region.name: region for region in kernel.structure.shared}
    assert kernel.structure.shared_bytes <= ARCHES["sm90a"].shared_memory
    columns = kernel.head_dim_qk
    assert regions["q"].bytes == ROWS * 512 * 2
    assert sum(regions[name].bytes for name in ("values", "more") if name in regions) == 2 * KEYS * columns * 2
    assert all(regions[name].offset % 1024 == 0 for name in ("q", "values", "p"))
    assert ("more" in regions) == (columns > 512)


def test_registers_fit_the_multiprocessor() -> None:
    roles = planned().structure.warp_roles
    assert sum(32 * role.warps * role.registers for role in roles) <= 64 * 1024


@pytest.mark.parametrize(
    ("entry", "field", "reason"),
    [
        ("variant: causal, dtype: fp32", "dtype", "bf16 and fp16; found fp32"),
        ("variant: causal, dtype: fp8_e4m3", "dtype", "bf16 and fp16; found fp8_e4m3"),
        ("variant: causal, dtype: fp16, kv_dtype: fp8_e4m3", "dtype", "a cache in fp8_e4m3 stands beside bf16"),
        ("variant: causal, kv_dtype: fp8_e4m3, descale: 64", "descale", "of a head or a page"),
        ("variant: causal, loads: pointer", "loads", "tensor descriptors"),
        ("variant: causal, alignment: 8", "alignment", "alignment 16; found 8"),
        ("variant: causal, tile_map: always", "tile_map", "allowed: auto, never"),
        ("variant: causal, tile: {m: 128, n: 64}", "tile.m", "have one tile"),
        ("variant: causal, pack_gqa: false", "pack_gqa", "found false; allowed: true"),
        ("variant: dropped", "variant.dropout", "dropout shares random numbers among rows of one head"),
    ],
)
def test_unsupported_fields_are_refused_by_name(entry: str, field: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        planned(f"{entry}, backend: cuda")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("entry", "arch"), [("variant: causal, backend: triton", "sm90a"), ("variant: causal", "sm80")]
)
def test_triton_has_no_such_kernel(entry: str, arch: str) -> None:
    with pytest.raises(PlanError, match="triton has no forward with 'v: key'") as caught:
        planned(entry, arch=arch)
    assert caught.value.field == "v"


def test_other_head_dims_are_refused_with_those_that_exist() -> None:
    with pytest.raises(
        PlanError, match=r"head_dim \{qk: 512, v: 512\} or \{qk: 576, v: 512\}, not \{qk: 192, v: 128\}"
    ):
        planned("variant: causal, backend: cuda", head_dim="{qk: 192, v: 128}")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("variant: causal, layout: paged, passes: [forward, backward]", "'layout: paged' has no backward"),
        ("variant: causal, split_kv: true", "always share the keys of a sequence"),
    ],
)
def test_the_backward_and_another_split_are_refused(entry: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        specs(entry)


def test_without_the_field_such_head_dims_have_no_kernel() -> None:
    text = "schema: 1\narch: [sm90a]\nkernels: [{variant: causal, head_dim: {qk: 576, v: 512}, split_kv: true}]\n"
    for kernel in expand(load_spec_text(text)):
        with pytest.raises(PlanError):
            plan(kernel)


def backward(entry: str = "variant: causal", **fields: str) -> Plan:
    _, kernel = specs(f"{entry}, passes: [forward, backward]", **fields)
    return plan(kernel)


@few("layout", ["dense", "varlen"])
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "causal_sink", "packed_documents"])
@pytest.mark.parametrize("head_dim", ["{qk: 576, v: 512}", "512"])
def test_the_backward_takes_masks_and_sinks(variant: str, layout: str, head_dim: str) -> None:
    kernel = backward(f"variant: {variant}, layout: {layout}", head_dim=head_dim)
    assert (kernel.schedule, kernel.main) == ("mla_backward", "dq")
    assert [(one.name, one.grid) for one in kernel.launches] == [
        ("preprocess", "rows"), ("dq", "chunk_rows"), ("dkv", "chunk_keys"), ("postprocess", "key_rows"),
    ]  # fmt: skip
    assert all(one.shared_bytes <= ARCHES["sm90a"].shared_memory for one in kernel.launches)
    assert "v_ptr" not in render(kernel).text


@pytest.mark.parametrize(
    ("entry", "field", "reason"),
    [
        ("variant: softcap", "variant.score", "takes masks and sinks, no score"),
        ("variant: dropped", "variant.dropout", "takes no dropout"),
        ("variant: causal, deterministic: true", "deterministic", "in no fixed order"),
        ("variant: causal, dtype: fp32", "dtype", "bf16 and fp16; found fp32"),
    ],
)
def test_what_the_backward_does_not_serve_is_refused_by_name(entry: str, field: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        backward(f"{entry}, backend: cuda")
    assert caught.value.field == field


def test_registers_of_roles_are_those_of_the_block() -> None:
    """``setmaxnreg.inc`` waits for registers that other warps give back: with more than the block has, for ever."""
    structure = backward().structure
    assert isinstance(structure, MlaBackward)
    for roles in (structure.warp_roles, structure.dkv_roles):
        threads = sum(32 * role.warps for role in roles)
        given = 64 * 1024 // threads // 8 * 8
        assert sum(32 * role.warps * role.registers for role in roles) <= given * threads
