"""The search for one kernel: all candidates on one case, then the best of them on every case, beside the plan's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attngen.build.pipeline import Prepared
from attngen.lab.bench.cases import BenchCase
from attngen.lab.bench.grid import measure
from attngen.lab.bench.kernels import Team
from attngen.lab.bench.runner import Bench
from attngen.plan.candidates import candidates
from attngen.plan.model import Plan
from attngen.runtime.kernels.module import Kernel
from attngen.schema import KernelSpec
from attngen.schema.tuned import fields_of, identity

#: Number of candidates that are measured on every case, beside the plan's own choice.
FINALISTS = 4

#: The speed that a candidate needs over the plan's own choice: times of one kernel differ as much.
MARGIN = 1.01

#: Number of times that the search goes on from the best candidate; a schedule may vary one of its launches at a time.
_PASSES = 3

#: Compiles kernels just as they are planned; those that the compiler refuses are missing.
Compiler = Callable[[Sequence[Prepared]], Mapping[str, Kernel]]


@dataclass(frozen=True)
class Outcome:
    """The result of one kernel. ``choice`` has the fields of a spec, and is empty where the plan's own is best.

    ``speedup`` is over the plan's own choice, the geometric mean over the cases. ``milliseconds`` are those of the
    finalists by case.
    """

    kernel: KernelSpec
    plan: Plan
    choice: Mapping[str, Any] = field(default_factory=dict)
    speedup: float = 1.0
    candidates: int = 1
    refused: int = 0
    milliseconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row of the journal."""
        return {
            "of": identity(self.kernel),
            "kernel": label_of(self.plan),
            "plan": self.plan.name,
            "choice": dict(self.choice),
            "speedup": round(self.speedup, 4),
            "candidates": self.candidates,
            "refused": self.refused,
            "milliseconds": {name: dict(by_case) for name, by_case in self.milliseconds.items()},
            "problem": self.problem,
        }


def label_of(plan: Plan) -> str:
    """The kernel of a choice, in words."""
    dims = (plan.head_dim_qk, plan.head_dim_v)
    head_dim = dims[0] if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    packed = ", packed heads" if plan.pack_gqa else ""
    return (
        f"{plan.variant.name} {plan.direction}, {plan.layout}, {plan.dtype_name}, head_dim {head_dim}{packed}, "
        f"{plan.backend}, {plan.arch_name}"
    )


def search(
    kernel: KernelSpec, cases: Sequence[BenchCase], forward_kernels: Sequence[Prepared], bench: Bench,
    compiled: Compiler,
) -> Outcome:  # fmt: skip
    """The fastest choice for a kernel. A backward kernel follows ``forward_kernels``; ``cases`` are not empty."""
    choices = list(candidates(kernel))
    own = choices[0][1]
    measured = _MeasuredCandidates(own, forward_kernels, bench, compiled, dict(compiled(forward_kernels)))
    best, speedup = own.name, 1.0
    finals: dict[str, dict[str, float]] = {}
    for _ in range(_PASSES):
        new = [(spec, plan) for spec, plan in choices if plan.name not in measured.known]
        if not new:
            break
        first = measured.enter(new, cases[-1])
        if own.name not in measured.kernels:
            return measured.outcome(kernel, problem="its own choice does not compile, or does not run")
        order = sorted(first, key=first.__getitem__)
        kept = list(dict.fromkeys([own.name, best, *order[:FINALISTS]]))
        by_case = {case.name: measured.times(kept, case, rounds=bench.rounds, check=False) for case in cases}
        for name in kept:
            finals[name] = {case: times[name] for case, times in by_case.items() if name in times}
        gains = {name: _gain(by_case, name, own.name) for name in kept}
        winner = max(gains, key=gains.__getitem__)
        if winner == best or gains[winner] < MARGIN * gains[best]:
            break
        best, speedup = winner, gains[winner]
        choices = list(candidates(measured.known[best].spec))
    choice = {} if best == own.name else fields_of(measured.known[best].spec)
    return measured.outcome(kernel, choice=choice, speedup=speedup, milliseconds=finals)


@dataclass
class _MeasuredCandidates:
    """The candidates of one kernel by name: all that are ``known``, and the ``kernels`` of those that ran right."""

    own: Plan
    forward_kernels: Sequence[Prepared]
    bench: Bench
    compiled: Compiler
    kernels: dict[str, Kernel]
    known: dict[str, Prepared] = field(default_factory=dict)
    refused: int = 0

    def enter(self, candidates: Iterable[tuple[KernelSpec, Plan]], case: BenchCase) -> dict[str, float]:
        """Compile candidates that are not known yet; return the milliseconds of those that are right in a case."""
        new = {plan.name: Prepared(spec, plan) for spec, plan in candidates}
        self.known |= new
        built = self.compiled(list(new.values()))
        self.refused += len(new) - len(built)
        self.kernels |= built
        right = self.times(built, case, rounds=1, check=True)
        for name in built:
            if name not in right:
                del self.kernels[name]
        return right

    def times(self, names: Iterable[str], case: BenchCase, *, rounds: int, check: bool) -> dict[str, float]:
        """Milliseconds of candidates in a case, of those that run."""
        members = {name: self.known[name] for name in names if name in self.kernels}
        own = self.own
        team = Team(
            own.variant, own.dtype_name, own.head_dim_qk, own.head_dim_v, members, own.direction, self.forward_kernels
        )
        bench = replace(self.bench, rounds=rounds, check=check)
        row = measure(bench, team, case, self.kernels, {}, counts_memory=False)
        return {result.contender: result.milliseconds for result in row.results if result.milliseconds is not None}

    def outcome(self, kernel: KernelSpec, **fields: Any) -> Outcome:
        """The result so far."""
        return Outcome(kernel, self.own, candidates=len(self.known), refused=self.refused, **fields)


def _gain(by_case: Mapping[str, Mapping[str, float]], name: str, own: str) -> float:
    """Speed of a candidate over the plan's own, geometric mean over the cases; 0 if it failed in one."""
    ratios = [times[own] / times[name] for times in by_case.values() if name in times and own in times]
    return statistics.geometric_mean(ratios) if len(ratios) == len(by_case) and ratios else float(name == own)
