"""Random valid specs of one kernel each, by a seed: a fuzzed variant, and whatever fields Triton kernels accept."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from attngen.build.pipeline import Prepared, prepare
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.plan import plan
from attngen.render import render
from attngen.schema import load_spec, load_spec_text
from attngen.schema.kernel_spec import Backward, Gradient
from tests.fuzz.variants import banded, typed

#: The sample that is compiled, and compared with the reference.
SEEDS = range(100)

#: Kernels that fuzzing once showed to be wrong.
REGRESSIONS = Path(__file__).with_name("regressions.yaml")

#: All that there are, and those of models more often.
_HEAD_DIMS = (*HEAD_DIMS, *[64, 128] * 12, 96, 192, 256)


def prepared(seed: int, **fields: Any) -> Prepared:
    """Return the rendered kernel of a seed; ``fields`` replaces fields of its spec."""
    chance = random.Random(seed)
    variant = (banded if chance.random() < 0.3 else typed)(chance)
    while True:
        text = _text(f"fuzzed_{seed}", variant, _kernel(chance, variant) | fields)
        try:
            (kernel,) = prepare(load_spec_text(text, "fuzzed.yaml"))
        except PlanError as error:
            if "Shared memory" not in str(error):
                raise
            continue
        return kernel


def _text(name: str, variant: dict[str, Any], kernel: dict[str, Any]) -> str:
    spec = {
        "schema": 1,
        "package": "fuzzed",
        "arch": ["sm90a"],
        "variants": {name: variant},
        "kernels": [{"variant": name, "backend": "triton", **kernel}],
    }
    return yaml.safe_dump(spec, sort_keys=False)


def regressions() -> list[Prepared]:
    """Return the kernels that were wrong once."""
    return prepare(load_spec(REGRESSIONS))


def interpretable(seed: int) -> Prepared:
    """Return the kernel of a seed as Triton's interpreter can run it, quickly: without bf16, in small tiles."""
    small = {"m": 16, "n": 16}
    kernel = prepared(seed, tile=small)
    return prepared(seed, tile=small, dtype="fp16") if kernel.plan.dtype_name == "bf16" else kernel


def backward_of(kernel: Prepared) -> Prepared:
    """Return the backward of a kernel, in small tiles and with exact functions, as the interpreter can run it."""
    small = Gradient(16, 16)
    changes = dict.fromkeys(("tile_m", "tile_n", "stages", "num_warps", "roles", "softmax", "persistent"))
    spec = replace(
        kernel.spec, direction="backward", backend="triton", fast_math=False, backward=Backward(small, small), **changes
    )
    planned = plan(spec)
    return Prepared(spec, planned, render(planned))


def _kernel(chance: random.Random, variant: dict[str, Any]) -> dict[str, Any]:
    dims = [chance.choice(_HEAD_DIMS) for _ in ("qk", "v")]
    fields: dict[str, Any] = {
        "head_dim": dims[0] if chance.random() < 0.7 else {"qk": dims[0], "v": dims[1]},
        "dtype": chance.choice(["bf16", "bf16", "fp16", "fp16", "fp32"]),
        "layout": chance.choice(["dense", "varlen"]),
        "loads": chance.choice(["descriptor", "descriptor", "pointer"]),
        "tile_map": chance.choice(["auto", "auto", "always", "never"]),
        # The approximate tanh is exact to 2^-11, which a random score may make any error of; erf is made of it.
        "fast_math": chance.random() < 0.7 and not re.search("tanh|erf", str(variant.get("score"))),
        "allow": ["spill", "serialized_wgmma"],  # what costs speed only
    }
    if fields["loads"] == "pointer" and chance.random() < 0.5:
        fields["alignment"] = "element"
    if fields["dtype"] != "fp32" and chance.random() < 0.3:  # products of float32 fill the registers with less
        fields["tile"] = {"m": chance.choice([64, 128]), "n": chance.choice([16, 32, 64])}
        fields["warps"] = chance.choice([4, 8])
        fields["pipeline"] = {"stages": chance.choice([1, 2, 3])}
    return fields
