"""The Hopper forward without warp roles: each warpgroup multiplies and one warp of them loads, too."""

from __future__ import annotations

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.plan.choices import refuse
from attngen.plan.model import Role
from attngen.plan.schedule import Schedule
from attngen.plan.schedules.forward_pipes import alike, forward_pipes_of
from attngen.plan.schedules.forward_registers import check_registers
from attngen.plan.schedules.forward_tiles import Form, alternatives
from attngen.plan.schedules.hopper_forward import PROBABILITIES, TABLE, keep_promises, plan_forward
from attngen.schema.expand import KernelSpec, Roles

#: Of a thread, which an instruction can name.
_MOST_REGISTERS = 255


def _check(spec: KernelSpec, roles: Roles, iteration: str) -> None:
    """Refuse what needs a producer."""
    none = "without a producer (warps: {producer: 0})"
    if iteration != "ranges":
        raise refuse(
            spec,
            "warps",
            f"{none} tiles must be ranges that the mask's bounds give, not {iteration}; allowed: producer 1",
        )
    if roles.schedule == "pingpong":
        raise refuse(spec, "warps", f"{none} warpgroups have no ping-pong; allowed: cooperative")
    if roles.producer_registers or roles.consumer_registers:
        raise refuse(spec, "warps", f"{none} all threads have the same registers; leave them out")
    if spec.persistent:
        raise refuse(spec, "persistent", f"{none} a block has one tile of work; allowed: false")
    if spec.pack_gqa:
        raise refuse(spec, "pack_gqa", f"{none} each query head has tiles of its own; allowed: false")


def _warp_roles(
    spec: KernelSpec, roles: Roles, consumers: int, tile_n: int, width_v: int, default: tuple[int, int] | None
) -> tuple[Role, ...]:
    """Return the one role: all threads have the same registers."""
    even = min(65536 // (128 * consumers) // 8 * 8, _MOST_REGISTERS)
    check_registers(spec, even, tile_n, width_v)
    return alike(consumers, even)


FORM = Form(
    schedule="hopper_unified",
    label="unified",
    specialized=False,
    check=_check,
    warp_roles=_warp_roles,
    products=lambda roles, qk, pv: 2 * qk + 2 * pv,  # the first tile and the loop; the loop and after it
    numbers=PROBABILITIES,
    table=TABLE,
    capped_columns=64,
)

SCHEDULE = Schedule(
    name="hopper_unified",
    backend="cuda",
    direction="forward",
    template="cuda/forward/unified.cu.j2",
    view="attngen.render.views.hopper_unified:unified_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: spec.dtype not in QUANTIZED_DTYPES and spec.roles is not None and spec.roles.producer == 0,
    plan=lambda spec, arch: plan_forward(spec, arch, FORM),
    alternatives=alternatives,
    keep_promises=keep_promises,
    pipes=forward_pipes_of,
    explanation="attngen.tools.explain.hopper_forward:explain",
)
