"""Process groups as callers name them."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch.distributed as dist

from attngen.errors import CallError


class GroupReference:
    """A process group that plans refer to, and do not keep alive: its threads end where a program destroys it."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = ref(group)

    def __call__(self) -> Any:
        """The group. Raises CallError if it is destroyed."""
        group = self._group()
        if group is None:
            raise CallError("the process group of this plan was destroyed; allowed: a plan for another one")
        return group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupReference) and self._group == other._group

    def __hash__(self) -> int:
        return hash(self._group)


def group_of(group: Any) -> tuple[Any, int, int | None]:
    """The process group, its size, and the rank of this process in it."""
    if isinstance(group, int) and not isinstance(group, bool):
        if group < 1:
            raise CallError(f"a plan needs at least 1 rank, got {group}")
        return None, group, None
    if not dist.is_available() or not dist.is_initialized():
        raise CallError(
            "torch.distributed is not initialized; allowed: torch.distributed.init_process_group() before, or a number "
            "of ranks, to look at a plan"
        )
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            allowed = " or ".join(f"mesh[{name!r}]" for name in names) or "a mesh of one axis"
            raise CallError(f"the mesh has {group.ndim} axes; allowed: {allowed}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise CallError(f"group must be a DeviceMesh, a process group or a number of ranks, got {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise CallError("this process is not in the group")
    return group, dist.get_world_size(group), rank
