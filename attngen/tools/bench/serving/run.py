"""The serving suite: the kernels of a spec, called as a server calls them, next to the libraries that are installed."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, LoadError, NoKernelError, suggest
from attngen.formats import APPEND, APPEND_VARIANT, WIDEN
from attngen.runtime.calls.dispatch import explain
from attngen.runtime.calls.entry import attention, attention_paged
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec
from attngen.store.store import Store
from attngen.tools.bench.check import TOLERANCE
from attngen.tools.bench.kernels import chosen
from attngen.tools.bench.machine import Monitor, Reading, ceilings, gpu_facts, versions
from attngen.tools.bench.outcome import raced, reason_of, shortened
from attngen.tools.bench.serving.appending import Appending, kernel_of
from attngen.tools.bench.serving.cells import DTYPE, EIGHT_BITS, HEAD_DIM, Cell, Form, Lane, Problem, cells
from attngen.tools.bench.serving.contents import Contents, Oracle
from attngen.tools.bench.serving.peers import ServingPeer, missing, serving_peers
from attngen.tools.bench.serving.replay import Capture, Track, cuda_graph, race
from attngen.tools.bench.serving.report import ServingReport, ServingResult, ServingRow
from attngen.tools.bench.timing import Clock, Contestant, CudaClock
from attngen.tools.build.pipeline import Prepared, compile_kernels, prepare
from attngen.tools.verify.gpu import Gpu

_MAX_SEED = 2**31

#: Called after each cell with all that is known, and with how many cells there will be.
Observer = Callable[[ServingReport, int], None]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What is raced: kernels whose name contains ``part``, some ``variants``, and ``cells`` by parts of their names."""

    part: str | None = None
    variants: Sequence[str] = ()
    cells: Sequence[str] = ()
    rounds: int = 7
    check: bool = True
    jobs: int | None = None


@dataclass(frozen=True)
class _Course:
    """Where cells are run, and by which rules."""

    device: torch.device
    l2_bytes: int
    clock: Clock
    capture: Capture
    peers: Sequence[ServingPeer]
    options: ServingOptions
    generator: torch.Generator
    order: random.Random
    package: str
    kernels: frozenset[str]
    failures: Mapping[str, str]  # of variants whose kernels did not compile
    readings: Callable[[float], Reading | None]


def dry_run(spec: str | Path, options: ServingOptions) -> ServingReport:
    """Return the cells and who would be in them, without figures; needs no GPU.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel or no cell.
    """
    loaded = load_spec(spec)
    wanted = _wanted(prepare(loaded), options, None)
    peers = serving_peers()
    left_out = missing(peers)
    known = frozenset(kernel.plan.variant.name for kernel in wanted)
    rows = []
    for cell in _chosen_cells(options):
        ours = [_foreseen(_result_of(lane, loaded.package), known) for lane in cell.lanes]
        theirs = [
            ServingResult(peer.name, problem, form)
            for peer, problem, form in _entries(cell, peers)
            if peer.name not in left_out
        ]
        rows.append(ServingRow(cell, (*theirs, *ours)))
    return ServingReport(str(spec), loaded.package, tuple(rows), left_out)


def bench_serving(spec: str | Path, options: ServingOptions, observer: Observer) -> ServingReport:
    """Run the cells on the kernels of a spec that this GPU runs; those that the cache lacks are compiled first.

    Raises LoadError without a GPU, SpecError if the spec is wrong, CallError if the options name no kernel or no cell.
    """
    if not torch.cuda.is_available():
        raise LoadError("bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the cells without one")
    gpu, loaded, todo = Gpu.current(), load_spec(spec), _chosen_cells(options)
    wanted = _wanted(prepare(loaded), options, gpu.capability)
    failures = _compiled(wanted, options.jobs, str(spec))
    peers, facts, clock, seed = serving_peers(), gpu_facts(gpu), CudaClock(), secrets.randbelow(_MAX_SEED)
    generator = torch.Generator(gpu.device).manual_seed(seed)
    left_out = missing(peers)
    report = ServingReport(
        str(spec), loaded.package, (), left_out, facts, versions(), rounds=options.rounds, seed=seed
    )  # fmt: skip
    with torch.no_grad(), Monitor(gpu) as monitor:
        course = _Course(
            gpu.device, facts["l2_bytes"], clock, cuda_graph, [peer for peer in peers if peer.name not in left_out],
            options, generator, random.Random(seed), loaded.package,
            frozenset(kernel.plan.variant.name for kernel in wanted), failures, monitor.since,
        )  # fmt: skip
        report = replace(report, ceilings=ceilings(gpu, clock, options.rounds))
        for cell in todo:
            report = replace(report, rows=(*report.rows, _measured(course, cell)))
            if not gpu.answers():
                report = replace(report, stopped=f"the GPU has not responded since {cell.name}")
            observer(report, len(todo))
            if report.stopped is not None:
                break
            torch.cuda.empty_cache()
    return report


def _chosen_cells(options: ServingOptions) -> list[Cell]:
    every = cells()
    found = [cell for cell in every if not options.cells or any(part in cell.name for part in options.cells)]
    if not found:
        part = options.cells[0]
        raise CallError(f"no cell has '{part}' in its name{suggest(part, [cell.name for cell in every])}")
    return found


def _wanted(prepared: Sequence[Prepared], options: ServingOptions, capability: int | None) -> list[Prepared]:
    """Return the kernels that cells may run on, those that widen a cache last. Raises CallError if there is none."""
    variants = {lane.problem.variant for cell in _chosen_cells(options) for lane in cell.lanes}

    def runs(kernel: Prepared, directions: Sequence[str]) -> bool:
        here = capability is None or kernel.plan.arch.runs_on(capability)
        return here and kernel.plan.direction in directions

    kept = [
        kernel
        for kernel in chosen(prepared, options.part, options.variants)
        if runs(kernel, ("forward", APPEND))
        and kernel.plan.dtype_name in (DTYPE, EIGHT_BITS)
        and kernel.plan.layout in ("dense", "paged")
        and (kernel.plan.head_dim_qk, kernel.plan.head_dim_v) == (HEAD_DIM, HEAD_DIM)
        and kernel.plan.variant.name in variants
    ]
    if not kept:
        which = "" if capability is None else f", which sm{capability} would run"
        raise CallError(
            f"the cells of the serving suite take forwards of {', '.join(sorted(variants))} in {DTYPE} at head_dim "
            f"{HEAD_DIM}, dense or paged; the spec has none{which}"
        )
    return [*kept, *(kernel for kernel in prepared if runs(kernel, (WIDEN,)) and kernel.plan.dtype_name == DTYPE)]


def _compiled(wanted: Sequence[Prepared], jobs: int | None, origin: str) -> dict[str, str]:
    """Compile kernels, register those that did as the package of their spec, and return the errors of the others."""
    store = Store()
    built, failed = compile_kernels(list(wanted), store=store, jobs=jobs)
    kernels = [read_kernel(store.path(kernel.key)) for kernel in built.values()]
    if kernels:
        registry.add(package_of_kernels(kernels, origin))
    variants = {kernel.plan.name: kernel.plan.variant.name for kernel in wanted}
    return {variants[failure.name]: f"{failure.name}: {failure.error}" for failure in failed}


def _measured(course: _Course, cell: Cell) -> ServingRow:
    """Prepare all contestants of a cell, check what each computes, and race those that are right."""
    began = time.monotonic()
    entered: list[tuple[ServingResult, Track | None]] = []
    contents = _Shelf(course)
    for peer, problem, form in _entries(cell, course.peers):
        result = ServingResult(peer.name, problem, form)
        entered.append(_enter(course, result, partial(_theirs, peer, contents, problem, form)))
    for lane in cell.lanes:
        result = _foreseen(_result_of(lane, course.package), course.kernels)
        if lane.problem.variant in course.failures:
            result = replace(result, status="failed", reason=shortened(course.failures[lane.problem.variant]))
        if result.status == "planned":
            entered.append(_enter(course, result, partial(_ours, course, result, contents)))
        else:
            entered.append((result, None))
    results = _raced(course, entered)
    return ServingRow(cell, results, contents.sets, course.readings(began))


def _raced(course: _Course, entered: Sequence[tuple[ServingResult, Track | None]]) -> tuple[ServingResult, ...]:
    """Return the results with the times of those that are in the race."""
    options = course.options
    return raced(entered, lambda tracks: race(tracks, options.rounds, course.order), lambda timing: {"timing": timing})


class _Shelf:
    """The contents of a cell's problems: those that differ in their variants only share them."""

    def __init__(self, course: _Course) -> None:
        self._course = course
        self._found: dict[Problem, Contents] = {}
        self._oracles: dict[tuple[Problem, Form], Oracle] = {}

    def of(self, problem: Problem) -> Contents:
        """Return the contents of a problem, with as many sets of inputs as the first variant that asks needs."""
        alike = problem.of("")
        if alike not in self._found:
            course = self._course
            self._found[alike] = Contents(problem, course.device, course.l2_bytes, course.generator)
        return self._found[alike]

    @property
    def sets(self) -> int | None:
        """How many sets of inputs the first problem has; None if none was made."""
        return next((contents.sets for contents in self._found.values()), None)

    def oracle(self, problem: Problem, form: Form) -> Oracle:
        """Return the oracle of a problem in a form of its cache."""
        if (problem, form) not in self._oracles:
            self._oracles[problem, form] = Oracle(self.of(problem), problem, form, self._course.package)
        return self._oracles[problem, form]


@dataclass(frozen=True)
class _Entered:
    """A contestant, our kernel that runs, a function that returns the error of its output, and the limit of that."""

    contestant: Contestant
    kernel: str | None
    error: Callable[[Tensor], float]
    limit: float = TOLERANCE[DTYPE]


def _theirs(peer: ServingPeer, shelf: _Shelf, problem: Problem, form: Form) -> _Entered:
    contestant = peer.enter(shelf.of(problem), form)
    return _Entered(contestant, None, lambda out: shelf.oracle(problem, form).error(out))


def _ours(course: _Course, result: ServingResult, shelf: _Shelf) -> _Entered:
    """Return our calls, as a program makes them, and the kernel that the dispatcher takes for them."""
    problem, form = result.problem, result.form
    if problem.variant == APPEND_VARIANT:
        new = Appending(problem, form, course.device, course.l2_bytes, course.generator)
        return _Entered(new.contestant(result.contestant), kernel_of(course.package), new.error, limit=0.0)
    contents = shelf.of(problem)
    given: dict[str, Any] = {"variant": problem.variant, "package": course.package, **contents.own(problem.variant),
                             **contents.scales}  # fmt: skip
    calls: list[Callable[[], Any]] = []
    if form.page_size is None:
        if not contents.full:
            given["seqused_k"] = contents.lengths
        for number, q in enumerate(contents.queries):
            calls.append(partial(attention, q, *contents.cache(number, form), **given))
        explained = explain(contents.queries[0], *contents.cache(0, form), **given)
    else:
        table, out = contents.pages(form.page_size).table, torch.empty_like(contents.queries[0], dtype=torch.bfloat16)
        for number, q in enumerate(contents.queries):
            cached = contents.cache(number, form)
            calls.append(partial(attention_paged, q, *cached, table, contents.lengths, out=out, **given))
        explained = explain(
            contents.queries[0], *contents.cache(0, form), page_table=table, seqused_k=contents.lengths, **given
        )
    contestant = Contestant(result.contestant, calls)
    kernel = explained.to_dict()["kernel"]
    return _Entered(contestant, kernel, lambda out: shelf.oracle(problem, form).error(out), TOLERANCE[problem.dtype])


def _enter(course: _Course, result: ServingResult, make: Callable[[], _Entered]) -> tuple[ServingResult, Track | None]:
    """Prepare a contestant, capture its calls and check its output; a reason instead if it cannot race."""
    try:
        entered = make()
        result = replace(result, kernel=entered.kernel)
        track = Track(entered.contestant, course.clock, course.capture)
        out = track.output()
        if course.options.check:
            result = replace(result, error=entered.error(out))
    except NoKernelError as refusal:
        return replace(result, status="unsupported", reason=reason_of(refusal)), None
    except Exception as raised:  # whatever a library raises for what it lacks, or a kernel on its way down
        status = "unsupported" if result.lane is None else "failed"
        return replace(result, status=status, reason=reason_of(raised)), None
    if result.error is not None and result.error > entered.limit:
        reason = f"wrong: error {result.error:.1e} exceeds {entered.limit:.0e}"
        return replace(result, status="failed", reason=reason), None
    return result, track


def _entries(cell: Cell, peers: Sequence[ServingPeer]) -> Iterator[tuple[ServingPeer, Problem, Form]]:
    """Yield the libraries that are raced in a cell; contiguous caches and pages only where ours are raced in them."""
    for problem in cell.raced:
        kinds = {lane.form.page_size is None for lane in cell.lanes if lane.problem == problem}
        for peer in peers:
            for form in peer.forms(problem):
                if (form.page_size is None) in kinds:
                    yield peer, problem, form


def _result_of(lane: Lane, package: str) -> ServingResult:
    return ServingResult(f"attngen {lane.name}", lane.problem, lane.form, lane.name, lane.beside)


def _foreseen(result: ServingResult, variants: frozenset[str]) -> ServingResult:
    """Return a result as far as it is known beforehand: unsupported, if the spec has no kernel of its variant."""
    if result.problem.variant in variants:
        return result
    reason = f"no kernel of {result.problem.variant} in {DTYPE} at head_dim {HEAD_DIM} is chosen from the spec"
    return replace(result, status="unsupported", reason=reason)
