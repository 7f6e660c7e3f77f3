"""Where kernels come from: folders given to ``attngen.load``, then installed packages, then the user's builds.

A variant's short name is looked for in that order, and the first of the three that has it decides. Two packages
of one rank that both have it make the name ambiguous; ``package/variant`` says which one is meant.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from attngen.errors import CallError, LoadError, NoKernelError, suggest
from attngen.lang.variant import Variant
from attngen.runtime.module import Kernel, read_kernel

ENTRY_POINTS = "attngen.kernels"

#: Names of the three ranks, as messages say them, in the order of the search.
RANKS = ("loaded", "installed", "built")


class SpecChangedWarning(UserWarning):
    """A spec was edited after its kernels were built, so that calls run the earlier version."""


class BrokenKernelWarning(UserWarning):
    """A kernel or a package that is listed but cannot be read; it is passed over."""


@dataclass(frozen=True)
class Package:
    """The kernels of one package, read when they are first asked for.

    ``sources`` maps a variant's name to the readers of its kernels, in the package's order. ``inputs`` maps the
    files that the spec was read from to their SHA-256 at build time; empty for a package that was shipped.
    """

    name: str
    origin: str
    sources: Mapping[str, tuple[Callable[[], Kernel], ...]]
    inputs: Mapping[str, str] = field(default_factory=dict)
    _read: dict[str, tuple[Kernel, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that the package has kernels of."""
        return tuple(self.sources)

    def kernels(self, variant: str) -> tuple[Kernel, ...]:
        """Return the kernels of a variant; one that cannot be read is passed over with a warning."""
        if variant not in self._read:
            self._warn_if_changed()
            kernels = []
            for read in self.sources.get(variant, ()):
                try:
                    kernels.append(read())
                except LoadError as error:
                    warnings.warn(f"package '{self.name}': {error}", BrokenKernelWarning, stacklevel=2)
            self._read[variant] = tuple(kernels)
        return self._read[variant]

    def changed_input(self) -> str | None:
        """Return the file of the spec that differs from what the build read, or None. A file that is gone is none."""
        for path, digest in self.inputs.items():
            try:
                content = Path(path).read_bytes()
            except OSError:
                continue
            if sha256(content).hexdigest() != digest:
                return path
        return None

    @cached_property
    def _warned(self) -> bool:
        path = self.changed_input()
        if path is not None:
            warnings.warn(
                f"{path} has changed since package '{self.name}' was built from it; calls run the earlier version "
                "until 'attngen build' runs again",
                SpecChangedWarning,
                stacklevel=2,
            )
        return True

    def _warn_if_changed(self) -> None:
        _ = self._warned  # once for each package


@dataclass(frozen=True)
class Found:
    """What a name stands for: the variant, and the kernels that compute it."""

    package: str
    variant: Variant
    kernels: tuple[Kernel, ...]


class Registry:
    """All packages that a call may use. ``generation`` changes whenever an earlier answer may no longer hold."""

    def __init__(self) -> None:
        self.generation = 0
        self._ranks: dict[str, dict[str, Package] | None] = {"loaded": {}, "installed": None, "built": None}
        self._found: dict[tuple[str, str | None], Found] = {}
        self._lock = threading.RLock()
        self._stamp: int | None = None

    def add(self, package: Package) -> None:
        """Make a package known that was named explicitly; one of the same name is replaced."""
        with self._lock:
            loaded = self._ranks["loaded"]
            assert loaded is not None
            loaded[package.name] = package
            self._forget()

    def refresh(self) -> None:
        """Look again for installed packages and builds; what ``load`` added stays."""
        with self._lock:
            self._ranks["installed"] = self._ranks["built"] = None
            self._forget()

    def refresh_if_built(self) -> bool:
        """Look again for the user's builds if any was written since; cheap enough for every call that fails."""
        if self._ranks["built"] is None or self._stamp == builds_stamp():
            return False
        self.refresh()
        return True

    def clear(self) -> None:
        """Forget everything, also what ``load`` added."""
        with self._lock:
            self._ranks = {"loaded": {}, "installed": None, "built": None}
            self._forget()

    def _forget(self) -> None:
        self._found.clear()
        self.generation += 1

    def packages(self) -> Iterator[tuple[str, Package]]:
        """Yield every package with its rank, in the order of the search."""
        for rank in RANKS:
            for package in self._rank(rank).values():
                yield rank, package

    def _rank(self, rank: str) -> dict[str, Package]:
        known = self._ranks[rank]
        if known is None:
            with self._lock:
                if rank == "built":
                    self._stamp = builds_stamp()
                known = self._ranks[rank] = installed_packages() if rank == "installed" else built_packages()
        return known

    def find(self, name: str, package: str | None = None) -> Found:
        """Return what a variant's name stands for; ``package/variant`` and ``package`` say the same.

        Raises NoKernelError if nothing of this name is built, CallError if the name is ambiguous.
        """
        key = (name, package)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._search(name, package)
        return found

    def _search(self, name: str, package: str | None) -> Found:
        prefix, slash, short = name.rpartition("/")
        if slash:
            if package not in (None, prefix):
                raise CallError(f"variant '{name}' names package '{prefix}', but package='{package}' was passed")
            package = prefix
        for rank in RANKS:
            holders = [
                candidate
                for candidate in self._rank(rank).values()
                if short in candidate.sources and package in (None, candidate.name)
            ]
            if len(holders) > 1:
                names = ", ".join(sorted(f"'{holder.name}/{short}'" for holder in holders))
                raise CallError(f"variant '{short}' is ambiguous: {len(holders)} {rank} packages have it; say {names}")
            for holder in holders:
                kernels = holder.kernels(short)
                if kernels:
                    return Found(holder.name, kernels[0].variant, kernels)
        raise self._unknown(short, package)

    def _unknown(self, name: str, package: str | None) -> NoKernelError:
        """Return the error for a name that nothing stands for: what there is, and the lines that would add it."""
        known = {f"{p.name}/{v}": v for _, p in self.packages() for v in p.variants}
        nearest = suggest(name, set(known.values()))
        where = f" in package '{package}'" if package else ""
        lines = [f"no kernel of variant '{name}' is built{where}{nearest}"]
        lines.append("  built: " + (", ".join(sorted(known)) if known else "nothing"))
        lines += [
            "To build one, add to a spec and run 'attngen build':",
            "  kernels:",
            f"    - variant: {name}",
            "      head_dim: 128",
        ]
        return NoKernelError("\n".join(lines))


def load(path: str | Path) -> Package:
    """Make the kernels of a folder known to this process, ahead of installed packages and the user's builds.

    ``path`` is a folder with a ``manifest.json``, or one with such folders below it (up to two levels down), or
    the index that a build wrote (``builds/<package>.json``). Returns the package. Raises LoadError.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise LoadError(f"{path} does not exist")
    package = _package_of_index(path) if path.is_file() else package_of_folder(path)
    registry.add(package)
    return package


def package_of_folder(path: Path) -> Package:
    """Return the one package whose kernels lie in or below a folder. Raises LoadError."""
    patterns = ("manifest.json", "*/manifest.json", "*/*/manifest.json")
    kernels = [read_kernel(found.parent) for pattern in patterns for found in sorted(path.glob(pattern))]
    if not kernels:
        raise LoadError(f"{path} holds no kernel (no manifest.json in it, nor up to two levels below)")
    names = sorted({kernel.package for kernel in kernels})
    if len(names) > 1:
        raise LoadError(
            f"{path} holds kernels of several packages ({', '.join(names)}); load them one by one, for example by the "
            "index that each build wrote (builds/<package>.json)"
        )
    return package_of_kernels(kernels, str(path))


def package_of_kernels(kernels: Sequence[Kernel], origin: str) -> Package:
    """Return kernels of one package as a package."""
    sources: dict[str, tuple[Callable[[], Kernel], ...]] = {}
    for kernel in kernels:
        sources[kernel.variant_name] = (*sources.get(kernel.variant_name, ()), _constant(kernel))
    return Package(kernels[0].package, origin, sources)


def _constant(kernel: Kernel) -> Callable[[], Kernel]:
    return lambda: kernel


def _package_of_index(path: Path) -> Package:
    """Return the package of an index file inside a store."""
    from attngen.store import Store
    from attngen.store.index import read_index

    store = Store(path.parent.parent)
    index = read_index(store, path.stem) if path.suffix == ".json" else None
    if index is None:
        raise LoadError(f"{path} is no index of a build")
    return _package_of_build(store, index)


def _package_of_build(store: Any, index: Any) -> Package:
    sources: dict[str, tuple[Callable[[], Kernel], ...]] = {}
    for entry in index.kernels:
        sources[entry.variant] = (*sources.get(entry.variant, ()), _reader(store.path(entry.key)))
    return Package(index.package, str(store.root), sources, dict(index.inputs))


def _reader(folder: Path) -> Callable[[], Kernel]:
    return lambda: read_kernel(folder)


def built_packages() -> dict[str, Package]:
    """Return the packages that this user has built, by name; none where the part that builds is not installed."""
    try:
        from attngen.store import Store
        from attngen.store.index import read_indexes
    except ImportError:
        return {}
    store = Store()
    return {index.package: _package_of_build(store, index) for index in read_indexes(store)}


def builds_stamp() -> int | None:
    """Return what changes whenever an index is written: each is renamed into the folder of all."""
    try:
        from attngen.store import default_root
    except ImportError:
        return None
    try:
        return (default_root() / "builds").stat().st_mtime_ns
    except OSError:
        return None


def installed_packages() -> dict[str, Package]:
    """Return the packages that registered an entry point, by name; one that cannot be read is passed over."""
    packages: dict[str, Package] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            package = package_of_folder(_folder_of(point.load()))
        except Exception as error:  # a broken installation must not disable the others
            warnings.warn(f"installed package '{point.name}': {error}", BrokenKernelWarning, stacklevel=2)
            continue
        packages[package.name] = package
    return packages


def _folder_of(found: Any) -> Path:
    """Return the folder that an entry point names: a path, a function that returns one, or a package's own folder."""
    if isinstance(found, ModuleType):
        return Path(next(iter(found.__path__)))
    return Path(found() if callable(found) else found)


registry = Registry()
