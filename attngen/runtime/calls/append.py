"""Appending keys and values to a cache, with rotary embedding of keys and queries on the way.

On a GPU one kernel does it, where a package has one and the call suits it (``append_kernel``). Elsewhere it is plain
torch, with the same results (``append_torch``).
"""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.arguments.torch_state import is_traced, watching
from attngen.runtime.helpers.append_arguments import Append, check, refuse_gradients
from attngen.runtime.helpers.append_helper import APPEND


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
    page_layout: str = "NHD",
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | None:
    """Append new keys and values to a cache, in place, and return the rotated queries, if there are any.

    k is (batch, seqlen_new, kv_heads, head_dim), v the same with its own head_dim; or (total_new, kv_heads, head_dim)
    with ``cu_seqlens`` (batch + 1,) int32, of which rows after the last sequence are not written, or with ``slots``
    alone, as the tokens of one sequence. ``cache_seqlens``
    (batch,) int32 counts the keys that each sequence had before: new token j of sequence b is at position
    cache_seqlens[b] + j. It is not changed.

    Where a token goes:

    - with ``page_table`` (batch, max_pages) int32, to its position in the pages of its sequence;
    - with ``slots`` (batch, seqlen_new) or (total_new,), int32 or int64, to row ``slot % page_size`` of page
      ``slot // page_size``; a negative slot is not written;
    - with neither, to its row of a dense cache, entry b, or ``batch_index[b]`` (batch,) int32.

    k_cache and v_cache are (pages, page_size, kv_heads, head_dim), of a dense cache (entries, rows, kv_heads,
    head_dim); with ``page_layout='HND'`` the two middle axes are exchanged.

    ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) rotate the first ``rotary_dim`` numbers of each key
    and of each query: pairs are number i and i + rotary_dim / 2, or with ``rotary_interleaved`` 2 i and 2 i + 1. A
    token takes the row of its position, or ``rotary_offsets[b]`` + j with ``rotary_offsets`` (batch,) int32. The
    arithmetic is float32, or float64 for float64. ``q`` has the shape of k, with any number of heads; the rotated
    queries go to ``q_out``, which may be q itself, or else to a new tensor.

    A cache in 8 bits (float8_e4m3fn) takes k and v in bfloat16, float16 or float32 with ``k_descale`` and
    ``v_descale``, positive float32: numbers are divided by their scale and rounded to nearest even, after the rotation
    was rounded to their dtype, and saturate at 448. Scales have shape (), (batch, kv_heads), or, with ``page_table`` or
    ``slots``, (pages, kv_heads); the scale of a page must not change while the page holds keys. If there are as many
    pages as sequences, pass (pages, kv_heads, 1) for scales of pages.

    Positions beyond the cache or the page table, pages that the cache does not have, and positions beyond
    ``rotary_cos`` raise CallError on the CPU and under ``attngen.debug()``. On a GPU nothing is read back: tokens that
    have no place are not written. Two tokens must not go to the same place. There is no derivative.

    On a GPU it is one launch, which allocates nothing but rotated queries without a ``q_out``: any spec with
    ``layout: paged`` builds the kernel of its dtype. It moves rows 16 bytes at a time; calls whose rows are not aligned
    to 16 bytes, calls in float64, and calls without a kernel run a few operations of torch.
    """
    call = tuple.__new__(Append, (
        k, v, k_cache, v_cache, cache_seqlens, page_table, slots, batch_index, cu_seqlens, page_layout, q, q_out,
        rotary_cos, rotary_sin, rotary_interleaved, rotary_offsets, k_descale, v_descale,
    ))  # fmt: skip
    return append(call)


def append(call: Append) -> Tensor | None:
    """Run a call of ``append_kv`` now, or make it an operator of a trace."""
    rotated: Tensor | None = _traced(call) if is_traced(call.k) or watching() else APPEND.run(call)
    return rotated


def _traced(call: Append) -> Tensor | None:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.calls import append_operator

    refuse_gradients(call)
    check(call)
    if call.q is not None and call.q_out is None:
        call = call._replace(q_out=call.q.new_empty(call.q.shape))
    append_operator.call(call)
    rotated: Tensor | None = call.q_out
    return rotated
