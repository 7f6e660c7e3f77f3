"""SGLang's sparse latent attention (DSA: DeepSeek-V3.2, GLM-5): each token attends to the rows that SGLang's indexer
selected.

All but the attention, and the selection where the user asks for it (``indexer``), is SGLang's own backend: metadata of
steps, graphs, writes to the pools, and slots of the selected positions. It also decides which prompts are so short that
all keys are selected: these run over expanded keys and values. Imported by SGLang alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_kpool
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from sglang.srt.models.deepseek_common import utils as models
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from torch import Tensor

from attngen.integrations.engines import indexer as indexing
from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.layers import Layer
from attngen.integrations.engines.listed_rows import COLUMNS, PACKED_BYTES, RANK, attend_to_listed, cache_rows
from attngen.integrations.sglang.plugin import NAME
from attngen.runtime.operations.attention.entry import attention_varlen

_CAUSAL = Layer().causal().variant

#: SGLang's names of its forms that take slots of the pool for prompts as well as for decoding, over pools in 16 bits
#: and of 656 bytes a token.
_IN_16_BITS, _IN_8_BITS = "flashmla_sparse", "flashmla_kv"


class _NoSchedule:
    """Metadata of a schedule in SGLang's steps and graphs; blocks find their work on the GPU."""

    def slice(self, rows: slice) -> _NoSchedule:
        del rows
        return self

    def copy_(self, other: _NoSchedule) -> None:
        del other


class AttngenDSABackend(DeepseekSparseAttnBackend):
    """Sparse latent attention of a model runner."""

    def __init__(self, model_runner: Any) -> None:
        reason = _refusal(model_runner)
        if reason is not None:
            raise ValueError(f"--attention-backend {NAME} does not serve {reason}")
        super().__init__(model_runner)
        form = _IN_8_BITS if self.dsa_kv_cache_store_fp8 else _IN_16_BITS
        self.dsa_prefill_impl = self.dsa_decode_impl = form
        self.enable_auto_select_prefill_impl = False
        # SGLang's models ask by the backend's name: for its choice of a step's form, and for queries in two parts.
        handler.AttentionBackendRegistry.register(NAME, handler.handle_attention_dsa)
        if NAME not in models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
            models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
        self._indexer = None
        if engines.asked_for(indexing.VARIABLE):
            if self._kv_shard_pool is not None:
                raise ValueError(f"{indexing.VARIABLE} does not serve caches that ranks share; unset it")
            indexing.require_kernels(model_runner.device)
            self._indexer = import_module("attngen.integrations.sglang.indexer")
            self._indexer.serve()

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
        """SGLang's metadata of a step for an indexer, of a kind of its own where the user asks for attngen's."""
        theirs = super().get_indexer_metadata(layer_id, forward_batch)
        return theirs if self._indexer is None else self._indexer.metadata_of(theirs)

    def _compute_flashmla_metadata(self, cache_seqlens: Tensor, seq_len_q: int) -> _NoSchedule:
        del cache_seqlens, seq_len_q
        return _NoSchedule()

    def _forward_flashmla_sparse(
        self, q_all: Tensor, kv_cache: Tensor, v_head_dim: int, page_table_1: Tensor, sm_scale: float,
        topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of (tokens, heads, columns) to slots (tokens, topk) of a pool (slots, 1, columns) in 16 bits."""
        del v_head_dim
        return self._listed(q_all, kv_cache, page_table_1, topk_length, sm_scale, attn_sink)

    def _forward_flashmla_kv(
        self, q_all: Tensor, kv_cache: Tensor, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any,
        page_table_1: Tensor,
    ) -> Tensor:  # fmt: skip
        """The same of a pool of 656 bytes a token."""
        del v_head_dim, layer
        return self._listed(q_all, kv_cache, page_table_1, metadata.dsa_cache_seqlens_int32, sm_scale, None)

    def _listed(
        self, q: Tensor, pool: Tensor, slots: Tensor, lengths: Tensor | None, scale: float, sinks: Tensor | None
    ) -> Tensor:
        tokens, topk = slots.shape
        if lengths is None or lengths.shape[0] < tokens:  # of more tokens where a batch is padded for other ranks
            lengths = slots.new_full((tokens,), topk)
        sinks = None if sinks is None else engines.float32_on(q.device, sinks.detach())
        rows = cache_rows(pool.view(-1, pool.shape[-1]))
        return attend_to_listed(q, rows, slots, lengths[:tokens], scale, sinks=sinks)[0]

    def _forward_standard_mha(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, metadata: Any
    ) -> Tensor:
        """Attention of short prompts (tokens, heads, head dim) to their keys and values of each head, earlier ones
        included."""
        del forward_batch
        out: Tensor = attention_varlen(
            q.view(-1, layer.tp_q_head_num, layer.head_dim), k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim), metadata.cu_seqlens_q, metadata.cu_seqlens_k,
            metadata.max_seq_len_q, metadata.max_seq_len_k, variant=_CAUSAL, softmax_scale=layer.scaling,
        )  # fmt: skip
        return out


def _refusal(runner: Any) -> str | None:
    """First feature of a runner with a sparse model that is not supported, or None."""
    model, spec, pool, parallel = runner.model_config, get_spec(), runner.token_to_kv_pool, get_parallel()
    columns, rank = model.kv_lora_rank + model.qk_rope_head_dim, model.kv_lora_rank
    if runner.is_draft_worker:
        return "draft models; pass --speculative-draft-attention-backend dsa"
    if (spec.speculative_eagle_topk or 0) > 1:
        return "trees of drafts (--speculative-eagle-topk above 1)"
    if get_dsa_index_kpool(model.hf_config) > 1:
        return "selections of pooled keys (GLM-5.3-Flash); pass --attention-backend dsa"
    if parallel.attn_dcp_size > 1 or parallel.attn_cp_size > 1:
        return "context parallelism with sparse attention; pass --attention-backend dsa"
    if runner.hisparse_coordinator is not None:
        return "caches in host memory (--enable-hisparse); pass --attention-backend dsa"
    if get_exec().deterministic.enable_deterministic_inference:
        return (
            "--enable-deterministic-inference with sparse attention: how many blocks share a list depends on the batch"
        )
    if columns not in COLUMNS or rank != RANK:
        return f"latent rows of {columns} columns, {rank} of which are values; kernels have {RANK} of 576 or 512"
    if pool.dsa_kv_cache_store_fp8 and pool.kv_cache_dim != PACKED_BYTES:
        return f"latent rows of {pool.kv_cache_dim} bytes, only of {PACKED_BYTES}; pass --kv-cache-dtype bfloat16"
    if not pool.dsa_kv_cache_store_fp8 and pool.dtype not in (torch.bfloat16, torch.float16):
        return f"latent rows of {pool.dtype} without scales; pass --kv-cache-dtype bfloat16"
    if engines.configured() is not None:
        return "a user's mask with latent attention"
    if torch.device(runner.device).type != "cuda":
        return None
    return engines.card_reason(*torch.cuda.get_device_capability(runner.device), "latent attention")
