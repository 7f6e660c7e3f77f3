"""Random variants, as a spec declares them: masks and scores from the generators of the property tests of ``lang``.

Kept is what a comparison of numbers can judge: masks that show some pairs and compare integers only, and scores that
rounding, as the yardsticks do it, changes little. The rest is drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from attngen.errors import SpecError
from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.ir import Expr, Type, walk
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor, Variant
from tests.lang import bruteforce, randoms

Declared = dict[str, Any]

#: Data sets that an expression is tried on, and the least share of pairs that must be visible in most of them.
_TRIALS, _VISIBLE = 6, 0.03

#: The largest change of a score by float32 arithmetic, and by rounding the logits to 16 bits.
_ARITHMETIC, _LOGITS = 1e-4, 0.02


def typed(chance: random.Random) -> Declared:
    """Return a variant of operators and types of all kinds, most with a score."""
    while True:
        variant: Declared = {"mask": _typed_mask(chance)}
        if chance.random() < 0.75:
            variant["score"] = _typed_score(chance)
        variant["let"] = randoms.LET
        checked = _compiled(variant, randoms.SCALARS, randoms.TENSORS)
        if checked is not None and _is_fair(checked):
            return variant | _declarations(randoms.SCALARS, randoms.TENSORS)


def banded(chance: random.Random) -> Declared:
    """Return a variant whose mask bounds positions, also by tensors in ascending order."""
    while True:
        mask = bruteforce.Masks(chance).boolean(chance.choice([1, 2, 2, 3]))
        variant: Declared = {"mask": canonical(mask)}
        checked = _compiled(variant, bruteforce.DECLARED_SCALARS, bruteforce.TENSORS)
        if checked is None or any(node.type is Type.FLOAT for node in walk(checked.mask)):
            continue
        if _shows_pairs(checked.mask, chance):
            return variant | _declarations(bruteforce.DECLARED_SCALARS, bruteforce.TENSORS)


def _typed_mask(chance: random.Random) -> str | bool:
    form = chance.choice(["{}", "q_pos >= kv and ({})", "abs(gap) < 40 or ({})", "kv < 5 or ({}) and gap >= 0", ""])
    generator = randoms.Generator(chance.randrange(2**32), floats=False)
    return form.format(generator.boolean(chance.choice([1, 2, 2, 3]))) if form else True


def _typed_score(chance: random.Random) -> str:
    form = chance.choice(
        [
            "s + clamp({value}, -6, 6)",
            "clamp({value}, -8, 8)",
            "s * sigmoid({value})",
            "s if {condition} else clamp({value}, -6, 6)",
            "s - abs(gap) * 0.125 if {condition} else -inf",
        ]
    )
    generator = randoms.Generator(chance.randrange(2**32), logit=True)
    return form.format(
        value=generator.floating(chance.choice([1, 2, 2, 3])),
        condition=f"({randoms.Generator(chance.randrange(2**32), floats=False).boolean(1)})",
    )


def _compiled(variant: Declared, scalars: Sequence[Scalar], tensors: Sequence[Tensor]) -> Variant | None:
    """Return the checked variant; None where integers outgrow int64, which neither generator avoids."""
    mask = variant["mask"] if variant["mask"] is not True else None
    try:
        return compile_variant("fuzzed", mask, variant.get("score"), scalars, tensors, variant.get("let"))
    except SpecError as error:
        if "beyond int64" not in error.message:
            raise
        return None


def _declarations(scalars: Sequence[Scalar], tensors: Sequence[Tensor]) -> Declared:
    return {
        "scalars": {s.name: _limits(s) | {"type": _spelled(s.dtype)} for s in scalars},
        "tensors": {t.name: _facts(t) | {"dtype": _spelled(t.dtype), "shape": list(t.shape)} for t in tensors},
    }


def _spelled(dtype: str) -> str:
    return "float32" if dtype == "fp32" else dtype


def _limits(scalar: Scalar) -> Declared:
    return {name: value for name in ("min", "max", "const") if (value := getattr(scalar, name)) is not None}


def _facts(tensor: Tensor) -> Declared:
    facts: Declared = {}
    if tensor.range is not None:
        facts["range"] = dict(zip(("min", "max"), tensor.range, strict=True))
    if tensor.monotone is not None:
        facts["monotone"] = {"axis": tensor.monotone.axis, "order": tensor.monotone.order}
    return facts


# --- what numbers can judge ---------------------------------------------------------------------------------


def _is_fair(variant: Variant) -> bool:
    """Whether a variant shows pairs, and rounding changes its score little where it does."""
    shown = 0
    for seed in range(_TRIALS):
        names, logits = randoms.indices() | randoms.scalars(seed), randoms.logits(seed)
        visible = evaluate(variant.mask, names, randoms.tensors(seed)).broadcast_to(logits.shape)
        if variant.score is not None:
            exact = _score(variant.score, seed, logits, torch.float64)
            rounded = _score(variant.score, seed, logits, torch.float32)
            coarse = _score(variant.score, seed, logits.half(), torch.float64)
            if not (_change(exact, rounded) <= _ARITHMETIC and _change(exact, coarse) <= _LOGITS):
                return False
            visible = visible & (exact != -math.inf)
        shown += bool(visible.double().mean() > _VISIBLE)
    return shown > _TRIALS // 2


def _score(score: Expr, seed: int, logits: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    names = randoms.indices() | randoms.scalars(seed) | {"s": logits.to(compute)}
    tensors = {n: t.to(compute) if t.is_floating_point() else t for n, t in randoms.tensors(seed).items()}
    return evaluate(score, names, tensors, float_dtype=compute).double().broadcast_to(logits.shape)


def _change(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference; NaN if one is NaN, which no limit admits."""
    return float(torch.where(one == other, 0.0, one - other).abs().max())


def _shows_pairs(mask: Expr, chance: random.Random) -> bool:
    shown = []
    for _ in range(2 * _TRIALS):
        world = bruteforce.World.random(chance)
        try:
            pairs = bruteforce.mask_of(mask, world.env, world.arrays, world.heads)
        except bruteforce.UnguardedError:
            return False
        if pairs.size:
            shown.append(pairs.mean() > _VISIBLE)
    return sum(shown) > len(shown) // 2
