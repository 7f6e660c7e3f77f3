"""Plans of keys by index: what they serve, what is refused, and memory."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError, SpecError
from attngen.families.latent.pipes import KEYS, ROWS
from attngen.families.latent.schedule import HopperMla
from attngen.plan import Plan, plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from tests.sampling import few

VARIANTS = """
  listed: {keys: index}
  listed_causal: {keys: index, mask: "q_pos >= kv"}
  counted: {keys: counted_index, score: "s + slope[h] * (kv - q_pos)", tensors: {slope: {dtype: float32, shape: [h]}}}
  blocks: {keys: blocks_of_64}
  head_blocks: {keys: counted_head_blocks_of_16}
  two_caches: {keys: counted_index_of_two_caches}
  sunk: {keys: index, sink: "0.5", sink_in_lse: false}
"""


def planned(entry: str, *, arch: str = "sm90a", v: str = "v: key, ", head_dim: str = "{qk: 576, v: 512}") -> Plan:
    text = f"schema: 1\narch: [{arch}]\nvariants:{VARIANTS}kernels:\n  - {{{v}head_dim: {head_dim}, {entry}}}\n"
    (kernel,) = expand(load_spec_text(text))
    return plan(kernel)


@few("layout", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("arch", ["sm80", "sm90a"])
@pytest.mark.parametrize("head_dim", ["64", "128", "{qk: 192, v: 128}"])
def test_ordinary_head_dims_gather_rows_of_k_and_v(layout: str, arch: str, head_dim: str) -> None:
    kernel = planned(f"variant: counted, layout: {layout}", arch=arch, v="", head_dim=head_dim)
    assert (kernel.schedule, kernel.loads, kernel.split_kv, kernel.tile_m) == ("mma_indexed", "pointer", True, 16)
    names = [argument.name for argument in kernel.launch("forward").arguments]
    assert {"k_ptr", "v_ptr", "indices_ptr", "topk_length_ptr", "query_rows", "query_rows_reciprocal"} <= {*names}
    regions = {region.name: region for region in kernel.structure.shared}
    assert regions["entries"].bytes == kernel.stages * kernel.tile_n * 4
    assert kernel.structure.shared_bytes <= ARCHES[arch].shared_memory
    assert "copy_number_async" in render(kernel).text


def test_lists_of_blocks_and_of_each_kv_head() -> None:
    plain, blocks, of_heads = (
        render(planned(f"variant: {name}", v="", head_dim="128")).text for name in ("listed", "blocks", "head_blocks")
    )
    assert "const int entries = extent_indices_2;" in plain
    assert "const int entries = extent_indices_2 * 64;" in blocks
    assert "extent_indices_3), 0) * 16;" in of_heads
    assert "+ hk * stride_indices_2" in of_heads


@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
@pytest.mark.parametrize("variant", ["listed", "listed_causal", "counted"])
def test_every_layout_gathers_rows_of_k_by_address(layout: str, variant: str) -> None:
    kernel = planned(f"variant: {variant}, layout: {layout}")
    assert (kernel.schedule, kernel.backend, kernel.split_kv, kernel.v_of_key) == ("hopper_indexed", "cuda", True, True)
    launch, merge = kernel.launches
    assert (launch.grid, merge.grid, merge.arguments) == ("splits", "merged_rows", launch.arguments)
    names = [argument.name for argument in launch.arguments]
    assert not any(argument.kind == "descriptor" for argument in launch.arguments)
    assert {"k_ptr", "indices_ptr", "stride_indices_1", "extent_indices_2", "query_rows"} <= {*names}
    assert ("topk_length_ptr" in names) == (variant == "counted")
    assert ("page_table_ptr" in names) == (layout == "paged")


@pytest.mark.parametrize("kv_dtype", ["fp8_mla_656", "fp8_e4m3"])
def test_blocks_that_convert_rows_of_one_cache_merge_in_place(kv_dtype: str) -> None:
    (launch,) = planned(f"variant: listed, kv_dtype: {kv_dtype}").launches
    assert (launch.row_blocks, launch.cluster, launch.merges) == (2, 1, True)


@pytest.mark.parametrize(
    ("entry", "alike"),
    [
        ("variant: listed", True),
        ("variant: listed, kv_dtype: fp8_mla_656", True),
        ("variant: listed, kv_dtype: fp8_mla_656, layout: varlen", True),
        ("variant: listed, kv_dtype: fp8_mla_656, layout: paged", False),
        ("variant: two_caches, kv_dtype: fp8_mla_656", False),
        ("variant: listed, kv_dtype: fp8_e4m3", False),
    ],
)
def test_each_consumer_computes_s_where_loaders_have_time_for_it(entry: str, alike: bool) -> None:
    kernel = planned(entry)
    assert isinstance(kernel.structure, HopperMla)
    assert kernel.structure.alike == alike
    assert {role.name for role in kernel.structure.warp_roles} == (
        {"consumers", "loader"} if alike else {"scorer", "follower", "loader"}
    )


def test_results_of_two_caches_are_merged_in_place_or_by_a_launch() -> None:
    launch, merge = planned("variant: two_caches, kv_dtype: fp8_mla_656").launches
    assert (launch.cluster, launch.merges, merge.grid) == (1, True, "merged_rows")


@pytest.mark.exhaustive
def test_masks_and_scores_read_places_from_the_list() -> None:
    """A full tile has no mask code, and one whose mask reads the place of a key has it in every tile."""
    plain, masked, scored = (
        render(planned(f"variant: {name}")).text for name in ("listed", "listed_causal", "counted")
    )
    assert "if (__any_sync(~0u, !listed))" in plain
    assert "if (__any_sync(~0u, true))" in masked
    assert "const int key = keys[i];" in masked
    assert "float(key) * u_slope_h" in scored


@pytest.mark.parametrize(
    ("entry", "few"),
    [
        ("variant: listed", (16, 32)),
        ("variant: blocks, layout: paged", (16, 32)),
        ("variant: listed_causal", ()),
        ("variant: counted", ()),
        ("variant: listed, kv_dtype: fp8_mla_656", ()),
    ],
)
def test_products_of_few_heads_are_transposed(entry: str, few: tuple[int, ...]) -> None:
    """Not where elements have masks and scores, which expect rows to be heads, nor where loaders convert rows."""
    kernel = planned(entry)
    assert isinstance(kernel.structure, HopperMla)
    assert kernel.structure.few_heads == few
    text = render(kernel).text
    assert [heads for heads in (16, 32) if f"group <= {heads})" in text] == [*few]
    assert ("S^T = K Q^T" in text) == bool(few)


@pytest.mark.parametrize(
    ("entry", "head_dim"),
    [
        *((f"layout: {layout}", "{qk: 576, v: 512}") for layout in ("dense", "varlen", "paged")),
        ("layout: dense, dtype: fp16", "512"),
        ("layout: varlen, kv_dtype: fp8_mla_656", "{qk: 576, v: 512}"),
        ("layout: paged, kv_dtype: fp8_mla_584", "512"),
    ],
)
def test_a_second_cache_has_lists_and_pages_of_its_own(entry: str, head_dim: str) -> None:
    """Each tile has keys of one list, and entries are read past the lengths of neither."""
    kernel = planned(f"variant: two_caches, {entry}", head_dim=head_dim)
    names = {argument.name for argument in kernel.launch("forward").arguments}
    wanted = {"extra_k_ptr", "stride_extra_k_0", "extra_indices_ptr", "extra_topk_length_ptr"}
    assert names > wanted | {"extent_extra_k_1", "extra_page_size_reciprocal", "indices_ptr", "topk_length_ptr"}
    assert isinstance(kernel.structure, HopperMla)
    assert kernel.structure.least_tiles == (1 if "584" in entry else 2)
    text = render(kernel).text
    assert "const auto keys_of = [&](const Work& work, int tile) { return work.is_extra(tile) ? extra_slots" in text
    assert "work.list +" not in text
    assert "entry < work.entries" not in text.replace("entry < work.entries_of(", "")


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_mla_656"])
def test_the_log_sum_exp_is_written_before_the_sink_is_added(kv_dtype: str) -> None:
    """By blocks that have all of a row's keys, by those that come last, and by the launch that merges."""
    text = render(planned(f"variant: sunk, kv_dtype: {kv_dtype}")).text
    places = [text.index(line) for line in ("log_sum_exp(row_max[row], sum)", "log_sum_exp(sum.row_max, sum.sum)")]
    assert all("sink" not in text[place - 400 : place] for place in places)
    assert all("sink" in text[place : place + 400] for place in places)


@pytest.mark.parametrize("head_dim", ["{qk: 576, v: 512}", "512"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_memory(head_dim: str, dtype: str) -> None:
    kernel = planned(f"variant: listed, dtype: {dtype}", head_dim=head_dim)
    regions = {region.name: region for region in kernel.structure.shared}
    assert kernel.structure.shared_bytes <= ARCHES["sm90a"].shared_memory - 1024
    assert regions["q"].bytes == ROWS * kernel.head_dim_qk * 2
    assert (
        sum(regions[name].bytes for name in ("values", "more") if name in regions) == 2 * KEYS * kernel.head_dim_qk * 2
    )
    assert all(regions[name].offset % 1024 == 0 for name in ("q", "values", "p"))
    assert sum(32 * role.warps * role.registers for role in kernel.structure.warp_roles) <= 64 * 1024


@pytest.mark.parametrize(
    ("entry", "given", "reason"),
    [
        ("variant: listed", {"v": ""}, "head_dim"),
        ("variant: listed, dtype: fp32", {"v": "", "head_dim": "128"}, "bf16 and fp16; found fp32"),
        ("variant: listed, kv_dtype: fp8_e4m3", {"v": "", "head_dim": "128"}, "caches in fewer bits; found fp8_e4m3"),
        ("variant: listed, passes: backward", {"v": "", "head_dim": "96"}, "multiples of 64"),
        ("variant: listed, passes: backward", {"v": "", "head_dim": "{qk: 256, v: 320}"}, "head_dim"),
        ("variant: counted, passes: backward", {}, "masks and sinks, no score"),
        ("variant: listed, passes: backward, deterministic: true", {}, "adds dK up in no fixed order"),
        ("variant: listed, passes: backward", {"arch": "sm80"}, "for sm80; .*arch sm90a takes it"),
        ("variant: listed, backend: triton", {}, "'keys: index' and 'v: key'; allowed: backend: cuda"),
        ("variant: listed", {"arch": "sm80"}, "cuda has no forward with 'v: key' for sm80; .*arch sm90a takes it"),
        ("variant: listed", {"v": "", "head_dim": "128", "arch": "sm100a"}, "arch sm80, .*, sm120a, ptx80 take it"),
        ("variant: listed, backend: cuda", {"v": "", "head_dim": "128", "arch": "sm100a"}, "no forward for sm100a;"),
        ("variant: listed, loads: descriptor", {}, "gathered by address; found descriptor; allowed: pointer"),
        ("variant: listed, dtype: fp32", {}, "bf16 and fp16; found fp32"),
        ("variant: listed", {"head_dim": "{qk: 192, v: 128}"}, "have head_dim"),
        ("variant: two_caches", {"v": "", "head_dim": "128"}, "only forward kernels with 'v: key' read two caches"),
        ("variant: two_caches, passes: backward", {}, "only forward kernels with 'v: key' read two caches"),
        ("variant: two_caches, kv_dtype: fp8_e4m3", {}, "whose scales lie beside them"),
        ("variant: sunk", {"v": "", "head_dim": "128"}, "leave a sink out of the log-sum-exp"),
        ("variant: sunk, passes: backward", {}, "leave a sink out of the log-sum-exp"),
    ],
)  # fmt: skip
def test_what_is_refused(entry: str, given: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        planned(entry, **given)


def test_split_kv_is_left_out() -> None:
    with pytest.raises(SpecError, match="'keys: index' always share the keys"):
        planned("variant: listed, split_kv: true", v="", head_dim="128")


@pytest.mark.parametrize("arch", ["sm80", "sm90a", "sm120a"])
@pytest.mark.parametrize("head_dim", ["64", "128", "{qk: 192, v: 128}"])
def test_backward_of_ordinary_head_dims(head_dim: str, arch: str) -> None:
    kernel = planned("variant: blocks, passes: backward", v="", head_dim=head_dim, arch=arch)
    assert (kernel.schedule, kernel.stages in (2, 3)) == ("mma_indexed_backward", True)
    assert kernel.structure.shared_bytes <= ARCHES[arch].shared_memory
    (sums,) = (workspace for workspace in kernel.workspaces if workspace.name == "dkv_sum")
    assert sums.terms == ((kernel.head_dim_qk, "key_rows"), (kernel.head_dim_v, "key_rows"))


@pytest.mark.parametrize("head_dim", ["{qk: 576, v: 512}", "512"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_backward(layout: str, head_dim: str) -> None:
    """Blocks add dK up in float32, in memory that the first launch clears and the last one rounds."""
    kernel = planned(f"variant: listed_causal, layout: {layout}, passes: backward", head_dim=head_dim)
    assert (kernel.schedule, kernel.v_of_key) == ("indexed_backward", True)
    assert [launch.name for launch in kernel.launches] == ["preprocess", "dqkv", "postprocess"]
    assert [launch.grid for launch in kernel.launches] == ["rows", "lists", "key_rows"]
    assert kernel.structure.shared_bytes <= ARCHES["sm90a"].shared_memory
    assert [workspace.name for workspace in kernel.workspaces] == ["lse_log2", "delta", "dkv_sum"]
    assert "key >= visible_to" in render(kernel).text
