"""The backend of a spec that names none: the fastest that can do all that is asked for, and the reason."""

from __future__ import annotations

import pytest

from attngen.arch import ARCHES
from attngen.errors import PlanError
from attngen.inspect.of_spec import explain_spec
from attngen.plan import plan
from attngen.plan.catalogue import backends
from attngen.resources import specs_dir
from attngen.schema import expand, load_spec, load_spec_text, preset_names
from tests.plan.specs import planned
from tests.sampling import few


def free(variant: str = "causal", **fields: object):  # type: ignore[no-untyped-def]
    """Return the plan of a forward whose spec leaves the backend open."""
    return planned(variant, backend=None, **fields)


def free_backward(variant: str = "causal", **fields: object):  # type: ignore[no-untyped-def]
    """Return the plan of a backward whose spec leaves the backend open."""
    return planned(variant, passes="backward", **{"backward": None, **fields})


def test_the_fastest_backend_of_each_arch_comes_first() -> None:
    for direction in ("forward", "backward"):
        assert {name: backends(arch, direction) for name, arch in ARCHES.items()} == {
            **dict.fromkeys(ARCHES, ("cuda", "triton")),
            "sm100a": ("triton",),
        }


@few("name", preset_names(), always=range(0, 999, 3))
def test_presets_are_in_cuda_but_for_cards_with_tensor_memory(name: str) -> None:
    for arch, schedule in (("sm90a", "hopper_forward"), ("sm80", "mma_forward"), ("sm120a", "mma_forward")):
        kernel = free(name, arch=arch)
        assert (kernel.backend, kernel.backend_reason) == ("cuda", f"the fastest on {arch}")
        assert kernel.schedule == schedule
        assert kernel.to_dict() == planned(name, arch=arch, backend="cuda").to_dict()  # the same, however asked for
    other = free(name, arch="sm100a")
    assert (other.backend, other.backend_reason) == ("triton", "the fastest on sm100a")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "found fp32"),
        ({"loads": "pointer"}, "load through tensor descriptors"),
        ({"alignment": "element"}, "need alignment 16"),
        ({"warps": 8}, "have roles"),
        ({"tile": "{m: 32}"}, "32 is not allowed; allowed: 64, 128, 192"),
        ({"pipeline": "{stages: 1}"}, "1 is not allowed; allowed: 2 to 8"),
        ({"fast_math": "false"}, "say 'backend: cuda' to accept that"),
    ],
)
def test_fields_of_triton_kernels_decide(fields: dict[str, object], reason: str) -> None:
    kernel = free(**fields)
    assert kernel.backend == "triton"
    assert kernel.backend_reason.startswith("not cuda: ")
    assert reason in kernel.backend_reason


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


def test_forwards_that_no_backend_has_are_refused_with_the_reason_of_each() -> None:
    with pytest.raises(
        PlanError, match=r"test\.yaml:\d: warps: cuda: 4 consumers are not allowed.*; triton: .*no roles"
    ):
        free(warps="{consumer: 4}")
    with pytest.raises(PlanError, match=r"fast_math: cuda: .*exp2.*; triton: .*allowed: false"):
        free(fast_math="false", pack_gqa="true")
    with pytest.raises(PlanError, match=r"pack_gqa: Triton kernels give each query head"):  # sm100a has only one
        free(arch="sm100a", pack_gqa="true")


@few(
    ("name", "head_dim"),
    [
        (name, head_dim)
        for name in preset_names()
        for head_dim in (64, 128, 192, 256)
        if (name, head_dim) != ("softcap_window", 256)  # whose registers do not suffice
    ],
    always=range(0, 75, 12),
)
def test_backwards_of_presets_are_in_cuda_where_registers_suffice(name: str, head_dim: int) -> None:
    kernel = free_backward(name, head_dim=head_dim)
    assert (kernel.backend, kernel.backend_reason) == ("cuda", "the fastest on sm90a")
    assert kernel.to_dict() == free_backward(name, head_dim=head_dim, backward="{backend: cuda}").to_dict()
    for arch in ("sm80", "sm86", "sm120a"):
        other = free_backward(name, head_dim=head_dim, arch=arch)
        if head_dim <= 128 or arch == "sm80":
            assert (other.schedule, other.backend_reason) == ("mma_backward", f"the fastest on {arch}")
        else:
            assert other.backend == "triton"
            assert "shared memory for 320 columns of K and V" in other.backend_reason


@pytest.mark.parametrize("arch", [name for name, arch in ARCHES.items() if not (arch.wgmma or arch.tensor_memory)])
def test_fields_that_decide_on_cards_without_wgmma(arch: str) -> None:
    in_cuda = ({"loads": "pointer"}, {"warps": 8}, {"softmax": "lazy"}, {"pack_gqa": "true"}, {"tile": "{m: 128}"})
    in_triton = ({"dtype": "fp32"}, {"alignment": "element"}, {"fast_math": "false"}, {"tile": "{m: 32}"})
    for fields, backend in (*((one, "cuda") for one in in_cuda), *((one, "triton") for one in in_triton)):
        assert free(arch=arch, **fields).backend == backend, fields
    assert free_backward(arch=arch, loads="pointer").backend == "cuda"
    assert {free_backward(arch=arch, **one).backend for one in in_triton[:3]} == {"triton"}
    if ARCHES[arch].descriptors:
        assert free(arch=arch, loads="descriptor").backend == "triton"


def test_a_kernel_that_no_arch_but_another_has_is_refused_and_not_planned() -> None:
    """Even if the spec names the backend: cards with tcgen05 have no kernels by mma.sync."""
    for fields in ({"split_kv": "true"}, {"layout": "paged", "split_kv": "true"}):
        with pytest.raises(PlanError, match="cuda has no forward .*for sm100a; .*arch sm80, .*ptx80 take it"):
            planned(arch="sm100a", backend="cuda", **fields)
    with pytest.raises(PlanError, match="cuda has no index_scores kernel for sm80; arch sm90a takes it"):
        planned(arch="sm80", backend=None, passes="index_scores", head_dim=128)


OWN = """variants:
  own:
    dropout: {dropout}
    score: {score}
    tensors:
      t: {{dtype: float32, shape: [h], grad: {grad}}}
      p: {{dtype: float32, shape: [seqlen_k]}}
"""

BOTH_READ: dict[str, object] = {
    "variant": "own",
    "head_dim": 256,
    "declared": """variants:
  own:
    mask: "t[kv] > 0"
    score: "s + t[kv]"
    tensors: {t: {dtype: float32, shape: [seqlen_k]}}
""",
}


def own(score: str, *, grad: bool = False, dropout: bool = False) -> dict[str, object]:
    declared = OWN.format(score=score, grad=str(grad).lower(), dropout=str(dropout).lower())
    return {"variant": "own", "declared": declared}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp32"}, "found fp32"),
        ({"loads": "pointer", "backward": "{dq: {warps: 4}}"}, "load through tensor descriptors"),
        ({"alignment": "element"}, "need alignment 16"),
        ({"fast_math": "false"}, "fused in cuda kernels"),
        ({"backward": "{dq: {warps: 4}}"}, "computes dQ, too"),
        ({"backward": "{dkdv: {warps: 4}}"}, "has roles"),
        ({"backward": "{dkdv: {tile: {m: 32}}}"}, "32 is not allowed; allowed: 128 or 64"),
        ({"backward": "{dkdv: {tile: {n: 64}}}"}, "64 is not allowed; allowed: 128"),
        ({"backward": "{dkdv: {stages: 8}}", "head_dim": 128}, "exceeds 232448 B"),
        (own("s * t[h]", grad=True) | {"head_dim": 256}, "own tensors (grad: true) beyond head dim 128"),
        (own("s * p[kv] + t[h] * p[kv]", grad=True) | {"head_dim": 256}, "own tensors"),
        (own("s * t[h]", dropout=True), "have no dropout"),
        (BOTH_READ | {"deterministic": "true"}, "a mask and a score that both read tensors by position"),
    ],
)
def test_fields_that_only_triton_has_decide_for_a_backward(fields: dict[str, object], reason: str) -> None:
    kernel = free_backward(**fields)
    assert kernel.backend == "triton"
    assert kernel.backend_reason.startswith("not cuda: ")
    assert reason in kernel.backend_reason
    given = str(fields.get("backward", "{}")).removeprefix("{")
    with pytest.raises(PlanError):
        free_backward(**{**fields, "backward": f"{{backend: cuda, {given}"})


@pytest.mark.parametrize(
    "fields",
    [
        {"deterministic": "true", "head_dim": 128},
        {"backward": "{dkdv: {tile: {m: 64, n: 128}, stages: 2}}", "head_dim": 128},
        {"layout": "varlen", "dtype": "fp16", "head_dim": "{qk: 192, v: 128}"},
        own("s * t[h]") | {"head_dim": 256},
        own("s * t[h] + p[kv]") | {"head_dim": 192},
        own("s * t[h] + p[kv]") | {"head_dim": 256},
        {"variant": "softcap_window", "head_dim": 256},
        own("s + t[h]", dropout=True) | {"deterministic": "true"},
        own("s + t[h]", grad=True) | {"head_dim": 128},
        own("s + t[h]", grad=True) | {"head_dim": 256},
    ],
)
def test_backwards_that_cuda_can_do_are_in_cuda(fields: dict[str, object]) -> None:
    assert free_backward(**fields).backend == "cuda"


def test_backwards_that_no_backend_has_are_refused_with_the_reason_of_each() -> None:
    with pytest.raises(PlanError, match=r"backward: cuda: .*own tensors.*; triton: .*added atomically"):
        free_backward(**own("s + t[h]", grad=True), deterministic="true")


@pytest.mark.parametrize(
    ("entry", "backends"),
    [
        ("", ["cuda", "cuda"]),
        ("backend: cuda", ["cuda", "cuda"]),
        ("backend: triton", ["triton", "triton"]),
        ("backend: [cuda, triton]", ["cuda", "triton", "cuda"]),
        ("backend: triton, backward: {backend: cuda}", ["triton", "cuda"]),
        ("backend: cuda, backward: {backend: triton}", ["cuda", "triton"]),
        ("backend: cuda, fast_math: false", ["cuda", "triton"]),  # the forward's promise is waived, not the backward's
        ("warps: 8", ["triton", "cuda"]),
    ],
)
def test_backends_of_an_entry_with_both_passes(entry: str, backends: list[str]) -> None:
    text = f"{{variant: causal, head_dim: 64, passes: [forward, backward], {entry}}}"
    kernels = expand(load_spec_text(f"schema: 1\narch: sm90a\nkernels: [{text}]\n"))
    assert [plan(kernel).backend for kernel in kernels] == backends


def test_explain_has_the_reason_of_a_backend() -> None:
    (explanation,) = explain_spec(specs_dir() / "hopper.yaml", "bf16_d128_full_m128n128s2c2", seqlens=[64])[:1]
    assert ("backend", "cuda, the spec names it") in explanation.facts()
    (other,) = explain_spec(specs_dir() / "presets" / "softcap.yaml", "d64_softcap_m", seqlens=[64])
    assert ("backend", "cuda, the fastest on sm90a") in other.facts()
    assert other.to_dict()["backend_reason"] == "the fastest on sm90a"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "triton") for name in ("hopper_triton", "blackwell", "portable")),
        *((name, "cuda") for name in ("ampere", "ada", "blackwell_consumer")),
    ],
)
def test_specs_of_one_backend(name: str, backend: str) -> None:
    kernels = expand(load_spec(specs_dir() / f"{name}.yaml"))
    assert {plan(kernel).backend for kernel in kernels} == {backend}
