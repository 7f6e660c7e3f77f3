"""A schedule as the rest of the planner sees it: one value, whose fields answer every question about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attngen.arch import Arch
from attngen.errors import PlanError
from attngen.plan.model import Plan
from attngen.plan.pipes import Pipes
from attngen.plan.served import UNDECLARED, ServedValues
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.measured import MeasuredRow


@dataclass(frozen=True, slots=True)
class Schedule:
    """One kernel structure: its name, and the functions of the module of ``attngen.plan.catalogue`` that knows it.

    ``plan`` raises PlanError with field and reason for what the schedule cannot do. ``suits`` says whether a spec asks
    for this structure at all: one that does not suit is skipped without a message. ``alternatives`` yields plans with
    other choices, which are compiled one after the other if ptxas refuses the first plan (it spills, or serializes
    MMAs). ``tunable`` yields specs with the choices among which ``attngen tune`` looks for the fastest, legal or not.
    ``measured_row``, of a schedule with a table of choices, is the row by which a spec that leaves choices open has
    those of a plan that was measured to be the fastest. ``keep_promises`` raises PlanError where results are less exact
    than another backend's; a spec must name the backend to accept that. ``layouts`` are those that it has kernels for;
    ``v_of_key``: v is the first columns of k, so that it serves only specs that say so; ``listed_keys``: calls list the
    keys of each query, so that it serves only variants with ``keys``; ``split_kv``: blocks split the keys of a
    sequence, so that it serves only specs that ask for this; ``split_tiles``: blocks can also split the keys of a tile
    of queries. ``serves`` lists the other fields of specs and variants that it serves, with the values of each; the
    planner refuses what it does not list.

    ``template`` is a file below ``templates``, or below ``templates/`` of attngen; ``view`` is the function, as
    ``module:name``, that turns a plan into what the template is filled with. ``pipes`` returns the pipes
    of a kernel, where it declares them. ``explanation`` is the function, as ``module:name``, that turns a
    plan and its pipes into its part of ``attngen explain``.
    """

    name: str
    backend: str
    direction: str
    template: str
    view: str
    supports: Callable[[Arch], bool]
    plan: Callable[[KernelSpec, Arch], Plan]
    alternatives: Callable[[KernelSpec, Arch, Plan], Iterator[Plan]] = lambda spec, arch, first: iter(())
    suits: Callable[[KernelSpec], bool] = lambda spec: True
    tunable: Callable[[KernelSpec, Plan], Iterator[KernelSpec]] = lambda spec, first: iter(())
    measured_row: Callable[[KernelSpec, Plan], MeasuredRow] | None = None
    keep_promises: Callable[[KernelSpec], None] = lambda spec: None
    templates: Path | None = None
    pipes: Callable[[Plan], Pipes] | None = None
    layouts: tuple[str, ...] = ("dense", "varlen")
    v_of_key: bool = False
    listed_keys: bool = False
    split_kv: bool = False
    split_tiles: bool = False
    serves: Mapping[str, ServedValues] = field(default_factory=lambda: UNDECLARED)
    explanation: str = "attngen.parts.explained.base:ScheduleExplanation"


def plans_of(
    specs: Callable[[KernelSpec, Plan], Iterator[KernelSpec]], plan: Callable[[KernelSpec, Arch], Plan]
) -> Callable[[KernelSpec, Arch, Plan], Iterator[Plan]]:
    """Return the ``alternatives`` of a schedule whose choices are all fields of a spec: it plans each of the ``specs``,
    and skips those that the schedule refuses."""

    def alternatives(spec: KernelSpec, arch: Arch, first: Plan) -> Iterator[Plan]:
        for other in specs(spec, first):
            try:
                planned = plan(other, arch)
            except PlanError:
                continue
            yield planned

    return alternatives
