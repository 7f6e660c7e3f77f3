"""States of torch in which a call may need more than the launch of an earlier one, and calls in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import attngen

Call = Callable[..., Any]
Tensors = Sequence[Tensor]


class Operators(TorchDispatchMode):
    """A mode that lists attngen's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("attngen"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(call: Call, tensors: Tensors) -> Any:
    with Operators() as mode:
        result = call(*tensors)
    return result, mode.names


def without_data(call: Call, tensors: Tensors) -> Any:
    with FakeTensorMode() as mode:
        result = call(*map(mode.from_tensor, tensors))
    return tree_map_only(Tensor, lambda one: (type(one), one.shape, one.dtype), result)


def exported(call: Call, tensors: Tensors) -> Any:
    """As in a program that ``torch.export`` traces by running it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        return watched(call, tensors)


def compiled(call: Call, tensors: Tensors) -> Any:
    operators: list[str] = []

    def backend(program: Any, _: Any) -> Any:
        operators.extend(str(node.target) for node in program.graph.nodes if "attngen" in str(node.target))
        return program.forward

    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=True)(*tensors), operators


def scripted(call: Call, tensors: Tensors) -> Any:
    return torch.jit.trace(call, tuple(tensors), check_trace=False)(*tensors)


def mapped(call: Call, tensors: Tensors) -> Any:
    first, *others = tensors
    return torch.func.vmap(lambda one: call(one, *others))(torch.stack([first, 2 * first]))


def differentiated(call: Call, tensors: Tensors) -> Any:
    first, *others = tensors
    return torch.func.grad(lambda one: call(one, *others).float().square().sum())(first)


def pushed(call: Call, tensors: Tensors) -> Any:
    first, *others = tensors
    return torch.func.jvp(lambda one: call(one, *others), (first,), (torch.ones_like(first),))


def untouched(call: Call, tensors: Tensors) -> Any:
    """Within a transform, of which no tensor of the call knows."""
    seen: list[Any] = []
    torch.func.grad(lambda one: (seen.append(call(*tensors)), one)[1])(torch.ones(()))
    return seen


def with_a_tangent(call: Call, tensors: Tensors) -> Any:
    first, *others = tensors
    with forward_ad.dual_level():
        result = call(forward_ad.make_dual(first, torch.ones_like(first)), *others)
        return tree_map_only(Tensor, lambda one: tuple(forward_ad.unpack_dual(one)), result)


def of_inference(call: Call, tensors: Tensors) -> Any:
    with torch.inference_mode():
        return call(*(tensor.clone() for tensor in tensors))


def within(context: Callable[[], Any]) -> Callable[[Call, Tensors], Any]:
    """A state that is entered by a context."""

    def entered(call: Call, tensors: Tensors) -> Any:
        with context():
            return call(*tensors)

    return entered


def with_gradient(call: Call, tensors: Tensors) -> Any:
    first, *others = (tensor.detach() for tensor in tensors)
    out = call(first.requires_grad_(), *others)
    return out, torch.autograd.grad(out.float().square().sum(), first) if out.requires_grad else None


def deterministic(call: Call, tensors: Tensors) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return call(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)


#: States in which no call runs as an earlier one did.
GUARDED: dict[str, Callable[[Call, Tensors], Any]] = {
    "debug checks": within(attngen.debug),
    "dispatch mode": watched,
    "tensors without data": without_data,
    "torch.export": exported,
    "torch.jit.trace": scripted,
    "vmap": mapped,
    "grad": differentiated,
    "jvp": pushed,
    "a transform around it": untouched,
    "a tangent": with_a_tangent,
    "a dual level": within(forward_ad.dual_level),
}

#: States that the keys of stores, and what they compare of tensors, tell apart.
OTHERS: dict[str, Callable[[Call, Tensors], Any]] = {
    "none": within(nullcontext),
    "function mode": within(Functions),
    "inference mode": within(torch.inference_mode),
    "inference tensors": of_inference,
    "no_grad": within(torch.no_grad),
    "a gradient": with_gradient,
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "deterministic algorithms": deterministic,
}

STATES = GUARDED | OTHERS


def outcome(state: str, call: Call, tensors: Tensors) -> Any:
    """Result of a call in a state, or its error, as something to compare."""
    try:
        result = STATES[state](call, tensors)
    except Exception as error:
        return type(error), str(error)
    return tree_map_only(Tensor, lambda one: (one.dtype, one.requires_grad, one.tolist()), result)
