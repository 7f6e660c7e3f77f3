"""torch's context_parallel beside ``sdpa``, as one of several processes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from attngen.errors import CallError
from attngen.integrations import sdpa


def run(rank: int, world: int, meeting: str) -> None:
    """Attend to shards inside both blocks, and compare with the whole. Raises AssertionError."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        before = F.scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.MATH):  # which has strategies for tensors on the CPU
            _sdpa_outside(mesh)
            _sdpa_inside(mesh)
            _ends_that_cross(mesh)
        assert F.scaled_dot_product_attention is before
    finally:
        dist.destroy_process_group()


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 16, 8) for _ in range(3)]


def _check(actual: torch.Tensor, mesh: Any) -> None:
    """Compare the rows of this process with those of the whole, in the order in which context_parallel deals them."""
    q, k, v = _inputs()
    wanted = F.scaled_dot_product_attention(q, k, v)
    with context_parallel(mesh, buffers=[wanted], buffer_seq_dims=[2]):
        torch.testing.assert_close(actual, wanted)


def _sdpa_outside(mesh: Any) -> None:
    q, k, v = _inputs()
    with sdpa(backend="reference") as routed:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            out = F.scaled_dot_product_attention(q, k, v)
        assert dict(routed.reasons) == {"there is a DTensor among the tensors": 1}
        q, k, v = _inputs()
        F.scaled_dot_product_attention(q, k, v)
        assert routed.routed == 1
    _check(out, mesh)


def _sdpa_inside(mesh: Any) -> None:
    q, k, v = _inputs()
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        with pytest.raises(CallError, match="inside torch's context_parallel would route nothing"):
            sdpa(backend="reference").__enter__()
        out = F.scaled_dot_product_attention(q, k, v)
    _check(out, mesh)


def _ends_that_cross(mesh: Any) -> None:
    q, k, v = _inputs()
    outer, inner = sdpa(backend="reference"), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
    outer.__enter__()
    with inner:
        outer.__exit__()
        out = F.scaled_dot_product_attention(q, k, v)
    _check(out, mesh)
