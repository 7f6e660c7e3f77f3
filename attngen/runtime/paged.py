"""Calls whose keys and values lie in the pages of a cache: one new token or many, beside caches of any lengths.

As other calls, the first with some shapes checks everything, selects a kernel and prepares its launch; later ones find
that in a cache. What changes from step to step, lengths and pages, is read by the kernel on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen.errors import CallError
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Variant
from attngen.runtime import debug as debugging
from attngen.runtime import dispatch
from attngen.runtime.addresses import CU_SEQLENS_Q, OUT, PAGE_TABLE, SEQUSED_K, empty
from attngen.runtime.arguments import Call
from attngen.runtime.binding import bind_paged_call, require_reference
from attngen.runtime.paging import Paging, as_rows
from attngen.runtime.prepared import given_or_new
from attngen.runtime.registry import Found, registry
from attngen.runtime.sinks import without_keys
from attngen.runtime.training import carries_tangent

#: Each is used in every call, in which a look-up in another module counts.
_PLAIN, _NUMBERS, _note, _kept = dispatch._PLAIN, dispatch._NUMBERS, dispatch._note, dispatch._kept


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    variant: str | Variant = "causal",
    softmax_scale: float | None = None,
    page_layout: str = "NHD",
    num_splits: int | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    package: str | None = None,
    **arguments: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``attention``, for keys and values in the pages of a cache. Forward alone.

    q is (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with ``cu_seqlens_q`` (batch + 1,) int32 and
    ``max_seqlen_q``, at least the longest. k_pages and v_pages are (pages, page_size, kv_heads, head_dim), or (pages,
    kv_heads, page_size, head_dim) with ``page_layout='HND'``. Key j of sequence b is row j % page_size of page
    page_table[b, j // page_size]; page_table is (batch, max_pages) int32. seqused_k (batch,) int32 counts the keys of
    each sequence, those of its own queries among them: ``q_pos`` puts the last query at the last key. Entries of
    page_table beyond a length are not read, and rows of a page beyond a length do not matter, whatever they hold.

    ``out`` takes the output, which is then returned. With ``return_lse`` the log-sum-exp comes too, float32, (heads,
    total_q) with ``cu_seqlens_q``, else (batch, heads, seqlen_q).

    ``num_splits`` says how many blocks share the keys of a sequence, ``split_size`` how many keys each of them takes;
    left out, the kernel chooses. With a ``split_size`` the bits of a row depend on its own sequence alone.

    Whether a page is one of the cache, and what lengths and offsets hold, is checked on the CPU and under
    ``attngen.debug()`` only, since reading it would wait for the GPU. Raises CallError and NoKernelError as
    ``attention`` does, and CallError where a gradient is wanted and a kernel would run: the reference has gradients.
    """
    call = _traced if dispatch.is_traced(q) else run
    return call(
        q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, variant, softmax_scale, page_layout,
        num_splits, split_size, out, return_lse, backend, package, arguments,
    )  # fmt: skip


def _traced(*given: Any) -> Any:
    from attngen.runtime import paged_operators

    return paged_operators.call(*given)


def run(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Any,
    seqused_k: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    variant: str | Variant,
    softmax_scale: Any,
    page_layout: str,
    num_splits: Any,
    split_size: Any,
    out: Tensor | None,
    return_lse: bool,
    backend: str | None,
    package: str | None,
    arguments: Mapping[str, Any],
) -> Any:
    """Run a call now, whether it comes from a program or from an operator."""
    if DROPOUT_P.name in arguments:
        arguments = dispatch._with_state(q, variant, package, arguments)
    on_gpu = dispatch._on_gpu(q)
    if not on_gpu or backend == "reference" or debugging.active() or not (
        type(k_pages) in _PLAIN and type(v_pages) in _PLAIN
    ):  # fmt: skip
        call, _ = _bind(
            q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, variant, softmax_scale, page_layout,
            num_splits, split_size, out, return_lse, backend, package, arguments,
        )  # fmt: skip
        if debugging.active():
            debugging.check(call)
        if backend == "reference" or not on_gpu:
            require_reference(call, backend)
            return _run_reference(call, as_rows(q), k_pages, v_pages, out)
    if forward_ad._current_level >= 0 and carries_tangent(q, k_pages, v_pages, *arguments.values()):
        raise CallError("kernels have no forward-mode derivatives; backend='reference' has")
    if torch.is_grad_enabled() and dispatch._asks_for_gradient(q, k_pages, v_pages, arguments):
        raise CallError(
            "keys in pages have no backward kernel; torch.no_grad() tells that no gradient is wanted, and "
            "backend='reference' differentiates, slowly"
        )
    shape, strides = q.shape, q.stride()
    if len(shape) == 4 and shape[1] > 1 and shape[0] > 1 and strides[0] != shape[1] * strides[1]:
        q = as_rows(q)
        strides = q.stride()
    # The cache's key: everything that checks, selection and the packed template depend on.
    addresses = empty(q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr())
    key: list[Any] = [
        page_layout, variant if isinstance(variant, str) else id(variant), package, backend, return_lse,
        registry.generation, max_seqlen_q, num_splits, split_size,
        q.dtype, shape, strides, q.get_device(), addresses[0] & 15,
        k_pages.dtype, k_pages.shape, k_pages.stride(), k_pages.get_device(), addresses[1] & 15,
        v_pages.dtype, v_pages.shape, v_pages.stride(), v_pages.get_device(), addresses[2] & 15,
    ]  # fmt: skip
    addresses[PAGE_TABLE] = _note(key, page_table)
    addresses[SEQUSED_K] = _note(key, seqused_k)
    if cu_seqlens_q is not None:
        addresses[CU_SEQLENS_Q] = _note(key, cu_seqlens_q)
    if out is not None:
        key.append("out")
        addresses[OUT] = _note(key, out)
    for name, value in arguments.items():
        key.append(name)
        if type(value) not in _NUMBERS and isinstance(value, Tensor):
            addresses.append(_note(key, value))
    identity = tuple(key)
    prepared = _kept(identity)
    if prepared is None or prepared.sinks_only:
        call, found = _bind(
            q, k_pages, v_pages, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, variant, softmax_scale, page_layout,
            num_splits, split_size, out, return_lse, backend, package, arguments,
        )  # fmt: skip
        if prepared is None:
            prepared = dispatch._prepare(call, found, addresses, variant, package, backend, arguments)
            dispatch._PREPARED.put(identity, prepared)
        if prepared.sinks_only:
            return given_or_new(out, *without_keys(call))
    return prepared(q, addresses, softmax_scale, arguments, None, out)


def _bind(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, seqused_k: Any, cu_seqlens_q: Any, max_seqlen_q: Any,
    variant: str | Variant, softmax_scale: Any, page_layout: str, num_splits: Any, split_size: Any, out: Any,
    return_lse: bool, backend: str | None, package: str | None, arguments: Mapping[str, Any],
) -> tuple[Call, Found]:  # fmt: skip
    paging = Paging(page_table, cu_seqlens_q, max_seqlen_q, num_splits, split_size, out)
    return bind_paged_call(
        as_rows(q), k_pages, v_pages, paging, variant, softmax_scale, seqused_k, return_lse, page_layout, backend,
        package, arguments,
    )  # fmt: skip


def _run_reference(
    call: Call, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    from attngen.runtime.reference import reference

    with torch.autocast(q.device.type, enabled=False):
        found = reference(call, q, k_pages, v_pages)
    result, lse = found if out is None else (out.copy_(found[0]), found[1])
    return (result, lse) if call.return_lse else result
