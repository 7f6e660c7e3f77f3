"""One case at a time: inputs, every contestant that supports it, the check of what each computes, and the race."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attngen.dtypes import dtype as dtype_row
from attngen.errors import NoKernelError
from attngen.runtime.module import Kernel
from attngen.tools import bench_kernels
from attngen.tools.bench_cases import BenchCase
from attngen.tools.bench_check import Oracle
from attngen.tools.bench_kernels import Team
from attngen.tools.bench_machine import Memory, Reading
from attngen.tools.bench_peers import Peer, Tensors, reason_against
from attngen.tools.bench_report import Result, Row
from attngen.tools.bench_timing import Clock, Contestant, race
from attngen.tools.bench_workloads import Workload, terms_of, workload

#: Most sets of inputs; calls so small that this many fit the cache are bound by the host anyway.
_MAX_SETS = 64

#: Characters of an error that a table or a report holds.
_REASON = 300


@dataclass(frozen=True)
class Track:
    """Where races take place, and by which rules.

    ``l2_bytes`` is what inputs must exceed; ``readings`` tells how the card did since a moment of ``time.monotonic``.
    """

    device: torch.device
    l2_bytes: int
    clock: Clock
    peers: Sequence[Peer]
    rounds: int
    check: bool
    generator: torch.Generator
    readings: Callable[[float], Reading | None]

    def measure(self, team: Team, kernels: Mapping[str, Kernel], errors: Mapping[str, str], case: BenchCase) -> Row:
        """Race a case. ``kernels`` holds those that compiled, by name, and ``errors`` what is wrong with others."""
        ours = {label: member.plan.name for label, member in team.members.items()}
        try:
            work = workload(team.variant, case, self.device)
            inputs = self._inputs(case)
            oracle = Oracle(work, inputs[0].q, inputs[0].k, inputs[0].v) if self.check else None
        except (ValueError, IndexError, torch.OutOfMemoryError) as error:
            return Row(case, tuple(_unsupported(label, error, name) for label, name in ours.items()))
        shape = (case.batch, case.seqlen, case.heads, case.head_dim_v)
        memory = Memory(shape, inputs[0].q.dtype, self.device)
        entered = [self._enter_peer(peer, work, inputs, oracle, memory) for peer in self.peers]
        for label, name in ours.items():
            if name in kernels:
                make = _entry(label, kernels[name], work, inputs)
                entered.append(_enter(Result(label, name), make, oracle, memory))
            else:
                entered.append((Result(label, name, "failed", errors[name]), None))
        began = time.monotonic()  # after whatever compiles
        results = self._timed(work, entered, memory)
        return Row(case, results, work.pairs, len(inputs), self.readings(began))

    def _inputs(self, case: BenchCase) -> list[Tensors]:
        """Return as many sets of random inputs as exceed twice the L2 cache."""
        dtype = getattr(torch, dtype_row(case.dtype).torch)
        width = (case.heads + case.kv_heads) * case.head_dim_qk + case.kv_heads * case.head_dim_v
        size = case.batch * case.seqlen * width * dtype.itemsize
        shapes = ((case.heads, case.head_dim_qk), (case.kv_heads, case.head_dim_qk), (case.kv_heads, case.head_dim_v))
        return [
            Tensors(*(
                torch.randn(case.batch, case.seqlen, *shape, generator=self.generator, device=self.device, dtype=dtype)
                for shape in shapes
            ))
            for _ in range(min(max(math.ceil(2 * self.l2_bytes / size), 1), _MAX_SETS))
        ]  # fmt: skip

    def _enter_peer(
        self, peer: Peer, work: Workload, inputs: Sequence[Tensors], oracle: Oracle | None, memory: Memory
    ) -> tuple[Result, Contestant | None]:
        reason, terms = reason_against(peer, work.case, work.terms), work.terms
        if reason is not None or terms is None:
            return Result(peer.name, status="unsupported", reason=reason), None
        return _enter(Result(peer.name), lambda: peer.enter(work, terms, inputs), oracle, memory)

    def _timed(
        self, work: Workload, entered: Sequence[tuple[Result, Contestant | None]], memory: Memory
    ) -> tuple[Result, ...]:
        """Return the results with the times of those that are in the race."""
        racing = [contestant for _, contestant in entered if contestant is not None]
        try:
            timings = iter(race(racing, self.clock, memory, self.rounds))
        except Exception as error:  # of whom, nobody can say: nothing of this case can be trusted
            return tuple(
                result if contestant is None else replace(result, status="failed", reason=_words(error))
                for result, contestant in entered
            )
        done = []
        for result, contestant in entered:
            if contestant is None:
                done.append(result)
                continue
            timing = next(timings)
            if timing.intact:
                tflops = work.flops / timing.milliseconds / 1e9
                done.append(replace(result, status="measured", timing=timing, tflops=tflops))
            else:
                done.append(replace(result, status="failed", reason="an output holds a NaN, or was not all written"))
        return tuple(done)


def foresee(team: Team, peers: Sequence[Peer], case: BenchCase) -> Row:
    """Return a case with its contestants, as far as reasons against them are known without running anything."""
    terms = terms_of(team.variant, case, "cpu")
    results = []
    for peer in peers:
        reason = reason_against(peer, case, terms)
        results.append(Result(peer.name, status="planned" if reason is None else "unsupported", reason=reason))
    results += [Result(label, member.plan.name) for label, member in team.members.items()]
    return Row(case, tuple(results))


def _entry(label: str, kernel: Kernel, work: Workload, inputs: Sequence[Tensors]) -> Callable[[], Contestant]:
    return lambda: bench_kernels.enter(label, kernel, work, inputs)


def _enter(
    result: Result, make: Callable[[], Contestant], oracle: Oracle | None, memory: Memory
) -> tuple[Result, Contestant | None]:
    """Prepare a contestant, run it once and check its output; a reason instead if it cannot race."""
    try:
        contestant = make()
        memory.poison()
        out = contestant.first()
        error = None if oracle is None else oracle.error(out)
    except NoKernelError as refusal:
        return _unsupported(result.contestant, refusal, result.kernel), None
    except Exception as raised:  # whatever a library raises for what it does not support, or a kernel on its way down
        if result.ours:
            return replace(result, status="failed", reason=_words(raised)), None
        return _unsupported(result.contestant, raised), None
    if oracle is not None and error is not None:
        problem = oracle.problem(error)
        if problem is not None:
            return replace(result, status="failed", reason=problem, error=error), None
    return replace(result, error=error), contestant


def _unsupported(contestant: str, error: Exception, kernel: str | None = None) -> Result:
    return Result(contestant, kernel, "unsupported", _words(error))


def _words(error: Exception) -> str:
    """Return the first line of an error, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_REASON]}" if lines else type(error).__name__
