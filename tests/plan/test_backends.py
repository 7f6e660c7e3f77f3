"""The backend of a spec that names none: the fastest that can do all that is asked for, and the reason."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError
from attngen.plan import plan
from attngen.plan.catalogue import backends
from attngen.resources import specs_dir
from attngen.spec import expand, load_spec, load_spec_text, preset_names
from attngen.tools.explain import explain_spec
from tests.plan.specs import planned


def free(variant: str = "causal", **fields: object):  # type: ignore[no-untyped-def]
    """Return the plan of a kernel whose spec leaves the backend open."""
    return planned(variant, backend=None, **fields)


def test_the_fastest_backend_of_each_arch_comes_first() -> None:
    assert {name: backends(arch) for name, arch in ARCHES.items()} == {
        **dict.fromkeys(ARCHES, ("triton",)),
        "sm90a": ("cuda", "triton"),
    }


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_in_cuda_on_hopper_and_in_triton_elsewhere(name: str) -> None:
    found = free(name)
    assert (found.backend, found.backend_reason) == ("cuda", "the fastest on sm90a")
    assert found.to_dict() == planned(name, backend="cuda").to_dict()  # the same kernel, however it was asked for
    other = free(name, arch="sm80")
    assert (other.backend, other.backend_reason) == ("triton", "the fastest on sm80")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "not fp32"),
        ({"loads": "pointer"}, "load through tensor descriptors"),
        ({"alignment": "element"}, "need alignment 16"),
        ({"warps": 8}, "have roles"),
        ({"tile_map": "always"}, "classify tiles themselves"),
        ({"tile": "{m: 32}"}, "32 is not allowed; allowed: 64, 128, 192"),
        ({"pipeline": "{stages: 1}"}, "1 is not allowed; allowed: 2 to 8"),
        ({"fast_math": "false"}, "say 'backend: cuda' to accept that"),
    ],
)
def test_fields_of_triton_kernels_decide(fields: dict[str, object], reason: str) -> None:
    found = free(**fields)
    assert found.backend == "triton"
    assert found.backend_reason.startswith("not cuda: ")
    assert reason in found.backend_reason


@pytest.mark.parametrize(
    "fields",
    [
        {"softmax": "lazy"},
        {"persistent": "true"},
        {"order": "natural"},
        {"epilogue": "staged"},
        {"pack_gqa": "true"},
        {"warps": "{consumer: 2}"},
        {"tile": "{n: 80}"},
    ],
)
def test_fields_of_cuda_kernels_decide(fields: dict[str, object]) -> None:
    assert free(**fields).backend == "cuda"
    with pytest.raises(PlanError):
        planned(backend="triton", **fields)  # type: ignore[arg-type]


def test_what_no_backend_can_do_is_refused_with_the_reason_of_each() -> None:
    with pytest.raises(
        PlanError, match=r"test\.yaml:\d: warps: cuda: 4 consumers are not allowed.*; triton: .*no roles"
    ):
        free(warps="{consumer: 4}")
    with pytest.raises(PlanError, match=r"fast_math: cuda: .*exp2.*; triton: .*allowed: false"):
        free(fast_math="false", pack_gqa="true")
    with pytest.raises(PlanError, match=r"pack_gqa: Triton kernels give each query head"):  # sm80 has only one
        free(arch="sm80", pack_gqa="true")


def test_a_forward_in_cuda_beside_a_backward_in_triton() -> None:
    text = "schema: 1\narch: sm90a\nkernels: [{variant: causal, head_dim: 64, passes: [forward, backward]}]\n"
    forward, backward = map(plan, expand(load_spec_text(text)))
    assert (forward.direction, forward.backend) == ("forward", "cuda")
    assert (backward.direction, backward.backend) == ("backward", "triton")
    assert any(argument.of == "lse" for argument in forward.arguments)


def test_the_reason_is_told() -> None:
    (found,) = explain_spec(specs_dir() / "hopper.yaml", "bf16_d128_full_m128n128s2c2", seqlens=[64])[:1]
    assert ("backend", "cuda, the spec names it") in found.facts()
    (other,) = explain_spec(specs_dir() / "presets" / "softcap.yaml", "d64_softcap_m", seqlens=[64])
    assert ("backend", "cuda, the fastest on sm90a") in other.facts()
    assert other.to_dict()["backend_reason"] == "the fastest on sm90a"


@pytest.mark.parametrize("name", ["hopper_triton", "ampere", "blackwell", "portable"])
def test_specs_whose_kernels_are_in_triton(name: str) -> None:
    kernels = expand(load_spec(specs_dir() / f"{name}.yaml"))
    assert {plan(kernel).backend for kernel in kernels} == {"triton"}
