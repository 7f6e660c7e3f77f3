"""Head dims that are odd multiples of 8, compiled: each is padded inside its kernels, and costs them no registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.compile import compile_source
from attngen.compile.inspect import count_instructions
from attngen.plan import Plan, plan
from attngen.plan.allowances import SPILLS
from attngen.render import render
from attngen.schema import KernelSpec
from attngen.store.store import Store
from tests.plan.specs import kernel_spec
from tests.sampling import few

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
    "cuda": {("backward", "dense", "{qk: 72, v: 136}")},
    "triton": {("forward", "dense", 8)},
}


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


def spec_of(backend: str, direction: str, layout: str, head_dim: object, **fields: object) -> KernelSpec:
    own = BACKWARDS[backend] if direction == "backward" else {"backend": backend}
    return kernel_spec(head_dim=head_dim, layout=layout, **own, **fields)  # type: ignore[arg-type]


def plan_of(backend: str, direction: str, layout: str, head_dim: object) -> Plan:
    return plan(spec_of(backend, direction, layout, head_dim))


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(("direction", "layout", "head_dim"), cases("cuda"))
def test_in_cuda(direction: str, layout: str, head_dim: object) -> None:
    planned = plan_of("cuda", direction, layout, head_dim)
    artifact = compile_source(planned, render(planned))
    resources = artifact.manifest["resources"]
    assert 0 <= resources["spills"] <= (planned.launch(planned.main).max_spills or 0)
    assert resources["serialized_wgmma"] is False
    assert (
        resources["wgmma"] == planned.launch(planned.main).products == count_instructions(artifact.cubin, "HGMMA") > 0
    )


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(("direction", "layout", "head_dim"), cases("triton"))
def test_in_triton(direction: str, layout: str, head_dim: object) -> None:
    planned = plan_of("triton", direction, layout, head_dim)
    # which refuses products that wait for each other
    assert 0 <= compile_source(planned, render(planned)).manifest["resources"]["spills"] <= SPILLS.bytes


@pytest.mark.exhaustive
@few(
    ("arch", "product"),
    [
        ("sm80", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("sm90a", "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16"),
    ],
    often=(1,),
)
def test_float32_on_tensor_cores(arch: str, product: str) -> None:
    planned = plan(kernel_spec(arch=arch, dtype="fp32", head_dim=64))
    artifact = compile_source(planned, render(planned))
    assert product in artifact.texts["ptx"]
    assert artifact.manifest["resources"]["spills"] <= 128


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [8, 72, 136, 248])
@pytest.mark.parametrize(
    "fields",
    [{"loads": "pointer"}, {"loads": "pointer", "alignment": "element"}, {"dtype": "fp32", "loads": "pointer"}],
    ids=["pointer", "unaligned", "fp32"],
)
def test_in_triton_through_pointers(direction: str, head_dim: int, fields: dict[str, object], tmp_path: Path) -> None:
    """With smaller tiles where the table's do not suffice: few registers are left beside addresses."""
    spec = spec_of("triton", direction, "dense", head_dim, **fields)
    planned = plan(spec)
    built, failures = compile_kernels([Prepared(spec, planned, render(planned))], store=Store(tmp_path))
    assert failures == ()
    (kernel,) = built.values()
    assert kernel.manifest["direction"] == direction
