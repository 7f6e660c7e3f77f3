"""SGLang's latent attention (MLA): over latent rows in pages, and of prompts over expanded keys and values.

SGLang projects and chooses the form of a step: the absorbed one, over latent rows, whose first columns are values; or,
for prompts, keys and values of each head, of the step's own tokens and then, chunk by chunk, of earlier ones. Imported
by SGLang alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common import attention_backend_handler as handler
from torch import Tensor

from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.layers import Layer
from attngen.integrations.sglang.backend import AttngenAttnBackend
from attngen.integrations.sglang.plugin import NAME
from attngen.runtime.operations.attention.entry import attention_varlen

_CAUSAL, _FULL = Layer().causal().variant, Layer().bidirectional().variant

#: Columns of a latent row that kernels exist for, with and without rotary ones, and those that are its value.
_LATENT, _RANK = (576, 512), 512


class AttngenMLABackend(AttngenAttnBackend):
    """Latent attention of a model runner."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._columns = _columns(model_runner.model_config)
        form = partial(handler._handle_attention_backend, backend_name=NAME)
        if self._split_size is not None:  # results must not depend on the batch
            form = handler._dispatch_mla_subtype
        handler.AttentionBackendRegistry.register(NAME, form)

    def _form_reason(self, runner: Any) -> str | None:
        columns, rank = _columns(runner.model_config), runner.model_config.kv_lora_rank
        if columns not in _LATENT or rank != _RANK:
            return f"latent rows of {columns} columns, {rank} of which are values; kernels have {_RANK} of 576 or 512"
        if runner.kv_cache_dtype not in (torch.bfloat16, torch.float16):
            return f"latent rows of {runner.kv_cache_dtype}; kernels read SGLang's in 16 bits"
        return None if engines.configured() is None else "a user's mask with latent attention"

    def _tree_reason(self, runner: Any, spec: Any) -> str | None:
        del runner, spec
        return "with latent attention"

    def _kinds(self, runner: Any) -> list[str]:
        del runner
        return ["latent attention"]

    def _decodes(self, forward_batch: Any) -> int | None:
        """None: one kernel serves requests with any number of queries."""
        del forward_batch
        return None

    def _write(self, layer: Any, place: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)

    def _forward(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, sinks: Tensor | None,
        return_lse: bool, more: dict[str, Any],
    ) -> Any:  # fmt: skip
        if layer.qk_head_dim == self._columns:
            return super()._forward(q, k, v, layer, forward_batch, save, sinks, return_lse, more)
        return self._expanded(q, k, v, layer, forward_batch)

    def _expanded(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any) -> Any:
        """Attention of (tokens, heads, head dim) to the step's own tokens, or to a chunk of earlier ones, which are all
        seen; with the log-sum-exp (tokens, heads) where SGLang joins several of these."""
        metadata = self.forward_metadata
        assert metadata is not None, "init_forward_metadata comes first"
        variant, starts, longest = _CAUSAL, metadata.starts, metadata.longest_query
        if forward_batch.attn_attend_prefix_cache:
            chunk = forward_batch.prefix_chunk_idx
            variant, starts = _FULL, forward_batch.prefix_chunk_cu_seq_lens[chunk]
            longest = int(forward_batch.prefix_chunk_max_seq_lens[chunk])
        result = attention_varlen(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim), metadata.starts, starts, metadata.longest_query,
            longest, variant=variant, softmax_scale=layer.scaling, return_lse=bool(forward_batch.mha_return_lse),
        )  # fmt: skip
        if not forward_batch.mha_return_lse:
            return result
        return result[0], result[1].transpose(0, 1).contiguous()


def _columns(model: Any) -> int:
    """Columns of a model's latent rows."""
    return int(model.kv_lora_rank + model.qk_rope_head_dim)
