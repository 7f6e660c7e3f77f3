"""Rows that lie in several runs of tiles, and read their positions from a tensor: masks and scores as in one call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attngen
from attngen.errors import CallError, SpecError
from attngen.lang.check import with_dropout
from attngen.parallel import Cost
from attngen.parallel.called import called
from attngen.parallel.local import local_variant
from tests.parallel.cases import HEADS, KV_HEADS, Case, cases
from tests.parallel.local_calls import by_tiles, call, gradients, variant_of
from tests.parallel.ranks import alone, compare, tensors

SEQLEN, TILE, RANKS = 600, 128, 2


def plan_of(case: Case) -> attngen.parallel.Plan:
    plan = attngen.parallel.plan(
        case.variant, SEQLEN, RANKS, tile=TILE, method="gather", chunks=2, cu_seqlens=case.cu_seqlens(SEQLEN),
        cost=Cost(HEADS, KV_HEADS), **case.fixed(SEQLEN),
    )  # fmt: skip
    return by_tiles(plan)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_ranks_compute_as_one(case: Case) -> None:
    plan = plan_of(case)
    case = dataclasses.replace(case, options={})  # the ranks' calls have one layout
    *whole, weight = (x.requires_grad_() for x in tensors(case, SEQLEN))
    values = {**case.fixed(SEQLEN), **case.passed(SEQLEN)}
    out, _ = alone(case, whole[0], whole[1], whole[2], SEQLEN, values)
    wanted = (out, *torch.autograd.grad(out, whole, weight))
    parts = [x.detach() if x.dim() == 4 else x.detach()[None] for x in (*whole, weight)]
    ours = gradients(plan, parts[:3], parts[3], case.passed(SEQLEN), backend="reference")
    for name, one, other in zip(("out", "dq", "dk", "dv"), ours, wanted, strict=True):
        compare(one.reshape(other.shape), other, f"{case.name}: {name}")


def test_ranks_drop_what_one_call_drops() -> None:
    case = Case("dropped", attngen.variant("q >= kv", name="dropped"))
    dropped = attngen.variant("q >= kv", dropout=True, name="dropped")
    layer = plan_of(case).layers[0]
    variant = called(local_variant(with_dropout(layer.variant), "tiles", "all").variant)
    *whole, weight = (x.requires_grad_() for x in tensors(case, SEQLEN))
    options = {"dropout_p": 0.4, "rng_state": torch.tensor([-(2**61) + 3, 5]), "backend": "reference"}
    out = attngen.attention(*whole, variant=dropped, **options)
    wanted = torch.autograd.grad(out, whole, weight)
    totals = [torch.zeros_like(x) for x in whole]
    for rank in range(RANKS):
        rows = plan_of(case).rows(rank)
        leaves = [x.detach().clone().requires_grad_() for x in (whole[0][:, rows], whole[1], whole[2])]
        ours = attngen.attention(*leaves, variant=variant, row_position=rows.int(), **options)
        compare(ours, out[:, rows], "out")
        dq, dk, dv = torch.autograd.grad(ours, leaves, weight[:, rows])
        totals[0][:, rows] = dq
        totals[1] += dk
        totals[2] += dv
    for total, other in zip(totals, wanted, strict=True):
        compare(total, other, "gradients")


def test_positions_that_do_not_go_up_by_one_are_refused() -> None:
    plan = plan_of(next(case for case in cases() if case.name == "causal"))
    q = torch.zeros(1, plan.tokens(0), HEADS, 8)
    k = torch.zeros(1, SEQLEN, KV_HEADS, 8)
    with attngen.debug():
        call(plan, 0, q, k, k, {})
        rows = plan.rows(0).int()
        rows[100:] += 1
        with pytest.raises(CallError, match="grow by one within runs of 128 along axis 0, but it does not at index"):
            attngen.attention(q, k, k, variant=variant_of(plan), row_position=rows)


def test_only_integers_go_up_by_one() -> None:
    tensors = {"at": {"dtype": "float32", "shape": ["seqlen_q"], "monotone": {"axis": 0, "runs": 128}}}
    with pytest.raises(SpecError, match="monotone.runs"):
        attngen.variant("at[q] >= kv", tensors=tensors, name="by_floats")
