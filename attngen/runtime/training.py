"""Calls that are differentiated: autograd keeps q, k, v, the output and its log-sum-exp, and the backward runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime import dispatch
from attngen.runtime import driver as drivers
from attngen.runtime.arguments import Call
from attngen.runtime.cache import RecentCache
from attngen.runtime.gradients import (
    PreparedGradients,
    allocate,
    differentiable,
    gradient_shapes,
    view_of,
)
from attngen.runtime.registry import registry
from attngen.runtime.select import Request, no_kernel, select
from attngen.runtime.sinks import add_gradients
from attngen.runtime.tile_map import TileMap

_PREPARED: RecentCache[PreparedGradients] = RecentCache(dispatch.PREPARED_CALLS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a call says beside its tensors."""

    variant: str | Variant
    softmax_scale: Any
    layout: str
    backend: str | None
    package: str | None
    lengths: tuple[int, int] | None  # max_seqlen_q and max_seqlen_k of a packed call
    scalars: Mapping[str, Any]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, Any, Any, Any] | None,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Tensor | None,
    return_lse: bool,
    layout: str,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
    tile_map: TileMap | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call such that autograd can differentiate it. Arguments as those of ``dispatch.run``."""
    own = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in arguments.items() if name not in own}
    lengths = None if packing is None else packing[2:]
    settings = Settings(variant, softmax_scale, layout, backend, package, lengths, scalars)
    offsets = (None, None) if packing is None else packing[:2]
    out, lse = _Attention.apply(settings, tile_map, tuple(own), *offsets, seqused_k, q, k, v, *own.values())
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """Attention and its gradients, each by a kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        tile_map: TileMap | None,
        names: tuple[str, ...],
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *own: Tensor,
    ) -> tuple[Tensor, Tensor]:
        packing = None if settings.lengths is None else (cu_seqlens_q, cu_seqlens_k, *settings.lengths)
        out, lse = dispatch.run(
            q, k, v, packing, settings.variant, settings.softmax_scale, seqused_k, True, settings.layout,
            settings.backend, settings.package, {**settings.scalars, **dict(zip(names, own, strict=True))}, tile_map,
        )  # fmt: skip
        ctx.settings, ctx.names = settings, names
        ctx.save_for_backward(cu_seqlens_q, cu_seqlens_k, seqused_k, out, lse, q, k, v, *own)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * 6
        wanted = ctx.needs_input_grad[len(nothing) :]
        if dout is None and dlse is None:
            return (*nothing, *(None for _ in wanted))
        cu_seqlens_q, cu_seqlens_k, seqused_k, out, lse, q, k, v, *own = ctx.saved_tensors
        settings: Settings = ctx.settings
        packing = None if settings.lengths is None else (cu_seqlens_q, cu_seqlens_k, *settings.lengths)
        tensors = dict(zip(ctx.names, own, strict=True))
        asked = tuple(name for name, needed in zip(ctx.names, wanted[3:], strict=True) if needed)
        dq, dk, dv, gradients = differentiate(
            q, k, v, out, lse, dout, dlse, packing, seqused_k, settings, tensors, asked
        )
        found = (dq, dk, dv, *(gradients.get(name) for name in ctx.names))
        return (*nothing, *(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True)))


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
    tensors: Mapping[str, Tensor],
    asked: Sequence[str],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return dq, dk, dv and the gradients of the variant's declared tensors; ``asked`` names those that are needed.

    ``out`` and ``lse`` are what the forward gave, ``dout`` and ``dlse`` their gradients, None for none. Raises
    NoKernelError, which lists every candidate and its reason, if no backward is built that takes the call, and
    CallError for a gradient that the spec does not declare or that is not deterministic where that is asked for.
    """
    arguments = {**settings.scalars, **tensors}
    call, found = dispatch.bind_call(
        q, k, v, packing, settings.variant, settings.softmax_scale, seqused_k, True, settings.layout, None,
        settings.package, arguments,
    )  # fmt: skip
    _check_asked(call, asked)
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    if call.empty:
        return _nothing(call, lse, dlse)
    dout = torch.zeros_like(out) if dout is None else _aligned(dout)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    key = _key(settings, given, dlse, packing, seqused_k, tensors)
    prepared = _PREPARED.get(key)
    views = {name: view_of(given[name], call) for name in ("out", "dout")}
    if prepared is None:
        request = Request(
            call, _index(q), _addresses(given, tensors), dict(call.scalars), direction="backward",
            deterministic=_deterministic(),
        )  # fmt: skip
        driver = drivers.current()
        selection = select(found.kernels, request, driver)
        if selection.kernel is None and registry.refresh_if_built():
            found = dispatch.find(settings.variant, settings.package)
            selection = select(found.kernels, request, driver)
        if selection.kernel is None:
            raise _without_backward(no_kernel(found.kernels, selection, request, driver))
        shapes = gradient_shapes(call)
        views |= {name: view_of(torch.empty(shape, device="meta"), call) for name, shape in shapes.items()}
        prepared = PreparedGradients(selection.kernel, call, views, driver, _index(q), dlse=dlse is not None)
        _PREPARED.put(key, prepared)
    buffers = allocate(call, given, prepared.map_shapes, dlse, prepared.sums)
    prepared(call, buffers, call.scale, [call.scalars[rule.name] for rule in call.rules])
    return buffers.dq, buffers.dk, buffers.dv, _cast(call, buffers.gradients)


def _deterministic() -> bool:
    """Whether each result must have the same bits on every run."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _index(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _cast(call: Call, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.to(call.tensors[name].dtype) for name, gradient in gradients.items()}


def _nothing(call: Call, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return the gradients of a call without work; a log-sum-exp of sinks alone passes its own on."""
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[call.dtype])
    dq, dk, dv = (torch.zeros(shape, dtype=dtype, device=call.device) for shape in gradient_shapes(call).values())
    gradients = {
        name: torch.zeros(call.tensors[name].shape, dtype=torch.float32, device=call.device)
        for name in differentiable(call)
    }
    if dlse is not None and dlse.numel():
        add_gradients(call, lse, -dlse, gradients)
    return dq, dk, dv, _cast(call, gradients)


def _check_asked(call: Call, asked: Sequence[str]) -> None:
    """Refuse a gradient that the spec does not declare, and one whose sum has no fixed order where that matters."""
    declared = differentiable(call)
    for name in asked:
        if name not in declared:
            raise CallError(
                f"{call.variant.name}: tensor '{name}' asks for a gradient that its spec does not declare "
                "(grad: true); detach it"
            )
    scored = call.variant.uses(call.variant.score)[1] if call.variant.score is not None else frozenset()
    unordered = [name for name in asked if name in scored]
    if not unordered or not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        f"{call.variant.name}: the gradient of tensor '{unordered[0]}' is added up in no fixed order, and "
        "torch.use_deterministic_algorithms(True) asks for one; detach it, or use backend='reference'"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise CallError(message)
    warnings.warn(message, UserWarning, stacklevel=2)


def _without_backward(error: NoKernelError) -> NoKernelError:
    return NoKernelError(
        f"{error}\nbackend='reference' differentiates, slowly, and torch.no_grad() tells that no gradient is wanted"
    )


def _aligned(dout: Tensor) -> Tensor:
    """Return a gradient as kernels take it: what autograd hands over may be expanded or start anywhere."""
    size = dout.element_size()
    stepped = [stride for extent, stride in zip(dout.shape[:-1], dout.stride()[:-1], strict=True) if extent > 1]
    usable = all(stride and stride * size % 16 == 0 for stride in stepped) and dout.data_ptr() % 16 == 0
    return dout if usable and dout.stride(-1) == 1 else dout.clone(memory_format=torch.contiguous_format)


def _addresses(given: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    own = {f"tensor:{name}": tensor.data_ptr() for name, tensor in tensors.items()}
    return {name: tensor.data_ptr() for name, tensor in given.items()} | own


def _key(
    settings: Settings,
    given: Mapping[str, Tensor],
    dlse: Tensor | None,
    packing: tuple[Any, Any, Any, Any] | None,
    seqused_k: Tensor | None,
    tensors: Mapping[str, Tensor],
) -> tuple[Any, ...]:
    """Return everything that selection and the packed templates depend on."""
    parts: list[Any] = [
        settings.variant if isinstance(settings.variant, str) else id(settings.variant), settings.package,
        settings.layout, settings.lengths, registry.generation, dlse is None, packing is None, seqused_k is None,
        tuple(settings.scalars), _deterministic(),
    ]  # fmt: skip
    if packing is not None:
        parts.append(packing[0].shape)
    for name, tensor in (*given.items(), *tensors.items()):
        parts += (name, tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.data_ptr() & 15)
    return tuple(parts)
