"""A package that was shipped: a folder with kernels, an index of them, and a copy of this runtime.

Two runtimes may read it: the copy that it carries, and an attngen that finds it installed, of whatever version. So its
index says first which forms it is written in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.errors import LoadError
from attngen.files import read_regular
from attngen.formats import MANIFEST_FORMAT, PACKAGE_FORMAT, SCHEMA, VERSION
from attngen.records import Count, MisfitError, Name, VariantName, read
from attngen.runtime.registry.packages import Package, reader

if TYPE_CHECKING:
    from attngen.runtime.kernels.module import Kernel

INDEX = "package.json"
KERNELS = "kernels"

#: Entry of the index → what it counts, and the one number that this runtime reads.
_FORMS = {
    "format": ("package format", PACKAGE_FORMAT),
    "manifest": ("manifest format", MANIFEST_FORMAT),
    "schema": ("spec schema", SCHEMA),
}


@dataclass(frozen=True, slots=True)
class _Row:
    """A kernel in the index: the name of its folder, and that of its variant."""

    name: Name
    variant: VariantName


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a package, as far as the runtime reads it.

    Packages that were made before there was a driver for each arch in ``drivers`` have one number for all of them.
    """

    package: Name
    kernels: tuple[_Row, ...]
    attngen: str
    arches: tuple[Name, ...] = ()
    drivers: Mapping[str, Count] | None = None
    min_driver: Count = 0


def own_package(folder: Path) -> Package:
    """Return the package that carries this copy of the runtime.

    Raises LoadError if its files are of two versions, or damaged.
    """
    from attngen.lang import check  # noqa: F401  reading a variant needs it: now, rather than in the first call

    index = _read_index(folder)
    if index.attngen != VERSION:
        raise LoadError(
            f"{folder}: its kernels were packaged by attngen {index.attngen}, but the runtime beside them is of "
            f"attngen {VERSION}: files of two versions are mixed; reinstall the package"
        )
    return _package(folder, index)


def read_package(folder: Path) -> Package:
    """Return a package that was shipped, with whichever runtime; its kernels are read when they are asked for.

    Raises LoadError for one that this runtime does not understand, saying what it needs and what it met.
    """
    return _package(folder, _read_index(folder))


def drivers_of_package(folder: Path) -> dict[str, int]:
    """Oldest driver, as cuDriverGetVersion gives it, on which the package's kernels for each arch run.

    Raises LoadError for a package that this runtime does not understand.
    """
    index = _read_index(folder)
    return dict(index.drivers or dict.fromkeys(index.arches, index.min_driver))


def _read_index(folder: Path) -> _Index:
    """Return the index of a folder, in forms that this runtime reads. Raises LoadError."""
    path = folder / INDEX
    try:
        index = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}; reinstall the package") from error
    if not isinstance(index, dict):
        raise LoadError(f"{path} is not the index of a package; reinstall it")
    for entry, (what, known) in _FORMS.items():
        listed = index.get(entry)
        if listed != known:
            raise LoadError(
                f"{folder} was made by attngen {index.get('attngen')} and has {what} {listed}; this runtime, of "
                f"attngen {VERSION}, reads {what} {known}: {_advice(index, listed, known)}"
            )
    try:
        return read(_Index, index)
    except MisfitError as misfit:
        raise LoadError(f"{path} is damaged (it {misfit}); reinstall the package") from None


def _advice(index: Mapping[str, object], listed: object, known: int) -> str:
    name = index.get("package")
    own = f"call it by its own name ('import {name}'), with the runtime that it carries"
    newer = isinstance(listed, int) and listed > known
    return f"update attngen, or {own}" if newer else f"build the package again, or {own}"


def _package(folder: Path, index: _Index) -> Package:
    sources: dict[str, tuple[Callable[[], Kernel], ...]] = {}
    for row in index.kernels:
        sources[row.variant] = (*sources.get(row.variant, ()), reader(folder / KERNELS / row.name))
    return Package(index.package, str(folder), sources)
