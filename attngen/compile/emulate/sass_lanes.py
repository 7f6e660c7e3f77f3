"""Machine code of sm90: exchanges between the lanes of a warp, of which all hold the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attngen.compile.emulate.program import Guard, Step
from attngen.compile.emulate.sass_build import Build, Handler, only
from attngen.compile.emulate.sass_text import SassInstruction
from attngen.compile.emulate.values import (
    WORD,
)


def _vote(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers not in (("ALL",), ("ANY",)):
        raise ValueError("modifiers")
    *results, source = i.operands
    sources = [build.operands.predicate(source)]
    if len(results) == 1:
        return build.compute(lambda p: p, sources, build.operands.result(results[0]), guard)
    places = [build.operands.result(text)[0] for text in results]
    return build.compute(lambda p: (WORD if p else 0, p), sources, places, guard)


def _shuffle(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    if i.modifiers not in (("BFLY",), ("IDX",)):
        raise ValueError("modifiers")
    places = [build.operands.result(text)[0] for text in i.operands[:2]]
    return build.compute(lambda a: (True, a), build.words(i.operands[2:3]), places, guard)


def _elect(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    places = [build.operands.result(text)[0] for text in i.operands[:2]]
    return build.compute(lambda: (True, 0), [], places, guard)


def _reduce(build: Build, i: SassInstruction, guard: Guard | None) -> Step:
    found = only(i, "SUM", "MIN", "MAX", "AND", "OR", "S32")
    compute: Callable[[int], int] = (lambda a: 32 * a & WORD) if "SUM" in found else (lambda a: a)
    if not found & {"SUM", "MIN", "MAX", "AND", "OR"}:
        raise ValueError("modifiers")
    return build.compute(compute, build.words(i.operands[1:2]), build.operands.result(i.operands[0]), guard)


HANDLERS: Mapping[str, Handler] = {
    "VOTE": _vote,
    "VOTEU": _vote,
    "SHFL": _shuffle,
    "ELECT": _elect,
    "REDUX": _reduce,
}
