"""The kernel that a call takes beside the fastest one of its spec, over calls of many shapes."""

from __future__ import annotations

import random
import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attngen.errors import CallError, LoadError, NoKernelError
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.prediction import Card, predict
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, registry
from attngen.runtime.registry.select import Request, card_of, select
from attngen.schema import load_spec, preset
from attngen.tools.bench.check import TOLERANCE
from attngen.tools.bench.kernels import chosen, compiled, reader
from attngen.tools.bench.machine import gpu_facts
from attngen.tools.bench.serving.replay import Capture, Track, cuda_graph, race
from attngen.tools.bench.small.fit import Fit, Timed, fit
from attngen.tools.bench.small.inputs import Inputs, call_of
from attngen.tools.bench.small.shapes import DTYPE, FOLLOWED, VARIANTS, Shape, oracle_shapes
from attngen.tools.bench.timing import Clock, Contestant, CudaClock
from attngen.tools.build.pipeline import Prepared, prepare
from attngen.tools.verify.gpu import Gpu

_MAX_SEED = 2**31

#: An address that all descriptors take.
_ADDRESS = 256

#: Called after each shape with all that is known, and with how many there will be.
Observer = Callable[["OracleReport", int], None]


@dataclass(frozen=True)
class Compared:
    """Microseconds of each kernel that takes a call, as measured and as predicted, and which one the call takes."""

    shape: Shape
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    taken: str

    @property
    def best(self) -> str:
        """The fastest kernel."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def lost(self) -> float:
        """By how much the kernel taken is slower than the fastest one: 0.03 for 3 %."""
        return self.measured[self.taken] / self.measured[self.best] - 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        return {
            **self.shape.to_dict(), "measured": dict(self.measured), "predicted": dict(self.predicted),
            "taken": self.taken, "best": self.best, "lost": self.lost,
        }  # fmt: skip


@dataclass(frozen=True)
class OracleReport:
    """What was compared. ``fit`` has the constants that suit the times best."""

    spec: str
    gpu: Mapping[str, Any]
    total: int
    rows: tuple[Compared, ...] = ()
    failures: Mapping[str, str] | None = None
    fit: Fit | None = None

    @property
    def ok(self) -> bool:
        """Whether something was measured, and no kernel failed."""
        return bool(self.rows) and not self.failures

    @property
    def lost(self) -> tuple[float, float]:
        """The mean and the largest loss."""
        losses = [row.lost for row in self.rows]
        return statistics.fmean(losses), max(losses)

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``--json`` writes it."""
        mean, most = self.lost if self.rows else (None, None)
        found = self.fit
        constants = [[row.consumers, row.tile_n, row.columns, row.tile, row.step]
                     for row in (found.rows if found else ())]  # fmt: skip
        return {
            "suite": "oracle", "spec": self.spec, "gpu": dict(self.gpu), "lost_mean": mean, "lost_most": most,
            "failures": dict(self.failures or {}), "rows": [row.to_dict() for row in self.rows],
            "fit": found and {
                "launch": found.launch, "rows": constants, "error": found.error, "largest_error": found.largest,
            },
        }  # fmt: skip


def compare(spec: str | Path, part: str | None, rounds: int, jobs: int | None, observer: Observer) -> OracleReport:
    """Time every kernel of a spec that takes a call, on each of ``oracle_shapes``; those that the cache lacks are
    compiled first.

    Raises LoadError without a GPU, SpecError if the spec is wrong, CallError if it has no dense forward of a shape.
    """
    if not torch.cuda.is_available():
        raise LoadError("the comparison needs an NVIDIA GPU, and torch finds none")
    gpu = Gpu.current()
    candidates = _candidates(prepare(load_spec(spec)), part, gpu.capability)
    kernels, failures = compiled([one for each in candidates.values() for one in each], jobs)
    facts, clock, seed = gpu_facts(gpu), CudaClock(), secrets.randbelow(_MAX_SEED)
    generator, order = torch.Generator(gpu.device).manual_seed(seed), random.Random(seed)
    report = OracleReport(str(spec), facts, len(candidates), failures=failures)
    timed: list[Timed] = []
    card = card_of(drivers.current(), gpu.device.index or 0)
    with torch.no_grad():
        for shape, members in candidates.items():
            own = [kernels[one.plan.name] for one in members if one.plan.name in kernels]
            inputs = Inputs(shape, gpu.device, facts["l2_bytes"], generator)
            measured, failed = _timed(own, inputs, clock, cuda_graph, rounds, order)
            failures = {**failures, **failed}
            if measured:
                report = replace(report, rows=(*report.rows, compared(shape, own, measured, card)), failures=failures)
                timed += [
                    Timed(kernel, call_of(shape, kernel.variant), measured[kernel.name])
                    for kernel in own
                    if kernel.name in measured
                    and kernel.times
                    and shape.variant in FOLLOWED
                    and kernel.main.shares == 1  # others have the same steps, and a merge more
                ]
            observer(report, len(candidates))
            del inputs
            torch.cuda.empty_cache()
    return replace(report, failures=failures, fit=fit(timed, card) if timed else None)


def compared(shape: Shape, kernels: Sequence[Kernel], measured: Mapping[str, float], card: Card) -> Compared:
    """Return what a call took on each kernel, and which of them the dispatcher takes."""
    call = call_of(shape, kernels[0].variant)
    running = [kernel for kernel in kernels if kernel.name in measured]
    foreseen = {kernel.name: predict(kernel, call, card) for kernel in running}
    request = Request(call, 0, dict.fromkeys(("q", "k", "v"), _ADDRESS), shape.arguments)
    taken = select(running, request, drivers.current()).kernel
    assert taken is not None, "each of them ran the call"
    return Compared(
        shape, dict(measured), {name: found.microseconds for name, found in foreseen.items() if found}, taken.name
    )


def _candidates(prepared: Sequence[Prepared], part: str | None, capability: int) -> dict[Shape, list[Prepared]]:
    """Return the kernels that may take each shape."""
    found: dict[Shape, list[Prepared]] = {}
    kept = [
        one
        for one in chosen(prepared, part, ())
        if one.plan.direction == "forward"
        and one.plan.layout == "dense"
        and one.plan.variant.name in VARIANTS
        and one.plan.variant == preset(one.plan.variant.name)
    ]
    for shape in oracle_shapes():
        own = [
            one
            for one in kept
            if one.plan.variant.name == shape.variant
            and (one.plan.head_dim_qk, one.plan.head_dim_v) == (shape.head_dim, shape.head_dim)
            and one.plan.dtype_name == DTYPE
            and one.plan.arch.runs_on(capability)
            and (shape.heads > shape.kv_heads or one.plan.split_kv or not one.plan.pack_gqa)  # there is nothing to pack
        ]
        if own:
            found[shape] = own
    if not found:
        raise CallError(
            f"the comparison takes dense forwards of {', '.join(VARIANTS)} in {DTYPE} at head_dim 64 and 128; the spec "
            "has none that runs here"
        )
    return found


def _timed(
    kernels: Sequence[Kernel], inputs: Inputs, clock: Clock, capture: Capture, rounds: int, order: random.Random
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the microseconds of each kernel that takes the call, and what is wrong with those that fail."""
    tracks: dict[str, Track] = {}
    failures: dict[str, str] = {}
    for kernel in kernels:
        registry.add(Package(kernel.name, kernel.origin, {kernel.variant_name: (reader(kernel),)}))
        try:
            track = Track(Contestant(kernel.name, inputs.calls(kernel.name)), clock, capture)
            error = inputs.error(track.output())
        except NoKernelError:
            continue
        except Exception as raised:  # whatever a kernel raises on its way down
            failures[f"{kernel.name}, {inputs.shape.name}"] = str(raised)
            continue
        if error > TOLERANCE[DTYPE]:
            failures[f"{kernel.name}, {inputs.shape.name}"] = f"wrong: error {error:.1e} exceeds {TOLERANCE[DTYPE]:.0e}"
        else:
            tracks[kernel.name] = track
    replayed = race(list(tracks.values()), rounds, order)
    return {name: one.microseconds for name, one in zip(tracks, replayed, strict=True)}, failures
