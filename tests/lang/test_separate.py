"""Conditions that are taken apart into values of rows and of keys: the same truth, and what is left for each pair."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attngen.lang.check import compile_variant
from attngen.lang.declared import Scalar, Tensor
from attngen.lang.divisors import divisors, with_symbols
from attngen.lang.facts import Facts
from attngen.lang.ir import Expr, Op, Type, rewrite
from attngen.lang.printing import canonical
from attngen.lang.separate import KEYS, ROWS, asked, costly_values, narrow_tensors
from attngen.lang.variant import Variant
from tests.lang.bruteforce import evaluate
from tests.sampling import sampled

SIZES = [Scalar(name, "int32", min=1, max=4096) for name in ("n", "m", "w")] + [Scalar("far", "int32")]
DOC = Tensor("doc", "int32", ("seqlen_k",))


def made(mask: str) -> Variant:
    """Return a variant over the declarations that its mask reads."""
    scalars = [scalar for scalar in SIZES if scalar.name in mask]
    return compile_variant("own", mask, None, scalars, [DOC] if "doc" in mask else [])


def left(mask: str, along: str = "kv") -> str:
    """Rest of a mask for each pair, with divisors spelled out."""
    chosen = made(mask)
    _, rest = asked(chosen, Facts.of(chosen), along)  # type: ignore[arg-type]
    return canonical(plain(rest, chosen))


def plain(expr: Expr, chosen: Variant) -> Expr:
    """Return an expression without symbols, and with logical operators for those on bits of conditions."""
    back = {each.symbol: each.expr for each in divisors(chosen)}

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Op) and node.op in ("bitand", "bitor") and node.type is Type.BOOL:
            return Op(node.op.removeprefix("bit"), node.args, Type.BOOL)
        return back.get(node)  # type: ignore[arg-type]

    return rewrite(expr, rule)


@pytest.mark.parametrize(
    ("mask", "rest"),
    [
        ("(q_pos - kv) % n == 0", "q_pos % n == kv % n"),
        ("(kv - q) % 3 != 0", "q % 3 != kv % 3"),
        ("(q + kv) % n == 0", "-q % n == kv % n"),
        ("abs(q - kv - 1) % n == 0", "(q - 1) % n == kv % n"),
        ("(q // n + kv // n) % 2 == 0", "-(q // n) % 2 == kv // n % 2"),
        ("abs(q % n - kv % n) <= w", "kv % n >= q % n - w and kv % n <= q % n + w"),
        ("abs(q % n - kv % n) > w", "kv % n < q % n - w or kv % n > q % n + w"),
        ("max(q % n - kv % n, kv // n - q // n) < w", "kv % n > q % n - w and kv // n < q // n + w"),
        ("(q - kv) % n < w", "(q % n - kv % n + n if q % n - kv % n < 0 else q % n - kv % n) < w"),
        ("abs(q % 8 - kv % 8) <= w", "abs(q % 8 - kv % 8) <= w"),  # shifts and bits cost nothing
        ("abs((q ^ kv) % n - 3) <= w", "abs((q ^ kv) % n - 3) <= w"),  # one for each pair
        ("(q - kv + far) % n == 0", "(q - kv + far) % n == 0"),  # an int64
    ],
)
def test_the_rest_of_a_mask_for_each_pair(mask: str, rest: str) -> None:
    assert left(mask) == rest


MASKS = (
    "(q_pos - kv) % n == 0", "(q + kv) % n == 0 or kv % m < 2", "abs(q_pos - kv) % n != 0", "(q_pos - kv) % n < w",
    "(kv - q_pos - 5) % n != 1", "max(abs(q // n - kv // n), abs(q % n - kv % n)) <= w",
    "min(abs(q // n - kv // n), abs(q % n - kv % n)) > w", "w >= abs(q % n - kv % m)", "kv // n + q % m >= w",
    "q % n - 2 * (kv % m) < kv // w", "3 * (kv % n) == q % m", "(q // n + kv // n) % 2 == 0",
    "(kv // n < q // n if kv < w else q // n == kv // n) if q >= w else (q // n == kv // n and kv < w)",
    "not (q // n == kv // n and (q - kv) % m == 0)", "doc[kv] // n == doc[q] // n or (q - kv) % m == 1",
)  # fmt: skip


@sampled(always=6, along=["kv", "q"], mask=[*MASKS])
def test_nothing_is_seen_differently(mask: str, along: str) -> None:
    """By Python's integers, over queries before the first key and odd sizes."""
    chosen, r = made(mask), random.Random(mask)
    facts = Facts.of(chosen)
    intervals, rest = asked(chosen, facts, along)  # type: ignore[arg-type]
    rest = plain(rest, chosen)
    for _ in range(12):
        scalars = {scalar.name: r.choice([1, 2, 3, 7, 64, 641, 4096]) for scalar in SIZES[:3]}
        queries, keys = r.randint(1, 40), r.randint(1, 40)
        arrays = {"doc": np.array([r.randint(-99, 99) for _ in range(max(queries, keys))])}
        for _ in range(60):
            q, kv = r.randrange(queries), r.randrange(keys)
            env = {**scalars, "q": q, "kv": kv, "q_pos": q + keys - queries, "seqlen_q": queries, "seqlen_k": keys}
            seen = any(
                (each.lo is None or kv >= evaluate(plain(each.lo, chosen), env, arrays))
                and (each.hi is None or kv < evaluate(plain(each.hi, chosen), env, arrays))
                for each in intervals
            )
            shown = seen and bool(evaluate(rest, env, arrays))
            assert shown == bool(evaluate(chosen.mask, env, arrays)), env


@pytest.mark.parametrize(
    ("mask", "of_key", "of_query"),
    [
        ("q_pos >= kv and q_pos // n == kv // n", [], ["q_pos // n * n"]),
        ("(q - kv) % n == 0", ["kv % n"], ["q % n"]),
        ("q // n // m == kv // n % m", ["kv // n % m"], ["q // n // m"]),
        ("kv % n < 3 or q % n > kv % n", ["kv % n"], ["q % n"]),
        ("(kv % n < 3) != (q % m > 3)", ["kv % n < 3"], ["q % m > 3"]),
        ("doc[kv] // n == doc[q] // n", ["doc[kv] // n"], ["doc[q] // n"]),
        ("(q ^ kv) % n == 0", [], []),
        ("kv // 64 % 2 == q // 64 % 2", [], []),
    ],
)
def test_intervals_computed_once_for_a_key_or_a_query(mask: str, of_key: list[str], of_query: list[str]) -> None:
    chosen = made(mask)
    facts = with_symbols(Facts.of(chosen), chosen)
    for along, names, others, wanted in (("kv", KEYS, ROWS, of_key), ("q", ROWS, KEYS, of_query)):
        intervals, rest = asked(chosen, facts, along)  # type: ignore[arg-type]
        ends = [end for each in intervals for end in (each.lo, each.hi) if end is not None]
        values = costly_values([rest, *ends], names, others, narrow_tensors(chosen))
        assert [canonical(plain(value, chosen)) for value in values] == wanted
