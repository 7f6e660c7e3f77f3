"""The Hopper backward of wide head dims: clusters of two blocks, in which warpgroups have roles."""

from __future__ import annotations

from attngen.plan.schedule import Schedule
from attngen.plan.schedules.backward_families import is_wide
from attngen.plan.schedules.cluster_pipes import cluster_pipes_of
from attngen.plan.schedules.hopper_backward import alternatives, plan_backward

SCHEDULE = Schedule(
    name="hopper_cluster",
    backend="cuda",
    direction="backward",
    template="cuda/cluster/kernel.cu.j2",
    view="attngen.render.views.hopper_backward:cuda_backward_view",
    supports=lambda arch: arch.wgmma,
    suits=is_wide,
    plan=lambda spec, arch: plan_backward(spec, arch, "hopper_cluster", "cluster"),
    alternatives=alternatives,
    pipes=cluster_pipes_of,
    explanation="attngen.inspect.hopper_backward:ClusterExplanation",
)
