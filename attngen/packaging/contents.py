"""The files of a package's module: runtime, kernels, sources, spec, stubs, and an index of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.build.kernel_filter import EVERYTHING, KernelFilter
from attngen.build.pipeline import BuiltKernel, Observer, Prepared, compile_kernels, each_once, prepare
from attngen.errors import PackageError
from attngen.formats import MANIFEST_FORMAT, PACKAGE_FORMAT, SCHEMA, VERSION
from attngen.operations import HELPER_VARIANTS
from attngen.packaging.vendor import runtime_files
from attngen.packaging.view import PackageView, VariantView, compiler_lines, compilers_of, drivers_of, fill
from attngen.resources import licence_file
from attngen.runtime.registry.shipped import INDEX, KERNELS
from attngen.store.entry import CUBIN, MANIFEST
from attngen.store.store import Store

if TYPE_CHECKING:
    from attngen.schema import Spec
    from attngen.schema.tuned import Tuned

#: Figures in a manifest that differ between compiles of one kernel.
_PASSING = frozenset({"compile_seconds"})

#: Compile errors that are shown whole; of the others the first line, which names the kernel.
_FULL_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a package's module by their path in it, with their sources."""

    module: str
    files: Mapping[str, bytes]


def contents_of(
    spec: Spec,
    version: str,
    *,
    only: KernelFilter = EVERYTHING,
    tuned: Sequence[Tuned] = (),
    store: Store | None = None,
    jobs: int | None = None,
    observer: Observer | None = None,
) -> Contents:
    """Compile those kernels of a spec that the cache lacks, and return the files of its package.

    The same spec and compilers always give the same files. Raises SpecError for a wrong spec, and PackageError if a
    kernel does not compile.
    """
    store = store or Store()
    asked = prepare(spec, only, tuned=tuned)
    built, failures = compile_kernels(asked, store=store, jobs=jobs, observer=observer)
    if failures:
        lines = [str(f.error) if i < _FULL_ERRORS else str(f.error).splitlines()[0] for i, f in enumerate(failures)]
        raise PackageError("\n".join([f"{len(failures)} of {len(asked)} kernels do not compile:", *lines]))
    files: dict[str, bytes] = {}
    manifests: list[Mapping[str, Any]] = []
    kernels = each_once(built.values())
    for kernel in kernels:
        manifest = _lasting(kernel.manifest)
        manifests.append(manifest)
        for name, data in _kernel_files(kernel, manifest, store):
            files[f"{KERNELS}/{kernel.name}/{name}"] = data
    prepared = [kernel.prepared for kernel in kernels if kernel.prepared is not None]
    headers = {name: text for kernel in prepared for name, text in kernel.source.headers.items()}
    view = view_of(spec, prepared, version, manifests)
    files |= {f"include/{name}": text.encode() for name, text in headers.items()}
    files |= {f"spec/{name}": data for name, data in spec_files(spec).items()}
    files |= {f"_runtime/{name}": data for name, data in runtime_files().items()}
    files["_runtime/LICENSE"] = licence_file().read_bytes()
    files |= {
        INDEX: _json(_index(view, manifests)),
        "__init__.py": fill("init.py.j2", view=view).encode(),
        "__init__.pyi": fill("init.pyi.j2", view=view).encode(),
        "py.typed": b"",
        "NOTICE.txt": fill("notice.txt.j2", view=view).encode(),
    }
    return Contents(spec.package, dict(sorted(files.items())))


def view_of(
    spec: Spec, kernels: Sequence[Prepared], version: str, manifests: Sequence[Mapping[str, Any]] = ()
) -> PackageView:
    """Values for the texts of a package; without manifests, before anything is compiled."""
    variants = {
        kernel.plan.variant.name: kernel.plan.variant
        for kernel in kernels
        if kernel.plan.variant.name not in HELPER_VARIANTS
    }
    return PackageView(
        module=spec.package,
        version=version,
        spec=spec.name,
        arches=tuple(dict.fromkeys(kernel.plan.arch.name for kernel in kernels)),
        variants=tuple(VariantView.of(variant) for variant in variants.values()),
        toolchain=compiler_lines(compilers_of(manifests)),
        headers=any(kernel.source.headers for kernel in kernels),
    )


def spec_files(spec: Spec) -> dict[str, bytes]:
    """Return the files that a spec was read from, by their path from its folder. SpecError if one is gone."""
    folder = Path(spec.file).parent
    return {Path(source.path).relative_to(folder).as_posix(): Path(source.path).read_bytes() for source in spec.sources}


def _kernel_files(kernel: BuiltKernel, manifest: Mapping[str, Any], store: Store) -> Iterator[tuple[str, bytes]]:
    artifact, damage = store.read(kernel.key)
    if artifact is None:
        raise PackageError(f"{kernel.name} was built, but is gone from the cache; {damage or 'run it again'}")
    yield MANIFEST, _json(manifest)
    yield CUBIN, artifact.cubin
    yield from ((f"{name}.cubin", cubin) for name, cubin in artifact.others.items())
    assert kernel.prepared is not None  # compile_kernels plans all of them
    source = kernel.prepared.source
    yield f"source{Path(source.file_name).suffix}", source.text.encode()


def _lasting(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a manifest that is the same in every compile of a kernel.

    It leaves out the hash of the compiler's files, too: its wheels for two versions of Python compile a source alike.
    """
    resources = {name: value for name, value in manifest["resources"].items() if name not in _PASSING}
    return {**manifest, "resources": resources, "toolchain": compilers_of([manifest])}


def _index(view: PackageView, manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the index: the versions of the package's formats, what it needs, and a row for each kernel."""
    columns = ("name", "arch", "backend", "dtype", "head_dim_qk", "head_dim_v", "layout", "direction")
    return {
        "format": PACKAGE_FORMAT,
        "manifest": MANIFEST_FORMAT,
        "schema": SCHEMA,
        "attngen": VERSION,
        "package": view.module,
        "version": view.version,
        "spec": view.spec,
        "arches": list(view.arches),
        "drivers": drivers_of(manifests),
        "min_driver": max(manifest.get("min_driver") or 0 for manifest in manifests),
        "toolchain": compilers_of(manifests),
        "kernels": [
            {**{name: manifest[name] for name in columns}, "variant": manifest["variant"]["name"]}
            for manifest in manifests
        ],
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"
