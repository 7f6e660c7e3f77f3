"""transformers' continuous batching on kernels that read keys in pages (``transformers.use_pages``).

transformers keeps keys in blocks, and tells an attention which rows of the cache to write and to read, as indices of
single tokens. Where a layer sees all earlier keys these are whole blocks, one after the other, from which the page
table is computed on the device: nothing is gathered. A layer with a sliding window has a cache of its window alone,
which is read before it is overwritten: its keys are gathered, as transformers does for every attention, and packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn.cache import CachedCall, attend_cached
from attngen.integrations.transformers.versions import cache_given, gathered, kept, longest, of_kind, paged_name
from attngen.runtime.operations.append.call import append_kv

#: Arguments of models that paged attention cannot serve: sinks of each query, and keys or blocks that a query selects.
_ELSEWHERE = ("sinks", "indices", "block_indices")


def paged_attention(
    packed: Callable[..., tuple[Tensor, None]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | Mapping[str, Tensor] | None = None,
    read_index: Sequence[Tensor] = (),
    write_index: Sequence[Tensor] = (),
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention of query (1, h, total_q, d) over a cache, as (1, total_q, h, d), and no weights.

    key and value (1, hk, total_q, d) are new, and are written into the cache first. ``packed`` computes attention of
    packed sequences, where keys are not read from pages. Raises CallError without a cache, and NoKernelError for what
    no built kernel takes.
    """
    for name in _ELSEWHERE:
        if options.get(name) is not None:
            raise NoKernelError(
                f"{type(module).__name__} passes {name}, which attention over pages does not take; "
                "attn_implementation='attngen' is without continuous batching"
            )
    cache = cache_given(options)
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise CallError(
            f"{paged_name()} is for continuous batching; attn_implementation='attngen' serves a plain forward"
        )
    layer: int = module.layer_idx
    own = kept(cache, layer)
    longest_q, longest_k = longest(options, own.kind)
    starts_k = of_kind(cu_seq_lens_k, own.kind)
    if own.pages is None:
        options["cu_seq_lens_k"] = cu_seq_lens_k
        k, v = gathered(cache, layer, key, value, read_index, write_index, options)
        return packed(
            module, query, k, v, None, scaling=scaling, is_causal=True, sliding_window=own.window, softcap=softcap,
            s_aux=s_aux, cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=starts_k, max_length_q=longest_q,
            max_length_k=longest_k,
        )  # fmt: skip
    k_pages, v_pages = own.pages
    reads, writes = read_index[own.group], write_index[own.group]
    new_k, new_v = (new.transpose(1, 2)[0].to(k_pages.dtype) for new in (key, value))
    with torch.no_grad():
        append_kv(new_k, new_v, k_pages, v_pages, slots=writes, cu_seqlens=cu_seq_lens_q)
    rows = reads if reads.numel() else writes  # nothing to read: all keys are new
    size = k_pages.shape[1]
    table = page_table(rows, starts_k, size, -(-longest_k // size))
    call = CachedCall(
        q=query.transpose(1, 2)[0].to(k_pages.dtype), k_cache=k_pages, v_cache=v_pages, page_table=table,
        lengths=starts_k.diff(), cu_seqlens_q=cu_seq_lens_q, max_seqlen_q=longest_q, softmax_scale=scaling,
        **seen(sliding_window, softcap, s_aux),
    )  # fmt: skip
    return attend_cached(call)[None], None


def seen(sliding_window: int | None, softcap: float | None, s_aux: Tensor | None) -> dict[str, Any]:
    """Return the mask and score of a layer that keeps all keys, as fields of a ``CachedCall``."""
    sides = (-1 if sliding_window is None else sliding_window - 1, 0)
    return {"causal": True, "window_size": sides, "softcap": softcap or 0.0, "sinks": s_aux}


def page_table(rows: Tensor, starts: Tensor, page_size: int, width: int) -> Tensor:
    """Return the pages (b, width) int32 of sequences whose keys are in ``rows`` (total_k,) of a cache.

    ``starts`` (b + 1,) says where those of each sequence start; keys fill page after page. Entries after a sequence's
    last page belong to the next sequences, and are not read.
    """
    first = starts[:-1, None].long() + page_size * torch.arange(width, device=rows.device)
    return torch.div(rows[first.clamp(max=rows.shape[0] - 1)], page_size, rounding_mode="floor").to(torch.int32)
