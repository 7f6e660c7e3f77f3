"""Integers of kernels in 32 bits: the same values as in 64, wherever scalars have no largest value."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from attngen.lang.bands import Bands, bands
from attngen.lang.facts import Facts
from attngen.lang.ir import Const, Expr, Op, Type, Var, holds_int64
from attngen.lang.overflow import narrow_divisors
from attngen.lang.ranges import INT32
from attngen.lang.segments import segments
from attngen.lang.simplify import FOLD
from attngen.plan import plan
from attngen.render.expressions import (
    KEYS,
    QUERIES,
    Along,
    facts_of,
    inward,
    known_ranges,
    narrowed,
    settled,
)
from tests.plan.specs import kernel_spec
from tests.sampling import sampled

MOST = 2**31 - 1
SIZES = (1, 2, 3, 64, 1000, 2**16 - 1, 2**16 + 1, 2**30, MOST)

MASKS = {
    "diffusion": (
        "blk(q) == blk(kv) and clean(q) == clean(kv) or clean(kv) and (blk(q) > blk(kv) or clean(q) and "
        "blk(q) >= blk(kv))",
        "{clean(x): 'x >= n', blk(x): '((x - n) if x >= n else x) // a'}",
        "n, a",
    ),
    "blocks": ("0 <= q_pos // a - kv // a and q_pos // a - kv // a < n", "{}", "a, n"),
    "product": ("q_pos >= kv and q_pos // (a * n) == kv // (a * n)", "{}", "a, n"),
    "window": ("q_pos >= kv and q_pos - kv < a * n", "{}", "a, n"),
    "slanted": ("q_pos >= kv and (q_pos - kv) * a < n * kv + c", "{}", "a, n, c"),
    "grid": ("kv // (a * n) % c == q // (a * n) % c", "{}", "a, n, c"),
}


def declared(name: str) -> tuple[str, list[str]]:
    mask, let, scalars = MASKS[name]
    names = scalars.split(", ")
    listed = ", ".join(f"{each}: {{type: int32, min: 1}}" for each in names)
    return f'variants:\n  own: {{mask: "{mask}", let: {let}, scalars: {{{listed}}}}}\n', names


def value(expr: Expr, names: Mapping[str, int]) -> int | bool:
    """Evaluate with exact integers. Every result that is an int32 of a kernel has to fit one."""
    match expr:
        case Const(value=number):
            return number  # type: ignore[return-value]
        case Var(name=name):
            return names[name]
        case Op(op="and", args=(a, b)):
            return value(a, names) and value(b, names)
        case Op(op="or", args=(a, b)):
            return value(a, names) or value(b, names)
        case Op(op="select", args=(c, a, b)):  # kernels compute both arms, but take one
            return value(a if value(c, names) else b, names)
        case Op(op=op, args=args):
            folded = FOLD[op](*(value(each, names) for each in args))
            assert expr.type is not Type.INT or holds_int64(expr) or INT32[0] <= folded <= INT32[1], expr
            return folded  # type: ignore[return-value]
    raise AssertionError(expr)


def operations(expr: Expr) -> int:
    """Count what is computed in int64, each once."""
    seen: set[Expr] = set()

    def walk(node: Expr) -> None:
        if isinstance(node, Op) and node not in seen:
            if holds_int64(node):
                seen.add(node)
            for each in node.args:
                walk(each)

    walk(expr)
    return len(seen)


@sampled(
    every=2,
    always=1,
    name=["product", "grid", "blocks", "diffusion", "slanted", "window"],
    along={"forward": KEYS, "backward": QUERIES},
)
def test_bounds_of_tiles_are_those_of_int64(name: str, along: Along) -> None:
    text, scalars = declared(name)
    passes = {"passes": "backward", "backward": "{backend: cuda}"} if along is QUERIES else {"backend": "cuda"}
    planned = plan(kernel_spec("own", declared=text, head_dim=128, **passes))
    intervals = bands(planned.variant.mask, facts_of(planned), over=along.axis)
    bounded = Bands(intervals.visible, (), exact=True)
    pairs = [*segments(bounded, along.tile, along.length, facts_of(planned)).partial]
    pairs += [inward(planned, each, along) for each in intervals.full]
    ends = [settled(planned, end, along) for pair in pairs for end in pair]
    exact = [narrowed(planned, end, along) for end in ends]
    if any(map(holds_int64, ends)):
        assert sum(map(operations, exact)) < sum(map(operations, ends))
    assert not any(map(holds_int64, exact)), "an end is an int32"
    rng = random.Random(0)
    tile = planned.tile_n if along is KEYS else planned.tile_m
    for _ in range(60):
        q, k = (rng.choice((1, 5, 127, 128, 129, 1000, 2**16 + 3, 2**30 - 1)) for _ in "qk")
        tiles = -(-(k if along is KEYS else q) // tile)
        q_lo, kv_lo = 128 * rng.randrange(-(-q // 128)), 128 * rng.randrange(-(-k // 128))
        q_hi, kv_hi = min(q_lo + 128, q) - 1, min(kv_lo + 128, k) - 1
        names = {
            "seqlen_q": q, "seqlen_k": k, "q_lo": q_lo, "q_hi": q_hi, "kv_lo": kv_lo, "kv_hi": kv_hi,
            "q_pos_lo": q_lo + k - q, "q_pos_hi": q_hi + k - q, along.tile.name: tile, along.tiles.name: tiles,
            along.whole.name: (k if along is KEYS else q) // tile,
            **{each: rng.choice(SIZES) for each in scalars},
        }  # fmt: skip
        for end, small in zip(ends, exact, strict=True):
            wanted, got = (min(max(int(value(each, names)), 0), tiles) for each in (end, small))
            assert wanted == got, (end, small, names)


@pytest.mark.parametrize("name", ["product", "grid"])
def test_divisors_are_no_wider_than_what_they_divide(name: str) -> None:
    text, scalars = declared(name)
    planned = plan(kernel_spec("own", declared=text, head_dim=128, backend="cuda"))
    mask = planned.variant.mask
    small = narrow_divisors(mask, Facts(known_ranges(planned)))
    assert operations(small) < operations(mask)
    rng = random.Random(0)
    for _ in range(200):
        names = {each: rng.choice(SIZES) for each in scalars}
        names |= {each: rng.choice((0, 1, 5, 1000, 2**30 - 2)) for each in ("q", "kv", "q_pos")}
        assert value(mask, names) == value(small, names)
