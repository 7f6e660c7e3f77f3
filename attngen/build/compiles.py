"""Kernels from plans to the cache, each by the first of its attempts that compiles to clean machine code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attngen.build.source_errors import source_error
from attngen.compile import toolchain
from attngen.compile.artifact import Artifact
from attngen.errors import (
    AttngenError,
    ChoiceError,
    CompileError,
    CrashError,
    DiskFullError,
    InternalError,
    Location,
    SourceError,
    StoreError,
    ToolchainError,
)
from attngen.store.refusals import read_refusal, write_refusal
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.plan.attempts import Attempts
    from attngen.plan.model import Plan, Refused
    from attngen.render import Source
    from attngen.schema import KernelSpec
    from attngen.store.jobs import Job, JobResult, Workers

#: Name of the function that loads the modules of a build's workers.
LOAD = "attngen.build.compiles:load_all"

#: The function that compiles, by name, since it runs in other processes.
COMPILER = "attngen.compile:compile_source"


@dataclass(frozen=True)
class Prepared:
    """A kernel before its compile. ``given``: its source, where that is there; else the plan is rendered when the
    source is first read."""

    spec: KernelSpec
    plan: Plan
    given: Source | None = None

    @cached_property
    def source(self) -> Source:
        """The rendered source. Raises what rendering the plan raises."""
        from attngen.render import render

        return self.given or render(self.plan)


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel in the cache. ``origin`` is ``built`` if this build compiled it, else ``cached``.

    ``prepared`` is what it was compiled from; None where nothing had to be planned to know that it is there.
    """

    name: str
    key: str
    origin: str
    manifest: Mapping[str, Any]
    prepared: Prepared | None = field(default=None, compare=False, repr=False)

    @property
    def refused(self) -> Sequence[Mapping[str, str]]:
        """Name and reason of each plan that was tried before this one, and refused."""
        rows: Sequence[Mapping[str, str]] = self.manifest.get("refused", ())
        return rows

    @property
    def advice(self) -> str | None:
        """The cost of another backend instead of CUDA, and the way to keep CUDA; None for kernels in CUDA."""
        if not self.refused or self.refused[0]["backend"] == self.manifest["backend"]:
            return None
        return _advice(self.manifest)

    def to_dict(self) -> dict[str, Any]:
        """The kernel in the document of ``attngen build --json``."""
        of_manifest = ("backend", "arch", "resources", "package", "dtype", "head_dim_qk", "head_dim_v", "layout")
        return {
            "name": self.name,
            **{name: self.manifest[name] for name in of_manifest if name in self.manifest},
            "variant": variant_name(self.manifest),
            "origin": self.origin,
            "key": self.key,
            "refused": list(self.refused),
            **({"advice": self.advice} if self.advice else {}),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that could not be planned, compiled or kept, and why."""

    name: str
    error: AttngenError
    location: Location | None = None  # of the spec's entry that asks for the kernel

    def to_dict(self) -> dict[str, Any]:
        """The failure in the document of ``attngen build --json``, with the place of its error or its kernel."""
        row = self.error.to_dict()
        if row["file"] is None and self.location is not None:
            row |= {"file": self.location.file, "line": self.location.line or None}
        return {"name": self.name, "error": str(self.error), **{name: row[name] for name in ("file", "line", "field")}}


class Observer(Protocol):
    """Receives the progress of a build."""

    def planned(self, total: int, missing: int) -> None:
        """All kernels are planned and rendered, and ``missing`` of them have to be compiled."""

    def started(self, name: str) -> None:
        """A compile begins; again for each attempt at a kernel, under the name that it was planned with at first."""

    def finished(self, name: str, error: AttngenError | None) -> None:
        """A kernel is done."""


class Silent:
    """An observer that says nothing."""

    def planned(self, total: int, missing: int) -> None:
        """Ignore it."""

    def started(self, name: str) -> None:
        """Ignore it."""

    def finished(self, name: str, error: AttngenError | None) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel to compile or to find: under the name that was requested for, the attempt that is made now."""

    requested: str
    prepared: Prepared
    key: str
    attempts: Attempts | None = None  # once one is refused

    @classmethod
    def of(cls, prepared: Prepared, requested: str | None = None, attempts: Attempts | None = None) -> Task:
        """Return the task of a kernel; ``requested`` is its name at the first attempt."""
        from attngen.store.key import key_of

        return cls(requested or prepared.plan.name, prepared, key_of(prepared.plan, prepared.source), attempts)

    @property
    def compiler(self) -> tuple[str, str]:
        """Backend and arch, which decide the compiler."""
        return self.prepared.plan.backend, self.prepared.plan.arch.name

    def after(self, refused: Refused) -> Task | None:
        """Return the next attempt, or None if there is none."""
        from attngen.plan.attempts import Attempts, next_attempt
        from attngen.render import render

        attempts = self.attempts or Attempts(self.prepared.spec)
        planned = next_attempt(attempts, (*self.prepared.plan.refused, refused))
        if planned is None:
            return None
        return Task.of(Prepared(self.prepared.spec, planned, render(planned)), self.requested, attempts)

    def with_remedy(self, error: SourceError) -> SourceError:
        """The error of a source, with what to write for a kernel in another backend, where the spec leaves it open."""
        from attngen.plan.attempts import Attempts

        spec, own = self.prepared.spec, self.prepared.plan.backend
        other = next((each.backend for each in Attempts(spec) if each.backend != own), None)
        if other is None:
            return error
        field = f"backward: {{backend: {other}}}" if spec.direction == "backward" else f"backend: {other}"
        return SourceError(f"{error}; '{field}' avoids it")


@dataclass
class Compiles:
    """The compiles of one build, and what became of them."""

    store: Store
    observer: Observer
    compiler: str
    kernels: dict[str, BuiltKernel] = field(default_factory=dict)  # by the name that was requested for
    failures: list[Failure] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _proven: set[tuple[str, str]] = field(default_factory=set)  # compilers that work, although they crashed

    def run(self, prepared: Sequence[Prepared], jobs: int | None, workers: Workers | None = None) -> None:
        """Find or compile kernels, whose names differ, in processes of their own where no ``workers`` are given.

        Raises ToolchainError where a compiler is not installed or does not work: that says nothing about a kernel.
        KeyboardInterrupt says what is kept.
        """
        self.store.require_trusted()
        tasks = [self._find(Task.of(kernel)) for kernel in prepared]
        missing = [task for task in tasks if task is not None]
        self.observer.planned(len(prepared), len(missing))
        if missing:
            self.store.require_writable()
            compilers = dict.fromkeys(task.compiler for task in missing)
            for compiler in compilers:
                if lacking := toolchain.missing(*compiler):
                    raise ToolchainError(lacking)
            note = toolchain.newer_driver_note(arch for backend, arch in compilers if backend == "cuda")
            self.warnings.extend([note] if note else ())
        if missing:
            cached = len(self.kernels)
            try:
                self._compile(missing, jobs, workers)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"stopped; {len(self.kernels) - cached} of {len(missing)} kernels are compiled and kept in "
                    f"{self.store.root}, and the next build compiles the others"
                ) from None

    def _compile(self, tasks: Sequence[Task], jobs: int | None, workers: Workers | None) -> None:
        """Compile kernels, and what is to be tried where an attempt is refused, those that take longest first."""
        from attngen.store.jobs import run_jobs, worker_processes
        from attngen.store.limits import job_limit

        tasks = sorted(tasks, key=_effort, reverse=True)
        calls = [self._job(task) for task in tasks]
        with worker_processes(LOAD) if workers is None else nullcontext(workers) as given:
            for result in run_jobs(
                calls,
                job_limit(jobs),
                on_start=lambda index: self.observer.started(tasks[index].requested),
                shared=given,
            ):
                following = self._take(tasks[result.index], result)
                if following is not None and self._can_compile(following):
                    tasks.append(following)
                    calls.append(self._job(following))

    def _job(self, task: Task) -> Job:
        """Return the compile of one attempt, as a job of a worker."""
        from attngen.store.jobs import Job

        planned, source = task.prepared.plan, task.prepared.source
        arguments = (str(self.store.root), task.key, self.compiler, planned, source)
        return Job(planned.name, f"{__name__}:build_one", arguments)

    def _can_compile(self, task: Task) -> bool:
        """Whether the compiler of a later attempt, which may be another one, is installed; if not, the kernel fails."""
        lacking = toolchain.missing(*task.compiler)
        if lacking:
            self._fail(task, _exhausted(task, CompileError(f"{task.prepared.plan.name}: {lacking}")))
        return not lacking

    def _find(self, task: Task) -> Task | None:
        """Take a kernel from the cache; else return the attempt that has to be compiled, or None if none is left."""
        while True:
            artifact, warning = self.store.read(task.key)
            self.warnings.extend([warning] if warning else ())
            if artifact is not None:
                self._keep(task, "cached", artifact.manifest)
                return None
            refused = read_refusal(self.store, task.key)
            if refused is None:
                return task
            following = self._after(task, refused, CompileError(f"{refused.name}: {refused.reason}"))
            if following is None:
                return None
            task = following

    def _take(self, task: Task, result: JobResult) -> Task | None:
        """Take the result of an attempt; return what is to be compiled next if that was refused."""
        self.warnings.extend(result.warnings)
        if result.error is not None:
            return self._after_error(task, result.error)
        origin, manifest = result.value
        if origin == "uncached":
            reason = result.warnings[-1] if result.warnings else "the cache cannot be written"
            self._fail(task, StoreError(f"{task.prepared.plan.name} was compiled, but not kept: {reason}"))
        else:
            self._keep(task, origin, manifest)
            self.observer.finished(task.requested, None)
        return None

    def _after_error(self, task: Task, error: AttngenError) -> Task | None:
        """Return the attempt to compile after one that failed; None, with the failure noted, if there is none.

        Raises ToolchainError if the compiler does not work, and DiskFullError: neither says anything about the kernel.
        """
        if isinstance(error, ToolchainError):
            raise error
        if isinstance(error, DiskFullError):
            raise DiskFullError(f"{error}; the next build begins where this one ended") from None
        if isinstance(error, CrashError):
            self._require_working(*task.compiler)
        if not isinstance(error, ChoiceError | InternalError):
            self._fail(task, task.with_remedy(error) if isinstance(error, SourceError) else error)
            return None
        refused = _refused(task, error)
        if isinstance(error, ChoiceError):
            write_refusal(self.store, task.key, refused)
        following = self._after(task, refused, error)
        if following is None:
            self.observer.finished(task.requested, self.failures[-1].error)
            return None
        attempt = self._find(following)
        if attempt is None:  # found, or the last one is known to be refused: there is nothing more to compile
            self.observer.finished(task.requested, None if task.requested in self.kernels else self.failures[-1].error)
        return attempt

    def _require_working(self, backend: str, arch: str) -> None:
        """Raise ToolchainError unless a compiler that crashed compiles a tiny kernel, in a process of its own."""
        from attngen.store.jobs import Job, run_jobs

        if (backend, arch) in self._proven:
            return
        label = f"the compiler for {backend} and {arch} does not work, not even for a kernel of one line"
        for result in run_jobs([Job(label, "attngen.compile.probe:probe_job", (backend, arch))], 1, timeout=120.0):
            if result.error is not None:
                raise ToolchainError(str(result.error))
        self._proven.add((backend, arch))

    def _after(self, task: Task, refused: Refused, error: AttngenError) -> Task | None:
        following = task.after(refused)
        if following is None:
            self.failures.append(Failure(task.requested, _exhausted(task, error), task.prepared.spec.location))
        return following

    def _fail(self, task: Task, error: AttngenError) -> None:
        self.failures.append(Failure(task.requested, error, task.prepared.spec.location))
        self.observer.finished(task.requested, error)

    def _keep(self, task: Task, origin: str, manifest: Mapping[str, Any]) -> None:
        self.kernels[task.requested] = BuiltKernel(task.prepared.plan.name, task.key, origin, manifest, task.prepared)


def after_refusals(store: Store, prepared: Prepared) -> Prepared | None:
    """Return the first attempt at a kernel that no earlier build refused, or None if all were."""
    task = Task.of(prepared)
    while (refused := read_refusal(store, task.key)) is not None:
        following = task.after(refused)
        if following is None:
            return None
        task = following
    return task.prepared


def _advice(manifest: Mapping[str, Any]) -> str:
    """The loss of a kernel that takes too many registers in CUDA, and the declaration that keeps it."""
    from attngen.plan.allowances import TRITON_BACKWARD

    variant = manifest.get("variant")
    scalars = variant.get("scalars", ()) if isinstance(variant, Mapping) else ()
    unbounded = [
        row["name"]
        for row in scalars
        if row["dtype"].startswith("int") and row.get("const") is None and row.get("max") is None
    ]
    parts = [f"{TRITON_BACKWARD.says} ({TRITON_BACKWARD.measured.page})"] * (manifest["direction"] == "backward")
    if unbounded:
        parts.append(f"declare a max for {', '.join(unbounded)}, so that fewer integers need 64 bits")
    else:
        parts.append("a simpler mask or score, or a smaller head_dim, needs fewer registers")
    return "; ".join(parts)


def _effort(task: Task) -> tuple[bool, int]:
    """Sort key by the time of a compile: backward kernels, then long sources."""
    return task.prepared.plan.direction == "backward", len(task.prepared.source.text)


def _refused(task: Task, error: AttngenError) -> Refused:
    from attngen.plan.model import Refused

    planned = task.prepared.plan
    reason = str(error).splitlines()[0].removeprefix(f"{planned.name}: ")
    slow = error.slow if isinstance(error, ChoiceError) else None
    return Refused(planned.name, planned.backend, reason, slow)


def _exhausted(task: Task, error: AttngenError) -> AttngenError:
    """Return the error of a kernel that has no attempt left: that of the last one, with the reasons of the others."""
    before = task.prepared.plan.refused
    if not before:
        return error
    lines = [f"  {row.name}: {row.reason}" for row in before]
    return CompileError("\n".join([str(error), "Tried before it:", *lines]))


def load() -> None:
    """Import what a plan's pickle names, and load the compiler of CUDA sources, before workers fork."""
    from attngen.compile import cuda

    importlib.import_module("attngen.plan")
    importlib.import_module("attngen.render")
    cuda.load_compiler()


def load_all() -> None:
    """Load the compilers of all sources, as far as they are installed."""
    for each in (load, _load_triton):
        with suppress(Exception):  # the job that needs it says what is wrong
            each()


def _load_triton() -> None:
    importlib.import_module("attngen.compile.triton")
    importlib.import_module("triton.compiler")


def build_one(
    root: str, key: str, compiler: str, plan: Plan, source: Source, wait: bool
) -> tuple[str, dict[str, Any]] | None:
    """Find or compile one kernel, in a worker process. Returns its origin and its manifest.

    Returns None, without ``wait``, where another process compiles it now. Raises DiskFullError if there is no room
    for the kernel, ChoiceError where another plan may compile, and CompileError for a source that is wrong in itself.
    """

    def compile_() -> Artifact:
        module, _, name = compiler.partition(":")
        try:
            artifact = getattr(importlib.import_module(module), name)(plan, source)
        except ChoiceError as error:
            wrong = source_error(source, error)
            if wrong is None:
                raise
            raise wrong from error
        assert isinstance(artifact, Artifact)
        return artifact

    fetched = Store(Path(root)).fetch(key, compile_, wait=wait)
    if fetched is None:
        return None
    if isinstance(fetched.problem, DiskFullError):
        raise fetched.problem
    return fetched.origin, dict(fetched.artifact.manifest)


def variant_name(manifest: Mapping[str, Any]) -> str:
    """Return the name of a manifest's variant."""
    variant = manifest.get("variant")
    return str(variant["name"]) if isinstance(variant, Mapping) else ""
