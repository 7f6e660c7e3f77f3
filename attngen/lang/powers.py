"""Polynomials that take the place of exp2 where a score is bounded: P straight from the function that bounds it.

exp2 and the functions of a score share the MUFU, which computes 16 values a clock where 128 multiply-adds fit. On an
interval of a few units a polynomial of degree 4 to 6 is as good as exp2 for a P of 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from attngen.lang.bounded import score_bounds
from attngen.lang.folding import LOG2E, PRODUCT, Logit
from attngen.lang.intervals import bounds
from attngen.lang.ir import Const, Expr, Op, Type, names, walk
from attngen.lang.ranges import Range
from attngen.lang.simplify import mul

#: Largest relative error of P: a sixteenth of that of a rounding to bfloat16.
_ERROR = 2.0**-13

#: Highest degree: with more terms, multiply-adds would take longer than exp2.
_DEGREE = 6

#: Places at which an error is looked for.
_PLACES = 257

#: Functions of one MUFU instruction with ``fast_math``.
_SPECIAL = frozenset({"cos", "exp", "exp2", "log", "log2", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh"})


@dataclass(frozen=True, slots=True)
class Powers:
    """``sum(terms[i] * argument ** i)`` is ``exp2(logit - constant)``, the logit in units of log2."""

    argument: Expr
    terms: tuple[float, ...]


def special_functions(logit: Logit) -> int:
    """MUFU instructions that a logit of a pair takes."""
    return sum(
        isinstance(node, Op) and node.op in _SPECIAL and PRODUCT.name in names(node) for node in walk(logit.value)
    )


def powers_of(logit: Logit, score: Expr | None, ranges: Mapping[str, Range], constant: float) -> Powers | None:
    """Return the polynomial of a logit whose multiplier is a number; None if its score is not bounded, or if no
    polynomial of so few terms is exact enough.

    ``constant``: what is subtracted from all logits, in units of log2. A sigmoid is replaced by the tanh of which it is
    made, so that scaling and adding one half are a part of the polynomial.
    """
    ends, number = score_bounds(score, ranges), bounds(logit.multiplier, {LOG2E.name: (math.log2(math.e),) * 2})
    if ends is None or not number[0] or number[1] - number[0] > 1e-4 * abs(number[0]):
        return None
    factor = math.log2(math.e) if logit.multiplier == LOG2E else sum(number) / 2
    low, high = (end * math.log2(math.e) / factor for end in ends)
    argument = argument_of(logit.value)
    if argument != logit.value:
        low, high, factor, constant = -1.0, 1.0, factor / 2, constant - factor / 2
    terms = _terms(low, high, factor, constant)
    return Powers(argument, terms) if terms else None


def argument_of(value: Expr) -> Expr:
    """Base of the powers of a logit's value: the value itself, or the tanh of which a sigmoid is made."""
    match value:
        case Op(op="sigmoid", args=(inner,)):
            return Op("tanh", (_halved(inner, Const(0.5, Type.FLOAT)),), Type.FLOAT)
    return value


def _halved(inner: Expr, half: Const) -> Expr:
    """Half of an argument, with the factor beside another one that pairs share."""
    match inner:
        case Op(op="mul", args=(product, scale)) if PRODUCT.name not in names(scale):
            return mul(product, mul(scale, half))
    return mul(inner, half)


@lru_cache(maxsize=64)
def _terms(low: float, high: float, factor: float, constant: float) -> tuple[float, ...]:
    """Terms of the shortest polynomial that is ``2 ** (factor * x - constant)`` from ``low`` to ``high`` within
    ``_ERROR``; none if there is none."""
    middle, reach = (low + high) / 2, (high - low) / 2

    def function(x: float) -> float:
        return 2.0 ** (factor * x - constant)

    if not 0 < factor * reach < 8:
        return ()
    for degree in range(2, _DEGREE + 1):
        nodes = [middle + reach * math.cos(math.pi * (i + 0.5) / (degree + 1)) for i in range(degree + 1)]
        terms = _through(nodes, [function(x) for x in nodes])
        places = [low + (high - low) * i / (_PLACES - 1) for i in range(_PLACES)]
        if max(abs(_value(terms, x) / function(x) - 1) for x in places) <= _ERROR:
            return terms
    return ()


def _through(nodes: list[float], values: list[float]) -> tuple[float, ...]:
    """Terms of the polynomial through points, by divided differences."""
    differences = list(values)
    for level in range(1, len(nodes)):
        for i in range(len(nodes) - 1, level - 1, -1):
            differences[i] = (differences[i] - differences[i - 1]) / (nodes[i] - nodes[i - level])
    terms: list[float] = []
    for node, difference in zip(reversed(nodes), reversed(differences), strict=True):
        shifted = [0.0, *terms]
        for i, term in enumerate(terms):
            shifted[i] -= node * term
        shifted[0] += difference
        terms = shifted
    return tuple(terms)


def _value(terms: tuple[float, ...], x: float) -> float:
    result = 0.0
    for term in reversed(terms):
        result = result * x + term
    return result
