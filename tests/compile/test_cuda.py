"""Compiling CUDA kernels offline: what comes out, that it is always the same, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from attngen.build.pipeline import build
from attngen.compile import Artifact, compile_source, cuda
from attngen.compile.cuda import compile_text
from attngen.compile.inspect import count_instructions, parameter_places
from attngen.compile.toolchain import chosen_nvrtc
from attngen.errors import CompileError
from attngen.families.hopper_forward.kinds import WEIGHTS
from attngen.plan import Plan
from attngen.plan.allowances import SPILLS
from attngen.render import render
from attngen.resources import root
from attngen.store import Store
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.sampling import few

ROOT = Path(__file__).parents[2]

KERNELS: tuple[tuple[str, int, bool], ...] = (
    ("allowed", 64, False),  # and its classifier
    ("causal", 128, False),
    ("causal", 64, False),
    ("causal", 80, False),  # padded
    ("packed_documents", 128, False),
    ("causal", 128, True),
    ("alibi", 64, True),  # a slope for each row
    ("dilated", 256, True),
    ("causal_sink", 64, False),
    ("sliding_window_sink", 64, True),  # a sink for each row
    ("triangle", 64, False),  # two batch entries in a work tile
)

#: A log of ptxas as it is where nothing went wrong; what the tests below plant replaces parts of it.
CLEAN = """ptxas info    : Compiling entry function 'NAME' for 'sm_90a'
ptxas info    : Function properties for NAME
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'NAME'\n"
)


@cache
def compiled(variant: str, head_dim: int, pack_gqa: bool = False) -> tuple[Plan, Artifact]:
    plan = planned(variant, backend="cuda", head_dim=head_dim, pack_gqa=str(pack_gqa).lower())
    return plan, compile_source(plan, render(plan))


@pytest.mark.exhaustive
@few(("variant", "head_dim"), [("causal", 128), ("sink_window", 64)], always=(1,))
def test_kernels_that_share_tiles_spill_nothing_and_multiply_once(variant: str, head_dim: int) -> None:
    plan = planned(variant, backend="cuda", head_dim=head_dim, split_kv="tiles")
    resources = compile_source(plan, render(plan)).manifest["resources"]
    assert resources["spills"] == 0
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == plan.launch("forward").products
    assert resources["shared_memory"] == plan.structure.shared_bytes


@pytest.mark.exhaustive
@few(
    ("variant", "head_dim", "pack_gqa"),
    KERNELS,
    ids=[f"{variant}-{head_dim}{'-pack' * packed}" for variant, head_dim, packed in KERNELS],
    often=(1, 6),
)
def test_kernels_keep_their_speed_and_their_parameters(variant: str, head_dim: int, pack_gqa: bool) -> None:
    plan, artifact = compiled(variant, head_dim, pack_gqa)
    resources = artifact.manifest["resources"]
    assert 0 <= resources["spills"] <= SPILLS.bytes
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == plan.launch("forward").products == count_instructions(artifact.cubin, "HGMMA") > 0
    assert resources["shared_memory"] == plan.structure.shared_bytes
    # what a launch reserves for each thread, before the roles share it out
    assert 24 <= resources["registers"] <= 65536 // plan.threads
    assert resources["cubin_bytes"] == len(artifact.cubin)
    assert resources["compile_seconds"] > 0
    check_parameters(plan, artifact)  # here, so that no other worker compiles the kernel for it


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", WEIGHTS[1:])
def test_weights_without_a_sum_take_the_place_of_a_softmax(weights: str) -> None:
    own = f"{{mask: q_pos >= kv, score: 's - log(seqlen_k)', weights: {weights}}}"
    declared = f"variants:\n  own: {own}\n"
    plan = planned("own", backend="cuda", declared=declared)
    artifact = compile_source(plan, render(plan))
    resources = artifact.manifest["resources"]
    assert resources["spills"] == 0
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == plan.launch("forward").products
    assert "lse_ptr" not in [argument.name for argument in plan.arguments]
    check_parameters(plan, artifact)


def check_parameters(plan: Plan, artifact: Artifact) -> None:
    """The parameters of a manifest are those of its cubin, each where the compiler put it."""
    parts = [
        (launch.symbol, launch.arguments, row["parameters"])
        for launch, row in zip(plan.launches, artifact.manifest["launches"], strict=True)
    ]
    for symbol, arguments, parameters in parts:
        assert [p["name"] for p in parameters] == [argument.name for argument in arguments]
        places = parameter_places(artifact.cubin, symbol)
        assert [p["offset"] for p in parameters] == [offset for offset, _ in places]
        end = 0
        for parameter, (offset, size) in zip(parameters, places, strict=True):
            kind = parameter["kind"]
            wide = kind == "pointer" or parameter["type"] == "i64"
            assert size == {"descriptor": 128, "divisor": 12}.get(kind, 8 if wide else 4), parameter["name"]
            assert offset >= end, "parameters overlap"
            end = offset + size


#: Choices of a spec that make other code: the second rung of a ladder, no overlap, and a kernel that skips.
CHOICES: tuple[tuple[str, dict[str, object]], ...] = (
    ("causal", {"warps": "{overlap: false}", "softmax": "exact_max", "epilogue": "direct"}),
    ("causal", {"warps": "{overlap: false}", "layout": "varlen"}),
    ("sliding_window", {"tile": "{m: 192, n: 64}", "epilogue": "direct", "order": "natural"}),
    ("triangle", {"head_dim": 32}),  # two batch entries
)


@pytest.mark.exhaustive
@few(("variant", "fields"), CHOICES, ids=["second rung", "varlen", "direct", "entries"], always=(2,), often=(1, 2))
def test_choices_keep_their_speed(variant: str, fields: dict[str, object]) -> None:
    plan = planned(variant, backend="cuda", **fields)  # type: ignore[arg-type]
    resources = compile_source(plan, render(plan)).manifest["resources"]
    assert 0 <= resources["spills"] <= SPILLS.bytes
    assert resources["serialized_wgmma"] is False
    assert resources["wgmma"] == plan.launch("forward").products
    assert resources["shared_memory"] == plan.structure.shared_bytes


@pytest.mark.exhaustive
def test_a_kernel_without_a_map_has_one_launch() -> None:
    assert [row["name"] for row in compiled("causal", 128)[1].manifest["launches"]] == ["forward"]


def test_an_artifact_holds_what_it_says() -> None:
    plan, artifact = compiled("allowed", 64)
    manifest = artifact.manifest
    assert artifact.cubin.startswith(b"\x7fELF")
    assert manifest["sha256"] == sha256(artifact.cubin).hexdigest()
    assert (artifact.name, manifest["main"], manifest["threads"]) == (plan.name, "forward", plan.threads)
    assert manifest["backend"] == "cuda"
    assert manifest["structure"]["persistent"] is True
    nvrtc = chosen_nvrtc()
    assert nvrtc is not None
    assert manifest["toolchain"] == {nvrtc.distribution: nvrtc.version, "content": nvrtc.content}
    assert manifest["cuda_major"] == nvrtc.release[0]
    assert manifest["min_driver"] == {12: 12000, 13: 13000}[nvrtc.release[0]]
    assert artifact.texts["source.cu"] == render(plan).text
    assert not artifact.others, "all launches of a CUDA kernel stand in one cubin"
    assert [row["name"] for row in manifest["launches"]] == ["classify", "forward"]
    assert all(row["resources"]["registers"] > 0 for row in manifest["launches"])
    assert json.dumps(json.loads(json.dumps(manifest))) == json.dumps(manifest)
    assert pickle.loads(pickle.dumps(artifact)) == artifact


@pytest.mark.exhaustive
def test_a_fresh_process_gives_the_same_bytes_and_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from hashlib import sha256\n"
        "from attngen.compile import compile_source\n"
        "from attngen.render import render\n"
        "from tests.plan.specs import planned\n"
        "plan = planned('causal', backend='cuda', head_dim=128)\n"
        "print(sha256(compile_source(plan, render(plan)).cubin).hexdigest(), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [compiled("causal", 128)[1].manifest["sha256"], "False"]


@pytest.mark.exhaustive
def test_headers_that_a_source_does_not_include_change_no_byte() -> None:
    plan, artifact = compiled("allowed", 64)
    source = render(plan)
    assert len(source.headers) < len(headers())
    assert compile_source(plan, replace(source, headers=headers())).cubin == artifact.cubin


@pytest.mark.exhaustive
def test_no_path_of_this_machine_is_in_the_cubin() -> None:
    for folder in ("/tmp", str(ROOT), str(Path.home()) + "/", sys.prefix):
        assert folder.encode() not in compiled("allowed", 64)[1].cubin


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_source_that_is_no_cuda_is_refused_with_the_log() -> None:
    plan = planned(backend="cuda")
    source = render(plan)
    broken = replace(
        source, text=source.text.replace("const int lane = threadIdx.x % 32", "const int lane = nothing_of_that_name")
    )
    with pytest.raises(CompileError) as caught:
        compile_source(plan, broken)
    message = str(caught.value)
    assert message.startswith(f"{plan.name}: NVRTC refused the source")
    assert "nothing_of_that_name" in message
    assert any(line.startswith(f"{plan.name}.cu(") for line in message.splitlines())


def with_log(monkeypatch: pytest.MonkeyPatch, plan: Plan, log: str) -> None:
    """Let the compiler give the cubin of the kernel and this log."""
    cubin = compiled("allowed", 64)[1].cubin
    monkeypatch.setattr(cuda, "compile_text", lambda *_: (cubin, log.replace("NAME", plan.name)))


def test_a_spill_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = compiled("allowed", 64)
    with_log(monkeypatch, plan, CLEAN.replace("0 bytes spill stores", f"{SPILLS.bytes + 4} bytes spill stores"))
    with pytest.raises(CompileError, match=rf"(?s){SPILLS.bytes + 4} B of spills at 168 registers.*allow: \[spill\]"):
        compile_source(plan, render(plan))
    allowed = compile_source(replace(plan, allow=("spill",)), render(plan))
    assert allowed.manifest["resources"]["spills"] == SPILLS.bytes + 4


def test_a_few_bytes_of_spills_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = compiled("allowed", 64)
    with_log(monkeypatch, plan, CLEAN.replace("0 bytes spill stores", f"{SPILLS.bytes} bytes spill stores"))
    assert compile_source(plan, render(plan)).manifest["resources"]["spills"] == SPILLS.bytes


@pytest.mark.parametrize("log", [SERIALIZED + CLEAN, CLEAN + SERIALIZED], ids=["before", "behind"])
def test_a_serialized_product_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    plan, _ = compiled("allowed", 64)
    with_log(monkeypatch, plan, log)
    with pytest.raises(CompileError, match=r"(?s)ptxas serialized wgmma.*allow: \[serialized_wgmma\]"):
        compile_source(plan, render(plan))
    allowed = compile_source(replace(plan, allow=("serialized_wgmma",)), render(plan))
    assert allowed.manifest["resources"]["serialized_wgmma"] is True


def test_another_number_of_products_than_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = compiled("allowed", 64)
    launch = plan.launch("forward")
    products = launch.products
    assert products is not None
    plan = plan.with_launches(*plan.launches[:-1], replace(launch, products=products + 1))
    with_log(monkeypatch, plan, CLEAN)
    with pytest.raises(
        CompileError, match=f"{products} wgmma instructions in the cubin, but {products + 1} were planned"
    ):
        compile_source(plan, render(plan))


def test_other_parameters_than_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = compiled("allowed", 64)
    with_log(monkeypatch, plan, CLEAN)
    classify, launch = plan.launches
    fewer = plan.with_launches(classify, replace(launch, arguments=launch.arguments[:-1]))
    with pytest.raises(CompileError, match=r"\d+ parameters were planned, but the cubin has \d+"):
        compile_source(fewer, render(plan))
    first, *rest = launch.arguments
    swapped = plan.with_launches(classify, replace(launch, arguments=(*rest, first)))
    with pytest.raises(CompileError, match=r"parameter '\w+' takes \d+ B, but \d+ B in the cubin"):
        compile_source(swapped, render(plan))


def test_a_log_without_resources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = compiled("allowed", 64)
    with_log(monkeypatch, plan, "ptxas says nothing\n")
    with pytest.raises(CompileError, match="no registers and spills in the log of ptxas"):
        compile_source(plan, render(plan))


@pytest.mark.exhaustive
def test_spills_of_ptxas_are_noticed() -> None:
    """A kernel that needs more registers than it may have: the log of the real compiler, read by the real reader."""
    text = (
        'extern "C" __global__ void __launch_bounds__(1024) NAME(float* x) {\n'
        "  float a[256];\n#pragma unroll\n  for (int i = 0; i < 256; ++i) a[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 256; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[255 - i] + a[(7 * i) % 256];\n}\n"
    ).replace("NAME", "greedy")
    cubin, log = compile_text("greedy", text, {}, "sm90a")
    assert cubin.startswith(b"\x7fELF")
    assert cuda._resources_of("greedy", log).spills > SPILLS.bytes


# --- all of them ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(("spec", "least"), [("hopper", 41), ("ladder", 8)])
def test_every_kernel_of_the_hopper_spec_builds(spec: str, least: int, tmp_path: Path) -> None:
    """A minute on two cores: the one test that compiles all that ships for Hopper; those above are a sample of it."""
    report = build(root() / "specs" / f"{spec}.yaml", store=Store(tmp_path / "cache"))
    assert not report.failures
    assert len(report.kernels) >= least
    for kernel in report.kernels:
        resources = kernel.manifest["resources"]
        assert 0 <= resources["spills"] <= SPILLS.bytes, kernel.name
        assert resources["serialized_wgmma"] is False, kernel.name
        assert (resources["wgmma"] > 0) == ("_wgmma_" in kernel.name), kernel.name
        assert kernel.origin == "built"
