"""The split-KV forward: what it plans for, what it refuses, and the memory of its blocks."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError
from attngen.families.decode.schedule import HopperDecode
from attngen.plan import Plan, plan
from attngen.schema import expand, load_spec_text
from attngen.schema.kernel_spec import KernelSpec
from tests.sampling import few


def spec(entry: str = "", *, layout: str = "dense", head_dim: str = "128", variants: str = "{}") -> KernelSpec:
    text = (
        f"schema: 1\narch: [sm90a]\nvariants: {variants}\nkernels:\n"
        f"  - {{split_kv: true, layout: {layout}, head_dim: {head_dim}, {entry or 'variant: causal'}}}\n"
    )
    (kernel,) = (one for one in expand(load_spec_text(text)) if one.split_kv)
    return kernel


def planned(entry: str = "", **fields: str) -> Plan:
    return plan(spec(entry, **fields))


@few("layout", ["dense", "varlen", "paged"], always=range(0, 999, 3))
@pytest.mark.parametrize("variant", ["full", "causal", "sliding_window", "softcap", "causal_sink", "allowed"])
def test_every_layout_and_mask_has_one_launch_in_cuda(layout: str, variant: str) -> None:
    kernel = planned(f"variant: {variant}", layout=layout)
    assert (kernel.schedule, kernel.backend, kernel.split_kv, kernel.pack_gqa) == ("hopper_decode", "cuda", True, True)
    (launch,) = kernel.launches
    assert (launch.grid, launch.persistent, launch.cluster) == ("splits", True, 8)
    assert [workspace.name for workspace in kernel.workspaces] == ["partials"]
    given = [argument.name for argument in launch.arguments]
    assert len(set(given)) == len(given)
    assert {"counters_ptr", "partials_ptr", "row_bits", "split_tiles", "max_splits"} <= set(given)
    assert ("page_table_ptr" in given) == ("box_rows" in given) == (layout == "paged")


def test_names_of_the_split_and_the_ordinary_kernel_differ() -> None:
    ordinary, split = expand(
        load_spec_text("schema: 1\narch: [sm90a]\nkernels: [{variant: causal, head_dim: 64, split_kv: true}]\n")
    )
    assert plan(ordinary).name == "fwd_sm90a_wgmma_bf16_d64_causal_m192n128s2c3"
    assert plan(split).name == "fwd_sm90a_decode_bf16_d64_causal_m16n16s32w8"


@few("head_dim", ["8", "64", "80", "96", "128", "160", "192", "256", "{qk: 192, v: 128}"], always=range(0, 999, 3))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_memory(head_dim: str, dtype: str) -> None:
    """Regions follow each other, matrices at a multiple of 1024 bytes; each group of warps has two stages at least, and
    a stage is always that of one group."""
    kernel = planned(f"variant: causal, dtype: {dtype}", head_dim=head_dim)
    decode = kernel.structure
    assert isinstance(decode, HopperDecode)
    end = 0
    for region in decode.shared:
        assert (region.offset, region.bytes > 0) == (end, True)
        end += region.bytes
    assert end <= ARCHES["sm90a"].shared_memory
    regions = {region.name: region for region in decode.shared}
    width = kernel.columns_qk[0].width + kernel.columns_v[0].width
    assert regions["kv"].bytes == kernel.stages * kernel.tile_n * width * 2
    assert kernel.num_warps == decode.consumers + decode.loaders
    assert kernel.stages % decode.loaders == 0 == kernel.stages % decode.consumers
    assert kernel.stages >= 2 * decode.consumers
    assert regions["merge"].offset % 16 == 0
    assert regions["kv_full"].offset % 8 == regions["begin"].offset % 8 == 0
    assert ("q" in regions) == (kernel.q_operand == "shared")


@pytest.mark.parametrize(
    ("entry", "field", "reason"),
    [
        ("variant: causal, dtype: fp32", "dtype", "bf16, fp16, fp8_e4m3; found fp32"),
        ("variant: causal, alignment: 8", "alignment", "alignment 16; found 8"),
        ("variant: causal, tile_map: always", "tile_map", "allowed: auto, never"),
        ("variant: causal, head_dim: 12", "head_dim", "nearest"),
        ("variant: dropped", "variant.dropout", "dropout shares random numbers among rows of one head"),
    ],
)
def test_unsupported_fields_are_refused_by_name(entry: str, field: str, reason: str) -> None:
    head_dim = "12" if "head_dim" in entry else "64"
    with pytest.raises(PlanError, match=reason) as caught:
        planned(
            entry.replace(", head_dim: 12", "") + ", backend: cuda", head_dim=head_dim,
            variants='{dropped: {mask: "q_pos >= kv", dropout: true}}',
        )  # fmt: skip
    assert caught.value.field == field


def test_exact_math_is_left_to_specs_that_name_the_backend() -> None:
    with pytest.raises(PlanError, match="fuse the argument of exp2 all the same"):
        planned("variant: causal, fast_math: false")
    assert planned("variant: causal, fast_math: false, backend: cuda").split_kv


def test_heads_may_be_any_number() -> None:
    """Groups that are no power of two are divided by, not shifted."""
    from attngen.render import render

    variants = '{slopes: {mask: "q_pos - kv <= 100 * h and kv <= q_pos"}}'
    text = render(planned("variant: slopes", variants=variants)).text
    assert "group_bits" not in text
    assert "h_lo = hk * group" in text


def test_a_cache_in_8_bits_has_steps_of_as_many_bytes() -> None:
    """32 keys instead of 16; Q, out and products keep 16 bits, and no ordinary forward is asked for."""
    kernel = planned("variant: causal, dtype: bf16, kv_dtype: fp8_e4m3")
    names = {name: kernel.operands.of(name).name for name in ("q", "k", "v", "p", "out")}
    assert names == {"q": "bf16", "k": "fp8_e4m3", "v": "fp8_e4m3", "p": "fp16", "out": "bf16"}
    assert kernel.name == "fwd_sm90a_decode_bf16_kv_fp8_e4m3_d128_causal_m16n32s16w8"
    assert kernel.stages == planned().stages
    narrow = planned("variant: causal, dtype: bf16, kv_dtype: fp8_e4m3", head_dim="64", layout="paged")
    assert narrow.name == "fwd_sm90a_decode_bf16_kv_fp8_e4m3_d64_causal_paged_m16n32s16w8"
    text = "schema: 1\narch: [sm90a]\nkernels: [{variant: full, head_dim: 64, kv_dtype: fp8_e4m3, split_kv: true}]\n"
    assert [one.split_kv for one in expand(load_spec_text(text))] == [True]


@pytest.mark.parametrize(
    ("entry", "field", "reason"),
    [
        ("kv_dtype: fp8_e4m3", "kv_dtype", "allowed: split_kv: true"),
        ("dtype: fp32, kv_dtype: fp8_e4m3, split_kv: true", "kv_dtype", "no kernel mixes q of fp32"),
        ("dtype: fp8_e4m3, kv_dtype: bf16, split_kv: true", "kv_dtype", "no kernel mixes q of fp8_e4m3"),
        ("kv_dtype: fp8_e4m3, split_kv: true, descale: page", "descale", "layout dense has no pages"),
        ("kv_dtype: fp8_e4m3, split_kv: true, descale: 128", "descale", "allowed: head, page"),
        ("kv_dtype: fp8_e4m3, split_kv: true, descale: token", "descale", "a scale of each key in pages alone"),
        ("dtype: fp8_e4m3, layout: paged, descale: token", "descale", "token with split_kv: true"),
        ("dtype: fp8_e4m3, layout: paged, descale: page", "descale", "page with split_kv: true"),
        ("dtype: fp8_e4m3, layout: paged, descale: 128", "descale", "keys in pages have a scale for each head"),
    ],
)
def test_caches_that_no_kernel_reads_are_refused_by_field(entry: str, field: str, reason: str) -> None:
    text = f"schema: 1\narch: [sm90a]\nkernels: [{{variant: causal, head_dim: 64, backend: cuda, {entry}}}]\n"
    *_, last = expand(load_spec_text(text))
    with pytest.raises(PlanError, match=reason) as caught:
        plan(last)
    assert caught.value.field == field


@pytest.mark.parametrize("head_dim", ["64", "128", "256", "272", "512", "{qk: 512, v: 64}"])
@pytest.mark.parametrize("descale", ["head", "page", "token"])
def test_slices_and_scales_fit_in_memory(head_dim: str, descale: str) -> None:
    """Beyond head dim 256 four warps have slices of 128 columns, all in registers, and two groups have two stages each;
    parts of S lie where partial results go."""
    kernel = planned(f"variant: causal, kv_dtype: fp8_e4m3, descale: {descale}", layout="paged", head_dim=head_dim)
    decode = kernel.structure
    assert isinstance(decode, HopperDecode)
    assert decode.shared_bytes <= ARCHES["sm90a"].shared_memory
    regions = {region.name: region.bytes for region in decode.shared}
    assert regions.get("scales", 0) == (kernel.stages * 32 * 16 if descale != "head" else 0)
    groups = decode.consumers // decode.slices
    assert kernel.stages % max(groups, decode.loaders) == 0
    assert decode.slices == (4 if "512" in head_dim or head_dim == "272" else 1)
    (launch,) = kernel.launches
    if decode.slices > 1:
        assert (kernel.q_operand, decode.consumers, kernel.stages, launch.row_warps) == ("registers", 8, 4, 2)
        assert regions["merge"] >= 2 * decode.consumers * 16 * 32 * 4
    else:
        assert launch.row_warps == decode.consumers // 2
