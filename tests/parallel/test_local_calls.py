"""Rows that lie in several runs of tiles, and read their positions from a tensor: masks and scores as in one call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attngen
from attngen.errors import CallError, SpecError
from tests.parallel.cases import HEADS, KV_HEADS, Case, cases
from tests.parallel.local_calls import LocalCalls
from tests.parallel.ranks import alone, compare, tensors
from tests.sampling import few

SEQLEN, RANKS = 600, 2


@few("case", list(cases()), always=(0, 8), ids=lambda case: case.name, often=range(0, 99, 3))
def test_ranks_compute_as_one(case: Case) -> None:
    case = dataclasses.replace(case, options={})  # the ranks' calls have one layout
    *whole, weight = (x.requires_grad_() for x in tensors(case, SEQLEN))
    values = {**case.fixed(SEQLEN), **case.passed(SEQLEN)}
    out, *_ = alone(case, whole[0], whole[1], whole[2], SEQLEN, values)
    wanted = (out, *torch.autograd.grad(out, whole, weight))
    parts = [x.detach() if x.dim() == 4 else x.detach()[None] for x in (*whole, weight)]
    ours = LocalCalls(case, SEQLEN, RANKS).gradients(parts[:3], parts[3], values, backend="reference")
    for name, one, other in zip(("out", "dq", "dk", "dv"), ours, wanted, strict=True):
        compare(one.reshape(other.shape), other, f"{case.name}: {name}")


def test_ranks_drop_what_one_call_drops() -> None:
    case = Case("dropped", attngen.variant("q >= kv", name="dropped"))
    *whole, weight = (x.requires_grad_() for x in tensors(case, SEQLEN))
    options = {"dropout_p": 0.4, "rng_state": torch.tensor([-(2**61) + 3, 5]), "backend": "reference"}
    dropped = attngen.variant("q >= kv", dropout=True, name="dropped")
    out = attngen.attention(whole[0], whole[1], whole[2], variant=dropped, **options)
    wanted = (out, *torch.autograd.grad(out, whole, weight))
    parts = [x.detach() for x in (*whole, weight)]
    ours = LocalCalls(case, SEQLEN, RANKS, dropout=True).gradients(parts[:3], parts[3], {}, **options)
    for name, one, other in zip(("out", "dq", "dk", "dv"), ours, wanted, strict=True):
        compare(one, other, name)


def test_positions_that_do_not_go_up_by_one_are_refused() -> None:
    calls = LocalCalls(next(case for case in cases() if case.name == "causal"), SEQLEN, RANKS)
    rows = calls.rows(0).int()
    q, k = torch.zeros(1, len(rows), HEADS, 8), torch.zeros(1, SEQLEN, KV_HEADS, 8)
    with attngen.debug():
        attngen.attention(q, k, k, variant=calls.variant, row_position=rows)
        rows[100:] += 1
        with pytest.raises(
            CallError, match=r"grow by one within runs of 128 along axis 0, but it does not at index \[100\]"
        ):
            attngen.attention(q, k, k, variant=calls.variant, row_position=rows)


def test_only_integers_go_up_by_one() -> None:
    tensors = {"at": {"dtype": "float32", "shape": ["seqlen_q"], "monotone": {"axis": 0, "runs": 128}}}
    with pytest.raises(SpecError, match="monotone.runs"):
        attngen.variant("at[q] >= kv", tensors=tensors, name="by_floats")
