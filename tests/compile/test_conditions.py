"""Scores with conditions: products stay asynchronous, whatever the compiler knows of a lane's keys and queries."""

from __future__ import annotations

import re
from itertools import product

import pytest

from attngen.compile.cuda import _resources_of, compile_text
from attngen.plan import Plan
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few

_TENSORS = {
    "doc": "{dtype: int32, shape: [b, seqlen_k]}",
    "bias": "{dtype: fp32, shape: [seqlen_k]}",
    "slope": "{dtype: fp32, shape: [h]}",
}
#: Question of the condition, its depth, and whether an arm is without the product.
SCORES = {
    "odd keys cut": "s if kv % 2 == 0 else -inf",
    "blocks of keys cut": "s if kv % 16 < 8 else -inf",
    "keys biased": "s + 1.0 if kv % 2 == 0 else 0.25 * kv",
    "keys nested": "(s if kv % 4 == 0 else s * 0.5) if kv % 2 == 0 else -inf",
    "keys and queries": "s if kv % 2 == 0 and q % 2 == 0 else -inf",
    "all nested": "(s if kv % 4 == 0 else s * 0.5) if q % 2 == 0 else (-inf if kv % 3 == 0 else s + bias[kv])",
    "heads": "s if h % 2 == 0 else 0.0",
    "queries": "s if q % 16 < 8 else 0.0",
    "a tensor of keys": "s if doc[b, kv] > 0 else -inf",
    "a tensor of heads": "s * slope[h] if slope[h] > 0.0 else s",
    "two live arms": "s if kv % 2 == 0 else s * 0.5",
    "the logit": "s if s > 0.0 else -inf",
    "lengths and heads nested": "(s / (kv + 1) if h % 2 == 0 else s) if seqlen_q > 7 else -inf",
    "arms that choose": "(kv / (seqlen_q + 1) + s if slope[h] > 0 else s / (kv + 1)) if seqlen_q > 7 else 0.0",
}
#: Those that lacked registers or were serialized before.
_BEFORE = ("all nested", "odd keys cut", "keys nested", "keys biased", "lengths and heads nested")


def kernel(score: str, head_dim: int, dtype: str, layout: str, **fields: object) -> Plan:
    tensors = ", ".join(f"{name}: {text}" for name, text in _TENSORS.items() if f"{name}[" in score)
    variant = f"variants:\n  own:\n    mask: kv <= q_pos\n    score: {score!r}\n    tensors: {{{tensors}}}\n"
    return planned("own", head_dim=head_dim, dtype=dtype, layout=layout, declared=variant, **fields)


def serialized_and_spills(plan: Plan) -> tuple[bool, int]:
    source = render(plan)
    resources = _resources_of(
        plan.launch(plan.main).symbol, compile_text(plan.name, source.text, source.headers, "sm90a")[1]
    )
    return resources.serialized_wgmma, resources.spills


@pytest.mark.exhaustive
@few(
    ("score", "head_dim"),
    [(SCORES[name], head_dim) for name, head_dim in product(_BEFORE, (64, 128, 256))],
    always=1,
    often=range(4, 15, 5),
)
def test_products_of_a_score_with_a_condition_are_asynchronous(score: str, head_dim: int) -> None:
    plan = kernel(score, head_dim, "bf16", "dense", backend="cuda")
    serialized, spills = serialized_and_spills(plan)
    assert not serialized
    assert spills <= (plan.launch(plan.main).max_spills or 0)


@pytest.mark.exhaustive
@few("score", ["lengths and heads nested", "arms that choose"])
def test_products_of_8_bits_are_asynchronous(score: str) -> None:
    """No kernel in Triton takes their place."""
    serialized, _ = serialized_and_spills(kernel(SCORES[score], 64, "fp8_e4m3", "dense", backend="cuda"))
    assert not serialized


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_products_of_no_condition_are_serialized(
    score: str, head_dim: int, dtype: str, layout: str, passes: str
) -> None:
    """Spills are another matter: a smaller tile, or Triton, takes what needs more registers."""
    if passes == "backward" and head_dim > 192 and "[" in score:
        pytest.skip("no backward in CUDA for conditions on tensors at such head dims")
    fields = {"backend": "cuda"} if passes == "forward" else {"passes": "backward", "backward": "{backend: cuda}"}
    serialized, _ = serialized_and_spills(kernel(score, head_dim, dtype, layout, **fields))
    assert not serialized


@pytest.mark.parametrize("condition", ["kv % 3 == 0", "h % 3 == 0", "seqlen_q > 7"])
def test_arms_of_elements_are_computed_before_one_is_taken(condition: str) -> None:
    """Both arms are computed, also where all threads take the same one."""
    text = render(kernel(f"s * 2.0 if {condition} else s - 1.0", 64, "bf16", "dense", backend="cuda")).text
    assert re.search(r"x = choose\(.*\);", text)


def test_conditions_that_are_the_same_for_a_tile_of_work_stay_branches() -> None:
    score = "s * (2.0 * seqlen_q if h % 3 == 0 else seqlen_k / 3)"
    assert "choose(" not in render(kernel(score, 64, "bf16", "dense", backend="cuda")).text


def test_kernels_without_a_condition_know_their_keys() -> None:
    plain = render(kernel("s + 0.5 * kv", 64, "bf16", "dense", backend="cuda")).text
    assert "any_number(" not in plain
    cut = render(kernel("s if kv % 2 == 0 else -4.0", 64, "bf16", "dense", backend="cuda")).text
    assert "const int kv_first = any_number(" in cut
