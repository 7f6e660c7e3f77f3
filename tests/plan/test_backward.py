"""The plan of a backward: its kernels, names, tiles and iterations, and what the entry's other fields mean for it."""

from __future__ import annotations

import pytest

from attngen.errors import PlanError, SpecError
from attngen.plan import plan
from attngen.render import render
from attngen.schema import expand, load_spec_text
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec
from tests.plan.specs import planned

LEARNED = (
    "variants:\n  own:\n    score: s * gain + slope[h]\n    scalars: {gain: {type: float32, grad: true, min: 0}}\n"
    "    tensors: {slope: {dtype: float32, shape: [h], grad: true}}\n"
)


def kernels(entry: str) -> tuple[KernelSpec, ...]:
    return expand(load_spec_text(f"schema: 1\narch: sm90a\nkernels:\n  - {{variant: causal, head_dim: 64, {entry}}}\n"))


def test_forwards_in_both_languages_have_one_backward() -> None:
    entry = "backend: [cuda, triton], passes: [forward, backward], tile: {m: 128}, softmax: exact_max"
    plans = [plan(kernel) for kernel in kernels(f"{entry}, backward: {{backend: triton}}")]
    assert [(one.direction, one.backend) for one in plans] == [
        ("forward", "cuda"), ("forward", "triton"), ("backward", "triton"),
    ]  # fmt: skip
    assert plans[2].name == "bwd_sm90a_tma_bf16_d64_causal_m128n64s2w4_m64n64s2w4"


def test_a_backward_has_tiles_of_its_own() -> None:
    tiles = "dkdv: {tile: {m: 32, n: 64}, stages: 2, warps: 4}, dq: {warps: 8}"
    _, spec = kernels(f"passes: [forward, backward], backward: {{backend: triton, {tiles}}}")
    assert spec.backward == Backward(Gradient(32, 64, 2, 4), Gradient(num_warps=8))
    assert (spec.tile_m, spec.num_warps, spec.locate("backward").line) == (None, None, 4)
    parts = {part.name: part for part in plan(spec).launches}
    assert list(parts) == ["preprocess", "dkdv", "dq"]
    assert (parts["dkdv"].tile_m, parts["dkdv"].tile_n, parts["dkdv"].num_warps) == (32, 64, 4)
    assert (parts["dq"].tile_m, parts["dq"].num_warps) == (64, 8)


@pytest.mark.parametrize(
    "field",
    [
        "tile: {m: 64}", "pipeline: {stages: 2}", "warps: 4", "backend: cuda", "softmax: lazy", "persistent: false",
        "order: natural", "epilogue: direct", "pack_gqa: true",
    ],
)  # fmt: skip
def test_fields_of_the_forward_are_refused_without_one(field: str) -> None:
    with pytest.raises(SpecError, match=rf"kernels\[0\]\.{field.split(':')[0]}: is for the forward"):
        kernels(f"passes: backward, {field}")


@pytest.mark.parametrize("field", ["order: natural", "epilogue: direct", "pack_gqa: [false, true]"])
def test_fields_of_the_forward_leave_the_backward_as_it_is(field: str) -> None:
    alone, _ = dict.fromkeys(kernels("passes: [backward, forward]"))
    assert [one for one in kernels(f"passes: [forward, backward], {field}") if one.direction == "backward"] == [alone]


def test_fields_of_the_backward_are_refused_without_one() -> None:
    with pytest.raises(SpecError, match=r"kernels\[0\]\.backward: .*allowed: passes: \[forward, backward\]"):
        kernels("backward: {dq: {warps: 4}}")


@pytest.mark.parametrize(
    ("variant", "iterations"),
    [
        ("causal", ("ranges", "ranges")),
        ("allowed", ("tile_map", "tile_map")),
        ("dilated", ("classified", "classified")),
    ],
)
def test_iterations_of_both_kernels(variant: str, iterations: tuple[str, str]) -> None:
    kernel = planned(variant, passes="backward")
    assert (kernel.launch("dkdv").iteration, kernel.launch("dq").iteration) == iterations
    classifiers = [part.name for part in kernel.launches if part.name.startswith("classify_")]
    assert classifiers == ["classify_dkdv", "classify_dq"] * (iterations[0] == "tile_map")


def test_the_manifest_lists_every_kernel() -> None:
    kernel = planned("allowed", passes="backward")
    manifest = kernel.to_dict()
    assert [row["name"] for row in manifest["launches"]] == [part.name for part in kernel.launches]
    assert manifest["main"] == "dkdv"
    assert all(f"def {row['symbol']}(" in render(kernel).text for row in manifest["launches"])


def test_a_tile_that_does_not_fit_is_made_smaller() -> None:
    kernel = planned(
        passes="backward", head_dim=256, arch="sm86", backward="{dkdv: {tile: {n: 64}}, dq: {tile: {m: 64}}}"
    )
    dkdv, dq = kernel.launch("dkdv"), kernel.launch("dq")
    for part, kept, moved in ((dkdv, dkdv.tile_n, dkdv.tile_m), (dq, dq.tile_m, dq.tile_n)):
        assert 2 * 2 * 256 * (kept + part.stages * moved) <= kernel.arch.shared_memory


def test_full_tiles_have_no_mask_code_and_the_scale_is_applied_once() -> None:
    text = render(planned(passes="backward")).text
    assert text.count("visible = ") == 2  # one in each kernel, under a branch
    assert text.count("* softmax_scale,") + text.count("* softmax_scale)") == 2


def test_gradients_of_own_tensors_are_added_atomically_and_so_not_deterministic() -> None:
    kernel = planned("own", passes="backward", declared=LEARNED)
    names = [argument.name for argument in kernel.launch("dq").arguments]
    assert {"gradient_u_slope", "gradient_u_gain", "u_gain"} <= set(names)
    assert render(kernel).text.count("tl.atomic_add(") == 2
    assert "tl.atomic_add(" not in render(planned("alibi", passes="backward")).text
    with pytest.raises(PlanError, match=r"deterministic: gradients .* allowed: false"):
        planned("own", passes="backward", declared=LEARNED, deterministic="true")
    planned(passes="backward", deterministic="true")
