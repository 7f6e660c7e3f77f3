"""Backward kernels on random inputs of any shape, launched as often as asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.lab.verify.poison import poisoned_gradients
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.pinned import PinnedGradients
from attngen.runtime.reference.eager import reference


def gradient_run(kernel: Kernel, case: Case, seed: int) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Function that launches a backward, into fresh garbage each time, and returns dq, dk and dv."""
    element = Element(kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v)
    given = make_inputs(kernel.variant, case, kernel.layout, element, "cuda", seed)
    call = given.bind(kernel.variant)
    generator = torch.Generator("cuda").manual_seed(seed)
    dout = torch.randn((*given.q.shape[:-1], element.head_dim_v), generator=generator, device="cuda").to(given.q.dtype)
    with torch.no_grad():
        out, lse = reference(call, given.q, given.k, given.v)
    inputs = {"q": given.q, "k": given.k, "v": given.v, "out": out, "lse": lse, "dout": dout}

    def launch() -> tuple[Tensor, Tensor, Tensor]:
        buffers, memory = poisoned_gradients(kernel, call, inputs, None)
        PinnedGradients(kernel, call, buffers)()
        assert memory.overrun() == ()
        return buffers.dq, buffers.dk, buffers.dv

    return launch
