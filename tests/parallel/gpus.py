"""Calls by plans as one of several processes with a GPU each, through NCCL, beside the reference on one GPU."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from attngen.parallel import Cost, Plan
from attngen.schema.writing import spec_text
from attngen.variants import PythonVariant
from tests.parallel import programs
from tests.parallel.cases import HEADS, KV_HEADS, SLOW, Case, cases
from tests.parallel.ranks import alone, tensors

HEAD_DIM = 64

FAST = Cost(HEADS, KV_HEADS, HEAD_DIM, gigabytes=1e6)

#: Slow kernels beside links that are not: where calls do not overlap by rows, only forward passes do by heads.
FORWARD = Cost(64, 32, HEAD_DIM, tflops=1e-2, gigabytes=100)

#: Cases by name, with the number of tokens, the method, the chunks of each rank, and what the plan weighs: with slow
#: kernels and links calls overlap by heads.
CALLS = (
    ("causal", 2048, "gather", None, FAST),
    ("causal", 2048, "exchange", 2, SLOW),
    ("causal", 1999, "exchange", 3, FAST),
    ("causal", 2048, "heads", None, FAST),
    ("full", 2048, "gather", 2, SLOW),
    ("window", 2048, "exchange", None, FAST),
    ("window", 2048, "exchange", 2, SLOW),
    ("documents", 2048, "exchange", 4, FAST),
    ("alibi", 1999, "gather", 2, SLOW),
    ("window_sink", 2048, "exchange", 1, FAST),
    ("softcap", 2048, "gather", None, SLOW),
    ("prefix_lm", 2048, "exchange", 2, SLOW),
    ("runs_of_segments", 2048, "gather", 2, FAST),
    ("varlen_causal", 2048, "exchange", 4, FAST),
    ("varlen_causal", 1999, "exchange", 2, SLOW),
    ("varlen_causal", 1999, "exchange", None, FAST),  # each document has tiles of its own
    ("prefix_lm", 2048, "exchange", 2, FORWARD),
    ("varlen_full", 1999, "gather", 2, FAST),
    ("varlen_full", 1999, "gather", 2, FORWARD),
)

#: Allowed error, in errors of plain PyTorch in the same dtype.
_FACTOR = 3.0


def planned(group: Any, ranks: int) -> Iterator[tuple[Case, Plan]]:
    """Each call's case and plan, but for those whose heads the ranks cannot share."""
    known = {case.name: case for case in cases()}
    for name, seqlen, method, chunks, cost in CALLS:
        case = known[name]
        if method == "heads" and KV_HEADS % ranks:
            continue
        yield case, attngen.parallel.plan(
            case.variant, seqlen, group, method=method, chunks=chunks, cu_seqlens=case.cu_seqlens(seqlen),
            cost=cost, **case.fixed(seqlen),
        )  # fmt: skip


def variants(ranks: int) -> dict[str, PythonVariant]:
    """Variants that the ranks call, by name."""
    called = (plan.called() for _, plan in planned(ranks, ranks))
    return {made.name: made for made in called if isinstance(made, PythonVariant)}


def spec(ranks: int, arch: str) -> str:
    """The kernels of all calls, and of those of one GPU that segments call, dense and packed."""
    made = variants(ranks)
    entry = {"arch": arch, "head_dim": HEAD_DIM, "dtype": "bf16", "passes": ["forward", "backward"]}
    plain = ["full", "causal", "sliding_window", "alibi", "sliding_window_sink", "softcap"]
    kernels = [{"variant": list(made), **entry}, {"variant": plain, "layout": ["dense", "varlen"], **entry}]
    return spec_text({name: one.fields for name, one in made.items()}, kernels, package=f"parallel_{ranks}")


def run(rank: int, world: int, meeting: str) -> None:
    """Compare all calls as process ``rank`` of ``world``. Ends the process where one is wrong."""

    def check(device: torch.device) -> None:
        for case, plan in planned(None, world):
            _check(case, plan, device)
        _check_random_plans(device, world)

    _in_group(rank, world, meeting, check)


def run_programs(rank: int, world: int, meeting: str) -> None:
    """Compare plans in programs as process ``rank`` of ``world``. Ends the process where one is wrong."""
    _in_group(rank, world, meeting, lambda device: programs.check(device, rank, world))


def _in_group(rank: int, world: int, meeting: str, check: Callable[[torch.device], None]) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=world, device_id=device)
    try:
        check(device)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # to end the group would wait for the others
    dist.destroy_process_group()


def _check_random_plans(device: torch.device, world: int) -> None:
    """Compare calls by random plans with those of one GPU, in the same kernels: half of 200 by 2 GPUs, half by 4."""
    generator = torch.Generator().manual_seed(11)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for n in range(200):
        seqlen = number(1, 4000)
        variant = ("causal", "full", "sliding_window")[n % 3]
        values = {"window": number(1, 1000)} if variant == "sliding_window" else {}
        offsets = None if n % 2 else sorted({0, seqlen, *(number(0, seqlen) for _ in range(number(0, 9)))})
        method = ("exchange", "exchange", "gather")[number(0, 2)]
        chunks = (None, 1, 2, 3, 5)[number(0, 4)]
        slow = bool(number(0, 1))
        if slow and chunks is None:
            chunks = 2  # slow kernels would have more, of which kernels are not built
        if n // 6 % 2 != (world == 4):
            continue
        cost = SLOW if slow else Cost(HEADS, KV_HEADS, HEAD_DIM, gigabytes=1e3)
        plan = attngen.parallel.plan(
            variant, seqlen, method=method, chunks=chunks, cu_seqlens=offsets, cost=cost, **values
        )
        case = Case("random", variant, documents=() if offsets is None else (1,))
        *leaves, weight = (x.to(device, torch.bfloat16) for x in tensors(case, seqlen, HEAD_DIM))
        whole = [x.requires_grad_() for x in leaves]
        if offsets is None:
            out = attngen.attention(whole[0], whole[1], whole[2], variant=variant, **values)
        else:
            cu = torch.tensor(offsets, dtype=torch.int32, device=device)
            longest = max(b - a for a, b in pairwise(offsets))
            out = attngen.attention_varlen(
                whole[0], whole[1], whole[2], cu, cu, longest, longest, variant=variant, **values
            )
        wanted = (out, *torch.autograd.grad(out, whole, weight))
        axis = 1 if offsets is None else 0
        parts = [plan.shard(x.detach(), axis).requires_grad_() for x in whole]
        ours = plan.attention(parts[0], parts[1], parts[2])
        results = (ours, *torch.autograd.grad(ours, parts, plan.shard(weight, axis)))
        for name, one, other in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
            other = plan.shard(other.detach(), axis).double()
            error = (one.double() - other).abs().max() if one.numel() else torch.zeros(())
            allowed = 0.02 * other.abs().max() + 0.002 if one.numel() else 0.0
            where = f"{variant}, {values}, {seqlen} tokens, {offsets}, {method}, chunks {chunks}"
            assert error <= allowed, f"{where}: {name} is off by {error:.1e}"


def lost(rank: int, meeting: str) -> None:
    """As process ``rank`` of two, the second of which is lost before its second call."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2, device_id=device)
    group = dist.new_group(timeout=timedelta(seconds=25))  # long enough for the first call on a busy host
    plan = attngen.parallel.plan("causal", 2048, group)
    q = torch.zeros(1, plan.tokens(), 2, HEAD_DIM, device=device)
    plan.attention(q, q, q, backend="reference")
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    for _ in range(3):
        plan.attention(q, q, q, backend="reference")
        torch.cuda.synchronize()
    os._exit(0)  # which nothing should reach


def _check(case: Case, plan: Plan, device: torch.device) -> None:
    values = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in {**case.fixed(plan.seqlen), **case.passed(plan.seqlen)}.items()
    }
    passed = {name: value for name, value in values.items() if name in case.passed(plan.seqlen)}
    whole = [x.to(device, torch.bfloat16) for x in tensors(case, plan.seqlen, HEAD_DIM)]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        *leaves, weight = (x.to(dtype) for x in whole)
        leaves = [x.requires_grad_() for x in leaves]
        out, *_ = alone(case, *leaves, plan.seqlen, {**values, "backend": "reference"})
        grads = torch.autograd.grad(out, leaves, weight)
        results.append([x.detach().double() for x in (out, *grads)])
    axis = 0 if case.documents else 1
    parts = [plan.shard(x, axis) for x in whole]
    leaves = [x.detach().requires_grad_() for x in parts[:3]]
    out = plan.attention(*leaves, **passed)
    ours = [out, *torch.autograd.grad(out, leaves, parts[3])]
    for name, one, wanted, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error = (one.double() - plan.shard(wanted, axis)).abs().max()
        allowed = (plain - wanted).abs().max() * _FACTOR + 1e-3  # over all ranks: a rank may have few rows
        if name in ("dk", "dv"):  # a sum of one term of each rank, which is rounded before it travels
            allowed += plan.ranks * torch.finfo(torch.bfloat16).eps / 2 * wanted.abs().max()
        assert error <= allowed, f"{case.name}, {plan.seqlen} tokens: {name} is off by {error:.2e} of {allowed:.2e}"
