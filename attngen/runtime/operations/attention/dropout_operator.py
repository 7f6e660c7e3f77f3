"""The operators of ``torch.library`` that draw the state of dropout in a trace: ``dropout__state``, ``dropout__draw``.

Torch takes the first one apart. It marks the second one, so that a compiled program saves its result for the backward:
a partitioner that recomputes activations to save memory would draw another state. It also numbers the draws of a graph,
since torch merges calls of one operator with equal arguments. No variant can have their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from attngen.errors import CallError
from attngen.runtime.arguments.dropout import draw
from attngen.runtime.operations.shared.library import NAMESPACE, define_once

NAME, _DRAW = "dropout__state", "dropout__draw"
NAMES = NAME, _DRAW

#: Key in the metadata of a node of a trace: what partitioners do with it.
_RECOMPUTE = "recompute"


@torch.compiler.assume_constant_result
def defined() -> str:
    """Define the operators at the first use, and return their namespace."""
    random = (torch.Tag.nondeterministic_seeded,)
    schema = "(int number, *, Device device) -> Tensor"
    define_once(_DRAW, schema, _draw, fake=_draw, keys=("CompositeExplicitAutograd",), tags=random)
    return define_once(NAME, "(*, Device device) -> Tensor", _state, keys=("CompositeImplicitAutograd",))


def _draw(number: int, *, device: torch.device) -> Tensor:
    del number
    return draw(device)


def _state(*, device: torch.device) -> Tensor:
    if config.activation_memory_budget == 0 and torch.is_grad_enabled():
        raise CallError(
            "activation_memory_budget is 0, with which a compiled program recomputes all that is no input, random "
            "numbers too; pass rng_state=, or set a budget above 0"
        )
    drawing = getattr(getattr(torch.ops, NAMESPACE), _DRAW).default
    mode = get_proxy_mode()
    number = 0 if mode is None else sum(node.target is drawing for node in mode.tracer.graph.nodes)
    meta: dict[str, Any] = traceback.get_current_meta()  # nodes get it
    before = {key: meta[key] for key in (_RECOMPUTE,) if key in meta}
    meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    try:
        state: Tensor = drawing(number, device=device)
        return state
    finally:
        meta.pop(_RECOMPUTE)
        meta.update(before)


def call(device: torch.device) -> Tensor:
    """Call the operator: seed and offset, (2,) int64."""
    state: Tensor = getattr(getattr(torch.ops, defined()), NAME)(device=device)
    return state
