"""Calls that are differentiated: autograd keeps q, k, v, the output and its log-sum-exp, and the backward runs.

As with a forward, the first backward with some shapes checks everything, selects kernels and prepares their launches;
later ones find that in a cache, and those of calls that autograd differentiates are recognized by their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import BACKWARD, DLSE, DOUT, LSE, NO_BACKWARD, OUT, known_of
from attngen.runtime.arguments.checked import TORCH_DTYPES, Call, Results, view
from attngen.runtime.arguments.given import KEPT, OTHERS, TENSORS, Given, keyed_of, of_parts, settings_of
from attngen.runtime.arguments.keys import note_others
from attngen.runtime.arguments.kinds import INDEX_VECTORS
from attngen.runtime.arguments.lengths import lengths_of
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.autograd.transforms import Recorded, gradients
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.expanded import gets_copies, with_copies
from attngen.runtime.launch.gradients import differentiable, gradient_shapes, usable
from attngen.runtime.launch.prepared_backward import NOWHERE, Gradients, Places, PreparedBackward
from attngen.runtime.reference.sinks import add_gradients
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import bind_call, find
from attngen.runtime.registry.lookup import Resolved, registry
from attngen.runtime.registry.no_kernel import no_kernel
from attngen.runtime.registry.select import Request, first_that_fits

if TYPE_CHECKING:
    from typing import Protocol

    from attngen.runtime.autograd.context import Context

    class _TrainingContext(Context, Protocol):
        call: TrainedCall
        given: _WithoutTensors


#: A call without its tensors: numbers of its variant, and settings.
_WithoutTensors = tuple[Mapping[str, object], tuple[object, ...]]

#: What runs a call, the call, its addresses, and the call without its tensors.
_Recorded = tuple["TrainedCall", Given, list[int], _WithoutTensors]

#: Output and log-sum-exp, the tensors of the call and those of its variant, the gradients of the former, and a None.
_Record = tuple[Tensor | None, ...]

_PREPARED: RecentCache[PreparedBackward] = RecentCache(PREPARED_CALLS)

#: Backward passes that a call recognizes, in effect one for each layout of the output's gradient. Not measured: a bound
#: of memory.
_BACKWARDS = 16

#: Variants of calls with their largest logits, as the calls name them, and the same without.
_OF_BACKWARD: RecentCache[tuple[str | Variant, Variant]] = RecentCache(PREPARED_CALLS)


class TrainedCall:
    """A prepared call that autograd differentiates, and the prepared backward passes of such calls.

    Called as a ``PreparedCall``. A backward is recognized by its tensors, as a forward is: an earlier one had the same,
    but for their places in memory.
    """

    __slots__ = ("_backwards", "_forward", "names")

    def __init__(self, forward: Callable[[Given, list[int]], Results], names: tuple[str, ...]) -> None:
        """``forward`` gives the output and its log-sum-exp, and is called as a ``PreparedCall``. ``names``: of the
        variant's own tensors."""
        self._forward, self.names = forward, names
        #: By what decides a backward beside its tensors. False: its tensors cannot be recognized.
        self._backwards: RecentCache[tuple[SeenTensors, PreparedBackward] | Literal[False]] = RecentCache(_BACKWARDS)

    def __call__(self, given: Given, addresses: list[int], sized: object = None, repeats: object = None) -> Results:
        """Run a call such that autograd can differentiate it. It is repeated by no other launch, and has one size."""
        names, numbers = self.names, given.arguments
        own: Sequence[Tensor] = ()
        if names:
            own = [numbers[name] for name in names]
            numbers = {name: value for name, value in numbers.items() if name not in names}
        recorded = self, given, addresses, (numbers, settings_of(given))
        result: Results = _apply(recorded, given.q, given.k, given.v, *own)
        return result

    def run(self, given: Given, addresses: list[int]) -> tuple[Tensor, Tensor]:
        """Run a call and return its output and its log-sum-exp, which autograd does not see."""
        out, lse = self._forward(given, addresses)
        return out, lse

    def recalled(self, key: tuple[object, ...], record: _Record) -> tuple[PreparedBackward, list[int]] | None:
        """The prepared backward of an earlier call like this one, and the addresses of this one's tensors; or None."""
        alike = self._backwards[key]
        if not alike:
            return None
        addresses = alike[0].addresses(record)
        return None if addresses is None else (alike[1], addresses)

    def note(self, key: tuple[object, ...], record: _Record, prepared: PreparedBackward) -> None:
        """Remember the first backward of a key."""
        if self._backwards[key] is not None:
            return
        absent, kept = len(record) - 1, len(record) - 5 - len(self.names)
        fields = [absent] * len(BACKWARD)
        fields[:kept] = range(2, 2 + kept)
        fields[OUT], fields[LSE], fields[DOUT], fields[DLSE] = 0, 1, absent - 2, absent - 1
        fields += range(2 + kept, absent - 2)
        noted = seen(record, (), fields, len(fields), INDEX_VECTORS, {})
        self._backwards.put(key, False if noted is None else (noted, prepared))


class _Attention(torch.autograd.Function):
    """Attention and its gradients, each by a kernel."""

    @staticmethod
    def forward(
        ctx: _TrainingContext, recorded: _Recorded, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``recorded`` is what a ``TrainedCall`` makes of a call; autograd sees the tensors that follow it."""
        ctx.call, given, addresses, ctx.given = recorded  # the last holds no tensors: autograd keeps those
        out, lse = ctx.call.run(given, addresses)
        ctx.save_for_backward(out, lse, q, k, v, *OTHERS[given.form](given), *own)
        ctx.set_materialize_grads(False)
        return (out, lse) if given.return_lse else out

    @staticmethod
    def backward(ctx: _TrainingContext, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return (_differentiable_again if torch.is_grad_enabled() else _backward)(ctx, dout, dlse)


#: ``_Attention.apply`` without what it does for functorch, which takes as long as a fifth of a call; calls under its
#: transforms go elsewhere.
_apply = super(torch.autograd.Function, _Attention).apply


def _backward(ctx: _TrainingContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what ``_Attention.forward`` took."""
    wanted = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(wanted)
    call, (arguments, settings), saved = ctx.call, ctx.given, ctx.saved_tensors
    names = call.names
    own = len(saved) - len(names)  # where the variant's own tensors begin
    asked: tuple[str, ...] = ()
    if names:
        arguments = {**arguments, **dict(zip(names, saved[own:], strict=True))}
        asked = tuple([name for name, needed in zip(names, wanted[4:], strict=True) if needed])
    given = of_parts((*saved[2:own], *_ABSENT[own - 2 :]), arguments, settings)
    record = (*saved, dout, dlse, None)
    key = (
        asked, None if dout is None else dout.stride(), dlse is None, asks_for_determinism(),
        lengths_of(given.cu_seqlens_k),
    )  # fmt: skip
    recalled = call.recalled(key, record)
    if recalled is not None and dout is not None:
        prepared, addresses = recalled
        prepared.warn()
        dq, dk, dv, gradients = prepared(given, saved[1], dout, addresses)
    else:

        def note(prepared: PreparedBackward) -> None:
            call.note(key, record, prepared)

        dq, dk, dv, gradients = differentiate(given, saved[0], saved[1], dout, dlse, asked, note=note)
    _, q_wanted, k_wanted, v_wanted, *_ = wanted
    return (
        None,
        dq if q_wanted else None,
        dk if k_wanted else None,
        dv if v_wanted else None,
        *[gradients[name] if name in asked else None for name in names],
    )


#: What stands for tensors that a call of its form does not have.
_ABSENT = (None,) * len(TENSORS)


def _differentiable_again(ctx: _TrainingContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the same gradients, of which plain torch gives derivatives."""
    (numbers, settings), names = ctx.given, ctx.call.names
    out, lse, *tensors = ctx.saved_tensors
    own = len(tensors) - len(names)
    every = (*tensors[:own], *[None] * (len(TENSORS) - own), *tensors[own:])
    recorded = Recorded(_never, differentiate, names, numbers, settings)
    wanted = ctx.needs_input_grad
    needed = (*wanted[1:4], *[False] * (len(TENSORS) - 3), *wanted[4:])
    grads = gradients(recorded, needed, out, lse, dout, dlse, every)
    return None, *grads[:3], *grads[len(TENSORS) :]


def _never(given: Given) -> Results:
    raise AssertionError("a gradient runs no forward")


def differentiate(
    given: Given, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, asked: tuple[str, ...],
    into: Places = NOWHERE, note: Callable[[PreparedBackward], None] | None = None,
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv and the gradients of the variant's declared tensors; ``asked`` names those that are needed.

    ``out`` and ``lse`` are what the forward gave, ``dout`` and ``dlse`` their gradients, None for none. A kernel stores
    dq, dk and dv ``into`` the tensors that are given for them, whose rows begin at multiples of 16 bytes (``usable``).
    ``note`` is called with the prepared backward, unless tensors had to be copied for it.
    Raises NoKernelError, which lists every candidate and its reason, if no backward is built that takes the call, and
    CallError for a gradient that the spec does not declare or that is not deterministic where that is asked for.
    """
    as_given = dout, dlse
    if lse.dim() == out.dim():
        given, lse, dlse = _without_max_logits(given, lse, dlse)
        note = None
    q, k, v, variant = given.q, given.k, given.v, given.variant
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()  # a sign that is not in memory yet
    dlse = None if dlse is None else dlse.resolve_neg().to(torch.float32).contiguous()
    determinism = 2 if given.deterministic else asks_for_determinism()
    addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), *NO_BACKWARD]
    addresses[OUT], addresses[LSE], addresses[DOUT] = out.data_ptr(), lse.data_ptr(), dout.data_ptr()
    if dlse is not None:
        addresses[DLSE] = dlse.data_ptr()
    lengths = lengths_of(given.cu_seqlens_k)
    # The cache's key: everything that checks, selection and the packed templates depend on. The forward saw to it that
    # all tensors are on one device, and q, k and v of one dtype; the shape of out and dout follows from theirs.
    key: list[object] = [
        variant if isinstance(variant, str) else id(variant), registry.generation, dlse is None, determinism, asked,
        *keyed_of(given), q.dtype, q.get_device(),
        q.shape, q.stride(), addresses[0] & 15,
        k.shape, k.stride(), addresses[1] & 15,
        v.shape, v.stride(), addresses[2] & 15,
        out.stride(), addresses[OUT] & 15,
        dout.stride(), addresses[DOUT] & 15,
        *[None if place is None else place.stride() for place in into],
        lengths,
    ]  # fmt: skip
    note_others(key, addresses, given)
    identity = tuple(key)
    prepared = _PREPARED[identity]
    if prepared is None:
        call, resolved = bind_call(given._replace(return_lse=KEPT, out=None))
        call.lengths = lengths
        unordered = _unordered(call, asked, determinism)
        if call.empty:
            return _nothing(call, lse, dlse)
        names = tuple(name for name, value in given.arguments.items() if isinstance(value, Tensor))
        request = Request(
            call, call.device.index or 0, known_of(names, addresses), dict(call.scalars), direction="backward",
            deterministic=determinism == 2,
        )  # fmt: skip
        if gets_copies(request, resolved.kernels, drivers.current()):
            return differentiate(with_copies(given), out, lse, dout, dlse, asked, into)
        prepared = _prepare(request, resolved, given, names, out, dout, into, dlse is not None, unordered)
        _PREPARED.put(identity, prepared)
    prepared.warn()
    if note is not None and dout is as_given[0] and dlse is as_given[1]:
        note(prepared)
    return prepared(given, lse, dout, addresses, into)


def _without_max_logits(given: Given, lse: Tensor, dlse: Tensor | None) -> tuple[Given, Tensor, Tensor | None]:
    """A call without the largest logits, whose backward is that of the call with them: they have no gradient."""
    return of_backward(given), lse[..., 0], None if dlse is None else dlse[..., 0]


def of_backward(given: Given) -> Given:
    """The call whose backward kernels a call has: one that may give its largest logits has those of one that does
    not."""
    key = given.variant if isinstance(given.variant, str) else id(given.variant), given.package, registry.generation
    known = _OF_BACKWARD[key]
    if known is None:
        variant = find(given.variant, given.package).variant
        known = given.variant, variant.without_max_logits()
        _OF_BACKWARD.put(key, known)
    return given._replace(variant=known[1])


def asks_for_determinism() -> int:
    """Determinism that the program asks for: 0 no, 1 warn, 2 yes."""
    if not torch.are_deterministic_algorithms_enabled():
        return 0
    return 1 if torch.is_deterministic_algorithms_warn_only_enabled() else 2


def carries_tangent(*tensors: object) -> bool:
    """Whether one of these has a tangent of forward-mode differentiation."""
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _prepare(
    request: Request,
    resolved: Resolved,
    given: Given,
    names: Sequence[str],
    out: Tensor,
    dout: Tensor,
    into: Places,
    dlse: bool,
    unordered: str | None,
) -> PreparedBackward:
    """Select the kernels of a backward and prepare their launches."""
    call, driver = request.call, drivers.current()
    variant, package = given.variant, given.package
    kernel = first_that_fits(resolved.kernels, request, driver)
    if kernel is None and registry.refresh_if_built():
        resolved = find(variant, package)
        kernel = first_that_fits(resolved.kernels, request, driver)
    if kernel is None and package is None and on_demand.make(request):
        resolved = find(variant, package)
        kernel = first_that_fits(resolved.kernels, request, driver)
    if kernel is None:
        raise _without_backward(no_kernel(resolved.kernels, request, driver))
    on_demand.note(request)
    kept = variant if isinstance(variant, Variant) else None
    return PreparedBackward(
        kernel, call, names, view(out.shape, out.stride(), call.order),
        view(dout.shape, dout.stride(), call.order) if usable(dout) else None, driver, request.device,
        into=[None if place is None else view(place.shape, place.stride(), call.order) for place in into], dlse=dlse,
        unordered=unordered, kept=kept,
    )  # fmt: skip


def _nothing(call: Call, lse: Tensor, dlse: Tensor | None) -> Gradients:
    """Return the gradients of a call without work; a log-sum-exp of sinks alone passes its own on."""
    dtype = TORCH_DTYPES[call.dtype]
    dq, dk, dv = (torch.zeros(shape, dtype=dtype, device=call.device) for shape in gradient_shapes(call).values())
    gradients = {
        name: torch.zeros(call.tensors[name].shape, dtype=torch.float32, device=call.device)
        for name in differentiable(call)
    }
    if dlse is not None and dlse.numel():
        add_gradients(call, lse, -dlse, gradients)
    return dq, dk, dv, {name: gradient.to(call.tensors[name].dtype) for name, gradient in gradients.items()}


def _unordered(call: Call, asked: Sequence[str], determinism: int) -> str | None:
    """Return the warning about a gradient whose sum has no fixed order, where one was asked for.

    Raises CallError for a gradient that the spec does not declare, and where a fixed order is a must.
    """
    declared = differentiable(call)
    for name in asked:
        if name not in declared:
            raise CallError(
                f"{call.variant.name}: tensor '{name}' requires a gradient that its spec does not declare; "
                "add 'grad: true' to the spec, or detach the tensor"
            )
    scored = call.variant.uses(call.variant.score)[1] if call.variant.score is not None else frozenset()
    unordered = [name for name in asked if name in scored]
    if not unordered or not determinism:
        return None
    message = (
        f"{call.variant.name}: the gradient of tensor '{unordered[0]}' is accumulated in no fixed order, and the "
        "call, or torch.use_deterministic_algorithms(True), requires one; detach it, or use backend='reference'"
    )
    if determinism == 2:
        raise CallError(message)
    return message


def _without_backward(error: NoKernelError) -> NoKernelError:
    return NoKernelError(
        f"{error}\nbackend='reference' is differentiable, and slow; under torch.no_grad() no backward is needed"
    )
