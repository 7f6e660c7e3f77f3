"""Random legal specs for cards without wgmma, by a seed: forward, split-KV and backward kernels by mma.sync."""

from __future__ import annotations

import random

from attngen.arch import ARCHES
from tests.fuzz.legal import Fields, Legal, element, fits, some, variant_of, written

#: Cards whose CUDA kernels multiply by mma.sync, and those that multiply numbers of 8 bits or convert them.
CARDS, IN_8_BITS = ("sm80", "sm86", "sm89", "sm120a"), ("sm89", "sm120a")

_DRAWS = 40


def legal_for_card(seed: int) -> Legal:
    """Return the spec of a seed."""
    chance = random.Random(f"{seed} for a card")
    arch = chance.choice(CARDS)
    kind = chance.choice(("trained", "trained", "forward", "split", "8 bits" if arch in IN_8_BITS else "forward"))
    layout = chance.choice(("dense", "dense", "varlen"))
    variant = variant_of(chance, layout)
    if kind in ("split", "8 bits"):
        variant.pop("dropout", None)
    kernel: Fields = {"variant": f"legal_{seed}", "layout": layout, **element(chance)}
    kernel["dtype"] = chance.choice(("bf16", "bf16", "fp16"))
    kernel["passes"] = ["forward", "backward"] if kind == "trained" else ["forward"]
    for _ in range(_DRAWS):
        fields = {"split": _split, "8 bits": _in_8_bits}.get(kind, _forward)(chance, arch, variant)
        if kind == "trained":
            fields["backward"] = some(chance, 0.5, {"backend": "cuda"}) if _has_backward(arch, kernel) else None
            fields["deterministic"] = None if _learns(variant) else some(chance, 0.25, True)
        given = {name: value for name, value in fields.items() if value is not None}
        candidate = written(seed, arch, variant, kernel | given, tuple(given))
        if fits(candidate):
            return candidate
    return written(seed, arch, variant, kernel, ())


def _has_backward(arch: str, kernel: Fields) -> bool:
    """Whether docs/cards.md lists a CUDA backward."""
    dims = kernel["head_dim"]
    columns = sum(dims.values()) if isinstance(dims, dict) else 2 * dims
    return bool(columns <= 320 or ARCHES[arch].shared_memory > 99 * 1024)


def _learns(variant: Fields) -> bool:
    """Whether a gradient of the variant is asked for, which has no fixed order."""
    return any(declared.get("grad") for kind in ("scalars", "tensors") for declared in variant.get(kind, {}).values())


def _forward(chance: random.Random, arch: str, variant: Fields) -> Fields:
    """Return fields of a forward that are left out at will."""
    del arch
    fields: Fields = {
        "backend": some(chance, 0.6, "cuda"),
        "softmax": some(chance, 0.3, "exact_max", "lazy"),
        "order": some(chance, 0.3, "longest_first", "natural"),
    }
    if any(value is not None for value in fields.values()):
        fields["backend"] = "cuda"
    if fields["backend"] == "cuda":
        warps = chance.choice((4, 8))
        fields["warps"] = some(chance, 0.4, warps)
        if chance.random() < 0.4:
            fields["tile"] = {"n": chance.choice((16, 32, 64, 128))}
            if fields["warps"] and chance.random() < 0.5:
                fields["tile"]["m"] = chance.choice((16, 32)) * warps
        fields["pipeline"] = some(chance, 0.3, *({"stages": stages} for stages in (2, 3, 4, 5)))
        if "dropout" not in variant:
            fields["pack_gqa"] = some(chance, 0.25, True)
    return fields


def _split(chance: random.Random, arch: str, variant: Fields) -> Fields:
    """Return fields of a split-KV forward."""
    del variant
    cached = arch in IN_8_BITS and chance.random() < 0.4
    return {
        "layout": chance.choice(("dense", "varlen", "paged")),
        "split_kv": True,
        "dtype": "bf16" if cached else None,
        "head_dim": chance.choice((64, 128, 128, 256, 32, 96, 192)) if cached else None,
        "kv_dtype": "fp8_e4m3" if cached else None,
        "backend": some(chance, 0.5, "cuda"),
        "pipeline": some(chance, 0.2, {"stages": 2}, {"stages": 3}),
        "softmax": some(chance, 0.3, "exact_max", None),
    }


def _in_8_bits(chance: random.Random, arch: str, variant: Fields) -> Fields:
    """Return fields of a forward of quantized q, k and v."""
    del arch, variant
    dims = [chance.choice((64, 128, 128, 256, 32, 96, 80, 192)) for _ in ("qk", "v")]
    return {
        "dtype": "fp8_e4m3",
        "head_dim": dims[0] if chance.random() < 0.7 else {"qk": dims[0], "v": dims[1]},
        "backend": "cuda",
        "out_dtype": some(chance, 0.3, "bf16", "fp16"),
        "pack_gqa": some(chance, 0.2, True),
        "tile": some(chance, 0.3, {"n": 32}, {"n": 64}),
    }
