"""Head dims that are odd multiples of 8, compiled: each is padded inside its kernels, and costs them no registers."""

from __future__ import annotations

import pytest

from attngen.compile import compile_source
from attngen.compile.cuda import max_spills, planned_wgmma
from attngen.compile.inspect import count_instructions
from attngen.compile.triton import MAX_SPILLS
from attngen.plan import Plan
from attngen.render import render
from tests.plan.specs import planned

ODD = range(8, 257, 16)
UNEQUAL = ("{qk: 40, v: 24}", "{qk: 72, v: 136}", "{qk: 40, v: 136}", "{qk: 200, v: 8}")
#: Of which no Triton backward is known that does not spill.
VERY_UNEQUAL = {"cuda": ("{qk: 8, v: 256}",), "triton": ()}
BACKWARDS = {
    "cuda": {"passes": "backward", "backward": "{backend: cuda}"},
    "triton": {"passes": "backward", "backward": "{backend: triton}"},
}
#: Compiled always, as (direction, layout, head dim); the rest where ``-m exhaustive`` asks for it.
SAMPLE = {
    "cuda": {("forward", "dense", 8), ("forward", "varlen", 72), ("forward", "dense", "{qk: 72, v: 136}"),
             ("backward", "dense", 72), ("backward", "varlen", 8), ("backward", "dense", "{qk: 72, v: 136}")},
    "triton": {("forward", "dense", 8), ("forward", "varlen", 72), ("backward", "dense", 40)},
}  # fmt: skip


def cases(backend: str) -> list[object]:
    """Return the parameters of a backend, those outside of the sample marked."""
    every = [
        (direction, layout, head_dim)
        for direction in ("forward", "backward")
        for layout in ("dense", "varlen")
        for head_dim in (*ODD, *UNEQUAL, *VERY_UNEQUAL[backend])
    ]
    assert SAMPLE[backend] <= set(every)
    return [
        pytest.param(
            *case, marks=() if case in SAMPLE[backend] else pytest.mark.exhaustive, id="-".join(map(str, case))
        )
        for case in every
    ]


def plan_of(backend: str, direction: str, layout: str, head_dim: object, **fields: object) -> Plan:
    own = BACKWARDS[backend] if direction == "backward" else {"backend": backend}
    return planned(head_dim=head_dim, layout=layout, **own, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("direction", "layout", "head_dim"), cases("cuda"))
def test_in_cuda(direction: str, layout: str, head_dim: object) -> None:
    plan = plan_of("cuda", direction, layout, head_dim)
    artifact = compile_source(plan, render(plan))
    resources = artifact.manifest["resources"]
    assert 0 <= resources["spills"] <= (max_spills(plan) if direction == "backward" else MAX_SPILLS)
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == planned_wgmma(plan) == count_instructions(artifact.cubin, "HGMMA") > 0


@pytest.mark.parametrize(("direction", "layout", "head_dim"), cases("triton"))
def test_in_triton(direction: str, layout: str, head_dim: object) -> None:
    plan = plan_of("triton", direction, layout, head_dim)
    # which refuses products that wait for each other
    assert 0 <= compile_source(plan, render(plan)).manifest["resources"]["spills"] <= MAX_SPILLS


@pytest.mark.exhaustive
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [8, 72, 136, 248])
@pytest.mark.parametrize(
    "fields",
    [{"loads": "pointer"}, {"loads": "pointer", "alignment": "element"}, {"dtype": "fp32", "loads": "pointer"}],
    ids=["pointer", "unaligned", "fp32"],
)
def test_in_triton_through_pointers(direction: str, head_dim: int, fields: dict[str, object]) -> None:
    plan = plan_of("triton", direction, "dense", head_dim, **fields)
    assert 0 <= compile_source(plan, render(plan)).manifest["resources"]["spills"] <= MAX_SPILLS
