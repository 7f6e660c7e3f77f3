"""Bounds of random masks of the whole language against all pairs: bands, segments, single tiles, statistics of tiles.

The pairs come twice: from the checked expression, and from the text by an evaluator that shares no code with it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from attngen.inspect.cases import Case
from attngen.inspect.values import arguments_of
from attngen.lang.facts import KV_START, Q_START, Facts
from attngen.lang.variant import Variant
from tests.fuzz.evaluator import Evaluator, names_of_sequence
from tests.fuzz.language import Drawn, drawn, fill
from tests.lang.bruteforce import UnguardedError, World, check_bands, check_classify, check_statistics, mask_of
from tests.sampling import seeds

_HEADS = 3


def world_of(variant: Variant, made: Drawn, chance: random.Random) -> tuple[World, Mapping[str, Any], tuple[int, ...]]:
    """A call with few queries and keys, as brute force takes it, its arguments, and the sizes."""
    batch, rows, keys = 2, chance.randint(1, 24), chance.randint(1, 40)
    case = Case(
        "tiles",
        (rows,) * batch,
        (keys,) * batch,
        _HEADS,
        _HEADS,
        values=chance.choice(("random",) * 6 + ("least", "most")),
    )
    seed = chance.randrange(2**31)
    given = fill(made, arguments_of(variant, case, "dense", torch.Generator().manual_seed(seed)), seed)
    b = chance.randrange(batch)
    arrays = {
        name: value.double().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    }
    env = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    for tensor in variant.tensors:
        for extent, size in zip(tensor.shape, given[tensor.name].shape, strict=True):
            if isinstance(extent, str):
                env.setdefault(extent, size)
    env |= {
        "b": b, "seqlen_q": rows, "seqlen_k": keys, "total_q": batch * rows, "total_k": batch * keys, "heads": _HEADS,
        "kv_heads": 1, "hk": 0, Q_START.name: b * rows, KV_START.name: b * keys,
    }  # fmt: skip
    return World(env, arrays, _HEADS), given, (b, rows, keys, batch)


def check(seed: int, *, worlds: int = 3) -> Counter[str]:
    """Check the bounds of the mask of a seed in some calls; count tiles that are known to be empty or full."""
    made, chance = drawn(seed), random.Random(seed)
    variant, counts = made.checked, Counter[str]()
    facts = Facts.declared(variant.scalars, variant.tensors)
    for _ in range(worlds):
        world, given, (b, rows, keys, batch) = world_of(variant, made, chance)
        try:
            pairs = mask_of(variant.mask, world.env, world.arrays, world.heads)
        except UnguardedError:
            counts["unguarded"] += 1
            continue
        if made.variant.get("score") is None:
            assert np.array_equal(pairs, said(made, variant, given, (b, rows, keys, batch))), made.line
        counts["calls"] += 1
        empty, full = check_classify(variant.mask, world, chance, facts)
        check_bands(variant.mask, world, chance, facts)
        more_empty, more_full = check_statistics(variant.mask, world, chance, facts)
        counts.update(empty=empty + more_empty, full=full + more_full)
    return counts


def said(made: Drawn, variant: Variant, given: Mapping[str, Any], sizes: tuple[int, ...]) -> np.ndarray:
    """The pairs that the text of a mask shows."""
    b, rows, keys, batch = sizes
    totals = batch * rows, batch * keys
    names = names_of_sequence(b, rows, keys, b * rows, b * keys, _HEADS, 1, totals, "cpu")
    names |= {scalar.name: scalar.const for scalar in variant.scalars if scalar.const is not None}
    names |= {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    evaluator = Evaluator(names, tensors, made.variant.get("let", {}), torch.float32)
    return evaluator(str(made.variant["mask"])).broadcast_to(_HEADS, rows, keys).numpy()


@seeds(300, always=2)
def test_bounds_of_random_masks(seed: int) -> None:
    check(seed, worlds=2)


def main() -> None:
    """Check many seeds, and print each that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    chosen = parser.parse_args()
    counts, start = Counter[str](), time.monotonic()
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        try:
            counts.update(check(seed))
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}\n  {drawn(seed).line}", flush=True)
            counts["failed"] += 1
        counts["masks"] += 1
        if time.monotonic() - start > chosen.seconds:
            break
    print(dict(counts), f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
