"""The tiles that a call visits, and the kernel that it would run, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import DESCALES, QUANTIZED_DTYPES
from attngen.errors import CallError, NoKernelError
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Variant
from attngen.runtime.arguments import arrays, torch_state
from attngen.runtime.arguments.addresses import FORWARD
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, DIRECTIONS
from attngen.runtime.arguments.given import Given, tensors_of
from attngen.runtime.arguments.paging import in_rows
from attngen.runtime.device import driver as drivers
from attngen.runtime.launch.expanded import are_one_head, request_without_expanded, what_is_copied, with_one_head
from attngen.runtime.launch.prepared import PreparedCall
from attngen.runtime.launch.tile_map import TileMap, kept_map, where_from
from attngen.runtime.operations.attention.dropout_state import with_random_state
from attngen.runtime.operations.attention.explanation import Explanation
from attngen.runtime.operations.attention.kernel_choice import (
    backward_of,
    device_index,
    kernel_for,
    request_of,
    tensor_names,
)
from attngen.runtime.operations.widen.kernel import route_of
from attngen.runtime.registry import on_demand
from attngen.runtime.registry.binding import bind_call, check_form, find, require_reference
from attngen.runtime.registry.no_kernel import no_kernel
from attngen.runtime.registry.order import card_of, preferred
from attngen.runtime.registry.select import foreseen, reason_against, select


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
    **arguments: object,
) -> TileMap:
    """Compute the tile map of a call once, to pass it to any number of calls (``tile_map=``).

    It stays valid as long as the mask's tensors and scalars, and the lengths, keep their values; scores, and the
    contents of q, k and v, do not matter. If no map is needed (on the CPU, or by a kernel that bounds its loops
    otherwise), the result is empty, and may be passed all the same.

    Args:
        q: As for ``attention``, or packed, (total_q, heads, head_dim), with ``cu_seqlens_q``.
        k: As for ``attention``, or packed, (total_k, kv_heads, head_dim).
        variant: Name of a variant, or a result of ``attngen.variant``.
        v: Needed only if its head_dim differs from k's and kernels for several exist.
        cu_seqlens_q: (batch + 1,) int32, offsets of packed queries.
        cu_seqlens_k: (batch + 1,) int32, offsets of packed keys.
        max_seqlen_q: Length of the longest sequence of queries, where they are packed.
        max_seqlen_k: The same of keys.
        seqused_k: (batch,) int32, the number of keys of each sequence that count.
        layout: ``'bshd'``, or ``'bhsd'`` for (batch, heads, seqlen, head_dim).
        backend: ``'cuda'`` or ``'triton'`` for kernels of that kind only, or ``'reference'``.
        package: Look for kernels in this package only.
        **arguments: Scalars and tensors of the variant.

    Returns:
        A ``TileMap``: for each tile of queries which tiles of keys are empty, partial or full.

    Raises:
        CallError: Arguments are wrong or contradict each other.
        NoKernelError: No kernel takes the call.
    """
    check_form(_form(cu_seqlens_q), {
        "layout": layout, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    })  # fmt: skip
    given = Given(
        q=q, k=k, v=k if v is None else v, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, variant=variant, form=_form(cu_seqlens_q),
        layout=layout, backend=backend, package=package, arguments={DROPOUT_P.name: 0.0, **arguments},
    )  # fmt: skip
    mapped: TileMap = _on_tensors(partial(_map_of, any_v=v is None), given)
    return mapped


def _on_tensors(run: Callable[[Given], Any], given: Given) -> Any:
    """Result of ``run`` for a call, on tensors in place of arrays."""
    return arrays.serve_given(run, given) if arrays.is_array(given.q) else run(given)


def _map_of(given: Given, *, any_v: bool) -> TileMap:
    """The tile map of a call; ``any_v``: for a kernel with any head_dim of v, which is not given."""
    q, k, backend = given.q, given.k, given.backend
    given = with_random_state(given._replace(**_any_descales(q, k)), draws=False)
    call, resolved = bind_call(given)
    if not torch_state.on_gpu(q):
        require_reference(call, backend)
    if not torch_state.on_gpu(q) or backend == "reference" or call.empty:
        return TileMap(call.variant.name)
    if are_one_head(call):
        given = with_one_head(given)
        call, resolved = bind_call(given)
    addresses = _addresses(given)
    request = request_without_expanded(request_of(call, addresses, given), resolved.kernels, drivers.current())
    call = request.call
    if any_v:
        driver = drivers.current()
        for candidate in preferred(resolved.kernels):
            call.head_dim_v = candidate.head_dim_v
            if reason_against(candidate, request, driver) is None:
                break
        else:
            call.head_dim_v = call.head_dim_qk
    kernel = kernel_for(resolved, request, given)
    if not kernel.needs_tile_map:
        return TileMap(call.variant.name)
    prepared = PreparedCall(call, kernel, tensor_names(given.arguments), drivers.current(), device_index(call))
    words = prepared.made_map(addresses, prepared.scalars(given.arguments))
    return TileMap(call.variant.name, words, kernel.tile_m, kernel.tile_n, call.seqlen_q, call.seqlen_k)


def _any_descales(q: object, k: object) -> dict[str, Tensor]:
    """Return scales for a call whose result does not depend on them; none of what needs none."""
    quantized = {
        name for name, given in (("q", q), ("k", k), ("v", k))
        if isinstance(given, Tensor) and ATTENTION_DTYPES.get(given.dtype) in QUANTIZED_DTYPES
    }  # fmt: skip
    device = q.device if isinstance(q, Tensor) else None  # anything else is refused later
    return {name: torch.ones((), dtype=torch.float32, device=device) for name in DESCALES if name[0] in quantized}


def _form(cu_seqlens_q: object) -> str:
    """Return the form of a call by what only packed sequences have."""
    return "dense" if cu_seqlens_q is None else "varlen"


def _addresses(given: Given) -> list[int]:
    """Return the addresses of a call's tensors, as ``run`` lists them."""
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors_of(given)]
    addresses += [0] * (len(FORWARD) - len(addresses))
    own: list[Tensor] = [given.arguments[name] for name in tensor_names(given.arguments)]
    return addresses + [tensor.data_ptr() for tensor in own]


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
    tile_map: TileMap | None = None,
    page_table: Tensor | None = None,
    page_layout: str = "NHD",
    num_splits: int | None = None,
    split_size: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **arguments: object,
) -> Explanation:
    """Explain a call: the kernel that it would run, and the reason against each other one. Launches nothing.

    While ``attngen.jit`` is on, a missing kernel is compiled, as by the call. If a tile map is kept for the call, its
    tiles are counted, for which this waits for the GPU.

    Args:
        q: As for the call: of ``attention_varlen`` with ``cu_seqlens_q``, of ``attention_paged`` with ``page_table``,
            else of ``attention``.
        k: The same; of ``attention_paged`` the pages of keys.
        v: The same.
        variant: Name of a variant, or a result of ``attngen.variant``.
        cu_seqlens_q: (batch + 1,) int32, offsets of packed queries.
        cu_seqlens_k: (batch + 1,) int32, offsets of packed keys.
        max_seqlen_q: Length of the longest sequence of queries, where they are packed.
        max_seqlen_k: The same of keys.
        softmax_scale: Factor of q kᵀ; 1/√head_dim by default.
        seqused_k: (batch,) int32, the number of keys of each sequence that count.
        return_lse: Whether the call returns the log-sum-exp.
        layout: ``'bshd'``, or ``'bhsd'`` for (batch, heads, seqlen, head_dim).
        backend: ``'cuda'`` or ``'triton'`` for kernels of that kind only, or ``'reference'``.
        package: Look for kernels in this package only.
        direction: ``'forward'``, or ``'backward'`` for what would compute the gradients, given contiguous gradients of
            the result.
        deterministic: As for the call.
        tile_map: A result of ``attngen.tile_map``; changes only what is said of the map.
        page_table: (batch, max_pages) int32.
        page_layout: ``'NHD'`` or ``'HND'``, for ``attention_paged``.
        num_splits: As for ``attention_paged``.
        split_size: As for ``attention_paged``.
        q_descale: Scale of an 8-bit q.
        k_descale: Scale of an 8-bit k.
        v_descale: Scale of an 8-bit v.
        out_dtype: As for ``attention``.
        **arguments: Scalars and tensors of the variant.

    Returns:
        An ``Explanation``, which prints itself. A call that no kernel takes is explained, too.

    Raises:
        CallError: What the call would raise: arguments are wrong or contradict each other.
        NoKernelError: The variant is not known.
    """
    if direction not in DIRECTIONS:
        raise CallError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")
    paged = page_table is not None
    if paged and direction == "backward":
        raise CallError("attention over pages has no backward")
    check_form("paged" if paged else _form(cu_seqlens_q), {
        "layout": layout, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "page_layout": page_layout, "num_splits": num_splits, "split_size": split_size,
    })  # fmt: skip
    given = Given(
        q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, page_table=page_table,
        tile_map=tile_map, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, num_splits=num_splits,
        split_size=split_size,
        variant=variant, softmax_scale=softmax_scale, return_lse=return_lse, deterministic=deterministic,
        form="paged" if paged else _form(cu_seqlens_q), layout=page_layout if paged else layout, backend=backend,
        package=package, out_dtype=out_dtype, arguments={DROPOUT_P.name: 0.0, **arguments},
    )  # fmt: skip
    explained: Explanation = _on_tensors(partial(_explained, direction=direction), given)
    return explained


def _explained(given: Given, *, direction: str) -> Explanation:
    """The explanation of a call or of its backward pass."""
    q, variant, backend, package, tile_map = given.q, given.variant, given.backend, given.package, given.tile_map
    given = in_rows(with_random_state(given, draws=False))
    call, resolved = bind_call(given)
    if not torch_state.on_gpu(q) or backend == "reference":
        require_reference(call, backend)
        reason = "backend='reference' asks for it" if backend == "reference" else f"q is on {call.device}"
        return Explanation(call, resolved, "reference", reason, direction=direction)
    if call.empty:
        return Explanation(call, resolved, "nothing", "there is no query or no key", direction=direction)
    expanded = ""
    if are_one_head(call):
        given = with_one_head(given)
        call, resolved = bind_call(given)
        expanded = "k and v are expanded along their heads: kernels get them as one KV head"
    request = request_of(call, _addresses(given), given)
    if direction == "backward":
        request = backward_of(request, given)
    copied = request_without_expanded(request, resolved.kernels, drivers.current())
    if copied is not request:
        request, call, expanded = copied, copied.call, what_is_copied(call)
    selection = select(resolved.kernels, request, drivers.current())
    if selection.kernel is None and package is None and on_demand.maker is not None:
        try:
            if on_demand.make(request):
                resolved = find(variant, package)
                selection = select(resolved.kernels, request, drivers.current())
        except NoKernelError as failure:
            return Explanation(call, resolved, "no kernel", str(failure), selection, direction)
    if selection.kernel is None:
        error = no_kernel(resolved.kernels, request, drivers.current())
        return Explanation(call, resolved, "no kernel", str(error), selection, direction)
    driver, widened = drivers.current(), None
    route = route_of(request, resolved.kernels, driver)
    if route is not None:
        widened, selection, request = route.kernel, route.selection, replace(request, call=route.call)
    kernel = selection.kernel
    kept, tiles = None, ""
    if kernel is not None and kernel.needs_tile_map:
        if tile_map is None or direction == "backward":
            kept = kept_map(kernel, request.call, given)
        tiles = "" if kept else where_from(request.call, given, direction)
    return Explanation(
        call, resolved, "kernel", "the first that takes the call", selection, direction,
        foreseen(resolved.kernels, request, driver, card_of(driver, request.device)), widened, expanded,
        kept, tiles,
    )  # fmt: skip
