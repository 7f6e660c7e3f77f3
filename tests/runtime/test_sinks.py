"""Sinks: the reference against a logit appended by hand, and gradients of kernels' row sums against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.lang.check import compile_variant
from attngen.lang.variant import Tensor as Declared
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, Packing
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import reference
from attngen.runtime.reference.sinks import add_gradients, learned, without_keys
from attngen.schema import preset
from tests.sampling import few

CAUSAL = preset("causal_sink")
#: Of every kind of index: the head, another number of heads, the sequence, and none; one element read twice.
MIXED = compile_variant(
    "mixed", "q_pos >= kv", "2 * tanh(s)",
    tensors=[
        Declared("gain", "fp32", (), grad=True), Declared("table", "fp32", ("b", "hk"), grad=True),
        Declared("bias", "fp32", (3,), grad=True), Declared("fixed", "fp32", ("h",)),
    ],
    sink="tanh(table[b, hk]) * gain + bias[h % 3] ** 2 + fixed[h] + (bias[h - 2] if h > 2 else bias[0])",
)  # fmt: skip


def own(variant: Variant, batch: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    extents = {"b": batch, "h": heads, "hk": kv_heads}
    shapes = {t.name: tuple(extents.get(str(e), e) for e in t.shape) for t in variant.tensors}
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def bound(variant: Variant, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, **arguments: Any) -> Call:
    return bind(
        variant, q, k, v, packing, softmax_scale=None, seqused_k=None, return_lse=True, layout="bshd",
        arguments=arguments,
    )  # fmt: skip


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = ((2, 7, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6))
    q, k, v = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("size", [0.0, 3.0, 1e4, -1e4, -math.inf])
def test_a_sink_is_a_key_with_a_logit_of_its_own_and_a_value_of_zero(size: float) -> None:
    """Two queries see no key: theirs is the sink alone."""
    q, k, v = (t.detach() for t in inputs())
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64) + size
    out, lse = attngen.attention(q, k, v, variant=CAUSAL, sinks=sinks, return_lse=True)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) / math.sqrt(8)
    hidden = torch.arange(5) > torch.arange(7)[:, None] - 2
    logits = torch.cat([logits.masked_fill(hidden, -math.inf), sinks[None, :, None, None].expand(2, 4, 7, 1)], dim=-1)
    p = torch.softmax(logits, dim=-1).nan_to_num(nan=0.0)[..., :5]
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, dim=2)))
    torch.testing.assert_close(lse, torch.logsumexp(logits, dim=-1))
    assert not out[:, :2].any()


@few("packed", [False, True])
@pytest.mark.parametrize("variant", [CAUSAL, MIXED], ids=lambda v: v.name)
def test_gradients_of_the_reference(variant: Variant, packed: bool) -> None:
    torch.manual_seed(5)
    shapes = [(5, 4, 3), (6, 2, 3), (6, 2, 2)] if packed else [(2, 4, 4, 3), (2, 3, 2, 3), (2, 3, 2, 2)]
    q, k, v = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    cu_q, cu_k = (torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 2, 2, 5], [0, 0, 4, 6]))
    packing = Packing(cu_q, cu_k, 3, 4) if packed else None
    tensors = own(variant, 3 if packed else 2, 4, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        return reference(bound(variant, q, k, v, packing, **dict(zip(tensors, values, strict=True))), q, k, v)

    assert torch.autograd.gradcheck(attend, (q, k, v, *tensors.values()), fast_mode=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", [CAUSAL, MIXED], ids=lambda v: v.name)
def test_row_sums_give_the_gradients_of_sinks(variant: Variant, packed: bool) -> None:
    """Gradients from each row's log-sum-exp and D alone, with garbage in rows of no sequence."""
    q, k, v = inputs()
    packing = None
    if packed:
        q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v))
        offsets = ([0, 3, 3, 11], [0, 0, 4, 9])
        packing = Packing(*(torch.tensor(o, dtype=torch.int32) for o in offsets), 8, 5)
    batch = 3 if packed else 2
    tensors = own(variant, batch, 4, 2)
    call = bound(variant, q, k, v, packing, **tensors)
    out, lse = reference(call, q, k, v)
    alive = torch.isfinite(lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    names = learned(variant)
    wanted = torch.autograd.grad(
        (out, torch.where(alive, lse, 0.0)), [tensors[n] for n in names], (dout, torch.where(alive, dlse, 0.0)),
    )  # fmt: skip
    delta = (dout * out).sum(-1).transpose(-1, -2) - dlse
    if packed:
        delta[:, 11:], lse = math.nan, lse.detach().clone()
        lse[:, 11:] = math.nan
    gradients = {name: torch.zeros(tensors[name].shape, dtype=torch.float32) for name in names}
    add_gradients(call, lse.detach().float(), delta.detach().float(), gradients)
    again = {name: torch.zeros_like(once) for name, once in gradients.items()}
    add_gradients(call, lse.detach().float(), delta.detach().float(), again)
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(gradients[name], gradient.float(), rtol=2e-5, atol=2e-5)
        assert float(gradient.abs().max()) > 0
        assert torch.equal(gradients[name], again[name])


@pytest.mark.parametrize("packed", [False, True])
def test_calls_without_keys(packed: bool) -> None:
    q, k, v = (t.detach() for t in inputs(torch.float32))
    k, v = k[:, :0], v[:, :0]
    packing = None
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        packing = Packing(torch.tensor([0, 5, 14]).int(), torch.tensor([0, 0, 0]).int(), 9, 0)
    tensors = own(MIXED, 2, 4, 2, torch.float32)
    call = bound(MIXED, q, k, v, packing, **tensors)
    with torch.no_grad():
        results, wanted = without_keys(call), reference(call, q, k, v)
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.dtype == other.dtype
    assert not results[0].any()
    out, lse = reference(call, q, k, v)
    (gradient,) = torch.autograd.grad(lse.sum(), [tensors["table"]])
    through = {"table": torch.zeros_like(gradient), "bias": torch.zeros(3), "gain": torch.zeros(())}
    add_gradients(call, lse.detach(), -torch.ones_like(lse), through)
    torch.testing.assert_close(through["table"], gradient)
    assert out.shape == call.out_shape()


def test_an_index_out_of_extent_reads_zero_and_gets_nothing() -> None:
    """Kernels read zero at such an index; the reference raises."""
    variant = compile_variant("far", tensors=[Declared("t", "fp32", (3,), grad=True)], sink="t[h]")
    q, k, v = inputs(torch.float32)
    t = torch.ones(3)
    call = bound(variant, q, k, v, None, t=t)
    with pytest.raises(IndexError, match="tensor 't': index 3"):
        reference(call, q, k, v)
    gradients = {"t": torch.zeros(3)}
    add_gradients(call, torch.zeros(2, 4, 7), torch.ones(2, 4, 7), gradients)
    torch.testing.assert_close(gradients["t"], torch.full((3,), -14.0))


def test_a_sink_that_is_off_takes_no_gradient_from_a_logarithm() -> None:
    """The derivative of log(w) at 0 is infinite, and a sink of -inf takes no part: 0, in both ways of computing it."""
    variant = compile_variant(
        "off", "q_pos >= kv", tensors=[Declared("w", "fp32", ("h",), grad=True)], sink="log(w[h])"
    )
    q, k, v = inputs(torch.float32)
    w = torch.tensor([0.0, 1.0, 0.0, 2.0], requires_grad=True)
    call = bound(variant, q, k, v, None, w=w)
    out, lse = reference(call, q, k, v)
    (gradient,) = torch.autograd.grad(out.square().sum(), [w])
    delta = (2 * out * out).sum(-1).transpose(-1, -2).detach()
    by_rows = {"w": torch.zeros(4)}
    add_gradients(call, lse.detach(), delta, by_rows)
    torch.testing.assert_close(by_rows["w"], gradient)
    assert gradient[0] == gradient[2] == 0
    assert (gradient[[1, 3]] < 0).all()


def test_a_sink_that_reads_no_learned_tensor_adds_nothing() -> None:
    fixed = compile_variant("fixed", "q_pos >= kv", "s", tensors=[Declared("fixed", "fp32", ("h",))], sink="fixed[h]")
    q, k, v = inputs()
    call = bound(fixed, q, k, v, None, fixed=torch.randn(4))
    rows = torch.randn(2, 4, 7)
    gradients: dict[str, Tensor] = {}
    add_gradients(call, rows, rows, gradients)
    assert gradients == {}
