"""The common part of plans of kernels that move rows and multiply nothing, such as append."""

from __future__ import annotations

from attngen.dtypes import CHUNK_BYTES
from attngen.plan.draft import named
from attngen.plan.model import Columns, Plan
from attngen.schema.kernel_spec import KernelSpec


def rows_plan(spec: KernelSpec, name: str, schedule: str, *, tile_m: int, tile_n: int, warps: int) -> Plan:
    """Return a plan without its launch, in which softmax, masks and stages are named and mean nothing.

    The launch that does the work, the schedule and the spec's direction have one name.
    """
    return named(
        spec,
        name,
        alignment=CHUNK_BYTES,
        columns_qk=(Columns(0, spec.head_dim_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, spec.head_dim_v, spec.head_dim_v),),
        backend="cuda",
        schedule=schedule,
        loads="pointer",
        q_operand="registers",
        tile_m=tile_m,
        tile_n=tile_n,
        stages=1,
        num_warps=warps,
        max_registers=None,
        iteration="ranges",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=2**20,
        main=schedule,
    )
