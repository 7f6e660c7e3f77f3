"""vLLM's models whose tokens choose blocks of keys, with attngen's scores, selection and attention, where
``ATTNGEN_BLOCK_LISTS`` asks for them: MiniMax-M3 (MSA) and Qwen3.8-Flash-Next (QSA).

vLLM has no registry for these kernels, so names of its modules are bound to other functions: of MSA two methods, of its
implementations in Triton, and of QSA the four functions that its layers import when they run. Projections, caches,
metadata, and buffers of lists stay vLLM's. Imported where a model is, by ``when_imported``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import signature, unwrap
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attngen.integrations.engines.block_lists import (
    VARIABLE,
    Lists,
    TokenRows,
    attend_to_blocks,
    choosable,
    choose_blocks,
    choose_head_blocks,
    counts_of,
    lengths_of_tokens,
    require_kernels,
    start_lists,
    tokens_of,
)
from attngen.integrations.engines.indexer import Requests
from attngen.integrations.shared.catalogue import is_shipped
from attngen.runtime.arguments.checked import ATTENTION_DTYPES

#: The most heads of MSA's index that kernels take (docs/index_scores.md).
_MOST_HEADS = 8


def _refuse(reason: str) -> None:
    raise NotImplementedError(f"{VARIABLE} does not serve {reason}; unset it")


# --- MSA ------------------------------------------------------------------------------------------------------


def _lists_of_msa(impl: Any) -> Lists:
    """The lists of an indexer. Raises NotImplementedError for one that is not served."""
    lists = Lists(impl.block_size, impl.topk_blocks - impl.local_blocks, impl.local_blocks, per_head=True)
    if impl.init_blocks or impl.score_type != "max":
        _refuse("an indexer that always selects the first blocks, or has other scores than the largest product")
    if not is_shipped(lists.name) or lists.count < 1:
        _refuse(f"{impl.topk_blocks} blocks of {lists.block} keys, {impl.local_blocks} of them before each token")
    if impl.num_index_heads > _MOST_HEADS or impl.num_index_heads != impl.num_kv_heads:
        _refuse(f"an indexer of {impl.num_index_heads} heads for {impl.num_kv_heads} KV heads")
    return lists


def choose_for_msa(impl: Any, index_query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """In the place of ``MiniMaxM3IndexerTritonImpl.forward``: writes lists into the model's buffer."""
    from vllm.forward_context import get_forward_context

    lists = _lists_of_msa(impl)
    of_layers = get_forward_context().attn_metadata
    if not isinstance(of_layers, dict):  # vLLM measures memory
        return None, None
    step, keys = of_layers[impl.index_cache.prefix], impl.index_cache.kv_cache
    decoding, tokens, heads = step.num_decode_tokens, step.num_actual_tokens, impl.num_index_heads
    require_kernels(lists, keys.shape[-1], ATTENTION_DTYPES[keys.dtype], keys.device)
    q = index_query[:tokens].view(tokens, heads, impl.index_head_dim)
    buffer = impl.topk_indices_buffer[:tokens]
    if step.num_decodes:
        requests, blocks = _decoding_of_msa(step, lists, buffer[:decoding], heads)
        of_requests = q[:decoding].unflatten(0, (step.num_decodes, -1))
        choose_head_blocks(of_requests, keys, lists, requests, blocks, buffer[:decoding])
    if step.num_prefills:
        requests, blocks = _prompts_of_msa(step, lists, buffer[decoding:], heads)
        choose_head_blocks(q[decoding:], keys, lists, requests, blocks, buffer[decoding:])
    by_head = buffer.transpose(0, 1)
    return by_head[:, :decoding] if step.num_decodes else None, by_head[:, decoding:] if step.num_prefills else None


def _decoding_of_msa(step: Any, lists: Lists, out: Tensor, heads: int) -> tuple[Requests, Tensor]:
    """Requests that decode, and the blocks that tokens may choose from. The first layer of a step computes them, and
    writes what the lists of all layers begin with."""
    of_step = step.decode
    known = getattr(of_step, "attngen_choice", None)
    if known is None:
        lengths = _lengths_of_decoding(of_step)
        start_lists(lists, lengths, heads, out)
        requests = Requests(of_step.block_table, of_step.seq_lens, of_step.max_seq_len)
        known = of_step.attngen_choice = requests, choosable(lists, lengths, heads)
    result: tuple[Requests, Tensor] = known
    return result


def _lengths_of_decoding(of_step: Any) -> Tensor:
    """Keys that each token of requests that decode sees."""
    before = torch.arange(1 - of_step.decode_query_len, 1, dtype=torch.int32, device=of_step.seq_lens.device)
    return (of_step.seq_lens[:, None] + before).clamp(min=0).flatten()


def _prompts_of_msa(step: Any, lists: Lists, out: Tensor, heads: int) -> tuple[Requests, Tensor]:
    of_step = step.prefill
    known = getattr(of_step, "attngen_choice", None)
    if known is None:
        _, lengths = lengths_of_tokens(of_step.cu_seqlens_q, of_step.seq_lens, len(out))
        start_lists(lists, lengths, heads, out)
        requests = Requests(of_step.block_table, of_step.seq_lens, of_step.max_seq_len, of_step.cu_seqlens_q)
        known = of_step.attngen_choice = requests, choosable(lists, lengths, heads)
    result: tuple[Requests, Tensor] = known
    return result


def attend_for_msa(
    impl: Any, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, *, query_fp8: Tensor | None = None
) -> Tensor:
    """In the place of ``MiniMaxM3SparseTritonImpl.forward``: attention to the lists of the model's buffer."""
    from vllm.forward_context import get_forward_context

    if impl.use_fp8_kv or query_fp8 is not None:
        _refuse("caches of keys and values in 8 bits")
    of_layers = get_forward_context().attn_metadata
    if not isinstance(of_layers, dict):
        return output
    step, columns = of_layers[layer.layer_name], impl.head_size
    tokens, decoding = step.num_actual_tokens, step.num_decode_tokens
    lists = Lists(impl.block_size, impl.topk_blocks, 0, per_head=True)
    chosen = layer.topk_indices_buffer[:tokens]
    q, out = (each[:tokens].view(tokens, impl.num_heads, columns) for each in (query, output))
    k, v = kv_cache.transpose(1, 2).split(columns, dim=-1)
    if step.num_decodes:
        of_step = step.decode
        shape = (step.num_decodes, of_step.decode_query_len)
        rows = getattr(of_step, "attngen_tokens", None)
        if rows is None:  # the same for all layers
            counts = counts_of(lists, _lengths_of_decoding(of_step), k.shape[2]).unflatten(0, shape)
            rows = of_step.attngen_tokens = TokenRows(of_step.block_table, of_step.seq_lens, counts)
        q_, chosen_, out_ = (each[:decoding].unflatten(0, shape) for each in (q, chosen, out))
        attend_to_blocks(q_, k, v, chosen_, lists, rows, impl.scale, out_)
    if step.num_prefills:
        of_step = step.prefill
        rows = getattr(of_step, "attngen_tokens", None)
        if rows is None:
            request, lengths = lengths_of_tokens(of_step.cu_seqlens_q, of_step.seq_lens, tokens - decoding)
            rows = tokens_of(lists, of_step.block_table, request, lengths, k.shape[2])
            of_step.attngen_tokens = rows
        q_, chosen_, out_ = (each[decoding:, None] for each in (q, chosen, out))
        attend_to_blocks(q_, k, v, chosen_, lists, rows, impl.scale, out_)
    return output


# --- QSA ------------------------------------------------------------------------------------------------------


def _lists_of_qsa(token_topk: int, compress_ratio: int) -> Lists:
    lists = Lists(compress_ratio, token_topk // compress_ratio, 1, per_head=False)
    if not is_shipped(lists.name):
        _refuse(f"blocks of {compress_ratio} keys for all heads")
    return lists


def _choose_for_qsa(
    q: Tensor, cache: Tensor, lists: Lists, requests: Requests, first: Tensor, seen: Tensor, out: Tensor
) -> None:
    """Write the blocks of some tokens, of which the first of each request sees ``first`` blocks and each ``seen``."""
    keys = cache.squeeze(2) if cache.dim() == 4 else cache
    require_kernels(lists, 256, ATTENTION_DTYPES[keys.dtype], keys.device)
    # At least the keys before a request's first token, since it sees that many complete blocks; `seen` has the number.
    context = first * lists.block + (lists.block - 2)
    choose_blocks(q, keys, q.shape[-1] ** -0.5, lists, requests, context, seen, out)


def select_decoding(
    q: Tensor, k_cache: Tensor, page_table: Tensor, visible_blocks: Tensor, token_topk: int, compress_ratio: int,
    decode_query_len: int, block_indices: Tensor,
) -> None:  # fmt: skip
    """In the place of ``qsa_select_paged_decode``: a graph serves steps of any lengths."""
    lists = _lists_of_qsa(token_topk, compress_ratio)
    of_each = visible_blocks.view(-1, decode_query_len)
    longest = page_table.shape[1] * k_cache.shape[1]
    requests = Requests(page_table, of_each[:, -1].contiguous(), longest)
    _choose_for_qsa(
        q.unflatten(0, (-1, decode_query_len)), k_cache, lists, requests, of_each[:, 0], visible_blocks, block_indices
    )


def select_prompts(
    q: Tensor, k_cache: Tensor, page_table: Tensor, query_start_loc: Tensor, visible_blocks: Tensor, token_topk: int,
    compress_ratio: int, max_query_len: int, block_indices: Tensor, max_seq_len: int,
) -> None:  # fmt: skip
    """In the place of ``qsa_select_paged_prefill``: as many tokens at a time as vLLM's bound of memory allows."""
    from vllm import envs

    del max_query_len
    lists = _lists_of_qsa(token_topk, compress_ratio)
    longest = min(-(-max_seq_len // compress_ratio), page_table.shape[1] * k_cache.shape[1])
    width = max(-(-longest // k_cache.shape[1]) * k_cache.shape[1], 1)
    size = max(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 2**20 // (4 * width), 1)
    starts = query_start_loc - query_start_loc[0]
    for first in range(0, len(q), size):
        end = min(first + size, len(q))
        own = starts.clamp(first, end)
        there, seen = own.diff() > 0, visible_blocks[first:end].contiguous()
        used = visible_blocks[(own[1:] - 1).clamp(min=0).long()].where(there, 0)
        begin = visible_blocks[own[:-1].clamp(max=len(q) - 1).long()].where(there, 0)
        requests = Requests(page_table, used, max(longest, 1), own - first)
        _choose_for_qsa(q[first:end], k_cache, lists, requests, begin, seen, block_indices[first:end])


def write_lists(
    block_indices: Tensor, query_positions: Tensor, visible_blocks: Tensor, compress_ratio: int, token_topk: int,
    out: Tensor,
) -> None:  # fmt: skip
    """In the place of ``expand_qsa_block_indices``: a row of the buffer holds the last block, chosen ones, how many
    keys its token sees and how many blocks are read; other columns are not. Rows that vLLM fills with -1 see none."""
    del visible_blocks
    lists = _lists_of_qsa(token_topk, compress_ratio)
    seen = query_positions + 1
    out[:, 0] = seen // compress_ratio
    out[:, 1 : lists.entries] = block_indices
    out[:, lists.entries] = seen
    out[:, lists.entries + 1] = counts_of(lists, seen, 1)


def attend_for_qsa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, logical_indices: Tensor, block_table: Tensor, token_to_req: Tensor,
    use_prefill_config: bool, out: Tensor | None = None, k_scale: float | None = None, v_scale: float | None = None, *,
    output_gate: Tensor,
) -> Tensor:  # fmt: skip
    """In the place of ``qsa_sparse_paged_attention``: attention to lists of ``write_lists``, times the sigmoid of a
    gate."""
    del use_prefill_config
    if k_scale is not None or v_scale is not None:
        _refuse("caches of keys and values in 8 bits")
    out = torch.empty_like(q) if out is None else out
    # The buffer has a column for each key of a full list, those of a last block but one, and their count.
    block = _block_of(logical_indices.shape[1])
    lists = _lists_of_qsa(logical_indices.shape[1] - block, block)
    chosen, last = logical_indices[:, : lists.entries], logical_indices[:, lists.entries : lists.entries + 2].t()
    seen, counts = torch.clamp(last, min=0, out=last.new_empty(last.shape))
    rows = TokenRows(block_table[token_to_req.long()], seen, counts[:, None])
    attend_to_blocks(q[:, None], k_cache, v_cache, chosen[:, None], lists, rows, q.shape[-1] ** -0.5, out[:, None])
    return out.mul_(output_gate.view_as(out).sigmoid())


def _block_of(columns: int) -> int:
    """Keys of a block by the columns of a buffer, which are a number of keys and one block: served are blocks of 4."""
    if columns % 4:
        _refuse(f"a buffer of {columns} columns for lists of blocks")
    return 4


# --- names ----------------------------------------------------------------------------------------------------

_MSA, _QSA = "vllm.models.minimax_m3.common", "vllm.models.qwen4_exp.nvidia.ops"

#: By vLLM's modules: names in them, of functions or methods, and what takes their place.
REPLACED: dict[str, dict[str, Any]] = {
    f"{_MSA}.indexer": {"MiniMaxM3IndexerTritonImpl.forward": choose_for_msa},
    f"{_MSA}.sparse_attention": {"MiniMaxM3SparseTritonImpl.forward": attend_for_msa},
    f"{_QSA}.qsa_indexer": {
        "qsa_select_paged_decode": select_decoding,
        "qsa_select_paged_prefill": select_prompts,
        "expand_qsa_block_indices": write_lists,
    },
    f"{_QSA}.qsa": {"qsa_sparse_paged_attention": attend_for_qsa},
}


def replace(module: ModuleType) -> None:
    """Bind the names of a module to attngen's functions. Raises NotImplementedError for a release with others."""
    for name, ours in REPLACED[module.__name__].items():
        owner, _, last = name.rpartition(".")
        place = getattr(module, owner, None) if owner else module
        theirs = getattr(place, last, None)
        if theirs is None or not _fits(ours, theirs, method=bool(owner)):
            raise NotImplementedError(
                f"{VARIABLE}: {module.__name__} has no {name} in this release of vLLM, or one with other arguments"
            )
        setattr(place, last, ours)


def _fits(ours: Callable[..., Any], theirs: Callable[..., Any], *, method: bool) -> bool:
    """Whether a function takes the arguments of another, but those that calls may leave out."""
    mine, other = (list(signature(unwrap(each)).parameters.values())[method:] for each in (ours, theirs))
    names = {one.name for one in mine}
    return [one.name for one in other if one.name in names or one.default is one.empty] == [one.name for one in mine]


class _Replacing(Loader):
    """The loader of a module, after which its names are bound."""

    def __init__(self, theirs: Loader) -> None:
        self._theirs = theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._theirs.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._theirs.exec_module(module)
        replace(module)


class _Finder(MetaPathFinder):
    """Finds the modules whose names are bound, when a model imports them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in REPLACED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Replacing(spec.loader)
        return spec


def when_imported() -> None:
    """Bind the names of modules that are imported, and of the others once they are; again is the same as once."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in REPLACED:
            if name in sys.modules:
                replace(sys.modules[name])
