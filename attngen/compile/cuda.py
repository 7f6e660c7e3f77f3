"""CUDA source → cubin by NVRTC, offline: no GPU, no driver, no header of the toolkit.

NVRTC is reached through the bindings that come with CuPy (``cupy_backends``), below CuPy's own compile functions, which
would look for a GPU. The bindings import CuPy when they are first called.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from attngen.compile.artifact import Artifact
from attngen.compile.drivers import min_driver
from attngen.compile.inspect import Resources, count_instructions, parameter_places, resources_of_log
from attngen.compile.options import nvrtc_options
from attngen.compile.parameters import place_parameters
from attngen.compile.speed import MAX_SPILLS, require_fast
from attngen.compile.toolchain import toolchain
from attngen.errors import ChoiceError, CompileError
from attngen.lang.settle import reads_products

if TYPE_CHECKING:
    from attngen.plan.model import Argument, HopperGradients, Plan
    from attngen.render import Source

#: Bytes of spills of a backward whose consumers take turns: with so many it was measured faster than without turns.
PINGPONG_SPILLS = 72

_NO_NVRTC = "NVRTC cannot be loaded ({error}); pip install 'attngen[build]', or say 'backend: triton' in the spec"


def compile_cuda(plan: Plan, source: Source) -> Artifact:
    """Compile the kernel of a plan, and its classifier, which stands in the same source, if it has one.

    Raises CompileError if NVRTC rejects the source, or if the result spills, serializes wgmma, multiplies another
    number of times than planned, or takes other parameters.
    """
    roles = plan.hopper or plan.gradients
    assert roles is not None
    start = time.perf_counter()
    cubin, log = compile_text(plan.name, source.text, source.headers, plan.arch.name)
    manifest = dict(plan.to_dict())
    symbol = manifest["symbol"]
    resources = _resources_of(symbol, log)
    _check(plan, cubin, resources)
    manifest["parameters"] = _parameters(plan.name, symbol, plan.arguments, cubin)
    manifest["sha256"] = sha256(cubin).hexdigest()
    if plan.parts:  # all stand in one cubin
        manifest["parts"] = [
            {
                **part.to_dict(),
                "parameters": _parameters(plan.name, part.symbol, part.arguments, cubin),
                "resources": {
                    "registers": _resources_of(part.symbol, log).registers,
                    "shared_memory": roles.shared_bytes if part.symbol == symbol else 0,
                },
            }
            for part in plan.parts
        ]
    if plan.classifier is not None:
        part = plan.classifier
        manifest["classifier"] = {
            **manifest["classifier"],
            "parameters": _parameters(plan.name, part.name, part.arguments, cubin),
            "resources": {"shared_memory": 0, "registers": _resources_of(part.name, log).registers},
            "sha256": manifest["sha256"],
        }
    manifest["toolchain"] = toolchain("cuda")
    manifest["cuda_major"] = nvrtc_version()[0]
    manifest["min_driver"] = min_driver(manifest["cuda_major"], plan.arch.capability)
    manifest["resources"] = {
        "registers": resources.registers,
        "spills": resources.spills,
        "shared_memory": roles.shared_bytes,
        "cubin_bytes": len(cubin),
        "wgmma": count_instructions(cubin, "HGMMA"),
        "serialized_wgmma": resources.serialized_wgmma,
        "compile_seconds": round(time.perf_counter() - start, 3),
    }
    classifier = cubin if plan.classifier is not None else None
    return Artifact(cubin=cubin, manifest=manifest, classifier=classifier, texts={"source.cu": source.text})


def compile_text(name: str, text: str, headers: Mapping[str, str], arch: str) -> tuple[bytes, str]:
    """Compile a source with its headers for an arch such as ``sm90a``; return the cubin and the log."""
    nvrtc = _nvrtc()
    included = {file.encode(): body.encode() for file, body in headers.items()}
    program = nvrtc.createProgram(text, f"{name}.cu", list(included.values()), list(included))
    try:
        nvrtc.compileProgram(program, nvrtc_options(arch))
    except nvrtc.NVRTCError as error:
        raise ChoiceError(f"{name}: NVRTC refused the source: {error}\n{nvrtc.getProgramLog(program)}") from None
    else:
        # CuPy takes the image for a string, and drops its last byte, which is part of the padding of an ELF file.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of the NVRTC that is installed; CompileError if there is none."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # the bindings raise what their loader raises
        raise CompileError(_NO_NVRTC.format(error=error)) from None
    return nvrtc


def _resources_of(symbol: str, log: str) -> Resources:
    """Read the part of ptxas's log that is about one kernel; its warnings may stand anywhere."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    resources = resources_of_log(found.get(symbol, log))
    serialized = resources_of_log(log).serialized_wgmma or "(C75" in log
    return Resources(resources.registers, resources.spills, serialized)


def _check(plan: Plan, cubin: bytes, resources: Resources) -> None:
    """Refuse what silently costs a kernel its speed, unless the spec allows it, and products that were not planned."""
    require_fast(plan, plan.name, resources, max_spills(plan))
    planned, found = planned_wgmma(plan), count_instructions(cubin, "HGMMA")
    # where no logit depends on them, ptxas drops products of Q and K as it likes
    if planned != found and reads_products(plan.variant):
        raise ChoiceError(f"{plan.name}: {found} wgmma instructions in the cubin, but {planned} were planned")


def max_spills(plan: Plan) -> int:
    """Return how many bytes of a thread a kernel may spill."""
    return PINGPONG_SPILLS if plan.gradients is not None and plan.gradients.pingpong else MAX_SPILLS


def planned_wgmma(plan: Plan) -> int:
    """Return how many wgmma instructions the kernel has.

    Q K^T for the first tile of a block, for that of a tile of work, and in the loop; P V in the loop and after it.
    Where consumers skip tiles, a tile of work may begin in two ways, one of which needs a Q K^T of its own. Without a
    producer a block has one tile of work, and no Q K^T behind it.
    """
    if plan.gradients is not None:
        return _planned_gradients(plan, plan.gradients)
    assert plan.hopper is not None
    qk = plan.columns_qk[0].width // 16
    pv = plan.tile_n // 16
    if not plan.hopper.specialized:
        return 2 * qk + 2 * pv
    return 4 * qk + 3 * pv if plan.hopper.skips else 3 * qk + 2 * pv


def _planned_gradients(plan: Plan, roles: HopperGradients) -> int:
    """Return how many wgmma instructions the kernel of all products has.

    In the loop one of each product; before it S of the first step and, where steps do not overlap, its dP and dV. Where
    consumers take turns, all of the first step stand before the loop, but dQ, which that of the last one follows.
    """
    s, dp, rows = plan.columns_qk[0].width // 16, plan.columns_v[0].width // 16, plan.tile_m // 16
    loop = s + dp + 2 * rows + plan.tile_n // 16
    if roles.cluster > 1:  # each begins with one of its own
        parts = sum(roles.parts_of(16 * width) for width in (s, dp))
        return s + dp + s + dp + rows * parts + plan.tile_n // 16 * (roles.dq_columns // roles.dq_part)
    if roles.pingpong:
        return 2 * loop
    return loop + s if roles.overlap in ("gradients", "dk") else loop + s + dp + rows


def _parameters(kernel: str, symbol: str, arguments: Sequence[Argument], cubin: bytes) -> list[dict[str, Any]]:
    parameters = [argument.to_dict() for argument in arguments]
    place_parameters(kernel, parameters, parameter_places(cubin, symbol))
    return parameters
