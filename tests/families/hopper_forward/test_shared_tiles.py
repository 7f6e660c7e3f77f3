"""Plans of kernels whose blocks share the keys of a tile of queries."""

from __future__ import annotations

import pytest

from attngen.errors import PlanError
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan import Plan, plan
from attngen.plan.pipes import ROW_PADDING
from attngen.render import render
from attngen.schema import expand, load_spec_text
from tests.sampling import few


def planned(entry: str) -> tuple[Plan, Plan]:
    """Return the plans of the ordinary kernel of an entry and of that whose blocks share keys."""
    text = f"schema: 1\narch: [sm90a]\nkernels:\n  - {{split_kv: tiles, {entry}}}\n"
    ordinary, shared = map(plan, expand(load_spec_text(text)))
    return ordinary, shared


def roles(kernel: Plan) -> HopperForward:
    assert isinstance(kernel.structure, HopperForward)
    return kernel.structure


def test_the_kernel_that_shares_keys_stands_beside_the_ordinary_one() -> None:
    ordinary, shared = planned("variant: causal, head_dim: 128")
    assert ordinary.name == "fwd_sm90a_wgmma_bf16_d128_causal_m128n128s2c2"
    assert shared.name == "fwd_sm90a_wgmma_bf16_d128_causal_m128n128s3c2_shared"
    assert (roles(ordinary).sharing, roles(shared).sharing) == (1, 8)
    (launch,) = shared.launches
    assert (launch.grid, launch.cluster, launch.persistent, launch.pdl) == ("key_shares", 8, False, True)
    assert not shared.split_kv
    assert {"out_map", "tile_counter"} & {one.name for one in shared.arguments} == set()
    assert shared.times[1] > ordinary.times[1]
    assert shared.times[2] == ordinary.times[2]


@pytest.mark.parametrize(
    ("entry", "tile", "stages"),
    [
        ("variant: full, head_dim: 64", (128, 128), 4),  # two consumers, though the ordinary one has three
        ("variant: full, head_dim: 128", (128, 128), 3),
        ("variant: full, head_dim: 256", (128, 64), 2),
        ("variant: sliding_window, head_dim: 128", (128, 64), 4),
        ("variant: full, head_dim: 128, tile: {m: 192, n: 64}", (192, 64), 4),
        ("variant: full, head_dim: 128, pipeline: {stages: 2}", (128, 128), 2),
        ("variant: full, head_dim: 128, pack_gqa: true", (64, 128), 3),
    ],
)
def test_tiles_and_stages(entry: str, tile: tuple[int, int], stages: int) -> None:
    _, shared = planned(f"backend: cuda, {entry}")
    assert (shared.tile_m, shared.tile_n, shared.stages) == (*tile, stages)
    assert roles(shared).q_stages == 1


@pytest.mark.parametrize("dims", ["64", "256", "{qk: 8, v: 256}", "{qk: 192, v: 128}"])
def test_partial_results_have_room(dims: str) -> None:
    """Partial results take the place of Q, K and V, and more beside it where these are small."""
    _, shared = planned(
        f"backend: cuda, variant: full, head_dim: {dims}, tile: {{m: 64, n: 16}}, pipeline: {{stages: 2}}"
    )
    regions = {region.name: region for region in roles(shared).shared}
    row = 4 * (shared.columns_v[0].width + ROW_PADDING)
    room = sum(regions[name].bytes for name in ("q", "k", "v", "more_partials") if name in regions)
    assert room >= shared.tile_m * row
    assert regions["work"].offset == room, "they lie side by side, from the start"
    assert f"<= {room})" in render(shared).text


@pytest.mark.parametrize(
    ("entry", "field", "told"),
    [
        (
            "variant: full, head_dim: 64, backend: triton",
            "split_kv",
            "triton has no forward whose blocks share the keys of a tile",
        ),
        ("variant: full, head_dim: 64, arch: sm80", "split_kv", "whose blocks share the keys of a tile of queries"),
        (
            "variant: full, head_dim: 64, dtype: fp8_e4m3",
            "split_kv",
            "cuda has no forward in fp8_e4m3 whose blocks share",
        ),
        ("variant: full, head_dim: 64, dtype: fp32, backend: cuda", "dtype", "cuda kernels take bf16 and fp16"),
        ("variant: full, head_dim: 64, kv_dtype: fp8_e4m3", "kv_dtype", "allowed: split_kv: true"),
    ],
)
def test_unsupported_fields_are_refused(entry: str, field: str, told: str) -> None:
    text = f"schema: 1\narch: [sm90a]\nkernels:\n  - {{split_kv: tiles, {entry}}}\n"
    (shared,) = (one for one in expand(load_spec_text(text)) if one.split_tiles)
    with pytest.raises(PlanError, match=told) as caught:
        plan(shared)
    assert (caught.value.field or "").endswith(field)


@few("variant", ["causal", "sink_window", "dilated", "allowed"], always=range(0, 999, 3))
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_each_iteration_and_layout_shares_the_tiles_that_rows_see(variant: str, layout: str) -> None:
    _, shared = planned(f"backend: cuda, variant: {variant}, head_dim: 64, layout: {layout}")
    text = render(shared).text
    assert "const int every = work.tiles, quotient = every / blocks" in text
    taken = (
        "const int nth = behind + remaining;"
        if shared.iteration == "ranges"
        else "if (__any_sync(~0u, ahead-- > 0)) continue;"
    )
    assert taken in text
    assert "while (true)" not in text
