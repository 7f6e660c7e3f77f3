"""Shared memory of the Hopper forward kernels: bytes of a row that a copy loads, and the regions that fit."""

from __future__ import annotations

from dataclasses import replace

from attngen.arch import Arch
from attngen.dtypes import SWIZZLE_BYTES, DType
from attngen.errors import PlanError
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Columns
from attngen.plan.operands import Operands
from attngen.plan.schedules.forward_pipes import forward_pipes
from attngen.plan.schedules.structures import HopperForward
from attngen.schema.kernel_spec import KernelSpec

#: Bytes of a row that one copy may load, swizzled: the most that divide the rows of all operands. Rows are padded to
#: a multiple of the fewest.
BOX_BYTES = (SWIZZLE_BYTES, 64)

#: Bytes of a row of V where a kernel transposes it, so that no copy loads it.
TRANSPOSED_BYTES = (*BOX_BYTES, 32)


def widths(head_dim: int, element: DType, parts: int = 1) -> Columns:
    """Return the columns that a head dim takes in shared memory: whole copies, of each of its ``parts``."""
    columns = parts * BOX_BYTES[-1] // element.bytes
    return Columns(0, -(-head_dim // columns) * columns, head_dim)


def is_paged(spec: KernelSpec) -> bool:
    return LAYOUTS[spec.layout].key_access == "paged"


def operand_widths(spec: KernelSpec, operands: Operands) -> tuple[Columns, Columns]:
    """Return the columns of q and k, and those of v. A copy of a page may bring a single row, of 128 bytes then: it
    begins at a multiple of these in shared memory."""
    parts = BOX_BYTES[0] // BOX_BYTES[-1] if is_paged(spec) else 1
    return widths(spec.head_dim_qk, operands.q, parts), widths(spec.head_dim_v, operands.v, parts)


def widest_box(*row_bytes: int, among: tuple[int, ...] = BOX_BYTES) -> int:
    """Return the bytes of a row of one copy: the most of which each of ``row_bytes`` is a whole number."""
    return next(box for box in among if all(size % box == 0 for size in row_bytes))


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
    return refuse(
        spec,
        "tile",
        f"Shared memory {roles.shared_bytes} B exceeds {arch.shared_memory} B on {arch.name}: Q {sizes['q']} + "
        f"K {sizes['k']} + V {sizes['v']} ({stages} stages) + O {sizes.get('out', 0)} + barriers and records",
    )
