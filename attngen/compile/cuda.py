"""CUDA source → cubin by NVRTC, offline: no GPU, no driver, no header of the toolkit.

NVRTC is reached by its C interface (``nvrtc.py``); where the wheel of that is not found, through the bindings that come
with CuPy (``cupy_backends``), below CuPy's own compile functions, which would look for a GPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from attngen.compile.artifact import Artifact
from attngen.compile.drivers import min_driver
from attngen.compile.inspect import Resources, parameter_places, resources_of_log
from attngen.compile.machine import count_products
from attngen.compile.nvrtc import library
from attngen.compile.options import nvrtc_options
from attngen.compile.parameters import place_parameters
from attngen.compile.speed import require_fast
from attngen.compile.toolchain import toolchain
from attngen.errors import ChoiceError, CompileError
from attngen.lang.settle import reads_products

if TYPE_CHECKING:
    from attngen.plan.model import Launch, Plan
    from attngen.render import Source

_NO_NVRTC = "NVRTC cannot be loaded ({error}); pip install 'attngen[build]', or say 'backend: triton' in the spec"


def compile_cuda(plan: Plan, source: Source) -> Artifact:
    """Compile the launches of a plan, which share one source, into one cubin.

    Raises CompileError if NVRTC rejects the source, or if the result spills, serializes wgmma, has another number of
    products than planned, or takes other parameters.
    """
    start = time.perf_counter()
    cubin, log = compile_text(plan.name, source.text, source.headers, plan.arch.name)
    found = {launch.name: _resources_of(launch.symbol, log) for launch in plan.launches}
    main = found[plan.main]
    _check(plan, cubin, found)
    manifest = dict(plan.to_dict())
    manifest["sha256"] = sha256(cubin).hexdigest()
    manifest["launches"] = [
        {
            **launch.to_dict(),
            "parameters": _parameters(plan.name, launch, cubin),
            "resources": {"registers": found[launch.name].registers, "shared_memory": launch.shared_bytes},
            "sha256": manifest["sha256"],
        }
        for launch in plan.launches
    ]
    manifest["toolchain"] = toolchain("cuda")
    manifest["cuda_major"] = nvrtc_version()[0]
    manifest["min_driver"] = min_driver(manifest["cuda_major"], plan.arch.capability)
    manifest["resources"] = {
        "registers": main.registers,
        "spills": main.spills,
        "shared_memory": max(launch.shared_bytes for launch in plan.launches),
        "cubin_bytes": len(cubin),
        "wgmma": count_products(cubin),
        "serialized_wgmma": main.serialized_wgmma,
        "compile_seconds": round(time.perf_counter() - start, 3),
    }
    return Artifact(cubin=cubin, manifest=manifest, texts={"source.cu": source.text})


def compile_text(name: str, text: str, headers: Mapping[str, str], arch: str) -> tuple[bytes, str]:
    """Compile a source with its headers for an arch such as ``sm90a``; return the cubin and the log."""
    nvrtc = _nvrtc()
    included = {file.encode(): body.encode() for file, body in headers.items()}
    program = nvrtc.createProgram(text, f"{name}.cu", list(included.values()), list(included))
    try:
        nvrtc.compileProgram(program, nvrtc_options(arch))
    except nvrtc.NVRTCError as error:
        raise ChoiceError(f"{name}: NVRTC refused the source: {error}\n{_log(nvrtc, program)}") from None
    else:
        cubin = nvrtc.getCUBIN(program)
        if nvrtc is not library():  # CuPy takes the image for a string, and drops its last byte, an ELF file's padding
            cubin += b"\0"
        return cubin, _log(nvrtc, program)
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    return nvrtc.getProgramLog(program).rstrip("\0\n")  # a C string, with its NUL


def load() -> None:
    """Load the compiler, so that the first compile of a process does not wait for it."""
    nvrtc_version()


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of the NVRTC that is installed; CompileError if there is none."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def _nvrtc() -> Any:
    found = library()
    if found is not None:
        return found
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # the bindings raise what their loader raises
        raise CompileError(_NO_NVRTC.format(error=error)) from None
    return nvrtc


def _resources_of(symbol: str, log: str) -> Resources:
    """Read the part of ptxas's log that is about one kernel; its warnings may be anywhere."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    resources = resources_of_log(found.get(symbol, log))
    serialized = resources_of_log(log).serialized_wgmma or "(C75" in log
    return Resources(resources.registers, resources.spills, serialized)


def _check(plan: Plan, cubin: bytes, found: Mapping[str, Resources]) -> None:
    """Refuse what silently costs a kernel its speed, unless the spec allows it, and products that were not planned."""
    for launch in plan.launches:
        if launch.max_spills is not None:
            require_fast(plan, plan.name, found[launch.name], launch.max_spills)
    planned = sum(launch.products or 0 for launch in plan.launches)
    counted = count_products(cubin)
    # where no logit depends on products of Q and K, ptxas may drop them
    if planned != counted and reads_products(plan.variant):
        raise ChoiceError(f"{plan.name}: {counted} wgmma instructions in the cubin, but {planned} were planned")


def _parameters(kernel: str, launch: Launch, cubin: bytes) -> list[dict[str, Any]]:
    parameters = [argument.to_dict() for argument in launch.arguments]
    place_parameters(kernel, parameters, parameter_places(cubin, launch.symbol))
    return parameters
