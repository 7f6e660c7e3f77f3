"""The plan of a backward in CUDA: its kernels, memory, registers and iterations, and what is refused."""

from __future__ import annotations

import re

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError
from attngen.parts.floors import gradient_floor
from attngen.plan import Plan
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few, sampled


def backward(variant: str = "causal", **fields: object) -> Plan:
    return planned(variant, passes="backward", **{"backward": "{backend: cuda}", **fields})


WIDE = [
    *range(136, 257, 8), "{qk: 64, v: 256}", "{qk: 80, v: 144}", "{qk: 192, v: 128}", "{qk: 192, v: 256}",
    "{qk: 256, v: 64}", "{qk: 256, v: 192}", "{qk: 8, v: 136}", "{qk: 248, v: 72}",
]  # fmt: skip


@sampled(always=8, variant=["causal", "dilated", "softcap"], head_dim=[*WIDE])
def test_memory_and_registers_of_a_cluster_fit(head_dim: object, variant: str) -> None:
    kernel = backward(variant, head_dim=head_dim)
    roles, (columns_qk,), (columns_v,) = kernel.structure, kernel.columns_qk, kernel.columns_v
    assert roles is not None
    assert (roles.cluster, roles.keys, kernel.threads) == (2, 64, 512)
    assert roles.shared_bytes <= ARCHES["sm90a"].shared_memory
    ends = 0
    for region in roles.shared:
        assert region.offset == ends
        ends += region.bytes
        if region.name in ("k", "v", "other_k", "q", "dout", "ds", "other_ds"):  # swizzled by 128 bytes x 8 rows
            assert region.offset % 1024 == 0
        elif region.name != "sum_tile":
            assert region.offset % 8 == 0
    # what a launch reserves for each thread of four warpgroups, and what its roles make of it
    loads, values, keys, queries = (roles.registers_of(name) for name in ("query_loader", "values", "keys", "queries"))
    assert loads + values + keys + queries <= 4 * (65536 // 512)
    assert values == keys
    assert values >= 64 // 2 + max(columns_qk.width, columns_v.width) // 2  # a product, dK or dV
    assert queries >= roles.dq_part // 2
    sizes = {region.name: region.bytes for region in roles.shared}
    assert sizes["q"] >= 64 * columns_qk.width * 2  # where dK goes out
    assert sizes["dout"] >= 64 * columns_v.width * 2  # and dV
    # each block has half of the columns of dQ, in products and copies of some; and loads half of the copies of dO
    assert 2 * roles.dq_columns == roles.sum_columns == columns_qk.width >= kernel.head_dim_qk
    assert roles.dq_columns % roles.dq_part == 0
    box = roles.box_bytes // kernel.operands.q.bytes
    assert roles.dq_part % box == 0
    assert columns_v.width >= kernel.head_dim_v
    assert columns_v.width // roles.parts_of(columns_v.width) % box == 0
    assert kernel.stages >= roles.parts_of(columns_v.width)


@few("head_dim", WIDE, always=range(0, 999, 4))
def test_no_copy_of_a_cluster_brings_padding_alone(head_dim: object) -> None:
    """Such a copy would look up where a windowed descriptor begins, which may be nobody's memory."""
    kernel = backward(head_dim=head_dim, layout="varlen")
    roles, text = kernel.structure, render(kernel).text
    assert roles is not None
    box = roles.box_bytes // kernel.operands.q.bytes
    for name, dim, columns in (
        ("kQkEnd", kernel.head_dim_qk, kernel.columns_qk), ("kVEnd", kernel.head_dim_v, kernel.columns_v)
    ):  # fmt: skip
        end = re.search(rf"{name} = (\d+)", text)
        copied = columns[0].width if end is None else int(end[1])
        assert copied - box < dim <= copied <= columns[0].width
    stages = ("column", "part * kVPart + column")
    assert all((f"min({column}, k" in text) == ("kQkEnd" in text) for column in stages)


def test_a_cluster_has_a_tile_of_keys() -> None:
    kernel = backward(head_dim=256, layout="varlen")
    assert kernel.name == "bwd_sm90a_cluster_bf16_d256_causal_varlen_m64n128s3c2_dvoverlap"
    rows = [part.to_dict() for part in kernel.launches]
    assert [(row["name"], row["grid"], row["cluster"], row["persistent"]) for row in rows] == [
        ("preprocess", "rows", 1, False), ("dqkv", "keys", 2, False), ("postprocess", "queries", 1, False),
    ]  # fmt: skip
    text = render(kernel).text
    assert f"__cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) {kernel.launch('dqkv').symbol}(" in text
    windows = {argument.of: argument.window for argument in kernel.arguments if argument.kind == "descriptor"}
    assert windows == {"q": 64, "k": 64, "v": 64, "dout": 64}
    assert "tile_counter" not in [argument.name for argument in kernel.arguments]
    assert backward(head_dim=192).name == "bwd_sm90a_cluster_bf16_d192_causal_m64n128s2c2"


@pytest.mark.parametrize(("head_dim", "variant"), [(256, "causal"), (192, "softcap"), (256, "allowed")])
def test_clusters_in_a_fixed_order_take_tiles_as_they_begin(head_dim: int, variant: str) -> None:
    kernel, other = (backward(variant, head_dim=head_dim, deterministic=each) for each in ("true", "false"))
    assert kernel.name == f"{other.name}_deterministic"
    assert kernel.structure is not None
    assert other.structure is not None
    assert kernel.structure.overlap == other.structure.overlap
    assert "tile_counter" in [argument.name for argument in kernel.arguments]
    text = render(kernel).text
    taken, made_of_it = text.index("atomicInc(tile_counter, gridDim.x / 2 - 1)"), text.index("place_tile(index, ")
    assert taken < text.index("sync_cluster();", taken) < made_of_it
    assert text.index("wait(here + kTurn, ") < text.index("Event<kAdded>::arrive(here)")
    assert "order.cuh" not in render(other).text


@pytest.mark.parametrize("head_dim", [144, 192, 256])
def test_clusters_drop_by_the_signs_of_probabilities(head_dim: int) -> None:
    kernel = backward("own", head_dim=head_dim, declared="variants:\n  own: {mask: q_pos >= kv, dropout: true}\n")
    assert kernel.structure is not None
    assert kernel.structure.overlap == "roles"
    text = render(kernel).text
    assert "marked_pair(4 * i)" in text
    assert "p[j] & 0x7fff7fffu" in text
    assert "store_rows(dv, dropout_scale, " in text


@sampled(always=5, variant=["causal", "alibi", "softcap", "relative_bias"], head_dim=[*range(8, 129, 8)])
def test_memory_and_registers_fit(variant: str, head_dim: int) -> None:
    kernel = backward(variant, head_dim=head_dim)
    roles = kernel.structure
    assert roles is not None
    assert roles.shared_bytes + 1024 <= ARCHES["sm90a"].shared_memory + 1024
    ends = 0
    for region in roles.shared:
        assert region.offset == ends
        ends += region.bytes
        if region.name in ("k", "v", "q", "dout", "ds"):  # swizzled by 128 bytes x 8 rows
            assert region.offset % 1024 == 0
    # what a launch reserves for each thread, and what its roles make of it
    assert roles.registers_of("loader") + roles.consumers * roles.registers_of("consumers") <= 3 * (
        65536 // kernel.threads // 8 * 8
    )
    assert roles.sum_columns >= head_dim
    assert kernel.tile_m * roles.sum_columns == roles.consumers * 64 * roles.dq_columns
    box = roles.box_bytes // kernel.operands.q.bytes
    assert roles.dq_columns % box == 0 or roles.dq_by_rows
    assert kernel.columns_qk[0].width - head_dim < box  # no copy lies outside of a windowed descriptor
    sizes = {region.name: region.bytes for region in roles.shared}
    if not roles.stores_apart:
        assert sizes["dq"] >= sizes["v"]  # through which dV leaves
        assert sizes["ds"] >= sizes["k"]


@pytest.mark.parametrize("head_dim", ["{qk: 64, v: 128}", "{qk: 16, v: 64}", "{qk: 128, v: 64}", "{qk: 8, v: 128}"])
def test_dk_and_dv_find_room_where_dq_has_other_columns(head_dim: str) -> None:
    roles = backward(head_dim=head_dim).structure
    assert roles is not None
    sizes = {region.name: region.bytes for region in roles.shared}
    assert roles.stores_apart or (sizes["dq"] >= sizes["v"] and sizes["ds"] >= sizes["k"])
    assert roles.shared_bytes <= ARCHES["sm90a"].shared_memory


def test_two_kernels_of_one_source() -> None:
    kernel = backward(head_dim=128, layout="varlen")
    assert kernel.name == "bwd_sm90a_wgmma_bf16_d128_causal_varlen_m64n128s2c2_pingpong"
    assert [(part.name, part.grid, part.persistent) for part in kernel.launches] == [
        ("preprocess", "rows", False), ("dqkv", "keys", True),
    ]  # fmt: skip
    text = render(kernel).text
    for part in kernel.launches:
        assert text.count(f") {part.symbol}(") == 1
    windows = {argument.of: argument.window for argument in kernel.arguments if argument.kind == "descriptor"}
    assert windows == {"q": 64, "k": 128, "v": 128, "dout": 64}
    dense = {argument.of: argument.window for argument in backward().arguments if argument.kind == "descriptor"}
    assert dense == {"q": None, "k": 128, "v": 128, "dout": None}  # a tensor of queries ends where they end


@pytest.mark.parametrize(
    ("variant", "fields", "iteration", "overlap"),
    [
        ("causal", {}, "ranges", "pingpong"), ("dilated", {"tile_map": "never"}, "classified", "gradients"),
        ("dilated", {}, "tile_map", "pingpong"), ("allowed", {}, "tile_map", "pingpong"),
    ],
)  # fmt: skip
def test_iteration_over_the_queries_of_a_block(
    variant: str, fields: dict[str, object], iteration: str, overlap: str
) -> None:
    kernel = backward(variant, **fields)
    assert (kernel.iteration, kernel.launch("dqkv").iteration) == (iteration, iteration)
    assert [part.name for part in kernel.launches].count("classify_dqkv") == (iteration == "tile_map")
    assert kernel.structure is not None
    assert kernel.structure.overlap == overlap


def test_keys_that_a_query_does_not_see_are_masked_in_partial_tiles_only() -> None:
    text = render(backward(head_dim=128)).text
    partial, full = re.split(r"\n +\} else \{\n", text.split("const auto exponentiate_step")[1], maxsplit=1)
    assert "if (8 * row >= visible_to) x = kMasked;" in partial
    assert "kMasked" not in full.split("pack_probabilities")[0]


def test_a_mask_that_hides_everything_has_an_empty_range() -> None:
    kernel = backward("never", declared="variants:\n  never: {mask: kv < 0}\n")
    assert "const int tiles = max(0, 0);" in render(kernel).text


HEAD_WINDOW = "variants:\n  own: {mask: q_pos >= kv and q_pos - kv < 64 * (h + 1)}\n"


@few(
    ("variant", "tile_map", "iteration", "by_head"),
    [
        ("causal", "auto", "ranges", False), ("sink_window", "auto", "ranges", False), ("own", "auto", "ranges", True),
        ("dilated", "never", "classified", False), ("allowed", "auto", "tile_map", True),
    ], always=range(0, 999, 3))  # fmt: skip
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_a_fixed_order_goes_from_the_last_queries_to_the_first(
    variant: str, tile_map: str, iteration: str, by_head: bool, layout: str
) -> None:
    """Turns ascend from step to step of a tile of keys, as the model of the order has them."""
    fields = {"deterministic": "true", "layout": layout, "tile_map": tile_map, "declared": HEAD_WINDOW}
    kernel = backward(variant, head_dim=128, **fields)
    assert kernel.name.endswith("_deterministic")
    assert kernel.iteration == iteration
    text = render(kernel).text
    assert "take_tile" not in text
    (turn,) = re.findall(r"const uint32_t turn = (.*);", text)
    heads, tiles = range(6, 9), range(4, -1, -1)
    steps = [(h, t) for h in heads for t in tiles] if by_head else [(h, t) for t in tiles for h in heads]
    turns = [eval(turn, {"h": h, "hk": 2, "group": 3, "tile": t, "last_tile": 4}) for h, t in steps]
    assert turns == list(range(15))
    assert ("for (int h = hk * group;" in text) == by_head
    assert ("if (++h == hk * group + group)" in text) != by_head


def test_counters_stand_behind_the_sums_or_alone() -> None:
    for layout in ("dense", "varlen"):
        ordered, other = (backward(head_dim=128, layout=layout, deterministic=d) for d in ("true", "false"))
        of_other = {one.of for one in other.arguments} - {one.of for one in ordered.arguments}
        assert of_other == {"dq_state", "partials", "uncut_tiles", "parts", "work_items", "sum_tiles"}
        text, alone = render(ordered).text, render(other).text
        of_heads = r"const auto done = \[&\]\(int unit\) \{ return counter_at\((.*)unit\); \};"
        assert re.findall(of_heads, text) == ["batch * kv_heads * kv_tiles + "]
        assert re.findall(of_heads, alone) == [""]
        (tiles,) = re.findall(
            r"auto counter_at .*dq_sum_ptr \+ static_cast<long long>\((.*)\) \* kSumsOfTile\) \+ place;", text
        )
        names = {"batch": 3, "heads": 6, "q_tiles": 5, "total_q": 700, "kBlockM": 64}
        assert eval(tiles.replace("/", "//"), names) == (3 * 6 * 5 if layout == "dense" else 6 * (700 // 64 + 3))
        assert "return reinterpret_cast<uint32_t*>(dq_state_ptr) + place;" in alone
        assert "reinterpret_cast<float4*>(dq_state_ptr)[i] = {};" in alone  # all that is cleared
        assert "reinterpret_cast<float4*>(dq_sum_ptr)[i] = {};" in text
        assert other.structure is not None
        assert ordered.structure.shared_bytes > other.structure.shared_bytes


@few(
    ("variant", "fields", "own", "values"),
    [
        ("causal", {"head_dim": 128}, False, 0),  # many queries see a tile of keys
        ("causal", {"head_dim": 128, "layout": "varlen"}, True, 0),
        ("causal", {"head_dim": 64, "layout": "varlen"}, False, 0),  # a step has as many queries as a tile has keys
        ("sliding_window", {"head_dim": 128}, True, 0),
        ("sliding_window", {"head_dim": 128, "deterministic": "true"}, False, 0),
        ("packed_documents", {"head_dim": 128}, True, 1),
        ("causal_packed", {"head_dim": 64}, True, 1),
        ("softcap_window", {"head_dim": 128}, False, 0),  # no registers for more
        ("relative_bias", {"head_dim": 128}, False, 0),
        ("sliding_window", {"head_dim": 256}, False, 0),
    ],
    always=range(0, 999, 3),
)
def test_spans_of_consumers_and_values_of_queries_are_planned_and_rendered(
    variant: str, fields: dict[str, object], own: bool, values: int
) -> None:
    kernel = backward(variant, **fields)
    roles, text = kernel.structure, render(kernel).text
    assert roles is not None
    assert (roles.own_spans, roles.query_values) == (own, values)
    assert ("kHidden" in text) == own
    assert ("struct QueryValues" in text) == (values > 0)


def test_a_consumer_whose_keys_no_query_of_a_step_sees_multiplies_dq_of_the_step_before_alone() -> None:
    text = render(backward("sliding_window", head_dim=128)).text
    steps = text.split("if (hidden()) {")
    assert len(steps) == 3  # the first step of a work tile, and later ones
    first, later = steps[1].split("else {")[0], steps[2].split("continue;")[0]
    assert "issue_" not in first
    assert re.findall(r"issue_\w+", later) == ["issue_dq"]
    for step in (first, later):
        assert step.index("pingpong_arrive();") < step.index("dout_ring.wait();") < step.index("pingpong_wait();")
        assert "clear_ds(buffer);" in step


def test_five_products_a_step() -> None:
    kernel = backward(head_dim=128)
    low = gradient_floor(kernel, kernel.launch("dqkv"))
    assert low is not None
    assert low.products == (3, 2)
    assert low.flops == 2 * 5 * 64 * 128 * 128
    wide = backward(head_dim=256)
    assert gradient_floor(wide, wide.launch("postprocess")) is None


@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_dropout_ds_takes_probabilities_before_it_and_dv_those_after(head_dim: int) -> None:
    kernel = backward("own", head_dim=head_dim, declared="variants:\n  own: {dropout: true}\n")
    assert kernel.structure is not None
    assert (kernel.structure.overlap, kernel.structure.packed) == ("nothing", True)
    text = render(kernel).text
    assert text.count("find_kept();") == 2
    assert "const float2 both = unpack<Element>(whole[pair]);" in text
    assert "rs<1>(dv, p + row / 4," in text
    assert "store_rows(dv, dropout_scale," in text


OWN = "variants:\n  own:\n    score: {score}\n    tensors: {{slope: {{dtype: float32, shape: [h], grad: {grad}}}}}\n"


SELECTED = "x != 0.0f ? x * derivative : 0.0f"


def declared(score: str) -> dict[str, object]:
    return {"declared": OWN.format(score=score, grad="false"), "head_dim": 128}


@few(
    ("variant", "fields", "overlap", "weighted"),
    [
        ("causal", {"head_dim": 128}, "pingpong", None),
        ("causal", {"head_dim": 128, "layout": "varlen"}, "pingpong", None),
        ("causal", {"head_dim": 128, "deterministic": "true"}, "gradients", None),
        ("causal", {"head_dim": 112, "layout": "varlen"}, "pingpong", None),  # dQ is cut: too few registers for that
        ("causal", {"layout": "varlen", "deterministic": "true"}, "pingpong", None),
        ("causal", {"head_dim": 96}, "pingpong", None),
        ("alibi", {"head_dim": 128}, "pingpong", None),
        ("alibi", {}, "pingpong", None),
        ("dilated", {"head_dim": 128, "tile_map": "never"}, "pingpong", None),
        ("dilated", {"head_dim": 64, "tile_map": "never"}, "gradients", None),
        ("dilated", {"head_dim": 64}, "pingpong", None),
        ("own", declared("s * slope[h]"), "pingpong", SELECTED),  # what is loaded may be infinite
        ("own", declared("s * slope[h]") | {"head_dim": 64}, "pingpong", SELECTED),
        ("softcap", {"head_dim": 128}, "pingpong", "x * derivative"),
        ("own", declared("sqrt(abs(s)) + slope[h]"), "pingpong", SELECTED),
        ("packed_documents", {"head_dim": 128}, "pingpong", None),
        ("packed_documents", {"head_dim": 64}, "pingpong", None),
        ("relative_bias", {"head_dim": 128}, "pingpong", None),
    ],
    always=range(0, 999, 3),
)
def test_overlap_and_derivative_of_a_score(
    variant: str, fields: dict[str, object], overlap: str, weighted: str | None
) -> None:
    kernel = backward(variant, **fields)
    assert kernel.structure is not None
    assert kernel.structure.overlap == overlap
    text = render(kernel).text
    assert ("p_derivative" in text) == (weighted is not None)
    assert weighted is None or f"weighted[2 * row + j] = {weighted};" in text
    assert ("uint32_t ds_pairs" in text) == kernel.structure.pingpong  # dS is kept for dK


def test_a_derivative_is_taken_of_the_product_and_leaves_out_what_all_pairs_share() -> None:
    text = render(backward("softcap", head_dim=128)).text
    element = text.split("float& x = s[4 * i + 2 * row + j];")[1]
    before, after = element.split("x = u_element_value;", maxsplit=1)
    assert "const float derivative = 1.0f - u_element_value * u_element_value;" in before
    assert "if (8 * row >= visible_to) x = kMasked;" in after
    assert "stage_rows.template operator()<0, 64>(dk, softmax_scale / u_cap * u_cap, " in text
    of_heads = render(backward("own", **declared("s * slope[h]"))).text
    assert "operator()<0, 64>(dk, 1.0f, " in of_heads  # dK sums over heads whose derivatives differ


def test_a_score_and_its_derivative_share_a_cosine_of_the_distance() -> None:
    """Each step has one for a pair, whose argument is a number of its key and a constant."""
    text = render(backward("own", declared="variants:\n  own: {mask: q >= kv, score: s * cos((q - kv) * 0.01)}\n")).text
    cosines = re.findall(r"__cosf\((.*)\);", text)
    assert len(cosines) == 2  # in partial tiles, and in full ones
    assert all(re.fullmatch(r"\w+ \+ float\(8 \* i \+ j\) \* 0\.01f", each) for each in cosines)


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        (
            "own",
            {"head_dim": 256, "declared": OWN.format(score="s * slope[h]", grad="true")},
            r"backward: .*own tensors .*beyond head dim 128 .*, as that of slope\[h\] does; allowed: triton",
        ),
        (
            "own",
            {"declared": OWN.format(score="s + slope[h]", grad="true"), "deterministic": "true"},
            r"backward: .*own tensors .*in a fixed order",
        ),
        ("causal", {"fast_math": "false"}, r"fast_math: .*fused in cuda kernels, .*; found false; allowed: true"),
        (
            "own",
            {"head_dim": 256, "declared": "variants:\n  own: {score: tanh(s), dropout: true}\n"},
            r"backward: .*have no dropout in cuda; allowed: triton",
        ),
        ("causal", {"head_dim": 520}, r"head_dim: .*from 8 to 512; nearest: 512"),
        ("causal", {"dtype": "fp32"}, r"dtype: .*bf16 and fp16; found fp32"),
        (
            "causal",
            {"loads": "pointer", "backward": "{backend: cuda, dq: {warps: 4}}"},
            r"loads: .*allowed: descriptor",
        ),
        (
            "causal",
            {"arch": "sm100a"},
            r"backward: cuda has no backward for sm100a; allowed: backend: triton; arch sm80, ",
        ),
        ("causal", {"backward": "{backend: cuda, dq: {warps: 4}}"}, r"backward\.dq: .*leave it out"),
        ("causal", {"backward": "{backend: cuda, dkdv: {warps: 4}}"}, r"backward\.dkdv\.warps: .*leave it out"),
        ("causal", {"backward": "{backend: cuda, dkdv: {tile: {m: 32}}}"}, r"backward\.dkdv\.tile\.m: .*: 128 or 64"),
        (
            "causal",
            {"backward": "{backend: cuda, dkdv: {overlap: dv}}"},
            r"backward\.dkdv\.overlap: .*: pingpong or",
        ),
        (
            "causal",
            {"backward": "{backend: cuda, dkdv: {overlap: pingpong, rows_ahead: 0}}"},
            r"backward\.dkdv\.rows_ahead: 0 is not allowed; allowed: 1 or 2 or 3 or 4 with 'overlap: pingpong'",
        ),
        (
            "causal",
            {"layout": "varlen", "backward": "{backend: cuda, dkdv: {rows_ahead: 2}}"},
            r"backward\.dkdv\.rows_ahead: 2 is not allowed; allowed: 1 with 'overlap: pingpong' and packed sequences",
        ),
        (
            "softcap",
            {"head_dim": 128, "backward": "{backend: cuda, dkdv: {packed: false}}"},
            r"backward\.dkdv\.packed: P times the derivative of the logit has 16 bits .*; allowed: true",
        ),
        (
            "causal",
            {"head_dim": 128, "backward": "{backend: cuda, dkdv: {q_stages: 4}}"},
            r"backward\.dkdv: Shared memory \d+ B exceeds",
        ),
        (
            "causal",
            {"head_dim": 256, "backward": "{backend: cuda, dkdv: {packed: true}}"},
            r"backward\.dkdv\.packed: .*leave it out",
        ),
        (
            "own",
            {
                "declared": "variants:\n  own: {dropout: true}\n",
                "backward": "{backend: cuda, dkdv: {overlap: pingpong}}",
            },
            r"backward\.dkdv\.overlap: pingpong is not allowed; allowed: nothing",
        ),
        (
            "causal",
            {"arch": "sm80", "backward": "{backend: cuda, dkdv: {q_stages: 3}}"},
            r"backward\.dkdv\.q_stages: is for backward kernels by wgmma",
        ),
        (
            "causal",
            {"backward": "{backend: triton, dkdv: {packed: true}}"},
            r"backward\.dkdv\.packed: is for backward kernels by wgmma",
        ),
        ("causal", {"backward": "{backend: cuda, dkdv: {tile: {n: 64}}}"}, r"backward\.dkdv\.tile\.n: .*allowed: 128"),
        ("causal", {"backward": "{backend: cuda, dkdv: {stages: 8}}"}, r"backward\.dkdv: Shared memory \d+ B exceeds"),
        (
            "causal",
            {"backward": "{backend: cuda, dkdv: {stages: 1}}"},
            r"backward\.dkdv\.stages: 1 is not allowed: ping-pong consumers need dO of two steps; nearest: 2",
        ),
        (
            "causal",
            {"head_dim": 256, "backward": "{backend: cuda, dkdv: {stages: 8}}"},
            r"backward\.dkdv: Shared memory \d+ B exceeds .* half of the other block's K 16384 \+ Q 65536 \+ "
            r"dO 131072 \(8 stages\) \+ dS 16384 \+ dS of the other block 16384 \+ barriers",
        ),
        (
            "causal",
            {"head_dim": 256, "backward": "{backend: cuda, dkdv: {stages: 1}}"},
            r"backward\.dkdv\.stages: 1 is not allowed: dO of a step takes 2 stages; nearest: 2",
        ),
    ],
)
def test_unsupported_backwards_are_refused(variant: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=rf"test\.yaml:\d+: {message}"):
        backward(variant, **fields)


@pytest.mark.parametrize(
    ("variant", "head_dim"), [("causal", 64), ("full", 64), ("sliding_window", 128), ("allowed", 128)]
)
def test_parts_have_each_step_once(variant: str, head_dim: int) -> None:
    """The kernel's own lines, run as Python: every tile of each head, from a place of its own, and in equal shares."""
    text = render(backward(variant, head_dim=head_dim)).text
    (first,) = re.findall(r"const int first_step = part < 0 \? 0 : (.+);  //", text)
    (stride,) = re.findall(r"const int stride = part < 0 \? 1 : (.+);  //", text)
    by_bits = "uint32_t left = visible_word;" in text
    if by_bits:
        assert "if (__any_sync(~0u, until-- > 0)) continue;" in text
        assert "until = stride - 1;" in text
    else:
        (begin,) = re.findall(r"int place = tiles > 0 \? (.+) : 0;", text)
        assert "for (int i = first_step; __any_sync(~0u, i < tiles); i += stride) {" in text
        assert "place += stride;" in text
        assert "if (place >= tiles) place -= tiles;" in text
    for tiles in (0, 1, 2, 3, 7, 16):
        for parts in (2, 3, 8):
            seen: list[tuple[int, int]] = []
            counts = []
            for part in range(parts):
                before = len(seen)
                for h in range(4, 8):
                    names = {"part": part, "h": h, "parts": parts, "tiles": tiles, "kv_tile": 5}
                    at, step = eval(first, names), eval(stride, names)
                    names["first_step"] = at
                    start = 0 if by_bits or not tiles else eval(begin, names) - at
                    seen += [(h, (start + i) % tiles) for i in range(at, tiles, step)]
                counts.append(len(seen) - before)
            assert sorted(seen) == [(h, tile) for h in range(4, 8) for tile in range(tiles)]
            assert max(counts) - min(counts) <= 4


def _steps_by_chunks(
    part: int, parts: int, *, tiles: int, q_tiles: int, group: int, query_chunk: int
) -> list[tuple[int, int]]:
    """``_visits_chunked.cu.j2``, line by line: (head, tile) of each step of a part, or of a whole tile."""
    kv_tile, order = 5, []
    stride, step = (1, 0) if part < 0 else (parts, part % parts)
    chunk = min(query_chunk, (q_tiles + 3) // 4) if group > 1 else tiles
    end = tiles
    while end > 0:
        begin = max(end - chunk, 0)
        width = end - begin
        first = (3 * kv_tile + step) % (width * group)
        h, place = first // width, begin + first % width
        while step < width * group:
            order.append((h, place))
            step += stride
            place += stride
            while place >= end:
                place -= width
                h = (h + 1) % group
        step -= width * group
        end -= chunk
    return order


@pytest.mark.parametrize("variant", ["causal", "full", "alibi", "prefix_lm"])
def test_heads_of_a_group_go_by_chunks_of_queries(variant: str) -> None:
    kernel = backward(variant, head_dim=128)
    text = render(kernel).text
    for line in (
        "chunk = group > 1 ? min(kQueryChunk, (q_tiles + 3) / 4) : tiles;",
        "for (int end = tiles; __any_sync(~0u, end > 0); end -= chunk) {",
        "const int begin = max(end - chunk, 0), width = end - begin;",
        "const int first = (3 * kv_tile + step) % (width * group);",
        "int h = hk * group + first / width, place = begin + first % width;",
        "for (; __any_sync(~0u, step < width * group); step += stride) {",
        "for (place += stride; __any_sync(~0u, place >= end); place -= width) {",
        "step -= width * group;",
    ):
        assert line in text
    chunk = kernel.structure.query_chunk
    assert f"constexpr int kQueryChunk = {chunk};" in text
    for tiles in (0, 1, 5, 8, 9, 40):
        for group in (1, 4, 7):
            for parts in (1, 2, 3, 8):
                sizes = {"tiles": tiles, "q_tiles": 40, "group": group, "query_chunk": chunk}
                own = [_steps_by_chunks(part if parts > 1 else -1, parts, **sizes) for part in range(parts)]
                assert sorted(step for steps in own for step in steps) == [
                    (h, tile) for h in range(group) for tile in range(tiles)
                ]
                counts = [len(steps) for steps in own]
                assert max(counts) - min(counts) <= 1
    all_steps = _steps_by_chunks(-1, 1, tiles=40, q_tiles=40, group=4, query_chunk=chunk)
    for at in range(0, 160, 4 * chunk):  # a chunk is complete before the one before it begins
        assert {tile for _, tile in all_steps[at : at + 4 * chunk]} == set(range(40 - at // 4 - chunk, 40 - at // 4))


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("causal", {"head_dim": 64}),
        ("causal", {"head_dim": 256}),
        ("causal", {"layout": "varlen"}),
        ("causal", {"deterministic": "true"}),
        ("sliding_window", {}),
        ("allowed", {}),
    ],
)
def test_backwards_that_go_head_by_head(variant: str, fields: dict[str, object]) -> None:
    assert backward(variant, **{"head_dim": 128, **fields}).structure.query_chunk == 0
