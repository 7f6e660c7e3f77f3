"""The Hopper backward of wide head dims: clusters of two blocks, in which warpgroups have roles."""

from __future__ import annotations

from attngen.families.hopper_backward.cluster_pipes import cluster_pipes_of
from attngen.families.hopper_backward.kinds import is_wide
from attngen.families.hopper_backward.schedule import SERVES, alternatives, measured_row, plan_backward, tunable
from attngen.plan.schedule import Schedule

SCHEDULE = Schedule(
    name="hopper_cluster",
    backend="cuda",
    direction="backward",
    template="cuda/hopper_backward/cluster/kernel.cu.j2",
    view="attngen.families.hopper_backward.view:cuda_backward_view",
    supports=lambda arch: arch.wgmma,
    suits=is_wide,
    plan=lambda spec, arch: plan_backward(spec, arch, "hopper_cluster", "cluster"),
    alternatives=alternatives,
    tunable=tunable,
    measured_row=measured_row,
    pipes=cluster_pipes_of,
    explanation="attngen.families.hopper_backward.explain:ClusterExplanation",
    serves=SERVES,
)
