"""The masks suite: every case compiled in parallel processes, then timed in this one, on a busy card."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attngen.errors import AttngenError
from attngen.lab.bench import timing
from attngen.lab.bench.caches import fresh_caches
from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.masks import first_calls
from attngen.lab.bench.masks.cases import mask_cases
from attngen.lab.bench.masks.cases.forms import Forms
from attngen.lab.bench.masks.contenders import Contenders, MaskContender, seconds
from attngen.lab.bench.masks.maps import milliseconds_of_maps
from attngen.lab.bench.masks.report import CAUSAL, CONSTANTS, FLEX, MaskCell, MaskReport, MaskResult, MaskRow
from attngen.lab.bench.masks.rivals import rivals
from attngen.lab.bench.report import reason_of
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, Suite, by_parts
from attngen.lab.verify.gpu import Gpu
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import registry
from attngen.store.store import Store

#: The call: one sequence of this length, at this head dim, unless a case or the options say otherwise.
SEQLEN, HEAD_DIM = 8192, 128

#: Milliseconds of a sample. All samples follow one another without a pause.
SAMPLE_MS = 15.0

#: Largest difference from FlexAttention, relative by norm, of outputs and gradients of q, k and v; and of gradients of
#: learned tensors, which are sums over many pairs.
AGREEMENT, LEARNED_AGREEMENT = 3e-2, 1e-1


def cells_of(options: BenchOptions) -> list[MaskCell]:
    """The cells that the options ask for. Raises CallError if there is none."""
    cells: dict[str, MaskCell] = {}
    for head_dim in options.head_dims or (HEAD_DIM,):
        for seqlen in options.seqlens or (SEQLEN,):
            for case in mask_cases():
                if case.seqlen is not None or case.max_seqlen is None or seqlen <= case.max_seqlen:
                    cell = MaskCell(case, case.seqlen or seqlen, head_dim)
                    cells.setdefault(cell.name, cell)
    return by_parts(
        list(cells.values()), options.cells, "cell of the masks suite", lambda cell: cell.name,
        lambda cell: cell.case.name,
    )  # fmt: skip


@dataclass
class Ready:
    """A cell whose contenders have been called and compared."""

    contenders: Contenders
    runnable: dict[str, MaskContender] = field(default_factory=dict)
    results: dict[str, MaskResult] = field(default_factory=dict)

    @property
    def cell(self) -> MaskCell:
        """The cell."""
        return self.contenders.cell


class MaskSuite(Suite[MaskCell, MaskReport]):
    """Masks and scores of models and papers beside FlexAttention. Raises CallError if the options name no cell."""

    noun = "cell"

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.cases = self.cells = cells_of(options)
        self.report = MaskReport()
        self._ready: dict[str, Ready] = {}
        self._environment: Mapping[str, str] = {}
        self._began, self._deadline = 0.0, math.inf
        self._needed = 0.0  # seconds that timing the prepared cells takes
        self._read: set[str] = set()  # keys of kernels

    @property
    def pauseless_ms(self) -> float:
        """See ``Suite``."""
        return SAMPLE_MS

    @contextmanager
    def session(self) -> Iterator[None]:
        """See ``Suite``: empty caches, and the clock of ``--limit``."""
        self._began = time.monotonic()
        self._deadline = math.inf if self.options.limit is None else self._began + self.options.limit
        with fresh_caches() as self._environment, first_calls.compiling():
            yield

    def planned(self, case: MaskCell) -> MaskRow:
        """See ``Suite``; only libraries that are not installed are known."""
        missing = [(one.name, one.missing()) for one in rivals()]
        absent = [MaskResult.without(name, reason) for name, reason in missing if reason is not None]
        return MaskRow(results=tuple(absent), cell=case)

    def compiled(self, gpu: Gpu, observer: Observer) -> MaskReport:
        """See ``Suite``: every contender is called in another process, then compared here."""
        for ready in self.prepared(gpu.device):
            self._ready[ready.cell.name] = ready
            observer(self.report, f"[{len(self._ready)}/{len(self.cells)}] compared {ready.cell.name}")
        self.cases = [ready.cell for ready in self._ready.values()]
        return replace(self.report, seconds={"prepared": time.monotonic() - self._began})

    def prepared(self, device: torch.device) -> Iterator[Ready]:
        """Yield each cell as soon as its kernels are compiled, as long as there is time to measure all of them."""
        jobs = self.options.jobs
        for result in first_calls.in_processes(self.cells, self._environment, jobs, self._end_of_preparing):
            cell = self.cells[result.index]
            self._read_kernels()
            try:
                if result.error is not None:
                    raise result.error
                ready = compare(cell, device, result.value, check=self.options.check)
            except Exception as error:  # of the process, or of the cell's tensors, for lack of memory maybe
                failed = MaskResult.of(CONSTANTS, status="failed", reason=reason_of(error))
                ready = Ready(Contenders(cell, device, Forms()), results={CONSTANTS: failed})
            self._needed += expected_seconds(ready, self.options.rounds)
            yield ready

    def _end_of_preparing(self) -> float:
        return self._deadline - self._needed

    def _read_kernels(self) -> None:
        """Take what other processes compiled, so that nothing is planned and rendered again here."""
        store = Store()
        for key in set(store.all_keys()) - self._read:
            with suppress(AttngenError, OSError):  # not whole yet
                registry.add_compiled(read_kernel(store.path(key), sealed=True))
                self._read.add(key)

    def measured(self, bench: Bench, case: MaskCell) -> MaskRow | None:
        """See ``Suite``."""
        ready = self._ready[case.name]
        if time.monotonic() + expected_seconds(ready, self.options.rounds) > self._deadline:
            return None
        return timed(bench, ready)

    def finished(self, report: MaskReport) -> MaskReport:
        """See ``Suite``: the cells for which there was no time, and the seconds of the run."""
        done = {row.name for row in report.rows}
        not_run = tuple(cell.name for cell in self.cells if cell.name not in done)
        return replace(report, not_run=not_run, seconds={**report.seconds, "all": time.monotonic() - self._began})


def compare(cell: MaskCell, device: torch.device, first: Mapping[str, float | str], *, check: bool = True) -> Ready:
    """Call every contender of a cell, and compare its results with FlexAttention's.

    ``first`` has the seconds of first calls; a reason instead keeps a contender from being called here.
    """
    ready = Ready(Contenders.of(cell, device, quick=True))
    expected: list[Tensor] | None = None
    for name in ready.contenders.names():
        before = first.get(name)
        if isinstance(before, str):
            ready.results[name] = MaskResult.without(name, before)
            continue
        try:
            contender = ready.contenders.make(name)
            results = contender.results()
            if name == FLEX:
                contender.forward()  # it compiles again without gradients
            second = 1e3 * seconds(contender.forward, device)
            error, learned = (None, None) if name == CAUSAL or expected is None else _differences(results, expected)
            result = MaskResult.of(name, status="compared", first=before, second=second, error=error)
            if check and error is not None and not error <= AGREEMENT:
                result = replace(result, status="failed", reason=f"differs from FlexAttention by {error:.1e}")
            elif check and learned is not None and not learned <= LEARNED_AGREEMENT:
                reason = f"gradients of its tensors differ from FlexAttention's by {learned:.1e}"
                result = replace(result, status="failed", reason=reason)
            else:
                kernels = contender.kernels()
                ready.runnable[name] = contender
                result = replace(
                    result, kernels={each: kernel for each, (kernel, _) in kernels.items()},
                    mapped=frozenset(each for each, (_, mapped) in kernels.items() if mapped),
                )  # fmt: skip
            if name == FLEX:
                expected = results
            ready.results[name] = result
        except Exception as error:  # whatever a library raises for what it lacks, or a kernel on its way down
            ready.results[name] = MaskResult.without(name, reason_of(error), first=before)
    for name, reason in ready.contenders.left_out().items():
        ready.results[name] = MaskResult.without(name, reason)
    return ready


def expected_seconds(ready: Ready, rounds: int) -> float:
    """Seconds that timing a cell takes, roughly: a backward pass takes three times as long as a forward pass."""
    total = 0.0
    for name in ready.runnable:
        forward = ready.results[name].second or 0.0
        for milliseconds in (forward, 3 * forward):
            total += (rounds + 1) * max(SAMPLE_MS, 2 * milliseconds) + 7 * milliseconds
    return 1.3 * total / 1e3


@torch.enable_grad()
def timed(bench: Bench, ready: Ready) -> MaskRow:
    """Time both directions of all contenders of a cell side by side."""
    began = time.monotonic()
    samplers: dict[tuple[str, str], timing.Sampler] = {}
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for name, contender in list(ready.runnable.items()):
        try:
            out = contender.call()
            contender.gradients(out)
        except Exception as error:  # it ran before, but in the meantime its library compiled others
            ready.results[name] = replace(ready.results[name], status="failed", reason=reason_of(error))
            del ready.runnable[name]
            continue
        calls[name] = dict(zip(DIRECTIONS, (contender.forward, partial(contender.gradients, out)), strict=True))
        for direction, call in calls[name].items():
            one = timing.Contender(f"{name} {direction}", [call])
            samplers[name, direction] = timing.Batches(one, bench.clock, timing.UncheckedOutputs())
    row = row_of(ready)
    try:
        times = dict(zip(samplers, bench.timed(list(samplers.values())), strict=True))
    except Exception as error:  # it is not known of whom: no figure of this cell can be trusted
        failed = reason_of(error)
        return replace(row, results=tuple(replace(one, status="failed", reason=failed) for one in row.results))
    results = tuple(
        replace(
            one, status="measured", timings={each: times[one.contender, each] for each in DIRECTIONS},
            maps=_times_of_maps(bench, one, calls[one.contender]),
        )
        if one.contender in ready.runnable
        else one
        for one in row.results
    )  # fmt: skip
    return replace(row, results=results, reading=bench.reading_since(began))


def _times_of_maps(bench: Bench, result: MaskResult, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The milliseconds of the tile maps of a contender, in the directions whose kernels read one."""
    times = {each: milliseconds_of_maps(call, bench.clock) for each, call in calls.items() if each in result.mapped}
    return {each: time for each, time in times.items() if time is not None}


def row_of(ready: Ready) -> MaskRow:
    """The row of a cell, without times."""
    contenders, forms = ready.contenders, ready.contenders.forms
    tiles = contenders.tiles() if ready.runnable else 0
    return MaskRow(
        results=tuple(ready.results.values()), cell=ready.cell, tiles=tiles, pair_bytes=contenders.pair_bytes(tiles),
        scored=forms.score is not None and forms.hides is None, learns=bool(forms.learned),
        reads=bool(ready.runnable) and contenders.mask_reads_tensors(),
    )  # fmt: skip


def _differences(results: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float | None]:
    """The largest difference of the output and the gradients of q, k and v, and of the gradients after them."""

    def norm(one: Tensor, other: Tensor) -> float:
        difference = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12)
        return float(difference)

    differences = [norm(one, other) for one, other in zip(results, expected, strict=False)]
    return max(differences[:4]), max(differences[4:], default=None)
