"""See ``attngen.plan.catalogue``: this is its public name."""

from attngen.plan.catalogue import (
    backends,
    candidates,
    named,
    schedules,
    with_schedule,
)

__all__ = [
    "schedules",
    "named",
    "backends",
    "candidates",
    "with_schedule",
]
