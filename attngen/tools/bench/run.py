"""The kernels of a spec beside the libraries that are installed, in one process, case by case."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attngen.errors import LoadError
from attngen.runtime.kernels.module import Kernel
from attngen.schema import load_spec
from attngen.tools.bench.cases import DIRECTIONS, SUITES, TOKENS, BenchCase, bench_cases
from attngen.tools.bench.kernels import Team, chosen, compiled, forwards_of, reason_against, teams
from attngen.tools.bench.ladder import Ladder, ladders
from attngen.tools.bench.ladder import reason_against as reason_against_ladder
from attngen.tools.bench.machine import Monitor, ceilings, gpu_facts, versions
from attngen.tools.bench.memory import workspace
from attngen.tools.bench.peers import Peer, named, peers
from attngen.tools.bench.race import Sustaining, Track, foresee
from attngen.tools.bench.report import BenchReport
from attngen.tools.bench.timing import CudaClock
from attngen.tools.build.pipeline import prepare
from attngen.tools.verify.gpu import Gpu

_MAX_SEED = 2**31

#: Called after each case with all that is known, and with how many cases there will be.
Observer = Callable[[BenchReport, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What is raced, and how. ``part`` is part of a kernel's name; without ``seqlens`` the cases have their own.

    ``directions`` are some of ``DIRECTIONS``, ``suites`` of ``SUITES``. ``ladder``: instead of kernels and peers, the
    rungs that lead to each CUDA kernel. ``sustained``: without pauses. ``peers``: only those whose names contain one of
    these. ``taken``: of forwards, only the kernel that a call takes.
    """

    part: str | None = None
    variants: Sequence[str] = ()
    tokens: int = TOKENS
    seqlens: Sequence[int] = ()
    rounds: int = 7
    check: bool = True
    jobs: int | None = None
    ladder: bool = False
    directions: Sequence[str] = DIRECTIONS
    suites: Sequence[str] = SUITES
    sustained: bool = False
    peers: Sequence[str] = ()
    taken: bool = False


def dry_run(spec: str | Path, options: Options) -> BenchReport:
    """Return the cases and who would be in them, without figures; needs no GPU.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel of it.
    """
    capability = Gpu.current().capability if torch.cuda.is_available() else None
    report, cases = _planned(spec, options, capability)
    rows = tuple(foresee(team, _peers(options), case) for team, case in cases)
    return replace(report, rows=rows)


def bench(spec: str | Path, options: Options, observer: Observer) -> BenchReport:
    """Race the kernels of a spec that this GPU runs; those that the cache lacks are compiled first.

    Raises LoadError without a GPU, SpecError if the spec is wrong, CallError if the options name no kernel of it.
    """
    if not torch.cuda.is_available():
        raise LoadError("bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the cases without one")
    gpu = Gpu.current()
    report, cases = _planned(spec, options, gpu.capability)
    kernels, errors = _compiled([team for team, _ in cases], options.jobs)
    resources = {name: kernel.manifest["resources"] for name, kernel in kernels.items()}
    facts, clock, seed = gpu_facts(gpu), CudaClock(), secrets.randbelow(_MAX_SEED)
    generator = torch.Generator(gpu.device).manual_seed(seed)
    report = replace(report, gpu=facts, versions=versions(), rounds=options.rounds, seed=seed, resources=resources)
    with torch.no_grad(), Monitor(gpu) as monitor:
        track = Track(
            gpu.device, facts["l2_bytes"], clock, _peers(options), options.rounds, options.check, generator,
            monitor.since, partial(workspace, gpu.device),
            Sustaining(random.Random(seed), monitor.within) if options.sustained else None,
            options.taken,
        )  # fmt: skip
        if cases:
            report = replace(report, ceilings=ceilings(gpu, clock, options.rounds))
        for team, case in cases:
            report = replace(report, rows=(*report.rows, track.measure(team, kernels, errors, case)))
            if not gpu.answers():
                report = replace(report, stopped=f"the GPU has not responded since {case.name}")
            observer(report, len(cases))
            if report.stopped is not None:
                break
            torch.cuda.empty_cache()
    return report


def _planned(
    spec: str | Path, options: Options, capability: int | None
) -> tuple[BenchReport, list[tuple[Team, BenchCase]]]:
    """Return a report without rows, and the cases with the kernels that race in each."""
    loaded = load_spec(spec)
    left_out, kept = {}, []
    prepared = prepare(loaded)
    for kernel in chosen(prepared, options.part, options.variants):
        plan = kernel.plan
        reason = reason_against(plan, capability, options.directions)
        if reason is None and options.ladder:
            reason = reason_against_ladder(plan)
        if reason is None and plan.direction == "backward" and not forwards_of(plan, prepared, capability):
            reason = "the spec has no dense forward that it could follow"
        if reason is None:
            kept.append(kernel)
        else:
            left_out[plan.name] = reason
    climbed = tuple(ladders(kept)) if options.ladder else ()
    cases = [
        (team, case)
        for team in (map(_team_of, climbed) if options.ladder else teams(kept, prepared, capability))
        for case in _cases(team, options)
    ]
    # forwards before backwards, grid before variants
    cases.sort(key=lambda planned: (DIRECTIONS.index(planned[1].direction), planned[1].suite))
    return BenchReport(str(spec), loaded.package, (), left_out, ladders=climbed), cases


def _peers(options: Options) -> Sequence[Peer]:
    return () if options.ladder else named(peers(), options.peers)


def _team_of(ladder: Ladder) -> Team:
    """Return the rungs of a ladder as a team."""
    found = ladder.of
    return Team(found.variant, found.dtype_name, found.head_dim_qk, found.head_dim_v, ladder.kernels)


def _cases(team: Team, options: Options) -> Sequence[BenchCase]:
    """Return the cases of a team; a ladder has those of one suite."""
    every = bench_cases(
        team.variant.name, team.dtype, team.head_dim_qk, team.head_dim_v,
        tokens=options.tokens, seqlens=options.seqlens, direction=team.direction,
    )  # fmt: skip
    found = [case for case in every if case.suite in options.suites]
    return [case for case in found if case.suite == found[0].suite] if options.ladder else found


def _compiled(racing: Sequence[Team], jobs: int | None) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Return the kernels by name, with the forwards of backwards, and what is wrong with those that do not compile."""
    return compiled([one for team in racing for one in (*team.members.values(), *team.forwards)], jobs)
