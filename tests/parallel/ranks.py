"""Calls by plans, as one of several processes on the CPU, beside the same calls of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from tests.parallel.cases import BATCH, HEAD_DIM, HEADS, KV_HEADS, Case, cases

#: Numbers of tokens: one that all ranks share evenly, and one that leaves a ragged tile.
EVEN, RAGGED = 192, 203

TILE = 16


def run(rank: int, world: int, meeting: str, part: str) -> None:
    """Make the checks of a ``part`` as process ``rank`` of ``world``. Raises AssertionError."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        for n, case in enumerate(cases()):
            lengths = (EVEN, RAGGED) if part == "all" else ((EVEN, RAGGED)[n % 2],)
            methods = ("gather", "exchange") if part == "all" else (("gather", "exchange")[(n + n // 2) % 2],)
            for seqlen in lengths:
                for method in methods:
                    check(case, seqlen, method, None if part == "all" else (None, 1, 3)[n % 3])
    finally:
        dist.destroy_process_group()


def tensors(case: Case, seqlen: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole, in the shapes of the case."""
    generator = torch.Generator().manual_seed(seqlen)
    batch = () if case.documents else (BATCH,)
    made = [
        torch.randn(*batch, seqlen, heads, HEAD_DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [t.transpose(1, 2).contiguous() for t in made] if case.options.get("layout") == "bhsd" else made


def alone(case: Case, q: Tensor, k: Tensor, v: Tensor, seqlen: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The call of one process."""
    offsets = case.cu_seqlens(seqlen)
    options = {**case.options, **values, "variant": case.variant, "return_lse": True}
    if offsets is None:
        return attngen.attention(q, k, v, **options)
    cu, longest = torch.tensor(offsets, dtype=torch.int32), max(b - a for a, b in zip(offsets, offsets[1:]))
    return attngen.attention_varlen(q, k, v, cu, cu, longest, longest, **options)


def check(case: Case, seqlen: int, method: str, chunks: int | None) -> None:
    """Compare output, log-sum-exp and gradients of a plan's call with those of one process."""
    where = f"{case.name}, {seqlen} tokens, {method}, chunks {chunks}"
    fixed, passed = case.fixed(seqlen), case.passed(seqlen)
    plan = attngen.parallel.plan(
        case.variant, seqlen, tile=TILE, method=method, chunks=chunks, cu_seqlens=case.cu_seqlens(seqlen), **fixed
    )
    whole = [x.requires_grad_() for x in tensors(case, seqlen)[:3]]
    weight = tensors(case, seqlen)[3]
    graded = {name: passed[name].clone().requires_grad_() for name in case.graded}
    out, lse = alone(case, *whole, seqlen, {**fixed, **passed, **graded})
    wanted = torch.autograd.grad((out * weight).sum() + lse.clamp(min=-9).sum(), [*whole, *graded.values()])
    rows = plan.rows()
    axis = 0 if case.documents else 2 if case.options.get("layout") == "bhsd" else 1
    parts = [plan.shard(x.detach(), axis).requires_grad_() for x in whole]
    own = {name: passed[name].clone().requires_grad_() for name in case.graded}
    found, found_lse = plan.attention(*parts, return_lse=True, **case.options, **{**passed, **own})
    compare(found, plan.shard(out, axis), where)
    compare(found_lse, lse.index_select(-1, rows), f"{where}: lse")
    loss = (found * plan.shard(weight, axis)).sum() + found_lse.clamp(min=-9).sum()
    ours = torch.autograd.grad(loss, [*parts, *own.values()])
    for name, one, other in zip("qkv", ours, wanted, strict=False):
        compare(one, plan.shard(other, axis), f"{where}: d{name}")
    for name, one, other in zip(own, ours[3:], wanted[3:], strict=True):
        total = one.clone()
        dist.all_reduce(total)
        compare(total, other, f"{where}: d{name}")


def compare(found: Tensor, wanted: Tensor, where: str) -> None:
    """Raise AssertionError unless two results in float32 agree."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5, msg=lambda text: f"{where}: {text}")


def spawn(world: int, part: str, folder: str) -> Sequence[Any]:
    """Run all processes of a group."""
    import torch.multiprocessing as processes

    return processes.start_processes(run, (world, f"{folder}/meeting", part), nprocs=world, start_method="fork")
