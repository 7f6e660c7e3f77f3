"""The earlier path of ``attngen.plan.catalogue``, kept for programs that import it."""

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
