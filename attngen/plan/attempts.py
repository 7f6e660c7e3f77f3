"""The plans of one kernel in the order in which they are compiled until one of them is clean.

A plan is chosen before anything is compiled, from the traits of masks and scores; only the compiler knows how many
registers they take. So what a spec leaves open is chosen again where ptxas spills, makes tensor cores wait, or fails:
smaller tiles, fewer stages, another order, another backend. What a spec fixes stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from attngen.arch import ARCHES
from attngen.errors import PlanError
from attngen.lang.constant_conditions import fold_conditions
from attngen.plan.allowances import LAST_SPILLS
from attngen.plan.catalogue import backends, named
from attngen.plan.model import Plan, Refused
from attngen.plan.planner import plan
from attngen.schema.kernel_spec import KernelSpec

#: Allowances of the last compile, if all other choices were slower than they should be.
_SLOW = ("spill", "serialized_wgmma")


def attempts(spec: KernelSpec) -> Iterator[Plan]:
    """Yield the plans of a kernel, the fastest first, each under a name of its own; the first is ``plan(spec)``.

    Raises PlanError, before the first, if no backend can do what the spec asks for.
    """
    first = plan(spec)
    yield first
    names = {first.name}
    for other in _others(spec, first):
        if other.name not in names:
            names.add(other.name)
            yield other


class Attempts:
    """The plans of a kernel as ``attempts`` yields them, each made once, however often they are read."""

    __slots__ = ("_made", "_others", "spec")

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self._made: list[Plan] = []
        self._others = attempts(spec)

    def __iter__(self) -> Iterator[Plan]:
        for index in count():
            if index == len(self._made):
                planned = next(self._others, None)
                if planned is None:
                    return
                self._made.append(planned)
            yield self._made[index]


def next_attempt(plans: Attempts, refused: Sequence[Refused]) -> Plan | None:
    """Return the plan to compile after those that were refused, or None if nothing is left to choose.

    The last one, if the spec fixes no tile, stages or warps, is the least slow of those that were refused for being
    slow: a kernel that spills is better than none. So is a backward that spills little better than another backend.
    """
    tried = {row.name for row in refused}
    for planned in plans:
        if planned.name not in tried:
            if refused and planned.backend != refused[-1].backend and plans.spec.direction == "backward":
                few = _least_slow(plans, refused, most=(False, LAST_SPILLS.bytes))
                if few is not None and few.backend == refused[-1].backend:
                    return few
            return _after(planned, refused)
    return _least_slow(plans, refused)


def _least_slow(plans: Attempts, refused: Sequence[Refused], most: tuple[bool, int] | None = None) -> Plan | None:
    """Return the plan that was refused for being slow and is the least so, allowed to be; None if there is none, if it
    is slower than ``most``, if one was allowed already, or if the spec fixes what could be chosen."""
    slow = [row for row in refused if row.slow is not None and (most is None or row.slow <= most)]
    if not slow or len({row.name for row in refused}) < len(refused) or plans.spec.fixes_choices:
        return None
    least = min(slow, key=lambda row: row.slow or ())
    planned = next(planned for planned in plans if planned.name == least.name)
    return _after(replace(planned, allow=tuple(dict.fromkeys((*planned.allow, *_SLOW)))), refused)


def _after(planned: Plan, refused: Sequence[Refused]) -> Plan:
    last = refused[-1] if refused else None
    reason = planned.backend_reason
    if last is not None and last.backend != planned.backend:
        reason = f"not {last.backend}: {last.reason}"
    return replace(planned, refused=tuple(refused), backend_reason=reason)


def _others(spec: KernelSpec, first: Plan) -> Iterator[Plan]:
    """Yield the other choices where the spec leaves them open: of the first plan's backend, then of slower ones."""
    spec = replace(spec, variant=fold_conditions(spec.variant))
    arch = ARCHES[spec.arch]
    offered = backends(arch, spec.direction)
    start = offered.index(first.backend)
    for backend in offered[start:] if spec.backend is None else (first.backend,):
        of_backend = replace(spec, backend=backend)
        default = _planned(of_backend)
        if default is None:
            continue
        if backend != first.backend:
            yield default
        for other in named(default.schedule).alternatives(of_backend, arch, default):
            yield replace(other, backend_reason=default.backend_reason)


def _planned(spec: KernelSpec) -> Plan | None:
    try:
        return plan(spec)
    except PlanError:
        return None
