"""Small tables at computed indices: which kernels hold copies of them, and what a pair is left with."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attngen.families.hopper_backward.structure import HopperBackward
from attngen.families.hopper_forward.structure import HopperForward
from attngen.lang.tables import ENTRY_BYTES
from attngen.plan import Plan
from attngen.render import render
from tests.plan.specs import planned
from tests.sampling import few

WINDOWS = "table[h, (y(q) - y(kv) + 6) * 13 + (x(q) - x(kv) + 6)]"
SHIFTED = "table[h, near(q // 64 - kv // 64), near(q % 64 - kv % 64)]"
LET = 'y(i): "i % 49 // 7", x(i): "i % 7", near(d): "clamp(d, -16, 15) + 16"'


def scored(element: str, *, mask: str = "True", shape: str = "[h, n, m]", **fields: Any) -> Plan:
    declared = (
        f"variants:\n  own:\n    mask: '{mask}'\n    score: 's + {element}'\n    let: {{{LET}}}\n"
        f"    tensors: {{table: {{dtype: fp32, shape: {shape}}}}}\n"
    )
    backend = {"backend": "cuda"} if fields.get("passes") != "backward" else {"backward": "{backend: cuda}"}
    given = {"dtype": "bf16", "head_dim": 128, **backend, **fields}
    return planned("own", declared=declared, arch="sm90a", **given)


def windows(**fields: Any) -> Plan:
    return scored(WINDOWS, shape="[h, n]", **fields)


def places(plan: Plan) -> set[str]:
    return set(re.findall(r"const int u_table_place = (.*);", render(plan).text))


@few("passes", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_consumers_hold_copies(passes: str, head_dim: int, layout: str) -> None:
    plan = windows(passes=passes, head_dim=head_dim, layout=layout)
    assert isinstance(plan.structure, HopperForward | HopperBackward)
    assert plan.structure.table_bytes == 169 * ENTRY_BYTES
    region = next(each for each in plan.structure.shared if each.name == "tables")
    assert region.bytes == plan.structure.consumers * plan.structure.table_bytes
    text = render(plan).text
    assert '#include "tables.cuh"' in text
    assert "entry < 169" in text
    assert not re.search(r"u_table\[[^\]]*\] : 0.0f;\s+x =", text)  # no pair loads from global memory


def test_a_pair_subtracts_a_value_of_its_key_from_one_of_its_row() -> None:
    assert places(windows(head_dim=64)) == {"u_row_value - u_value_of_key"}


def test_an_index_that_is_clamped_takes_one_instruction() -> None:
    plan = scored(SHIFTED)
    clamped = r"max\(min\([\w ]+ - kv [/%] 64( \* 4)?, \d+\), 0\)"
    assert all(re.fullmatch(clamped, place) for place in places(plan))
    assert re.search(rf"const int u_table_row = {clamped} \* 128;", render(plan).text)
    assert "entry_at(tables + u_table_row, u_table_place)" in render(plan).text


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "paged"},
        {"pack_gqa": True},
        {"dtype": "fp8_e4m3"},
        {"head_dim": 192, "passes": "backward"},
    ],
    ids=str,
)
def test_other_kernels_load_each_entry(fields: dict[str, Any]) -> None:
    plan = windows(**fields)
    assert plan.structure.table_bytes == 0
    assert "entry_at" not in render(plan).text


def test_what_distances_and_tiles_of_biases_bring_is_no_table() -> None:
    assert scored("table[h, clamp(q - kv, 0, 40), 1]").structure.table_bytes == 0
    pairs = "bias: {dtype: int8, shape: [seqlen_q, seqlen_k], range: {min: 0, max: 4}}"
    declared = (
        "variants:\n  own:\n    score: 's + table[h, bias[q, kv]]'\n"
        f"    tensors: {{table: {{dtype: fp32, shape: [h, 5]}}, {pairs}}}\n"
    )
    plan = planned("own", declared=declared, arch="sm90a", dtype="bf16", head_dim=64, backend="cuda")
    assert plan.structure.table_bytes == 0
