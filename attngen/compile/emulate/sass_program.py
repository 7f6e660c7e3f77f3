"""The emulation of a kernel in sm90 machine code: each instruction as a step of a Program."""

from __future__ import annotations

import re
from typing import Any

from attngen.compile.emulate import sass_arithmetic, sass_lanes, sass_memory, sass_moves
from attngen.compile.emulate.control import END
from attngen.compile.emulate.program import (
    MACHINE,
    NOTHING,
    Guard,
    Machine,
    Product,
    Program,
    Step,
    forget,
    issue,
    jump,
    stop,
)
from attngen.compile.emulate.sass_build import PREDICATE, Build
from attngen.compile.emulate.sass_calls import written_by_call
from attngen.compile.emulate.sass_text import SassInstruction, read_sass
from attngen.compile.emulate.values import (
    UNKNOWN,
    Undecided,
    Unknown,
)

_GROUP = re.compile(r"gdesc\[(UR\d+)\]((?:\.tnsp[AB])*)")

#: Instructions that concern only other threads, copies, caches and ordering.
_NOTHING_NAMES = """
NOP BAR BSSY BSYNC BREAK CCTL CCTLL DEPBAR ERRBAR FENCE LDGDEPBAR MEMBAR NANOSLEEP RED REDG STG STSM UBLKCP UTMACCTL
UTMACMDFLUSH UTMALDG UTMAPF UTMAREDG UTMASTG WARPGROUP WARPSYNC YIELD ACQBULK USETMAXREG PREEXIT
"""
_NOTHING = frozenset(_NOTHING_NAMES.split())

#: Floating-point operations, which write one register whose value is not known.
_FLOAT_NAMES = "FADD FMUL FFMA FMNMX MUFU F2FP F2F F2I I2F FRND HADD2 HMUL2 HFMA2 HMNMX2"
_FLOATS = frozenset(_FLOAT_NAMES.split())
_REGISTERS_OF_HMMA = 4  # or two

#: Integer operations that write one register, or two in some form.
_ONE_RESULT = frozenset(
    {"BREV", "FLO", "IABS", "POPC", "PRMT", "SGXT", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3"}
)
_MOST_RESULTS = 2

#: Floating-point comparisons, and how many predicates they write.
_FLOAT_TESTS = {"FSETP": 2, "HSETP2": 2, "FCHK": 1}

_HANDLERS = {**sass_moves.HANDLERS, **sass_arithmetic.HANDLERS, **sass_lanes.HANDLERS, **sass_memory.HANDLERS}


def sass_program(sass: str) -> Program:
    """Return the program of the one kernel of a text of nvdisasm. Raises CannotDecide for one of several kernels."""
    return _Builder(sass).program()


class _Builder(Build):
    def __init__(self, sass: str) -> None:
        super().__init__()
        self._instructions, self._labels = read_sass(sass)

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
        """Return the step of an unknown form: if its operation is known, one that makes its results unknown."""
        results, *others = instruction.operands or ("",)
        if instruction.name in _ONE_RESULT and "P" not in results and not PREDICATE.fullmatch((others or [""])[0]):
            return forget(self._operands.result(results, _MOST_RESULTS))
        return stop(f"machine code not understood: {instruction.text} ({error or type(error).__name__})")

    def _branch(self, instruction: SassInstruction, guard: Guard | None) -> Step:
        *conditions, label = instruction.operands
        target = self._labels[label.removeprefix("`(").removesuffix(")")]
        if instruction.modifiers == ("DIV",):  # for warps that have diverged
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


def _long(low: Any, high: Any) -> int | None:
    return None if isinstance(low, Unknown) or isinstance(high, Unknown) else low | high << 32
