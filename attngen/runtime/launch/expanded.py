"""Tensors that TMA descriptors cannot express: q, k and v that are expanded (axes of stride 0), and biases whose rows
begin elsewhere than at multiples of 16 bytes.

k and v whose heads are all one head are attention with one KV head (MQA), and kernels get that head. Any other such
tensor is copied, unless a kernel takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attngen.lang.biases import biases
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call, Results, View, contiguous_view
from attngen.runtime.arguments.given import Given
from attngen.runtime.device.interface import Driver
from attngen.runtime.device.tensormap import STRIDE_ALIGNMENT
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.select import Request, against_own_map, first_that_fits

#: Names that tell KV heads apart in expressions, and extents that count them.
_OF_KV_HEADS = frozenset({"hk", "kv_heads"})

#: The axis of heads, by the order of the axes of a call.
_HEADS = {"bshd": 2, "bhsd": 1, "varlen": 1, "NHD": 2, "HND": 1}

_NAMES = ("q", "k", "v")


def are_one_head(call: Call) -> bool:
    """Whether k and v repeat one head, and nothing else of a call tells KV heads apart."""
    if call.kv_heads < 2 or call.k.stride("h") or call.v.stride("h"):
        return False
    return not call.descales and not _reads_kv_heads(call.variant)


def need_copies(call: Call) -> bool:
    """Whether q, k or v is expanded along any axis, or a bias has no descriptor. Caches in pages are never copied."""
    if call.layout == "paged":
        return False
    return any(_expanded(getattr(call, name)) for name in _NAMES) or bool(_odd_biases(call.variant, call.tensors))


def what_is_copied(call: Call) -> str:
    """The sentence of an explanation about a call that gets copies."""
    said = ["what is expanded of q, k and v is copied first"] if any(map(_expanded, (call.q, call.k, call.v))) else []
    for name in _odd_biases(call.variant, call.tensors):
        said.append(f"'{name}' is copied first: its rows do not begin at multiples of {STRIDE_ALIGNMENT} bytes each")
    return "; ".join(said)


def _odd_biases(variant: Variant, tensors: Mapping[str, Tensor]) -> list[str]:
    """The biases that have no descriptor as they are."""
    names = dict.fromkeys(load.tensor for load in biases(variant))
    given = ((name, tensors[name]) for name in names)
    return [
        name for name, tensor in given
        if tensor.numel() and against_own_map(name, tensor, 0 if tensor.is_meta else tensor.data_ptr())
    ]  # fmt: skip


def _expanded(view: View) -> bool:
    return any(size > 1 and not stride for size, stride in zip(view.shape, view.strides, strict=True))


def gets_copies(request: Request, kernels: Sequence[Kernel], driver: Driver) -> bool:
    """Whether no kernel takes a call as it is, and one does with copies of what is expanded, or may be made for it."""
    if not need_copies(request.call) or first_that_fits(kernels, request, driver) is not None:
        return False
    return on_demand.maker is not None or first_that_fits(kernels, _copied_request(request), driver) is not None


def request_without_expanded(request: Request, kernels: Sequence[Kernel], driver: Driver) -> Request:
    """The same request, or that of a call with copies where it ``gets_copies``."""
    return _copied_request(request) if gets_copies(request, kernels, driver) else request


def _copied_request(request: Request) -> Request:
    call = request.call
    order = call.order if call.order != "bhsd" else "bshd"  # views list axes in this order, whatever the call has
    views = {"q": call.q, "k": call.k, "v": call.v}
    copied = {name: contiguous_view(view.shape, order) for name, view in views.items() if _expanded(view)}
    views |= copied
    odd = {name: _in_whole_rows(call.tensors[name].to("meta")) for name in _odd_biases(call.variant, call.tensors)}
    addresses = {**request.addresses, **dict.fromkeys((*copied, *(f"tensor:{name}" for name in odd)), 0)}
    call = replace(call, q=views["q"], k=views["k"], v=views["v"], tensors={**call.tensors, **odd})
    return replace(request, call=call, addresses=addresses)


def _reads_kv_heads(variant: Variant) -> bool:
    read, _ = variant.uses(variant.mask, variant.score, variant.sink)
    extents = {extent for tensor in variant.tensors for extent in (*tensor.shape, *(tensor.range or ()))}
    bounds = {bound for scalar in variant.scalars for bound in (scalar.min, scalar.max)}
    return not _OF_KV_HEADS.isdisjoint({*read, *extents, *bounds})


def with_one_head(given: Given) -> Given:
    """A call with one KV head. Its gradient arrives at the first of the heads, where autograd adds them up in any case;
    tensors whose own gradient may be looked at are copied instead."""
    if torch.is_grad_enabled() and (_keeps_gradient(given.k) or _keeps_gradient(given.v)):
        return with_copies(given)
    axis = _HEADS[given.layout]
    return given._replace(k=given.k.narrow(axis, 0, 1), v=given.v.narrow(axis, 0, 1))


def _keeps_gradient(tensor: Tensor) -> bool:
    kept = tensor.is_leaf or tensor.retains_grad or bool(tensor._backward_hooks)
    return tensor.requires_grad and kept


def with_copies(given: Given) -> Given:
    """A call whose q, k and v are copied where they are expanded, and its biases where they have no descriptor."""
    variant = given.variant if isinstance(given.variant, Variant) else find(given.variant, given.package).variant
    own = {name: value for name, value in given.arguments.items() if isinstance(value, Tensor)}
    arguments = {**given.arguments, **biases_in_whole_rows(variant, own)}
    return given._replace(q=_copied(given.q), k=_copied(given.k), v=_copied(given.v), arguments=arguments)


def biases_in_whole_rows(variant: Variant, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, by name, of the biases whose strides no TMA descriptor can express; those of the copies can be."""
    return {name: _in_whole_rows(tensors[name]) for name in _odd_biases(variant, tensors)}


def _in_whole_rows(tensor: Tensor) -> Tensor:
    """A copy of a bias whose rows take multiples of 16 bytes. Axes before these along which it is expanded stay so."""
    whole = tensor
    for axis in range(tensor.dim() - 2):
        whole = whole if tensor.stride(axis) else whole.narrow(axis, 0, 1)
    columns = tensor.shape[-1]
    missing = -columns % (STRIDE_ALIGNMENT // tensor.element_size())
    if missing:
        padded = torch.nn.functional.pad(whole, (0, missing)).contiguous()  # pad may keep the order of axes in memory
        return padded[..., :columns].expand(tensor.shape)
    return whole.clone(memory_format=torch.contiguous_format).expand(tensor.shape)


def _copied(tensor: Tensor) -> Tensor:
    stepped = zip(tensor.shape, tensor.stride(), strict=True)
    if all(size < 2 or stride for size, stride in stepped):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class ExpandedCall:
    """A prepared call whose tensors are expanded: it runs the one without, which is prepared as well."""

    __slots__ = ("_change", "_kept", "_run")

    def __init__(self, change: Callable[[Given], Given], given: Given, run: Callable[[Given], Results]) -> None:
        """``given`` holds what the cache's key refers to by identity, which must stay alive."""
        self._change, self._run = change, run
        self._kept = given.variant if isinstance(given.variant, Variant) else None

    def __call__(self, given: Given, addresses: list[int]) -> Results:
        """Run the call; called as a ``PreparedCall``."""
        return self._run(self._change(given))
