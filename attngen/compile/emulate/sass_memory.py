"""Machine code of sm90: constants, loads, stores, atomics and barriers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attngen.compile.emulate import sass_integers as integers
from attngen.compile.emulate.program import MACHINE, NOTHING, NOWHERE, Guard, Machine, Step, forget
from attngen.compile.emulate.sass_build import PREDICATE, Build, Handler
from attngen.compile.emulate.sass_operands import Source
from attngen.compile.emulate.sass_text import SassInstruction
from attngen.compile.emulate.storing import store_step
from attngen.compile.emulate.values import (
    WORD,
    signed,
)

#: Modifiers of loads and stores that concern caches and other threads.
_CACHING_NAMES = "E CONSTANT STRONG WEAK GPU SYS SM LTC64B LTC128B LTC256B EF EL LU EU NA PRIVATE BYPASS ZFILL"


_CACHING = frozenset(_CACHING_NAMES.split())


_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "32": 4, "64": 8, "128": 16}


_MEMORIES = {"LDG": "world", "LDS": "shared", "LDL": "local", "STS": "shared", "STL": "local"}


def _size(i: SassInstruction) -> tuple[int, bool]:
    sizes = [modifier for modifier in i.modifiers if modifier in _SIZES]
    if set(i.modifiers) - _CACHING - set(sizes) or len(sizes) > 1:
        raise ValueError("modifiers")
    size = sizes[0] if sizes else "32"
    return _SIZES[size], size[0] == "S"


def _constant(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
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


def _load(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
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


def _store(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
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


def _copy_to_shared(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    parts, offset = build.operands.address(i.operands[0])
    sizes = [modifier for modifier in i.modifiers if modifier in _SIZES]
    if set(i.modifiers) - _CACHING - set(sizes) or any(part.transform for part in parts):
        raise ValueError("modifiers")
    words = _SIZES[sizes[0]] // 4 if sizes else 1
    return store_step("shared", [part.slot for part in parts], offset, 4, [NOWHERE] * words, guard)


def _matrix(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    count = int(i.modifiers[-1]) if i.modifiers[-1] in ("2", "4") else 1
    return forget(build.operands.result(i.operands[0], count))


def _atomic(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    results = i.operands[: 2 if PREDICATE.fullmatch(i.operands[0]) else 1]
    count = 4 if {"64", "128"} & set(i.modifiers) else 1
    return forget([slot for text in results for slot in build.operands.result(text, 1 if "P" in text else count)])


def _barrier(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    """Return the step of an operation on an mbarrier in shared memory: waits end at once."""
    if i.modifiers[0] == "PHASECHK":
        return build.compute(lambda: True, [], build.operands.result(i.operands[0]), guard)
    if i.modifiers[0] == "CCTL":
        return NOTHING
    if i.modifiers[0] not in ("ARRIVE", "EXCH"):
        raise ValueError("modifiers")
    return forget(build.operands.result(i.operands[0], 1 if i.operands[0] in ("RZ", "URZ") else 2))


HANDLERS: Mapping[str, Handler] = {
    "LDC": _constant,
    "ULDC": _constant,
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
