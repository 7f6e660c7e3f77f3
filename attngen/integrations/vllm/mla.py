"""vLLM's latent attention (MLA): decoding over latent rows in pages, and prompts over expanded keys and values.

vLLM projects, writes its cache, and splits batches; a backend computes the attention of requests with few queries, in
the absorbed form, and a prefill backend that of longer prompts. Imported by vLLM alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.layers import Layer
from attngen.integrations.engines.listed_rows import COLUMNS
from attngen.integrations.vllm.backend import configured_mask
from attngen.integrations.vllm.plugin import MLA_NAME, NAME, SPARSE_MLA_NAME
from attngen.runtime.operations.attention.entry import attention_varlen
from attngen.runtime.operations.attention.layers import PagedBatch, PagedLayer

_CAUSAL, _FULL = Layer().causal().variant, Layer().bidirectional().variant

#: vLLM's name of caches of 656 bytes a token: latents in e4m3 with four scales, and rotary columns in bf16, which are
#: zeros in models without them.
PACKED = "fp8_ds_mla"


class LatentBackend:
    """Properties of both backends of latent attention, to all keys and to selected ones."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", PACKED]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(COLUMNS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or engines.card_reason(capability.major, capability.minor, "latent attention") is None


def not_latent(
    alibi_slopes: list[float] | None, sliding_window: int | None, logits_soft_cap: float | None, attn_type: str
) -> list[str]:
    """Features that a layer asks for and kernels of latent attention do not have."""
    given = {"ALiBi": alibi_slopes, "sliding windows": sliding_window, "soft-capping": logits_soft_cap}
    reasons = [name for name, value in given.items() if value]
    if attn_type != AttentionType.DECODER:
        reasons.append(f"attention of type {attn_type}")
    config = get_current_vllm_config_or_none()
    if config is not None and configured_mask(config) is not None:
        reasons.append("a user's mask")
    return reasons


class AttngenMLABackend(LatentBackend, MLACommonBackend):
    """Properties that vLLM reads before it builds a model."""

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[AttngenMLAImpl]:
        return AttngenMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttngenMLAMetadataBuilder]:
        return AttngenMLAMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """vLLM's reasons against a configuration, and those of caches in 8 bits."""
        reasons: list[str] = super().validate_configuration(*args, **options)
        given = {**dict(zip(("head_size", "dtype", "kv_cache_dtype"), args, strict=False)), **options}
        sparse = f"sparse attention: --attention-backend {SPARSE_MLA_NAME} serves it"
        reasons = [sparse if reason == "sparse not supported" else reason for reason in reasons]
        if given.get("kv_cache_dtype") == PACKED:
            if given["head_size"] != COLUMNS[0]:
                reasons.append(f"a cache in {PACKED} with head size {given['head_size']}; it has {COLUMNS[0]} columns")
            if given["dtype"] != torch.bfloat16:
                reasons.append(f"a cache in {PACKED} beside queries of {given['dtype']}; kernels take torch.bfloat16")
        return reasons


@dataclass
class AttngenMLADecode(MLACommonDecodeMetadata):
    """Requests with few queries of one step. Tensors are vLLM's own, on the device."""

    query_start_loc: Tensor  # (requests + 1,) int32
    max_query_len: int
    longest: int  # keys that any request may have; 0 where a graph is captured, which serves all lengths
    shared: PagedBatch | None = None  # the same as layers take it, made by the first one

    def batch(self, tokens: int, block_size: int) -> PagedBatch:
        """The requests, with a block table without columns that no request reaches."""
        if self.shared is None:
            table = self.block_table
            if self.longest:
                table = table[:, : max(-(-self.longest // block_size), 1)]
            self.shared = PagedBatch(table, self.seq_lens, self.query_start_loc, self.max_query_len, tokens)
        return self.shared


@dataclass
class AttngenMLAMetadata(MLACommonMetadata[AttngenMLADecode]):
    """One step: what all layers share."""


class AttngenMLAMetadataBuilder(MLACommonMetadataBuilder[AttngenMLAMetadata]):
    """Metadata of steps. Requests of up to ``reorder_batch_threshold`` queries run in the absorbed form."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 128

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, AttngenMLAMetadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttngenMLAMetadata:
        metadata: AttngenMLAMetadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if metadata.decode is not None:
            metadata.decode.longest = 0
        return metadata

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> AttngenMLADecode:
        del query_start_loc_cpu, num_decode_tokens
        return AttngenMLADecode(
            block_table=block_table_tensor, seq_lens=seq_lens_device, dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device, max_query_len=max(max_query_len, 1), longest=max_seq_len,
        )  # fmt: skip


class AttngenMLAImpl(MLACommonImpl[AttngenMLAMetadata]):
    """The latent attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **latent: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **latent,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self._packed = kv_cache_dtype == PACKED
        self._layer: tuple[Tensor, PagedLayer] | None = None
        self._split_size = engines.INVARIANT_SPLIT if envs.VLLM_BATCH_INVARIANT else None
        reasons = not_latent(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        if reasons:
            raise NotImplementedError(f"{MLA_NAME} does not serve {reasons[0]} with latent attention")

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: AttngenMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of (tokens, heads, latent columns), and its log-sum-exp (tokens, heads) if ranks share the keys."""
        del layer
        step = attn_metadata.decode
        assert step is not None, "forward_mqa is for steps with requests of few queries"
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if self._layer is None or self._layer[0] is not kv_c_and_k_pe_cache:
            keys = kv_c_and_k_pe_cache.unsqueeze(-2)  # one KV head
            values = keys if self._packed else keys[..., : self.kv_lora_rank]
            self._layer = (
                kv_c_and_k_pe_cache,
                PagedLayer(keys, values, variant=_CAUSAL, softmax_scale=self.scale, split_size=self._split_size),
            )
        out = queries.new_empty(*queries.shape[:2], self.kv_lora_rank)
        batch = step.batch(queries.shape[0], kv_c_and_k_pe_cache.shape[1])
        lse = self._layer[1](queries, out, batch, return_lse=bool(self.need_to_return_lse_for_decode))
        return out, None if lse is None else lse.transpose(0, 1)


class AttngenMLAPrefill(MLAPrefillBackend):
    """Attention of prompts: over their own tokens, and over earlier ones that vLLM reads from its cache in chunks."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return (
            device_capability is None
            or engines.card_reason(device_capability.major, device_capability.minor, "forward") is None
        )  # fmt: skip

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of (tokens, heads, head dim), and the log-sum-exp (heads, tokens) if asked for."""
        if out is not None or output_scale is not None:
            raise NotImplementedError(f"{NAME} returns a new output of prompts, and does not quantize it")
        step = self._prefill_metadata
        starts, longest = step.query_start_loc, step.max_query_len
        return attention_varlen(
            q, k, v, starts, starts, longest, longest, variant=_CAUSAL, softmax_scale=self.scale,
            return_lse=return_softmax_lse,
        )  # fmt: skip

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention to earlier keys, all of which are seen, and its log-sum-exp (heads, tokens)."""
        if out is not None:
            raise NotImplementedError(f"{NAME} returns a new output of prompts")
        result, lse = attention_varlen(
            q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len, variant=_FULL,
            softmax_scale=self.scale, return_lse=True,
        )  # fmt: skip
        return result, lse
