"""The time that tile maps take which a call makes itself, as it does where the mask's tensors are new."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from attngen.lab.bench.timing import Clock
from attngen.runtime.launch.map_cache import KEPT, kept_maps

#: Calls that make their maps again, of which the median counts.
_CALLS = 7

#: Milliseconds that the card waits for each of them to be enqueued.
_LEAD_MS = 3.0


def milliseconds_of_maps(call: Callable[[], object], clock: Clock) -> float | None:
    """Time the maps of a call on the GPU, by events around the launches that make them; None for a call without any.

    All maps that are kept are dropped before each call, and after the last one.
    """
    samples = []
    for _ in range(_CALLS):
        KEPT.clear()
        clock.hold(_LEAD_MS)
        call()
        made = [events for entry in kept_maps().values() for events in entry.times]
        if not made:
            return None
        samples.append(sum(clock.milliseconds(begin, end) for begin, end in made))
    KEPT.clear()
    return statistics.median(samples)
