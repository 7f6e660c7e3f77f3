"""vLLM's indexer of sparse models with attngen's scores and selection, where ``ATTNGEN_INDEXER`` asks for them.

A layer calls ``sparse_attn_indexer`` by its name in the module of its model. That name is bound to another function
when the backend of such a layer is made: it serves the layers of this backend, and calls vLLM's own for others.
Metadata, caches, projections, the split of long steps and the ranks' shares of rows stay vLLM's. Imported by vLLM
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import (
    PrefillRowShard,
    _reserve_row_shard_exchange_transient,
)

from attngen.integrations.engines.block_lists import lengths_of_tokens
from attngen.integrations.engines.indexer import (
    KEY_BYTES,
    MOST_HEADS,
    VARIABLE,
    Requests,
    index_keys,
    require_kernels,
    select_keys,
)
from attngen.integrations.engines.layers import bound_of

#: The name that models call.
_NAME = "sparse_attn_indexer"

#: Names of the caches of the layers that are served.
_served: set[str] = set()


def serve(indexer: Any, parallel: Any) -> None:
    """Select keys for a layer with ``indexer``, vLLM's module. Raises NotImplementedError for one that is not served,
    and NoKernelError."""
    module = sys.modules[type(indexer).__module__]
    reason = _refusal(indexer, parallel, module)
    if reason is not None:
        raise NotImplementedError(f"{VARIABLE} does not serve {reason}; unset it")
    require_kernels(indexer.topk_indices_buffer.device)
    _served.add(indexer.k_cache.prefix)
    theirs = getattr(module, _NAME)
    if not hasattr(theirs, "attngen"):
        setattr(module, _NAME, _in_place_of(theirs))


def _refusal(indexer: Any, parallel: Any, module: Any) -> str | None:
    """First feature of a layer that is not supported, or None."""
    if not hasattr(module, _NAME):
        return f"models of {module.__name__}, which do not call {_NAME}"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    if indexer.indexer_op.use_fp4_cache or indexer.quant_block_size != KEY_BYTES:
        return "keys of an indexer in other forms than e4m3 with one scale for each"
    if indexer.head_dim != KEY_BYTES or indexer.n_head > MOST_HEADS:
        return (
            f"an indexer with {indexer.n_head} heads of {indexer.head_dim}, only with up to {MOST_HEADS} of {KEY_BYTES}"
        )
    return None


class _Call(NamedTuple):
    """A layer's call: queries (tokens, heads, 128), their weights (tokens, heads), its cache (pages, page_size, 132),
    and where ``number`` positions of each token go, in rows of at least as many."""

    q: Tensor
    weights: Tensor
    pages: Tensor
    out: Tensor
    number: int

    def select(self, rows: slice, requests: Requests, lengths: Tensor) -> None:
        """Select the keys of some tokens; ``lengths`` as of ``select_keys``, which has the tokens of each request, if
        these have as many."""
        q, weights, out = self.q[rows], self.weights[rows], self.out[rows, : self.number]
        if requests.starts is None:
            q, weights, out = (tensor.unflatten(0, tuple(lengths.shape)) for tensor in (q, weights, out))
        keys = index_keys(self.pages, self.pages.shape[1])
        select_keys(q, weights, keys, requests, lengths, self.number, out=out)


def _in_place_of(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function in the place of vLLM's ``sparse_attn_indexer``, which it calls for layers of other backends."""

    def sparse_attn_indexer(
        hidden_states: Tensor, k_cache_prefix: Any, kv_cache: Tensor, q_quant: Tensor, q_scale: Tensor | None,
        k: Tensor | None, weights: Tensor, quant_block_size: int, scale_fmt: str | None, topk_tokens: int,
        head_dim: int, max_model_len: int, total_seq_lens: int, topk_indices_buffer: Tensor, **options: Any,
    ) -> Tensor:  # fmt: skip
        if k_cache_prefix not in _served:
            return theirs(
                hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt,
                topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, **options,
            )  # fmt: skip
        assert options["skip_k_cache_insert"], "the model writes its keys"
        call = _Call(q_quant, weights, kv_cache, topk_indices_buffer, topk_tokens)
        clear = 0 if options.get("skip_topk_buffer_clear") else hidden_states.shape[0]
        _select(call, k_cache_prefix, options["dense_mha_metadata_layer_name"], clear)
        return topk_indices_buffer

    made: Callable[..., Tensor] = eager_break_during_capture(sparse_attn_indexer)
    made.attngen = True  # type: ignore[attr-defined]
    return made


def _select(call: _Call, cache: str, attention: str, clear: int) -> None:
    """Select for all tokens of a step, whose metadata are those of two layers: ``cache``, and ``attention`` if that may
    make a selection needless. ``clear``: rows that are to hold -1 where nothing is selected."""
    context = get_forward_context()
    of_layers, device = context.attn_metadata, call.q.device
    if not isinstance(of_layers, dict):  # vLLM measures memory
        torch.empty(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 2**20, dtype=torch.uint8, device=device)
        _reserve_row_shard_exchange_transient(call.out, device)
        return
    step, in_graph = of_layers[cache], context.cudagraph_runtime_mode == CUDAGraphMode.FULL
    in_graph = in_graph or (call.q.is_cuda and torch.cuda.is_current_stream_capturing())
    if not in_graph and _is_dense(of_layers.get(attention)):
        return
    call.out[:clear] = -1
    if step.num_prefills:
        _prefill(call, step)
    if step.num_decode_tokens:
        _decode(call, step, in_graph)


def _is_dense(attention: Any) -> bool:
    """Whether attention of a step runs over all keys, whatever is selected."""
    prompts = getattr(attention, "prefill", None)
    return bool(getattr(prompts, "use_dense_mha", False)) and attention.num_decode_tokens == 0


def _prefill(call: _Call, step: Any) -> None:
    """Select for prompts, in vLLM's chunks, which bound the memory of scores."""
    shard = PrefillRowShard.from_metadata(step.prefill, step.num_decode_tokens)
    for chunk in step.prefill.chunks:
        first, end, begins, ends = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
        if shard is not None:
            of_rank = shard.narrow(chunk)
            if of_rank is None:
                continue
            first, end, begins, ends = of_rank
        if end > first:
            requests, lengths = _of_chunk(chunk, begins, ends)
            call.select(slice(first, end), requests, lengths)
    if shard is not None:
        shard.exchange_topk(call.out, call.number)


def _of_chunk(chunk: Any, begins: Tensor, ends: Tensor) -> tuple[Requests, Tensor]:
    """Requests and lengths of the tokens of a chunk, the same for all layers. ``begins`` and ``ends`` of their keys
    count through all requests of the chunk."""
    known = getattr(chunk, "attngen_requests", None)
    if known is None:
        lengths = ends - begins
        starts = torch.searchsorted(begins, chunk.cu_seq_lens, out_int32=True)
        last = (starts[1:] - 1).clamp(min=0)
        used = lengths[last].where(starts.diff() > 0, 0)
        known = Requests(chunk.block_table, used, chunk.max_seqlen_k, starts), lengths
        chunk.attngen_requests = known
    return known


def _decode(call: _Call, step: Any, in_graph: bool) -> None:
    """Select for decoding and drafts. A graph serves steps of any lengths, so scores have as many columns as tables."""
    decode, tokens = step.decode, step.num_decode_tokens
    requests, table = decode.decode_lens.shape[0], decode.block_table
    longest = table.shape[1] * call.pages.shape[1]
    if not in_graph:
        longest = min(longest, bound_of(max(step.max_seq_len, 1)))
    seq_lens = decode.seq_lens[:requests]
    used = seq_lens[:, -1].contiguous()
    if decode.requires_padding or tokens % requests:
        counts = decode.decode_lens
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        _, lengths = lengths_of_tokens(starts, used, tokens)
        call.select(slice(0, tokens), Requests(table[:requests], used, longest, starts), lengths)
        return
    lengths = seq_lens.reshape(requests, tokens // requests)
    call.select(slice(0, tokens), Requests(table[:requests], used, longest), lengths)
