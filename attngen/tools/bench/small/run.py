"""The suite of small calls: the kernels of a spec, as the dispatcher takes them, beside the libraries that are here."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attngen.errors import CallError, LoadError, NoKernelError, suggest
from attngen.runtime.calls.dispatch import explain
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec, preset
from attngen.tools.bench.cases import BenchCase
from attngen.tools.bench.check import TOLERANCE
from attngen.tools.bench.kernels import chosen, compiled
from attngen.tools.bench.machine import Monitor, ceilings, gpu_facts, versions
from attngen.tools.bench.outcome import raced, reason_of
from attngen.tools.bench.peers import FlashAttention3, FlashAttention4, Peer, Sdpa, Tensors, named, reason_against
from attngen.tools.bench.serving.replay import Capture, Replayed, Track, cuda_graph, race, sustained_race
from attngen.tools.bench.small.inputs import Inputs
from attngen.tools.bench.small.report import OURS, SmallReport, SmallResult, SmallRow
from attngen.tools.bench.small.shapes import DTYPE, Shape, small_shapes
from attngen.tools.bench.timing import Clock, Contestant, CudaClock
from attngen.tools.bench.workloads import Workload, terms_of
from attngen.tools.build.pipeline import Prepared, prepare
from attngen.tools.verify.gpu import Gpu

_MAX_SEED = 2**31

#: Called after each call with all that is known, and with how many there will be.
Observer = Callable[[SmallReport, int], None]


@dataclass(frozen=True, slots=True)
class SmallOptions:
    """What is raced: kernels whose name contains ``part``, calls by parts of their names. ``sustained``: without
    pauses. ``peers``: only those whose names contain one of these."""

    part: str | None = None
    cells: Sequence[str] = ()
    rounds: int = 7
    check: bool = True
    jobs: int | None = None
    sustained: bool = False
    peers: Sequence[str] = ()


@dataclass(frozen=True)
class _Course:
    """Where calls are raced, and by which rules."""

    device: torch.device
    l2_bytes: int
    clock: Clock
    capture: Capture
    options: SmallOptions
    generator: torch.Generator
    order: random.Random
    package: str
    peers: Sequence[Peer]
    monitor: Monitor


def small_peers() -> tuple[Peer, ...]:
    """Return the libraries in the order of their columns."""
    return (
        Sdpa("SDPA flash", "FLASH_ATTENTION"),
        Sdpa("SDPA cuDNN", "CUDNN_ATTENTION"),
        FlashAttention3(),
        FlashAttention4(),
    )


def dry_run(spec: str | Path, options: SmallOptions) -> SmallReport:
    """Return the calls and who would make them, without figures; needs no GPU.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel or no call.
    """
    loaded = load_spec(spec)
    wanted = _wanted(prepare(loaded), options, None)
    planned = named(small_peers(), options.peers)
    rows = []
    for shape in _shapes(options, wanted):
        results = [SmallResult(peer.name, shape) for peer in planned if _against(peer, shape) is None]
        rows.append(SmallRow(shape, (*results, SmallResult(OURS, shape))))
    return SmallReport(str(spec), loaded.package, tuple(rows), options.sustained)


def bench_small(spec: str | Path, options: SmallOptions, observer: Observer) -> SmallReport:
    """Race the small calls on the kernels of a spec that this GPU runs; those that the cache lacks are compiled first.

    Raises LoadError without a GPU, SpecError if the spec is wrong, CallError if the options name no kernel or no call.
    """
    if not torch.cuda.is_available():
        raise LoadError("bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the calls without one")
    gpu, loaded = Gpu.current(), load_spec(spec)
    wanted = _wanted(prepare(loaded), options, gpu.capability)
    todo = _shapes(options, wanted)
    kernels, failures = compiled(wanted, options.jobs)
    if kernels:
        registry.add(package_of_kernels(list(kernels.values()), str(spec)))
    facts, clock, seed = gpu_facts(gpu), CudaClock(), secrets.randbelow(_MAX_SEED)
    generator = torch.Generator(gpu.device).manual_seed(seed)
    report = SmallReport(
        str(spec), loaded.package, (), options.sustained, facts, versions(), rounds=options.rounds, seed=seed,
        failures=failures,
    )  # fmt: skip
    with torch.no_grad(), Monitor(gpu) as monitor:
        course = _Course(
            gpu.device, facts["l2_bytes"], clock, cuda_graph, options, generator, random.Random(seed), loaded.package,
            named(small_peers(), options.peers), monitor,
        )  # fmt: skip
        report = replace(report, ceilings=ceilings(gpu, clock, options.rounds))
        for shape in todo:
            report = replace(report, rows=(*report.rows, _measured(course, shape)))
            if not gpu.answers():
                report = replace(report, stopped=f"the GPU stopped responding at {shape.name}")
            observer(report, len(todo))
            if report.stopped is not None:
                break
            torch.cuda.empty_cache()
    return report


def _wanted(prepared: Sequence[Prepared], options: SmallOptions, capability: int | None) -> list[Prepared]:
    """Return the kernels that calls may run on. Raises CallError if there is none."""
    known = {(shape.variant, shape.head_dim) for shape in small_shapes()}
    kept = [
        kernel
        for kernel in chosen(prepared, options.part, ())
        if kernel.plan.direction == "forward"
        and kernel.plan.layout == "dense"
        and kernel.plan.dtype_name == DTYPE
        and kernel.plan.head_dim_qk == kernel.plan.head_dim_v
        and (kernel.plan.variant.name, kernel.plan.head_dim_qk) in known
        and kernel.plan.variant == preset(kernel.plan.variant.name)
        and (capability is None or kernel.plan.arch.runs_on(capability))
    ]
    if not kept:
        here = "" if capability is None else f", which sm{capability} would run"
        raise CallError(
            f"the suite of small calls takes dense forwards of full and causal in {DTYPE} at head_dim 64 and 128; the "
            f"spec has none{here}"
        )
    return kept


def _shapes(options: SmallOptions, wanted: Sequence[Prepared]) -> list[Shape]:
    """Return the calls that are asked for and that kernels may take."""
    every = small_shapes()
    found = [shape for shape in every if not options.cells or any(part in shape.name for part in options.cells)]
    if not found:
        part = options.cells[0]
        raise CallError(f"no call has '{part}' in its name{suggest(part, [shape.name for shape in every])}")
    known = {(kernel.plan.variant.name, kernel.plan.head_dim_qk) for kernel in wanted}
    return [shape for shape in found if (shape.variant, shape.head_dim) in known]


def _case(shape: Shape) -> BenchCase:
    return BenchCase(
        "small", shape.variant, DTYPE, shape.head_dim, shape.head_dim, shape.batch, shape.seqlen_k, shape.heads,
        shape.kv_heads,
    )  # fmt: skip


def _against(peer: Peer, shape: Shape) -> str | None:
    """Return why a library does not make a call, or None."""
    reason = reason_against(peer, _case(shape), terms_of(preset(shape.variant), _case(shape), "cpu"))
    if reason is None and isinstance(peer, Sdpa) and shape.variant != "full" and shape.seqlen_q != shape.seqlen_k:
        return "its causal mask begins at the first key"
    return reason


def _measured(course: _Course, shape: Shape) -> SmallRow:
    """Prepare all contestants of a call, check what each computes, and race those that are right."""
    inputs = Inputs(shape, course.device, course.l2_bytes, course.generator)
    entered: list[tuple[SmallResult, Track | None]] = []
    for peer in course.peers:
        reason = _against(peer, shape)
        if reason is not None:
            entered.append((SmallResult(peer.name, shape, status="unsupported", reason=reason), None))
        else:
            entered.append(_enter(course, SmallResult(peer.name, shape), inputs, partial(_theirs, peer, inputs)))
    given: dict[str, Any] = {"variant": shape.variant, "package": course.package, **shape.arguments}
    kernel = explain(*inputs.sets[0], **given).to_dict()["kernel"]
    ours = SmallResult(OURS, shape, kernel=kernel)
    entered.append(_enter(course, ours, inputs, lambda: Contestant(OURS, inputs.calls(course.package))))
    return SmallRow(shape, _raced(course, entered), len(inputs.sets))


def _theirs(peer: Peer, inputs: Inputs) -> Contestant:
    shape, case = inputs.shape, _case(inputs.shape)
    terms = terms_of(preset(shape.variant), case, inputs.sets[0][0].device)
    assert terms is not None
    work = Workload(case, preset(shape.variant), shape.arguments, shape.pairs, terms)
    return peer.enter(work, terms, [Tensors(*each) for each in inputs.sets])


def _enter(
    course: _Course, result: SmallResult, inputs: Inputs, make: Callable[[], Contestant]
) -> tuple[SmallResult, Track | None]:
    """Prepare a contestant, capture its calls and check its output; a reason instead if it cannot race."""
    try:
        track = Track(make(), course.clock, course.capture)
        out = track.output()
        if course.options.check:
            result = replace(result, error=inputs.error(out))
    except NoKernelError as refusal:
        return replace(result, status="unsupported", reason=reason_of(refusal)), None
    except Exception as raised:  # whatever a library raises for what it lacks, or a kernel on its way down
        status = "failed" if result.contestant == OURS else "unsupported"
        return replace(result, status=status, reason=reason_of(raised)), None
    if result.error is not None and result.error > TOLERANCE[DTYPE]:
        reason = f"wrong: error {result.error:.1e} exceeds {TOLERANCE[DTYPE]:.0e}"
        return replace(result, status="failed", reason=reason), None
    return result, track


def _raced(course: _Course, entered: Sequence[tuple[SmallResult, Track | None]]) -> tuple[SmallResult, ...]:
    """Return the results with the times of those that are in the race."""
    options, monitor = course.options, course.monitor

    def timed(tracks: list[Track]) -> list[Replayed]:
        if options.sustained:
            return sustained_race(tracks, course.clock, options.rounds, course.order)
        return race(tracks, options.rounds, course.order)

    def read(timing: Replayed) -> dict[str, Any]:
        return {"timing": timing, "reading": monitor.within(timing.spans) if options.sustained else None}

    return raced(entered, timed, read)
