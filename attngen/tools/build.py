"""The pipeline over all kernels of a spec: load, expand, plan, render, compile, store, index.

A build that has nothing to do imports no template engine, no YAML and no compiler: see ``attngen.store.receipt``.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attngen.compile import toolchain
from attngen.compile.artifact import Artifact
from attngen.errors import AttngenError, CompileError, Location, PlanError, SpecError, StoreError, suggest
from attngen.store.index import Index, IndexEntry, read_index, write_index
from attngen.store.receipt import Receipt, generator_digest, read_receipt, write_receipt
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.plan.model import Plan
    from attngen.render import Source
    from attngen.spec import KernelSpec, Spec

#: The function that compiles, by name, since it runs in other processes.
COMPILER = "attngen.compile:compile_source"


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel in the cache. ``origin`` is ``built`` if this build compiled it, else ``cached``."""

    name: str
    key: str
    origin: str
    manifest: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the kernel as ``attngen build --json`` prints it."""
        of_manifest = ("backend", "arch", "resources", "package", "dtype", "head_dim_qk", "head_dim_v", "layout")
        return {
            "name": self.name,
            **{name: self.manifest[name] for name in of_manifest if name in self.manifest},
            "variant": variant_name(self.manifest),
            "origin": self.origin,
            "key": self.key,
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that could not be compiled or kept, and why."""

    name: str
    error: AttngenError


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build did. ``up_to_date``: nothing that it reads has changed since the last one, so it did nothing."""

    package: str
    spec: str
    kernels: tuple[BuiltKernel, ...]
    seconds: float
    failures: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    up_to_date: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as ``attngen build --json`` prints it."""
        return {
            "package": self.package,
            "spec": self.spec,
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "failures": [{"name": failure.name, "error": str(failure.error)} for failure in self.failures],
            "warnings": list(self.warnings),
            "up_to_date": self.up_to_date,
            "seconds": round(self.seconds, 3),
        }


class Observer(Protocol):
    """Who wants to see a build progress."""

    def planned(self, total: int, missing: int) -> None:
        """All kernels are planned and rendered, and ``missing`` of them have to be compiled."""

    def started(self, name: str) -> None:
        """A compile begins."""

    def finished(self, name: str, error: AttngenError | None) -> None:
        """A compile ended."""


class _Silent:
    def planned(self, total: int, missing: int) -> None:
        pass

    def started(self, name: str) -> None:
        pass

    def finished(self, name: str, error: AttngenError | None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel before its compile."""

    spec: KernelSpec
    plan: Plan
    source: Source


@dataclass(frozen=True, slots=True)
class _Task:
    """A kernel to compile or to find, and what became of it."""

    prepared: Prepared
    key: str


def build(
    spec: str | Path,
    *,
    arches: Sequence[str] = (),
    jobs: int | None = None,
    store: Store | None = None,
    observer: Observer | None = None,
    compiler: str | None = None,
) -> BuildReport:
    """Build the kernels of a spec that the cache lacks, and index all of them under the spec's package.

    ``arches`` restricts the build to kernels for these. ``jobs`` is how many compiles run at once, as many as
    there are cores by default; fewer if memory does not suffice. Needs neither a GPU nor torch.

    Raises SpecError before anything is compiled if the spec is wrong or a kernel cannot be planned, and StoreError
    if the cache cannot be written. A kernel whose compile fails does not stop the others; see ``failures``.
    """
    start = time.perf_counter()
    path, store = Path(spec), store or Store()
    known = _known(path, arches, store)
    if known is not None:
        kernels = known[1]
        return BuildReport(known[0], str(path), kernels, time.perf_counter() - start, up_to_date=True)
    return _build(path, arches, jobs, store, observer or _Silent(), compiler or COMPILER, start)


def _known(path: Path, arches: Sequence[str], store: Store) -> tuple[str, tuple[BuiltKernel, ...]] | None:
    """Return package and kernels of a build that need not run again, or None."""
    receipt = read_receipt(store, path, arches)
    index = read_index(store, receipt.package) if receipt else None
    if receipt is None or index is None:
        return None
    listed = {(entry.name, entry.key) for entry in index.kernels}
    kernels = []
    for name, key in receipt.kernels:
        artifact = store.read(key)[0] if (name, key) in listed else None
        if artifact is None:
            return None
        kernels.append(BuiltKernel(name, key, "cached", artifact.manifest))
    return receipt.package, tuple(kernels)


def _build(
    path: Path,
    arches: Sequence[str],
    jobs: int | None,
    store: Store,
    observer: Observer,
    compiler: str,
    start: float,
) -> BuildReport:
    from attngen.spec import load_spec, spec_hash
    from attngen.store.key import key_of

    generator = generator_digest()  # before anything is read: what changes from now on is for the next build
    loaded = load_spec(path)
    tasks = [_Task(prepared, key_of(prepared.plan, prepared.source)) for prepared in prepare(loaded, arches)]
    outcome = _Compiles(store, observer, compiler)
    outcome.run(tasks, jobs)
    names = [task.prepared.plan.name for task in tasks]
    built = [outcome.kernels[task.key] for task in tasks if task.key in outcome.kernels]
    inputs = {str(Path(source.path).resolve()): source.sha256 for source in loaded.sources}
    index = Index(
        package=loaded.package,
        spec=str(path.resolve()),
        spec_hash=spec_hash(loaded),
        inputs=inputs,
        kernels=tuple(_index_entry(kernel) for kernel in built),
    )
    if built:  # a spec of which nothing compiles leaves what an earlier build made of it
        write_index(store, _with_other_arches(store, index, arches))
    if not outcome.failures:
        receipt = Receipt(inputs, generator, loaded.package, tuple((kernel.name, kernel.key) for kernel in built))
        with contextlib.suppress(StoreError):  # without it, the next build takes a little longer
            write_receipt(store, path, arches, receipt)
    store.sweep()
    return BuildReport(
        loaded.package,
        str(path),
        tuple(built),
        time.perf_counter() - start,
        failures=tuple(sorted(outcome.failures, key=lambda failure: names.index(failure.name))),
        warnings=tuple(dict.fromkeys(outcome.warnings)),
    )


def prepare(spec: Spec, arches: Sequence[str] = ()) -> list[Prepared]:
    """Return the kernels of a spec, planned and rendered, each once, in its order; raises what ``plans`` does."""
    from attngen.render import render

    return [Prepared(kernel, planned, render(planned)) for kernel, planned in plans(spec, arches)]


def plans(spec: Spec, arches: Sequence[str] = ()) -> list[tuple[KernelSpec, Plan]]:
    """Return the kernels of a spec with their plans, each once, in its order.

    Raises SpecError for an arch that the spec does not build for, and one that names every kernel which cannot
    be planned.
    """
    from attngen.plan import plan
    from attngen.spec import expand

    kernel_specs = expand(spec)
    offered = list(dict.fromkeys(kernel.arch for kernel in kernel_specs))
    for arch in arches:
        if arch not in offered:
            allowed = ", ".join(offered)
            raise SpecError(
                f"the spec asks for no kernel for '{arch}'{suggest(arch, offered)}; it builds for: {allowed}",
                location=Location(spec.file),
                field="arch",
            )
    found: dict[str, tuple[KernelSpec, Plan]] = {}
    errors: list[SpecError] = []
    for kernel in kernel_specs:
        if arches and kernel.arch not in arches:
            continue
        try:
            planned = plan(kernel)
            first = found.setdefault(planned.name, (kernel, planned))
            if first[1].to_dict() != planned.to_dict():
                raise _clash(planned.name, first[0], kernel)
        except SpecError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        # One text with all of them, since each line already says where it belongs.
        raise PlanError("\n".join(dict.fromkeys(map(str, errors))))
    return list(found.values())


def _clash(name: str, first: KernelSpec, second: KernelSpec) -> PlanError:
    return PlanError(
        f"this kernel and the one of {first.location} would both be named {name}, but differ; keep one of them",
        location=second.location,
    )


@dataclass
class _Compiles:
    """The compiles of one build, and what became of them."""

    store: Store
    observer: Observer
    compiler: str
    kernels: dict[str, BuiltKernel] = field(default_factory=dict)  # by key
    failures: list[Failure] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def run(self, tasks: Sequence[_Task], jobs: int | None) -> None:
        missing = []
        for task in tasks:
            artifact, warning = self.store.read(task.key)
            if artifact is None:
                missing.append(task)
                self.warnings.extend([warning] if warning else ())
            else:
                self.kernels[task.key] = BuiltKernel(task.prepared.plan.name, task.key, "cached", artifact.manifest)
        self.observer.planned(len(tasks), len(missing))
        if missing:
            for backend in dict.fromkeys(task.prepared.plan.backend for task in missing):
                if lacking := toolchain.missing(backend):
                    raise CompileError(lacking)
            self.store.require_writable()
            self.compile(missing, jobs)

    def compile(self, tasks: Sequence[_Task], jobs: int | None) -> None:
        from attngen.store.jobs import Job, run_jobs
        from attngen.store.limits import job_limit

        names = [task.prepared.plan.name for task in tasks]
        root = str(self.store.root)
        calls = [
            Job(
                name, f"{__name__}:build_one", (root, task.key, self.compiler, task.prepared.plan, task.prepared.source)
            )
            for name, task in zip(names, tasks, strict=True)
        ]
        for result in run_jobs(calls, job_limit(jobs), on_start=lambda index: self.observer.started(names[index])):
            name, key, error = names[result.index], tasks[result.index].key, result.error
            self.warnings.extend(result.warnings)
            if error is None:
                origin, manifest = result.value
                if origin == "uncached":
                    reason = result.warnings[-1] if result.warnings else "the cache cannot be written"
                    error = StoreError(f"{name} was compiled, but not kept: {reason}")
                else:
                    self.kernels[key] = BuiltKernel(name, key, origin, manifest)
            if error is not None:
                self.failures.append(Failure(name, error))
            self.observer.finished(name, error)


def compile_kernels(
    prepared: Sequence[Prepared], *, store: Store, jobs: int | None = None, observer: Observer | None = None
) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
    """Find or compile kernels in the cache without indexing them: calls do not see them, who asked here does.

    Returns the kernels by name, and those that could not be compiled. Raises StoreError if the cache cannot be written.
    """
    from attngen.store.key import key_of

    tasks = [_Task(kernel, key_of(kernel.plan, kernel.source)) for kernel in prepared]
    outcome = _Compiles(store, observer or _Silent(), COMPILER)
    outcome.run(tasks, jobs)
    return {kernel.name: kernel for kernel in outcome.kernels.values()}, tuple(outcome.failures)


def build_one(
    root: str, key: str, compiler: str, plan: Plan, source: Source, wait: bool
) -> tuple[str, dict[str, Any]] | None:
    """Find or compile one kernel, in a worker process. Returns its origin and its manifest.

    Returns None, without ``wait``, where another process compiles it now.
    """

    def compile_() -> Artifact:
        module, _, name = compiler.partition(":")
        artifact = getattr(importlib.import_module(module), name)(plan, source)
        assert isinstance(artifact, Artifact)
        return artifact

    fetched = Store(Path(root)).fetch(key, compile_, wait=wait)
    return None if fetched is None else (fetched.origin, dict(fetched.artifact.manifest))


def variant_name(manifest: Mapping[str, Any]) -> str:
    """Return the name of the variant that a manifest is of."""
    variant = manifest.get("variant")
    return str(variant["name"]) if isinstance(variant, Mapping) else ""


def _index_entry(kernel: BuiltKernel) -> IndexEntry:
    manifest = kernel.manifest
    return IndexEntry(kernel.name, kernel.key, variant_name(manifest), manifest["arch"], manifest["backend"])


def _with_other_arches(store: Store, index: Index, arches: Sequence[str]) -> Index:
    """Return an index that keeps what an earlier build of the same spec made for arches that this one left out."""
    earlier = read_index(store, index.package) if arches else None
    if earlier is None or (earlier.spec, earlier.spec_hash) != (index.spec, index.spec_hash):
        return index
    kept = tuple(entry for entry in earlier.kernels if entry.arch not in arches)
    return Index(index.package, index.spec, index.spec_hash, index.inputs, kept + index.kernels)
