"""The backward pass of a contender: all that autograd runs between the gradients of its output and of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.peers import output_of
from attngen.lab.bench.timing import Contender


def differentiated(forward: Contender, output_gradients: Sequence[Tensor]) -> Contender:
    """The calls that differentiate a contender; each returns dQ, dK and dV.

    The forward pass of each set of inputs runs here, once, and its graph is kept. ``output_gradients`` holds one for
    each set, (batch, seqlen, heads, head_dim of v); a contender gets it with the strides of its own output, so that it
    need not copy it. Raises what the forward pass raises.
    """
    calls = []
    with forward.session(), torch.enable_grad():
        for call, leaves, dout in zip(forward.calls, forward.leaves, output_gradients, strict=True):
            out = output_of(call())
            laid_out = torch.empty_like(out)
            forward.as_bshd(laid_out).copy_(dout)
            calls.append(partial(torch.autograd.grad, out, leaves, laid_out, retain_graph=True))
    return Contender(forward.name, calls, forward.session, partial(_each, forward.as_bshd))


def _each(as_bshd: Callable[[Any], Any], gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(as_bshd(gradient) for gradient in gradients)
