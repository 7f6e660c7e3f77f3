"""Rows after which memory goes on: NaN after the last column of q, k, v and dO reaches no result, and stays there.

Kernels multiply more columns than a head dim has: those after it are zeros, and leave through no store.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.inspect.cases import Case
from attngen.inspect.gradient_contract import expected_gradients
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.poison import poisoned_gradients
from attngen.runtime.launch.pinned import PinnedGradients
from tests.gpu import test_backward as backward
from tests.gpu.family import Run, bits, labels, left_out, same

#: Columns of NaN after each row: as many as keep rows at multiples of 16 bytes.
GAP = 8


def is_causal(name: str) -> bool:
    return "causal-" in name


FORWARDS = [name for name in labels() if is_causal(name)]
BACKWARDS = [name for name in backward.ALL if is_causal(name)]
LEFT_OUT = left_out() | backward.LEFT_OUT


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor as the first columns of a wider one, which is NaN after them."""
    memory = torch.full((*tensor.shape[:-1], tensor.shape[-1] + GAP), torch.nan, dtype=tensor.dtype, device="cuda")
    memory[..., : tensor.shape[-1]] = tensor
    return memory[..., : tensor.shape[-1]]


def behind(tensor: Tensor) -> Tensor:
    """Return the columns after those of a tensor that ``wide`` made."""
    base = tensor._base
    assert base is not None
    return base[..., tensor.shape[-1] :]


def case_of(name: str) -> Case:
    """Return ragged lengths on both sides, with keys after seqused_k."""
    if "varlen" in name:
        return Case("wide", (70, 9), (157, 130), heads=4, kv_heads=2, used=(157, 100))
    return Case("wide", (70,) * 2, (157,) * 2, heads=4, kv_heads=2, used=(157, 100))


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(name: str) -> None:
    run = Run.of(name, case_of(name))
    wanted = run.results()
    given = run.inputs
    other = Run.with_inputs(
        run.kernel, wide(given.q), wide(given.k), wide(given.v), given.packing, given.seqused_k, given.arguments
    )
    memory = other.memory()
    out = wide(memory.buffers.out)
    other.launch(replace(memory.buffers, out=out))
    assert memory.buffers.lse is not None
    assert same((out, memory.buffers.lse), wanted)
    assert behind(out).isnan().all()


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards(name: str) -> None:
    kernel, case = backward.kernels()[name], case_of(name)
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
    inputs = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", 0)
    call = inputs.bind(kernel.variant)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(0))
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}
    results = []
    for widened in (False, True):
        own = {name: wide(t) if widened and name != "lse" else t for name, t in given.items()}
        seen = replace(inputs, q=own["q"], k=own["k"], v=own["v"]).bind(kernel.variant)
        buffers, memory = poisoned_gradients(kernel, seen, own, wanted.dlse.contiguous())
        if widened:
            buffers = replace(buffers, dq=wide(buffers.dq), dk=wide(buffers.dk), dv=wide(buffers.dv))
        PinnedGradients(kernel, seen, buffers)()
        assert memory.overrun() == ()
        results.append((buffers.dq, buffers.dk, buffers.dv))
    first, second = results
    assert all(behind(gradient).isnan().all() for gradient in second)
    assert not any(gradient.isnan().any() for gradient in second)
    if backward._in_no_order(name):
        backward.close([first[0]], [second[0]], 4e-3)
        first, second = first[1:], second[1:]
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("qk", "v"), [(72, 72), (200, 200), (40, 24)])
def test_a_call_through_autograd(qk: int, v: int) -> None:
    backward.kernels()
    torch.manual_seed(1)
    shapes = ((2, 150, 4, qk), (2, 180, 2, qk), (2, 180, 2, v))
    memory = [torch.randn(*shape[:-1], shape[-1] + GAP, device="cuda").bfloat16() for shape in shapes]
    inputs = [t[..., : shape[-1]].requires_grad_() for t, shape in zip(memory, shapes, strict=True)]

    def results(**options: Any) -> tuple[Tensor, ...]:
        out = attngen.attention(*inputs, variant="causal", package=backward.PACKAGE, **options)
        return (out, *torch.autograd.grad(out.float().square().sum(), inputs))

    backward.close(results(), results(backend="reference"))
