"""Steps of vLLM's indexer: calls of a layer as its models make them, and stand-ins for operators that need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.integrations.engines.index_batches import IndexBatch

CACHE, ATTENTION = "layers.0.indexer.k_cache", "layers.0.attn"


def layer(kind: type, **changed: Any) -> Any:
    """An indexer of a layer of a class, as its model makes it."""
    made = kind.__new__(kind)
    fields = {
        "n_head": 4, "head_dim": 128, "quant_block_size": 128, "k_cache": SimpleNamespace(prefix=CACHE),
        "indexer_op": SimpleNamespace(use_fp4_cache=False), "topk_indices_buffer": torch.empty(0), **changed,
    }  # fmt: skip
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def select(function: Any, made: IndexBatch, **changed: Any) -> Any:
    """Call a function in the place of vLLM's ``sparse_attn_indexer`` as its models do."""
    return function(
        made.q.float().flatten(1), changed.pop("cache", CACHE), changed.pop("pages", made.pages), made.q, None, None,
        made.weights, 128, "ue8m0", made.out.shape[1], 128, 1024, 4096, made.out,
        **{
            "skip_k_cache_insert": True, "use_pcp": False, "pcp_shard_decode_requests": False,
            "dense_mha_metadata_layer_name": ATTENTION, "dcp_rank": 0, "dcp_world_size": 1,
            "cp_kv_cache_interleave_size": 1, "skip_topk_buffer_clear": True, "topk_backend": "auto", **changed,
        },
    )  # fmt: skip


def chunk(made: IndexBatch, requests: slice, tokens: slice) -> Any:
    """vLLM's metadata of a part of a step's prompts: which keys of the chunk's requests each token sees."""
    lengths = made.used[requests]
    begins = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    own = begins[(made.request_of_token - requests.start)[tokens]]
    return SimpleNamespace(
        block_table=made.table[requests], cu_seqlen_ks=own, cu_seqlen_ke=own + made.seen[tokens], cu_seq_lens=begins,
        max_seqlen_k=max(made.lengths[requests]), token_start=tokens.start, token_end=tokens.stop,
    )  # fmt: skip


def build_chunk(
    query_start_loc: Tensor, uncompressed: Tensor, cu_seq_lens: Tensor, row_starts: Tensor, token_to_seq: Tensor,
    ks: Tensor, ke: Tensor, first: int, stop: int, rank: int, world: int, interleave: int, *, num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:  # fmt: skip
    """vLLM's operator that says for each token of a chunk where its keys begin and end."""
    assert (world, COMPRESS_RATIO) == (1, 1)
    del cu_seq_lens, token_to_seq, rank, interleave
    for b in range(num_reqs):
        begin, end = query_start_loc[b].item(), query_start_loc[b + 1].item()
        for token in range(max(begin, first), min(end, stop)):
            ks[token - first] = row_starts[b]
            ke[token - first] = row_starts[b] + uncompressed[b] - (end - begin) + token - begin + 1


def prepare_decode(
    seq_lens: Tensor, token_lens: Tensor, table: Tensor, tables: Tensor, counts: Tensor, tokens: int, longest: int
) -> None:
    """vLLM's operator that makes each token of uniform drafts a request of its own."""
    for token in range(tokens):
        b, place = divmod(token, longest)
        token_lens[token] = max(int(seq_lens[b]) - longest + place + 1, 0)
        tables[token] = table[b]
        counts[token] = 1
