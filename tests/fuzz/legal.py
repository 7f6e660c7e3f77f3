"""Random legal specs of one variant, by a seed: whatever a spec may say, forward and backward, in either backend.

A spec fixes fields of its kernel in half of the cases, and asks for nothing but variant, head dims, dtype and layout
in the others. The fields that it fixes agree with each other by the rules of docs/spec.md; drawn again are only those
that do not fit into shared memory or registers, which no rule tells beforehand, and those that need tiles in ranges.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import yaml

from attngen.build.pipeline import Prepared, prepare
from attngen.dtypes import HEAD_DIMS
from attngen.errors import PlanError
from attngen.operations import HELPERS
from attngen.schema import load_spec_text
from tests.fuzz.declared import Declared
from tests.fuzz.legal_masks import Masks
from tests.fuzz.legal_scores import Scores

Fields = dict[str, Any]

#: Refusals of fields that a spec fixes: budgets, and choices that need a mask of ranges, or of single heads.
_UNFIT = (
    "Shared memory", "a consumer has", "reserves", "tiles must be ranges", "which must be ranges", "a tile map lists",
    "the place of keys in a packed tensor",
)  # fmt: skip

_DRAWS = 40

#: Share of specs that are of kernels in 8 bits, and of those whose blocks share keys.
_IN_8_BITS, _SHARED = 0.12, 0.15


@dataclass(frozen=True, slots=True)
class Legal:
    """A legal spec: its text, and which fields of the kernel it fixes beyond what every spec says."""

    seed: int
    text: str
    fixed: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its variant."""
        return f"legal_{self.seed}"

    def prepare(self) -> list[Prepared]:
        """Return its kernels, planned and rendered, without those that all specs of their kind bring."""
        every = prepare(load_spec_text(self.text, f"{self.name}.yaml"))
        return [one for one in every if one.plan.direction not in HELPERS]


def legal(seed: int, *, arch: str = "sm90a") -> Legal:
    """Return the spec of a seed."""
    chance = random.Random(seed)
    layout = chance.choice(("dense", "dense", "varlen"))
    variant = variant_of(chance, layout)
    kernel = {"variant": f"legal_{seed}", "layout": layout, **element(chance)}
    passes = ["forward", "backward"] if chance.random() < 0.7 else ["forward"]
    bits = random.Random(f"{seed} in 8 bits")  # of its own: other specs stay what they were
    if arch == "sm90a" and "dropout" not in variant and bits.random() < _IN_8_BITS:
        return _in_8_bits(bits, seed, variant, kernel)
    shared = random.Random(f"{seed} shared")
    if arch == "sm90a" and "dropout" not in variant and shared.random() < _SHARED:
        return _with_shared_keys(shared, seed, variant, kernel)
    if chance.random() < 0.5:
        return written(seed, arch, variant, kernel | {"passes": passes}, ())
    for _ in range(_DRAWS):
        fields = _fields(chance, variant, kernel, passes)
        candidate = written(seed, arch, variant, kernel | {"passes": passes} | fields, tuple(fields))
        if fits(candidate):
            return candidate
    return written(seed, arch, variant, kernel | {"passes": passes}, ())


def _in_8_bits(chance: random.Random, seed: int, variant: Fields, kernel: Fields) -> Legal:
    """Return a spec of a kernel with quantized q, k and v."""
    dims = [chance.choice((64, 128, 128, 256, 32, 96, 80, 192)) for _ in ("qk", "v")]
    names = ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2")
    kernel = kernel | {
        "head_dim": dims[0] if chance.random() < 0.7 else {"qk": dims[0], "v": dims[1]},
        "dtype": chance.choice(names),
        "passes": ["forward"],
    }
    fields: Fields = {
        "kv_dtype": some(chance, 0.3, *names),
        "out_dtype": some(chance, 0.3, "bf16", "fp16"),
        "descale": some(chance, 0.6, "head", 64, 128, "token", "token"),
        "softmax": some(chance, 0.4, "exact_max", "lazy", "first_max"),
        "epilogue": some(chance, 0.3, "staged", "direct"),
        "persistent": some(chance, 0.3, False, True),
        "order": some(chance, 0.3, "longest_first", "natural"),
        "fast_math": some(chance, 0.2, True),
        "pack_gqa": some(chance, 0.2, True),
        "tile": some(chance, 0.3, {"n": 64}, {"n": 128}, {"n": 192}),
        "warps": some(chance, 0.3, {"consumer": 1}, {"consumer": 2}, {"consumer": 3}, {"overlap": False}),
    }
    if fields["descale"] not in (None, "head"):
        fields["pack_gqa"] = None
        if fields["tile"] is not None:
            fields["tile"] = {"n": 64}
    given = {name: value for name, value in fields.items() if value is not None}
    candidate = written(seed, "sm90a", variant, kernel | given, tuple(given))
    return candidate if fits(candidate) else written(seed, "sm90a", variant, kernel, ())


def _with_shared_keys(chance: random.Random, seed: int, variant: Fields, kernel: Fields) -> Legal:
    """Return a spec of kernels whose blocks share the keys of a sequence or a tile."""
    kernel = kernel | {"dtype": chance.choice(("bf16", "bf16", "fp16")), "passes": ["forward"]}
    kind = chance.choice(("tiles", "sequence"))
    for _ in range(_DRAWS):
        fields = _of_splits(chance, kernel["dtype"], "tiles" if kind == "tiles" else True)
        given = {name: value for name, value in fields.items() if value is not None}
        candidate = written(seed, "sm90a", variant, kernel | given, tuple(given))
        if fits(candidate):
            return candidate
    return written(seed, "sm90a", variant, kernel, ())


def _of_splits(chance: random.Random, dtype: str, split_kv: bool | str) -> Fields:
    """Return fields of a forward, and of another one whose blocks share the keys of a sequence, or of a tile."""
    layout = chance.choice(("dense", "varlen", "paged"))
    cached = split_kv is True and dtype == "bf16" and chance.random() < 0.6
    return {
        "layout": layout,
        "head_dim": chance.choice((64, 128, 128, 256, 32, 96, 80, 192)) if cached else None,
        "split_kv": split_kv,
        "kv_dtype": "fp8_e4m3" if cached else None,
        "descale": some(chance, 0.7, "page") if cached and layout == "paged" else None,
        "pack_gqa": some(chance, 0.25, True),
        "tile": some(chance, 0.4, {"n": 16}, {"n": 64}, {"n": 128}, {"m": 64}, {"m": 64, "n": 16}),
        "pipeline": some(chance, 0.2, {"stages": 2}, {"stages": 3}),
        "softmax": some(chance, 0.3, "exact_max", *(("lazy", "first_max") if split_kv == "tiles" else ())),
    }


def fits(candidate: Legal) -> bool:
    """Whether no field that the spec fixes is beyond a budget; any other refusal is for who asked to see."""
    from attngen.plan import plan
    from attngen.schema import expand

    try:
        for kernel in expand(load_spec_text(candidate.text, "legal.yaml")):
            plan(kernel)
    except PlanError as error:
        return not any(reason in str(error) for reason in _UNFIT)
    except Exception:
        return True
    return True


def written(seed: int, arch: str, variant: Fields, kernel: Fields, fixed: tuple[str, ...]) -> Legal:
    spec = {
        "schema": 1,
        "package": "legal",
        "arch": [arch],
        "variants": {f"legal_{seed}": variant},
        "kernels": [kernel],
    }
    return Legal(seed, yaml.safe_dump(spec, sort_keys=False), fixed)


def variant_of(chance: random.Random, layout: str) -> Fields:
    """Return a variant as a spec declares it."""
    declared = Declared(chance)
    masks = Masks(declared, layout)
    scores = Scores(declared, masks)
    variant: Fields = {}
    mask = masks.mask()
    if mask is not None:
        variant["mask"] = mask
    if chance.random() < 0.5:
        variant["score"] = scores.score()
    if chance.random() < 0.15:
        variant["sink"] = scores.sink()
    if chance.random() < 0.12:
        variant["dropout"] = True
    # Declarations for an expression that another one replaced are left out.
    said = f"{variant} {[tensor['shape'] for tensor in declared.tensors.values()]}"
    named = {"tensors": declared.tensors, "scalars": declared.scalars}
    for kind, values in named.items():
        used = {name: fields for name, fields in values.items() if re.search(rf"\b{name}\b", said)}
        if used:
            variant[kind] = used
    return variant


def element(chance: random.Random) -> Fields:
    """Return head dims and dtype."""
    usual = (64, 64, 64, 128, 128, 128, 96, 192, 256, 32)
    dims = [chance.choice(usual if chance.random() < 0.5 else HEAD_DIMS) for _ in ("qk", "v")]
    return {
        "head_dim": dims[0] if chance.random() < 0.7 else {"qk": dims[0], "v": dims[1]},
        "dtype": chance.choice(("bf16", "bf16", "bf16", "fp16", "fp16", "fp32")),
    }


# --- fields that are left out at will -----------------------------------------------------------------------


def _fields(chance: random.Random, variant: Fields, kernel: Fields, passes: list[str]) -> Fields:
    """Return some of the optional fields, for one backend or none by name."""
    narrow = kernel["dtype"] == "fp32"
    backend = "triton" if narrow else chance.choice(("cuda", "cuda", "triton"))
    fields = _cuda_fields(chance, variant) if backend == "cuda" else _triton_fields(chance)
    if "backward" in passes:
        fields |= _backward_fields(chance, variant, backend)
    said = backend == "cuda" or chance.random() < 0.6
    # Fields that only one backend has choose it; the others say which.
    if said or not {"loads", "warps"} & fields.keys():
        fields["backend"] = backend
    return {name: value for name, value in fields.items() if value is not None}


def some(chance: random.Random, share: float, *values: Any) -> Any:
    return chance.choice(values) if chance.random() < share else None


def _cuda_fields(chance: random.Random, variant: Fields) -> Fields:
    consumers = chance.choice((1, 2, 3))
    warps: Fields = {"consumer": consumers}
    fields: Fields = {
        "softmax": some(chance, 0.4, "exact_max", "lazy", "first_max"),
        "epilogue": some(chance, 0.3, "staged", "direct"),
        "order": some(chance, 0.3, "longest_first", "natural"),
        "fast_math": some(chance, 0.2, False, True),
    }
    if chance.random() < 0.4:
        fields["tile"] = {"n": chance.choice((16, 32, 48, 64, 80, 96, 112, 128, 160, 176))}
        if chance.random() < 0.5:
            fields["tile"]["m"] = 64 * consumers
    if chance.random() < 0.3:
        fields["pipeline"] = {"stages": chance.choice((2, 3, 4))}
    if consumers > 1 and chance.random() < 0.5:
        warps["schedule"] = chance.choice(("pingpong", "cooperative"))
    if chance.random() < 0.2:
        warps["registers"] = dict(
            zip(("producer", "consumer"), {1: (56, 256), 2: (40, 232), 3: (32, 160)}[consumers], strict=True)
        )
    fields["persistent"] = some(chance, 0.3, False, True)
    if "dropout" not in variant:
        fields["pack_gqa"] = some(chance, 0.25, True)
    if chance.random() < 0.3:
        warps["overlap"] = chance.choice((True, False))
    if chance.random() < 0.6:
        fields["warps"] = warps
    elif "m" in fields.get("tile", {}) and chance.random() < 0.5:
        del fields["tile"]["m"]
    return fields


def _triton_fields(chance: random.Random) -> Fields:
    fields: Fields = {
        "loads": some(chance, 0.5, "descriptor", "pointer"),
        "tile_map": some(chance, 0.3, "auto", "always", "never"),
        "fast_math": some(chance, 0.3, False, True),
        "epilogue": some(chance, 0.1, "direct"),
        "softmax": some(chance, 0.1, "exact_max"),
    }
    if fields["loads"] == "pointer" and chance.random() < 0.5:
        fields["alignment"] = "element"
    if chance.random() < 0.3:
        fields["tile"] = {"m": chance.choice((16, 32, 64, 128)), "n": chance.choice((16, 32, 64))}
    if chance.random() < 0.3:
        fields["warps"] = chance.choice((4, 4, 8))
    if chance.random() < 0.2:
        fields["pipeline"] = {"stages": chance.choice((1, 2, 3))}
    return fields


def _backward_fields(chance: random.Random, variant: Fields, backend: str) -> Fields:
    # Gradients of a variant's own tensors are added in no fixed order.
    learns = any(declared.get("grad") for kind in ("scalars", "tensors") for declared in variant.get(kind, {}).values())
    fields: Fields = {"deterministic": some(chance, 0.25, *((False,) if learns else (True, False)))}
    if chance.random() < 0.2 and backend == "cuda":
        fields["backward"] = {"backend": "triton"}
    elif chance.random() < 0.15 and backend == "triton":
        gradient = {
            "tile": {"m": chance.choice((32, 64)), "n": chance.choice((32, 64))},
            "warps": chance.choice((4, 8)),
        }
        fields["backward"] = {chance.choice(("dkdv", "dq")): gradient}
    return fields
