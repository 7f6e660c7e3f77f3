"""vLLM's sparse latent attention (DeepSeek-V3.2, GLM-5): each query attends to the rows that vLLM's indexer selected.

vLLM projects, writes its caches, scores and selects keys (``indexer`` does where the user asks for it), and turns
positions into slots of the cache, once for all layers that share a selection where it can. A backend computes attention
in the absorbed form over the listed slots. Short prompts, whose keys are all selected, run on a prefill backend.
Imported by vLLM alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

from attngen.integrations.engines import indexer as indexing
from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.listed_rows import COLUMNS, RANK, CacheRows, attend_to_listed, cache_rows
from attngen.integrations.vllm.mla import PACKED, LatentBackend, not_latent
from attngen.integrations.vllm.plugin import SPARSE_MLA_NAME, SPARSE_RELEASES

#: vLLM's names of caches in e4m3, with one scale for each layer.
_FP8 = ("fp8", "fp8_e4m3")


class AttngenSparseMLABackend(LatentBackend, AttentionBackend):
    """Properties that vLLM reads before it builds a model."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*LatentBackend.supported_kv_cache_dtypes, *_FP8]

    @staticmethod
    def get_name() -> str:
        return SPARSE_MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[AttngenSparseMLAImpl]:
        return AttngenSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttngenSparseMLAMetadataBuilder]:
        return AttngenSparseMLAMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The cache's specification, with blocks a whole number of rows apart: a slot is a row of one tensor."""
        return align_blocks_to_rows(spec)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """vLLM's reasons against a configuration, with attngen's own words where it has some."""
        reasons: list[str] = super().validate_configuration(*args, **options)
        given = {**dict(zip(("head_size", "dtype", "kv_cache_dtype"), args, strict=False)), **options}
        cache, capability = given.get("kv_cache_dtype"), given.get("device_capability")
        words = {
            "kv_cache_dtype not supported": f"a cache in {cache}; there are {', '.join(cls.supported_kv_cache_dtypes)}",
            "batch invariance not supported": "batch invariance: how many blocks share a list depends on the batch",
            "compute capability not supported": capability
            and engines.card_reason(capability.major, capability.minor, "latent attention"),
        }
        reasons = [words.get(reason) or reason for reason in reasons]
        if cache in (PACKED, *_FP8) and given["dtype"] != torch.bfloat16:
            reasons.append(f"a cache in {cache} beside queries of {given['dtype']}; kernels take torch.bfloat16")
        if not hasattr(SparseMLACommonImpl, "_forward_mqa_kernel"):
            reasons.append(f"this release of vLLM; {SPARSE_MLA_NAME} is for {', '.join(SPARSE_RELEASES)}")
        return reasons


class AttngenSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """Metadata of steps: vLLM's own. Nothing is read from the device."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Requests of so few queries run in the absorbed form even where all of their keys are selected.
        self._init_reorder_batch_threshold(128, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1

    def update_draft_decode_metadata(self, metadata: SparseMLACommonMetadata) -> None:
        """Fill in which request each token of a captured loop of drafts belongs to: the rest are vLLM's tensors."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)


class AttngenSparseMLAImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """The sparse latent attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False
    supports_mtp_with_cp_non_trivial_interleave_size = True
    group_conversion_decode_only = True

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
        self._fp8 = kv_cache_dtype in _FP8
        self._columns = COLUMNS[0] if kv_cache_dtype == PACKED else head_size
        if self._columns > head_size:
            # vLLM gathers the context of such prompts into rows of head_size columns, which are too narrow.
            self.supports_dense_mha_prefill = False
        #: A cache and its rows; it is the same tensor in each step.
        self._rows: tuple[Tensor, CacheRows] | None = None
        reasons = not_latent(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        if self.kv_lora_rank != RANK:
            reasons.append(f"a rank of {self.kv_lora_rank}, only of {RANK},")
        if reasons:
            raise NotImplementedError(f"{SPARSE_MLA_NAME} does not serve {reasons[0]} with sparse latent attention")
        if engines.asked_for(indexing.VARIABLE) and latent.get("indexer") is not None:
            from attngen.integrations.vllm import indexer

            indexer.serve(latent["indexer"], get_current_vllm_config().parallel_config)

    def _forward_mqa_kernel(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, topk_indices: Tensor, valid_counts: Tensor, *,
        layer: Any, block_size: int, is_decode: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of (tokens, heads, columns) to the first ``valid_counts`` (tokens,) of ``topk_indices`` (tokens,
        topk), which are rows of the cache; and the log-sum-exp (tokens, heads) if ranks share the keys."""
        del is_decode
        known = self._rows
        if known is None or known[0] is not kv_cache:
            known = self._rows = kv_cache, cache_rows(flat_kv_row_view(kv_cache, block_size)[0])
        return attend_to_listed(
            self._joined(q), known[1], topk_indices, valid_counts, self.scale,
            k_descale=layer._k_scale.reshape(()) if self._fp8 else None,
            return_lse=bool(self.need_to_return_lse_for_decode),
        )  # fmt: skip

    def _joined(self, q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Queries as wide as rows: latent columns, rotary ones, and zeros where the model has no rotary ones."""
        parts = [q] if isinstance(q, Tensor) else [part for part in q if part.shape[-1]]
        width = sum(part.shape[-1] for part in parts)
        if width < self._columns:
            parts.append(parts[0].new_zeros(*parts[0].shape[:-1], self._columns - width))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=-1)
