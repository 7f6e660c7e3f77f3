"""What becomes of contestants when their race is over: measured, or failed with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

#: Characters of an error that a table or a report holds.
_MAX_REASON = 300

Result = TypeVar("Result", bound=Any)  # a dataclass with status, reason and timing
Contestant = TypeVar("Contestant")


def raced(
    entered: Sequence[tuple[Result, Contestant | None]],
    race: Callable[[list[Contestant]], Iterable[Any]],
    read: Callable[[Any], dict[str, Any]],
) -> tuple[Result, ...]:
    """Race the contestants that entered, and return all results in their order.

    ``race`` returns the timing of each, which says whether its outputs are ``intact``; ``read`` returns what a result
    has of its timing.
    """
    try:
        timings = iter(race([contestant for _, contestant in entered if contestant is not None]))
    except Exception as error:  # it is not known of whom: nothing of this race can be trusted
        failed = {"status": "failed", "reason": reason_of(error)}
        return tuple(result if contestant is None else replace(result, **failed) for result, contestant in entered)
    done = []
    for result, contestant in entered:
        if contestant is None:
            done.append(result)
            continue
        timing = next(timings)
        if timing.intact:
            done.append(replace(result, status="measured", **read(timing)))
        else:
            done.append(replace(result, status="failed", reason="an output holds a NaN, or was not all written"))
    return tuple(done)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0]}") if lines else type(error).__name__


def shortened(reason: str) -> str:
    """Return a reason as reports hold it."""
    return reason[:_MAX_REASON]
