"""A package of kernels as a value, wherever it came from; its kernels are read at their first use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.errors import LoadError
from attngen.files import read_regular
from attngen.operations import HELPER_VARIANTS

if TYPE_CHECKING:
    from attngen.runtime.kernels.module import Kernel


class SpecChangedWarning(UserWarning):
    """A spec was edited after its kernels were built, so that calls run the earlier version."""


class BrokenKernelWarning(UserWarning):
    """A kernel or a package that is listed but cannot be read; it is passed over."""


@dataclass(frozen=True)
class Package:
    """The kernels of one package, read when they are first asked for.

    ``sources`` maps a variant's name to the readers of its kernels, in the package's order. ``inputs`` maps the
    files that the spec was read from to their SHA-256 at build time; empty for a package that was shipped.
    ``namespace`` is that of its operators where it differs from the one that the package's name gives.
    """

    name: str
    origin: str
    sources: Mapping[str, tuple[Callable[[], Kernel], ...]]
    inputs: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None
    _read: dict[str, tuple[Kernel, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        kernels = sum(map(len, self.sources.values()))
        return f"Package({self.name}, from {self.origin}: {len(self.variants)} variants, {kernels} kernels)"

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that the package has kernels of."""
        return tuple(name for name in self.sources if name not in HELPER_VARIANTS)

    @property
    def every_kernel(self) -> Iterator[Kernel]:
        """All kernels that can be read, those that are not attention included."""
        for name in self.sources:
            yield from self.kernels(name)

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
                content = read_regular(Path(path))
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


def package_of_kernels(kernels: Sequence[Kernel], origin: str) -> Package:
    """Return kernels of one package as a package."""
    sources: dict[str, tuple[Callable[[], Kernel], ...]] = {}
    for kernel in kernels:
        sources[kernel.variant_name] = (*sources.get(kernel.variant_name, ()), _constant(kernel))
    return Package(kernels[0].package, origin, sources)


def _constant(kernel: Kernel) -> Callable[[], Kernel]:
    return lambda: kernel


def reader(folder: Path, *, sealed: bool = False) -> Callable[[], Kernel]:
    """Reader of the kernel of a folder, called when it is first asked for; see ``read_kernel``."""

    def read() -> Kernel:
        from attngen.runtime.kernels.module import read_kernel  # calls on the CPU read none, as a rule

        return read_kernel(folder, sealed=sealed)

    return read
