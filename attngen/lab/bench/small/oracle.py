"""The kernel that a call takes beside the fastest one of its spec, over calls of many shapes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.errors import CallError
from attngen.lab.bench.check import TOLERANCE
from attngen.lab.bench.graphs import Replays
from attngen.lab.bench.kernels import chosen, compiled, reader
from attngen.lab.bench.report import Report, Result, Row
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, ReadyContender, Suite
from attngen.lab.bench.small.fit import Fit, Timed, fit
from attngen.lab.bench.small.inputs import SmallInputs, call_of
from attngen.lab.bench.small.shapes import DTYPE, FOLLOWED, VARIANTS, Shape, oracle_shapes
from attngen.lab.bench.timing import Contender
from attngen.lab.verify.gpu import Gpu
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.prediction import Card, predict
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, registry
from attngen.runtime.registry.order import card_of
from attngen.runtime.registry.select import Request, select
from attngen.schema import load_spec, preset

#: An address that all descriptors take.
_ADDRESS = 256


@dataclass(frozen=True, kw_only=True)
class Compared(Row[Result]):
    """Microseconds of each kernel that takes a call, as measured and as predicted, and the kernel that the call takes.

    The contenders are kernels; ``taken`` is None where none of them could be measured.
    """

    shape: Shape
    predicted: Mapping[str, float]
    taken: str | None

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.shape.name

    @property
    def line(self) -> str:
        """See ``Row``."""
        if self.taken is None or self.lost is None:
            return f"{self.name}: nothing was measured"
        return f"{self.name}: {self.measured[self.taken]:.1f} us, {100 * self.lost:.1f} % above {self.best}"

    @property
    def measured(self) -> dict[str, float]:
        """Microseconds by kernel."""
        return {one.contender: one.microseconds for one in self.results if one.microseconds is not None}

    @property
    def best(self) -> str | None:
        """The fastest kernel."""
        measured = self.measured
        return min(measured, key=measured.__getitem__, default=None)

    @property
    def lost(self) -> float | None:
        """The time of the kernel taken above that of the fastest one: 0.03 for 3 %."""
        measured = self.measured
        return None if self.taken is None else measured[self.taken] / min(measured.values()) - 1

    def to_dict(self) -> dict[str, Any]:
        """See ``Row``."""
        return {
            **self.shape.to_dict(), "measured": self.measured, "predicted": dict(self.predicted),
            "taken": self.taken, "best": self.best, "lost": self.lost,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OracleReport(Report[Compared]):
    """A comparison so far. ``fit`` has the constants that suit the times best."""

    fit: Fit | None = None

    @property
    def all_failures(self) -> dict[str, str]:
        """Errors by kernel, of those that do not compile, and by kernel and call."""
        failed = {
            f"{one.contender}, {row.name}": str(one.reason)
            for row in self.rows
            for one in row.results
            if one.status == "failed"
        }
        return {**self.failures, **failed}

    @property
    def lost(self) -> tuple[float, float] | None:
        """The mean and the largest loss; None if nothing was measured."""
        losses = [row.lost for row in self.rows if row.lost is not None]
        return (statistics.fmean(losses), max(losses)) if losses else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        mean, most = self.lost or (None, None)
        constants = [[*row.sizes, row.work_tile_ns, row.step_ns] for row in (self.fit.rows if self.fit else ())]
        return {
            **super().to_dict(),
            "suite": "oracle",
            "lost_mean": mean,
            "lost_most": most,
            "failures": self.all_failures,
            "fit": self.fit and {
                "launch": self.fit.launch_ns, "rows": constants, "error": self.fit.error,
                "largest_error": self.fit.largest,
            },
        }  # fmt: skip


class OracleSuite(Suite[tuple[Shape, Sequence[Prepared]], OracleReport]):
    """Every kernel of a spec that takes a call, on each of ``oracle_shapes``.

    Raises SpecError if the spec is wrong, CallError if it has no dense forward kernel of a shape.
    """

    noun = "call"
    without_gpu = "the comparison needs an NVIDIA GPU, and torch finds none"

    def __init__(self, spec: str | Path, options: BenchOptions, capability: int | None) -> None:
        self.options = options
        self.cases = _candidates(prepare_unrendered(load_spec(spec)), options.part, capability)
        self.report = OracleReport(spec=str(spec))
        self.kernels: Mapping[str, Kernel] = {}
        self._timed: list[Timed] = []

    def planned(self, case: tuple[Shape, Sequence[Prepared]]) -> Compared:
        """See ``Suite``."""
        shape, members = case
        kernels = tuple(Result(member.plan.name) for member in members)
        return Compared(results=kernels, shape=shape, predicted={}, taken=None)

    def compiled(self, gpu: Gpu, observer: Observer) -> OracleReport:
        """See ``Suite``."""
        self.kernels, failures = compiled([one for _, members in self.cases for one in members], self.options.jobs)
        return replace(self.report, failures=failures)

    def measured(self, bench: Bench, case: tuple[Shape, Sequence[Prepared]]) -> Compared:
        """See ``Suite``."""
        shape, members = case
        kernels = [self.kernels[one.plan.name] for one in members if one.plan.name in self.kernels]
        inputs = SmallInputs(shape, bench.device, bench.l2_bytes, bench.generator)
        entered = [
            bench.enter(Result(kernel.name, kernel.name), partial(_entry, bench, inputs, kernel)) for kernel in kernels
        ]
        results, _ = bench.measure(entered)
        row = compared(shape, kernels, results, _card(bench.device))
        self._timed += [
            Timed(kernel, call_of(shape, kernel.variant), row.measured[kernel.name])
            for kernel in kernels
            if kernel.name in row.measured
            and kernel.times
            and shape.variant in FOLLOWED
            and kernel.main.shares == 1  # others have the same steps, and a merge more
        ]
        return row

    def finished(self, report: OracleReport) -> OracleReport:
        """See ``Suite``: fit the constants of predictions to the times."""
        if not self._timed:
            return report
        return replace(report, fit=fit(self._timed, _card(Gpu.current().device)))


def _card(device: torch.device) -> Card:
    return card_of(drivers.current(), device.index or 0)


def _entry(bench: Bench, inputs: SmallInputs, kernel: Kernel) -> ReadyContender:
    """A kernel as a package of its own, so that no other one is selected."""
    registry.add(Package(kernel.name, kernel.origin, {kernel.variant_name: (reader(kernel),)}))
    sampler = Replays(Contender(kernel.name, inputs.calls(kernel.name)), bench.clock, bench.capture)
    return ReadyContender(sampler, inputs.error, TOLERANCE[DTYPE])


def compared(shape: Shape, kernels: Sequence[Kernel], results: Sequence[Result], card: Card) -> Compared:
    """A row of the times of each kernel, their predictions, and the kernel that the dispatcher takes."""
    names = {result.contender for result in results if result.timing is not None}
    running = [kernel for kernel in kernels if kernel.name in names]
    if not running:
        return Compared(results=tuple(results), shape=shape, predicted={}, taken=None)
    call = call_of(shape, running[0].variant)
    predictions = {kernel.name: predict(kernel, call, card) for kernel in running}
    request = Request(call, 0, dict.fromkeys(("q", "k", "v"), _ADDRESS), shape.arguments)
    taken = select(running, request, drivers.current()).kernel
    assert taken is not None, "each of them ran the call"
    predicted = {name: prediction.microseconds for name, prediction in predictions.items() if prediction}
    return Compared(results=tuple(results), shape=shape, predicted=predicted, taken=taken.name)


def _candidates(
    prepared: Sequence[Prepared], part: str | None, capability: int | None
) -> list[tuple[Shape, Sequence[Prepared]]]:
    """The kernels that may take each shape."""
    kept = [
        one
        for one in chosen(prepared, part, ())
        if one.plan.direction == "forward"
        and one.plan.layout == "dense"
        and one.plan.variant.name in VARIANTS
        and one.plan.variant == preset(one.plan.variant.name)
        and (capability is None or one.plan.arch.runs_on(capability))
    ]
    candidates: list[tuple[Shape, Sequence[Prepared]]] = []
    for shape in oracle_shapes():
        own = [
            one
            for one in kept
            if one.plan.variant.name == shape.variant
            and (one.plan.head_dim_qk, one.plan.head_dim_v) == (shape.head_dim, shape.head_dim)
            and one.plan.dtype_name == DTYPE
            and (shape.heads > shape.kv_heads or one.plan.split_kv or not one.plan.pack_gqa)  # there is nothing to pack
        ]
        if own:
            candidates.append((shape, own))
    if not candidates:
        raise CallError(
            f"the comparison takes dense forward kernels of {', '.join(VARIANTS)} in {DTYPE} at head_dim 64 and 128; "
            "the spec has none that runs here"
        )
    return candidates
