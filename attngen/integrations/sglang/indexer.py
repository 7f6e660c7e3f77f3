"""SGLang's indexer of sparse models with attngen's scores and selection, where ``ATTNGEN_INDEXER`` asks for them.

An indexer asks the attention backend for metadata, and its two methods that score and select get these. ``serve``
replaces both methods by functions which serve an indexer that got ``IndexerMetadata``, from this backend, and call
SGLang's own for others. Projections, caches, the bound of memory and prompts all of whose keys are selected stay
SGLang's. Imported by SGLang alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer, get_token_to_kv_pool
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.mqa_logits_utils import mqa_logits_should_chunk
from torch import Tensor

from attngen.integrations.engines.indexer import (
    KEY_BYTES,
    MOST_HEADS,
    VARIABLE,
    IndexKeys,
    Requests,
    index_keys,
    rows_of,
    select_keys,
)


@dataclass(frozen=True)
class IndexerMetadata(DSAIndexerMetadata):
    """Metadata of a step for an indexer that is served."""

    @property
    def in_slots(self) -> bool:
        """Whether attention takes slots of the pool, not positions within a request."""
        return bool(envs.SGLANG_DSA_FUSE_TOPK.get()) and not self.force_unfused_topk


def metadata_of(theirs: DSAIndexerMetadata) -> IndexerMetadata:
    """SGLang's metadata of a step, for an indexer that is served."""
    return IndexerMetadata(**{field.name: getattr(theirs, field.name) for field in fields(theirs)})


def serve() -> None:
    """Put attngen's scores and selection in the place of SGLang's methods; again is the same as once."""
    for name, ours in (("_get_topk_paged", _few_tokens), ("_get_topk_ragged", _prompts)):
        theirs = getattr(Indexer, name)
        if not hasattr(theirs, "attngen"):
            setattr(Indexer, name, _in_place_of(theirs, ours))


def _in_place_of(theirs: Any, ours: Any) -> Any:
    """A method that serves indexers with ``IndexerMetadata`` by ``ours``, and others by ``theirs``."""

    def method(indexer: Any, *args: Any, **options: Any) -> Tensor:
        if not any(isinstance(one, IndexerMetadata) for one in (*args, *options.values())):
            return theirs(indexer, *args, **options)
        reason = _refusal(indexer)
        if reason is not None:
            raise NotImplementedError(f"{VARIABLE} does not serve {reason}; unset it")
        return ours(indexer, *args, **options)

    method.attngen = True  # type: ignore[attr-defined]
    return method


def _refusal(indexer: Any) -> str | None:
    """First feature of an indexer that is not supported, or None."""
    if indexer.head_dim != KEY_BYTES or indexer.n_heads > MOST_HEADS:
        form = f"{indexer.n_heads} heads of {indexer.head_dim}"
        return f"an indexer with {form}, only with up to {MOST_HEADS} of {KEY_BYTES}"
    if indexer.num_init_tokens or indexer.num_local_tokens:
        return "an indexer that always selects the first or the last tokens"
    return None


def _keys(indexer: Any, layer: int) -> IndexKeys:
    pool = get_token_to_kv_pool()
    return index_keys(indexer._get_index_k_read_buffer(pool, layer), pool.index_page_size)


def _result(q: Tensor, tokens: int, number: int, result: Tensor | None = None) -> Tensor:
    """A result with -1 for tokens behind those of the step."""
    made = q.new_empty((q.shape[0], number), dtype=torch.int32) if result is None else result
    made[tokens:] = -1
    return made


def _few_tokens(
    indexer: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor, weights: Tensor, metadata: IndexerMetadata
) -> Tensor:
    """Select for decoding and for drafts, of which all requests have as many. A graph serves steps of any lengths."""
    tokens, used = sum(metadata.get_dsa_extend_len_cpu()), metadata.get_seqlens_int32()
    table, lengths, of_each = metadata.get_page_table_64(), used, 1
    if not forward_batch.forward_mode.is_decode_or_idle():
        lengths, of_each = metadata.get_seqlens_expanded(), tokens // max(len(used), 1)
        table = table[::of_each]  # which has a row for each token
    keys, shape = _keys(indexer, layer_id), (tokens // of_each, of_each)
    out = _result(q_fp8, tokens, indexer.index_topk)
    if tokens:
        q, gates, into = (one[:tokens].unflatten(0, shape) for one in (q_fp8, weights.squeeze(-1), out))
        requests = Requests(table, used, table.shape[1] * keys.page_size)
        select_keys(
            q, gates, keys, requests, lengths[:tokens].view(shape), indexer.index_topk, slots=metadata.in_slots,
            out=into,
        )  # fmt: skip
    return out


def _prompts(
    indexer: Any, enable_dual_stream: bool, forward_batch: Any, layer_id: int, q_fp8: Tensor, weights: Tensor,
    metadata: IndexerMetadata, topk_result: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Select for prompts and parts of them, as many tokens at a time as SGLang's bound of memory allows."""
    del enable_dual_stream, forward_batch
    step, lengths = metadata.attn_metadata, metadata.get_seqlens_expanded()
    tokens, longest = len(lengths), int(metadata.get_indexer_seq_len_cpu().max())
    out = _result(q_fp8, tokens, indexer.index_topk, topk_result)
    keys, gates = _keys(indexer, layer_id), weights.squeeze(-1)
    whole = Requests(metadata.get_page_table_64(), metadata.get_seqlens_int32(), longest, step.cu_seqlens_q)
    split, budget = mqa_logits_should_chunk(
        num_rows=tokens, num_cols=longest, rocm=False,
        get_budget_bytes=lambda: indexer._get_mqa_logits_budget_bytes(q_fp8.device.index),
    )  # fmt: skip
    size = max(budget // (4 * longest), 1) if split else tokens
    for first in range(0, tokens, size):
        rows = slice(first, min(first + size, tokens))
        requests = rows_of(whole, rows.start, rows.stop) if split else whole
        select_keys(
            q_fp8[rows], gates[rows], keys, requests, lengths[rows], indexer.index_topk, slots=metadata.in_slots,
            out=out[rows],
        )  # fmt: skip
    return out
