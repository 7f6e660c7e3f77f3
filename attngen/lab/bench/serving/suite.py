"""The serving suite: the kernels of a spec, called as a server calls them, next to the libraries that are installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.errors import CallError
from attngen.lab.bench.check import TOLERANCE
from attngen.lab.bench.graphs import Replays
from attngen.lab.bench.kernels import chosen, compiled
from attngen.lab.bench.report import shortened
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, ReadyContender, Suite, by_parts
from attngen.lab.bench.serving.appending import Appending, kernel_of
from attngen.lab.bench.serving.cells import DTYPE, EIGHT_BITS, CacheShape, Lane, Problem, ServingCell, cells
from attngen.lab.bench.serving.contents import ServingInputs, ServingOracle
from attngen.lab.bench.serving.peers import ServingPeer, missing, serving_peers
from attngen.lab.bench.serving.report import ServingReport, ServingResult, ServingRow
from attngen.lab.bench.timing import Contender, Sampler
from attngen.lab.verify.gpu import Gpu
from attngen.operations import APPEND, APPEND_VARIANT, MERGE, WIDEN
from attngen.plan.naming import head_dim_label
from attngen.runtime.operations.attention.entry import attention, attention_paged
from attngen.runtime.operations.attention.introspection import explain
from attngen.runtime.operations.shared_prefix.call import shared_prefix
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec


class ServingSuite(Suite[ServingCell, ServingReport]):
    """Cells of decoding, appending and prefill over caches.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel or no cell.
    """

    noun = "cell"

    def __init__(self, spec: str | Path, options: BenchOptions, capability: int | None) -> None:
        self.options = options
        loaded = load_spec(spec)
        self.cases = by_parts(cells(), options.cells, "cell", lambda cell: cell.name)
        self.kernels = _kernels(prepare_unrendered(loaded), self.cases, options, capability)
        self.calls = frozenset(_call_of(kernel) for kernel in self.kernels)
        peers = serving_peers()
        left_out = missing(peers)
        self.peers = [peer for peer in peers if peer.name not in left_out]
        self.report = ServingReport(spec=str(spec), package=loaded.package, left_out=left_out)
        self.errors: Mapping[tuple[str, tuple[int, int]], str] = {}  # of calls whose kernels did not compile

    def planned(self, case: ServingCell) -> ServingRow:
        """See ``Suite``."""
        peers = [_result_of_peer(*each) for each in _peers_of(case, self.peers)]
        return ServingRow(results=(*peers, *map(self._result_of_lane, case.lanes)), cell=case)

    def compiled(self, gpu: Gpu, observer: Observer) -> ServingReport:
        """See ``Suite``; kernels that compiled are registered as the package of their spec."""
        kernels, errors = compiled(self.kernels, self.options.jobs)
        if kernels:
            registry.add(package_of_kernels(list(kernels.values()), self.report.spec))
        calls = {kernel.plan.name: _call_of(kernel) for kernel in self.kernels}
        self.errors = {calls[name]: f"{name}: {error}" for name, error in errors.items()}
        return self.report

    def measured(self, bench: Bench, case: ServingCell) -> ServingRow:
        """See ``Suite``."""
        shelf = _Shelf(bench, self.report.package)
        entered: list[tuple[ServingResult, Sampler | None]] = []
        for peer, problem, form in _peers_of(case, self.peers):
            make = partial(_entry_of_peer, bench, shelf, peer, problem, form)
            entered.append(bench.enter(_result_of_peer(peer, problem, form), make))
        for lane in case.lanes:
            result = self._result_of_lane(lane)
            if result.status == "planned":
                entered.append(bench.enter(result, partial(_entry_of_lane, bench, shelf, lane)))
            else:
                entered.append((result, None))
        results, reading = bench.measure(entered)
        return ServingRow(results=results, cell=case, input_sets=shelf.sets, reading=reading)

    def _result_of_lane(self, lane: Lane) -> ServingResult:
        """The result of attngen before it is called: unsupported without a kernel of its variant."""
        problem = lane.problem
        result = ServingResult(f"attngen {lane.name}", problem=problem, form=lane.form, lane=lane, flops=problem.flops)
        for variant, head_dims in lane.calls:
            if (variant, head_dims) not in self.calls:
                dims = head_dim_label(*head_dims)
                reason = f"no kernel of {variant} in {DTYPE} at head_dim {dims} is chosen from the spec"
                return replace(result, status="unsupported", reason=reason)
            if error := self.errors.get((variant, head_dims)):
                return replace(result, status="failed", reason=shortened(error))
        return result


def _call_of(kernel: Prepared) -> tuple[str, tuple[int, int]]:
    """As ``Problem.call``."""
    return kernel.plan.variant.name, (kernel.plan.head_dim_qk, kernel.plan.head_dim_v)


def _kernels(
    prepared: Sequence[Prepared], cells: Sequence[ServingCell], options: BenchOptions, capability: int | None
) -> list[Prepared]:
    """The kernels that cells may run on, those launched beside them last. Raises CallError if there is none."""
    calls = {call for cell in cells for lane in cell.lanes for call in lane.calls}

    def runs(kernel: Prepared, *directions: str) -> bool:
        here = capability is None or kernel.plan.arch.runs_on(capability)
        return here and kernel.plan.direction in directions

    kept = [
        kernel
        for kernel in chosen(prepared, options.part, options.variants)
        if runs(kernel, "forward", APPEND)
        and kernel.plan.dtype_name in (DTYPE, EIGHT_BITS)
        and kernel.plan.layout in ("dense", "paged")
        and _call_of(kernel) in calls
    ]
    if not kept:
        here = "" if capability is None else f", which sm{capability} would run"
        variants = ", ".join(sorted({variant for variant, _ in calls}))
        dims = " or ".join(head_dim_label(*dims) for dims in sorted({dims for _, dims in calls}))
        raise CallError(
            f"the cells of the serving suite take forward kernels of {variants} in {DTYPE} at head_dim {dims}, dense "
            f"or paged; the spec has none{here}"
        )
    shares = any(lane.shared for cell in cells for lane in cell.lanes)
    beside = (WIDEN, MERGE) if shares else (WIDEN,)
    return [*kept, *(kernel for kernel in prepared if runs(kernel, *beside) and kernel.plan.dtype_name == DTYPE)]


class _Shelf:
    """The contents of a cell's problems: those that differ in their variants only share them."""

    def __init__(self, bench: Bench, package: str) -> None:
        self.package = package
        self._bench = bench
        self._contents: dict[Problem, ServingInputs] = {}
        self._oracles: dict[tuple[Problem, CacheShape], ServingOracle] = {}

    def of(self, problem: Problem) -> ServingInputs:
        """The contents of a problem, with as many sets of inputs as the first variant that asks needs."""
        alike = problem.of("")
        if alike not in self._contents:
            bench = self._bench
            self._contents[alike] = ServingInputs(problem, bench.device, bench.l2_bytes, bench.generator)
        return self._contents[alike]

    @property
    def sets(self) -> int | None:
        """Sets of inputs of the first problem; None if none was made."""
        return next((contents.sets for contents in self._contents.values()), None)

    def error(self, problem: Problem, form: CacheShape, out: torch.Tensor) -> float:
        """The relative error of an output of a problem in a form of its cache."""
        if (problem, form) not in self._oracles:
            self._oracles[problem, form] = ServingOracle(self.of(problem), problem, form, self.package)
        return self._oracles[problem, form].error(out)


def _entry_of_peer(
    bench: Bench, shelf: _Shelf, peer: ServingPeer, problem: Problem, form: CacheShape
) -> ReadyContender:
    sampler = Replays(peer.enter(shelf.of(problem), form), bench.clock, bench.capture)
    return ReadyContender(sampler, partial(shelf.error, problem, form), TOLERANCE[DTYPE])


def _entry_of_lane(bench: Bench, shelf: _Shelf, lane: Lane) -> ReadyContender:
    """The calls of attngen, as a program makes them, and the kernel that the dispatcher takes for them."""
    problem, form, name = lane.problem, lane.form, f"attngen {lane.name}"
    if problem.variant == APPEND_VARIANT:
        new = Appending(problem, form, bench.device, bench.l2_bytes, bench.generator)
        sampler = Replays(new.contender(name), bench.clock, bench.capture)
        return ReadyContender(sampler, new.error, 0.0, {"kernel": kernel_of(shelf.package)})
    contents = shelf.of(problem)
    keywords: dict[str, Any] = {
        "variant": problem.variant, "package": shelf.package, **contents.own(problem.variant), **contents.scales
    }  # fmt: skip
    caches = [contents.cache(number, form) for number in range(contents.sets)]
    if form.page_size is None:
        if not contents.full:
            keywords["seqused_k"] = contents.lengths
        calls = [partial(attention, q, *cache, **keywords) for q, cache in zip(contents.queries, caches, strict=True)]
    else:
        table, q = contents.pages(form.page_size).table, contents.queries[0]
        out = q.new_empty((*q.shape[:-1], problem.head_dims[1]), dtype=torch.bfloat16)
        attend = partial(attention_paged, page_table=table, seqused_k=contents.lengths, out=out)
        if lane.shared:  # found once in a step, and so not in the time of a layer
            attend = partial(shared_prefix(table, contents.lengths, form.page_size).attention)
        calls = [partial(attend, q, *cache, **keywords) for q, cache in zip(contents.queries, caches, strict=True)]
        keywords |= {"page_table": table, "seqused_k": contents.lengths}
    kernel = explain(contents.queries[0], *caches[0], **keywords).to_dict()["kernel"]
    sampler = Replays(Contender(name, calls), bench.clock, bench.capture)
    return ReadyContender(sampler, partial(shelf.error, problem, form), TOLERANCE[problem.dtype], {"kernel": kernel})


def _peers_of(cell: ServingCell, peers: Sequence[ServingPeer]) -> Iterator[tuple[ServingPeer, Problem, CacheShape]]:
    """Yield the libraries of a cell; contiguous caches and pages only where attngen is measured in them."""
    for problem in cell.problems_of_peers:
        kinds = {lane.form.page_size is None for lane in cell.lanes if lane.problem == problem}
        for peer in peers:
            for form in peer.forms(problem) if peer.latent == problem.latent else ():
                if (form.page_size is None) in kinds:
                    yield peer, problem, form


def _result_of_peer(peer: ServingPeer, problem: Problem, form: CacheShape) -> ServingResult:
    return ServingResult(peer.name, peer=True, problem=problem, form=form, flops=problem.flops)
