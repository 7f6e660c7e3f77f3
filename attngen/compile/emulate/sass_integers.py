"""What operations of machine code on integers compute: words in, words and carries out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngen.compile.emulate.values import (
    COMPARISONS,
    LONG,
    UNKNOWN,
    WORD,
    Undecided,
    bits_of,
    both,
    choose,
    differ,
    either,
    signed,
    word_of,
)

Compute = Callable[..., Any]


def sum_and_carries(*values: int) -> tuple[int, bool, bool]:
    """Return a sum, and whether it carries once and twice."""
    total = sum(values)
    return total & WORD, total >> 32 >= 1, total >> 32 >= 2


def sum_of_longs(*signs: int) -> Compute:
    """Return a function that sums numbers of two words each, with these signs."""

    def compute(*words: int) -> tuple[int, int]:
        total = sum(sign * (words[2 * i] | words[2 * i + 1] << 32) for i, sign in enumerate(signs))
        return total & WORD, total >> 32 & WORD

    return compute


def product_sum(a: int, b: int, c: int, carry: bool = False) -> int:
    """Return the lower word of ``a * b + c``."""
    return a * b + c + carry & WORD


def wide_product_sum(is_signed: bool, sign: int = 1) -> Compute:
    """Return a function that computes ``a * b + sign * c`` in two words, for c of two words, and whether it carries."""

    def compute(a: int, b: int, low: int, high: int, carry: bool = False) -> tuple[int, int, bool]:
        product = signed(a) * signed(b) if is_signed else a * b
        total = (product & LONG) + sign * (low | high << 32) + carry
        return total & WORD, total >> 32 & WORD, total >> 64 > 0

    return compute


def high_product_sum(is_signed: bool) -> Compute:
    """Return a function that computes the upper word of ``a * b + c``, for c of two words."""
    wide = wide_product_sum(is_signed)
    return lambda a, b, low, high: wide(a, b, low, high)[1]


def shifted_sum(a: int, b: int, shift: int) -> tuple[int, bool]:
    """Return ``(a << shift) + b`` and whether it carries."""
    total = (a << shift & WORD) + b
    return total & WORD, total >> 32 > 0


def high_shifted_sum(a: int, b: int, high: int, shift: int, carry: bool = False) -> tuple[int, bool]:
    """Return b and the upper word of ``high:a << shift``, and whether the sum carries."""
    total = ((a | high << 32) << shift >> 32 & WORD) + b + carry
    return total & WORD, total >> 32 > 0


def shift(left: bool, high: bool, bits: int, is_signed: bool, wraps: bool) -> Compute:
    """Return a function that shifts the two words ``high:low`` and returns one of them: the upper one if ``high``."""

    def compute(low: int, count: int, top: int) -> int:
        count = count & bits - 1 if wraps else min(count, bits)
        value = low | top << 32
        if left:
            value = value << count
        elif is_signed:
            value = signed(value, 64) >> count
        else:
            value >>= count
        return value >> 32 & WORD if high else value & WORD

    return compute


def compare(name: str, is_signed: bool, join: str, extended: bool) -> Compute:
    """Return a function that compares two words, and joins the result, and its opposite, with a predicate.

    ``extended``: the words are upper ones, and the last predicate is the comparison of the lower ones.
    """
    test = COMPARISONS[name.lower()]
    combine = {"AND": both, "OR": either, "XOR": differ}[join]

    def words(a: int, b: int) -> bool:
        return test(signed(a), signed(b)) if is_signed else test(a, b)

    def compute(a: Any, b: Any, other: Any, lower: Any = True) -> tuple[Any, Any]:
        try:
            result = lower if extended and a == b else words(a, b)
        except Undecided:
            result = UNKNOWN
        opposite = UNKNOWN if result is UNKNOWN else not result
        return combine(result, other), combine(opposite, other)

    return compute


def extreme(is_signed: bool, relu: bool) -> Compute:
    """Return a function that computes the lesser of two words if a predicate holds, else the greater."""

    def compute(a: int, b: int, least: bool) -> int:
        if is_signed:
            a, b = signed(a), signed(b)
        result = min(a, b) if least else max(a, b)
        return max(result, 0) & WORD if relu else result & WORD

    return compute


def extreme_of_halves(is_signed: bool) -> Compute:
    """Return a function that computes ``extreme`` of the lower halves of two words, and of the upper ones."""

    def value(half: int) -> int:
        return signed(half, 16) if is_signed else half

    def compute(a: Any, b: Any, least: bool) -> Any:
        (first, lost), (second, unknown) = bits_of(a), bits_of(b)
        result, mask = 0, 0
        for at in (0, 16):
            x, y = first >> at & 0xFFFF, second >> at & 0xFFFF
            if (lost | unknown) >> at & 0xFFFF:
                mask |= 0xFFFF << at
            else:
                result |= (min if least else max)(x, y, key=value) << at
        return word_of(result, mask)

    return compute


def sum_extreme(is_signed: bool, relu: bool) -> Compute:
    """Return a function that computes ``extreme`` of ``a + b`` and c."""
    best = extreme(is_signed, relu)
    return lambda a, b, c, least: best(a + b & WORD, c, least)


def extended_sign(is_signed: bool) -> Compute:
    """Return a function that keeps the lower bits of a word, and fills the others with their sign or with zeros."""

    def compute(a: int, bits: int) -> int:
        bits = min(bits, 32)
        return signed(a, bits) & WORD if is_signed and bits else a & (1 << bits) - 1

    return compute


def predicate_lut(table: int) -> Compute:
    """Return a function that looks three predicates up in a table."""

    def compute(a: Any, b: Any, c: Any) -> Any:
        rows = {
            bool(table >> (4 * x + 2 * y + z) & 1)
            for x in ((False, True) if a is UNKNOWN else (a,))
            for y in ((False, True) if b is UNKNOWN else (b,))
            for z in ((False, True) if c is UNKNOWN else (c,))
        }
        return rows.pop() if len(rows) == 1 else UNKNOWN

    return compute


def select(a: Any, b: Any, condition: Any) -> Any:
    """Return a if the condition holds, else b."""
    return choose(condition, a, b)


def packed(*predicates: Any) -> int:
    """Return predicates as the bits of a word."""
    return sum(bool(predicate) << i for i, predicate in enumerate(predicates))
