"""A plan's call as an operator of ``torch.library``, which compiled programs keep whole.

It names its plan, variant and options by a number, a constant of the trace; the tensors are those of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from attngen.errors import CallError
from attngen.parallel.calls import ParallelCall, plans_by_number
from attngen.parallel.stages import CallOptions

_calls: list[ParallelCall] = []
_numbers: dict[Any, int] = {}


def traced(
    plan: str, variant: Any, options: CallOptions, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call in a trace. q, k and v are (batch, tokens, heads, head_dim)."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = tuple((name, value) for name, value in values.items() if name not in tensors)
    name = variant if variant is None or isinstance(variant, str) else variant.name
    number = _number(plan, name, tuple(options), numbers, tuple(tensors))
    out, lse, _ = torch.ops._attngen_parallel.attention(q, k, v, list(tensors.values()), number)
    return out, lse


@torch.compiler.assume_constant_result
def _number(
    plan: str, variant: str | None, options: tuple[Any, ...], numbers: tuple[tuple[str, Any], ...],
    names: tuple[str, ...],
) -> int:  # fmt: skip
    """The number of a call. Runs at trace time on plain values. Raises CallError."""
    key = (plan, variant, options, numbers, names)
    if key not in _numbers:
        with unset_fake_temporarily():
            of = plans_by_number[plan]
            layer = of.layer(variant)
            if of.ranks == 1:
                raise CallError("a plan of one rank exchanges nothing; allowed where it is compiled: attngen.attention")
            for name, value in layer.values.items():
                if isinstance(value, Tensor) and value.requires_grad and name not in names:
                    raise CallError(f"'{name}' requires a gradient; allowed in a compiled program: pass it to the call")
            of.rank_attention(layer)
        _numbers[key] = len(_calls)
        _calls.append(ParallelCall(of, layer, CallOptions(*options), dict(numbers), names))
    return _numbers[key]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], number: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    call = _calls[number]
    call.plan.check(call.layer, q, k, v, call.values(tensors))
    out, lse, kept = call.forward(q, k, v, tensors, lse=True, keep=True)
    assert lse is not None
    return out.contiguous(), lse.contiguous(), [each.contiguous() for each in kept]


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], number: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    call = _calls[number]
    shapes = call.plan.rank_attention(call.layer).kept_shapes(q.shape, k.shape, v.shape)
    batch, rows, heads, _ = q.shape
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    kept = [q.new_empty(shape, dtype=sums if i == 2 else q.dtype) for i, shape in enumerate(shapes)]
    return q.new_empty((batch, rows, heads, v.shape[3])), q.new_empty((batch, heads, rows), dtype=sums), kept


def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], out: Tensor,
    lse: Tensor, kept: Sequence[Tensor], learned: Sequence[bool], number: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    dq, dk, dv, gradients = _calls[number].backward(q, k, v, tensors, out, lse, kept, dout, dlse, learned)
    own = [gradient for gradient in gradients if gradient is not None]
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), own


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], out: Tensor,
    lse: Tensor, kept: Sequence[Tensor], learned: Sequence[bool], number: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    own = [torch.empty_like(x) for x, wanted in zip(tensors, learned, strict=True) if wanted]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), own


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, tensors, ctx.number = inputs
    out, lse, kept = output
    ctx.counts = len(kept), len(tensors)
    ctx.learned = [x.requires_grad for x in tensors]
    ctx.save_for_backward(q, k, v, out, lse, *kept, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    kept, tensors = others[: ctx.counts[0]], others[ctx.counts[0] :]
    dq, dk, dv, own = torch.ops._attngen_parallel.attention__backward(
        dout, dlse, q, k, v, tensors, out, lse, kept, ctx.learned, ctx.number
    )
    gradients = iter(own)
    return dq, dk, dv, [next(gradients) if wanted else None for wanted in ctx.learned], None


_library = torch.library.Library("_attngen_parallel", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] own, int call) -> (Tensor out, Tensor lse, Tensor[] kept)"
)
_library.define(
    "attention__backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor[] own, Tensor out, "
    "Tensor lse, Tensor[] kept, bool[] learned, int call) -> (Tensor, Tensor, Tensor, Tensor[])"
)
for _key in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _key)
    _library.impl("attention__backward", _backward, _key)
torch.library.register_fake("_attngen_parallel::attention", _fake_forward, lib=_library)
torch.library.register_fake("_attngen_parallel::attention__backward", _fake_backward, lib=_library)
torch.library.register_autograd("_attngen_parallel::attention", _differentiate, setup_context=_keep, lib=_library)
