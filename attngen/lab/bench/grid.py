"""Dense kernels of a spec beside the libraries that are installed: the grid, the variants, and ladders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attngen.build.pipeline import prepare_unrendered
from attngen.dtypes import dtype as dtype_row
from attngen.lab.bench import kernels as bench_kernels
from attngen.lab.bench.cases import DENSE_SUITES, DIRECTIONS, BenchCase, bench_cases
from attngen.lab.bench.check import GradientOracle, Oracle
from attngen.lab.bench.gradients import differentiated
from attngen.lab.bench.kernels import Team, chosen, compiled, forward_kernels_of, reason_against, teams
from attngen.lab.bench.ladder import Ladder, Rung, ladders
from attngen.lab.bench.ladder import reason_against as reason_against_ladder
from attngen.lab.bench.machine import Memory
from attngen.lab.bench.memory import workspace, workspace_bound
from attngen.lab.bench.peers import Peer, Tensors, named, peers
from attngen.lab.bench.peers import reason_against as reason_against_peer
from attngen.lab.bench.report import Report, Result, Row, grouped, reason_of
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, ReadyContender, Suite
from attngen.lab.bench.timing import Batches, Contender, Sampler, input_sets
from attngen.lab.bench.workloads import Terms, Workload, terms_of, workload
from attngen.lab.verify.gpu import Gpu
from attngen.plan.model import Plan
from attngen.runtime.arguments.checked import out_dtype_of
from attngen.runtime.kernels.module import Kernel
from attngen.schema import load_spec

#: Version of the JSON document.
FORMAT = 2


@dataclass(frozen=True)
class GridResult(Result):
    """``workspace`` are the bytes that a backward pass held besides its inputs and gradients, ``workspace_bound`` the
    most that one of attngen may."""

    workspace: int | None = None
    workspace_bound: int | None = None


@dataclass(frozen=True, kw_only=True)
class GridRow(Row[GridResult]):
    """One case. ``pairs`` are visible pairs over all heads and sequences; None in a dry run."""

    case: BenchCase
    pairs: float | None = None

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.case.name

    @property
    def line(self) -> str:
        """See ``Row``; TFLOP/s."""
        figures = [f"{result.contender} {result.tflops:.0f}" for result in self.results if result.tflops is not None]
        return f"{self.name}: {', '.join(figures) or 'nothing was measured'}"

    @property
    def fastest_peer(self) -> GridResult | None:
        """The fastest peer; None if none was measured."""
        peers = [result for result in self.results if result.peer and result.milliseconds is not None]
        return min(peers, key=lambda result: result.milliseconds or math.inf, default=None)

    def to_dict(self) -> dict[str, Any]:
        """See ``Row``."""
        best = self.fastest_peer
        return {
            **super().to_dict(),
            **asdict(self.case),
            "visible_pairs": self.pairs,
            "flops": None if self.pairs is None else self.case.flops(self.pairs),
            "best_peer": best and best.contender,
            "ratios": self.ratios,
        }

    def result_to_dict(self, result: GridResult) -> dict[str, Any]:
        """See ``Row``."""
        timing = result.timing
        return {
            **result.to_dict(),
            "milliseconds": result.milliseconds,
            "samples": list(timing.samples) if timing else [],
            "host_bound": timing and timing.host_bound,
            "workspace_bytes": result.workspace,
            "workspace_bound_bytes": result.workspace_bound,
        }


@dataclass(frozen=True, slots=True)
class RungResult:
    """A rung of a ladder in one case: its speed, and its ratios to the speeds of the first rung, the one before and the
    last one.

    All four are None where the rung, or the one that it is compared with, was not measured.
    """

    rung: Rung
    result: GridResult | None = None
    to_first: float | None = None
    to_previous: float | None = None
    to_last: float | None = None


def steps(ladder: Ladder, row: GridRow) -> tuple[RungResult, ...]:
    """The rungs of a ladder with their figures in a case."""
    results = {result.contender: result for result in row.results}
    speeds = {name: result.tflops for name, result in results.items() if result.tflops is not None}
    first, last = (speeds.get(ladder.rungs[end].name) for end in (0, -1))
    climbed, previous = [], None
    for rung in ladder.rungs:
        speed = speeds.get(rung.name)
        ratios = (
            speed / other if speed is not None and other is not None else None for other in (first, previous, last)
        )
        climbed.append(RungResult(rung, results.get(rung.name), *ratios))
        previous = speed if speed is not None else previous
    return tuple(climbed)


@dataclass(frozen=True, kw_only=True)
class GridReport(Report[GridRow]):
    """A run of dense calls so far.

    ``ladders`` are those of ``--ladder``; ``resources`` holds the compiler's report of each kernel.
    """

    ladders: tuple[Ladder, ...] = ()
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def rows_of(self, ladder: Ladder) -> list[GridRow]:
        """The cases in which the rungs of a ladder were measured."""
        names = {kernel.plan.name for kernel in ladder.kernels.values()}
        return [row for row in self.rows if {result.kernel for result in row.results} <= names]

    @property
    def lengths(self) -> dict[str, list[GridRow]]:
        """The rows that differ in their lengths only, in their order."""
        return grouped(self.rows, lambda row: row.case.group)

    @property
    def directions(self) -> list[str]:
        """Forward, backward or both, as the cases have them."""
        return list(dict.fromkeys(row.case.direction for row in self.rows))

    @property
    def groups(self) -> dict[str, list[GridRow]]:
        """See ``Report``: rows of all lengths, and each suite in each direction, such as ``grid backward``."""
        suites = {
            suite if direction == "forward" else f"{suite} {direction}": [
                row for row in self.rows if (row.case.suite, row.case.direction) == (suite, direction)
            ]
            for direction in DIRECTIONS
            for suite in DENSE_SUITES
        }
        return {**self.lengths, **suites}

    def to_causal(self, row: GridRow) -> dict[str, float]:
        """The time per visible pair of each contender over that of attngen's fastest causal kernel.

        That kernel is from the case that differs in its variant only; empty where it was not measured, and on the grid.
        """
        if row.case.suite != "variants":
            return {}
        causal = replace(row.case, variant="causal")
        kernels = [r for other in self.rows if other.case == causal for r in other.results if not r.peer]
        fastest = max((r.tflops for r in kernels if r.tflops), default=None)
        return {r.contender: fastest / r.tflops for r in row.results if r.tflops} if fastest else {}

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        document = super().to_dict()
        rows = [
            {**as_dict, "to_causal": self.to_causal(row)}
            for as_dict, row in zip(document["rows"], self.rows, strict=True)
        ]
        return {
            **document,
            "format": FORMAT,
            "rows": rows,
            "left_out": dict(self.left_out),
            "ladders": [self._ladder(ladder) for ladder in self.ladders],
        }

    def _ladder(self, ladder: Ladder) -> dict[str, Any]:
        return {
            "kernel": ladder.of.name,
            "rungs": [
                {
                    "name": rung.name,
                    "kernel": rung.plan and rung.plan.name,
                    "entry": list(rung.lines),
                    "changed": list(rung.changed),
                    "refusal": rung.refusal,
                    **memory_of(rung, self.resources),
                }
                for rung in ladder.rungs
            ],
            "cases": [
                {
                    "name": row.name,
                    "rungs": [
                        {
                            "name": step.rung.name,
                            "tflops": step.result and step.result.tflops,
                            "to_first": step.to_first,
                            "to_previous": step.to_previous,
                            "to_last": step.to_last,
                        }
                        for step in steps(ladder, row)
                    ],
                }
                for row in self.rows_of(ladder)
            ],
        }


def memory_of(rung: Rung, resources: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """Registers per thread that a launch reserves and that a multiplying warp has, and bytes of shared memory.

    None for what is not known before the kernel is compiled, or does not exist.
    """
    plan = rung.plan
    if plan is None or not plan.structure.shared:
        return {"registers": None, "consumer_registers": None, "shared_memory": None}
    launched = resources.get(plan.name, {}).get("registers")
    roles = plan.structure.warp_roles  # where all warps do the same, they keep the registers of the launch
    consumer = max(role.registers for role in roles) if len(roles) > 1 else launched
    return {"registers": launched, "consumer_registers": consumer, "shared_memory": plan.structure.shared_bytes}


class GridSuite(Suite[tuple[Team, BenchCase], GridReport]):
    """Dense forward and backward kernels, team by team; or ladders instead of teams and peers.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel or no library.
    """

    def __init__(self, spec: str | Path, options: BenchOptions, capability: int | None) -> None:
        self.options = options
        loaded = load_spec(spec)
        prepared = prepare_unrendered(loaded)
        left_out, kept = {}, []
        for kernel in chosen(prepared, options.part, options.variants):
            plan = kernel.plan
            reason = reason_against(plan, capability, options.directions)
            if reason is None and options.ladder:
                reason = reason_against_ladder(plan)
            if reason is None and plan.direction == "backward" and not forward_kernels_of(plan, prepared, capability):
                reason = "the spec has no dense forward that it could follow"
            if reason is None:
                kept.append(kernel)
            else:
                left_out[plan.name] = reason
        climbed = tuple(ladders(kept)) if options.ladder else ()
        own = [_team_of(ladder) for ladder in climbed] if options.ladder else teams(kept, prepared, capability)
        self.cases = [(team, case) for team in own for case in _cases(team, options)]
        # forward before backward passes, the grid before variants
        self.cases.sort(key=lambda planned: (DIRECTIONS.index(planned[1].direction), planned[1].suite))
        self.peers: Sequence[Peer] = () if options.ladder else named(peers(), options.peers)
        self.report = GridReport(spec=str(spec), package=loaded.package, left_out=left_out, ladders=climbed)
        self.kernels: Mapping[str, Kernel] = {}
        self.errors: Mapping[str, str] = {}

    def planned(self, case: tuple[Team, BenchCase]) -> GridRow:
        """See ``Suite``."""
        team, sizes = case
        terms = terms_of(team.variant, sizes, "cpu")
        results = [_result_of(peer, sizes, terms) for peer in self.peers]
        own = [GridResult(label, member.plan.name) for label, member in team.members.items()]
        return GridRow(results=(*results, *own), case=sizes)

    def compiled(self, gpu: Gpu, observer: Observer) -> GridReport:
        """See ``Suite``; also the forward kernels that backward kernels follow."""
        members = [one for team, _ in self.cases for one in (*team.members.values(), *team.forward_kernels)]
        self.kernels, self.errors = compiled(members, self.options.jobs)
        resources = {name: kernel.manifest["resources"] for name, kernel in self.kernels.items()}
        return replace(self.report, resources=resources)

    def measured(self, bench: Bench, case: tuple[Team, BenchCase]) -> GridRow:
        """See ``Suite``."""
        team, sizes = case
        return measure(bench, team, sizes, self.kernels, self.errors, self.peers, taken=self.options.taken)


def measure(
    bench: Bench, team: Team, case: BenchCase, kernels: Mapping[str, Kernel], errors: Mapping[str, str],
    peers: Sequence[Peer] = (), *, taken: bool = False, counts_memory: bool = True,
) -> GridRow:  # fmt: skip
    """Time the kernels of a team and the peers in one case.

    ``kernels`` holds the kernels that compiled, by name, ``errors`` the errors of the others. ``taken``: of forward
    kernels, only the one that a call takes. ``counts_memory``: of backward passes.
    """
    members = team.members
    try:
        work = workload(team.variant, case, bench.device)
        inputs = _inputs(bench, case)
        dout = _output_gradients(bench, case, len(inputs))
        oracle = _oracle(work, inputs[0], dout) if bench.check else None
    except (ValueError, IndexError, torch.OutOfMemoryError) as error:
        reason = reason_of(error)
        results = [GridResult(label, one.plan.name, "unsupported", reason) for label, one in members.items()]
        return GridRow(results=tuple(results), case=case)
    shapes = [t.shape for t in inputs[0].bshd] if dout else [(*inputs[0].q.shape[:3], case.head_dim_v)]
    memory = Memory(shapes, out_dtype_of(inputs[0].q.dtype), bench.device)

    def enter(result: GridResult, make: Callable[[], Contender]) -> tuple[GridResult, Sampler | None]:
        def entry() -> ReadyContender:
            contender = differentiated(make(), dout) if dout else make()
            sampler = Batches(contender, bench.clock, memory)
            held = partial(_held, bench.device, contender) if dout and counts_memory else dict
            if oracle is None:
                return ReadyContender(sampler, measure=held)
            return ReadyContender(sampler, oracle.error, oracle.limit, measure=held)

        return bench.enter(replace(result, flops=work.flops), entry)

    entered: list[tuple[GridResult, Sampler | None]] = []
    for peer in peers:
        result, terms = _result_of(peer, case, work.terms), work.terms
        if result.status == "planned" and terms is not None:
            entered.append(enter(result, partial(peer.enter, work, terms, inputs)))
        else:
            entered.append((result, None))
    if taken and not dout:
        members = bench_kernels.taken(team, kernels, work, inputs[0])
    forward_names = [one.plan.name for one in team.forward_kernels]
    forward_kernels = [kernels[name] for name in forward_names if name in kernels]
    for label, member in members.items():
        name = member.plan.name
        result = GridResult(label, name, workspace_bound=_bound(member.plan, case) if dout else None)
        if name in kernels:
            make = partial(bench_kernels.enter, label, kernels[name], work, inputs, forward_kernels)
            entered.append(enter(result, make))
        else:
            entered.append((replace(result, status="failed", reason=errors[name]), None))
    timed, reading = bench.measure(entered)
    return GridRow(results=timed, case=case, pairs=work.pairs, input_sets=len(inputs), reading=reading)


def _result_of(peer: Peer, case: BenchCase, terms: Terms | None) -> GridResult:
    """The result of a library before it is called: unsupported where it is known not to support the case."""
    reason = reason_against_peer(peer, case, terms)
    return GridResult(peer.name, status="planned" if reason is None else "unsupported", reason=reason, peer=True)


def _held(device: torch.device, contender: Contender) -> dict[str, int]:
    return {"workspace": workspace(device, contender.first)}


def _team_of(ladder: Ladder) -> Team:
    """The rungs of a ladder as a team."""
    plan = ladder.of
    return Team(plan.variant, plan.dtype_name, plan.head_dim_qk, plan.head_dim_v, ladder.kernels)


def _cases(team: Team, options: BenchOptions) -> Sequence[BenchCase]:
    """The cases of a team; a ladder has those of one suite."""
    every = bench_cases(
        team.variant.name, team.dtype, team.head_dim_qk, team.head_dim_v,
        tokens=options.tokens, seqlens=options.seqlens, direction=team.direction,
        plain=team.variant.without_max_logits().name,
    )  # fmt: skip
    cases = [case for case in every if case.suite in options.suites]
    return [case for case in cases if case.suite == cases[0].suite] if options.ladder else cases


def _inputs(bench: Bench, case: BenchCase) -> list[Tensors]:
    """Sets of random inputs that exceed the L2 cache; those of a backward pass require gradients."""
    width = (case.heads + case.kv_heads) * case.head_dim_qk + case.kv_heads * case.head_dim_v
    sets = input_sets(case.batch * case.seqlen * width * dtype_row(case.dtype).bytes, bench.l2_bytes)
    shapes = ((case.heads, case.head_dim_qk), (case.kv_heads, case.head_dim_qk), (case.kv_heads, case.head_dim_v))
    differentiable = case.direction == "backward"
    return [
        Tensors(*(_random(bench, case, *shape).requires_grad_(differentiable) for shape in shapes)) for _ in range(sets)
    ]


def _output_gradients(bench: Bench, case: BenchCase, sets: int) -> list[Tensor]:
    """Random gradients of the output for each set of inputs; none for a forward pass."""
    if case.direction == "forward":
        return []
    return [_random(bench, case, case.heads, case.head_dim_v) for _ in range(sets)]


def _random(bench: Bench, case: BenchCase, heads: int, width: int) -> Tensor:
    dtype = getattr(torch, dtype_row(case.dtype).torch)
    drawn = torch.float32 if dtype.itemsize == 1 else dtype  # torch draws no random numbers of 8 bits
    shape = (case.batch, case.seqlen, heads, width)
    return torch.randn(shape, generator=bench.generator, device=bench.device, dtype=drawn).to(dtype)


def _oracle(work: Workload, one: Tensors, dout: Sequence[Tensor]) -> Oracle | GradientOracle:
    return GradientOracle(work, *one.bshd, dout[0]) if dout else Oracle(work, *one.bshd)


def _bound(plan: Plan, case: BenchCase) -> int:
    return workspace_bound(
        plan, batch=case.batch, seqlen_q=case.seqlen, seqlen_k=case.seqlen, heads=case.heads, kv_heads=case.kv_heads
    )
