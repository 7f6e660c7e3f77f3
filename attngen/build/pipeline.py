"""The pipeline over all kernels of a spec: load, expand, plan, render, compile, store, index.

A build that has nothing to do imports no template engine, no YAML and no compiler: see ``attngen.store.receipt``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from attngen import resources
from attngen.build.compiles import (
    COMPILER,
    LOAD,
    BuiltKernel,
    Compiles,
    Failure,
    Observer,
    Prepared,
    Silent,
    variant_name,
)
from attngen.build.kernel_filter import EVERYTHING, KernelFilter, head_dim_text
from attngen.errors import (
    AttngenError,
    Location,
    PlanError,
    SpecError,
    StoreError,
    internal_error,
    together,
)
from attngen.operations import OPERATIONS
from attngen.store.index import Index, IndexEntry, read_index, write_index
from attngen.store.receipt import Receipt, generator_digest, read_receipt, write_receipt
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.plan.model import Plan
    from attngen.schema import KernelSpec, Spec
    from attngen.schema.tuned import Tuned
    from attngen.store.jobs import Workers


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Outcome of a build. ``up_to_date``: its inputs have not changed since the last one, so it did nothing."""

    package: str
    spec: str
    kernels: tuple[BuiltKernel, ...]
    seconds: float
    failures: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    up_to_date: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen build --json``."""
        return {
            "package": self.package,
            "spec": self.spec,
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "failures": [failure.to_dict() for failure in self.failures],
            "warnings": list(self.warnings),
            "up_to_date": self.up_to_date,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Repeated:
    """A kernel that two entries of a spec ask for: what one fixes, the plan may choose for the other."""

    name: str
    first: KernelSpec
    again: KernelSpec


def build(
    spec: str | Path,
    *,
    only: KernelFilter = EVERYTHING,
    tuned: Sequence[str | Path] = (),
    jobs: int | None = None,
    store: Store | None = None,
    observer: Observer | None = None,
    compiler: str | None = None,
) -> BuildReport:
    """Build the kernels of a spec that the cache lacks, and index all of them under the spec's package.

    ``only`` restricts the build to some of them. ``tuned`` are files of choices (``attngen.schema.tuned``) for
    kernels whose spec leaves them open; where they choose differently for one, each of its choices becomes a kernel.
    ``jobs`` is how many compiles run at once, as many as there are cores by default; fewer if memory does not
    suffice. Needs neither a GPU nor torch.

    Raises SpecError before anything is compiled if the spec is wrong or none of its kernels can be planned, and
    StoreError if the cache cannot be written. A kernel that cannot be planned, or whose compile fails, does not stop
    the others; see ``failures``.
    """
    start = time.perf_counter()
    path, store = Path(spec), store or Store()
    store.require_trusted()
    chosen = [resources.tuned_file(path) for path in tuned]
    known = _known(path, only, store, chosen)
    if known is not None:
        kernels = known[1]
        return BuildReport(known[0], str(path), kernels, time.perf_counter() - start, up_to_date=True)
    from attngen.store.jobs import worker_processes

    with worker_processes(LOAD) as workers:
        workers.prepare()  # compilers are loaded while kernels are planned
        outcome = Compiles(store, observer or Silent(), compiler or COMPILER)
        return _build(path, only, chosen, outcome, jobs, workers, start)


def _known(
    path: Path, only: KernelFilter, store: Store, tuned: Sequence[Path]
) -> tuple[str, tuple[BuiltKernel, ...]] | None:
    """Return package and kernels of a build that need not run again, or None."""
    receipt = read_receipt(store, path, only.key(), tuned)
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
    only: KernelFilter,
    tuned: Sequence[Path],
    outcome: Compiles,
    jobs: int | None,
    workers: Workers,
    start: float,
) -> BuildReport:
    from attngen.schema import load_spec, spec_hash
    from attngen.schema.tuned import load_tuned

    generator = generator_digest()  # before anything is read: later changes are for the next build
    loaded = load_spec(path)
    choices = [load_tuned(file) for file in tuned]
    prepared, failures = prepare_each(loaded, only, tuned=choices)
    if failures and not prepared:
        raise together([failure.error for failure in failures])
    store = outcome.store
    outcome.run(prepared, jobs, workers)
    order = [kernel.plan.name for kernel in prepared]
    failures += sorted(outcome.failures, key=lambda failure: order.index(failure.name))
    built = each_once(outcome.kernels[name] for name in order if name in outcome.kernels)
    inputs = {str(Path(source.path).resolve()): source.sha256 for source in loaded.sources}
    index = Index(
        package=loaded.package,
        spec=str(path.resolve()),
        spec_hash=spec_hash(loaded),
        inputs=inputs,
        kernels=tuple(_index_entry(kernel) for kernel in built),
    )
    if built:  # if nothing compiles, what an earlier build made stays
        write_index(store, _with_others(store, index, only))
    if not failures:
        inputs |= {str(Path(file.file).resolve()): file.sha256 for file in choices}
        receipt = Receipt(inputs, generator, loaded.package, tuple((kernel.name, kernel.key) for kernel in built))
        with contextlib.suppress(StoreError):  # without it, the next build takes a little longer
            write_receipt(store, path, only.key(), receipt, tuned)
    store.sweep()
    return BuildReport(
        loaded.package,
        str(path),
        tuple(built),
        time.perf_counter() - start,
        failures=tuple(failures),
        warnings=tuple(dict.fromkeys((*_doubts(loaded), *outcome.warnings, *_unused(choices, prepared)))),
    )


def _doubts(spec: Spec) -> Iterable[str]:
    """Yield a warning for each expression and extent of a spec that is probably not meant."""
    from attngen.schema.lint import doubtful

    for name in spec.model.variants:
        yield from map(str, doubtful(spec.variants[name]))


def _unused(choices: Sequence[Tuned], prepared: Sequence[Prepared]) -> Iterable[str]:
    """Yield a warning for each file of choices that has none for any kernel of a spec."""
    used = {(row.file, row.gpu) for kernel in prepared for row in kernel.plan.tuned}
    for file in choices:
        if (file.name, file.gpu) not in used:
            yield f"{file.file} has no choice for a kernel of this spec that leaves it open"


def each_once(kernels: Iterable[BuiltKernel]) -> list[BuiltKernel]:
    """Return kernels, each name once: a later attempt at one may be the first attempt at another."""
    by_name: dict[str, BuiltKernel] = {}
    for kernel in kernels:
        known = by_name.setdefault(kernel.name, kernel)
        if known.refused and not kernel.refused:
            by_name[kernel.name] = kernel
    return list(by_name.values())


def prepare(spec: Spec, only: KernelFilter = EVERYTHING, *, tuned: Sequence[Tuned] = ()) -> list[Prepared]:
    """Return the kernels of a spec, planned and rendered, each once, in its order; raises what ``plans`` does."""
    prepared, failures = prepare_each(spec, only, tuned=tuned)
    if failures:
        raise together([failure.error for failure in failures])
    return prepared


def prepare_each(
    spec: Spec,
    only: KernelFilter = EVERYTHING,
    *,
    tuned: Sequence[Tuned] = (),
    repeated: list[Repeated] | None = None,
) -> tuple[list[Prepared], list[Failure]]:
    """The kernels of a spec that can be planned and rendered, and the errors of the others.

    ``tuned`` has choices for kernels that leave them open. ``repeated`` takes what ``plan_each`` says of kernels that
    are asked for again.
    Raises SpecError for a filter that takes no kernel of the spec.
    """
    from attngen.render import render

    planned, failures = plan_each(spec, only, tuned=tuned, repeated=repeated)
    prepared = []
    for kernel, chosen in planned:
        source = _attempt(kernel, partial(render, chosen))
        if isinstance(source, AttngenError):
            failures.append(Failure(chosen.name, source, kernel.location))
        else:
            prepared.append(Prepared(kernel, chosen, source))
    return prepared, failures


def prepare_unrendered(spec: Spec) -> list[Prepared]:
    """The kernels of a spec, each rendered when its source is first read; raises what ``plans`` does."""
    return [Prepared(kernel, planned) for kernel, planned in plans(spec)]


def plans(spec: Spec, only: KernelFilter = EVERYTHING) -> list[tuple[KernelSpec, Plan]]:
    """Return the kernels of a spec with their plans, each once, in its order.

    Raises SpecError for a filter that takes no kernel of the spec, and one that names every kernel which cannot
    be planned.
    """
    planned, failures = plan_each(spec, only)
    if failures:
        raise together([failure.error for failure in failures])
    return planned


def plan_each(
    spec: Spec,
    only: KernelFilter = EVERYTHING,
    *,
    tuned: Sequence[Tuned] = (),
    repeated: list[Repeated] | None = None,
) -> tuple[list[tuple[KernelSpec, Plan]], list[Failure]]:
    """The kernels of a spec that can be planned, with their plans, each once, and the errors of the others.

    The kernels that append to the caches of paged ones, those that quantize for ones that read 8 bits, those that
    widen caches, and those that select scores follow those that its entries ask for. A choice of ``tuned`` that the
    plan refuses is left out. Kernels that become what another one is already are left out, and appended to
    ``repeated``.
    Raises SpecError for a spec without kernels, and for a filter that takes none of them.
    """
    from attngen.plan import plan
    from attngen.schema import expand

    kernel_specs = expand(spec)
    if not kernel_specs:
        raise _empty(spec)
    by_name: dict[str, tuple[KernelSpec, Plan]] = {}
    failures: list[Failure] = []
    for kernel in only.of(kernel_specs, spec.file):
        planned = _attempt(kernel, partial(_plans, kernel, tuned))
        if isinstance(planned, AttngenError):
            failures.append(Failure(_label(kernel), planned, kernel.location))
            continue
        for each in planned:
            first = by_name.setdefault(each.name, (kernel, each))
            if first[1] is not each and _chosen_alike(first[1]) != _chosen_alike(each):
                clash = _clash(each.name, first[0], kernel)
                failures.append(Failure(_label(kernel), clash, kernel.location))
            elif repeated is not None and first[0] is not kernel:
                repeated.append(Repeated(each.name, first[0], kernel))
    planned_specs = [kernel for kernel, _ in by_name.values()]
    helpers = (resolve_name(operation.specs)(planned_specs) for operation in OPERATIONS if operation.specs)
    for kernel in chain.from_iterable(helpers):
        helper = _attempt(kernel, partial(plan, kernel))
        if isinstance(helper, AttngenError):
            failures.append(Failure(_label(kernel), helper, kernel.location))
        else:
            by_name[helper.name] = kernel, helper
    return list(by_name.values()), failures


def _empty(spec: Spec) -> SpecError:
    """The error of a spec that lists no kernels, with an entry to add."""
    variant = next(iter(spec.variants), "causal")
    arch = "" if spec.model.arch else ", arch: sm90a"
    return SpecError(
        "no kernels: the spec builds nothing; add an entry, such as\n"
        f"    kernels:\n      - {{variant: {variant}, head_dim: 128, dtype: bf16{arch}}}",
        location=Location(spec.file),
        field="kernels",
    )


def _plans(kernel: KernelSpec, tuned: Sequence[Tuned]) -> list[Plan]:
    """Return the plans of a kernel, one for each way in which the files of ``tuned`` choose for it.

    A file that has no choice for it, or one that the plan refuses, takes the plan's own.
    """
    from attngen.plan import plan
    from attngen.plan.model import TunedOn
    from attngen.plan.times import tuned_times

    own = plan(kernel)
    by_name: dict[str, Plan] = {}
    for file in tuned:
        choice, chosen = file.applied(kernel), own
        if choice is not None:
            with contextlib.suppress(PlanError):
                chosen = plan(choice)
        chosen = by_name.setdefault(chosen.name, chosen)
        if choice is not None and chosen is not own:
            row = TunedOn(file.name, file.gpu, tuned_times(own, chosen, file.speedup(kernel)))
            by_name[chosen.name] = replace(chosen, tuned=(*chosen.tuned, row))
    return list(by_name.values()) or [own]


def _chosen_alike(planned: Plan) -> dict[str, Any]:
    """Return a plan as JSON, whoever made its choices."""
    return replace(planned, tuned=()).to_dict()


_T = TypeVar("_T")


def _attempt(kernel: KernelSpec, make: Callable[[], _T]) -> _T | AttngenError:
    """Return the result of ``make`` for a kernel, or its error: a fault of attngen fails that kernel alone."""
    try:
        return make()
    except AttngenError as error:
        return error
    except Exception as error:
        return internal_error(f"{kernel.location}: {_label(kernel)}", error)


def _label(kernel: KernelSpec) -> str:
    """Describe a kernel that has no plan, and so no name."""
    element = f"{kernel.dtype}, head_dim {head_dim_text(kernel.head_dim_qk, kernel.head_dim_v)}"
    return f"{kernel.variant.name}, {kernel.direction}, {kernel.layout}, {element}, {kernel.arch}"


def _clash(name: str, first: KernelSpec, second: KernelSpec) -> PlanError:
    return PlanError(
        f"this kernel and the one of {first.location} would both be named {name}, but differ; keep one of them",
        location=second.location,
    )


def compile_kernels(
    prepared: Sequence[Prepared],
    *,
    store: Store,
    jobs: int | None = None,
    observer: Observer | None = None,
    workers: Workers | None = None,
) -> tuple[dict[str, BuiltKernel], tuple[Failure, ...]]:
    """Find or compile kernels in the cache without indexing them, so that calls do not find them.

    ``workers`` are processes that were started ahead (``attngen.store.jobs.worker_processes``).
    Returns the kernels and the failures. The kernels go by the names of their plans, in the order of ``prepared``; one
    that was built by another plan has the name of that plan itself. Raises StoreError if the cache cannot be written.
    """
    outcome = Compiles(store, observer or Silent(), COMPILER)
    outcome.run(prepared, jobs, workers)
    names = (kernel.plan.name for kernel in prepared)  # their order, not that in which compiles end
    return {name: outcome.kernels[name] for name in names if name in outcome.kernels}, tuple(outcome.failures)


def _index_entry(kernel: BuiltKernel) -> IndexEntry:
    manifest = kernel.manifest
    return IndexEntry(kernel.name, kernel.key, variant_name(manifest), manifest["arch"], manifest["backend"])


def _with_others(store: Store, index: Index, only: KernelFilter) -> Index:
    """Return an index that keeps what an earlier build of the same spec made of kernels that this one left out."""
    earlier = read_index(store, index.package) if only else None
    if earlier is None or (earlier.spec, earlier.spec_hash) != (index.spec, index.spec_hash):
        return index
    names = {entry.name for entry in index.kernels}
    kept = tuple(entry for entry in earlier.kernels if entry.name not in names and not _superseded(store, entry, only))
    return Index(index.package, index.spec, index.spec_hash, index.inputs, kept + index.kernels)


def _superseded(store: Store, entry: IndexEntry, only: KernelFilter) -> bool:
    """True for an earlier kernel that the filter takes, or whose manifest cannot be read."""
    if not only.takes(arch=entry.arch):
        return False
    artifact = store.read(entry.key)[0]
    if artifact is None:
        return True
    manifest = artifact.manifest
    return only.takes(dtype=manifest["dtype"], head_dim=head_dim_text(manifest["head_dim_qk"], manifest["head_dim_v"]))
