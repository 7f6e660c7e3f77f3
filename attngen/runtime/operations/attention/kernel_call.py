"""A call that runs a kernel.

The first call with some shapes checks everything, selects a kernel and prepares its launch. Later ones with the same
shapes, strides, dtypes and devices find that in a cache, check the scalars, and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.addresses import FORWARD, NO_FORWARD
from attngen.runtime.arguments.checked import Call, Results
from attngen.runtime.arguments.given import Given, keyed_of
from attngen.runtime.arguments.keys import note_others
from attngen.runtime.arguments.kinds import has_kinds, kind_of, resize
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.autograd import transforms
from attngen.runtime.autograd.training import TrainedCall, carries_tangent, differentiate
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.expanded import ExpandedCall, are_one_head, gets_copies, with_copies, with_one_head
from attngen.runtime.launch.prepared import PreparedCall, Repeats
from attngen.runtime.launch.ragged import RaggedCalls
from attngen.runtime.launch.tile_map import require_map
from attngen.runtime.operations.attention.kernel_choice import device_index, kernel_for, request_of, tensor_names
from attngen.runtime.operations.attention.recall import Lookup, note_seen, of_its_kind, of_one_size
from attngen.runtime.operations.widen.kernel import WidenedCall, keeps_few_rows, mixes_widths, route_of
from attngen.runtime.reference.sinks import without_keys
from attngen.runtime.registry.binding import bind_call, find
from attngen.runtime.registry.lookup import Resolved, registry
from attngen.runtime.registry.select import reason_against

#: Prepared calls by the key of their kind (packed and paged calls), or by the key of everything, sizes included. False
#: for a kind: its calls are prepared one by one, under the latter.
PREPARED: RecentCache[PreparedCall | TrainedCall | WidenedCall | ExpandedCall | RaggedCalls | bool] = RecentCache(
    PREPARED_CALLS
)
_BY_KIND = cast("RecentCache[RaggedCalls | bool]", PREPARED)
_BY_SIZES = cast("RecentCache[PreparedCall | TrainedCall | WidenedCall | ExpandedCall]", PREPARED)

_Entry = TypeVar("_Entry")


def run(given: Given, lookup: Lookup | None, repeats: Repeats | None, run_again: Callable[[Given], Results]) -> Results:
    """Run a call on a GPU whose tensors were not recognized, by the key of its kind or of everything.

    ``lookup``: what ``seen_key`` returned, or None for a call that is not to be remembered. ``run_again`` runs a call
    that does the work of this one, with other tensors.
    """
    q, k, v, arguments = given.q, given.k, given.v, given.arguments
    if given.tile_map is not None:
        require_map(given.tile_map)
    if forward_ad._current_level >= 0 and carries_tangent(q, k, v, *arguments.values()):
        return transforms.attend(given, run_again, differentiate)
    try:
        shape, strides, addresses = q.shape, q.stride(), [q.data_ptr(), k.data_ptr(), v.data_ptr(), *NO_FORWARD]
    except RuntimeError:
        bind_call(given)  # which refuses what has neither
        raise
    variant, with_lse = given.variant, given.return_lse
    learns = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bool(arguments) and _learns(arguments))
    )
    if learns and with_lse is False:
        with_lse = True
    if given.form == "paged":
        if learns:
            raise CallError(
                "attention over pages has no backward kernel; call it under torch.no_grad(), or with "
                "backend='reference', which is differentiable and slow"
            )
        if len(shape) == 4 and shape[1] > 1 and shape[0] > 1 and strides[0] != shape[1] * strides[1]:
            given, lookup = in_rows(given), None
            q = given.q
            strides, addresses[0] = q.stride(), q.data_ptr()
    name = variant if isinstance(variant, str) else id(variant)
    kind: tuple[object, ...] | None = None
    calls: RaggedCalls | bool | None = None
    if given.form != "dense" and not learns:
        kind = kind_of(given, addresses, shape, strides, (name, with_lse, registry.generation))
        calls = None if kind is None else _known(_BY_KIND, kind)
        if isinstance(calls, RaggedCalls):
            ready = calls.ready(given)
            if ready is not None:
                note_seen(lookup, given, calls=calls)
                return of_its_kind(calls, ready[0](given, addresses, ready[1], repeats), repeats)
        if calls is not None:
            kind = None  # what is kept for the kind does not serve this call, and nothing new will be kept
        del addresses[len(FORWARD) :]
    # The key of everything that checks, selection and packed parameters depend on.
    key: list[object] = [
        name, with_lse, learns, registry.generation, *keyed_of(given),
        q.dtype, shape, strides, q.get_device(), addresses[0] & 15, q.is_neg(),
        k.dtype, k.shape, k.stride(), k.get_device(), addresses[1] & 15, k.is_neg(),
        v.dtype, v.shape, v.stride(), v.get_device(), addresses[2] & 15, v.is_neg(), addresses[1] == addresses[2],
    ]  # fmt: skip
    note_others(key, addresses, given)
    identity = tuple(key)
    prepared = _known(_BY_SIZES, identity)
    if prepared is None:
        call, resolved = bind_call(given)
        for name in call.descales:
            if torch.is_grad_enabled() and getattr(given, name).requires_grad:
                raise CallError(
                    f"{name} requires a gradient, which no kernel has; detach it, or say backend='reference'"
                )
        call.return_lse = bool(with_lse)
        made = _prepare(call, resolved, addresses, given, run_again, learns=learns)
        of_kind: RaggedCalls | bool = False
        if kind is not None and resize(call.without_tensors(), given):
            of_kind = _of_kind(call, addresses, given, made)
            _BY_KIND.put(kind, of_kind)
        prepared = _trained(made, given) if learns and isinstance(made, PreparedCall) else made
        if of_kind is False:
            _BY_SIZES.put(identity, prepared)
        if isinstance(calls, RaggedCalls) and isinstance(made, PreparedCall | WidenedCall):
            other = made.of_kind(given) if isinstance(made, WidenedCall) else made.kernel
            if other is not None:
                calls.note(given, other)
        lookup = None  # its tensors are remembered when it is made again
    if isinstance(prepared, WidenedCall | ExpandedCall):
        return prepared(given, addresses)
    if isinstance(prepared, PreparedCall) and prepared.sinks_only:
        return _without_keys(prepared, given, addresses)
    if of_one_size(given):  # else its key has no lengths
        note_seen(lookup, given, prepared)
    return prepared(given, addresses, None, repeats)


def _known(cache: RecentCache[_Entry], key: tuple[object, ...]) -> _Entry | None:
    """Entry of a key, or None."""
    try:
        return cache[key]
    except TypeError:  # something that cannot be hashed stands where a number or a name belongs: binding refuses it
        return None


def _of_kind(
    call: Call, addresses: Sequence[int], given: Given, prepared: PreparedCall | WidenedCall | ExpandedCall
) -> RaggedCalls | bool:
    """Prepared calls for all calls of the kind of a prepared one; False if sizes decide more than the numbers of a
    launch."""
    if isinstance(prepared, ExpandedCall) or not has_kinds(call.variant):
        return False
    request, driver = request_of(call, addresses, given), drivers.current()
    candidates = find(given.variant, given.package).kernels
    kernels = [one for one in candidates if reason_against(one, request, driver) is None]
    if not kernels or any(one.needs_tile_map for one in kernels):
        return False
    mixed = mixes_widths(call)
    if mixed and not keeps_few_rows(request, candidates, driver):
        return False
    kept = given.variant if isinstance(given.variant, Variant) else None
    names = tensor_names(given.arguments)
    ready = prepared if isinstance(prepared, PreparedCall) else None
    return RaggedCalls(call, kernels, names, driver, device_index(call), kept, prepared=ready, few_rows=mixed)


def _trained(prepared: PreparedCall, given: Given) -> TrainedCall:
    """A prepared call such that autograd can differentiate it."""
    forward = partial(_without_keys, prepared) if prepared.sinks_only else prepared
    return TrainedCall(forward, tuple(tensor_names(given.arguments)))


def _without_keys(_: PreparedCall, given: Given, addresses: list[int]) -> tuple[Tensor, Tensor]:
    """Return the results of a prepared call without keys, which its sinks make."""
    out, lse = without_keys(bind_call(given)[0])
    return (out if given.out is None else given.out.copy_(out)), lse


def _learns(arguments: Mapping[str, object]) -> bool:
    """Whether one of the variant's own tensors asks for a gradient."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values())


def _prepare(
    call: Call,
    resolved: Resolved,
    addresses: Sequence[int],
    given: Given,
    run_again: Callable[[Given], Results],
    *,
    learns: bool = False,
) -> PreparedCall | WidenedCall | ExpandedCall:
    """Select a kernel and prepare its launch. Nothing is selected where there is nothing to compute."""
    kernel = None
    if not call.empty:
        if are_one_head(call):
            return ExpandedCall(with_one_head, given, run_again)
        request = request_of(call, addresses, given)
        if gets_copies(request, resolved.kernels, drivers.current()):
            return ExpandedCall(with_copies, given, run_again)
        kernel = kernel_for(resolved, request, given, learns=learns)
        route = None if learns else route_of(request, resolved.kernels, drivers.current())
        if route is not None:
            return WidenedCall(route, call, given, run_again, drivers.current())
    kept = given.variant if isinstance(given.variant, Variant) else None
    return PreparedCall(call, kernel, tensor_names(given.arguments), drivers.current(), device_index(call), kept)
