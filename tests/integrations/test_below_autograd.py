"""Backward passes of drop-ins where autograd does not record: inside operators of torch.library, in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from tests.integrations.flash_attn.test_flash_attn import BATCH, HEADS, near, qkv
from tests.integrations.oracles import flash_attention
from tests.sampling import few


class InOperator:
    """Inside the implementation of an operator: autograd is left out of dispatch."""

    def __enter__(self) -> None:
        self._guard = torch._C._AutoDispatchBelowAutograd()
        self._guard.__enter__()

    def __exit__(self, *_: object) -> None:
        self._guard.__exit__(None, None, None)


PLACES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "operator": InOperator, "inference mode": torch.inference_mode, "enabled": torch.enable_grad,
}  # fmt: skip

OPTIONS = (None, True, 4, 0, 1.5)
STARTS = torch.tensor([0, 9, 18], dtype=torch.int32)


def version_2(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *gradients: Tensor) -> None:
    out, lse, _, state = flash_attn._flash_attn_forward(q, k, v, 0.0, *OPTIONS, None, False)
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *gradients, 0.0, *OPTIONS, None, False, state)


def version_2_packed(*tensors: Tensor) -> None:
    dout, q, k, v, *gradients = (t.flatten(0, 1) for t in tensors)
    packing, rest = (STARTS.clone(), STARTS.clone(), 9, 9, 0.0), (*OPTIONS, None, False)
    out, lse, _, state = flash_attn._flash_attn_varlen_forward(q, k, v, *packing, *rest)
    flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, *packing, *rest, state)


def version_3(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *gradients: Tensor) -> None:
    scale, causal, left, right, softcap = OPTIONS
    window: dict[str, Any] = {"window_size_left": left, "window_size_right": right, "softcap": softcap}
    out, lse, *_ = flash_attn_3._flash_attn_forward(q, k, v, softmax_scale=scale, causal=bool(causal), **window)
    dq, dk, dv = gradients
    flash_attn_3._flash_attn_backward(
        dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=bool(causal), **window
    )


def version_3_packed(*tensors: Tensor) -> None:
    dout, q, k, v, *gradients = (t.flatten(0, 1) for t in tensors)
    starts, (dq, dk, dv), used = STARTS.clone(), gradients, torch.tensor([9, 9], dtype=torch.int32)
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 9, "max_seqlen_k": 9}
    _, causal, left, right, softcap = OPTIONS
    window: dict[str, Any] = {"window_size_left": left, "window_size_right": right, "softcap": softcap}
    out, lse, *_ = flash_attn_3._flash_attn_forward(q, k, v, seqused_q=used, causal=bool(causal), **window, **packing)
    flash_attn_3._flash_attn_backward(
        dout, q, k, v, out, lse, sequed_q=used, dq=dq, dk=dk, dv=dv, is_causal=bool(causal), **window, **packing
    )


@few("place", PLACES, always=range(0, 999, 2))
@pytest.mark.parametrize("passes", [version_2, version_2_packed, version_3, version_3_packed])
def test_backward_passes_by_themselves(passes: Callable[..., None], place: str) -> None:
    inputs = [t.requires_grad_() for t in qkv(9, 9)]
    dout = torch.randn(BATCH, 9, HEADS, 8)
    wanted = flash_attention(*inputs, causal=True, window_size=(4, 0), softcap=1.5)[0]
    exact = torch.autograd.grad(wanted, inputs, dout.double())
    with PLACES[place]():
        gradients = [torch.full_like(t, torch.nan) for t in inputs]
        passes(*(t.detach().clone() for t in (dout, *inputs)), *gradients)
    near(tuple(gradients), exact)


@pytest.mark.exhaustive
def test_a_ring_as_an_operator() -> None:
    """Forward and backward passes by themselves, as operators of a program that is compiled whole."""
    options = (0.0, None, True, -1, -1, 0.0, None)

    @torch.library.custom_op("below_autograd::ring_forward", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash_attn._flash_attn_forward(q, k, v, *options, False)
        return out, lse

    @torch.library.custom_op("below_autograd::ring_backward", mutates_args=())
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        flash_attn._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *options, False)
        return dq, dk, dv

    forward.register_fake(lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])))
    backward.register_fake(lambda dout, *qkv: tuple(torch.empty_like(t) for t in qkv[:3]))
    forward.register_autograd(
        lambda ctx, dout, _: backward(dout, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )
    inputs = [t.requires_grad_() for t in qkv(9, 9)]
    exact = torch.autograd.grad(flash_attention(*inputs, causal=True)[0].square().sum(), inputs)
    compiled = torch.compile(lambda *qkv: forward(*qkv)[0].square().sum(), fullgraph=True, backend="aot_eager")
    for program in (lambda *qkv: forward(*qkv)[0].square().sum(), compiled):
        near(torch.autograd.grad(program(*inputs), inputs), exact)
