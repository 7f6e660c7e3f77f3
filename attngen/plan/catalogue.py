"""The schedules that exist, by the names of their modules. A new one is a module of its family and a row here.

Those of operations beside attention are in their rows of ``attngen.operations``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

from attngen.arch import ARCHES, Arch
from attngen.operations import OPERATIONS, operation_of
from attngen.plan.schedule import Schedule
from attngen.schema.kernel_spec import KernelSpec

#: Modules of ``attngen.families``, each with a ``SCHEDULE``, in the order in which they are asked: the fastest first
#: (docs/performance.md has the figures).
_MODULES = (
    "hopper_forward.eight_bits",
    "hopper_forward.schedule",
    "decode.schedule",
    "wide.schedule",
    "latent.schedule",
    "latent.indexed",
    "mma_forward.schedule",
    "decode.mma",
    "latent.mma_indexed",
    "triton.forward",
    "hopper_backward.blocks",
    "hopper_backward.schedule",
    "hopper_backward.cluster",
    "latent_backward.schedule",
    "latent_backward.indexed",
    "latent_backward.mma_indexed",
    "mma_backward.schedule",
    "triton.backward",
    "triton.jvp",
    *(module for operation in OPERATIONS for module in operation.schedules),
)


@cache
def _rows() -> list[Schedule]:
    """The schedules, imported when they are first asked: families stand above the plan."""
    return [import_module(f"attngen.families.{name}").SCHEDULE for name in _MODULES]


def schedules(direction: str, arch: Arch | None = None, backend: str | None = None) -> tuple[Schedule, ...]:
    """Return the schedules of a direction, the fastest first; those of one arch or backend alone if given."""
    operation_of(direction)  # which refuses an unknown one
    return tuple(
        row
        for row in _rows()
        if row.direction == direction
        and (arch is None or row.supports(arch))
        and (backend is None or row.backend == backend)
    )


def named(name: str) -> Schedule:
    """Return a schedule by its name; KeyError if there is none."""
    for row in _rows():
        if row.name == name:
            return row
    raise KeyError(name)


def backends(arch: Arch | None, direction: str) -> tuple[str, ...]:
    """Backends whose kernels of a direction an arch can run, or any arch if it is None, the fastest first. A spec that
    names none gets the first that supports all it asks for."""
    return tuple(dict.fromkeys(row.backend for row in schedules(direction, arch)))


def candidates(spec: KernelSpec, backend: str) -> tuple[Schedule, ...]:
    """Schedules of a backend that suit a spec and run on its arch, the fastest first."""
    listed = spec.variant.keys is not None
    return tuple(
        row for row in schedules(spec.direction, ARCHES[spec.arch], backend)
        if row.v_of_key == spec.v_of_key and row.listed_keys == listed
        and row.split_kv == spec.split_kv and row.split_tiles >= spec.split_tiles and row.suits(spec)
    )  # fmt: skip


@contextmanager
def with_schedule(schedule: Schedule, *, before: str | None = None) -> Iterator[None]:
    """Register one more schedule for a while, ahead of the one called ``before``, or last."""
    place = len(_rows()) if before is None else _rows().index(named(before))
    _rows().insert(place, schedule)
    try:
        yield
    finally:
        _rows().remove(schedule)
