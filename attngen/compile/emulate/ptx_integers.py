"""What PTX's operations on integers and predicates compute, by their opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngen.compile.emulate.values import (
    COMPARISONS,
    UNKNOWN,
    WORD,
    Undecided,
    bits_of_float,
    both,
    choose,
    differ,
    either,
    lut,
    permuted,
    signed,
)

Compute = Callable[..., Any]


def compute_of(name: str, modifiers: list[str]) -> Compute | None:
    """Return a function that computes an integer operation, such as ``add`` with ``["s32"]``; None for any other."""
    kind = modifiers[-1] if modifiers else ""
    options = tuple(modifiers[:-1])
    if kind == "pred":
        return _PREDICATES.get(name) if not options else None
    if kind[:1] not in ("s", "u", "b") or not kind[1:].isdigit():
        return None
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    if name == "cvt":
        return None
    if name == "mul" or name == "mad":
        return _multiply(options, bits, is_signed)
    if name in ("min", "max"):
        return _extreme(name, options, bits, is_signed)
    if name == "selp":
        return lambda a, b, p: choose(p, a, b)
    if name == "setp":
        return _compare(options, bits, is_signed)
    if name == "shf":
        return _funnel(options)
    if options:
        return None
    if name in ("div", "rem"):
        return _divide(name, bits, is_signed)
    if name == "shr":
        return _shift_right(bits, is_signed)
    if name == "bfe":
        return _extract(bits, is_signed)
    return _simple(name, bits)


def _simple(name: str, bits: int) -> Compute | None:
    mask = (1 << bits) - 1
    table: dict[str, Compute] = {
        "add": lambda a, b: (a + b) & mask,
        "sub": lambda a, b: (a - b) & mask,
        "and": lambda a, b: 0 if _zero(a) or _zero(b) else a & b & mask,
        "or": lambda a, b: (a | b) & mask,
        "xor": lambda a, b: (a ^ b) & mask,
        "not": lambda a: ~a & mask,
        "neg": lambda a: -a & mask,
        "abs": lambda a: abs(signed(a, bits)) & mask,
        "cnot": lambda a: int(a & mask == 0),
        "mov": lambda a: a & mask,
        "shl": lambda a, b: (a << b) & mask if b < bits else 0,
        "popc": lambda a: (a & mask).bit_count(),
        "clz": lambda a: bits - (a & mask).bit_length(),
        "brev": lambda a: int(f"{a & mask:0{bits}b}"[::-1], 2),
        "prmt": permuted,
        "lop3": lut,
        "bfi": _insert(bits),
    }
    return table.get(name)


def _zero(value: Any) -> bool:
    return value is not UNKNOWN and value == 0


_PREDICATES: dict[str, Compute] = {
    "and": both,
    "or": either,
    "xor": differ,
    "not": lambda a: not a,
    "mov": lambda a: a if a is UNKNOWN else bool(a),
}


def _multiply(options: tuple[str, ...], bits: int, is_signed: bool) -> Compute | None:
    mask = (1 << bits) - 1

    def product(a: int, b: int) -> int:
        return signed(a, bits) * signed(b, bits) if is_signed else (a & mask) * (b & mask)

    if options == ("lo",):
        return lambda a, b, c=0: (a * b + c) & mask
    if options == ("hi",):
        return lambda a, b, c=0: ((product(a, b) >> bits) + c) & mask
    if options == ("wide",):
        return lambda a, b, c=0: (product(a, b) + c) & (1 << 2 * bits) - 1
    return None


def _extreme(name: str, options: tuple[str, ...], bits: int, is_signed: bool) -> Compute | None:
    best = min if name == "min" else max
    mask = (1 << bits) - 1
    if not is_signed:
        return (lambda a, b: best(a & mask, b & mask)) if not options else None
    if options == ("relu",):
        return lambda a, b: max(best(signed(a, bits), signed(b, bits)), 0)
    return (lambda a, b: best(signed(a, bits), signed(b, bits)) & mask) if not options else None


def _compare(options: tuple[str, ...], bits: int, is_signed: bool) -> Compute | None:
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    compare = COMPARISONS.get(unsigned.get(options[0], options[0])) if options else None
    join = {(): None, ("and",): both, ("or",): either, ("xor",): differ}.get(options[1:], False)
    if compare is None or join is False:
        return None
    mask = (1 << bits) - 1

    def plain(a: int, b: int) -> bool:
        return compare(signed(a, bits), signed(b, bits)) if is_signed else compare(a & mask, b & mask)

    if join is None:
        return plain

    def joined(a: int, b: int, c: Any) -> Any:
        try:
            return join(plain(a, b), c)  # type: ignore[operator]
        except Undecided:
            return join(UNKNOWN, c)  # type: ignore[operator]

    return joined


def _divide(name: str, bits: int, is_signed: bool) -> Compute:
    mask = (1 << bits) - 1

    def divide(a: int, b: int) -> int:
        a, b = (signed(a, bits), signed(b, bits)) if is_signed else (a & mask, b & mask)
        if b == 0:
            raise Undecided
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return (quotient if name == "div" else a - b * quotient) & mask

    return divide


def _shift_right(bits: int, is_signed: bool) -> Compute:
    mask = (1 << bits) - 1
    if is_signed:
        return lambda a, b: (signed(a, bits) >> min(b, bits - 1)) & mask
    return lambda a, b: (a & mask) >> b if b < bits else 0


def _extract(bits: int, is_signed: bool) -> Compute:
    mask = (1 << bits) - 1

    def extract(a: int, start: int, length: int) -> int:
        start, length = start & 0xFF, length & 0xFF
        if length == 0:
            return 0
        if is_signed:
            top = min(start + length, bits)
            return (signed(a & (1 << top) - 1, top) >> min(start, top)) & mask
        return (a & mask) >> start & (1 << length) - 1

    return extract


def _insert(bits: int) -> Compute:
    def insert(a: int, b: int, start: int, length: int) -> int:
        field = ((1 << (length & 0xFF)) - 1) << (start & 0xFF) & (1 << bits) - 1
        return b & ~field | a << (start & 0xFF) & field

    return insert


def _funnel(options: tuple[str, ...]) -> Compute | None:
    if len(options) != 2 or options[0] not in ("l", "r") or options[1] not in ("wrap", "clamp"):
        return None
    left, wrap = options[0] == "l", options[1] == "wrap"

    def shift(a: int, b: int, count: int) -> int:
        count = count & 31 if wrap else min(count, 32)
        both_words = b << 32 | a
        return both_words << count >> 32 & WORD if left else both_words >> count & WORD

    return shift


def converted(to: str, of: str, rounding: str | None = None) -> Compute | None:
    """Return a function that converts an integer, of a type such as ``s32``, to another type or to a float32.

    None for other types.
    """
    if (to, rounding) == ("f32", "rn") and of in ("s32", "u32"):
        return (lambda a: bits_of_float(signed(a))) if of == "s32" else (lambda a: bits_of_float(a & WORD))
    if rounding is not None:
        return None
    if to[0] not in "sub" or of[0] not in "sub" or not (to[1:] + of[1:]).isdigit():
        return None
    mask, bits = (1 << int(to[1:])) - 1, int(of[1:])
    if of[0] == "s":
        return lambda a: signed(a, bits) & mask
    return lambda a: a & (1 << bits) - 1 & mask
