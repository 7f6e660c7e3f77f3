"""The schedules that exist: one row each, with what it can do. A new schedule is a new row and a new template."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.arch import Arch
from attngen.dtypes import HEAD_DIMS


@dataclass(frozen=True, slots=True)
class Schedule:
    """One kernel structure. ``label`` goes into kernel names, ``template`` is its file below ``templates/``."""

    name: str
    label: str
    backend: str
    direction: str
    loads: str
    template: str
    head_dims: tuple[int, ...]
    needs_descriptors: bool
    needs_wgmma: bool = False

    def supports(self, arch: Arch) -> bool:
        """Whether the arch has what the schedule is made of."""
        return (arch.descriptors or not self.needs_descriptors) and (arch.wgmma or not self.needs_wgmma)


#: The fastest first: docs/performance.md has the figures.
SCHEDULES: tuple[Schedule, ...] = (
    Schedule(
        name="cuda_forward_wgmma",
        label="wgmma",
        backend="cuda",
        direction="forward",
        loads="descriptor",
        template="cuda/forward.cu.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=True,
        needs_wgmma=True,
    ),
    Schedule(
        name="cuda_forward_unified",
        label="unified",
        backend="cuda",
        direction="forward",
        loads="descriptor",
        template="cuda/forward_unified.cu.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=True,
        needs_wgmma=True,
    ),
    Schedule(
        name="triton_forward_descriptor",
        label="tma",
        backend="triton",
        direction="forward",
        loads="descriptor",
        template="triton/forward.py.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=True,
    ),
    Schedule(
        name="triton_forward_pointer",
        label="ptr",
        backend="triton",
        direction="forward",
        loads="pointer",
        template="triton/forward.py.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=False,
    ),
    Schedule(
        name="cuda_backward_wgmma",
        label="wgmma",
        backend="cuda",
        direction="backward",
        loads="descriptor",
        template="cuda/backward.cu.j2",
        head_dims=tuple(dim for dim in HEAD_DIMS if dim <= 128),
        needs_descriptors=True,
        needs_wgmma=True,
    ),
    Schedule(
        name="cuda_backward_cluster",
        label="cluster",
        backend="cuda",
        direction="backward",
        loads="descriptor",
        template="cuda/backward_cluster.cu.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=True,
        needs_wgmma=True,
    ),
    Schedule(
        name="triton_backward_descriptor",
        label="tma",
        backend="triton",
        direction="backward",
        loads="descriptor",
        template="triton/backward.py.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=True,
    ),
    Schedule(
        name="triton_backward_pointer",
        label="ptr",
        backend="triton",
        direction="backward",
        loads="pointer",
        template="triton/backward.py.j2",
        head_dims=HEAD_DIMS,
        needs_descriptors=False,
    ),
)


def backends(arch: Arch, direction: str) -> tuple[str, ...]:
    """Return the backends of the forwards or backwards that an arch can run, the fastest first: a spec that names none
    gets the first of them that can do all that it asks for."""
    return tuple(dict.fromkeys(row.backend for row in SCHEDULES if row.direction == direction and row.supports(arch)))
