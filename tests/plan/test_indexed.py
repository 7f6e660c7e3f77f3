"""Plans of keys by index: what they serve, what is refused, and memory."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError, SpecError
from attngen.plan import Plan, plan
from attngen.plan.schedules.mla_pipes import KEYS, ROWS
from attngen.render import render
from attngen.schema import expand, load_spec_text

VARIANTS = """
  listed: {keys: index}
  listed_causal: {keys: index, mask: "q_pos >= kv"}
  counted: {keys: counted_index, score: "s + slope[h] * (kv - q_pos)", tensors: {slope: {dtype: float32, shape: [h]}}}
"""


def planned(entry: str, *, arch: str = "sm90a", v: str = "v: key, ", head_dim: str = "{qk: 576, v: 512}") -> Plan:
    text = f"schema: 1\narch: [{arch}]\nvariants:{VARIANTS}kernels:\n  - {{{v}head_dim: {head_dim}, {entry}}}\n"
    (kernel,) = expand(load_spec_text(text))
    return plan(kernel)


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


def test_masks_and_scores_read_places_from_the_list() -> None:
    """A full tile has no mask code, and one whose mask reads the place of a key has it in every tile."""
    plain, masked, scored = (
        render(planned(f"variant: {name}")).text for name in ("listed", "listed_causal", "counted")
    )
    assert "if (__any_sync(~0u, !listed))" in plain
    assert "if (__any_sync(~0u, true))" in masked
    assert "const int key = keys[i];" in masked
    assert "float(key) * u_slope_h" in scored


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
        ("variant: listed", {"v": ""}, "has 'keys: index', which only kernels with 'v: key' take"),
        ("variant: listed", {"v": "", "head_dim": "128"}, "has 'keys: index', which only kernels with 'v: key' take"),
        ("variant: listed, backend: triton", {}, "of which triton has no kernel"),
        ("variant: listed", {"arch": "sm80"}, "need wgmma"),
        ("variant: listed, loads: descriptor", {}, "gathered by address; allowed: pointer"),
        ("variant: listed, dtype: fp32", {}, "bf16 and fp16, not fp32"),
        ("variant: listed", {"head_dim": "{qk: 192, v: 128}"}, "have head_dim"),
    ],
)  # fmt: skip
def test_what_is_refused(entry: str, given: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        planned(entry, **given)


def test_there_is_no_backward() -> None:
    with pytest.raises(SpecError, match="'v: key' has no backward"):
        planned("variant: listed, passes: [forward, backward]")
    with pytest.raises(PlanError, match="'keys: index', which has no backward"):
        planned("variant: listed, passes: backward", v="", head_dim="64")
