"""Compiling Triton kernels offline: what comes out, that it is always the same, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from attngen.arch import ARCHES
from attngen.compile import Artifact, compile_source
from attngen.compile.environment import is_scrubbed, scrubbed
from attngen.compile.inspect import disassemble, nvidia_tool, parameter_places, resources_of_log
from attngen.compile.parameters import check_parameters
from attngen.errors import CompileError
from attngen.plan.model import Argument
from attngen.records import read
from tests.compile.plans import CLASSIFIER, DESCRIPTOR, POINTER, SPILLING, Plan, Source
from tests.sampling import few

ROOT = Path(__file__).parents[2]

#: Compiles a plan of ``tests.compile.plans`` in a fresh process, where neither torch nor pytest is loaded.
SCRIPT = """
import json, resource, sys
from hashlib import sha256
from attngen.compile import compile_source
from tests.compile import plans
artifact = compile_source(plans.{plan}, plans.Source(plans.{plan}.name))
# getrusage counts what the process that forked this one held
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({{
    "cubin": sha256(artifact.cubin).hexdigest(),
    "ptx": sha256(artifact.texts["ptx"].encode()).hexdigest(),
    "manifest": {{**artifact.manifest, "resources": {{**artifact.manifest["resources"], "compile_seconds": 0}}}},
    "seconds": artifact.manifest["resources"]["compile_seconds"],
    "torch": "torch" in sys.modules,
    "megabytes": max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024,
}}))
"""


@cache
def compiled(plan: Plan) -> Artifact:
    return compile_source(plan, Source(plan.name))  # type: ignore[arg-type]


def compiled_elsewhere(plan: str, folder: Path, **environment: str) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(plan=plan)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []  # nothing is left behind
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_an_artifact_holds_what_it_says() -> None:
    artifact = compiled(DESCRIPTOR)
    manifest = artifact.manifest
    assert artifact.cubin.startswith(b"\x7fELF")
    assert manifest["sha256"] == sha256(artifact.cubin).hexdigest()
    assert (artifact.name, manifest["main"], manifest["threads"]) == (DESCRIPTOR.name, "forward", 128)
    assert set(artifact.texts) == {"source.py", "ptx", "ttgir"}
    assert artifact.texts["source.py"] == Source(DESCRIPTOR.name).text
    resources = manifest["resources"]
    assert resources["cubin_bytes"] == len(artifact.cubin)
    assert 16 < resources["registers"] <= 255
    assert resources["spills"] == 0
    assert 16_384 <= resources["shared_memory"] <= ARCHES["sm90a"].shared_memory
    assert resources["compile_seconds"] > 0
    assert (manifest["cuda_major"], manifest["min_driver"]) == (12, 12000)  # the better ptxas for Hopper
    assert manifest["toolchain"]["triton"]
    assert json.loads(json.dumps(manifest)) == manifest
    assert pickle.loads(pickle.dumps(artifact)) == artifact


def test_the_manifest_agrees_with_the_cubin(tmp_path: Path) -> None:
    for plan in (DESCRIPTOR, POINTER):
        artifact = compiled(plan)
        (tmp_path / "kernel.cubin").write_bytes(artifact.cubin)
        tool = [str(nvidia_tool("cuobjdump")), "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
        declared = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        assert re.findall(r"\bREG:(\d+)", declared) == [str(artifact.manifest["resources"]["registers"])]


@pytest.mark.parametrize("arch", ["sm80", "sm90a", "sm100a", "sm120a"])
def test_places_of_parameters_are_those_that_cuobjdump_reads(tmp_path: Path, arch: str) -> None:
    artifact = compiled(replace(POINTER, arch_name=arch))
    (tmp_path / "kernel.cubin").write_bytes(artifact.cubin)
    tool = [str(nvidia_tool("cuobjdump")), "--dump-elf", str(tmp_path / "kernel.cubin")]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    matches = re.findall(r"Ordinal\s*:\s*(\w+)\s+Offset\s*:\s*(\w+)\s+Size\s*:\s*(\w+)", text)
    rows = sorted({tuple(int(value, 16) for value in row) for row in matches})
    assert parameter_places(artifact.cubin) == [(offset, size) for _, offset, size in rows]
    assert len(rows) > 3
    with pytest.raises(CompileError, match="not an ELF file"):
        parameter_places(artifact.cubin[:100])


def test_parameters_are_those_of_the_ptx() -> None:
    artifact = compiled(DESCRIPTOR)
    parameters = artifact.manifest["launches"][0]["parameters"]
    kinds = [p["kind"] for p in parameters]
    of_descriptor = ["descriptor"] + 4 * ["descriptor_shape"] + 4 * ["descriptor_stride"]
    assert kinds[:18] == 2 * of_descriptor
    assert kinds[-2:] == ["scratch", "scratch"]
    assert len(parameters) == 18 + 6 + 2
    assert (parameters[0]["box"], parameters[0]["swizzle"]) == ([1, 64, 1, 64], 128)
    check_parameters(DESCRIPTOR.name, [read(Argument, row) for row in parameters], artifact.texts["ptx"])
    assert [p["offset"] for p in parameters] == [offset for offset, _ in parameter_places(artifact.cubin)]


@few("arch", ARCHES, always=range(0, 999, 3))
def test_every_arch_compiles_without_a_gpu(arch: str) -> None:
    artifact = compiled(replace(POINTER, arch_name=arch))
    assert f".target sm_{arch.removeprefix('sm').removeprefix('ptx')}" in artifact.texts["ptx"]


def test_a_classifier_is_a_cubin_of_its_own() -> None:
    plan = replace(POINTER, classifier=CLASSIFIER)
    artifact = compiled(plan)
    row = artifact.manifest["launches"][0]
    cubin = artifact.others["classify"]
    assert cubin.startswith(b"\x7fELF")
    assert row["sha256"] == sha256(cubin).hexdigest()
    assert [p["name"] for p in row["parameters"]] == ["out", "n", "scratch0", "scratch1"]
    assert row["resources"]["registers"] > 0
    assert b"classify_kernel" in cubin
    assert artifact.cubin == compiled(POINTER).cubin


@pytest.mark.exhaustive
def test_a_fresh_process_gives_the_same_bytes_and_needs_no_torch(tmp_path: Path) -> None:
    here = compiled(DESCRIPTOR)
    hostile = {
        "TRITON_INTERPRET": "1",
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_DEBUG": "1",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "TRITON_OVERRIDE_ARCH": "sm80",
        "TRITON_CACHE_DIR": str(tmp_path / "never"),
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_F32_DEFAULT": "tf32x3",
        "TRITON_PTXAS_PATH": "/bin/false",
        "TRITON_INSTRUMENTATION_MODE": "consan",
        "PTXAS_OPTIONS": "--opt-level 0",
        "DISABLE_PTXAS_OPT": "1",
        "DISABLE_LLVM_OPT": "1",
        "NVPTX_ENABLE_DUMP": "1",
        "MLIR_ENABLE_DUMP": "1",
    }
    one = compiled_elsewhere("DESCRIPTOR", tmp_path / "one")
    two = compiled_elsewhere("DESCRIPTOR", tmp_path / "another folder", **hostile)
    assert one["cubin"] == two["cubin"] == here.manifest["sha256"]
    assert one["ptx"] == two["ptx"] == sha256(here.texts["ptx"].encode()).hexdigest()
    assert one["manifest"] == two["manifest"]
    assert not one["torch"]
    assert not (tmp_path / "never").exists()
    assert max(one["megabytes"], two["megabytes"]) < 1000


def test_no_path_of_this_machine_is_in_the_result() -> None:
    artifact = compiled(DESCRIPTOR)
    for data in (artifact.cubin, *(text.encode() for text in artifact.texts.values())):
        for folder in ("/tmp", str(ROOT), str(Path.home()) + "/", sys.prefix):
            assert folder.encode() not in data


@pytest.mark.parametrize("name", ["TRITON_INTERPRET", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "USE_IR_LOC", "LLVM_X"])
def test_scrubbed_names(name: str) -> None:
    assert is_scrubbed(name)


@pytest.mark.parametrize("name", ["PATH", "HOME", "ATTNGEN_CACHE", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"])
def test_kept_names(name: str) -> None:
    assert not is_scrubbed(name)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = dict(os.environ)
    with pytest.raises(KeyError), scrubbed(str(tmp_path), TRITON_HOME="x", TRITON_INTERPRET="0"):
        assert (os.environ["TRITON_HOME"], os.environ["TRITON_INTERPRET"]) == ("x", "0")
        os.environ["TRITON_SET_BY_TRITON"] = "1"
        raise KeyError
    assert dict(os.environ) == before


def test_the_environment_is_put_back_after_a_compile() -> None:
    before = dict(os.environ)
    compiled(replace(POINTER, arch_name="sm86"))
    assert dict(os.environ) == before


@pytest.mark.exhaustive
def test_a_spill_in_a_hopper_kernel_is_refused_unless_allowed() -> None:
    with pytest.raises(
        CompileError, match=r"(?s)spilling_kernel: \d+ B of spills at \d+ registers\n.*allow: \[spill\]"
    ):
        compiled(SPILLING)
    allowed = compiled(replace(SPILLING, allow=("spill",)))
    assert allowed.manifest["resources"]["spills"] > 0


@pytest.mark.exhaustive
def test_a_spill_elsewhere_is_allowed() -> None:
    elsewhere = compiled(replace(SPILLING, arch_name="sm80"))
    assert elsewhere.manifest["resources"]["spills"] > 0


@pytest.mark.exhaustive
def test_a_register_limit_that_costs_spills_is_dropped() -> None:
    free, kept, dropped = (compiled(replace(DESCRIPTOR, max_registers=limit)) for limit in (None, 128, 64))
    assert (kept.manifest["max_registers"], dropped.manifest["max_registers"]) == (128, None)
    assert ".maxnreg 128" in kept.texts["ptx"]
    assert (dropped.cubin, dropped.texts["ptx"]) == (free.cubin, free.texts["ptx"])
    resources = [{**artifact.manifest["resources"], "compile_seconds": 0} for artifact in (free, dropped)]
    assert resources[0] == resources[1]


def test_a_serialized_wgmma_is_noticed() -> None:
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'f'\n"
        "ptxas info    : Function properties for f\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    resources = resources_of_log(log)
    assert (resources.registers, resources.spills, resources.serialized_wgmma) == (168, 16, True)
    assert not resources_of_log(log.replace("serialized", "fine")).serialized_wgmma
    with pytest.raises(CompileError, match="no registers and spills"):
        resources_of_log("ptxas info : 0 bytes gmem")


def refused(plan: Plan, text: str | None = None) -> str:
    source = Source(plan.name) if text is None else Source(plan.name, text)
    with pytest.raises(CompileError) as caught:
        compile_source(plan, source)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_source_that_triton_rejects() -> None:
    text = Source("x").text.replace("tl.load(x + offsets", "tl.laod(x + offsets")
    message = refused(POINTER, text)
    assert message.startswith("pointer_kernel: Triton's compiler failed with ")
    assert "laod" in message
    assert "/tmp" not in message


def test_a_source_that_ptxas_rejects(capfd: pytest.CaptureFixture[str]) -> None:
    text = Source("x").text.replace(
        "    offsets = ",
        '    tl.inline_asm_elementwise("bogus.instruction $0, $1;", "=r,r", [n], tl.int32, is_pure=False, pack=1)\n'
        "    offsets = ",
    )
    message = refused(POINTER, text)
    assert "ptxas" in message
    assert "bogus" in message
    assert "Repro command" not in message
    assert capfd.readouterr().out == ""  # what Triton prints on the way goes into the error


def test_a_source_that_is_no_module() -> None:
    assert "not a valid module" in refused(POINTER, "import nowhere_to_be_found")
    assert "not a valid module" in refused(POINTER, "def (")
    assert "defines no function" in refused(POINTER, "import triton")


def test_a_plan_whose_arguments_differ_from_the_source() -> None:
    swapped = replace(POINTER, arguments=(*POINTER.arguments[:2], *reversed(POINTER.arguments[2:])))
    assert "takes (x, out, n, scale), but the plan passes (x, out, scale, n)" in refused(swapped)


def test_a_plan_whose_types_the_compiler_changes() -> None:
    # A block pointer type, say, that one version passes by value and another by address, would show like this.
    wrong = replace(POINTER, arguments=(*POINTER.arguments[:2], Argument("n", "size", "u16"), POINTER.arguments[3]))
    assert "unknown type 'u16'" in refused(wrong)


@pytest.mark.exhaustive
def test_too_much_shared_memory_names_the_budget() -> None:
    text = Source("x").text.replace("tl.constexpr(64)", "tl.constexpr(128)")
    arguments = tuple(
        replace(a, type="tensordesc<bf16[1,128,1,128]>", box=(1, 128, 1, 128)) if a.kind == "descriptor" else a
        for a in DESCRIPTOR.arguments
    )
    plan = replace(DESCRIPTOR, arguments=arguments, stages=8, num_warps=8, allow=("spill",))
    message = refused(plan, text)
    assert "shared memory" in message
    assert "exceeds 232448 B on sm90a" in message


def test_an_unknown_backend() -> None:
    with pytest.raises(CompileError, match="no compiler for backend 'metal'"):
        compile_source(POINTER, Source(POINTER.name, backend="metal"))  # type: ignore[arg-type]


def test_machine_code_can_be_read() -> None:
    text = disassemble(compiled(POINTER).cubin)
    assert "pointer_kernel" in text
    assert "EXIT" in text
    with pytest.raises(CompileError, match="cannot read the cubin"):
        disassemble(b"no cubin")


@pytest.mark.exhaustive
def test_a_process_that_imported_the_interpreter_says_so(tmp_path: Path) -> None:
    script = "import triton\n" + SCRIPT.format(plan="POINTER")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CompileError: this process imported Triton with TRITON_INTERPRET=1" in done.stderr


def test_compiling_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(replace(POINTER, num_warps=2))
