"""The masks suite: every case compiled in parallel processes, then timed in this one, on a busy card."""

from __future__ import annotations

import gc
import math
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attngen import jit
from attngen.errors import AttngenError, CallError, LoadError, suggest
from attngen.runtime.kernels.module import read_kernel
from attngen.runtime.registry.lookup import registry
from attngen.store.jobs import Job, JobResult, run_jobs, worker_processes
from attngen.store.store import Store
from attngen.store.worker import retire
from attngen.tools.bench import timing
from attngen.tools.bench.cases import DIRECTIONS
from attngen.tools.bench.flex import Unwatched, fresh_caches
from attngen.tools.bench.machine import Monitor, ceilings, gpu_facts, versions
from attngen.tools.bench.masks.cases import mask_cases
from attngen.tools.bench.masks.cases.forms import Forms
from attngen.tools.bench.masks.contestants import Contestant, Entrants, inputs, seconds
from attngen.tools.bench.masks.report import CAUSAL, CONSTANTS, FLEX, Cell, MaskReport, MaskResult, MaskRow
from attngen.tools.bench.outcome import reason_of
from attngen.tools.verify.gpu import Gpu

#: The call: one sequence, as many KV heads unless a case shares them.
HEADS, SEQLEN, HEAD_DIM = 8, 8192, 128

#: Milliseconds of a sample. All samples follow one another without a pause.
SAMPLE_MS = 15.0

#: Largest difference from FlexAttention, relative by norm, of outputs and gradients of q, k and v; and of gradients of
#: learned tensors, which are sums over many pairs.
AGREEMENT, LEARNED_AGREEMENT = 3e-2, 1e-1

#: What a process that compiles runs.
_FIRST = "attngen.tools.bench.masks.run:first_calls"
_LOAD = "attngen.tools.bench.masks.run:load"

_MAX_SEED = 2**31

#: Called after each cell is prepared, and after each is timed, with all that is known and a line about it.
Observer = Callable[[MaskReport, str], None]


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What is measured: ``cells`` are parts of names; empty ones mean all. ``limit`` bounds the seconds of the run."""

    cells: Sequence[str] = ()
    seqlens: Sequence[int] = ()
    head_dims: Sequence[int] = ()
    rounds: int = 7
    check: bool = True
    jobs: int | None = None
    limit: float | None = None


def cells_of(options: MaskOptions) -> list[Cell]:
    """Return the cells that are asked for. Raises CallError if there is none."""
    every: dict[str, Cell] = {}
    for head_dim in options.head_dims or (HEAD_DIM,):
        for seqlen in options.seqlens or (SEQLEN,):
            for case in mask_cases():
                if case.seqlen is not None or case.max_seqlen is None or seqlen <= case.max_seqlen:
                    cell = Cell(case, case.seqlen or seqlen, head_dim, HEADS)
                    every.setdefault(cell.name, cell)
    chosen = [cell for name, cell in every.items() if not options.cells or any(part in name for part in options.cells)]
    if not chosen:
        part = options.cells[0]
        names = [cell.case.name for cell in every.values()]
        raise CallError(f"no cell of the masks suite has '{part}' in its name{suggest(part, names)}")
    return chosen


def dry_run(options: MaskOptions) -> MaskReport:
    """Return the cells, without figures; needs no GPU. Raises CallError if the options name no cell."""
    return MaskReport(tuple(MaskRow(cell, ()) for cell in cells_of(options)))


def bench_masks(options: MaskOptions, observer: Observer) -> MaskReport:
    """Compile and compare all cells, then time them.

    Raises LoadError without a GPU, CallError if the options name no cell.
    """
    begun, todo = time.monotonic(), cells_of(options)
    if not torch.cuda.is_available():
        raise LoadError("bench needs an NVIDIA GPU, and torch finds none; --dry-run lists the cells without one")
    gpu, seed = Gpu.current(), secrets.randbelow(_MAX_SEED)
    clock = timing.CudaClock()
    report = MaskReport(gpu=gpu_facts(gpu), versions=versions(), rounds=options.rounds, seed=seed)
    deadline = math.inf if options.limit is None else begun + options.limit
    with fresh_caches() as environment, _compiling():
        suite = Suite(gpu.device, options, clock, random.Random(seed))
        ready: list[Ready] = []
        for one in suite.prepared(todo, environment, deadline):
            ready.append(one)
            observer(report, f"[{len(ready)}/{len(todo)}] compared {one.cell.name}")
        report = replace(report, seconds={"prepared": time.monotonic() - begun})
        report = replace(report, ceilings=ceilings(gpu, clock, min(options.rounds, 3)))
        with Monitor(gpu) as monitor:
            for one in ready:
                if time.monotonic() + suite.expected(one) > deadline:
                    continue
                row = suite.timed(one, monitor)
                report = replace(report, rows=(*report.rows, row))
                if not gpu.answers():
                    report = replace(report, stopped=f"the GPU stopped responding at {one.cell.name}")
                observer(report, f"[{len(report.rows)}/{len(ready)}] {row.line}")
                if report.stopped is not None:
                    break
    done = {row.cell.name for row in report.rows}
    left = tuple(cell.name for cell in todo if cell.name not in done)
    return replace(report, not_run=left, seconds={**report.seconds, "all": time.monotonic() - begun})


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile what calls lack, by one process each; graphs of torch's compiler are differentiated again and again."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with functorch_config.patch(donated_buffer=False), inductor_config.patch(compile_threads=1), jit():
        yield


# --- first calls, in processes of their own -----------------------------------------------------------------------


def load() -> None:
    """Import what first calls need, before a process is forked for each core. No GPU is touched.

    Imports of torch's compiler ask whether there is one: of CUDA, unless told otherwise, which no fork could use then.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch._inductor.compile_fx
    import torch.nn.attention.flex_attention  # noqa: F401

    import attngen.plan
    import attngen.render
    import attngen.tools.build.pipeline  # noqa: F401


def first_calls(environment: Mapping[str, str], asked: tuple[str, int, int], last: bool) -> dict[str, float | str]:
    """Return the seconds of the first call of each contestant of a cell with its gradients, or why it failed.

    Compiling is included, of the block mask too. What there was no memory for, beside other processes, is left out.
    """
    del last
    os.environ.update(environment)
    name, seqlen, head_dim = asked
    (case,) = (one for one in mask_cases() if one.name == name)
    torch.zeros(1, device="cuda")  # CUDA starts
    with _compiling():
        results = _tried(Cell(case, seqlen, head_dim, HEADS), torch.device("cuda"))
    inputs.cache_clear()
    torch.compiler.reset()
    gc.collect()
    if _answers():
        torch.cuda.empty_cache()
    else:
        retire()
    return results


def _tried(cell: Cell, device: torch.device) -> dict[str, float | str]:
    """Call every contestant of a cell once."""
    made: list[Entrants] = []
    results: dict[str, float | str] = {}
    mask: float | None = None
    try:
        mask = seconds(lambda: made.append(Entrants.of(cell, device)), device)
    except torch.OutOfMemoryError:
        return results
    except Exception:  # torch's compiler fails on some block masks; made without it, their first call has no figure
        made.append(Entrants.of(cell, device, quick=True))
    (entrants,) = made
    for name in entrants.names():
        try:
            taken = seconds(partial(_call, entrants, name), device)
            if name != FLEX:
                results[name] = taken
                continue
            if mask is not None:
                results[name] = taken + mask
            entrants.make(name).forward()  # it compiles again without gradients
        except torch.OutOfMemoryError:
            continue
        except Exception as error:  # whatever a library raises for what it lacks, or a kernel on its way down
            results[name] = reason_of(error)
            if not _answers():
                break
    return results


def _call(entrants: Entrants, name: str) -> None:
    entrants.make(name).results()


def _answers() -> bool:
    """Whether CUDA still works in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# --- the suite ----------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A cell whose contestants have been called and compared."""

    entrants: Entrants
    contestants: dict[str, Contestant] = field(default_factory=dict)
    results: dict[str, MaskResult] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """The cell."""
        return self.entrants.cell


@dataclass
class Suite:
    """Where cells are measured, and by which rules."""

    device: torch.device
    options: MaskOptions
    clock: timing.Clock
    order: random.Random
    _read: set[str] = field(default_factory=set)
    _needed: float = 0.0  # seconds that timing the prepared cells takes

    def prepared(self, todo: Sequence[Cell], environment: Mapping[str, str], deadline: float) -> Iterator[Ready]:
        """Yield each cell as soon as its kernels are compiled, as long as there is time to measure all of them."""
        for result in _in_processes(todo, environment, self.options.jobs, lambda: deadline - self._needed):
            cell = todo[result.index]
            self._read_kernels()
            try:
                if result.error is not None:
                    raise result.error
                ready = self.compared(cell, result.value)
            except Exception as error:  # of the process, or of the cell's tensors, for lack of memory maybe
                ready = Ready(Entrants(cell, self.device, Forms()))
                ready.results[CONSTANTS] = MaskResult(CONSTANTS, "failed", reason_of(error))
            self._needed += self.expected(ready)
            yield ready

    def _read_kernels(self) -> None:
        """Take what other processes compiled, so that nothing is planned and rendered again here."""
        store = Store()
        for key in set(store.all_keys()) - self._read:
            with suppress(AttngenError, OSError):  # not whole yet
                registry.add_compiled(read_kernel(store.path(key), sealed=True))
                self._read.add(key)

    def compared(self, cell: Cell, first: Mapping[str, float | str]) -> Ready:
        """Call every contestant of a cell, and compare its results with FlexAttention's.

        ``first`` has the seconds of first calls; a reason instead keeps a contestant from being called here.
        """
        ready = Ready(Entrants.of(cell, self.device, quick=True))
        wanted: list[Tensor] | None = None
        for name in ready.entrants.names():
            told = first.get(name)
            if isinstance(told, str):
                ready.results[name] = MaskResult(name, "failed", told)
                continue
            try:
                contestant = ready.entrants.make(name)
                results = contestant.results()
                if name == FLEX:
                    contestant.forward()  # it compiles again without gradients
                second = 1e3 * seconds(contestant.forward, self.device)
                error, learned = (None, None) if name == CAUSAL or wanted is None else _apart(results, wanted)
                result = MaskResult(name, "compared", None, {}, told, second, error)
                if self.options.check and error is not None and not error <= AGREEMENT:
                    result = replace(result, status="failed", reason=f"differs from FlexAttention by {error:.1e}")
                elif self.options.check and learned is not None and not learned <= LEARNED_AGREEMENT:
                    what = f"gradients of its tensors differ from FlexAttention's by {learned:.1e}"
                    result = replace(result, status="failed", reason=what)
                else:
                    kernels = contestant.kernels()
                    ready.contestants[name] = contestant
                    result = replace(
                        result, kernels={each: kernel for each, (kernel, _) in kernels.items()},
                        mapped=frozenset(each for each, (_, mapped) in kernels.items() if mapped),
                    )  # fmt: skip
                if name == FLEX:
                    wanted = results
                ready.results[name] = result
            except Exception as error:  # whatever a library raises for what it lacks, or a kernel on its way down
                ready.results[name] = MaskResult(name, "failed", reason_of(error), first=told)
        return ready

    def expected(self, ready: Ready) -> float:
        """Seconds that timing a cell takes, roughly: a backward takes three times as long as a forward."""
        total = 0.0
        for name in ready.contestants:
            forward = ready.results[name].second or 0.0
            for taken in (forward, 3 * forward):
                total += (self.options.rounds + 1) * max(SAMPLE_MS, 2 * taken) + 7 * taken
        return 1.3 * total / 1e3

    def timed(self, ready: Ready, monitor: Monitor | None = None) -> MaskRow:
        """Time both directions of all contestants of a cell, in random order, and return its row."""
        began, row = time.monotonic(), self.row(ready)
        lanes, names = [], []
        for name, contestant in ready.contestants.items():
            out = contestant.call()
            calls: tuple[Callable[[], object], ...] = (contestant.forward, partial(contestant.gradients, out))
            for direction, call in zip(DIRECTIONS, calls, strict=True):
                lanes.append(timing.Contestant(f"{name} {direction}", [call]))
                names.append((name, direction))
        try:
            times = timing.sustained_race(lanes, self.clock, Unwatched(), self.options.rounds, self.order, SAMPLE_MS)
        except Exception as error:  # it is not known of whom: nothing of this cell can be trusted
            failed = reason_of(error)
            return replace(row, results=tuple(replace(one, status="failed", reason=failed) for one in row.results))
        timings: dict[str, dict[str, timing.Timing]] = {}
        for (name, direction), taken in zip(names, times, strict=True):
            timings.setdefault(name, {})[direction] = taken
        results = tuple(
            replace(one, status="measured", timings=timings[one.contestant]) if one.contestant in timings else one
            for one in row.results
        )
        return replace(row, results=results, reading=None if monitor is None else monitor.since(began))

    def row(self, ready: Ready) -> MaskRow:
        """Return the row of a cell, without times."""
        entrants = ready.entrants
        tiles = entrants.tiles() if ready.contestants else 0
        return MaskRow(
            ready.cell, tuple(ready.results.values()), tiles, entrants.pair_bytes(tiles),
            entrants.forms.score is not None and entrants.forms.hides is None, bool(entrants.forms.learned),
        )  # fmt: skip


def _apart(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, float | None]:
    """Return the largest difference of the output and the gradients of q, k and v, and of those after them."""

    def norm(one: Tensor, other: Tensor) -> float:
        apart = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12)
        return float(apart)

    differences = [norm(one, other) for one, other in zip(results, wanted, strict=False)]
    return max(differences[:4]), max(differences[4:], default=None)


def _in_processes(
    todo: Sequence[Cell], environment: Mapping[str, str], jobs: int | None, until: Callable[[], float]
) -> Iterator[JobResult]:
    """Yield what ``first_calls`` returns for each cell, until a moment of ``time.monotonic``."""
    asked = [Job(cell.name, _FIRST, (dict(environment), (cell.case.name, cell.seqlen, cell.head_dim))) for cell in todo]
    answers: queue.Queue[JobResult | None] = queue.Queue()
    ending = threading.Event()
    with worker_processes(_LOAD) as workers:

        def feed() -> None:
            try:
                for result in run_jobs(asked, jobs or len(os.sched_getaffinity(0)), shared=workers):
                    if ending.is_set():
                        break
                    answers.put(result)
            finally:
                answers.put(None)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            while (left := until() - time.monotonic()) > 0:
                try:
                    result = answers.get(timeout=None if math.isinf(left) else left)
                except queue.Empty:
                    break
                if result is None:
                    break
                yield result
        finally:
            ending.set()
            while thread.is_alive():
                workers.stop()  # again: the thread may be starting another job
                thread.join(0.1)
