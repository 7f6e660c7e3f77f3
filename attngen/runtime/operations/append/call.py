"""Appending keys and values to a cache, with rotary embedding of keys and queries on the way.

On a GPU one kernel does it, where a package has one and the call suits it (``append_kernel``). Elsewhere it is plain
torch, with the same results (``append_torch``).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.operations.append.arguments import Append, check, refuse_gradients
from attngen.runtime.operations.append.path import APPEND


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    slots: Tensor | None = None,
    batch_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    page_layout: Literal["NHD", "HND"] = "NHD",
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | None:
    """Append new keys and values to a cache, in place, and rotate them and their queries if asked.

    On a GPU it is one launch, which allocates nothing but rotated queries without a ``q_out``: any spec with
    ``layout: paged`` builds the kernel of its dtype. It moves rows 16 bytes at a time; calls whose rows are not aligned
    to 16 bytes, calls in float64, and calls without a kernel run a few operations of torch. There is no derivative.

    Nothing is read back from a GPU: a token without a place (beyond the cache or the page table, in a page that does
    not exist, or beyond ``rotary_cos``) is not written. On the CPU and under ``attngen.debug()`` it raises CallError.
    Two tokens must not go to the same place.

    Args:
        k: (batch, seqlen_new, kv_heads, head_dim); or (total_new, kv_heads, head_dim) with ``cu_seqlens``, or with
            ``slots`` alone, as the tokens of one sequence. For an 8-bit cache in bfloat16, float16 or float32, else in
            the dtype of the cache.
        v: The same with its own head_dim.
        k_cache: (pages, page_size, kv_heads, head_dim), or of a dense cache (entries, rows, kv_heads, head_dim).
        v_cache: The same with the head_dim of v.
        cache_seqlens: (batch,) int32, the number of keys that each sequence had before; it is not changed. New token j
            of sequence b is at position cache_seqlens[b] + j.
        page_table: (batch, max_pages) int32: a token goes to its position in the pages of its sequence.
        slots: (batch, seqlen_new) or (total_new,), int32 or int64: a token goes to row ``slot % page_size`` of page
            ``slot // page_size``, or nowhere if its slot is negative. With neither ``page_table`` nor ``slots`` it
            goes to its row of a dense cache.
        batch_index: (batch,) int32, the entry of a dense cache of each sequence; b by default.
        cu_seqlens: (batch + 1,) int32, where packed tokens of each sequence begin. Rows after the last sequence are
            not written.
        page_layout: ``'NHD'`` as above, or ``'HND'``, which exchanges the two middle axes of the caches.
        q: Queries to rotate, of the shape of k with any number of heads.
        q_out: Tensor for the rotated queries, which may be q itself; a new one by default.
        rotary_cos: (positions, rotary_dim / 2). The first ``rotary_dim`` numbers of each key and query are rotated, in
            float32, or float64 for float64.
        rotary_sin: The same for sines.
        rotary_interleaved: Pairs are numbers 2 i and 2 i + 1, instead of i and i + rotary_dim / 2.
        rotary_offsets: (batch,) int32: token j of sequence b takes row rotary_offsets[b] + j of the tables, instead of
            that of its position.
        k_descale: Scales of a float8_e4m3fn cache, positive float32: (), (batch, kv_heads), or, with ``page_table`` or
            ``slots``, (pages, kv_heads); (pages, kv_heads, 1) if there are as many pages as sequences. Of the shape of
            the cache without head_dim, with any strides, they are a scale for each row, which the call writes: the
            largest magnitude of the row, divided by 448, and 1 where that is 0. Numbers are rotated, rounded to their
            dtype, divided by their scale, rounded to nearest even, and saturate at 448. The scale of a page must not
            change while the page holds keys.
        v_descale: The same of v.

    Returns:
        The rotated queries, or None without ``q``.

    Raises:
        CallError: Arguments are wrong or contradict each other.
    """
    call = tuple.__new__(Append, (
        k, v, k_cache, v_cache, cache_seqlens, page_table, slots, batch_index, cu_seqlens, page_layout, q, q_out,
        rotary_cos, rotary_sin, rotary_interleaved, rotary_offsets, k_descale, v_descale,
    ))  # fmt: skip
    return append(call)


def append(call: Append) -> Tensor | None:
    """Run a call of ``append_kv`` now, or make it an operator of a trace."""
    return APPEND.serve(call, _traced)


def _traced(call: Append) -> Tensor | None:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.append import operator as append_operator

    refuse_gradients(call)
    if check(call).of_rows:
        raise CallError(
            "append_kv writes the scales of rows, which its operator in compiled programs does not say; call it "
            "outside of them"
        )
    if call.q is not None and call.q_out is None:
        call = call._replace(q_out=call.q.new_empty(call.q.shape))
    append_operator.call(call)
    rotated: Tensor | None = call.q_out
    return rotated
