"""CUDA source → cubin by CuPy's NVRTC, offline: no GPU, no driver, no header of the toolkit."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from attngen.compile.artifact import Artifact
from attngen.compile.hazards import misjudged_clamps
from attngen.compile.inspect import Resources, parameter_places, resources_of_log
from attngen.compile.machine import count_products, extent
from attngen.compile.nvrtc import broken, load
from attngen.compile.options import nvrtc_options
from attngen.compile.parameters import placed_parameters
from attngen.compile.ptx import driver_of_ptx, image_of
from attngen.compile.speed import require_fast
from attngen.compile.toolchain import Nvrtc, chosen_nvrtc, lacking_for_cuda, toolchain
from attngen.errors import ChoiceError, CompileError, ToolchainError
from attngen.lang.constant_conditions import reads_products

if TYPE_CHECKING:
    from attngen.plan.model import Launch, Plan
    from attngen.render import Source

#: nvrtcResult of a source that is refused, and of one on which the compiler itself fails: another one may compile.
_OF_SOURCE = (6, 11)

#: nvrtcResult of a process that has too little memory.
_OUT_OF_MEMORY = 1

#: The error of a kernel whose machine code has a known fault of ptxas.
WRONG_CODE = "NVRTC compiled it wrongly; NVRTC 13 or later may help"


def compile_cuda(plan: Plan, source: Source) -> Artifact:
    """Compile the launches of a plan, which share one source, into one cubin.

    Raises CompileError if NVRTC rejects the source, or if the result spills, serializes wgmma, has another number of
    products than planned, or takes other parameters.
    """
    start = time.perf_counter()
    cubin, log = compile_text(plan.name, source.text, source.headers, plan.arch.name)
    ptx = _compiled(plan.name, source.text, source.headers, plan.arch.name)[2] if plan.arch.portable else None
    image = cubin if ptx is None else image_of(ptx)
    resources = {launch.name: _resources_of(launch.symbol, log) for launch in plan.launches}
    main = resources[plan.main]
    _check(plan, cubin, resources)
    manifest = dict(plan.to_dict())
    manifest["sha256"] = sha256(image).hexdigest()
    manifest["launches"] = [
        {
            **launch.to_dict(),
            "parameters": _parameters(plan.name, launch, cubin),
            "resources": {"registers": resources[launch.name].registers, "shared_memory": launch.shared_bytes},
            "sha256": manifest["sha256"],
        }
        for launch in plan.launches
    ]
    nvrtc = _nvrtc()
    manifest["toolchain"] = toolchain("cuda", plan.arch.name)
    manifest["cuda_major"] = nvrtc.release[0]
    manifest["min_driver"] = driver_of_ptx(ptx) if ptx is not None else nvrtc.min_driver(plan.arch.name)
    manifest["resources"] = {
        "registers": main.registers,
        "spills": main.spills,
        "shared_memory": max(launch.shared_bytes for launch in plan.launches),
        "cubin_bytes": len(image),
        "wgmma": count_products(cubin),
        "serialized_wgmma": main.serialized_wgmma,
        "compile_seconds": round(time.perf_counter() - start, 3),
    }
    return Artifact(cubin=image, manifest=manifest, texts={"source.cu": source.text})


def compile_text(name: str, text: str, headers: Mapping[str, str], arch: str) -> tuple[bytes, str]:
    """Compile a source with its headers for an arch such as ``sm90a``; return the cubin and the log.

    Raises ChoiceError for a source that NVRTC rejects, and ToolchainError if NVRTC is missing or does not work.
    """
    cubin, log, _ = _compiled(name, text, headers, arch)
    return cubin, log


def _compiled(name: str, text: str, headers: Mapping[str, str], arch: str) -> tuple[bytes, str, str]:
    """The cubin, the log and the PTX of a source, as ``compile_text`` makes them."""
    installed = _nvrtc()
    nvrtc = load(installed)
    program, log = None, ""
    try:
        bodies, files = [body.encode() for body in headers.values()], [file.encode() for file in headers]
        program = nvrtc.createProgram(text, f"{name}.cu", bodies, files)
        try:
            nvrtc.compileProgram(program, nvrtc_options(arch))
        finally:
            log = nvrtc.getProgramLog(program).rstrip("\0\n")
        return _whole(installed, nvrtc.getCUBIN(program)), log, nvrtc.getPTX(program).decode()
    except nvrtc.NVRTCError as error:
        said = f"{error}\n{log}".rstrip()
        if error.status in _OF_SOURCE:
            raise ChoiceError(f"{name}: NVRTC refused the source: {said}") from None
        if error.status == _OUT_OF_MEMORY:
            raise CompileError(f"{name}: NVRTC ran out of memory; fewer --jobs need less") from None
        raise broken(installed, said) from None
    finally:
        if program is not None:
            nvrtc.destroyProgram(program)


def _whole(nvrtc: Nvrtc, cubin: bytes) -> bytes:
    """A cubin with its last byte, which CuPy takes for the end of a string: the highest byte of a 64-bit number, a 0.

    Raises ToolchainError for anything else than an ELF file that lacks it.
    """
    try:
        lacking = extent(cubin) - len(cubin)
    except (struct.error, ValueError) as error:
        raise broken(nvrtc, f"it returned no ELF file: {error}") from None
    if lacking not in (0, 1):
        raise broken(nvrtc, f"it returned an ELF file of {len(cubin)} bytes, which lacks {lacking}")
    return cubin + bytes(lacking)


def load_compiler() -> None:
    """Load the compiler, so that the first compile of a process does not wait for it."""
    load(_nvrtc())


def _nvrtc() -> Nvrtc:
    """The NVRTC that compiles. Raises ToolchainError if there is none, or no CuPy to call it by."""
    nvrtc, lacking = chosen_nvrtc(), lacking_for_cuda()
    if nvrtc is None or lacking is not None:
        raise ToolchainError(str(lacking))
    return nvrtc


def _resources_of(symbol: str, log: str) -> Resources:
    """Resources of one kernel in the log of ptxas, whose warnings may stand anywhere in it."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)
    by_symbol = dict(zip(parts[1::2], parts[2::2], strict=True))
    resources = resources_of_log(by_symbol.get(symbol, log))
    serialized = resources_of_log(log).serialized_wgmma or "(C75" in log
    return Resources(resources.registers, resources.spills, serialized)


def _check(plan: Plan, cubin: bytes, resources: Mapping[str, Resources]) -> None:
    """Refuse wrong code, another number of products than planned, and, unless the spec allows them, spills and
    serialized wgmma."""
    for launch in plan.launches:
        if launch.max_spills is not None:
            require_fast(plan, plan.name, resources[launch.name], launch.max_spills)
    if plan.arch.wgmma and (clamps := misjudged_clamps(cubin)):
        raise ChoiceError(f"{plan.name}: {WRONG_CODE}: {clamps}")
    planned = sum(launch.products or 0 for launch in plan.launches)
    counted = count_products(cubin)
    # where no logit depends on products of Q and K, ptxas may drop them
    if planned != counted and reads_products(plan.variant):
        raise ChoiceError(f"{plan.name}: {counted} wgmma instructions in the cubin, but {planned} were planned")


def _parameters(kernel: str, launch: Launch, cubin: bytes) -> list[dict[str, Any]]:
    placed = placed_parameters(kernel, launch.arguments, parameter_places(cubin, launch.symbol))
    return [argument.to_dict() for argument in placed]
