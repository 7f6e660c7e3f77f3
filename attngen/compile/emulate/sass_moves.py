"""Machine code of sm90: moves between registers, and predicates as words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attngen.compile.emulate import sass_integers as integers
from attngen.compile.emulate.program import MACHINE, Guard, Step, forget, stop
from attngen.compile.emulate.sass_build import Build, Handler, only
from attngen.compile.emulate.sass_operands import Source
from attngen.compile.emulate.sass_text import SassInstruction
from attngen.compile.emulate.values import (
    UNKNOWN,
    WORD,
    bits_of,
    word_of,
)

_SPECIAL = {f"SR_{name.upper()}.{axis.upper()}": f"%{name}.{axis}" for name in ("tid", "ctaid") for axis in "xyz"} | {
    "SR_LANEID": "%laneid",
    "SR_CgaCtaId": "%cluster_ctarank",
}


def _move(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if only(i, "64", "SPILL", "FILL") & {"64"}:
        return build.compute(
            lambda *v: v, build.operands.pair(i.operands[1]), build.operands.result(i.operands[0], 2), guard
        )
    (source,) = build.words(i.operands[1:2])
    compute = (lambda v: v) if source.transform is None else (lambda v: v & WORD)
    return build.compute(compute, [source], build.operands.result(i.operands[0]), guard)


def _select(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i)
    sources = [*build.words(i.operands[1:3]), build.operands.predicate(i.operands[3])]
    if any(source.transform for source in sources[:2]):
        return forget(build.operands.result(i.operands[0])) if i.name == "FSEL" else stop(i.text)
    return build.compute(integers.select, sources, build.operands.result(i.operands[0]), guard)


def _float_select(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if any(text[0] in "-|" and not text.startswith("-INF") for text in i.operands[1:3]):
        return forget(build.operands.result(i.operands[0]))
    return _select(build, i, guard)


def _special(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if i.operands[1] in ("SR_CLOCKLO", "SR_VIRTUALSMID", "SR_VIRTID"):
        return forget(build.operands.result(i.operands[0]))
    name = _SPECIAL[i.operands[1]]
    return build.compute(lambda m: m.special[name], [Source(MACHINE)], build.operands.result(i.operands[0]), guard)


def _clear(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    results = build.operands.result(i.operands[0], 1 if "32" in only(i, "32") else 2)
    if i.operands[1] != "SRZ":
        return forget(results)
    return build.compute(lambda: 0 if len(results) == 1 else (0, 0), [], results, guard)


def _predicates_to_word(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i)
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


def _word_to_predicates(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    only(i)
    mask = int(i.operands[2], 0) if len(i.operands) > 2 else 0x7F
    places = [n for n in range(7) if mask >> n & 1]
    results = [build.operands.result(f"{i.operands[0][:-1]}{n}")[0] for n in places]

    def compute(word: Any) -> Any:
        value, unknown = bits_of(word)
        values = [UNKNOWN if unknown >> n & 1 else bool(value >> n & 1) for n in places]
        return values if len(values) > 1 else values[0]

    return build.compute(compute, build.words(i.operands[1:2]), results, guard)


HANDLERS: Mapping[str, Handler] = {
    "MOV": _move,
    "UMOV": _move,
    "R2UR": _move,
    "SEL": _select,
    "USEL": _select,
    "FSEL": _float_select,
    "S2R": _special,
    "S2UR": _special,
    "CS2R": _clear,
    "P2R": _predicates_to_word,
    "UP2UR": _predicates_to_word,
    "R2P": _word_to_predicates,
}
