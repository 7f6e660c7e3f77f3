"""What plans have in common of kernels that move rows and multiply nothing: append, quantize, widen."""

from __future__ import annotations

from attngen.dtypes import CHUNK_BYTES
from attngen.plan.model import Columns, Plan
from attngen.plan.operands import operands_of
from attngen.schema.expand import KernelSpec


def rows_plan(spec: KernelSpec, name: str, schedule: str, *, tile_m: int, tile_n: int, warps: int) -> Plan:
    """Return a plan without its launch, in which softmax, masks and stages are named and mean nothing.

    The launch that does the work, the schedule and the spec's direction have one name.
    """
    return Plan(
        name=name,
        package=spec.package,
        spec_file=spec.spec_file,
        variant=spec.variant,
        arch_name=spec.arch,
        dtype_name=spec.dtype,
        operands=operands_of(spec),
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        columns_qk=(Columns(0, spec.head_dim_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, spec.head_dim_v, spec.head_dim_v),),
        layout=spec.layout,
        direction=spec.direction,
        backend="cuda",
        schedule=schedule,
        loads="pointer",
        q_operand="registers",
        alignment=CHUNK_BYTES,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=1,
        num_warps=warps,
        max_registers=None,
        driver="ranges",
        mask_code="branch",
        softmax="exact_max",
        fast_math=spec.fast_math,
        section_bytes=2**20,
        allow=spec.allow,
        main=schedule,
    )
