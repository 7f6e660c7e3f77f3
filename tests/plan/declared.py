"""The pipes that a schedule declares, for a model of its barriers: with the depths of a case, and fewer warps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from attngen.families.hopper_backward.cluster_pipes import cluster_pipes
from attngen.families.hopper_backward.pipes import backward_pipes
from attngen.families.hopper_forward.pipes import forward_pipes
from attngen.plan import Plan
from attngen.plan.pipes import Pipes
from tests.plan.specs import planned


@cache
def forward(
    consumers: int, q_stages: int, stages: int, warps: int, *, pingpong: bool, skips: bool,
    value_loader: bool = False, shares: bool = False, bias_stages: int = 0,
) -> Pipes:  # fmt: skip
    """Return the pipes of a forward by ranges of tiles; ``shares``: of a block that shares its keys with others."""
    kernel = _plan("forward", 128)
    assert kernel.structure is not None
    roles = replace(
        kernel.structure, consumers=consumers, q_stages=q_stages, pingpong=pingpong, skips=skips,
        persistent=not shares, value_loader=value_loader,
        staged=not shares, sharing=8 if shares else 1, biases=int(bias_stages > 0), bias_stages=bias_stages,
    )  # fmt: skip
    m, n = kernel.tile_m, kernel.tile_n
    return forward_pipes(
        roles,
        iteration="ranges",
        tile_m=m,
        tile_n=n,
        stages=stages,
        qk=128,
        v=128,
        operands=kernel.operands,
        warps=warps,
    )


@cache
def backward(
    q_stages: int, stages: int, warps: int, overlap: str, bias_stages: int = 0, *, reads_ds: bool = False
) -> Pipes:
    """Return the pipes of a backward by single blocks; ``reads_ds``: a warp adds up tiles of dS."""
    kernel = _plan("backward", 128)
    assert kernel.structure is not None
    biases = int(bias_stages > 0)
    roles = replace(
        kernel.structure, q_stages=q_stages, overlap=overlap, biases=biases, bias_stages=bias_stages, reads_ds=reads_ds
    )
    return backward_pipes(
        roles, tile_m=kernel.tile_m, stages=stages, qk=128, v=128, operands=kernel.operands, warps=warps
    )


@cache
def cluster(q_stages: int, stages: int, warps: int, *, ordered: bool, reads_ds: bool = False) -> Pipes:
    """Return the pipes of a block of a cluster that has a twin; ``reads_ds``: a warp adds up tiles of dS."""
    kernel = _plan("backward", 256)
    assert kernel.structure is not None
    roles = replace(kernel.structure, q_stages=q_stages, ordered=ordered, reads_ds=reads_ds, cluster=4, column_blocks=2)
    return cluster_pipes(
        roles, tile_m=kernel.tile_m, stages=stages, qk=256, v=256, operands=kernel.operands, warps=warps
    )


@cache
def _plan(direction: str, head_dim: int) -> Plan:
    if direction == "forward":
        return planned(head_dim=head_dim, backend="cuda")
    return planned(head_dim=head_dim, passes="backward", backward="{backend: cuda}")
