"""Shared memory of the Hopper forward kernels: bytes of a row that a copy loads, and the regions that fit."""

from __future__ import annotations

from dataclasses import replace

from attngen.arch import Arch
from attngen.errors import PlanError
from attngen.families.hopper_forward.pipes import forward_pipes
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.choices import refuse
from attngen.plan.operands import Operands
from attngen.schema.kernel_spec import KernelSpec


def with_memory(
    arch: Arch,
    draft: HopperForward,
    iteration: str,
    tile_m: int,
    tile_n: int,
    stages: int,
    qk: int,
    v: int,
    operands: Operands,
    scale_block: int,
) -> HopperForward:
    """Return the roles with the best use of shared memory that fits: Q twice, then all of O, then parts of O.

    If nothing fits, the last of these, which takes the least; ``fits`` tells.
    """
    box = draft.box_bytes // operands.out.bytes
    parts = [columns for columns in (v // 2, 64, 32) if columns % box == 0 and v % columns == 0]
    choices = ((2, v), (1, v), *((1, columns) for columns in parts))
    if draft.shares:  # a block has one work tile
        choices = ((1, v),)
    elif draft.entries > 1:
        choices = choices[:2]
    elif draft.map_rows:  # the next Q says that both consumers have seen all stages of their own
        choices = choices[1:]
    for q_stages, out_columns in choices:
        roles = replace(draft, q_stages=q_stages, out_columns=out_columns)
        pipes = forward_pipes(
            roles, iteration=iteration, tile_m=tile_m, tile_n=tile_n, stages=stages, qk=qk, v=v, operands=operands,
            scale_block=scale_block,
        )  # fmt: skip
        roles = replace(roles, shared=pipes.regions)
        if fits(roles, arch):
            break
    return roles


def fits(roles: HopperForward, arch: Arch) -> bool:
    """Whether the shared memory of a block is enough, 1 KiB of which the system reserves at its beginning."""
    return roles.shared_bytes <= arch.shared_memory


def memory_refusal(spec: KernelSpec, arch: Arch, roles: HopperForward, stages: int) -> PlanError:
    """Return the error for roles that exceed shared memory, with the bytes of each region."""
    sizes = {region.name: region.bytes for region in roles.shared}
    of_keys = f"K {sizes['k']} + V {sizes['v']}" if "k" in sizes else f"K and V of each consumer {sizes['kv']}"
    return refuse(
        spec,
        "tile",
        f"Shared memory {roles.shared_bytes} B exceeds {arch.shared_memory} B on {arch.name}: Q {sizes['q']} + "
        f"{of_keys} ({stages} stages) + O {sizes.get('out', 0)} + barriers and records",
    )
