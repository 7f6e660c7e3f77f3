"""The emulation of a PTX kernel: each instruction as a step of a Program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from attngen.compile.emulate.control import END
from attngen.compile.emulate.launch import SHARED_BASE
from attngen.compile.emulate.program import (
    MACHINE,
    NOTHING,
    NOWHERE,
    CannotDecide,
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
from attngen.compile.emulate.ptx_integers import compute_of, converted
from attngen.compile.emulate.ptx_text import PtxInstruction, read_ptx, target_of
from attngen.compile.emulate.storing import store_step
from attngen.compile.emulate.values import UNKNOWN, WORD, Undecided
from attngen.compile.ptx import ptx_parameter_offsets

_REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*")
_SPECIAL = re.compile(r"%(?:tid|ntid|ctaid|nctaid)\.[xyz]|%laneid|%warpid|%cluster_ctarank")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})")
_DOUBLE = re.compile(r"0[dD]([0-9a-fA-F]{16})")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?(?:0x[0-9a-f]+|\d+))\s*)?\]")
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")

#: Floating-point types, whose values are not computed.
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f32x2", "f64", "e4m3x2", "e5m2x2")

#: Instructions that concern only other threads, copies and caches.
_NOTHING = (
    "bar.sync",
    "bar.warp.sync",
    "barrier.sync",
    "barrier.cluster.",
    "cp.async.bulk.",
    "cp.async.commit_group",
    "cp.async.wait_",
    "cp.reduce.async.bulk.",
    "createpolicy.",
    "discard.",
    "fence.",
    "griddepcontrol.",
    "mbarrier.init.",
    "mbarrier.inval.",
    "membar.",
    "nanosleep.",
    "prefetch",
    "red.",
    "setmaxnreg.",
    "st.global.",
    "stmatrix.",
    "wgmma.commit_group.",
    "wgmma.fence.",
    "wgmma.wait_group.",
)


def ptx_program(ptx: str) -> Program:
    """Return the program of the one kernel of a PTX text. Raises CannotDecide for a text that is not understood."""
    return _Builder(ptx).program()


class _Builder:
    def __init__(self, ptx: str) -> None:
        self._instructions, self._labels = read_ptx(ptx)
        self._parameters = ptx_parameter_offsets(ptx)
        self._slots: dict[str, int] = {}
        self._initial: list[Any] = [None, UNKNOWN]

    def program(self) -> Program:
        steps, products = [], []
        for place, instruction in enumerate(self._instructions):
            if instruction.opcode.startswith("wgmma.mma_async."):
                products.append(place)
            try:
                steps.append(self._step(instruction, place))
            except CannotDecide:
                raise
            except (ValueError, KeyError, IndexError, TypeError) as error:
                steps.append(stop(f"PTX not understood: {instruction.text[:120]} ({error!r})"))
        return Program(steps, [i.text for i in self._instructions], self._initial, products)

    # --- operands -------------------------------------------------------------------------------------------

    def _constant(self, value: Any) -> int:
        self._initial.append(value)
        return len(self._initial) - 1

    def _register(self, name: str) -> int:
        if name == "_":
            return NOWHERE
        if _REGISTER.fullmatch(name) is None:
            raise ValueError(name)
        if name not in self._slots:
            self._slots[name] = self._constant(UNKNOWN)
        return self._slots[name]

    def _source(self, text: str) -> int:
        if _NUMBER.fullmatch(text):
            return self._constant(int(text.rstrip("U"), 0) & 0xFFFF_FFFF_FFFF_FFFF)
        if found := _FLOAT.fullmatch(text) or _DOUBLE.fullmatch(text):
            return self._constant(int(found[1], 16))
        if text == "global_smem":
            return self._constant(SHARED_BASE)
        if text in self._parameters:
            return self._constant(1 << 40 | self._parameters[text])
        if text.startswith("!") or (text.startswith("%") and text not in self._slots and "." in text):
            raise ValueError(text)
        return self._register(text)

    def _sources(self, texts: Sequence[str]) -> list[int]:
        return [self._source(text) for text in texts]

    def _vector(self, text: str) -> list[int]:
        """Return the registers of ``{a, b}``, of ``a|b``, or of a single name."""
        parts = text.strip("{} ").split("," if text.startswith("{") else "|")
        return [self._register(part.strip()) for part in parts]

    def _address(self, text: str) -> tuple[str, int]:
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return found[1], int(found[2] or "0", 0)

    def _guard(self, instruction: PtxInstruction) -> Guard | None:
        if instruction.guard is None:
            return None
        return Guard(self._register(instruction.guard), not instruction.negated)

    # --- instructions ---------------------------------------------------------------------------------------

    def _step(self, instruction: PtxInstruction, place: int) -> Step:
        opcode, operands = instruction.opcode, instruction.operands
        guard = self._guard(instruction)
        name, *modifiers = opcode.split(".")
        if opcode in ("bra", "bra.uni"):
            return jump(target_of(operands[0], instruction.scope, self._labels), guard)
        if opcode in ("ret", "exit"):
            return jump(END, guard)
        if opcode.startswith(_NOTHING):
            return NOTHING
        if opcode.startswith("wgmma.mma_async."):
            return self._product(modifiers, operands, guard, place)
        if name in ("ld", "ldu"):
            return self._load(modifiers, operands, guard)
        if name == "st" and modifiers[0] in ("shared", "shared::cta", "local"):
            return self._store(modifiers, operands, guard)
        if opcode.startswith("cp.async.c") and modifiers[2:] == ["shared", "global"]:
            base, offset = self._address(operands[0])
            size = int(operands[2], 0)
            return store_step("shared", [self._register(base)], offset, size, [NOWHERE] * (size // 4), guard)
        compute = self._warp(name, modifiers, operands) or self._conversion(opcode, modifiers)
        if compute is None and opcode in ("mov.b64", "mov.b32") and "{" in "".join(operands):
            return self._pack(int(modifiers[0][1:]), operands, guard)
        if compute is None and name == "mov":
            compute = self._move(operands[1], modifiers[0])
            if compute is not None:
                return assign(compute, [MACHINE], self._vector(operands[0]), guard)
        if compute is None:
            compute = compute_of(name, modifiers)
        if compute is not None:
            results = self._vector(operands[0])
            if len(results) > 1 and name == "setp":
                raise ValueError("two predicates")
            return assign(compute, self._sources(operands[1:]), results, guard)
        if name in ("atom", "ldmatrix", "mbarrier") or (modifiers and modifiers[-1] in _FLOATS) or name == "cvt":
            return self._opaque(name, modifiers, operands, guard)
        return stop(f"PTX not known: {instruction.text[:120]}")

    def _opaque(self, name: str, modifiers: list[str], operands: tuple[str, ...], guard: Guard | None) -> Step:
        """Return the step of an instruction whose results are not known; a wait ends at once."""
        if name == "mbarrier":
            if modifiers[0] in ("try_wait", "test_wait"):
                return assign(lambda: True, [], self._vector(operands[0]), guard)
            if modifiers[0] not in ("arrive", "expect_tx", "complete_tx", "arrive_drop"):
                raise ValueError(name)
            return forget(self._vector(operands[0])) if not operands[0].startswith("[") else NOTHING
        if name == "selp":
            return assign(compute_of("selp", ["b32"]), self._sources(operands[1:]), self._vector(operands[0]), guard)  # type: ignore[arg-type]
        return forget(self._vector(operands[0]))

    def _warp(self, name: str, modifiers: list[str], operands: tuple[str, ...]) -> Any:
        """Return a function that computes an exchange between lanes, which all hold the same values."""
        if name == "shfl" and modifiers[0] == "sync":
            return (lambda a, *_: (a, True)) if "|" in operands[0] else (lambda a, *_: a)
        if name == "elect":
            return lambda *_: (0, True)
        if name == "activemask":
            return lambda: WORD
        if name == "redux":
            if modifiers[1] == "add":
                return lambda a, mask: a * (mask & WORD).bit_count() & WORD
            return (lambda a, mask: a) if modifiers[1] in ("min", "max", "and", "or") else None
        if name == "vote":
            if modifiers[1] == "ballot":
                return lambda p, mask: mask & WORD if p else 0
            return (lambda p, mask: p) if modifiers[1] in ("any", "all") else None
        return None

    def _conversion(self, opcode: str, modifiers: list[str]) -> Any:
        if opcode.startswith("cvta."):
            return lambda a: a
        if opcode.startswith("cvt.") and len(modifiers) in (2, 3):
            return converted(*modifiers[-2:], *modifiers[:-2])
        return None

    def _move(self, source: str, kind: str) -> Any:
        if _SPECIAL.fullmatch(source):
            return partial(_special, name=source)
        return (lambda _: UNKNOWN) if source in ("%clock", "%clock64", "%globaltimer", "%smid") else None

    def _pack(self, bits: int, operands: tuple[str, ...], guard: Guard | None) -> Step:
        to, of = operands
        if to.startswith("{"):
            results = self._vector(to)
            width = bits // len(results)
            return assign(
                lambda a: [a >> width * i & (1 << width) - 1 for i in range(len(results))],
                [self._source(of)],
                results,
                guard,
            )
        parts = [self._source(part.strip()) for part in of.strip("{}").split(",")]
        width = bits // len(parts)
        return assign(
            lambda *values: sum((v & (1 << width) - 1) << width * i for i, v in enumerate(values)),
            parts,
            self._vector(to),
            guard,
        )

    def _load(self, modifiers: list[str], operands: tuple[str, ...], guard: Guard | None) -> Step:
        kind = modifiers[-1]
        size, is_signed = int(kind[1:]) // 8, kind[0] == "s"
        results = self._vector(operands[0])
        base, offset = self._address(operands[1])
        space = modifiers[0].partition("::")[0]
        if space == "param":
            offset += self._parameters[base]
            return assign(
                lambda machine: int.from_bytes(machine.parameters[offset : offset + size], "little"),
                [MACHINE],
                results,
                guard,
            )
        if is_signed and size < 4:
            raise ValueError(kind)
        where = {"shared": "shared", "global": "world", "local": "local"}[space]
        return assign(
            partial(_loaded, where=where, offset=offset, size=size, count=len(results)),
            [MACHINE, self._source(base)],
            results,
            guard,
        )

    def _store(self, modifiers: list[str], operands: tuple[str, ...], guard: Guard | None) -> Step:
        size = int(modifiers[-1][1:]) // 8
        base, offset = self._address(operands[0])
        texts = [part.strip() for part in operands[1].strip("{} ").split(",")]
        where = modifiers[0].partition("::")[0]
        return store_step(where, [self._source(base)], offset, size, self._sources(texts), guard)

    def _product(self, modifiers: list[str], operands: tuple[str, ...], guard: Guard | None, place: int) -> Step:
        found = next(filter(None, map(_SHAPE.fullmatch, modifiers)))
        shape = "x".join(found.groups())
        sums = self._vector(operands[0])
        in_registers = operands[1].startswith("{")
        descriptors = self._sources(operands[2 if in_registers else 1 : 3])
        scales, transposes = operands[4:6], [part == "1" for part in operands[6:]]
        if scales != ("1", "1"):
            raise ValueError(f"scales {scales}")
        adds = self._constant(operands[3] != "0") if operands[3] in ("0", "1") else self._register(operands[3])
        if len(transposes) != 2 - in_registers:
            raise ValueError("transposes")
        transposed = (transposes[0] and not in_registers, transposes[-1])

        def record(zeros: bool, machine: Machine, adds: Any, *descriptors: Any) -> None:
            if adds is UNKNOWN or any(value is UNKNOWN for value in descriptors):
                raise Undecided
            machine.products.append(Product(place, shape, descriptors, transposed, adds, zeros))

        return issue(record, [MACHINE, adds, *descriptors], sums, guard)


def _special(machine: Machine, name: str) -> int:
    return machine.special[name]


def _loaded(machine: Machine, address: int, where: str, offset: int, size: int, count: int) -> Any:
    memory = getattr(machine, where)
    address = address + offset
    if size == 8:
        values: list[Any] = []
        for i in range(count):
            low, high = memory.load(address + 8 * i, 8)
            values.append(UNKNOWN if low is UNKNOWN or high is UNKNOWN else low | high << 32)
    else:
        values = [word for i in range(count) for word in memory.load(address + size * i, size)]
    return values if count > 1 else values[0]
