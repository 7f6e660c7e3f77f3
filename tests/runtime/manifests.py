"""Results of a compile, without compiling: manifests, and cubins that the fake driver reads back."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from typing import Any

from attngen.compile.artifact import Artifact
from attngen.compile.parameters import triton_parameters

_SPANS = {0: 0, 32: 1, 64: 2, 128: 3}


def parameters_of_plan(planned_arguments: Any) -> list[dict[str, Any]]:
    """Return the parameter list that a Triton compile of a plan would leave in its manifest."""
    metadata = []
    for argument in planned_arguments:
        if argument.kind == "descriptor":
            span = next((s for s in (128, 64, 32) if argument.box[-1] * 2 >= s), 0)
            box = [*argument.box[:-1], min(argument.box[-1], span // 2 if span else 256)]
            metadata.append({"block_size": box, "swizzle": _SPANS[span]})
    return [argument.to_dict() for argument in triton_parameters(planned_arguments, metadata)]


def with_parameters(manifest: dict[str, Any], plan: Any) -> None:
    """Give each launch of a manifest the parameter list that a Triton compile would."""
    for row, launch in zip(manifest["launches"], plan.launches, strict=True):
        row["parameters"] = parameters_of_plan(launch.arguments)


def compile_as_manifest(plan: Any, source: Any) -> Artifact:
    """In place of ``compile_source``: the cubin is the manifest, which ``FakeDriver`` reads back."""
    manifest = plan.to_dict()
    with_parameters(manifest, plan)
    manifest |= {"toolchain": {"triton": "3.0", "content": "0"}, "cuda_major": 13, "min_driver": 13000}
    manifest["resources"] = {"shared_memory": 65536, "registers": 90, "spills": 0, "compile_seconds": os.getpid()}
    cubin = json.dumps({**manifest, "resources": None}).encode()
    manifest["resources"]["cubin_bytes"] = len(cubin)
    manifest["sha256"] = sha256(cubin).hexdigest()
    return Artifact(cubin, manifest, texts={"source.py": source.text})
