"""A backward in CUDA, compiled: its speed is kept, and its kernels are those of the plan."""

from __future__ import annotations

import pytest

from attngen.compile import compile_source, cuda
from attngen.compile.inspect import Resources, count_instructions, parameter_places
from attngen.errors import ChoiceError
from attngen.plan.allowances import PINGPONG_SPILLS, SPILLS
from attngen.plan.attempts import attempts
from attngen.render import render
from tests.plan.specs import kernel_spec, planned
from tests.sampling import few

OWN = """variants:
  dropped: {mask: q_pos >= kv and q_pos - kv < 100, dropout: true}
  biased: {mask: q_pos >= kv, score: "s + bias[h, q, kv]", tensors: {bias: {dtype: bf16, shape: [h, rows, columns]}}}
"""

#: A mask that is constant on blocks of 64, and causal.
BLOCKS = """variants:
  blocks: {mask: "sel[h, q // 64, kv // 64] and q_pos >= kv", tensors: {sel: {dtype: bool, shape: [h, rows, columns]}}}
"""

#: Masks whose loader has much to compute: products of scalars without a largest value, ranges that are searched.
UNBOUNDED = """variants:
  diffusion:
    mask: "same or clean(kv) and (blk(q) > blk(kv) or clean(q) and blk(q) >= blk(kv))"
    let:
      clean(x): "x >= n"
      blk(x): "((x - n) if x >= n else x) // size"
      same: "blk(q) == blk(kv) and clean(q) == clean(kv)"
    scalars: {n: {type: int32, min: 1}, size: {type: int32, min: 1}}
  items:
    mask: "q_pos >= kv and (item[b, kv] == 0 or item[b, kv] == item[b, q_pos])"
    tensors: {item: {dtype: int32, shape: [b, seqlen_k], monotone: {axis: 1}}}
"""

#: Gradients of every way of adding them up: of a number, of heads, of diagonals that share an entry, of keys.
LEARNED = """variants:
  learned:
    mask: "q_pos >= kv"
    score: "s * gain + slope[h] * (kv - q_pos) + table[clamp(q_pos - kv, 0, 15)] + bias[b, kv]"
    tensors:
      gain: {dtype: float32, shape: [], grad: true}
      slope: {dtype: float32, shape: [h], grad: true}
      table: {dtype: float32, shape: [16], grad: true}
      bias: {dtype: bf16, shape: [b, seqlen_k], grad: true}
"""


@pytest.mark.exhaustive
def test_gradients_of_several_tensors_stay_in_cuda() -> None:
    plan = planned("learned", declared=LEARNED, passes="backward", backward=None, head_dim=64)
    assert plan.backend == "cuda"
    assert compile_source(plan, render(plan)).manifest["resources"]["spills"] == 0


@pytest.mark.exhaustive
@few(("variant", "choice"), [("diffusion", "pingpong"), ("items", "pingpong_lean")], often=(0,))
def test_masks_of_many_ranges_stay_in_cuda(variant: str, choice: str) -> None:
    spec = kernel_spec(variant, declared=UNBOUNDED, passes="backward", backward=None, head_dim=128)
    plan = next(plan for plan in attempts(spec) if plan.name.endswith(f"_{choice}"))
    assert plan.backend == "cuda"
    assert compile_source(plan, render(plan)).manifest["resources"]["spills"] <= PINGPONG_SPILLS.bytes


@few(
    ("variant", "fields"),
    [
        ("causal", {"head_dim": 128}),
        ("allowed", {"head_dim": 64}),  # and its classifier
        ("causal_sink", {"head_dim": 80}),
        ("dropped", {"head_dim": 128, "deterministic": "true"}),
        ("causal", {"head_dim": 256}),  # clusters
        ("dropped", {"head_dim": 192, "deterministic": "true"}),
        ("sliding_window", {"head_dim": "{qk: 192, v: 128}", "dtype": "fp16", "layout": "varlen"}),
        ("biased", {"head_dim": 128}),  # whose biases come as tiles
        ("relative_bias", {"head_dim": 128, "dtype": "fp16"}),
        # like those before
        ("full", {"head_dim": 64, "dtype": "fp16"}),
        ("alibi", {"head_dim": 96, "layout": "varlen"}),
        ("dropped", {"head_dim": 64, "layout": "varlen"}),
        ("sliding_window", {"head_dim": 128, "deterministic": "true"}),
        ("allowed", {"head_dim": 64, "deterministic": "true", "layout": "varlen"}),
        ("neighbourhood_2d", {"head_dim": "{qk: 64, v: 256}", "layout": "varlen"}),
        ("packed_documents", {"head_dim": 256, "deterministic": "true"}),
        ("dropped", {"head_dim": 256}),
        ("softcap", {"head_dim": 128}),
        ("biased", {"head_dim": 64, "layout": "varlen"}),
        ("packed_documents", {"head_dim": 64, "layout": "varlen"}),
    ],
    always=0,
    often=(1, 3),
)
def test_a_backward_keeps_its_speed(variant: str, fields: dict[str, object]) -> None:
    plan = planned(variant, passes="backward", backward="{backend: cuda}", declared=OWN, **fields)
    artifact = compile_source(plan, render(plan))
    resources = artifact.manifest["resources"]
    assert 0 <= resources["spills"] <= (plan.launch("dqkv").max_spills or 0)
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == plan.launch("dqkv").products == count_instructions(artifact.cubin, "HGMMA") > 0
    assert resources["shared_memory"] == plan.structure.shared_bytes
    for part, row in zip(plan.launches, artifact.manifest["launches"], strict=True):
        assert [p["name"] for p in row["parameters"]] == [argument.name for argument in part.arguments]
        places = parameter_places(artifact.cubin, part.symbol)
        assert [p["offset"] for p in row["parameters"]] == [offset for offset, _ in places]
        assert row["resources"]["shared_memory"] == (plan.structure.shared_bytes if part.name == "dqkv" else 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize(("head_dim", "name"), [("{qk: 192, v: 128}", "blocks"), ("192", "apart"), ("256", "blocks")])
def test_blocks_beyond_head_dim_128_spill_nothing(head_dim: str, name: str, layout: str) -> None:
    spec = kernel_spec(
        "blocks", passes="backward", backward="{backend: cuda}", declared=BLOCKS, head_dim=head_dim, layout=layout
    )
    plan = next(plan for plan in attempts(spec) if plan.name.endswith(f"_{name}"))
    resources = compile_source(plan, render(plan)).manifest["resources"]
    assert (resources["spills"], resources["serialized_wgmma"]) == (0, False)
    assert resources["wgmma"] == sum(launch.products or 0 for launch in plan.launches)


@pytest.mark.parametrize(
    ("fields", "resources", "reason"),
    [
        (
            {"head_dim": 128, "deterministic": "true"},  # takes no turns
            Resources(168, SPILLS.bytes + 8, False),
            rf"{SPILLS.bytes + 8} B of spills at 168 registers",
        ),
        (
            {"head_dim": 64},
            Resources(168, PINGPONG_SPILLS.bytes + 8, False),
            rf"{PINGPONG_SPILLS.bytes + 8} B of spills at 168 registers",
        ),
        ({"head_dim": 64}, Resources(168, 0, True), "ptxas serialized wgmma"),
    ],
)
def test_slow_backwards_are_refused_with_the_way_out(
    fields: dict[str, object], resources: Resources, reason: str
) -> None:
    plan = planned(passes="backward", backward=None, **fields)
    assert plan.backend == "cuda"
    with pytest.raises(
        ChoiceError, match=rf"(?s){reason}.*leave tile, stages and warps to the plan, .*'allow: \["
    ) as caught:
        cuda._check(plan, b"", {launch.name: resources for launch in plan.launches})
    assert caught.value.slow == (resources.serialized_wgmma, resources.spills)
