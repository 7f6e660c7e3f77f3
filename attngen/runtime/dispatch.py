"""The calls that users make: each finds its variant and its kernel, and runs the reference where there is no GPU.

The first call with some shapes checks everything, selects a kernel and prepares its launch. Later ones with the same
shapes, strides, dtypes and devices find that in a cache, check the scalars, and launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError, NoKernelError
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Variant
from attngen.runtime import debug as debugging
from attngen.runtime import driver as drivers
from attngen.runtime import on_demand
from attngen.runtime.addresses import CU_SEQLENS_K, CU_SEQLENS_Q, FORWARD, SEQUSED_K, empty
from attngen.runtime.arguments import DIRECTIONS, Call
from attngen.runtime.binding import bind_call, bind_paged_call, find, require_reference
from attngen.runtime.cache import RecentCache
from attngen.runtime.dropout import with_state
from attngen.runtime.explanation import Explanation
from attngen.runtime.module import Kernel
from attngen.runtime.paging import Paging, as_rows
from attngen.runtime.prepared import PREPARED_CALLS, PreparedCall
from attngen.runtime.registry import Found, registry
from attngen.runtime.select import Request, Selection, no_kernel, preferred, reason_against, select
from attngen.runtime.sinks import without_keys
from attngen.runtime.tile_map import TileMap
from attngen.runtime.training import asks_for_determinism, attend, carries_tangent

_PREPARED: RecentCache[PreparedCall] = RecentCache(PREPARED_CALLS)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant = "full",
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    package: str | None = None,
    tile_map: TileMap | None = None,
    deterministic: bool = False,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(score(scale · q kᵀ) where the mask allows) · v.

    q is (batch, seqlen_q, heads, head_dim), k and v are (batch, seqlen_k, kv_heads, …), or (batch, heads, seqlen, …)
    with ``layout='bhsd'``; heads is a multiple of kv_heads. ``variant`` names what was built (``package/variant``
    where the short name is ambiguous); its scalars and tensors are keywords. ``softmax_scale`` is 1/√head_dim unless
    given. ``seqused_k`` (batch,) int32 cuts each sequence's keys. With ``return_lse`` the natural log-sum-exp
    (batch, heads, seqlen_q) in float32 comes too. A query that sees no key gives 0, and −inf or its sink. ``tile_map``
    is what ``attngen.tile_map`` returned for the same arguments; without it, a kernel that needs one computes it.
    With ``deterministic`` its gradients have the same bits on every run, as under
    ``torch.use_deterministic_algorithms``; the output has them in any case.

    A variant with dropout also takes ``dropout_p`` in [0, 1), and may take ``rng_state``, seed and offset as an int64
    tensor (2,) on q's device; left out, it is drawn from torch's generator of the device.

    Under ``torch.autocast`` float32 tensors on a GPU are taken in its dtype.

    Tensors on the CPU, and ``backend='reference'``, run the eager reference. On a GPU the call enqueues work on the
    current stream and does not wait. Raises CallError for arguments that are wrong or disagree, and NoKernelError,
    which lists every candidate and its reason, if no kernel takes the call.
    """
    if torch.is_autocast_enabled():
        q, k, v = _as_autocast(q, k, v)
    call = _traced if is_traced(q) else run
    return call(
        q, k, v, None, variant, softmax_scale, seqused_k, return_lse, layout, backend, package, arguments, tile_map,
        deterministic,
    )  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    variant: str | Variant = "full",
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    package: str | None = None,
    tile_map: TileMap | None = None,
    deterministic: bool = False,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``attention``, for sequences packed one after the other: q (total_q, heads, head_dim), k and v (total_k, …).

    Sequence i holds rows cu_seqlens[i] to cu_seqlens[i + 1]; both are int32 of shape (batch + 1,), start with 0 and
    never decrease. max_seqlen_q and max_seqlen_k are at least the longest lengths. The log-sum-exp is
    (heads, total_q). What the offsets hold is checked on the CPU and under ``attngen.debug()`` only, since reading
    it would wait for the GPU. Rows after the last sequence are unspecified.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if torch.is_autocast_enabled():
        q, k, v = _as_autocast(q, k, v)
    call = _traced if is_traced(q) else run
    return call(
        q, k, v, packing, variant, softmax_scale, seqused_k, return_lse, "varlen", backend, package, arguments,
        tile_map, deterministic,
    )  # fmt: skip


def _as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in the dtype that ``torch.autocast`` asks for on GPUs, as its list of such functions would."""
    wanted = torch.get_autocast_dtype("cuda")
    return tuple(t.to(wanted) if _on_gpu(t) and t.dtype is torch.float32 else t for t in tensors)


def _traced(*given: Any) -> Any:
    from attngen.runtime import operators

    return operators.call(*given)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Any, Any, Any, Any] | None,
    variant: str | Variant,
    softmax_scale: Any,
    seqused_k: Any,
    return_lse: bool,
    layout: str,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
    tile_map: TileMap | None,
    deterministic: bool = False,
) -> Any:
    """Run a call now, whether it comes from a program or from an operator. ``packing`` is None for a dense call."""
    if DROPOUT_P.name in arguments:
        arguments = _with_state(q, variant, package, arguments)
    if tile_map is not None and not isinstance(tile_map, TileMap):
        raise CallError(f"tile_map must be what this runtime's tile_map returned, got {type(tile_map).__name__}")
    given = (q, k, v, packing, variant, softmax_scale, seqused_k, return_lse, layout, backend, package, arguments)
    if not _on_gpu(q) or backend == "reference" or debugging.active() or not (type(k) in _PLAIN and type(v) in _PLAIN):
        call, found = bind_call(*given)
        if debugging.active():
            debugging.check(call)
        if backend == "reference" or not _on_gpu(q):
            require_reference(call, backend)
            return _run_reference(call, q, k, v)
    if forward_ad._current_level >= 0 and carries_tangent(q, k, v, *arguments.values()):
        raise CallError("kernels have no forward-mode derivatives; backend='reference' has")
    learns = torch.is_grad_enabled() and _asks_for_gradient(q, k, v, arguments)
    with_lse = True if learns and return_lse is False else return_lse
    # The cache's key: everything that checks, selection and the packed template depend on.
    addresses = empty(q.data_ptr(), k.data_ptr(), v.data_ptr())
    key: list[Any] = [
        variant if isinstance(variant, str) else id(variant), package, backend, layout, with_lse, registry.generation,
        q.dtype, q.shape, q.stride(), q.get_device(), addresses[0] & 15,
        k.dtype, k.shape, k.stride(), k.get_device(), addresses[1] & 15,
        v.dtype, v.shape, v.stride(), v.get_device(), addresses[2] & 15,
    ]  # fmt: skip
    if packing is not None:
        addresses[CU_SEQLENS_Q] = _note(key, packing[0])
        addresses[CU_SEQLENS_K] = _note(key, packing[1])
        key += packing[2:]
    if seqused_k is not None:
        addresses[SEQUSED_K] = _note(key, seqused_k)
    for name, value in arguments.items():
        key.append(name)
        if type(value) not in _NUMBERS and isinstance(value, Tensor):
            addresses.append(_note(key, value))
    identity = tuple(key)
    prepared = _kept(identity)
    if prepared is None:
        call, found = bind_call(*given)
        call.return_lse = with_lse
        prepared = _prepare(call, found, addresses, variant, package, backend, arguments)
        _PREPARED.put(identity, prepared)
    if learns:
        forward = (lambda *_: without_keys(bind_call(*given)[0])) if prepared.sinks_only else prepared
        return attend(
            forward, q, k, v, addresses, packing, variant, softmax_scale, seqused_k, return_lse, layout, package,
            arguments, tile_map, deterministic,
        )  # fmt: skip
    if prepared.sinks_only:
        return without_keys(bind_call(*given)[0])
    return prepared(q, addresses, softmax_scale, arguments, tile_map)


def _kept(identity: tuple[Any, ...]) -> PreparedCall | None:
    """Return the prepared call of a key; None for an unknown one, and for one of arguments that binding refuses."""
    try:
        return _PREPARED[identity]
    except TypeError:  # something that cannot be hashed stands where a number or a name belongs
        return None


def _with_state(
    q: Any, variant: str | Variant, package: str | None, arguments: Mapping[str, Any], *, draws: bool = True
) -> Mapping[str, Any]:
    """Return the arguments of a call that names a rate of dropout, with a state of random numbers if need be."""
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    found = variant if isinstance(variant, Variant) else find(variant, package).variant
    return with_state(found, arguments, device, draws=draws)


def _asks_for_gradient(q: Tensor, k: Tensor, v: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether autograd would record a call."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return bool(arguments) and any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values())


def is_traced(tensor: Any) -> bool:
    """Whether a call with a tensor is traced: compiled, or the tensor has no data, as on the meta device."""
    if torch.compiler.is_compiling():
        return True
    if type(tensor) in _PLAIN:
        return tensor.is_meta
    return isinstance(tensor, Tensor)


def _note(key: list[Any], tensor: Any) -> int:
    """Add to a key what a launch depends on of a tensor, and return its address; 0 for what is no tensor."""
    if not isinstance(tensor, Tensor):
        key.append(type(tensor))  # refused when the call is bound
        return 0
    address = tensor.data_ptr()
    key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), address & 15)
    return address


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_cuda


def _request(call: Call, addresses: Sequence[int], backend: str | None, arguments: Mapping[str, Any]) -> Request:
    """Return what selection looks at; ``addresses`` as ``run`` lists them."""
    names = _tensor_names(arguments)
    known = dict(zip(("q", "k", "v", "out"), addresses, strict=False))
    known |= {f"tensor:{name}": address for name, address in zip(names, addresses[len(FORWARD) :], strict=True)}
    given = {name: call.scalars[name] for name in arguments if name in call.scalars}
    return Request(call, _index(call), known, given, backend)


def _tensor_names(arguments: Mapping[str, Any]) -> list[str]:
    return [name for name, value in arguments.items() if isinstance(value, Tensor)]


def _index(call: Call) -> int:
    return call.device.index or 0


def _choose(found: Found, request: Request) -> tuple[Kernel, Selection]:
    """Return the kernel for a call, or raise NoKernelError."""
    driver = drivers.current()
    selection = select(found.kernels, request, driver)
    if selection.kernel is None:
        raise no_kernel(found.kernels, selection, request, driver)
    return selection.kernel, selection


def _kernel_for(found: Found, request: Request, variant: str | Variant, package: str | None) -> Kernel:
    """Return the kernel for a call, also one that was built since or is made now; or raise NoKernelError."""
    try:
        kernel, _ = _choose(found, request)
    except NoKernelError:
        if not registry.refresh_if_built() and (package is not None or not on_demand.make(request)):
            raise
        try:
            kernel, _ = _choose(find(variant, package), request)
        except NoKernelError:  # what was built since is another one
            if package is not None or not on_demand.make(request):
                raise
            kernel, _ = _choose(find(variant, package), request)
    on_demand.note(request)
    return kernel


def _prepare(
    call: Call,
    found: Found,
    addresses: Sequence[int],
    variant: str | Variant,
    package: str | None,
    backend: str | None,
    arguments: Mapping[str, Any],
) -> PreparedCall:
    """Select a kernel and prepare its launch. Nothing is selected where there is nothing to compute."""
    kernel = None
    if not call.empty:
        request = _request(call, addresses, backend, arguments)
        kernel = _kernel_for(found, request, variant, package)
    kept = variant if isinstance(variant, Variant) else None
    return PreparedCall(call, kernel, _tensor_names(arguments), drivers.current(), _index(call), kept)


def _run_reference(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    from attngen.runtime.reference import reference

    with torch.autocast(q.device.type, enabled=False):
        out, lse = reference(call, q, k, v)
    return (out, lse) if call.return_lse else out


def define_operators(*variants: str) -> tuple[str, ...]:
    """Define the operators of ``torch.library`` of these variants, or of all, and return their qualified names.

    A traced call defines its own. A program that was exported in another process names operators before any call
    does, and needs this first. Raises NoKernelError for a variant that is not built.
    """
    from attngen.runtime import operators

    return operators.define(variants)


def tile_map(
    q: Tensor,
    k: Tensor,
    *,
    variant: str | Variant,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    layout: str = "bshd",
    backend: str | None = None,
    package: str | None = None,
    **arguments: Any,
) -> TileMap:
    """Return which tiles a call with these arguments has to visit, to be passed to any number of them.

    It stays right as long as the mask's tensors and scalars, and the lengths, keep their values; scores, and what
    q, k and v hold, do not matter. ``v`` is needed only where its head_dim differs from that of k and kernels for
    several exist. Where no map is needed (the CPU, a kernel that bounds its loops otherwise) the result is empty,
    and may be passed all the same.
    """
    packing = None
    if cu_seqlens_q is not None:
        packing, layout = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), "varlen"
    values = k if v is None else v
    arguments = dict(_with_state(q, variant, package, {DROPOUT_P.name: 0.0, **arguments}, draws=False))
    call, found = bind_call(q, k, values, packing, variant, None, seqused_k, False, layout, backend, package, arguments)
    if not _on_gpu(q):
        require_reference(call, backend)
    if not _on_gpu(q) or backend == "reference" or call.empty:
        return TileMap(call.variant.name)
    addresses = empty(*(t.data_ptr() for t in (q, k, values)))
    packed = ((CU_SEQLENS_Q, call.cu_seqlens_q), (CU_SEQLENS_K, call.cu_seqlens_k), (SEQUSED_K, call.seqused_k))
    for index, tensor in packed:
        addresses[index] = 0 if tensor is None else tensor.data_ptr()
    addresses += [arguments[name].data_ptr() for name in _tensor_names(arguments)]
    request = _request(call, addresses, backend, arguments)
    if v is None:
        driver = drivers.current()
        for candidate in preferred(found.kernels):
            call.head_dim_v = candidate.head_dim_v
            if reason_against(candidate, request, driver) is None:
                break
        else:
            call.head_dim_v = call.head_dim_qk
    kernel = _kernel_for(found, request, variant, package)
    if not kernel.needs_tile_map:
        return TileMap(call.variant.name)
    prepared = PreparedCall(call, kernel, _tensor_names(arguments), drivers.current(), _index(call))
    words = prepared.words(None, addresses, prepared.scalars(arguments))
    return TileMap(call.variant.name, words, kernel.tile_m, kernel.tile_n, call.seqlen_q, call.seqlen_k)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str | Variant = "full",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    package: str | None = None,
    direction: str = "forward",
    deterministic: bool = False,
    page_table: Tensor | None = None,
    page_layout: str = "NHD",
    num_splits: int | None = None,
    split_size: int | None = None,
    **arguments: Any,
) -> Explanation:
    """Say what a call with these arguments would run, and why not something else. Launches nothing.

    While ``attngen.jit`` is on, a kernel that is lacking is compiled, as the call would.

    With ``cu_seqlens_q`` it is about ``attention_varlen``, with ``page_table`` about ``attention_paged``, whose pages k
    and v are. ``page_layout``, ``num_splits`` and ``split_size`` are of the latter alone.

    With ``direction='backward'`` it says what would give the gradients, from contiguous ones of the result. Raises what
    the call would raise, save that a call which no kernel takes is explained as well.
    """
    if direction not in DIRECTIONS:
        raise CallError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")
    arguments = dict(_with_state(q, variant, package, {DROPOUT_P.name: 0.0, **arguments}, draws=False))
    if page_table is not None:
        if direction == "backward":
            raise CallError("keys in pages have no backward")
        paging = Paging(page_table, cu_seqlens_q, max_seqlen_q, num_splits, split_size)
        call, found = bind_paged_call(
            as_rows(q), k, v, paging, variant, softmax_scale, seqused_k, return_lse, page_layout, backend, package,
            arguments,
        )  # fmt: skip
    else:
        packing = None
        if cu_seqlens_q is not None:
            packing, layout = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), "varlen"
        call, found = bind_call(
            q, k, v, packing, variant, softmax_scale, seqused_k, return_lse, layout, backend, package, arguments
        )
    if not _on_gpu(q) or backend == "reference":
        require_reference(call, backend)
        reason = "backend='reference' asks for it" if backend == "reference" else f"q is on {call.device}"
        return Explanation(call, found, "reference", reason, direction=direction)
    if call.empty:
        return Explanation(call, found, "nothing", "there is no query or no key", direction=direction)
    addresses = empty(*(t.data_ptr() for t in (q, k, v)))
    addresses += [arguments[name].data_ptr() for name in _tensor_names(arguments)]
    request = _request(call, addresses, backend if direction == "forward" else None, arguments)
    if direction == "backward":
        ordered = deterministic or asks_for_determinism() == 2
        request = replace(request, given=dict(call.scalars), direction=direction, deterministic=ordered)
    selection = select(found.kernels, request, drivers.current())
    if selection.kernel is None and package is None and on_demand.maker is not None:
        try:
            if on_demand.make(request):
                found = find(variant, package)
                selection = select(found.kernels, request, drivers.current())
        except NoKernelError as failure:
            return Explanation(call, found, "no kernel", str(failure), selection, direction)
    if selection.kernel is None:
        error = no_kernel(found.kernels, selection, request, drivers.current())
        return Explanation(call, found, "no kernel", str(error), selection, direction)
    return Explanation(call, found, "kernel", "the first that takes the call", selection, direction)
