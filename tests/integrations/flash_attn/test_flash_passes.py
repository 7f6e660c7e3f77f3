"""flash-attn's forward and backward by themselves: one part of the keys after the other gives the whole gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn import v2 as flash_attn
from tests.integrations.drops import factors, next_factors
from tests.integrations.flash_attn.test_flash_attn import BATCH, HEADS, OPTIONS, near, options_of, qkv
from tests.integrations.oracles import flash_attention
from tests.sampling import sampled

RATE = 0.25


def positional(options: dict[str, Any]) -> list[Any]:
    """The forward's arguments after dropout_p."""
    left, right = options.get("window_size", (-1, -1))
    return [
        options.get("softmax_scale"), options.get("causal", False), left, right, options.get("softcap", 0.0),
        options.get("alibi_slopes"),
    ]  # fmt: skip


@sampled(always=10, rate=[0.0, RATE], given=[*OPTIONS])
def test_forward_and_backward(given: dict[str, Any], rate: float) -> None:
    options = options_of(given)
    inputs = [t.requires_grad_() for t in qkv()]
    drops = factors(5, rate, BATCH, HEADS, 9, 13) if rate else None
    out, lse, probabilities, state = flash_attn._flash_attn_forward(*inputs, rate, *positional(options), False)
    wanted = flash_attention(*inputs, **options, factors=drops)
    near((out, lse), wanted)
    assert not out.requires_grad
    assert probabilities.numel() == 0
    assert (state.dtype, state.shape) == (torch.int64, (2,))
    dout = torch.randn_like(out)
    gradients = [torch.full_like(t, float("nan")) for t in inputs]
    sums = flash_attn._flash_attn_backward(
        dout, *inputs, out, lse, *gradients, rate, *positional(options), False, rng_state=state
    )
    near(tuple(gradients), torch.autograd.grad(wanted[0], inputs, dout.double()))
    assert sums.shape == (BATCH, HEADS, 128)
    near(sums[..., :9], (dout.double() * wanted[0]).sum(-1).transpose(1, 2))
    assert not sums[..., 9:].any()


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize(
    "given", [{}, {"causal": True}, {"window_size": (3, 2), "softcap": 1.5}, {"alibi": (2, HEADS)}], ids=str
)
def test_packed_forward_and_backward(given: dict[str, Any], rate: float) -> None:
    options = options_of(given)
    starts_q, starts_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ((5, 16), (7, 10)))
    packing = (starts_q, starts_k, 11, 7)
    torch.manual_seed(4)
    inputs = [torch.randn(n, h, 8, requires_grad=True) for n, h in ((16, HEADS), (10, 2), (10, 2))]
    torch.manual_seed(6)
    drops = next_factors(rate, [(5, 7), (11, 3)], HEADS) if rate else [None, None]
    torch.manual_seed(6)
    out, lse, _, state = flash_attn._flash_attn_varlen_forward(*inputs, *packing, rate, *positional(options))
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(t) for t in inputs]
    sums = flash_attn._flash_attn_varlen_backward(
        dout, *inputs, out, lse, *gradients, *packing, rate, *positional(options), False, state
    )
    assert sums.shape == (HEADS, 16 + 128 * 2)
    loss: Any = 0.0
    for i in range(2):
        rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        own = dict(options)
        if own.get("alibi_slopes") is not None:
            own["alibi_slopes"] = own["alibi_slopes"][i]
        parts = [t[None, where] for t, where in zip(inputs, (rows, keys, keys), strict=True)]
        mine = drops[i]
        wanted, wanted_lse = flash_attention(*parts, **own, factors=None if mine is None else mine[None])
        near((out[rows], lse[:, rows]), (wanted[0], wanted_lse[0]))
        loss = loss + (wanted[0] * dout[rows]).sum()
    near(tuple(gradients), torch.autograd.grad(loss, inputs))


def test_used_keys_of_packed_sequences() -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv())
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 13))
    used = torch.tensor([13, 5], dtype=torch.int32)
    out, *_ = flash_attn._flash_attn_varlen_forward(q, k, v, starts_q, starts_k, 9, 13, 0.0, None, True, seqused_k=used)
    for i, count in enumerate((13, 5)):
        rows, keys = slice(9 * i, 9 * i + 9), slice(13 * i, 13 * i + count)
        near(out[rows], flash_attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0][0])


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of all keys from those of each part of them."""
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    shares = [(part - lse).exp().nan_to_num().transpose(1, 2).unsqueeze(-1) for _, part in parts]
    return sum(out * share for (out, _), share in zip(parts, shares, strict=True)), lse  # type: ignore[return-value]


@sampled(always=2, softcap=[0.0, 1.5], causal=[False, True], dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_ring(dtype: torch.dtype, causal: bool, softcap: float) -> None:
    """Four devices, each with a quarter of the rows: every one sees the keys of the others one after the other."""
    torch.manual_seed(2)
    length, count = 24, 4
    whole = [torch.randn(BATCH, length, heads, 8).to(dtype) for heads in (HEADS, 2, 2)]
    dout = torch.randn(BATCH, length, HEADS, 8).to(dtype)
    q, k, v, douts = (t.chunk(count, dim=1) for t in (*whole, dout))
    gradients = [[torch.zeros_like(one, dtype=torch.float64) for one in t] for t in (q, k, v)]
    outs = []
    for i in range(count):
        seen = range(i + 1) if causal else range(count)
        options = {j: [None, causal and i == j, -1, -1, softcap, None] for j in seen}
        forwards = [flash_attn._flash_attn_forward(q[i], k[j], v[j], 0.0, *options[j], False) for j in seen]
        out, lse = merged([(part.double(), part_lse) for part, part_lse, *_ in forwards])
        outs.append(out)
        for j in seen:
            grads = [torch.empty_like(t) for t in (q[i], k[j], v[j])]
            flash_attn._flash_attn_backward(
                douts[i], q[i], k[j], v[j], out.to(dtype), lse, *grads, 0.0, *options[j], False
            )
            for whose, place, gradient in zip(gradients, (i, j, j), grads, strict=True):
                whose[place] += gradient
    inputs = [t.double().requires_grad_() for t in whole]
    wanted = flash_attention(*inputs, causal=causal, softcap=softcap)[0]
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]  # its lse is float32
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, rtol=tolerance, atol=tolerance)
    for parts, one in zip(gradients, torch.autograd.grad(wanted, inputs, dout.double()), strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), one, rtol=tolerance, atol=tolerance)


def test_rows_without_keys_have_no_gradient() -> None:
    q, k, v = qkv(rows=13, keys=9)
    out, lse, *_ = flash_attn._flash_attn_forward(q, k, v, 0.0, None, True, -1, -1, 0.0, None, False)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    dout = torch.randn_like(out)
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *gradients, 0.0, None, True, -1, -1, 0.0, None, False)
    assert not gradients[0][:, :4].any()
    dout[:, :4] = 1e4
    again = [torch.empty_like(t) for t in (q, k, v)]
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *again, 0.0, None, True, -1, -1, 0.0, None, False)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


def test_gradients_may_be_parts_of_buffers_or_missing() -> None:
    q, k, v = qkv()
    options = (0.0, None, False, -1, -1, 0.0, None, False)
    out, lse, *_ = flash_attn._flash_attn_forward(q, k, v, *options)
    dout = torch.randn_like(out)
    whole = [torch.empty_like(t) for t in (q, k, v)]
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *whole, *options)
    room = torch.zeros(BATCH, 20, 2, 8, dtype=torch.float64)
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, None, room[:, 3:16], None, *options)
    near(room[:, 3:16], whole[1])
    assert not room[:, :3].any()
    with pytest.raises(CallError, match=r"dk must have shape \(2, 13, 2, 8\), got \(2, 12, 2, 8\)"):
        flash_attn._flash_attn_backward(dout, q, k, v, out, lse, None, room[:, :12], None, *options)
    with pytest.raises(CallError, match=r"softmax_lse must be a tensor of shape \(2, 4, 9\)"):
        flash_attn._flash_attn_backward(dout, q, k, v, out, lse[:, :, 1:], *whole, *options)
    with pytest.raises(CallError, match=r"dout must be a tensor of shape \(2, 9, 4, 8\)"):
        flash_attn._flash_attn_backward(dout[:, 1:], q, k, v, out, lse, *whole, *options)
    with pytest.raises(CallError, match="a backward pass with dropout needs the rng_state"):
        flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *whole, 0.1, *options[1:])


def test_a_custom_gradient_in_a_program_that_is_compiled() -> None:
    """As ring attention uses them; the backward runs eagerly."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse, _, _ = flash_attn._flash_attn_forward(q, k, v, 0.0, None, True, -1, -1, 0.0, None, False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            q, k, v, out, lse = ctx.saved_tensors
            gradients = [torch.empty_like(t) for t in (q, k, v)]
            flash_attn._flash_attn_backward(
                dout, q, k, v, out, lse, *gradients, 0.0, None, True, -1, -1, 0.0, None, False
            )
            return tuple(gradients)

    inputs = [t.requires_grad_() for t in qkv()]
    wanted = torch.autograd.grad(flash_attention(*inputs, causal=True)[0].square().sum(), inputs)
    near(torch.autograd.grad(Attention.apply(*inputs).square().sum(), inputs), wanted)


def test_arguments_are_those_of_flash_attn() -> None:
    """With their defaults, which implementations of ring attention read."""
    options = ["dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap"]
    packing = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    given = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"]
    wanted = {
        "_flash_attn_forward": ["q", "k", "v", *options, "alibi_slopes", "return_softmax"],
        "_flash_attn_varlen_forward": [
            "q", "k", "v", *packing, *options, "alibi_slopes", "return_softmax", "block_table", "leftpad_k",
            "seqused_k", "zero_tensors",
        ],
        "_flash_attn_backward": [*given, *options, "alibi_slopes", "deterministic", "rng_state"],
        "_flash_attn_varlen_backward": [
            *given, *packing, *options, "alibi_slopes", "deterministic", "rng_state", "zero_tensors",
        ],
    }  # fmt: skip
    for name, arguments in wanted.items():
        assert inspect.getfullargspec(getattr(flash_attn, name)).args == arguments
    assert inspect.getfullargspec(flash_attn._flash_attn_backward).defaults == (None,)


@pytest.mark.parametrize("name", ["block_table", "leftpad_k"])
def test_what_is_refused(name: str) -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv())
    starts = torch.tensor([0, 18], dtype=torch.int32)
    with pytest.raises(NoKernelError, match=f"{name} is not supported"):
        flash_attn._flash_attn_varlen_forward(
            q, k, v, starts, starts, 18, 18, 0.0, None, False, **{name: torch.zeros(1)}
        )
