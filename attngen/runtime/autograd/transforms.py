"""Calls under the transforms of torch.func, in forward mode, and differentiated twice.

Results, gradients and tangents come from kernels. What ``torch.func.vmap`` maps over becomes part of the batch where
the variant allows that, and a call for each element where not. Derivatives of gradients and of tangents, and tangents
that no kernel computes, are those of plain torch (``derivatives``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.dtypes import HEAD_DIMS
from attngen.errors import CallError
from attngen.lang.ir import Expr, Load, Op, Type, Var
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Results
from attngen.runtime.arguments.given import KEPT, TENSORS, Given, of_parts, settings_of, tensors_of
from attngen.runtime.autograd.derivatives import Plain, reference_gradients
from attngen.runtime.autograd.tangents import by_kernel
from attngen.runtime.registry.binding import find


@dataclass(frozen=True)
class BatchAxis:
    """An axis of a call whose entries do not depend on each other: sequences, or heads."""

    #: Name of the number of one → the extent of axes that have something for each of them.
    numbers: Mapping[str, str]
    #: Other names that depend on the number of axes, or on the axes before, and that an expression may read.
    counts: frozenset[str]


SEQUENCES = BatchAxis({"b": "b"}, frozenset({"q_global", "kv_global", "total_q", "total_k"}))
HEADS = BatchAxis({"h": "h", "hk": "hk"}, frozenset({"heads", "kv_heads"}))

if TYPE_CHECKING:
    from typing import Protocol

    from attngen.runtime.autograd.context import Context, VmapInfo

    class _TransformContext(Context, Protocol):
        recorded: Recorded

    class _GradientContext(_TransformContext, Protocol):
        asked: tuple[str, ...]
        absent: tuple[bool, bool]


#: Gradients by kernels: dq, dk, dv and those of the variant's tensors, from (given, out, lse, dout, dlse, asked).
_Differentiate = Callable[
    [Given, Tensor, Tensor, Tensor | None, Tensor | None, tuple[str, ...]],
    tuple[Tensor, Tensor, Tensor, dict[str, Tensor]],
]

#: Dtypes in which kernels compute tangents.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: The axis of each input that ``vmap`` maps over, None for none.
Dims = Sequence[int | None]

#: Tensors of a call in the order of ``TENSORS``, then the variant's own; None for none.
_Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call without its tensors, and who runs it and its backward. It is opaque to transforms."""

    run: Callable[[Given], Results]
    #: None where the reference runs.
    differentiate: _Differentiate | None
    names: tuple[str, ...]
    numbers: Mapping[str, object]
    settings: tuple[object, ...]

    @classmethod
    def of(
        cls, given: Given, run: Callable[[Given], Results], differentiate: _Differentiate | None
    ) -> tuple[Recorded, _Tensors]:
        """The call without its tensors, and its tensors."""
        own = {name: value for name, value in given.arguments.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in given.arguments.items() if name not in own}
        settings = settings_of(given._replace(return_lse=KEPT))
        return cls(run, differentiate, tuple(own), numbers, settings), (*tensors_of(given), *own.values())

    def given(self, tensors: _Tensors) -> Given:
        """Return the call with these tensors."""
        count = len(TENSORS)
        own = dict(zip(self.names, tensors[count:], strict=True))
        return of_parts(tensors[:count], {**self.numbers, **own}, self.settings)


def attend(given: Given, run: Callable[[Given], Results], differentiate: _Differentiate | None) -> Results:
    """Run a call whose tensors some transform has wrapped, or that carry tangents.

    Raises CallError for a call whose keys lie in pages: it has no derivative.
    """
    if given.form == "paged":
        raise CallError(
            "attention over pages has no derivative and no rule for vmap: call attention_paged outside of torch.func's "
            "transforms, or attention on keys that are gathered"
        )
    recorded, tensors = Recorded.of(given, run, differentiate)
    if any(isinstance(tensor, Tensor) and torch._is_functional_tensor(tensor) for tensor in tensors):
        raise CallError(
            "attention has no rule for torch.func.functionalize, and nothing to functionalize: it changes no tensor; "
            "allowed: grad, vjp, jvp, vmap, and what torch.func makes of them"
        )
    if recorded.differentiate is not None and (duals := _duals(recorded, tensors)) is not None:
        primals, directions = duals
        out, lse, *moved = AttentionAndTangent.apply(recorded, *primals, *directions)
        moved = Tangent.apply(recorded, *moved, *primals, *directions)
        out, lse = (forward_ad.make_dual(*both) for both in zip((out, lse), moved, strict=True))
    else:
        out, lse = Attention.apply(recorded, *tensors)
    return (out, lse) if given.return_lse else out


def refuse(name: str, tensors: Iterable[object]) -> None:
    """Raise CallError if a transform has wrapped one of the tensors of a call that has no rule for it, or one carries a
    tangent."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if any(map(wrapped, given)):
        raise CallError(f"{name} has no rule for the transforms of torch.func; call it outside of them")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise CallError(f"{name} is not differentiable; call it with the primal of forward_ad.unpack_dual")


class Attention(torch.autograd.Function):
    """Attention, with a rule for each transform."""

    @staticmethod
    def forward(recorded: Recorded, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = recorded.run(recorded.given(tensors))
        return out, lse

    @staticmethod
    def setup_context(ctx: _TransformContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.recorded, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.save_for_forward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: _TransformContext, dout: Tensor | None, dlse: Tensor | None) -> _Tensors:
        out, lse, *tensors = ctx.saved_tensors
        return None, *gradients(ctx.recorded, ctx.needs_input_grad[1:], out, lse, dout, dlse, tensors)

    @staticmethod
    def jvp(ctx: _TransformContext, _: None, *directions: Tensor | None) -> tuple[Tensor, Tensor]:
        with forward_ad._set_fwd_grad_enabled(True):
            _out, _lse, *tensors = _without_tangents(ctx.saved_tensors)
            places = [place for place in _differentiable(tensors) if place < 3 or directions[place] is not None]
            plain = Plain(ctx.recorded.given(tuple(tensors)), _names(ctx.recorded, places))
            return plain.tangents([tensors[place] for place in places], [directions[place] for place in places])

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: Dims, recorded: Recorded, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Dims]:
        dims, size = in_dims[1:], _size_of(info)
        axes = batch_axes(recorded, tensors, dims)
        if axes is None:
            results = [Attention.apply(recorded, *_element(tensors, dims, i)) for i in range(size)]
            return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0, 0)
        out, lse = Attention.apply(recorded, *_folded(tensors, dims, axes, size))
        return (_unfolded(out, 0, size), _unfolded(lse, 0, size)), (0, 0)


def _duals(recorded: Recorded, tensors: _Tensors) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
    """The tensors of a call without their tangents, and the tangents of q, k and v; None for a call whose tangents, if
    any, no kernel computes: those of a variant's own tensors, of other weights than a softmax, with dropout, of listed
    keys, in other dtypes, and beyond the head dims of most kernels."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() != torch._C._functorch.TransformType.Jvp:
        return None  # that of a transform around this one is found when it comes to the call
    given = recorded.given(tensors)
    if forward_ad._current_level < 0 or given.q.dtype not in _DTYPES or given.out is not None:
        return None
    primals, directions = zip(*((t, None) if t is None else forward_ad.unpack_dual(t) for t in tensors), strict=True)
    if all(t is None for t in directions[:3]) or any(t is not None for t in directions[3:]):
        return None
    variant = given.variant if isinstance(given.variant, Variant) else find(given.variant, given.package).variant
    if max(given.q.shape[-1], given.v.shape[-1]) > HEAD_DIMS[-1]:
        return None
    if not variant.has_lse or variant.dropout or variant.keys is not None or given.q_descale is not None:
        return None
    return list(primals), list(directions[:3])


class AttentionAndTangent(torch.autograd.Function):
    """Attention and its tangent by one kernel, of which the output alone has gradients (``Tangent``).

    It takes the tensors of a call, then the tangents of q, k and v.
    """

    @staticmethod
    def forward(recorded: Recorded, *both: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tensors, directions = both[:-3], both[-3:]
        given = recorded.given(tensors)
        derived = by_kernel(given, directions)
        if derived is not None:
            return derived
        out, lse = recorded.run(given)
        dout, dlse = Plain(given, ()).tangents(tensors[:3], directions)
        return out, lse, dout, dlse

    @staticmethod
    def setup_context(ctx: _TransformContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.recorded, *both = inputs
        out, lse, *moved = output
        ctx.mark_non_differentiable(*moved)
        ctx.save_for_backward(out, lse, *both[:-3])
        ctx.save_for_forward(out, lse, *both[:-3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: _TransformContext, dout: Tensor | None, dlse: Tensor | None, *_: None) -> _Tensors:
        out, lse, *tensors = ctx.saved_tensors
        grads = gradients(ctx.recorded, ctx.needs_input_grad[1:-3], out, lse, dout, dlse, tensors)
        return None, *grads, None, None, None

    @staticmethod
    def jvp(ctx: _TransformContext, _: None, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        return *Attention.jvp(ctx, None, *directions[:-3]), None, None

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: Dims, recorded: Recorded, *both: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Dims]:
        return _mapped(AttentionAndTangent, info, in_dims[1:], recorded, (), both)


class Tangent(torch.autograd.Function):
    """The tangents of a call's output and log-sum-exp, which are given, with derivatives in plain torch.

    It takes these, the tensors of the call, and the tangents of q, k and v. It stands apart from the output so that
    what it saves is freed where the tangent is detached.
    """

    @staticmethod
    def forward(recorded: Recorded, dout: Tensor, dlse: Tensor, *both: Tensor | None) -> tuple[Tensor, Tensor]:
        return dout.view_as(dout), dlse.view_as(dlse)

    @staticmethod
    def setup_context(ctx: _TransformContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.recorded, _dout, _dlse, *both = inputs
        ctx.save_for_backward(*both)
        ctx.save_for_forward(*both)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _plain(
        ctx: _TransformContext, saved: Sequence[Tensor | None]
    ) -> tuple[Plain, list[int], list[Tensor], _Tensors]:
        """Return the call in plain torch, the places of what it is differentiated by, that, and the tangents."""
        tensors, directions = saved[:-3], tuple(saved[-3:])
        places = _differentiable(tensors)
        plain = Plain(ctx.recorded.given(tuple(tensors)), _names(ctx.recorded, places))
        return plain, places, [tensors[place] for place in places], directions

    @staticmethod
    def backward(ctx: _TransformContext, *above: Tensor | None) -> _Tensors:
        saved = ctx.saved_tensors
        nothing: list[Tensor | None] = [None] * len(saved)
        if all(one is None for one in above):
            return None, None, None, *nothing
        plain, places, inputs, directions = Tangent._plain(ctx, saved)
        *grads, dq, dk, dv = plain.gradients_of_tangents(inputs, directions, above)
        for place, gradient in zip(places, grads, strict=True):
            nothing[place] = gradient
        moved = [None if given is None else one for given, one in zip(directions, (dq, dk, dv), strict=True)]
        return None, None, None, *nothing[:-3], *moved

    @staticmethod
    def jvp(ctx: _TransformContext, *moved: Tensor | None) -> tuple[Tensor, Tensor]:
        with forward_ad._set_fwd_grad_enabled(True):
            plain, places, inputs, directions = Tangent._plain(ctx, _without_tangents(ctx.saved_tensors))
            own = moved[3:]
            return plain.moved_tangents(inputs, directions, [*(own[place] for place in places), *own[-3:]])

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: Dims, recorded: Recorded, *given: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Dims]:
        return _mapped(Tangent, info, in_dims[1:], recorded, given[:2], given[2:])


def _mapped(
    function: type[torch.autograd.Function], info: VmapInfo, dims: Dims, recorded: Recorded, before: _Tensors,
    both: _Tensors,
) -> tuple[tuple[Tensor, ...], Dims]:  # fmt: skip
    """Apply ``function`` to what is mapped over: ``before``, the tensors of a call, and the tangents of q, k and v."""
    size, count, given = _size_of(info), len(before), (*before, *both)
    axes = batch_axes(recorded, both[:-3], dims[count:-3])
    if axes is None:
        results = [function.apply(recorded, *_element(given, dims, i)) for i in range(size)]
        stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)
    folded = _folded(given, dims, [*(0,) * count, *axes, 0, 0, 0], size)
    results = function.apply(recorded, *folded)
    return tuple(_unfolded(each, 0, size) for each in results), (0,) * len(results)


def gradients(
    recorded: Recorded, needed: Sequence[bool], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
    tensors: Sequence[Tensor | None],
) -> _Tensors:  # fmt: skip
    """Return the gradient of each of a call's tensors, or None; they can be differentiated again."""
    if dout is None and dlse is None:
        return (None,) * len(tensors)
    leading: Sequence[Tensor] = tensors[:3]
    if any(tensor.element_size() == 1 for tensor in leading):
        raise CallError("attention in 8 bits has no derivative; differentiate a call in bf16, fp16 or float32")
    count = len(TENSORS)
    asked = tuple(name for name, wanted in zip(recorded.names, needed[count:], strict=True) if wanted)
    grads = Gradients.apply(recorded, asked, out, lse, dout, dlse, *tensors)
    by_name = dict(zip(asked, grads[3:], strict=True))
    first = [gradient if wanted else None for gradient, wanted in zip(grads[:3], needed, strict=False)]
    return (*first, *(None,) * (count - 3), *(by_name.get(name) for name in recorded.names))


class Gradients(torch.autograd.Function):
    """The gradients of q, k, v, and of the variant's tensors that are ``asked`` for, with rules of their own."""

    @staticmethod
    def forward(
        recorded: Recorded, asked: tuple[str, ...], out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        given = recorded.given(tensors)
        if recorded.differentiate is None:
            return reference_gradients(recorded.run, given, dout, dlse, asked)
        dq, dk, dv, own = recorded.differentiate(given, out, lse, dout, dlse, asked)
        return dq, dk, dv, *(own[name] for name in asked)

    @staticmethod
    def setup_context(ctx: _GradientContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.recorded, ctx.asked, out, lse, dout, dlse, *tensors = inputs
        ctx.absent = dout is None, dlse is None
        dout, dlse = (like if given is None else given for given, like in ((dout, out), (dlse, lse)))
        ctx.save_for_backward(dout, dlse, *tensors)
        ctx.save_for_forward(dout, dlse, *tensors)

    @staticmethod
    def _inputs(ctx: _GradientContext, saved: Sequence[Tensor]) -> tuple[Plain, list[int], list[Tensor], list[Tensor]]:
        """Return the call in plain torch, the places of what it is differentiated by, that, and what is above."""
        dout, dlse, *tensors = saved
        above = [torch.zeros_like(t) if absent else t for t, absent in zip((dout, dlse), ctx.absent, strict=True)]
        count, recorded = len(TENSORS), ctx.recorded
        places = [0, 1, 2, *(count + recorded.names.index(name) for name in ctx.asked)]
        plain = Plain(recorded.given(tuple(tensors)), ctx.asked)
        return plain, places, [tensors[place] for place in places], above

    @staticmethod
    def backward(ctx: _GradientContext, *cotangents: Tensor | None) -> _Tensors:
        plain, places, inputs, above = Gradients._inputs(ctx, ctx.saved_tensors)
        dout, dlse, *grads = plain.second(inputs, above, cotangents)
        own: list[Tensor | None] = [None] * (len(ctx.saved_tensors) - 2)
        for place, gradient in zip(places, grads, strict=True):
            own[place] = gradient
        first = [None if absent else t for t, absent in zip((dout, dlse), ctx.absent, strict=True)]
        return None, None, None, None, *first, *own

    @staticmethod
    def jvp(ctx: _GradientContext, *directions: Tensor | None) -> tuple[Tensor, ...]:
        with forward_ad._set_fwd_grad_enabled(True):
            plain, places, inputs, above = Gradients._inputs(ctx, _without_tangents(ctx.saved_tensors))
            moved, own = directions[4:6], directions[6:]
            return plain.moved_gradients(inputs, above, [*moved, *(own[place] for place in places)])

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: Dims, recorded: Recorded, asked: tuple[str, ...], *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Dims]:
        dims, size = in_dims[2:], _size_of(info)
        axes = batch_axes(recorded, tensors[4:], dims[4:])
        if axes is not None:
            shared = any(axes[len(TENSORS) + recorded.names.index(name)] is None for name in asked)
            axes = None if shared else axes
        if axes is None:
            grads = [Gradients.apply(recorded, asked, *_element(tensors, dims, i)) for i in range(size)]
            return tuple(torch.stack(each) for each in zip(*grads, strict=True)), (0,) * (3 + len(asked))
        every = [0, 0, 0, 0, *axes]
        grads = Gradients.apply(recorded, asked, *_folded(tensors, dims, every, size))
        own = (axes[len(TENSORS) + recorded.names.index(name)] for name in asked)
        places = [0, 0, 0, *(axis for axis in own if axis is not None)]
        return tuple(_unfolded(t, axis, size) for t, axis in zip(grads, places, strict=True)), tuple(places)


def _size_of(info: VmapInfo) -> int:
    """Return over how many calls ``vmap`` goes. Raises CallError for none, whose results nothing tells the shape of."""
    if not info.batch_size:
        raise CallError("vmap maps over an axis of size 0; allowed: at least 1")
    return int(info.batch_size)


def _unfolded(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Return a tensor whose ``axis`` is an axis of ``vmap`` and one of the call again, which may be empty."""
    return tensor.unflatten(axis, (size, tensor.shape[axis] // size))


def _without_tangents(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return tensors without the tangents that a rule is asked about. Those of jvps around it stay, which torch's own
    switch, off inside a rule, would lose without a word."""
    return [t if t is None else forward_ad.unpack_dual(t).primal for t in tensors]


def _differentiable(tensors: Sequence[Tensor]) -> list[int]:
    """Return the places of what a call may be differentiated by: q, k, v, and the variant's own floats."""
    own = range(len(TENSORS), len(tensors))
    return [0, 1, 2, *(place for place in own if tensors[place] is not None and tensors[place].is_floating_point())]


def _names(recorded: Recorded, places: Sequence[int]) -> list[str]:
    return [recorded.names[place - len(TENSORS)] for place in places if place >= len(TENSORS)]


# --- vmap ---------------------------------------------------------------------------------------------------


def batch_axes(recorded: Recorded, tensors: _Tensors, dims: Dims) -> list[int | None] | None:
    """Return along which axis of each tensor its sequences lie, None for none: what is mapped over joins that one.

    Returns None where a call for all elements would compute something else than one for each: packed sequences, scales,
    dropout, a variant that reads how many sequences there are, and an element with a tensor of its own in which all
    sequences share.
    """
    given = recorded.given(tensors)
    variant = given.variant if isinstance(given.variant, Variant) else find(given.variant, given.package).variant
    if given.form != "dense" or given.q_descale is not None or variant.dropout or not stand_alone(variant, SEQUENCES):
        return None
    shapes = {tensor.name: tensor.shape for tensor in variant.tensors}
    axes: list[int | None] = [0 if tensor is not None else None for tensor in tensors[: len(TENSORS)]]
    for name in recorded.names:
        shape = shapes.get(name, ())
        axes.append(shape.index("b") if "b" in shape else None)
    shared = any(dim is not None and axis is None for dim, axis in zip(dims, axes, strict=True))
    return None if shared else axes


def stand_alone(variant: Variant, them: BatchAxis) -> bool:
    """Whether a variant reads the number of a sequence, or of a head, only to index tensors that have something for
    each of them."""
    shapes = {tensor.name: tensor.shape for tensor in variant.tensors}
    index_of = {extent: Var(name, Type.INT) for name, extent in them.numbers.items()}

    def alone(node: Expr) -> bool:
        if isinstance(node, Var):
            return node.name not in them.numbers and node.name not in them.counts
        if isinstance(node, Load):
            return all(
                index == index_of[extent] if extent in index_of else alone(index)
                for index, extent in zip(node.indices, shapes[node.tensor], strict=True)
            )
        return all(alone(part) for part in node.args) if isinstance(node, Op) else True

    bounds = {bound for scalar in variant.scalars for bound in (scalar.min, scalar.max)}
    bounds |= {bound for tensor in variant.tensors for bound in (*(tensor.range or ()), *tensor.shape)}
    expressions = [each for each in (variant.mask, variant.score, variant.sink) if each is not None]
    return not bounds & them.counts and all(alone(each) for each in expressions)


def _element(tensors: Sequence[Tensor | None], dims: Dims, i: int) -> list[Tensor | None]:
    """Return the tensors of one element of what is mapped over."""
    return [t if t is None or dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True)]


def _folded(tensors: Sequence[Tensor | None], dims: Dims, axes: Sequence[int | None], size: int) -> list[Tensor | None]:
    """Return the tensors of all elements together: each with its sequences one element after the other."""
    results = []
    for tensor, dim, axis in zip(tensors, dims, axes, strict=True):
        if tensor is None or axis is None:
            results.append(tensor)
            continue
        if dim is None:
            whole = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], size, *tensor.shape[axis:])
        else:
            whole = tensor.movedim(dim, axis)
        folded = whole.flatten(axis, axis + 1)
        results.append(folded if folded.dim() < 2 or folded.stride(-1) == 1 else folded.contiguous())
    return results
