"""Machine code of sm90: arithmetic, logic and comparisons of integers, and conversions as divisions use them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attngen.compile.emulate import sass_integers as integers
from attngen.compile.emulate.program import NOWHERE, Guard, Step
from attngen.compile.emulate.sass_build import PREDICATE, Build, Handler, only, split
from attngen.compile.emulate.sass_operands import Source, inverted, negated
from attngen.compile.emulate.sass_text import SassInstruction
from attngen.compile.emulate.values import (
    WORD,
    bits_of_float,
    is_set,
    lut,
    permuted,
    reciprocal,
    rounded_up,
    signed,
    truncated,
)


def _add(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "X", "64")
    result, carries, rest = split(i.operands)
    if "64" in found:
        if carries or len(rest) != 3:
            raise ValueError("operands")
        sources = [source for text in rest for source in build.operands.pair(text.removeprefix("-"))]
        compute = integers.sum_of_longs(*[-1 if text.startswith("-") else 1 for text in rest])
        return build.compute(compute, sources, build.operands.result(result, 2), guard)
    sources = [*build.words(rest[:3]), *map(build.operands.predicate, rest[3:])]
    if ("X" in found) != (len(rest) > 3):
        raise ValueError("operands")
    if len(carries) > 2:
        raise ValueError("carries")
    results = [*build.operands.result(result), *(build.operands.result(c)[0] for c in carries)]
    results += [NOWHERE] * (3 - len(results))
    return build.compute(integers.sum_and_carries, sources, results, guard)


def _add_two(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i)
    return build.compute(
        lambda a, b: a + b & WORD, build.words(i.operands[1:3]), build.operands.result(i.operands[0]), guard
    )


def _multiply(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "U32", "HI", "WIDE", "MOV", "IADD", "SHL", "X")
    result, carries, rest = split(i.operands)
    is_signed = "U32" not in found
    if len(carries) > 1 or ("X" in found) != (len(rest) > 3):
        raise ValueError("operands")
    carry_in = [build.operands.predicate(text) for text in rest[3:]]
    if "WIDE" in found:
        sources = [*build.words(rest[:2]), *build.operands.pair(rest[2].removeprefix("-")), *carry_in]
        _plain(sources)
        results = [*build.operands.result(result, 2), *(build.operands.result(c)[0] for c in carries)]
        results += [NOWHERE] * (3 - len(results))
        subtracts = rest[2].startswith("-")
        if subtracts and (carries or carry_in):
            raise ValueError("negated")
        return build.compute(integers.wide_product_sum(is_signed, -1 if subtracts else 1), sources, results, guard)
    if carries:
        raise ValueError("carries")
    if "HI" in found:
        sources = [*build.words(rest[:2]), *build.operands.pair(rest[2]), *carry_in]
        _plain(sources)
        return build.compute(integers.high_product_sum(is_signed), sources, build.operands.result(result), guard)
    sources = [*build.words(rest[:3]), *carry_in]
    return build.compute(integers.product_sum, sources, build.operands.result(result), guard)


def _plain(sources: Sequence[Source]) -> None:
    if any(source.transform in (negated, inverted) for source in sources):
        raise ValueError("negated")


def _lea(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "HI", "X", "SX32")
    result, carries, rest = split(i.operands)
    results = [*build.operands.result(result), *(build.operands.result(c)[0] for c in carries)]
    results += [NOWHERE] * (2 - len(results))
    carry_in = []
    if "X" in found:
        *rest, text = rest
        carry_in = [build.operands.predicate(text)]
    if rest[0][0] in "-~":
        raise ValueError("negated")
    a, b = build.words(rest[:2])
    if not found:
        return build.compute(integers.shifted_sum, [a, b, *build.words(rest[2:])], results, guard)
    if "HI" not in found or len(results) != 2:
        raise ValueError("operands")
    if "SX32" in found:
        high, count = Source(a.slot, _sign_of(a)), rest[2]
    else:
        high, count = build.operands.word(rest[2]), rest[3]
    return build.compute(integers.high_shifted_sum, [a, b, high, *build.words([count]), *carry_in], results, guard)


def _sign_of(source: Source) -> Callable[[Any], int]:
    transform = source.transform
    return lambda value: WORD if (value if transform is None else transform(value)) >> 31 & 1 else 0


def _logic(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i, "LUT")
    operands = list(i.operands)
    test = operands.pop(0) if PREDICATE.fullmatch(operands[0]) else None
    result, a, b, c, table, other = operands
    if other not in ("!PT", "!UPT"):
        raise ValueError("predicate")
    rows = int(table, 0)
    places = build.operands.result(result)
    if test is None:
        return build.compute(lambda a, b, c: lut(a, b, c, rows), build.words([a, b, c]), places, guard)

    def compute(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        value = lut(a, b, c, rows)
        return is_set(value), value

    return build.compute(compute, build.words([a, b, c]), [*build.operands.result(test), *places], guard)


def _predicate_logic(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i, "LUT")
    results = [build.operands.result(text)[0] for text in i.operands[:2]]
    sources = [build.operands.predicate(text) for text in i.operands[2:5]]
    first, second = (integers.predicate_lut(int(text, 0)) for text in i.operands[5:7])
    return build.compute(lambda *p: (first(*p), second(*p)), sources, results, guard)


def _compare(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    name, *rest = i.modifiers
    (join,) = set(rest) - {"U32", "EX"}
    results = [build.operands.result(text)[0] for text in i.operands[:2]]
    sources = [*build.words(i.operands[2:4]), *map(build.operands.predicate, i.operands[4:])]
    if len(sources) != 3 + ("EX" in rest):
        raise ValueError("operands")
    compute = integers.compare(name, "U32" not in rest, join, "EX" in rest)
    return build.compute(compute, sources, results, guard)


def _shift(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "L", "R", "W", "HI", "U32", "S32", "U64", "S64")
    compute = integers.shift(
        left="L" in found,
        high="HI" in found,
        bits=64 if found & {"U64", "S64"} else 32,
        is_signed=bool(found & {"S32", "S64"}),
        wraps="W" in found,
    )
    return build.compute(compute, build.words(i.operands[1:4]), build.operands.result(i.operands[0]), guard)


def _extreme(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    make = integers.extreme if i.name in ("VIMNMX", "IMNMX") else integers.sum_extreme
    sources = [*build.words(i.operands[1:-1]), build.operands.predicate(i.operands[-1])]
    if i.name == "VIMNMX" and i.modifiers in (("S16x2",), ("U16x2",)):
        halves = integers.extreme_of_halves(is_signed=i.modifiers == ("S16x2",))
        return build.compute(halves, sources, build.operands.result(i.operands[0]), guard)
    found = only(i, "U32", "S32", "RELU")
    compute = make("U32" not in found, "RELU" in found)
    return build.compute(compute, sources, build.operands.result(i.operands[0]), guard)


def _extreme_of_three(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "U32", "S32", "RELU")
    best = integers.extreme("U32" not in found, relu=False)
    last = integers.extreme("U32" not in found, "RELU" in found)
    sources = [*build.words(i.operands[1:4]), build.operands.predicate(i.operands[4])]
    return build.compute(
        lambda a, b, c, least: last(best(a, b, least), c, least), sources, build.operands.result(i.operands[0]), guard
    )


def _extend(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    compute = integers.extended_sign("U32" not in only(i, "U32"))
    return build.compute(compute, build.words(i.operands[1:3]), build.operands.result(i.operands[0]), guard)


def _permute(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i)
    result, a, selectors, b = i.operands
    return build.compute(permuted, build.words([a, b, selectors]), build.operands.result(result), guard)


def _unary(compute: Callable[[int], int], *allowed: str) -> Handler:
    def handler(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
        only(i, *allowed)
        return build.compute(compute, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)

    return handler


def _first_bit(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers != ("U32",):
        raise ValueError("modifiers")
    places = build.operands.result(i.operands[0])
    return build.compute(lambda a: (a & WORD).bit_length() - 1 & WORD, build.words(i.operands[1:2]), places, guard)


def _float_of_integer(build: Build, i: SassInstruction, guard: Guard | None) -> Step | None:
    computes: dict[tuple[str, ...], Callable[[int], int]] = {
        ("RP",): lambda a: rounded_up(signed(a)),
        ("U32", "RP"): rounded_up,
        ("F32", "S32"): lambda a: bits_of_float(signed(a)),
        ("F32", "U32"): bits_of_float,
    }
    compute = computes.get(i.modifiers)
    if compute is None:
        return None
    return build.compute(compute, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


def _integer_of_float(build: Build, i: SassInstruction, guard: Guard | None) -> Step | None:
    if i.modifiers != ("FTZ", "U32", "TRUNC", "NTZ"):
        return None
    return build.compute(truncated, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


def _function(build: Build, i: SassInstruction, guard: Guard | None) -> Step | None:
    if i.modifiers != ("RCP",) or not i.operands[1].startswith(("R", "UR")):
        return None
    return build.compute(reciprocal, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


def _half_constant(build: Build, i: SassInstruction, guard: Guard | None) -> Step | None:
    """Two halves times zero plus constants: a move."""
    if i.operands[1:3] != ("-RZ", "RZ") or len(i.operands) != 5:
        return None
    halves = [struct.unpack("<H", struct.pack("<e", float(text)))[0] for text in i.operands[3:]]
    value = halves[0] << 16 | halves[1]
    return build.compute(lambda: value, [], build.operands.result(i.operands[0]), guard)


HANDLERS: Mapping[str, Handler] = {
    "IADD3": _add,
    "UIADD3": _add,
    "VIADD": _add_two,
    "IMAD": _multiply,
    "UIMAD": _multiply,
    "LEA": _lea,
    "ULEA": _lea,
    "LOP3": _logic,
    "ULOP3": _logic,
    "PLOP3": _predicate_logic,
    "UPLOP3": _predicate_logic,
    "ISETP": _compare,
    "UISETP": _compare,
    "SHF": _shift,
    "USHF": _shift,
    "VIMNMX": _extreme,
    "IMNMX": _extreme,
    "VIADDMNMX": _extreme,
    "VIMNMX3": _extreme_of_three,
    "SGXT": _extend,
    "USGXT": _extend,
    "PRMT": _permute,
    "UPRMT": _permute,
    "IABS": _unary(lambda a: abs(signed(a)) & WORD),
    "POPC": _unary(lambda a: a.bit_count()),
    "UPOPC": _unary(lambda a: a.bit_count()),
    "BREV": _unary(lambda a: int(f"{a:032b}"[::-1], 2)),
    "UBREV": _unary(lambda a: int(f"{a:032b}"[::-1], 2)),
    "FLO": _first_bit,
    "UFLO": _first_bit,
    "I2F": _float_of_integer,
    "I2FP": _float_of_integer,
    "F2I": _integer_of_float,
    "MUFU": _function,
    "HFMA2": _half_constant,
}
