"""Choices are compiled one after the other until machine code is clean: the plan's first, then others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from attngen.errors import PlanError
from attngen.plan import Plan, plan
from attngen.plan.allowances import LAST_SPILLS
from attngen.plan.attempts import Attempts, attempts, next_attempt
from attngen.plan.model import Refused
from attngen.schema import KernelSpec
from tests.plan.specs import kernel_spec

SCORED = "variants:\n  scored: {mask: q_pos >= kv, score: 's if kv % 2 == 0 else -inf'}\n"
SPECS = [
    {"backend": None},
    {"backend": None, "head_dim": 256, "layout": "varlen"},
    {"backend": None, "passes": "backward", "head_dim": 128},
    {"backend": None, "passes": "backward", "head_dim": 256},
    {"backend": None, "pack_gqa": "true"},
    {"backend": None, "dtype": "fp32"},
    {"backend": None, "passes": "backward", "backward": "{backend: triton}"},
    {"backend": "triton", "loads": "pointer", "alignment": "element"},
]


def refused(planned: Plan, *, spills: int | None = 100) -> Refused:
    return Refused(planned.name, planned.backend, f"{spills} B", None if spills is None else (False, spills))


def all_of(spec: KernelSpec, spills: Sequence[int | None] = ()) -> list[Plan]:
    """Plans tried if all are refused; ``spills`` of one after the other, then ever more."""
    plans, rows = Attempts(spec), list[Refused]()
    made: list[Plan] = []
    while (planned := next_attempt(plans, rows)) is not None:
        made.append(planned)
        count = len(rows)
        rows.append(refused(planned, spills=spills[count] if count < len(spills) else 1000 + count))
    return made


@pytest.mark.parametrize("fields", SPECS, ids=str)
def test_the_first_is_the_plan_and_the_others_are_other_kernels(fields: dict[str, object]) -> None:
    spec = kernel_spec("causal", **fields)  # type: ignore[arg-type]
    plans = list(attempts(spec))
    assert plans[0].to_dict() == plan(spec).to_dict()
    assert len(plans) >= 4
    assert len({planned.name for planned in plans}) == len(plans)
    assert all((p.variant, p.layout, p.dtype_name, p.direction) ==
               (plans[0].variant, plans[0].layout, plans[0].dtype_name, plans[0].direction) for p in plans)  # fmt: skip


def test_the_faster_backend_is_tried_to_its_end_and_then_the_other() -> None:
    order = [planned.backend for planned in attempts(kernel_spec("causal", backend=None))]
    assert order == sorted(order)
    assert {"cuda", "triton"} == set(order)
    assert {p.backend for p in attempts(kernel_spec("causal", backend="cuda"))} == {"cuda"}


def test_fixed_fields_of_a_spec_stay() -> None:
    spec = kernel_spec("causal", backend=None, tile="{m: 128}", pipeline="{stages: 2}")
    plans = list(attempts(spec))
    assert len(plans) > 2
    assert {(planned.tile_m, planned.stages) for planned in plans} == {(128, 2)}
    with pytest.raises(PlanError, match=r"tile\.n"):
        list(attempts(kernel_spec("causal", backend="cuda", tile="{n: 20}")))


def test_each_attempt_remembers_those_before_it_and_has_a_key_of_its_own() -> None:
    plans = Attempts(kernel_spec("causal", backend=None))
    first = next_attempt(plans, [])
    assert first is not None
    assert first.to_dict()["refused"] == []
    second = next_attempt(plans, [refused(first)])
    assert second is not None
    assert second.to_dict()["refused"] == [{"name": first.name, "backend": "cuda", "reason": "100 B"}]


def test_each_plan_is_made_once() -> None:
    spec = kernel_spec("causal", backend=None)
    plans = Attempts(spec)
    assert [one.name for one in plans] == [one.name for one in attempts(spec)]
    assert all(one is again for one, again in zip(plans, plans, strict=True))


def test_the_least_slow_one_is_allowed_at_last() -> None:
    spec = kernel_spec("scored", declared=SCORED, backend=None)
    made = all_of(spec, spills=[900, None, 40, 60])
    *tried, last = made
    assert last.name == tried[2].name
    assert (tried[2].allow, last.allow) == ((), ("spill", "serialized_wgmma"))
    assert len(last.refused) == len(tried) == len(list(attempts(spec)))


def test_wrong_code_is_never_allowed() -> None:
    spec = kernel_spec("causal", backend=None)
    count = len(list(attempts(spec)))
    assert len(all_of(spec, spills=[None] * count)) == count


def test_a_tile_that_the_spec_fixes_is_not_allowed_to_spill_unasked() -> None:
    spec = kernel_spec("causal", backend="triton", tile="{m: 64, n: 64}", warps="4", pipeline="{stages: 2}")
    assert len(all_of(spec)) == 1
    assert len(all_of(replace(spec, stages=None))) > 1


def test_a_backward_that_spills_little_in_cuda_comes_before_triton() -> None:
    spec = kernel_spec("causal", backend=None, passes="backward", backward=None, head_dim=128)
    count = sum(planned.backend == "cuda" for planned in attempts(spec))
    few, many = LAST_SPILLS.bytes, LAST_SPILLS.bytes + 1
    made = all_of(spec, spills=[many] * (count - 2) + [few, many])
    assert (made[count].name, made[count].allow) == (made[count - 2].name, ("spill", "serialized_wgmma"))
    assert made[count + 1].backend == "triton"
    assert all_of(spec, spills=[many] * count)[count].backend == "triton"
    fixed = kernel_spec("causal", backend=None, passes="backward", backward="{dkdv: {stages: 2}}", head_dim=128)
    count = sum(planned.backend == "cuda" for planned in attempts(fixed))
    assert all_of(fixed, spills=[few] * count)[count].backend == "triton"


def test_loaders_that_keep_less_come_after_the_families() -> None:
    names = [p.name for p in attempts(kernel_spec("causal", passes="backward", backward="{backend: cuda}"))]
    lean = [name.endswith("_lean") for name in names]
    assert lean == sorted(lean)
    assert 0 < sum(lean) < len(lean)
    wide = [
        p.name for p in attempts(kernel_spec("causal", passes="backward", backward="{backend: cuda}", head_dim=256))
    ]
    assert not any(name.endswith("_lean") for name in wide)
