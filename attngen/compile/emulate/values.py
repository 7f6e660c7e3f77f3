"""Values of registers: unsigned integers, and a marker of values that are not known.

Words are 32 bits wide. A register holds the bits of a floating-point number, where they are known at all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

WORD = 0xFFFF_FFFF
LONG = 0xFFFF_FFFF_FFFF_FFFF


class Undecided(Exception):  # noqa: N818
    """A result that depends on a value that is not known."""


class Unknown:
    """A value that is not known. What is computed with it raises Undecided, which makes the result unknown."""

    def _undecided(self, *_: object) -> Any:
        raise Undecided

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __invert__ = _undecided
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __bool__ = __index__ = _undecided
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __floordiv__ = __rfloordiv__ = _undecided
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __mod__ = __rmod__ = __abs__ = _undecided
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


class Partial(Unknown):
    """A word of which the bits in ``mask`` are not known."""

    def __init__(self, value: int, mask: int) -> None:
        self.value = value & ~mask
        self.mask = mask


def bits_of(word: Any) -> tuple[int, int]:
    """Return the bits of a word that are known, and which are not."""
    if word is UNKNOWN:
        return 0, WORD
    return (word.value, word.mask) if isinstance(word, Partial) else (word, 0)


def word_of(value: int, mask: int) -> Any:
    """Return the word of which the bits in ``mask`` are not known."""
    if mask == 0:
        return value
    return UNKNOWN if mask == WORD else Partial(value, mask)


def merged(a: Any, b: Any) -> Any:
    """Return what is known of a value that is either of two."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a if a is b else UNKNOWN
    (first, mask), (second, other) = bits_of(a), bits_of(b)
    return word_of(first, mask | other | first ^ second) if (first | second) <= WORD else UNKNOWN


def is_set(word: Any) -> Any:
    """Return whether a word has a bit."""
    value, mask = bits_of(word)
    return True if value else UNKNOWN if mask else False


def signed(value: int, bits: int = 32) -> int:
    """Return the value of a two's complement number of ``bits``."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def both(a: Any, b: Any) -> Any:
    """Return ``a and b``: false as soon as one is, whatever the other."""
    if a is False or b is False:
        return False
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else True


def either(a: Any, b: Any) -> Any:
    """Return ``a or b``: true as soon as one is, whatever the other."""
    if a is True or b is True:
        return True
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else False


def differ(a: Any, b: Any) -> Any:
    """Return whether exactly one of two predicates holds."""
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else a is not b


def choose(condition: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where the condition holds, else ``b``."""
    if condition is UNKNOWN:
        return a if a is b or (a is not UNKNOWN and b is not UNKNOWN and a == b) else UNKNOWN
    return a if condition else b


def lut(a: Any, b: Any, c: Any, table: int) -> Any:
    """Return a word whose bits are looked up in ``table``, each by the three bits of a, b and c at its place."""
    words = [bits_of(word) for word in (a, b, c)]
    if not any(mask for _, mask in words):
        return _lut(a, b, c, table)
    choices = [(value, value | mask) if mask else (value,) for value, mask in words]
    results = [_lut(x, y, z, table) for x in choices[0] for y in choices[1] for z in choices[2]]
    unknown = 0
    for result in results:
        unknown |= result ^ results[0]
    return word_of(results[0], unknown)


def _lut(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result & WORD


def permuted(a: Any, b: Any, selectors: int) -> Any:
    """Return four bytes of the eight of ``b:a``, each by three bits of a selector; the fourth bit spreads the sign."""
    (low, low_mask), (high, high_mask) = bits_of(a), bits_of(b)
    return word_of(*(_permuted(part, selectors) for part in (low | high << 32, low_mask | high_mask << 32)))


def _permuted(value: int, selectors: int) -> int:
    data, result = value.to_bytes(8, "little"), bytearray(4)
    for place in range(4):
        selector = selectors >> 4 * place & 0xF
        byte = data[selector & 7]
        result[place] = (0xFF if byte >> 7 else 0) if selector & 8 else byte
    return int.from_bytes(result, "little")


def bits_of_float(value: float) -> int:
    """Return the bits of the float32 nearest to a number."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F80_0000 if value > 0 else 0xFF80_0000


def float_of_bits(bits: int) -> float:
    """Return the number that has these bits as a float32."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def rounded_up(value: int) -> int:
    """Return the bits of the least float32 that is not below an integer."""
    bits = bits_of_float(float(value))
    if float_of_bits(bits) < value:
        bits += 1 if value > 0 else -1
    return bits


def reciprocal(bits: int) -> int:
    """Return the bits of 1 / x."""
    value = float_of_bits(bits)
    return bits_of_float(1 / value) if value else 0x7F80_0000 | bits & 0x8000_0000


def truncated(bits: int) -> int:
    """Return a float32 as an unsigned integer, truncated towards zero and clamped to the range."""
    value = float_of_bits(bits)
    if value != value:  # a NaN
        return 0
    return WORD if value >= 2**32 else max(int(value), 0)


#: Comparisons by the name that both PTX and machine code give them.
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
