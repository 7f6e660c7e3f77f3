"""Weights that are sigmoids: the reference against the formula, its gradients, and what has no log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lang.check import compile_variant

SIGMOID = attngen.variant("q_pos >= kv", "s - log(seqlen_k)", name="causal_sigmoid", weights="sigmoid")


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = ((2, 7, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6))
    q, k, v = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula of Ramapuram et al., arXiv 2409.04431, with a bias of -log(keys)."""
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / math.sqrt(8) - math.log(5)
    hidden = torch.arange(5) > torch.arange(7)[:, None] - 2
    weights = torch.sigmoid(logits).masked_fill(hidden, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, dim=2))


def test_each_weight_is_the_sigmoid_of_its_logit() -> None:
    """Two queries see no key: they give 0."""
    q, k, v = inputs()
    out = attngen.attention(q, k, v, variant=SIGMOID)
    wanted = by_hand(q, k, v)
    torch.testing.assert_close(out, wanted)
    assert not out[:, :2].any()
    dout = torch.randn_like(out)
    actual, exact = (torch.autograd.grad(each, (q, k, v), dout) for each in (out, wanted))
    torch.testing.assert_close(actual, exact)


def test_gradients_by_the_formula_of_kernels() -> None:
    """dS = P (1 - P) dP needs no sum of a row."""
    q, k, v = inputs()
    dout = torch.randn(2, 7, 4, 6, dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(attngen.attention(q, k, v, variant=SIGMOID), (q, k, v), dout)
    keys, values = (t.repeat_interleave(2, dim=2) for t in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(8) - math.log(5)
    p = torch.sigmoid(logits).masked_fill(torch.arange(5) > torch.arange(7)[:, None] - 2, 0.0)
    ds = p * (1 - p) * torch.einsum("bqhd,bkhd->bhqk", dout, values) / math.sqrt(8)
    torch.testing.assert_close(dq, torch.einsum("bhqk,bkhd->bqhd", ds, keys))
    torch.testing.assert_close(dk, torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (2, 2)).sum(3))
    torch.testing.assert_close(dv, torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (2, 2)).sum(3))


def test_there_is_no_log_sum_exp() -> None:
    q, k, v = (t.detach() for t in inputs())
    compiled = torch.compile(attngen.attention, backend="eager")
    for attend, kind in ((attngen.attention, CallError), (compiled, torch._dynamo.exc.InternalTorchDynamoError)):
        torch.testing.assert_close(attend(q, k, v, variant=SIGMOID), by_hand(q, k, v))
        with pytest.raises(kind, match="causal_sigmoid has weights: sigmoid, which have no log-sum-exp"):
            attend(q, k, v, variant=SIGMOID, return_lse=True)


@pytest.mark.exhaustive
def test_transforms_and_compiled_gradients() -> None:
    q, k, v = (t.detach() for t in inputs())

    def total(*given: Tensor) -> Tensor:
        return attngen.attention(*given, variant=SIGMOID).sin().sum()

    exact = torch.func.grad(lambda *given: by_hand(*given).sin().sum(), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1, 2))(q, k, v), exact)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.compile(total, backend="aot_eager")(*leaves).backward()
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), exact)


def test_comparison_and_scores() -> None:
    q, k, v = (t.detach() for t in inputs(torch.float32))
    compared = attngen.debug.compare(q, k, v, variant=SIGMOID, gradients=True)
    assert compared.ok, str(compared)
    scores = attngen.debug.scores(q, k, v, variant=SIGMOID)
    torch.testing.assert_close(scores.probabilities.sum(), torch.sigmoid(scores.logits).sum())


def test_a_shift_of_logits_is_no_shift_of_weights() -> None:
    """So keys are not taken relative to their mean on the way to 8 bits."""
    from attngen.lang.shifts import shifts_with_logits

    assert shifts_with_logits(compile_variant("v"))
    assert not shifts_with_logits(compile_variant("v", weights="sigmoid"))


def test_parallel_refuses_what_has_no_log_sum_exp() -> None:
    from attngen import parallel

    with pytest.raises(CallError, match="merges the results of ranks by their log-sum-exp, does not serve 'weights'"):
        parallel.plan(SIGMOID, 512, 2)
