"""Stores: the values, the address and the predicate that guards them may each be known or unknown."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.compile.emulate.program import MACHINE, Guard, State, Step
from attngen.compile.emulate.values import UNKNOWN, Unknown


def store_step(
    where: str, address: Sequence[int], offset: int, size: int, values: Sequence[int], guard: Guard | None
) -> Step:
    """Return a step that writes ``values``, of ``size`` bytes each, from the sum of ``address`` and ``offset`` on.

    ``where`` is a memory of the Machine. Values of 8 bytes are integers; machine code has words of 4 bytes.
    """

    def run(state: State) -> None:
        holds = True if guard is None else state[guard.slot] if guard.wanted else _negated(state[guard.slot])
        if holds is False:
            return
        words = []
        for slot in values:
            value = state[slot] if holds is True else UNKNOWN
            if size == 8:
                words += [UNKNOWN] * 2 if isinstance(value, Unknown) else [value & 0xFFFF_FFFF, value >> 32]
            else:
                words.append(value)
        parts = [state[slot] for slot in address]
        memory = getattr(state[MACHINE], where)
        if any(isinstance(part, Unknown) for part in parts):
            memory.store(UNKNOWN, size, words)
        elif size >= 4:
            memory.store(sum(parts) + offset, size * len(values), words)
        else:
            for i, word in enumerate(words):
                memory.store(sum(parts) + offset + size * i, size, [word])

    return Step(run, memory=where)


def _negated(value: object) -> object:
    return value if value is UNKNOWN else not value
