"""Calls that are differentiated: autograd keeps q, k, v, the output and its log-sum-exp, and the backward runs.

As with a forward, the first backward with some shapes checks everything, selects kernels and prepares their launches;
later ones find that in a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime import driver as drivers
from attngen.runtime import on_demand
from attngen.runtime.addresses import BACKWARD, CU_SEQLENS_K, CU_SEQLENS_Q, DLSE, DOUT, SEQUSED_K, empty
from attngen.runtime.arguments import Call, view
from attngen.runtime.binding import bind_call, find
from attngen.runtime.cache import RecentCache
from attngen.runtime.gradients import differentiable, gradient_shapes
from attngen.runtime.prepared import PREPARED_CALLS
from attngen.runtime.prepared_backward import Gradients, PreparedBackward
from attngen.runtime.registry import Found, registry
from attngen.runtime.select import Request, no_kernel, select
from attngen.runtime.sinks import add_gradients
from attngen.runtime.tile_map import TileMap

_PREPARED: RecentCache[PreparedBackward] = RecentCache(PREPARED_CALLS)


#: What a call says beside its tensors: variant, softmax_scale, layout, package, max_seqlen_q and max_seqlen_k of a
#: packed call, scalars, the names of the variant's own tensors, and whether gradients have a fixed order. A plain
#: tuple, since each call makes one, and a named one takes six times as long.
Settings = tuple[
    str | Variant, Any, str, str | None, tuple[int, int] | None, Mapping[str, Any], tuple[str, ...], bool
]  # fmt: skip


def attend(
    forward: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    addresses: list[int],
    packing: tuple[Any, Any, Any, Any] | None,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Tensor | None,
    return_lse: bool,
    layout: str,
    package: str | None,
    arguments: Mapping[str, Any],
    tile_map: TileMap | None,
    deterministic: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call such that autograd can differentiate it.

    ``forward`` gives its output and its log-sum-exp, and is called as a ``PreparedCall``. The other arguments are those
    of ``dispatch.run``.
    """
    names: tuple[str, ...] = ()
    own: Sequence[Tensor] = ()
    scalars = arguments
    if arguments:
        names = tuple(name for name, value in arguments.items() if isinstance(value, Tensor))
        own = [arguments[name] for name in names]
        scalars = {name: value for name, value in arguments.items() if name not in names}
    lengths = None if packing is None else packing[2:]
    settings: Settings = (variant, softmax_scale, layout, package, lengths, scalars, names, deterministic)
    given = (addresses, softmax_scale, arguments, tile_map)
    apply = _Attention.apply if torch._C._are_functorch_transforms_active() else _apply
    result: Tensor | tuple[Tensor, Tensor] = apply(
        (forward, given, return_lse, packing, seqused_k, settings), q, k, v, *own
    )
    return result


class _Attention(torch.autograd.Function):
    """Attention and its gradients, each by a kernel."""

    @staticmethod
    def forward(
        ctx: Any, recorded: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``recorded`` is what ``attend`` makes of a call; autograd sees the tensors that follow it."""
        forward, given, return_lse, packing, seqused_k, ctx.settings = recorded
        out, lse = forward(q, *given)
        if packing is None:
            ctx.save_for_backward(seqused_k, q, k, v, out, lse, *own)
        else:
            ctx.save_for_backward(seqused_k, q, k, v, out, lse, *own, packing[0], packing[1])
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        # as once_differentiable, without its cost where nobody asks for a second derivative
        return (_refusing_another if torch.is_grad_enabled() else _backward)(ctx, dout, dlse)


#: ``_Attention.apply`` without what it does for functorch, which takes as long as a fifth of a call.
_apply = super(torch.autograd.Function, _Attention).apply


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what ``_Attention.forward`` took."""
    wanted = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(wanted)
    settings: Settings = ctx.settings
    _, _, _, _, lengths, _, names, _ = settings
    seqused_k, q, k, v, out, lse, *own = ctx.saved_tensors
    packing = None
    if lengths is not None:
        *own, cu_seqlens_q, cu_seqlens_k = own
        packing = (cu_seqlens_q, cu_seqlens_k, *lengths)
    asked = tuple(name for name, needed in zip(names, wanted[4:], strict=True) if needed) if own else ()
    dq, dk, dv, gradients = differentiate(q, k, v, out, lse, dout, dlse, packing, seqused_k, settings, own, asked)
    _, q_wanted, k_wanted, v_wanted, *_ = wanted
    return (
        None,
        dq if q_wanted else None,
        dk if k_wanted else None,
        dv if v_wanted else None,
        *[gradients[name] if name in asked else None for name in names],
    )


_refusing_another = once_differentiable(_backward)


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    packing: tuple[Any, Any, Any, Any] | None,
    seqused_k: Tensor | None,
    settings: Settings,
    own: Sequence[Tensor],
    asked: tuple[str, ...],
) -> Gradients:
    """Return dq, dk, dv and the gradients of the variant's declared tensors; ``asked`` names those that are needed.

    ``own`` are the variant's tensors in the order of ``settings.names``; ``out`` and ``lse`` are what the forward gave,
    ``dout`` and ``dlse`` their gradients, None for none. Raises NoKernelError, which lists every candidate and its
    reason, if no backward is built that takes the call, and CallError for a gradient that the spec does not declare or
    that is not deterministic where that is asked for.
    """
    variant, softmax_scale, layout, package, lengths, scalars, names, deterministic = settings
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    determinism = 2 if deterministic else asks_for_determinism()
    # 0 for what is absent, or allocated later
    addresses = empty(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), backward=True)
    addresses[DOUT] = dout.data_ptr()
    # The cache's key: everything that checks, selection and the packed templates depend on. The forward saw to it that
    # all tensors are on one device, and q, k and v of one dtype; the shape of out and dout follows from theirs.
    key: list[Any] = [
        variant if isinstance(variant, str) else id(variant), package, layout, lengths, registry.generation,
        dlse is None, seqused_k is None, determinism, asked, names, *scalars, q.dtype, q.get_device(),
        q.shape, q.stride(), addresses[0] & 15,
        k.shape, k.stride(), addresses[1] & 15,
        v.shape, v.stride(), addresses[2] & 15,
        out.stride(), addresses[3] & 15,
        dout.stride(), addresses[DOUT] & 15,
    ]  # fmt: skip
    cu_seqlens_q = None
    if packing is not None:
        cu_seqlens_q = packing[0]
        key.append(cu_seqlens_q.shape)
        addresses[CU_SEQLENS_Q], addresses[CU_SEQLENS_K] = cu_seqlens_q.data_ptr(), packing[1].data_ptr()
    if seqused_k is not None:
        addresses[SEQUSED_K] = seqused_k.data_ptr()
    if dlse is not None:
        addresses[DLSE] = dlse.data_ptr()
    for tensor in own:
        address = tensor.data_ptr()
        key += (tensor.dtype, tensor.shape, tensor.stride(), address & 15)
        addresses.append(address)
    tensors = dict(zip(names, own, strict=True)) if own else {}
    identity = tuple(key)
    prepared = _PREPARED[identity]
    if prepared is None:
        call, found = bind_call(
            q, k, v, packing, variant, softmax_scale, seqused_k, True, layout, None, package, {**scalars, **tensors}
        )
        unordered = _unordered(call, asked, determinism)
        if call.empty:
            return _nothing(call, lse, dlse)
        request = Request(
            call, call.device.index or 0, _known(names, addresses), dict(call.scalars), direction="backward",
            deterministic=determinism == 2,
        )  # fmt: skip
        prepared = _prepare(request, found, variant, package, tensors, out, dout, dlse is not None, unordered)
        _PREPARED.put(identity, prepared)
    if prepared.unordered is not None:
        warnings.warn(prepared.unordered, UserWarning, stacklevel=2)
    return prepared(q, k, v, lse, dout, cu_seqlens_q, addresses, softmax_scale, scalars, tensors)


def asks_for_determinism() -> int:
    """Return whether each result must have the same bits on every run: 0 no, 1 warn, 2 yes."""
    if not torch.are_deterministic_algorithms_enabled():
        return 0
    return 1 if torch.is_deterministic_algorithms_warn_only_enabled() else 2


def carries_tangent(*tensors: Any) -> bool:
    """Whether one of these has a tangent of forward-mode differentiation, which no kernel computes with."""
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _known(names: Sequence[str], addresses: Sequence[int]) -> dict[str, int]:
    """Return the addresses that selection looks at, of those that ``differentiate`` lists."""
    known = dict(zip(BACKWARD[:4], addresses, strict=False))
    return known | {f"tensor:{name}": address for name, address in zip(names, addresses[len(BACKWARD) :], strict=True)}


def _prepare(
    request: Request,
    found: Found,
    variant: str | Variant,
    package: str | None,
    tensors: Mapping[str, Tensor],
    out: Tensor,
    dout: Tensor,
    dlse: bool,
    unordered: str | None,
) -> PreparedBackward:
    """Select the kernels of a backward and prepare their launches."""
    call, driver = request.call, drivers.current()
    selection = select(found.kernels, request, driver)
    if selection.kernel is None and registry.refresh_if_built():
        found = find(variant, package)
        selection = select(found.kernels, request, driver)
    if selection.kernel is None and package is None and on_demand.make(request):
        found = find(variant, package)
        selection = select(found.kernels, request, driver)
    if selection.kernel is None:
        raise _without_backward(no_kernel(found.kernels, selection, request, driver))
    on_demand.note(request)
    kept = variant if isinstance(variant, Variant) else None
    return PreparedBackward(
        selection.kernel, call, tensors, view(out.shape, out.stride(), call.order),
        view(dout.shape, dout.stride(), call.order) if _usable(dout) else None, driver, request.device, dlse=dlse,
        unordered=unordered, kept=kept,
    )  # fmt: skip


def _usable(dout: Tensor) -> bool:
    """Whether kernels take a gradient as it is: what autograd hands over may be expanded or start anywhere."""
    size = dout.element_size()
    stepped = [stride for extent, stride in zip(dout.shape[:-1], dout.stride()[:-1], strict=True) if extent > 1]
    usable = all(stride and stride * size % 16 == 0 for stride in stepped) and dout.data_ptr() % 16 == 0
    return usable and dout.stride(-1) == 1


def _nothing(call: Call, lse: Tensor, dlse: Tensor | None) -> Gradients:
    """Return the gradients of a call without work; a log-sum-exp of sinks alone passes its own on."""
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[call.dtype])
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
                f"{call.variant.name}: tensor '{name}' asks for a gradient that its spec does not declare "
                "(grad: true); detach it"
            )
    scored = call.variant.uses(call.variant.score)[1] if call.variant.score is not None else frozenset()
    unordered = [name for name in asked if name in scored]
    if not unordered or not determinism:
        return None
    message = (
        f"{call.variant.name}: the gradient of tensor '{unordered[0]}' is added up in no fixed order, and the "
        "call, or torch.use_deterministic_algorithms(True), asks for one; detach it, or use backend='reference'"
    )
    if determinism == 2:
        raise CallError(message)
    return message


def _without_backward(error: NoKernelError) -> NoKernelError:
    return NoKernelError(
        f"{error}\nbackend='reference' differentiates, slowly, and torch.no_grad() tells that no gradient is wanted"
    )
