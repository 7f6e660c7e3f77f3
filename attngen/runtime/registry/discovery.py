"""Packages beyond this process: folders that are named, installed packages, and the user's builds.

A package that ships this runtime goes without this module.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from attngen.cache_root import default_root
from attngen.errors import LoadError
from attngen.runtime.registry.packages import BrokenKernelWarning, Package, package_of_kernels, reader
from attngen.runtime.registry.presets import preset, preset_names, variant
from attngen.runtime.registry.shipped import INDEX, read_package

if TYPE_CHECKING:
    from attngen.runtime.kernels.module import Kernel
    from attngen.store import Store
    from attngen.store.index import Index

__all__ = [
    "ENTRY_POINTS", "built_packages", "builds_stamp", "installed_packages", "package_at", "package_of_folder", "preset",
    "preset_names", "read_installed", "variant",
]  # fmt: skip

ENTRY_POINTS = "attngen.kernels"


def package_at(path: str | Path) -> Package:
    """Return the package of a folder, or of the index that a build wrote. Raises LoadError; see ``lookup.load``."""
    if not isinstance(path, str | os.PathLike):
        raise LoadError(f"a path is text or a Path, got {type(path).__name__}")
    try:
        path = Path(path).expanduser().absolute()  # its kernels are read later, wherever the process is by then
        exists = path.exists()
    except RuntimeError as error:  # "~" of a user that there is not
        raise LoadError(f"{path}: {error}") from None
    except OSError as error:  # a name that is too long, or a folder that may not be read
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    if not exists:
        raise LoadError(f"{path} does not exist")
    return _package_of_index(path) if path.is_file() else package_of_folder(path)


def package_of_folder(path: Path) -> Package:
    """Return the one package whose kernels lie in or below a folder. Raises LoadError."""
    if (path / INDEX).is_file():
        package = read_package(path)
        # The package's own runtime, which may run in this process too, defines operators in the plain namespace.
        return replace(package, namespace=f"attngen_installed_{package.name}")
    patterns = ("manifest.json", "*/manifest.json", "*/*/manifest.json")
    kernels = [reader(manifest.parent)() for pattern in patterns for manifest in sorted(path.glob(pattern))]
    if not kernels:
        raise LoadError(f"{path} holds no kernel (no manifest.json in it, nor up to two levels below)")
    names = sorted({kernel.package for kernel in kernels})
    if len(names) > 1:
        raise LoadError(
            f"{path} holds kernels of several packages ({', '.join(names)}); load them one by one, for example by the "
            "index that each build wrote (builds/<package>.json)"
        )
    return package_of_kernels(kernels, str(path))


def _package_of_index(path: Path) -> Package:
    """Return the package of an index file inside a store."""
    from attngen.store import Store
    from attngen.store.index import read_index

    store = Store(path.parent.parent)
    index = read_index(store, path.stem) if path.suffix == ".json" else None
    if index is None:
        raise LoadError(f"{path} is not the index of a build")
    return _package_of_build(store, index)


def _package_of_build(store: Store, index: Index) -> Package:
    sources: dict[str, tuple[Callable[[], Kernel], ...]] = {}
    for entry in index.kernels:
        sources[entry.variant] = (*sources.get(entry.variant, ()), reader(store.path(entry.key), sealed=True))
    return Package(index.package, str(store.root), sources, dict(index.inputs))


def built_packages() -> dict[str, Package]:
    """Return the packages that this user has built, by name; none where the part that builds is not installed.

    The part that reads a cache is imported where there is a build.

    A cache to which others could have written is passed over with a warning.
    """
    root = default_root()
    if not os.path.isdir(root / "builds"):
        return {}
    try:
        from attngen.store import Store, StoreWarning
        from attngen.store.index import read_indexes
        from attngen.store.trust import distrust
    except ImportError:
        return {}
    if reason := distrust(root):
        warnings.warn(reason, StoreWarning, stacklevel=2)
        return {}
    store = Store(root)
    return {index.package: _package_of_build(store, index) for index in read_indexes(store)}


def builds_stamp() -> int | None:
    """A stamp that changes whenever an index is written: each is renamed into the folder of all."""
    root = default_root()
    try:
        stamp = (root / "builds").stat().st_mtime_ns
        from attngen.store.trust import distrust
    except (OSError, ImportError):
        return None
    return None if distrust(root) else stamp  # as long as it is distrusted, there is nothing to look for again


def installed_packages() -> dict[str, Package]:
    """Return the packages that registered an entry point, by name; one that cannot be read is passed over."""
    packages: dict[str, Package] = {}
    for name, package in read_installed():
        if isinstance(package, Package):
            packages[package.name] = package
        else:
            warnings.warn(f"installed package '{name}': {package}", BrokenKernelWarning, stacklevel=2)
    return packages


def read_installed() -> Iterator[tuple[str, Package | Exception]]:
    """Yield the name of each entry point, with its package or the reason why that cannot be read."""
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            yield point.name, package_of_folder(_folder_of(point))
        except Exception as error:  # a broken installation must not disable the others
            yield point.name, error


def _folder_of(point: metadata.EntryPoint) -> Path:
    """Return the folder that an entry point names: a module's own folder, a path, or a function that returns one.

    A module is found without importing it, since that would load the runtime that it carries.
    """
    if not getattr(point, "attr", True):
        spec = find_spec(point.module)
        if spec is None or not spec.submodule_search_locations:
            raise LoadError(f"there is no package of the name '{point.module}'")
        return Path(next(iter(spec.submodule_search_locations)))
    folder = point.load()
    if isinstance(folder, ModuleType):
        return Path(next(iter(folder.__path__)))
    return Path(folder() if callable(folder) else folder)
