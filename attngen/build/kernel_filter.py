"""A part of a spec's kernels, chosen where it is built: those for some arches, dtypes or head dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attngen.errors import Location, SpecError, suggest

if TYPE_CHECKING:
    from attngen.schema import KernelSpec

#: How each field of a filter reads a kernel, as a spec writes it.
_READ: dict[str, Callable[[KernelSpec], str]] = {
    "arch": lambda kernel: kernel.arch,
    "dtype": lambda kernel: kernel.dtype,
    "head_dim": lambda kernel: head_dim_text(kernel.head_dim_qk, kernel.head_dim_v),
}


def head_dim_text(qk: int, v: int) -> str:
    """Head dims as text: ``128``, or ``192/128`` where q and k differ from v."""
    return str(qk) if qk == v else f"{qk}/{v}"


@dataclass(frozen=True, slots=True)
class KernelFilter:
    """The arches, dtypes and head dims to build of a spec; an empty field takes all. Head dims are texts, ``128`` or
    ``192/128``."""

    arch: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """True unless it takes all kernels."""
        return any(getattr(self, field) for field in _READ)

    def takes(self, **values: str) -> bool:
        """True for a kernel with these values of fields; fields that are not named are not looked at."""
        return all(value in (getattr(self, field) or (value,)) for field, value in values.items())

    def of(self, kernels: Sequence[KernelSpec], file: str) -> list[KernelSpec]:
        """Kernels that pass the filter, in their order.

        Raises SpecError, naming the field and what the spec has, for a value that no kernel of ``file`` has, and where
        none has all of them together.
        """
        for field, read in _READ.items():
            offered = list(dict.fromkeys(map(read, kernels)))
            for value in getattr(self, field):
                if value not in offered:
                    raise SpecError(
                        f"the spec lists no kernels for '{value}'{suggest(value, offered)}; it builds for: "
                        f"{', '.join(offered)}",
                        location=Location(file),
                        field=field,
                    )
        taken = [kernel for kernel in kernels if self.takes(**{name: read(kernel) for name, read in _READ.items()})]
        if kernels and not taken:
            asked = ", ".join(f"{field} {' or '.join(getattr(self, field))}" for field in _READ if getattr(self, field))
            raise SpecError(f"the spec lists no kernels for {asked} together", location=Location(file), field="kernels")
        return taken

    def key(self) -> list[tuple[str, ...]]:
        """Its values, sorted: equal for filters that take the same kernels."""
        return [tuple(sorted(getattr(self, field))) for field in _READ]


EVERYTHING = KernelFilter()
