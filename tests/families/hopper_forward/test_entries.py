"""Batch entries that share biases: which kernels have several in a work tile, and what these take."""

from __future__ import annotations

import pytest

from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan import Plan
from attngen.render import render
from tests.plan.specs import planned

BIAS = "bias[b // rows, h, q, kv]"


def plan_of(score: str, *, mask: str = "True", shape: str = "[groups, h, seqlen_q, columns]", **fields: object) -> Plan:
    declared = (
        f'variants:\n  shared: {{mask: "{mask}", score: "{score}", scalars: {{rows: {{type: int32, min: 1}}, '
        f"f: {{type: float32}}}}, tensors: {{bias: {{dtype: float32, shape: {shape}}}, "
        "real: {dtype: bool, shape: [b, seqlen_k]}, slope: {dtype: float32, shape: [h]}, "
        "at: {dtype: float32, shape: [b, seqlen_q]}}}\n"
    )
    return planned("shared", declared=declared, **{"backend": "cuda", **fields})


def entries_of(plan: Plan) -> int:
    assert isinstance(plan.structure, HopperForward)
    return plan.structure.entries


@pytest.mark.parametrize("head_dim", [16, 24, 32, 48, 64])
def test_entries_that_share_a_bias_lie_in_a_work_tile(head_dim: int) -> None:
    plan = planned("triangle", head_dim=head_dim, backend="cuda")
    structure = plan.structure
    assert isinstance(structure, HopperForward)
    assert structure.entries * plan.tile_n == 128
    assert plan.name.endswith(f"entries{structure.entries}")
    sizes = {region.name: region.bytes for region in structure.shared}
    assert sizes["q"] == structure.q_stages * structure.entries * plan.tile_m * plan.columns_qk[0].width * 2
    assert sizes["biases"] == structure.bias_stages * plan.tile_m * plan.tile_n * 4
    assert "kEntries" in render(plan).text


@pytest.mark.parametrize("score", [f"s + {BIAS}", f"f * s + f * {BIAS} + (0.0 if real[b, kv] else -1e9)"])
def test_pairs_may_depend_on_their_entry_by_products_and_values_of_keys(score: str) -> None:
    assert entries_of(plan_of(score)) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"score": "s + bias[b, h, q, kv]"},
        {"score": "s + bias[0, h, q, kv]"},
        {"score": "s + bias[b // rows, h, q, kv] + bias[b, h, q, kv]"},
        {"score": "s + bias[(b + 1) // rows, h, q, kv]"},
        {"score": f"s * at[b, q] + {BIAS}"},
        {"score": f"s + {BIAS} + slope[h] * kv"},
        {"score": f"s + {BIAS}", "mask": "q_pos >= kv"},
        {"score": f"s + {BIAS}", "head_dim": 128},
        {"score": f"s + {BIAS}", "softmax": "lazy"},
        {"score": f"s + {BIAS}", "epilogue": "direct"},
        {"score": f"s + {BIAS}", "warps": "{overlap: false}"},
        {"score": f"s + {BIAS}", "tile": "{n: 128}"},
        {"score": f"s + {BIAS}", "layout": "varlen"},
        {"score": f"s + {BIAS}", "pack_gqa": "true"},
    ],
    ids=str,
)
def test_other_kernels_have_one_entry(fields: dict[str, str]) -> None:
    assert entries_of(plan_of(**fields)) == 1


def test_keys_of_a_tile_choose_how_many() -> None:
    chosen = {keys: entries_of(plan_of(f"s + {BIAS}", head_dim=32, tile=f"{{n: {keys}}}")) for keys in (64, 128)}
    assert chosen == {64: 2, 128: 1}
