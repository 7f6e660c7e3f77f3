"""The limits of ``verify`` in float32: kernels add one product after the other, libraries in parts, which errs less.

The kernels here are models whose sums are rounded at each term, as a chain of multiply-adds rounds them.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.inspect.cases import Case
from attngen.inspect.contract import Tally, deviation
from attngen.inspect.gradient_contract import ExpectedGradients, expected_gradients, gradient_deviation
from attngen.lab.verify.inputs import Inputs
from attngen.lab.verify.trial import prepare_case
from attngen.lang.check import compile_variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.launch.gradients import GradientBuffers

FULL = compile_variant("x", None, None)


def kernel(head_dim: int) -> Any:
    return SimpleNamespace(
        dtype="fp32",
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        v_of_key=False,
        variant=FULL,
        layout="dense",
        scale_block=0,
        transposed_v=False,
        grouped_v=False,
        dtype_of=lambda name: dtype_row("fp32"),
    )


def product(a: Tensor, b: Tensor, *, rough: bool = False) -> Tensor:
    """Return a (m, k) @ b (k, n), one term after the other; ``rough`` rounds what is multiplied to 10 bits, as TF32."""
    a, b = (tf32(t) if rough else t for t in (a, b))
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(a.shape[1]):
        total = (a[:, i, None].double() * b[i].double() + total.double()).float()
    return total


def tf32(t: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)


def forward(call: Call, inputs: Inputs, *, rough: bool = False) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(call.out_shape()), torch.zeros(call.lse_shape())
    for b, h in ((b, h) for b in range(call.batch) for h in range(call.heads)):
        k, v = (t[b, :, h * call.kv_heads // call.heads] for t in (inputs.k, inputs.v))
        s = product(inputs.q[b, :, h], k.T, rough=rough) * call.scale
        top = s.amax(1, keepdim=True)
        p = torch.exp(s - top)
        total = p.sum(1, keepdim=True)
        out[b, :, h] = product(p, v, rough=rough) / total
        lse[b, h] = (top + torch.log(total))[:, 0]
    return out, lse


def backward(call: Call, inputs: Inputs, wanted: ExpectedGradients, *, rough: bool = False) -> GradientBuffers:
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    for b, hk in ((b, hk) for b in range(call.batch) for hk in range(call.kv_heads)):
        heads = slice(hk * call.heads // call.kv_heads, (hk + 1) * call.heads // call.kv_heads)
        rows = q[b, :, heads].transpose(0, 1).flatten(0, 1)  # of all heads of the group
        above, out = (t[b, :, heads].transpose(0, 1).flatten(0, 1) for t in (wanted.dout, wanted.out))
        lse, dlse = (t[b, heads].flatten()[:, None] for t in (wanted.lse, wanted.dlse))
        p = torch.exp(product(rows, k[b, :, hk].T, rough=rough) * call.scale - lse)
        delta = (above * out).sum(1, keepdim=True) - dlse
        ds = p * (product(above, v[b, :, hk].T, rough=rough) - delta) * call.scale
        dq[b, :, heads] = product(ds, k[b, :, hk], rough=rough).unflatten(0, (-1, call.seqlen_q)).transpose(0, 1)
        dk[b, :, hk] = product(ds.T, rows, rough=rough)
        dv[b, :, hk] = product(p.T, above, rough=rough)
    return GradientBuffers(
        q, k, v, wanted.out, wanted.lse, wanted.dout, wanted.dlse, dq=dq, dk=dk, dv=dv, workspaces={}
    )  # fmt: skip


@pytest.mark.exhaustive
def test_logits_that_are_summed_in_order() -> None:
    """A library sums the products of a single query in parts: it may be right to the last digit."""
    case = Case("one query", (1,), (150,), heads=4, kv_heads=2)
    for seed in range(12):
        inputs, call, wanted = prepare_case(kernel(256), case, "cpu", seed)
        wanted = replace(wanted, plain_out=wanted.out.float(), peer_out=None)
        errors = deviation(call, *forward(call, inputs), wanted)
        assert errors.ok, (seed, errors)
        assert not deviation(call, *forward(call, inputs, rough=True), wanted).ok


@pytest.mark.exhaustive
def test_gradients_that_are_summed_in_order() -> None:
    """dK and dV of one KV head are sums over the rows of all heads of its group."""
    inputs, call, _ = prepare_case(kernel(8), Case("long", (600,), (64,), heads=8, kv_heads=1), "cpu", 0)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(0))
    errors = Tally([gradient_deviation(call, backward(call, inputs, wanted), wanted)])
    assert errors.ok, (errors.worst, errors.rmse, errors.rmse_allowed)
    assert not Tally([gradient_deviation(call, backward(call, inputs, wanted, rough=True), wanted)]).ok
