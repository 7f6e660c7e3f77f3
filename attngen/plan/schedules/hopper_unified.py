"""The Hopper forward without warp roles: each warpgroup multiplies and one warp of them loads, too."""

from __future__ import annotations

from attngen.plan.schedule import Schedule
from attngen.plan.schedules.forward_pipes import forward_pipes_of
from attngen.plan.schedules.hopper_forward import alternatives, keep_promises, plan_forward

SCHEDULE = Schedule(
    name="hopper_unified",
    backend="cuda",
    direction="forward",
    template="cuda/forward/unified.cu.j2",
    view="attngen.render.views.hopper_forward:cuda_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: spec.roles is not None and spec.roles.producer == 0,
    plan=lambda spec, arch: plan_forward(spec, arch, "hopper_unified", "unified"),
    alternatives=alternatives,
    keep_promises=keep_promises,
    pipes=forward_pipes_of,
)
