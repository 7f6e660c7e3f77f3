"""Candidate plans of one kernel, which tuning measures to take the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.errors import PlanError
from attngen.lang.constant_conditions import fold_conditions
from attngen.plan.catalogue import named
from attngen.plan.model import Plan
from attngen.plan.planner import plan
from attngen.schema.kernel_spec import KernelSpec


def candidates(spec: KernelSpec) -> Iterator[tuple[KernelSpec, Plan]]:
    """Yield a kernel with its choices and its plan: the default plan first, then the other candidates of its schedule,
    each name once.

    All are of the backend and the schedule of the first. Raises PlanError, before the first, if there is none.
    """
    first = plan(spec)
    yield spec, first
    seen = {first.name}
    for other in named(first.schedule).tunable(as_scheduled(spec, first), first):
        try:
            planned = plan(other)
        except PlanError:
            continue
        if planned.schedule == first.schedule and planned.name not in seen:
            seen.add(planned.name)
            yield replace(other, variant=spec.variant, backend=spec.backend), planned


def as_scheduled(spec: KernelSpec, planned: Plan) -> KernelSpec:
    """The spec of a plan as its schedule was asked for it."""
    return replace(spec, variant=fold_conditions(spec.variant), backend=planned.backend)
