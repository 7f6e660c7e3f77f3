"""One case at a time: inputs, every contestant that supports it, the check of what each computes, and the race."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.errors import NoKernelError
from attngen.plan.model import Plan
from attngen.runtime.arguments.checked import out_dtype_of
from attngen.runtime.kernels.module import Kernel
from attngen.tools.bench import kernels as bench_kernels
from attngen.tools.bench.cases import BenchCase
from attngen.tools.bench.check import GradientOracle, Judge, Oracle
from attngen.tools.bench.gradients import differentiated
from attngen.tools.bench.kernels import Team
from attngen.tools.bench.machine import Memory, Reading
from attngen.tools.bench.memory import workspace_bound
from attngen.tools.bench.outcome import raced, reason_of
from attngen.tools.bench.peers import Peer, Tensors, reason_against
from attngen.tools.bench.report import Result, Row
from attngen.tools.bench.timing import Clock, Contestant, Timing, race, sustained_race
from attngen.tools.bench.workloads import Workload, terms_of, workload

#: Most sets of inputs; calls so small that this many fit the cache are bound by the host anyway.
_MAX_SETS = 64


#: Turns the forward calls of a contestant into what is raced.
_Prepare = Callable[[Contestant], Contestant]


@dataclass(frozen=True)
class Sustaining:
    """How a race without pauses goes: in which order, and how the card did in some spans of ``time.monotonic``."""

    order: random.Random
    within: Callable[[Sequence[tuple[float, float]]], Reading | None]


@dataclass(frozen=True)
class Track:
    """Where races take place, and by which rules; ``sustained`` ones without pauses.

    ``l2_bytes`` is what inputs must exceed; ``readings`` returns the state of the card since a moment of
    ``time.monotonic``; ``workspace`` returns the memory that a backward took besides its results, and is None where
    nothing counts it. ``taken``: of forwards, the one that a call takes is raced for all of a team.
    """

    device: torch.device
    l2_bytes: int
    clock: Clock
    peers: Sequence[Peer]
    rounds: int
    check: bool
    generator: torch.Generator
    readings: Callable[[float], Reading | None]
    workspace: Callable[[Callable[[], Any]], int] | None = None
    sustained: Sustaining | None = None
    taken: bool = False

    def measure(self, team: Team, kernels: Mapping[str, Kernel], errors: Mapping[str, str], case: BenchCase) -> Row:
        """Race a case. ``kernels`` holds those that compiled, by name, and ``errors`` the errors of the others."""
        ours = {label: member.plan.name for label, member in team.members.items()}
        try:
            work = workload(team.variant, case, self.device)
            inputs = self._inputs(case)
            above = self._above(case, len(inputs))
            judge = self._judge(work, inputs[0], above) if self.check else None
        except (ValueError, IndexError, torch.OutOfMemoryError) as error:
            return Row(case, tuple(_unsupported(label, error, name) for label, name in ours.items()))
        shapes = [t.shape for t in inputs[0].bshd] if above else [(*inputs[0].q.shape[:3], case.head_dim_v)]
        memory = Memory(shapes, out_dtype_of(inputs[0].q.dtype), self.device)
        prepare: _Prepare = (lambda forward: differentiated(forward, above)) if above else (lambda forward: forward)
        entered = [self._enter_peer(peer, work, inputs, prepare, judge, memory) for peer in self.peers]
        if self.taken and not above:
            members = bench_kernels.taken(team, kernels, work, inputs[0])
            ours = {label: member.plan.name for label, member in members.items()}
        else:
            members = dict(team.members)
        forwards = [kernels[one.plan.name] for one in team.forwards if one.plan.name in kernels]
        for label, member in members.items():
            name = ours[label]
            if name in kernels:
                make = _entry(label, kernels[name], work, inputs, forwards)
                bound = _bound(member.plan, case) if above else None
                result = Result(label, name, workspace_bound=bound)
                entered.append(self._enter(result, make, prepare, judge, memory))
            else:
                entered.append((Result(label, name, "failed", errors[name]), None))
        began = time.monotonic()  # after anything that compiles
        timed = self._timed(work, entered, memory)
        return Row(case, timed, work.pairs, len(inputs), self.readings(began))

    def _inputs(self, case: BenchCase) -> list[Tensors]:
        """Return as many sets of random inputs as exceed twice the L2 cache; those of a backward require gradients."""
        dtype = getattr(torch, dtype_row(case.dtype).torch)
        width = (case.heads + case.kv_heads) * case.head_dim_qk + case.kv_heads * case.head_dim_v
        size = case.batch * case.seqlen * width * dtype.itemsize
        shapes = ((case.heads, case.head_dim_qk), (case.kv_heads, case.head_dim_qk), (case.kv_heads, case.head_dim_v))
        sets = min(max(math.ceil(2 * self.l2_bytes / size), 1), _MAX_SETS)
        asked = case.direction == "backward"
        return [Tensors(*(self._random(case, *shape).requires_grad_(asked) for shape in shapes)) for _ in range(sets)]

    def _above(self, case: BenchCase, sets: int) -> list[Tensor]:
        """Return random gradients of the output for each of ``sets`` sets of inputs, none for a forward."""
        if case.direction == "forward":
            return []
        return [self._random(case, case.heads, case.head_dim_v) for _ in range(sets)]

    def _random(self, case: BenchCase, heads: int, width: int) -> Tensor:
        dtype = getattr(torch, dtype_row(case.dtype).torch)
        shape = (case.batch, case.seqlen, heads, width)
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=_drawn_in(dtype)).to(dtype)

    def _judge(self, work: Workload, one: Tensors, above: Sequence[Tensor]) -> Judge:
        return GradientOracle(work, *one.bshd, above[0]) if above else Oracle(work, *one.bshd)

    def _enter_peer(
        self,
        peer: Peer,
        work: Workload,
        inputs: Sequence[Tensors],
        prepare: _Prepare,
        judge: Judge | None,
        memory: Memory,
    ) -> tuple[Result, Contestant | None]:
        reason, terms = reason_against(peer, work.case, work.terms), work.terms
        if reason is not None or terms is None:
            return Result(peer.name, status="unsupported", reason=reason), None
        return self._enter(Result(peer.name), lambda: peer.enter(work, terms, inputs), prepare, judge, memory)

    def _enter(
        self,
        result: Result,
        make: Callable[[], Contestant],
        prepare: _Prepare,
        judge: Judge | None,
        memory: Memory,
    ) -> tuple[Result, Contestant | None]:
        """Prepare a contestant, run it once and check its results; a reason instead if it cannot race."""
        try:
            forward = make()
            contestant = prepare(forward)
            memory.poison()
            found = contestant.first()
            error = None if judge is None else judge.error(found)
            del found
            held = None
            if contestant is not forward and self.workspace is not None:
                held = self.workspace(contestant.first)
        except NoKernelError as refusal:
            return _unsupported(result.contestant, refusal, result.kernel), None
        except Exception as raised:  # whatever a library raises for what it lacks, or a kernel on its way down
            if result.ours:
                return replace(result, status="failed", reason=reason_of(raised)), None
            return _unsupported(result.contestant, raised), None
        if judge is not None and error is not None:
            problem = judge.problem(error)
            if problem is not None:
                return replace(result, status="failed", reason=problem, error=error), None
        return replace(result, error=error, workspace=held), contestant

    def _timed(
        self, work: Workload, entered: Sequence[tuple[Result, Contestant | None]], memory: Memory
    ) -> tuple[Result, ...]:
        """Return the results with the times of those that are in the race."""
        sustained = self.sustained

        def timed(racing: list[Contestant]) -> Sequence[Timing]:
            if sustained is not None:
                return sustained_race(racing, self.clock, memory, self.rounds, sustained.order)
            return race(racing, self.clock, memory, self.rounds)

        def read(timing: Timing) -> dict[str, Any]:
            reading = sustained.within(timing.spans) if sustained is not None else None
            return {"timing": timing, "tflops": work.flops / timing.milliseconds / 1e9, "reading": reading}

        return raced(entered, timed, read)


def foresee(team: Team, peers: Sequence[Peer], case: BenchCase) -> Row:
    """Return a case with its contestants, as far as reasons against them are known without running anything."""
    terms = terms_of(team.variant, case, "cpu")
    results = []
    for peer in peers:
        reason = reason_against(peer, case, terms)
        results.append(Result(peer.name, status="planned" if reason is None else "unsupported", reason=reason))
    results += [Result(label, member.plan.name) for label, member in team.members.items()]
    return Row(case, tuple(results))


def _entry(
    label: str, kernel: Kernel, work: Workload, inputs: Sequence[Tensors], forwards: Sequence[Kernel]
) -> Callable[[], Contestant]:
    return lambda: bench_kernels.enter(label, kernel, work, inputs, forwards)


def _bound(plan: Plan, case: BenchCase) -> int:
    return workspace_bound(
        plan, batch=case.batch, seqlen_q=case.seqlen, seqlen_k=case.seqlen, heads=case.heads, kv_heads=case.kv_heads
    )


def _unsupported(contestant: str, error: Exception, kernel: str | None = None) -> Result:
    return Result(contestant, kernel, "unsupported", reason_of(error))


def _drawn_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which random numbers of ``dtype`` are drawn: torch has none of 8 bits."""
    return torch.float32 if dtype.itemsize == 1 else dtype
