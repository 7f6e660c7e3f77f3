"""The search of the kernels of a spec, one after the other within a time, and the file of choices."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attngen import resources
from attngen.build.pipeline import Prepared, compile_kernels, prepare_unrendered
from attngen.compile.toolchain import toolchain
from attngen.errors import CallError, LoadError
from attngen.files import cause
from attngen.lab.bench.cases import DIRECTIONS, TOKENS, BenchCase, bench_cases
from attngen.lab.bench.kernels import chosen, forward_kernels_of, reason_against
from attngen.lab.bench.machine import Monitor, gpu_facts
from attngen.lab.bench.runner import Bench
from attngen.lab.tune.journal import Journal
from attngen.lab.tune.search import label_of, search
from attngen.lab.tune.tables import Searched, TablesWithRows, tables_of
from attngen.lab.verify.gpu import Gpu
from attngen.plan.candidates import candidates
from attngen.plan.model import Plan
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.schema import KernelSpec, load_spec, spec_hash
from attngen.schema.tuned import identity, load_tuned, tuned_text
from attngen.store.store import Store

_MAX_SEED = 2**31
_BACKENDS = ("cuda", "triton")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Choices of a search. ``part`` is part of a kernel's name; without ``seqlens`` cases have their own.

    No further kernel is begun after ``seconds``. ``directions`` are some of ``DIRECTIONS``. ``tables`` is the folder
    for the planner's tables with new rows.
    """

    part: str | None = None
    variants: Sequence[str] = ()
    directions: Sequence[str] = DIRECTIONS
    tokens: int = TOKENS
    seqlens: Sequence[int] = ()
    rounds: int = 5
    seconds: float = 600.0
    jobs: int | None = None
    restart: bool = False
    tables: Path | None = None


@dataclass(frozen=True)
class TuneReport:
    """Results of a search: ``rows`` of the journal in the order of the spec, and the reasons against other kernels.

    ``left`` are kernels for which there was no time: the same command goes on with them. ``tables`` say which
    kernels have a row in the planner's tables.
    """

    spec: str
    gpu: str
    rows: Sequence[Mapping[str, Any]] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()
    seconds: float = 0.0
    tables: TablesWithRows = field(default_factory=TablesWithRows)

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen tune --json``."""
        return {
            "spec": self.spec,
            "gpu": self.gpu,
            "kernels": [dict(row) for row in self.rows],
            "left_out": dict(self.left_out),
            "left": list(self.left),
            "rows": dict(self.tables.rows),
            "rows_left_out": dict(self.tables.left_out),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True)
class Subject:
    """A kernel to be searched, with the cases that it is measured on."""

    kernel: Prepared
    cases: Sequence[BenchCase]

    @property
    def spec(self) -> KernelSpec:
        """The kernel as the spec asks for it."""
        return self.kernel.spec

    @property
    def plan(self) -> Plan:
        """The plan's own choice."""
        return self.kernel.plan


#: Called after each kernel with its row, the number of kernels done, and of all.
Observer = Callable[[Mapping[str, Any], int, int], None]


def subjects(
    spec: str | Path, options: TuneOptions, capability: int | None
) -> tuple[list[Subject], dict[str, str], list[Prepared]]:
    """The kernels to be searched, the reasons against others, and all kernels of the spec.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel of it.
    """
    prepared = prepare_unrendered(load_spec(spec))
    chosen_kernels, left_out = [], {}
    for kernel in chosen(prepared, options.part, options.variants):
        plan = kernel.plan
        reason = reason_against(plan, capability, options.directions)
        if reason is None and kernel.spec.fixes_choices:
            reason = "the spec chooses its tile, stages or warps"
        if reason is None and plan.direction == "backward" and not forward_kernels_of(plan, prepared, capability):
            reason = "the spec has no dense forward that it could follow"
        if reason is None and sum(1 for _ in candidates(kernel.spec)) == 1:
            reason = "there is nothing to choose"
        if reason is not None:
            left_out[plan.name] = reason
            continue
        cases = bench_cases(
            plan.variant.name, plan.dtype_name, plan.head_dim_qk, plan.head_dim_v, tokens=options.tokens,
            seqlens=options.seqlens, direction=plan.direction, plain=plan.variant.without_max_logits().name,
        )  # fmt: skip
        chosen_kernels.append(Subject(kernel, cases))
    return chosen_kernels, left_out, prepared


def tune(spec: str | Path, out: Path, options: TuneOptions, observer: Observer) -> TuneReport:
    """Search the kernels of a spec on this GPU, and write the choices that are faster than the plan's own to ``out``,
    and where ``options`` name a folder, as rows of the planner's tables.

    A journal beside ``out`` keeps what is done: where time did not suffice, or the search was cut, the next one goes
    on. Raises LoadError without a GPU, SpecError if the spec is wrong, and CallError if the options name no kernel of
    it, if the journal is of another search, or if a file cannot be written.
    """
    of_spec = spec_hash(load_spec(spec))  # what is wrong with it is said without a GPU, too
    if not torch.cuda.is_available():
        raise LoadError("tune needs an NVIDIA GPU, and torch finds none; --dry-run lists the candidates without one")
    start = time.monotonic()
    gpu = Gpu.current()
    todo, left_out, prepared = subjects(spec, options, gpu.capability)
    arches = dict.fromkeys(subject.plan.arch.name for subject in todo)
    installed = [row for arch in arches for backend in _BACKENDS for row in toolchain(backend, arch).items()]
    compilers = {name: version for name, version in installed if version and name != "content"}
    named = {"spec": resources.display_name(Path(spec)), "spec_hash": of_spec, "gpu": gpu.name}
    about = {**named, **compilers}
    journal = Journal.opened(out.with_name(f"{out.name}.journal"), about, restart=options.restart)
    left: list[str] = []
    seed = secrets.randbelow(_MAX_SEED)
    generator = torch.Generator(gpu.device).manual_seed(seed)
    with torch.no_grad(), Monitor(gpu) as monitor:
        bench = Bench(
            device=gpu.device, l2_bytes=gpu_facts(gpu)["l2_bytes"], generator=generator, order=random.Random(seed),
            rounds=options.rounds, readings=monitor,
        )  # fmt: skip
        for subject in todo:
            if identity(subject.spec) in journal.rows:
                continue
            if time.monotonic() - start > options.seconds:
                left.append(subject.plan.name)
                continue
            backward = subject.plan.direction == "backward"
            forward_kernels = forward_kernels_of(subject.plan, prepared, gpu.capability) if backward else []
            try:
                outcome = search(subject.spec, subject.cases, forward_kernels, bench, partial(_compiled, options.jobs))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"stopped; {len(journal.rows)} of {len(todo)} kernels are measured and kept in {journal.path}, and "
                    "the same command goes on with the others"
                ) from None
            journal.add(outcome.to_dict())
            if not gpu.answers():
                raise LoadError(f"the GPU stopped responding at {subject.plan.name}; run the same command again")
            observer(journal.rows[identity(subject.spec)], len(journal.rows), len(todo))
            torch.cuda.empty_cache()
    rows = [journal.rows[identity(one.spec)] for one in todo if identity(one.spec) in journal.rows]
    method = f"attngen tune, medians of {options.rounds} rounds, {options.tokens} tokens"
    _write(out, tuned_text(gpu.name, compilers, _choices(rows), date=date.today().isoformat(), method=method))
    tables = TablesWithRows()
    if options.tables is not None:
        tables = tables_of(_searched(todo, journal, out), gpu=gpu.name, method=method)
        for name, text in tables.texts.items():
            _write(options.tables / name, text)
    if not left:
        journal.remove()
    return TuneReport(str(spec), gpu.name, rows, left_out, left, time.monotonic() - start, tables)


def dry_run(spec: str | Path, options: TuneOptions) -> list[tuple[str, str, int, int]]:
    """Label, name, number of candidates and number of cases of each kernel of a search; needs no GPU."""
    capability = Gpu.current().capability if torch.cuda.is_available() else None
    todo, _, _ = subjects(spec, options, capability)
    return [(label_of(one.plan), one.plan.name, sum(1 for _ in candidates(one.spec)), len(one.cases)) for one in todo]


def _compiled(jobs: int | None, kernels: Sequence[Prepared]) -> Mapping[str, Kernel]:
    """Compile kernels; return those that compile just as they are planned."""
    store = Store()
    built, _ = compile_kernels(kernels, store=store, jobs=jobs)
    return {name: read_kernel(store.path(one.key)) for name, one in built.items() if one.name == name}


def _choices(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The choices of the rows that are faster than the plan's own."""
    return [
        {"kernel": row["kernel"], "of": row["of"], "speedup": row["speedup"], **row["choice"]}
        for row in rows
        if row["choice"]
    ]


def _searched(todo: Sequence[Subject], journal: Journal, out: Path) -> list[Searched]:
    """The kernels that were searched, with the choices of the file."""
    tuned = load_tuned(out)
    results = ((one, journal.rows.get(identity(one.spec))) for one in todo)
    return [
        Searched(one.plan.name, row["kernel"], one.spec, tuned.applied(one.spec) or one.spec, row["speedup"])
        for one, row in results
        if row is not None and not row["problem"]
    ]


def _write(out: Path, text: str) -> None:
    """Write a file of choices, in place of an earlier one."""
    unfinished = out.with_name(f"{out.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(out)
    except OSError as error:
        raise CallError(f"{out} cannot be written: {cause(error)}") from error
