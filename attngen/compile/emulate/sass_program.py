"""The emulation of a kernel in sm90 machine code: each instruction as a step of a Program."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from attngen.compile.emulate import sass_integers as integers
from attngen.compile.emulate.control import END
from attngen.compile.emulate.program import (
    MACHINE,
    NOTHING,
    NOWHERE,
    Guard,
    Machine,
    Product,
    Program,
    Step,
    assign,
    forget,
    issue,
    jump,
    stop,
)
from attngen.compile.emulate.sass_calls import written_by_call
from attngen.compile.emulate.sass_operands import Operands, Source, applied, inverted, negated
from attngen.compile.emulate.sass_text import SassInstruction, read_sass
from attngen.compile.emulate.storing import store_step
from attngen.compile.emulate.values import (
    UNKNOWN,
    WORD,
    Undecided,
    Unknown,
    bits_of,
    bits_of_float,
    is_set,
    lut,
    permuted,
    reciprocal,
    rounded_up,
    signed,
    truncated,
    word_of,
)

_PREDICATE = re.compile(r"!?U?P[\dT]")
_GROUP = re.compile(r"gdesc\[(UR\d+)\]((?:\.tnsp[AB])*)")

#: What concerns only other threads, copies, caches and the order of things.
_NOTHING_NAMES = """
NOP BAR BSSY BSYNC BREAK CCTL CCTLL DEPBAR ERRBAR FENCE LDGDEPBAR MEMBAR NANOSLEEP RED REDG STG STSM UBLKCP UTMACCTL
UTMACMDFLUSH UTMALDG UTMAPF UTMAREDG UTMASTG WARPGROUP WARPSYNC YIELD ACQBULK USETMAXREG PREEXIT
"""
_NOTHING = frozenset(_NOTHING_NAMES.split())

#: Operations on floating point numbers that give one register of which nothing is known.
_FLOAT_NAMES = "FADD FMUL FFMA FMNMX MUFU F2FP F2F F2I I2F FRND HADD2 HMUL2 HFMA2 HMNMX2"
_FLOATS = frozenset(_FLOAT_NAMES.split())
_REGISTERS_OF_HMMA = 4  # or two

#: Operations on integers that give one register, or two in some form.
_ONE_RESULT = frozenset(
    {"BREV", "FLO", "IABS", "POPC", "PRMT", "SGXT", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3"}
)
_MOST_RESULTS = 2

#: Those that give predicates, and how many.
_FLOAT_TESTS = {"FSETP": 2, "HSETP2": 2, "FCHK": 1}

#: What loads and stores are told of caches and other threads.
_CACHING_NAMES = "E CONSTANT STRONG WEAK GPU SYS SM LTC64B LTC128B LTC256B EF EL LU EU NA PRIVATE BYPASS ZFILL"
_CACHING = frozenset(_CACHING_NAMES.split())
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}

_SPECIAL = {f"SR_{name.upper()}.{axis.upper()}": f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz"} | {
    "SR_LANEID": "%laneid",
    "SR_CgaCtaId": "%cluster_ctarank",
}

Handler = Callable[["_Builder", SassInstruction, "Guard | None"], Step]


def sass_program(sass: str) -> Program:
    """Return the program of the one kernel of a text of nvdisasm. Raises CannotDecide for one of several kernels."""
    return _Builder(sass).program()


class _Builder:
    def __init__(self, sass: str) -> None:
        self._instructions, self._labels = read_sass(sass)
        self._operands = Operands()

    def program(self) -> Program:
        steps, products = [], []
        for place, instruction in enumerate(self._instructions):
            if "gdesc[" in instruction.text or "GMMA" in instruction.name:
                products.append(place)
            try:
                steps.append(self._step(instruction, place))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                steps.append(self._not_understood(instruction, error))
        texts = [instruction.text for instruction in self._instructions]
        return Program(steps, texts, self._operands.initial, products)

    def _guard(self, instruction: SassInstruction) -> Guard | None:
        if instruction.guard is None:
            return None
        return Guard(self._operands.predicate(instruction.guard).slot, not instruction.negated)

    def _step(self, instruction: SassInstruction, place: int) -> Step:
        name, guard = instruction.name, self._guard(instruction)
        if name in _NOTHING:
            return NOTHING
        if name == "BRA":
            return self._branch(instruction, guard)
        if name == "EXIT":
            return jump(END, guard)
        if name == "CALL":
            written = written_by_call(self._instructions, self._labels, place)
            return forget([slot for text in written for slot in self._operands.result(text)])
        if name == "RET":
            return stop("the end of a function")
        if name == "HGMMA":
            return self._product(instruction, guard, place)
        if (handler := _HANDLERS.get(name)) is not None:
            step = handler(self, instruction, guard)
            if step is not None:
                return step
        if (count := _FLOAT_TESTS.get(name)) is not None:
            return forget([slot for text in instruction.operands[:count] for slot in self._operands.result(text)])
        if name == "HMMA":
            return forget(self._operands.result(instruction.operands[0], _REGISTERS_OF_HMMA))
        if name in _FLOATS and not any("64" in modifier for modifier in instruction.modifiers):
            return forget(self._operands.result(instruction.operands[0]))
        raise ValueError("not known")

    def _not_understood(self, instruction: SassInstruction, error: Exception) -> Step:
        """Of a known operation in a form that is not known, it is enough that its result is not known either."""
        results, *others = instruction.operands or ("",)
        if instruction.name in _ONE_RESULT and "P" not in results and not _PREDICATE.fullmatch((others or [""])[0]):
            return forget(self._operands.result(results, _MOST_RESULTS))
        return stop(f"machine code not understood: {instruction.text} ({error or type(error).__name__})")

    def _branch(self, instruction: SassInstruction, guard: Guard | None) -> Step:
        *conditions, label = instruction.operands
        target = self._labels[label.removeprefix("`(").removesuffix(")")]
        if instruction.modifiers == ("DIV",):  # for warps that have parted
            return NOTHING
        if set(instruction.modifiers) - {"U", "UNI"} or len(conditions) > 1:
            raise ValueError("branch")
        condition = None
        if conditions:
            source = self._operands.predicate(conditions[0])
            condition = Guard(source.slot, source.transform is None)
        return jump(target, guard, condition)

    def _product(self, instruction: SassInstruction, guard: Guard | None, place: int) -> Step:
        shape, sums, *types = instruction.modifiers
        if set(types) - {"BF16"} or sums not in ("F32", "F16"):
            raise ValueError("types")
        columns = int(shape.split("x")[1])
        operands = [text for text in instruction.operands if not text.startswith("gsb")]
        in_registers = not operands[1].startswith("gdesc")
        found = _GROUP.fullmatch(operands[1 + in_registers])
        if found is None:
            raise ValueError("descriptor")
        first = int(found[1][2:])
        # Four registers: the descriptor of the first operand, unused if that is in registers, and of the second.
        words = [self._operands.word(f"UR{first + i}").slot for i in range(2 if in_registers else 0, 4)]
        transposed = ("tnspA" in found[2], "tnspB" in found[2])
        addend, *condition = operands[2 + in_registers :]
        if addend not in ("RZ", operands[0]) or len(condition) > 1 or (addend == "RZ" and condition != ["!UPT"]):
            raise ValueError("sums")
        source = self._operands.predicate(condition[0] if condition else "UPT")
        turned = source.transform is not None

        def record(zeros: bool, machine: Machine, adds: Any, *words: Any) -> None:
            if adds is UNKNOWN:
                raise Undecided
            values = [_long(words[i], words[i + 1]) for i in range(0, len(words), 2)]
            machine.products.append(Product(place, shape, tuple(values), transposed, adds is not turned, zeros))

        places = self._operands.result(operands[0], columns // (2 if sums == "F32" else 4))
        return issue(record, [MACHINE, source.slot, *words], places, guard)

    # --- what handlers build with ---------------------------------------------------------------------------

    def compute(
        self, compute: Callable[..., Any], sources: Sequence[Source], results: Sequence[int], guard: Guard | None
    ) -> Step:
        """Return a step that computes results from sources."""
        return assign(applied(compute, sources), [source.slot for source in sources], results, guard)

    def words(self, texts: Sequence[str]) -> list[Source]:
        return [self._operands.word(text) for text in texts]

    @property
    def operands(self) -> Operands:
        return self._operands


def _long(low: Any, high: Any) -> int | None:
    return None if isinstance(low, Unknown) or isinstance(high, Unknown) else low | high << 32


def _split(operands: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the register that an adder writes, the predicates that take its carries, and its sources."""
    carries = []
    rest = list(operands[1:])
    while rest and _PREDICATE.fullmatch(rest[0]):
        carries.append(rest.pop(0))
    return operands[0], carries, rest


def _only(instruction: SassInstruction, *allowed: str) -> set[str]:
    """Return the modifiers; ValueError for one that is not known here."""
    found = set(instruction.modifiers)
    if found - set(allowed):
        raise ValueError(f"modifier {', '.join(sorted(found - set(allowed)))}")
    return found


# --- moves ----------------------------------------------------------------------------------------------------


def _move(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if _only(i, "64", "SPILL", "FILL") & {"64"}:
        return build.compute(
            lambda *v: v, build.operands.pair(i.operands[1]), build.operands.result(i.operands[0], 2), guard
        )
    (source,) = build.words(i.operands[1:2])
    compute = (lambda v: v) if source.transform is None else (lambda v: v & WORD)
    return build.compute(compute, [source], build.operands.result(i.operands[0]), guard)


def _select(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i)
    sources = [*build.words(i.operands[1:3]), build.operands.predicate(i.operands[3])]
    if any(source.transform for source in sources[:2]):
        return forget(build.operands.result(i.operands[0])) if i.name == "FSEL" else stop(i.text)
    return build.compute(integers.select, sources, build.operands.result(i.operands[0]), guard)


def _float_select(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if any(text[0] in "-|" and not text.startswith("-INF") for text in i.operands[1:3]):
        return forget(build.operands.result(i.operands[0]))
    return _select(build, i, guard)


def _special(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if i.operands[1] in ("SR_CLOCKLO", "SR_VIRTUALSMID", "SR_VIRTID"):
        return forget(build.operands.result(i.operands[0]))
    name = _SPECIAL[i.operands[1]]
    return build.compute(lambda m: m.special[name], [Source(MACHINE)], build.operands.result(i.operands[0]), guard)


def _clear(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    results = build.operands.result(i.operands[0], 1 if "32" in _only(i, "32") else 2)
    if i.operands[1] != "SRZ":
        return forget(results)
    return build.compute(lambda: 0 if len(results) == 1 else (0, 0), [], results, guard)


def _constant(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    size, is_signed = _size(i)
    if size < 4:
        (source,), bits = build.words(i.operands[1:2]), 8 * size
        narrow = integers.extended_sign(is_signed)
        return build.compute(lambda v: narrow(v, bits), [source], build.operands.result(i.operands[0]), guard)
    count = size // 4
    head, _, offset = i.operands[1].rpartition("[")
    sources = build.words([f"{head}[{int(offset.rstrip(']'), 0) + 4 * n:#x}]" for n in range(count)])
    results = build.operands.result(i.operands[0], count)
    return build.compute((lambda v: v) if count == 1 else (lambda *v: v), sources, results, guard)


def _predicates_to_word(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i)
    names = [f"{i.operands[1][:-1]}{n}" for n in range(7)]
    mask = int(i.operands[3], 0)
    asked = [build.operands.predicate(name) for n, name in enumerate(names) if mask >> n & 1]
    places = [n for n in range(7) if mask >> n & 1]

    def compute(word: Any, *predicates: Any) -> Any:
        value, unknown = bits_of(word)
        value, unknown = value & ~mask, unknown & ~mask
        for n, predicate in zip(places, predicates, strict=True):
            if predicate is UNKNOWN:
                unknown |= 1 << n
            else:
                value |= predicate << n
        return word_of(value, unknown)

    return build.compute(compute, [*build.words(i.operands[2:3]), *asked], build.operands.result(i.operands[0]), guard)


def _word_to_predicates(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i)
    mask = int(i.operands[2], 0) if len(i.operands) > 2 else 0x7F
    places = [n for n in range(7) if mask >> n & 1]
    results = [build.operands.result(f"{i.operands[0][:-1]}{n}")[0] for n in places]

    def compute(word: Any) -> Any:
        value, unknown = bits_of(word)
        values = [UNKNOWN if unknown >> n & 1 else bool(value >> n & 1) for n in places]
        return values if len(values) > 1 else values[0]

    return build.compute(compute, build.words(i.operands[1:2]), results, guard)


# --- integers -------------------------------------------------------------------------------------------------


def _add(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "X", "64")
    result, carries, rest = _split(i.operands)
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


def _add_two(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i)
    return build.compute(
        lambda a, b: a + b & WORD, build.words(i.operands[1:3]), build.operands.result(i.operands[0]), guard
    )


def _multiply(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "U32", "HI", "WIDE", "MOV", "IADD", "SHL", "X")
    result, carries, rest = _split(i.operands)
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


def _lea(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "HI", "X", "SX32")
    result, carries, rest = _split(i.operands)
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


def _logic(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i, "LUT")
    operands = list(i.operands)
    test = operands.pop(0) if _PREDICATE.fullmatch(operands[0]) else None
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


def _predicate_logic(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i, "LUT")
    results = [build.operands.result(text)[0] for text in i.operands[:2]]
    sources = [build.operands.predicate(text) for text in i.operands[2:5]]
    first, second = (integers.predicate_lut(int(text, 0)) for text in i.operands[5:7])
    return build.compute(lambda *p: (first(*p), second(*p)), sources, results, guard)


def _compare(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    name, *rest = i.modifiers
    (join,) = set(rest) - {"U32", "EX"}
    results = [build.operands.result(text)[0] for text in i.operands[:2]]
    sources = [*build.words(i.operands[2:4]), *map(build.operands.predicate, i.operands[4:])]
    if len(sources) != 3 + ("EX" in rest):
        raise ValueError("operands")
    compute = integers.compare(name, "U32" not in rest, join, "EX" in rest)
    return build.compute(compute, sources, results, guard)


def _shift(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "L", "R", "W", "HI", "U32", "S32", "U64", "S64")
    compute = integers.shift(
        left="L" in found,
        high="HI" in found,
        bits=64 if found & {"U64", "S64"} else 32,
        is_signed=bool(found & {"S32", "S64"}),
        wraps="W" in found,
    )
    return build.compute(compute, build.words(i.operands[1:4]), build.operands.result(i.operands[0]), guard)


def _extreme(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    make = integers.extreme if i.name in ("VIMNMX", "IMNMX") else integers.sum_extreme
    sources = [*build.words(i.operands[1:-1]), build.operands.predicate(i.operands[-1])]
    if i.name == "VIMNMX" and i.modifiers in (("S16x2",), ("U16x2",)):
        halves = integers.extreme_of_halves(is_signed=i.modifiers == ("S16x2",))
        return build.compute(halves, sources, build.operands.result(i.operands[0]), guard)
    found = _only(i, "U32", "S32", "RELU")
    compute = make("U32" not in found, "RELU" in found)
    return build.compute(compute, sources, build.operands.result(i.operands[0]), guard)


def _extreme_of_three(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "U32", "S32", "RELU")
    best = integers.extreme("U32" not in found, relu=False)
    last = integers.extreme("U32" not in found, "RELU" in found)
    sources = [*build.words(i.operands[1:4]), build.operands.predicate(i.operands[4])]
    return build.compute(
        lambda a, b, c, least: last(best(a, b, least), c, least), sources, build.operands.result(i.operands[0]), guard
    )


def _extend(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    compute = integers.extended_sign("U32" not in _only(i, "U32"))
    return build.compute(compute, build.words(i.operands[1:3]), build.operands.result(i.operands[0]), guard)


def _permute(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    _only(i)
    result, a, selectors, b = i.operands
    return build.compute(permuted, build.words([a, b, selectors]), build.operands.result(result), guard)


def _unary(compute: Callable[[int], int], *allowed: str) -> Handler:
    def handler(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
        _only(i, *allowed)
        return build.compute(compute, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)

    return handler


def _first_bit(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers != ("U32",):
        raise ValueError("modifiers")
    places = build.operands.result(i.operands[0])
    return build.compute(lambda a: (a & WORD).bit_length() - 1 & WORD, build.words(i.operands[1:2]), places, guard)


# --- conversions, as divisions use them -----------------------------------------------------------------------


def _float_of_integer(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step | None:
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


def _integer_of_float(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step | None:
    if i.modifiers != ("FTZ", "U32", "TRUNC", "NTZ"):
        return None
    return build.compute(truncated, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


def _function(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step | None:
    if i.modifiers != ("RCP",) or not i.operands[1].startswith(("R", "UR")):
        return None
    return build.compute(reciprocal, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


def _half_constant(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step | None:
    """Two halves times zero plus constants: a move."""
    if i.operands[1:3] != ("-RZ", "RZ") or len(i.operands) != 5:
        return None
    halves = [struct.unpack("<H", struct.pack("<e", float(text)))[0] for text in i.operands[3:]]
    value = halves[0] << 16 | halves[1]
    return build.compute(lambda: value, [], build.operands.result(i.operands[0]), guard)


# --- lanes of a warp, of which all hold the same --------------------------------------------------------------


def _vote(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers not in (("ALL",), ("ANY",)):
        raise ValueError("modifiers")
    *results, source = i.operands
    sources = [build.operands.predicate(source)]
    if len(results) == 1:
        return build.compute(lambda p: p, sources, build.operands.result(results[0]), guard)
    places = [build.operands.result(text)[0] for text in results]
    return build.compute(lambda p: (WORD if p else 0, p), sources, places, guard)


def _shuffle(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers not in (("BFLY",), ("IDX",)):
        raise ValueError("modifiers")
    places = [build.operands.result(text)[0] for text in i.operands[:2]]
    return build.compute(lambda a: (True, a), build.words(i.operands[2:3]), places, guard)


def _elect(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    places = [build.operands.result(text)[0] for text in i.operands[:2]]
    return build.compute(lambda: (True, 0), [], places, guard)


def _reduce(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    found = _only(i, "SUM", "MIN", "MAX", "AND", "OR", "S32")
    compute: Callable[[int], int] = (lambda a: 32 * a & WORD) if "SUM" in found else (lambda a: a)
    if not found & {"SUM", "MIN", "MAX", "AND", "OR"}:
        raise ValueError("modifiers")
    return build.compute(compute, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


# --- memory ---------------------------------------------------------------------------------------------------

_MEMORIES = {"LDG": "world", "LDS": "shared", "LDL": "local", "STS": "shared", "STL": "local"}


def _size(i: SassInstruction) -> tuple[int, bool]:
    sizes = [modifier for modifier in i.modifiers if modifier in _SIZES]
    if set(i.modifiers) - _CACHING - set(sizes) or len(sizes) > 1:
        raise ValueError("modifiers")
    size = sizes[0] if sizes else "32"
    return _SIZES[size], size[0] == "S"


def _load(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    size, is_signed = _size(i)
    result, address = i.operands
    parts, offset = build.operands.address(address)
    results = build.operands.result(result, max(1, size // 4))
    where = _MEMORIES[i.name]

    def compute(machine: Machine, *parts: int) -> Any:
        words = getattr(machine, where).load(sum(parts) + offset, size)
        if is_signed:
            words = [signed(words[0], 8 * size) & WORD]
        return words if len(words) > 1 else words[0]

    return build.compute(compute, [Source(MACHINE), *parts], results, guard)


def _store(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    size, _ = _size(i)
    address, value = i.operands
    parts, offset = build.operands.address(address)
    if value in ("RZ", "URZ"):
        values = [build.operands.word("RZ").slot] * max(1, size // 4)
    else:
        values = build.operands.result(value, max(1, size // 4))
    if any(part.transform for part in parts):
        raise ValueError("address")
    return store_step(_MEMORIES[i.name], [part.slot for part in parts], offset, min(size, 4), values, guard)


def _copy_to_shared(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    parts, offset = build.operands.address(i.operands[0])
    sizes = [modifier for modifier in i.modifiers if modifier in _SIZES]
    if set(i.modifiers) - _CACHING - set(sizes) or any(part.transform for part in parts):
        raise ValueError("modifiers")
    words = _SIZES[sizes[0]] // 4 if sizes else 1
    return store_step("shared", [part.slot for part in parts], offset, 4, [NOWHERE] * words, guard)


def _matrix(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    count = int(i.modifiers[-1]) if i.modifiers[-1] in ("2", "4") else 1
    return forget(build.operands.result(i.operands[0], count))


def _atomic(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    results = i.operands[: 2 if _PREDICATE.fullmatch(i.operands[0]) else 1]
    count = 4 if {"64", "128"} & set(i.modifiers) else 1
    return forget([slot for text in results for slot in build.operands.result(text, 1 if "P" in text else count)])


def _barrier(build: _Builder, i: SassInstruction, guard: Guard | None) -> Step:
    """An operation on an mbarrier in shared memory: waits are over at once."""
    if i.modifiers[0] == "PHASECHK":
        return build.compute(lambda: True, [], build.operands.result(i.operands[0]), guard)
    if i.modifiers[0] == "CCTL":
        return NOTHING
    if i.modifiers[0] not in ("ARRIVE", "EXCH"):
        raise ValueError("modifiers")
    return forget(build.operands.result(i.operands[0], 1 if i.operands[0] in ("RZ", "URZ") else 2))


_HANDLERS: dict[str, Callable[[_Builder, SassInstruction, Guard | None], Step | None]] = {
    "MOV": _move,
    "UMOV": _move,
    "R2UR": _move,
    "SEL": _select,
    "USEL": _select,
    "FSEL": _float_select,
    "S2R": _special,
    "S2UR": _special,
    "CS2R": _clear,
    "LDC": _constant,
    "ULDC": _constant,
    "P2R": _predicates_to_word,
    "UP2UR": _predicates_to_word,
    "R2P": _word_to_predicates,
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
    "VOTE": _vote,
    "VOTEU": _vote,
    "SHFL": _shuffle,
    "ELECT": _elect,
    "REDUX": _reduce,
    "LDG": _load,
    "LDS": _load,
    "LDL": _load,
    "STS": _store,
    "STL": _store,
    "LDGSTS": _copy_to_shared,
    "LDSM": _matrix,
    "ATOM": _atomic,
    "ATOMG": _atomic,
    "ATOMS": _atomic,
    "SYNCS": _barrier,
}
