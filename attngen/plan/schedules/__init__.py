"""The schedules that exist, one module for each. A new one is a module of its own and a row here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attngen.arch import ARCHES, Arch
from attngen.plan.schedule import Schedule
from attngen.plan.schedules import (
    append,
    hopper_backward,
    hopper_cluster,
    hopper_decode,
    hopper_forward,
    hopper_fp8,
    hopper_indexed,
    hopper_mla,
    hopper_wide,
    index_scores,
    indexed_backward,
    mla_backward,
    mma_backward,
    mma_decode,
    mma_forward,
    mma_indexed,
    mma_indexed_backward,
    quantize,
    quantize_tiles,
    topk,
    triton_backward,
    triton_forward,
    widen,
)
from attngen.schema.kernel_spec import KernelSpec

#: In the order in which they are asked: the fastest first (docs/performance.md has the figures).
_ROWS: list[Schedule] = [
    hopper_fp8.SCHEDULE,
    hopper_forward.SCHEDULE,
    hopper_decode.SCHEDULE,
    hopper_wide.SCHEDULE,
    hopper_mla.SCHEDULE,
    hopper_indexed.SCHEDULE,
    mma_forward.SCHEDULE,
    mma_decode.SCHEDULE,
    mma_indexed.SCHEDULE,
    triton_forward.SCHEDULE,
    hopper_backward.SCHEDULE,
    hopper_cluster.SCHEDULE,
    mla_backward.SCHEDULE,
    indexed_backward.SCHEDULE,
    mma_indexed_backward.SCHEDULE,
    mma_backward.SCHEDULE,
    triton_backward.SCHEDULE,
    append.SCHEDULE,
    quantize.SCHEDULE,
    quantize_tiles.SCHEDULE,
    widen.SCHEDULE,
    index_scores.SCHEDULE,
    topk.SCHEDULE,
]


def schedules(direction: str, arch: Arch | None = None, backend: str | None = None) -> tuple[Schedule, ...]:
    """Return the schedules of a direction, the fastest first; those of one arch or backend alone if given."""
    return tuple(
        row
        for row in _ROWS
        if row.direction == direction
        and (arch is None or row.supports(arch))
        and (backend is None or row.backend == backend)
    )


def named(name: str) -> Schedule:
    """Return a schedule by its name; KeyError if there is none."""
    for row in _ROWS:
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
    place = len(_ROWS) if before is None else _ROWS.index(named(before))
    _ROWS.insert(place, schedule)
    try:
        yield
    finally:
        _ROWS.remove(schedule)
