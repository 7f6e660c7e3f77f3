"""Lookup of kernels: folders given to ``attngen.load``, then installed packages, then the user's builds.

A variant's short name is looked for in that order, and the first of the three that has it decides what it means. The
kernels of all packages that define it in the same way are then candidates of a call. Two packages of one rank that
define it in two ways make the name ambiguous; ``package/variant`` says which one is meant. The presets are known
without a package, and without kernels.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from attngen.errors import CallError, LoadError, NoKernelError, suggest
from attngen.lang.variant import Variant
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.packages import BrokenKernelWarning, Package, SpecChangedWarning, package_of_kernels
from attngen.runtime.registry.shipped import own_package

if TYPE_CHECKING:
    from attngen.runtime.kernels.module import Kernel

__all__ = [
    "BrokenKernelWarning", "Resolved", "Package", "Registry", "SpecChangedWarning", "load", "open_package",
    "package_of_kernels", "registry",
]  # fmt: skip

#: Names of the three ranks, as messages say them, in the order of the search.
RANKS = ("loaded", "installed", "built")


#: Remedies where none of a package's kernels can be read.
_REMEDIES = {
    "loaded": "put its folder in place again, and load it",
    "installed": "reinstall it",
    "built": "'attngen cache verify' shows which; 'attngen build' of its spec makes them again",
}


#: The package of what no package holds: presets without kernels. No package may take this name.
NO_PACKAGE = "attngen"

#: The operators of variants that are not those of one package.
SHARED_NAMESPACE = "attngen_variants"


@dataclass(frozen=True)
class Resolved:
    """A name that was looked up: its variant, and the kernels that compute it.

    ``package`` is the first that holds it. ``namespace`` is that of its operators where it is not the package's own,
    and ``name`` what they call it by where it is not ``package/variant``: kernels of several packages, or of none.
    """

    package: str
    variant: Variant
    kernels: tuple[Kernel, ...]
    namespace: str | None = None
    name: str | None = None

    @property
    def full_name(self) -> str:
        """The name that stands for the same in every call."""
        return self.name or f"{self.package}/{self.variant.name}"

    @property
    def operator(self) -> str:
        """The name of its operators in their namespace."""
        return self.full_name.rpartition("/")[2]


class Registry:
    """All packages that a call may use. ``generation`` changes whenever an earlier answer may no longer hold."""

    def __init__(self) -> None:
        self.generation = 0
        self._ranks: dict[str, dict[str, Package] | None] = {"loaded": {}, "installed": None, "built": None}
        self._resolved: dict[tuple[str, str | None], Resolved] = {}
        self._values: dict[str, Variant] = {}
        self._compiled: list[Kernel] = []
        self._lock = threading.RLock()
        self._stamp: int | None = None

    def add(self, package: Package) -> None:
        """Add a package that was named explicitly, in place of one of the same name."""
        with self._lock:
            loaded = self._ranks["loaded"]
            assert loaded is not None
            loaded[package.name] = package
            self._forget()

    def add_compiled(self, kernel: Kernel) -> None:
        """Add a kernel to the variant of its name and definition, whichever packages hold that, if any does."""
        with self._lock:
            self._compiled.append(kernel)
            self._forget()

    def forget(self) -> None:
        """Drop cached answers; packages that were read stay."""
        with self._lock:
            self._forget()

    def refresh(self) -> None:
        """Look for installed packages and builds again; packages added by ``load`` stay."""
        with self._lock:
            self._ranks["installed"] = self._ranks["built"] = None
            self._forget()

    def refresh_if_built(self) -> bool:
        """Look for the user's builds again if one was written since; cheap enough for every call that fails."""
        discovery = _discovery()
        if discovery is None or self._ranks["built"] is None or self._stamp == discovery.builds_stamp():
            return False
        self.refresh()
        return True

    def clear(self) -> None:
        """Drop everything, including packages added by ``load``."""
        with self._lock:
            self._ranks = {"loaded": {}, "installed": None, "built": None}
            self._compiled = []
            self._forget()

    def _forget(self) -> None:
        self._resolved.clear()
        self.generation += 1

    def packages(self) -> Iterator[tuple[str, Package]]:
        """Yield every package with its rank, in the order of the search."""
        for rank in RANKS:
            for package in self._rank(rank).values():
                yield rank, package

    def _rank(self, rank: str) -> dict[str, Package]:
        known = self._ranks[rank]
        if known is None:
            discovery = _discovery()
            with self._lock:
                known = self._ranks[rank]
                if known is not None:  # another thread looked meanwhile
                    return known
                if discovery is None:
                    known = {}
                elif rank == "installed":
                    known = discovery.installed_packages()
                else:
                    self._stamp = discovery.builds_stamp()
                    known = discovery.built_packages()
                self._ranks[rank] = known
        return known

    def find(self, name: str, package: str | None = None) -> Resolved:
        """The variant and kernels of a name; ``package/variant`` and ``package`` say the same.

        Raises NoKernelError if nothing of this name is built, CallError if the name is ambiguous.
        """
        key = (name, package)
        resolved = self._resolved.get(key)
        if resolved is None:
            generation = self.generation
            resolved = self._search(name, package)
            with self._lock:
                if generation == self.generation:  # else another thread changed what the search went through
                    self._resolved[key] = resolved
        return resolved

    def declare(self, variant: Variant) -> str:
        """Return a name by which a call, and a traced program, can say a variant that was made as a value.

        The same definition gets the same name in every process, so that a saved program finds it again.
        """
        fields = variant.to_dict()
        content = {key: value for key, value in fields.items() if key != "let" and not key.endswith("_text")}
        digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        name = f"{variant.name}__{digest}"  # no name of a spec holds two underscores
        with self._lock:
            self._values[name] = variant
        return f"{NO_PACKAGE}/{name}"

    def _declare_shipped(self, name: str) -> None:
        """Declare the shipped variant that a saved program may mean by a name of ``declare``."""
        discovery, (of_spec, _, digest) = _discovery(), name.partition("__")
        if discovery is not None and digest:
            with suppress(KeyError):
                self.declare(discovery.variant(of_spec))

    def of_value(self, variant: Variant, package: str | None = None) -> Resolved:
        """Return a variant that is given as a value, and the kernels of its name that compute exactly it."""
        kernels: tuple[Kernel, ...] = ()
        for _, candidate in self.packages():
            if package in (None, candidate.name) and variant.name in candidate.sources:
                kernels += tuple(
                    kernel
                    for kernel in candidate.kernels(variant.name)
                    if kernel.variant.definition == variant.definition
                )
        if package is None:
            kernels += self._compiled_for(variant)
        return Resolved(package or "", variant, kernels)

    def _compiled_for(self, variant: Variant) -> tuple[Kernel, ...]:
        """Kernels compiled in this process for exactly this variant."""
        return tuple(
            kernel
            for kernel in self._compiled
            if kernel.variant_name == variant.name and kernel.variant.definition == variant.definition
        )

    def _search(self, name: str, package: str | None) -> Resolved:
        prefix, slash, short = name.rpartition("/")
        if prefix == NO_PACKAGE and short not in self._values:
            self._declare_shipped(short)
        if prefix == NO_PACKAGE and short in self._values:
            resolved = self.of_value(self._values[short], package)
            return replace(resolved, package=NO_PACKAGE, namespace=SHARED_NAMESPACE, name=name)
        if slash:
            if package not in (None, prefix):
                raise CallError(f"variant '{name}' names package '{prefix}', but package='{package}' was passed")
            package = prefix
        holders: list[tuple[Package, tuple[Kernel, ...]]] = []
        for rank in RANKS:
            of_rank = [
                (candidate, kernels)
                for candidate in self._rank(rank).values()
                if short in candidate.sources and package in (None, candidate.name)
                if (kernels := candidate.kernels(short))
            ]
            if not holders:
                _require_one_definition(short, rank, of_rank)
            holders += of_rank
        if holders:
            resolved = _together(holders)
            if package is not None or on_demand.maker is None:
                return resolved
            # a compiled program takes what is made while it runs, which is of no package
            kernels = (*resolved.kernels, *self._compiled_for(resolved.variant))
            return replace(resolved, kernels=kernels, namespace=SHARED_NAMESPACE, name=short)
        if package in (None, NO_PACKAGE) and not self._lists(short):
            variant = self.preset(short)
            if variant is not None:
                compiled = self._compiled_for(variant)
                return Resolved(NO_PACKAGE, variant, compiled, SHARED_NAMESPACE, short)
        raise self._unknown(short, package)

    def _lists(self, name: str) -> bool:
        """Whether a package lists kernels of a variant, readable or not."""
        return any(name in package.sources for _, package in self.packages())

    def preset(self, name: str) -> Variant | None:
        """Return a preset; None if there is none of that name, and in the runtime that a package carries."""
        discovery = _discovery()
        variant: Variant | None = None if discovery is None else discovery.preset(name)
        return variant

    def _unknown(self, name: str, package: str | None) -> NoKernelError:
        """The error for an unknown name: known names, and the lines of a spec that would add it."""
        known: dict[str, set[str]] = {}
        broken = []  # packages that have the variant, and no kernel of it that can be read
        for rank, holder in self.packages():
            known.setdefault(holder.name, set()).update(holder.variants)
            if name in holder.variants and package in (None, holder.name):
                broken.append(f"  {rank} package '{holder.name}' ({holder.origin}): {_REMEDIES[rank]}")
        if broken:
            return NoKernelError(
                "\n".join([f"the kernels of variant '{name}' are damaged, missing, or of another version:", *broken])
            )
        discovery = _discovery()
        presets = () if discovery is None else discovery.preset_names()
        if package is None:
            where, nearest = "", suggest(name, set(presets).union(*known.values()))
        elif package in known:
            where, nearest = f" in package '{package}'", suggest(name, known[package])
        else:
            where = f" in package '{package}': there is no such package"
            nearest = suggest(package, known)
        lines = [f"no kernel of variant '{name}' is built{where}{nearest}"]
        built = sorted(f"{owner}/{variant}" for owner, variants in known.items() for variant in variants)
        lines.append("  built: " + (", ".join(built) or "nothing"))
        if presets and package is None:
            lines.append(f"  known without a build, on the CPU: {', '.join(presets)}")
        lines.append(on_demand.remedy())
        misspelt = nearest and (package is None or package in known)
        meant = nearest.split("'")[1] if misspelt else name
        if presets and not misspelt and name not in presets:  # a variant of a spec of the user's own
            lines += ["  variants:", f"    {name}: {{mask: ...}}  # what it computes; it is no preset"]
        lines += [
            "  kernels:",
            f"    - variant: {meant}",
            "      head_dim: 128  # that of your q, k and v",
        ]
        return NoKernelError("\n".join(lines))


def _require_one_definition(name: str, rank: str, holders: Sequence[tuple[Package, tuple[Kernel, ...]]]) -> None:
    """Raise CallError, which shows how they differ, if packages of one rank define a variant in two ways."""
    defined: dict[object, tuple[Package, Variant]] = {}
    for holder, kernels in holders:
        defined.setdefault(kernels[0].variant.definition, (holder, kernels[0].variant))
    if len(defined) < 2:
        return
    (first, mine), (other, theirs) = list(defined.values())[:2]
    names = ", ".join(sorted(f"'{holder.name}/{name}'" for holder, _ in holders))
    lines = [f"variant '{name}' is ambiguous: {len(defined)} {rank} packages define it differently; say {names}"]
    for field, one, two in mine.differences(theirs):
        lines += [f"  {field}:", f"    {first.name}: {one}", f"    {other.name}: {two}"]
    raise CallError("\n".join(lines))


def _together(holders: Sequence[tuple[Package, tuple[Kernel, ...]]]) -> Resolved:
    """Return the variant of the first package, and the kernels of all packages that define it as that one does."""
    (first, kernels), *others = holders
    variant = kernels[0].variant
    added = tuple(kernel for _, more in others for kernel in more if kernel.variant.definition == variant.definition)
    if not added:
        return Resolved(first.name, variant, kernels, first.namespace)
    return Resolved(first.name, variant, (*kernels, *added), SHARED_NAMESPACE, variant.name)


def _discovery() -> ModuleType | None:
    """Return the module that finds installed packages and builds.

    None in the copy of the runtime that a package carries: it comes without that module, and knows that package alone.
    """
    try:
        from attngen.runtime.registry import discovery
    except ImportError:
        return None
    return discovery


registry = Registry()


def load(path: str | Path) -> Package:
    """Make the kernels of a folder known to this process, ahead of installed packages and the user's builds.

    ``path`` is a folder with a ``manifest.json``, or one with such folders below it (up to two levels down), or
    the index that a build wrote (``builds/<package>.json``). Returns the package. Raises LoadError.
    """
    discovery = _discovery()
    if discovery is None:
        raise LoadError("the runtime that a package carries knows that package alone")
    package: Package = discovery.package_at(path)
    registry.add(package)
    return package


def open_package(folder: Path) -> Package:
    """Make the package known that carries this copy of the runtime; it is called when the package is imported.

    Raises LoadError if its files are of two versions, or damaged.
    """
    package = own_package(folder)
    registry.add(package)
    return package
