"""A call finds its variant and its kernel and runs, on the reference where there is no GPU; and what one would run.

The first call with some shapes checks everything, selects a kernel and prepares its launch. Later ones with the same
shapes, strides, dtypes and devices find that in a cache, check the scalars, and launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.listed import INDICES
from attngen.lang.variant import Variant
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.addresses import FORWARD, NO_FORWARD
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.given import TENSORS, Given, keyed_of, kind_settings_of
from attngen.runtime.arguments.keys import NUMBERS, PLAIN, note_others
from attngen.runtime.arguments.kinds import INDEX_VECTORS, by_page, free_of, has_kinds, kind_of, resize
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.arguments.seen import SeenTensors, seen
from attngen.runtime.arguments.torch_state import is_tracing, transforms_active
from attngen.runtime.autograd import transforms
from attngen.runtime.autograd.training import attend, carries_tangent, differentiate
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.expanded import ExpandedCall, are_one_head, gets_copies, with_copies, with_one_head
from attngen.runtime.launch.prepared import PREPARED_CALLS, PreparedCall, Repeats
from attngen.runtime.launch.ragged import RaggedCalls
from attngen.runtime.launch.tile_map import TileMap
from attngen.runtime.operations.attention.kernel_choice import (
    device_index,
    kernel_for,
    request_of,
    tensor_names,
    with_random_state,
)
from attngen.runtime.operations.widen.kernel import WidenedCall, keeps_few_rows, mixes_widths, route_of
from attngen.runtime.reference.sinks import without_keys
from attngen.runtime.registry.binding import bind_call, find, require_reference
from attngen.runtime.registry.lookup import Resolved, registry
from attngen.runtime.registry.select import reason_against

#: Prepared calls by the key of their kind (packed and paged calls), or by the key of everything, sizes included. False
#: for a kind: its calls are prepared one by one, under the latter.
_PREPARED: RecentCache[PreparedCall | WidenedCall | ExpandedCall | RaggedCalls | bool] = RecentCache(PREPARED_CALLS)

#: The tensors of an earlier call, or of an earlier call of a kind, and what ran it, by ``seen_key``. A call with
#: tensors like these is recognized in one step, without either key above. False: its tensors cannot be recognized.
_SEEN: RecentCache[tuple[SeenTensors, PreparedCall | RaggedCalls] | bool] = RecentCache(PREPARED_CALLS)


def run(given: Given, repeats: Repeats | None = None) -> Any:
    """Run a call now, whether it comes from a program or from an operator.

    A call like an earlier one is recognized by its tensors (``_SEEN``), else by the key of its kind, else by the key of
    everything (``_PREPARED``). If it is new, it is checked, and a kernel is selected and prepared for it. It adds to
    ``repeats`` what launches it again, if a kernel runs.
    """
    lookup = seen_key(given)  # None from where on the call is not to be remembered
    if lookup is not None:
        try:
            alike: Any = _SEEN[lookup[0]]
        except TypeError:  # see _known
            alike = None
        addresses = alike[0].addresses(given, lookup[1]) if alike else None
        if addresses is not None and not (debugging.active() or is_tracing() or transforms_active()):
            prepared, sized = alike[1], None
            if isinstance(prepared, RaggedCalls):
                prepared, sized = prepared.ready(given) or (None, None)
            if prepared is not None:
                return _of_its_kind(alike[1], prepared(given, addresses, sized, repeats), repeats)
    q, k, v, arguments, tile_map, backend = given.q, given.k, given.v, given.arguments, given.tile_map, given.backend
    if arguments and DROPOUT_P.name in arguments:
        given = with_random_state(given)
        arguments = given.arguments
    on_gpu = torch_state.on_gpu(q)
    if is_tracing():
        raise CallError("torch.jit.trace cannot record a launch; allowed: torch.compile, torch.export")
    if transforms_active():
        return transforms.attend(given, run, differentiate if on_gpu and backend != "reference" else None)
    if tile_map is not None and not isinstance(tile_map, TileMap):
        raise CallError(f"tile_map must be what this runtime's tile_map returned, got {type(tile_map).__name__}")
    if not on_gpu or backend == "reference" or debugging.active() or not (type(k) in PLAIN and type(v) in PLAIN):
        given = in_rows(given)
        call, resolved = bind_call(given)
        if debugging.active():
            debugging.check(call)
        if backend == "reference" or not on_gpu:
            require_reference(call, backend)
            return _run_reference(call, given)
        lookup = None
    if forward_ad._current_level >= 0 and carries_tangent(q, k, v, *arguments.values()):
        return transforms.attend(given, run, differentiate)
    try:
        shape, strides, addresses = q.shape, q.stride(), [q.data_ptr(), k.data_ptr(), v.data_ptr(), *NO_FORWARD]
    except RuntimeError:
        bind_call(given)  # which refuses what has neither
        raise
    variant, with_lse = given.variant, given.return_lse
    learns = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bool(arguments) and _learns(arguments))
    )
    if learns:
        lookup = None
        if with_lse is False:
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
    kind: Any = None
    calls: Any = None
    if given.form != "dense" and not learns:
        kind = kind_of(given, addresses, shape, strides, (name, with_lse, registry.generation))
        calls = None if kind is None else _known(_PREPARED, kind)
        if isinstance(calls, RaggedCalls):
            ready = calls.ready(given)
            if ready is not None:
                _note_seen(lookup, given, calls)
                return _of_its_kind(calls, ready[0](given, addresses, ready[1], repeats), repeats)
        if calls is not None:
            kind = None  # what is kept for the kind does not serve this call, and nothing new will be kept
        del addresses[len(FORWARD) :]
    # The key of everything that checks, selection and packed parameters depend on.
    key: list[Any] = [
        name, with_lse, registry.generation, *keyed_of(given),
        q.dtype, shape, strides, q.get_device(), addresses[0] & 15, q.is_neg(),
        k.dtype, k.shape, k.stride(), k.get_device(), addresses[1] & 15, k.is_neg(),
        v.dtype, v.shape, v.stride(), v.get_device(), addresses[2] & 15, v.is_neg(), addresses[1] == addresses[2],
    ]  # fmt: skip
    note_others(key, addresses, given)
    identity = tuple(key)
    prepared = _known(_PREPARED, identity)
    if prepared is None:
        call, resolved = bind_call(given)
        for name in call.descales:
            if torch.is_grad_enabled() and getattr(given, name).requires_grad:
                raise CallError(
                    f"{name} requires a gradient, which no kernel has; detach it, or say backend='reference'"
                )
        call.return_lse = with_lse
        prepared = _prepare(call, resolved, addresses, given, learns=learns)
        of_kind: RaggedCalls | bool = False
        if kind is not None and resize(call.without_tensors(), given):
            of_kind = _of_kind(call, addresses, given, prepared)
            _PREPARED.put(kind, of_kind)
        if of_kind is False:
            _PREPARED.put(identity, prepared)
        if isinstance(calls, RaggedCalls) and isinstance(prepared, PreparedCall | WidenedCall):
            other = prepared.of_kind(given) if isinstance(prepared, WidenedCall) else prepared.kernel
            if other is not None:
                calls.note(given, other)
        lookup = None  # its tensors are remembered when it is made again
    if not isinstance(prepared, PreparedCall):
        return prepared(given, addresses)
    if learns:
        return attend(_without_keys if prepared.sinks_only else prepared, given, addresses)
    if prepared.sinks_only:
        return _without_keys(given, addresses)
    if _of_one_size(given):  # else its key has no lengths
        _note_seen(lookup, given, prepared)
    return prepared(given, addresses, None, repeats)


def _of_its_kind(calls: PreparedCall | RaggedCalls, result: Any, repeats: Repeats | None) -> Any:
    """The result of a call. What repeats it learns what serves its kind."""
    if repeats and repeats[-1] is not None and isinstance(calls, RaggedCalls):
        repeats[-1].calls = calls
    return result


def seen_key(given: Given) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
    """Key of a call in ``_SEEN``, and the tensors of its variant; None for a call whose arguments have to be looked at
    each time."""
    q, arguments, variant = given.q, given.arguments, given.variant
    own: tuple[Tensor, ...] = ()
    names: tuple[Any, ...] = ()
    if type(q) not in PLAIN or given.tile_map is not None or forward_ad._current_level >= 0:
        return None
    if arguments:
        for name, value in arguments.items():
            if type(value) in PLAIN:
                own += (value,)
                names += ((name,),)
            elif type(value) in NUMBERS and name != DROPOUT_P.name:
                names += (name,)
            else:
                return None
    try:
        lengths: tuple[Any, ...] = ()
        if _of_one_size(given):
            shapes = [tensor.shape for tensor in own]
            lengths = q.shape, given.k.shape, given.max_seqlen_q, given.max_seqlen_k, *shapes
        elif given.page_table is not None:  # layers may have caches of several sizes
            lengths, q_scale, k_scale, v_scale = given.k.shape, given.q_descale, given.k_descale, given.v_descale
            if k_scale is not None or q_scale is not None or v_scale is not None:
                lengths = lengths, by_page((q_scale, k_scale, v_scale), lengths[0])
    except (AttributeError, RuntimeError):  # a nested tensor, or none at all
        return None
    chosen = variant if isinstance(variant, str) else id(variant)
    # torch's check asks whether tensors require gradients, but not whether these are recorded
    learns = torch.is_grad_enabled()
    return (chosen, registry.generation, kind_settings_of(given), lengths, names, learns), own


def _of_one_size(given: Given) -> bool:
    """Whether the key of a call in ``_SEEN`` has its lengths, as of calls that have no kind."""
    return given.form == "dense" or INDICES.name in given.arguments


def _note_seen(lookup: Any, given: Given, prepared: PreparedCall | RaggedCalls) -> None:
    """Remember the tensors of a call that is made for the second time, so that the next one is recognized by them.

    ``lookup``: what ``seen_key`` returned, or None for a call that is not to be remembered.
    """
    if lookup is None or _SEEN[lookup[0]] is False:
        return
    free = free_of(given) if isinstance(prepared, RaggedCalls) else {}
    noted = seen(given, lookup[1], range(len(TENSORS)), len(FORWARD), INDEX_VECTORS, free)
    _SEEN.put(lookup[0], False if noted is None else (noted, prepared))


def calls_of_kind(given: Given) -> RaggedCalls | None:
    """Prepared calls of the kind of a call that is recognized by its tensors; or None."""
    lookup = seen_key(given)
    alike: Any = None if lookup is None else _SEEN[lookup[0]]
    return alike[1] if alike and isinstance(alike[1], RaggedCalls) else None


def recognized(given: Given) -> PreparedCall | None:
    """The prepared call of a call that is recognized by its tensors, and has no other sizes than when it was prepared;
    or None."""
    lookup = seen_key(given)
    alike: Any = None if lookup is None else _SEEN[lookup[0]]
    if lookup is None or not alike or not isinstance(alike[1], PreparedCall):
        return None
    return alike[1] if alike[0].addresses(given, lookup[1]) is not None else None


def _known(cache: RecentCache[Any], key: tuple[Any, ...]) -> Any:
    """Entry of a key, or None."""
    try:
        return cache[key]
    except TypeError:  # something that cannot be hashed stands where a number or a name belongs: binding refuses it
        return None


def _of_kind(call: Call, addresses: Sequence[int], given: Given, prepared: Any) -> RaggedCalls | bool:
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


def _without_keys(given: Given, addresses: list[int]) -> tuple[Tensor, Tensor]:
    """Return the results of a call without keys, which its sinks make; called as a ``PreparedCall``."""
    out, lse = without_keys(bind_call(given)[0])
    return (out if given.out is None else given.out.copy_(out)), lse


def _learns(arguments: Mapping[str, Any]) -> bool:
    """Whether one of the variant's own tensors asks for a gradient."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values())


def _prepare(
    call: Call, resolved: Resolved, addresses: Sequence[int], given: Given, *, learns: bool = False
) -> PreparedCall | WidenedCall | ExpandedCall:
    """Select a kernel and prepare its launch. Nothing is selected where there is nothing to compute."""
    kernel = None
    if not call.empty:
        if are_one_head(call):
            return ExpandedCall(with_one_head, given, run)
        request = request_of(call, addresses, given)
        if gets_copies(request, resolved.kernels, drivers.current()):
            return ExpandedCall(with_copies, given, run)
        kernel = kernel_for(resolved, request, given, learns=learns)
        route = None if learns else route_of(request, resolved.kernels, drivers.current())
        if route is not None:
            return WidenedCall(route, call, given, run, drivers.current())
    kept = given.variant if isinstance(given.variant, Variant) else None
    return PreparedCall(call, kernel, tensor_names(given.arguments), drivers.current(), device_index(call), kept)


def _run_reference(call: Call, given: Given) -> Tensor | tuple[Tensor, Tensor]:
    from attngen.runtime.reference.eager import reference

    with torch.autocast(given.q.device.type, enabled=False):
        out, lse = reference(call, given.q, given.k, given.v)
    if given.out is not None:
        out = given.out.copy_(out)
    return (out, lse) if call.return_lse else out
