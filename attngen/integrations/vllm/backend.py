"""An attention backend of vLLM: metadata once a step, ``append_kv`` and ``attention_paged`` once a layer.

The cache stays as vLLM lays it out: logically (blocks, kv_heads, block size, key and value side by side), in any
physical order, of which keys and values are views. Imported by vLLM alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import dcp

from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.layers import Layer, Mask, Step, VariantCall
from attngen.integrations.vllm.plugin import MLA_NAME, NAME, SPARSE_MLA_NAME
from attngen.runtime.operations.attention.entry import attention_paged, attention_varlen
from attngen.runtime.operations.attention.layers import PagedBatch, PagedCache, PagedLayer
from attngen.runtime.operations.merge.call import merge
from attngen.runtime.operations.shared_prefix.call import SharedPrefix, shared_prefix
from attngen.runtime.operations.shared_prefix.layer import SharedPrefixLayer

#: Attention types whose keys are the tokens of the call, without a cache.
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

#: vLLM's name of caches in e4m3 with a scale for each token and KV head, and those of all caches in 8 bits.
_SCALED_ROWS = "fp8_per_token_head"
_FP8 = ("fp8", "fp8_e4m3", _SCALED_ROWS)

#: Bytes of a scale.
_SCALE_BYTES = 4


class AttngenBackend(AttentionBackend):
    """Capabilities that vLLM queries before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_FP8]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttngenImpl]:
        return AttngenImpl

    @staticmethod
    def get_builder_cls() -> type[AttngenMetadataBuilder]:
        return AttngenMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A cache with room for the scales of each row: of its key, and of its value."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return engines.head_dim_reason(head_size) is None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_WITHOUT_CACHE, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or engines.card_reason(capability.major, capability.minor, "keys in pages") is None

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """vLLM's reasons against a configuration, with attngen's own words where it has some."""
        reasons: list[str] = super().validate_configuration(*args, **options)
        given = {**dict(zip(("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla"), args, strict=False)),
                 **options}  # fmt: skip
        capability, fp8 = given.get("device_capability"), given.get("kv_cache_dtype") in _FP8
        kinds = engines.paged_kinds(given["head_size"], fp8=fp8)
        if given.get("kv_cache_dtype") == _SCALED_ROWS:
            kinds.append("scales of pages")
        card = capability and engines.card_reason(capability.major, capability.minor, *kinds)
        words = {
            "head_size not supported": engines.head_dim_reason(given["head_size"]),
            "dtype not supported": f"dtype {given['dtype']} is not torch.float16 or torch.bfloat16",
            "kv_cache_dtype not supported": f"a cache in {given.get('kv_cache_dtype')}; there are "
            f"{', '.join(cls.supported_kv_cache_dtypes)}",
            "MLA not supported": f"MLA: --attention-backend {MLA_NAME} serves it",
            "sparse not supported": f"sparse attention: --attention-backend {SPARSE_MLA_NAME} serves that of MLA",
            "compute capability not supported": card,
        }
        reasons = [words.get(reason) or reason for reason in reasons]
        if card and card not in reasons:
            reasons.append(card)
        wide = engines.head_dim_reason(given["head_size"], fp8=fp8)
        if wide is not None and cls.supports_head_size(given["head_size"]):
            reasons.append(wide)
        if given.get("use_dcp") and given.get("has_sliding_window"):
            reasons.append("a sliding window with decode context parallelism: a rank's keys are not consecutive")
        return reasons


@dataclass
class AttngenMetadata:
    """One step: what all layers of a group share. Tensors are vLLM's own, on the device."""

    num_actual_tokens: int  # with padding
    max_query_len: int
    query_start_loc: Tensor  # (requests + 1,) int32
    seq_lens: Tensor  # (requests,) int32
    block_table: Tensor  # (requests, most blocks) int32
    slot_mapping: Tensor
    causal: bool | Tensor = True
    num_decodes: int | None = None  # requests at the beginning that have one query each, if others have more
    longest: int = 0  # keys that any request may have; 0 where a graph is captured, which serves all lengths
    # (2, tokens) int32: first and last position of the image of each query. Gemma 4 clears it, by vLLM's name, for
    # layers whose images are causal.
    mm_prefix_query_range_tensor: Tensor | None = None
    prompts: Tensor | None = None  # (requests,) int32, keys of the prompt where all of these are seen
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the user's mask
    context_lens: Tensor | None = None  # (requests,) int32, with context parallelism: keys here before the queries
    batches: dict[int, PagedBatch] = field(default_factory=dict)
    plain: bool = False  # nothing but ``causal`` decides what a decoder's layer without a mask of its own sees
    shares: int = 0  # the most prefixes of blocks that requests share whose keys causal layers read once
    prefixes: dict[tuple[int, bool], SharedPrefix] = field(default_factory=dict)  # by block size, and if in a graph

    def batch(self, block_size: int) -> PagedBatch:
        """The requests, with a block table without most of the columns that no request reaches."""
        batch = self.batches.get(block_size)
        if batch is None:
            table = self.block_table
            if self.longest:
                table = table[:, : engines.bound_of(max(-(-self.longest // block_size), 1))]
            batch = self.batches[block_size] = PagedBatch(
                table, self.seq_lens, self.query_start_loc, engines.bound_of_queries(self.max_query_len),
                self.num_actual_tokens, self.num_decodes,
            )  # fmt: skip
        return batch

    def prefix(self, block_size: int) -> SharedPrefix:
        """The blocks that requests begin with in common. The first layer of a step finds them, and so does each replay
        of a graph that captured the layer."""
        key = block_size, self.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        prefix = self.prefixes.get(key)
        if prefix is None:
            batch = self.batch(block_size)
            prefix = self.prefixes[key] = shared_prefix(
                batch.page_table, batch.seqused_k, block_size, prefixes=self.shares, cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q, total_q=batch.tokens,
            )  # fmt: skip
        return prefix


class AttngenMetadataBuilder(AttentionMetadataBuilder[AttngenMetadata]):
    """Metadata of steps. It reads nothing from the device and copies nothing but images' ranges."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    reorder_batch_threshold = 1  # requests that decode come first: see num_decodes

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of any batch; where prompts may hold images, of decoding, since a graph has one mask."""
        del kv_cache_spec
        model = vllm_config.model_config
        images = model is not None and model.is_mm_prefix_lm
        support: AttentionCGSupport = AttentionCGSupport.UNIFORM_BATCH if images else cls._cudagraph_support
        return support

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        self._mask = configured_mask(vllm_config)
        self._shares = engines.shared_prefixes()
        self._rswa = vllm_config.model_config.rswa_window is not None
        self._prompts: Tensor | None = None
        if self._rswa:
            self._prompts = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        self._images: tuple[Tensor, Tensor] | None = None
        if vllm_config.model_config.is_mm_prefix_lm:
            shape = (2, scheduler.max_num_batched_tokens)
            pinned = device.type == "cuda"
            self._images = (
                torch.empty(shape, dtype=torch.int32, pin_memory=pinned, device="cpu"),
                torch.empty(shape, dtype=torch.int32, device=device),
            )
        sharded = getattr(kv_cache_spec, "dcp_sharded", True)
        self._dcp = get_dcp_world_size_and_rank(sharded and parallel.decode_context_parallel_size > 1)
        self._interleave = parallel.cp_kv_cache_interleave_size
        self._context: Tensor | None = None
        if self._dcp[0] > 1:
            self._context = torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device)
        # Captured loops of drafts read the tensors that vLLM updates in place; nothing follows from them.
        self.supports_draft_decode_metadata_update = self._dcp[0] == 1 and self._mask is None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttngenMetadata:
        del common_prefix_len
        return self._build(common_attn_metadata, bounded=not fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttngenMetadata:
        """Metadata for a graph, which must serve batches of any length: its table keeps all columns."""
        metadata = self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)
        metadata.longest, metadata.num_decodes = 0, None
        if self._prompts is not None:  # the graph's mask reads it
            metadata.prompts = self._prompts[: common_attn_metadata.num_reqs]
        return metadata

    def update_block_table(self, metadata: AttngenMetadata, blk_table: Tensor, slot_mapping: Tensor) -> AttngenMetadata:
        other = copy.copy(metadata)
        other.block_table, other.slot_mapping, other.batches, other.prefixes = blk_table, slot_mapping, {}, {}
        return other

    def update_draft_decode_metadata(self, metadata: AttngenMetadata) -> None:
        """Nothing: metadata holds vLLM's tensors themselves."""

    def _build(self, common: CommonAttentionMetadata, *, bounded: bool) -> AttngenMetadata:
        causal = common.causal
        if isinstance(causal, Tensor) and causal.dtype != torch.int32:
            raise ValueError(
                f"causal flags of requests must be int32, so that graphs can read them; got {causal.dtype}"
            )
        metadata = AttngenMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=max(common.max_query_len, 1),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
            longest=common.max_seq_len if bounded else 0,
        )
        if metadata.max_query_len > 1 and bounded:
            metadata.num_decodes = engines.leading_decodes(common.query_start_loc_cpu)
        if common.mm_req_doc_ranges and self._images is not None:
            metadata.mm_prefix_query_range_tensor = self._ranges(common)
        if self._prompts is not None and common.rswa_prefix_lens is not None:
            metadata.prompts = self._prompts[: common.num_reqs]
            metadata.prompts.copy_(common.rswa_prefix_lens[: common.num_reqs], non_blocking=True)
        if self._context is not None:
            queries = common.query_start_loc[1:] - common.query_start_loc[:-1]
            here = get_dcp_local_seq_lens(common.seq_lens - queries, *self._dcp, self._interleave)
            metadata.context_lens = self._context[: common.num_reqs]
            metadata.context_lens.copy_(here)
        if self._mask is not None:
            step = Step(common.query_start_loc, common.seq_lens, common.num_actual_tokens, metadata.max_query_len,
                        common.max_seq_len)  # fmt: skip
            metadata.arguments = self._mask.of_step(step)
        images, prompts, ranks = metadata.mm_prefix_query_range_tensor, metadata.prompts, metadata.context_lens
        metadata.plain = images is None and prompts is None and ranks is None
        if self._shares and metadata.plain and causal is True:
            metadata.shares = common.num_reqs > 1 and metadata.max_query_len <= engines.MOST_SHARED_QUERIES
        return metadata

    def _ranges(self, common: CommonAttentionMetadata) -> Tensor | None:
        """First and last positions of images by query, on the device; None if no query belongs to an image."""
        assert self._images is not None
        lengths = common.seq_lens_cpu_upper_bound
        assert lengths is not None, "ranges of images need seq_lens_cpu_upper_bound"
        on_host, on_device = self._images
        written = engines.image_ranges(common.mm_req_doc_ranges, common.query_start_loc_cpu, lengths, on_host)
        if not written:
            return None
        tokens = common.num_actual_tokens
        on_host[:, written:tokens] = -1
        on_device[:, :tokens].copy_(on_host[:, :tokens], non_blocking=True)
        return on_device[:, :tokens]


class AttngenImpl(AttentionImpl):
    """The attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.supports_quant_query_input = False
        self._fp8, self._scaled_rows = kv_cache_dtype in _FP8, kv_cache_dtype == _SCALED_ROWS
        self._slopes, self._sinks = alibi_slopes, sinks
        self._window, self._softcap = sliding_window, float(logits_soft_cap or 0.0)
        config = get_current_vllm_config_or_none()
        self._split_size = engines.INVARIANT_SPLIT if envs.VLLM_BATCH_INVARIANT else None
        self._mask = None if attn_type != AttentionType.DECODER or config is None else configured_mask(config)
        if self._mask is not None and not self._mask.for_window(sliding_window):
            self._mask = None
        self._rswa = None if config is None or config.model_config is None else config.model_config.rswa_window
        self._bound: _Bound | None = None
        self._views: _Views | None = None
        self._paged: tuple[VariantCall, PagedLayer] | None = None
        #: A cache in 16 bits, the causal layer over it, and its block size: what most calls need.
        self._causal: tuple[Tensor, PagedLayer, int] | None = None
        unlike = sliding_window is not None or alibi_slopes is not None or self._softcap or self._mask is not None
        #: Whether all keys before a query count alike, as for a prefix that requests share.
        self._can_share = not (unlike or self._split_size or self._scaled_rows) and attn_type == AttentionType.DECODER
        self._shared: tuple[VariantCall, SharedPrefixLayer] | None = None
        self._exchange = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        reason = engines.combination_reason(bool(self._softcap), alibi_slopes is not None, sinks is not None)
        if reason is None and self.dcp_world_size > 1 and (alibi_slopes or sliding_window or sinks is not None):
            reason = "ALiBi, sliding windows and sinks with decode context parallelism"
        if reason is None and self.dcp_world_size > 1 and self._mask is not None:
            reason = f"the mask '{self._mask.variant}' with decode context parallelism"
        if reason is not None:
            raise NotImplementedError(f"{NAME} does not serve {reason}")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Read the sinks, whose values are loaded now."""
        del act_dtype
        self._bound = self._causal = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttngenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of (tokens, heads, head size) to ``output``, and return it."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{NAME} does not quantize its output")
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        known = self._causal
        alike = attn_metadata.plain and not (attn_metadata.shares and self._can_share)
        if known is not None and known[0] is kv_cache and attn_metadata.causal is True and alike:
            known[1](query, output, attn_metadata.batch(known[2]))
            return output
        bound = self._bound or self._bind(query.device)
        if self.attn_type in _WITHOUT_CACHE or attn_metadata.context_lens is not None:
            tokens = attn_metadata.num_actual_tokens
            q, k, v, out = query[:tokens], key[:tokens], value[:tokens], output[:tokens]
            if self.attn_type in _WITHOUT_CACHE:
                self._over_tokens(q, k, v, attn_metadata, out, bound.both_ways)
            else:
                self._over_ranks(layer, q, k, v, kv_cache, attn_metadata, out, bound)
            return output
        views = self._views_of(layer, kv_cache)
        choice, paged = self._choice(layer, attn_metadata, bound), self._paged
        if attn_metadata.shares and self._can_share:
            shared, tokens = self._shared, attn_metadata.num_actual_tokens
            if shared is None or shared[0] is not choice:
                made_shared = SharedPrefixLayer(
                    views.keys, views.values, variant=choice.variant, softmax_scale=self.scale, page_layout="HND",
                    arguments=choice.arguments, **views.scales,
                )  # fmt: skip
                shared = self._shared = choice, made_shared
            shared[1](query[:tokens], output[:tokens], attn_metadata.prefix(views.block_size))
            return output
        if paged is None or paged[0] is not choice:
            made = PagedLayer(
                views.keys, views.values, variant=choice.variant, softmax_scale=self.scale, page_layout="HND",
                split_size=self._split_size, arguments=choice.arguments, **views.scales,
            )  # fmt: skip
            paged = self._paged = choice, made
        if choice is bound.causal and self._mask is None and not self._fp8:
            self._causal = kv_cache, paged[1], views.block_size
        paged[1](query, output, attn_metadata.batch(views.block_size))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values to their slots; key and value may have more tokens than there are slots."""
        if self.attn_type in _WITHOUT_CACHE:
            return
        self._views_of(layer, kv_cache).written.write(key, value, slot_mapping)

    def _bind(self, device: torch.device) -> _Bound:
        """Make the layer's variants, now that tensors have a device."""
        slopes, sinks = (engines.float32_on(device, given) for given in (self._slopes, self._sinks))
        layer = Layer(self._window, self._softcap, slopes, sinks)
        causal = layer.own(self._mask) if self._mask is not None else layer.causal()
        self._bound = _Bound(layer, causal, layer.bidirectional())
        return self._bound

    def _views_of(self, layer: Any, kv_cache: Tensor) -> _Views:
        """Keys and values of a cache; the cache is the same tensor in each step."""
        views = self._views
        if views is None or views.cache is not kv_cache or (self._fp8 and views.k_scale is not layer._k_scale):
            cache = kv_cache.view(torch.float8_e4m3fn) if self._fp8 else kv_cache
            if self._scaled_rows:
                cache, k_rows, v_rows = _rows_and_scales(cache, self.head_size)
                scales = {"k_descale": k_rows, "v_descale": v_rows}
            else:
                scales = self._own_scales(layer)
            keys, values = cache[..., : self.head_size], cache[..., self.head_size :]
            written = PagedCache(keys, values, page_layout="HND", **scales)
            k_scale = layer._k_scale if self._fp8 else None
            views = self._views = _Views(kv_cache, keys, values, kv_cache.shape[2], k_scale, scales, written)
            self._paged = self._shared = None
        return views

    def _own_scales(self, layer: Any) -> dict[str, Tensor]:
        """Scales of the cache, () or one for each KV head."""
        if not self._fp8:
            return {}
        scales = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        return {name: scale.reshape(() if scale.numel() == 1 else -1) for name, scale in scales.items()}

    def _choice(self, layer: Any, metadata: AttngenMetadata, bound: _Bound) -> VariantCall:
        """The variant of a step."""
        causal, images = metadata.causal, metadata.mm_prefix_query_range_tensor
        if self._mask is not None:
            if not callable(self._mask.arguments):
                return bound.causal
            return bound.causal._replace(arguments={**bound.causal.arguments, **metadata.arguments})
        if self.attn_type == AttentionType.ENCODER_DECODER or causal is False:
            return bound.both_ways
        if isinstance(causal, Tensor):
            return bound.layer.by_request(causal)
        if images is not None:
            clamped = bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
            return bound.layer.with_images(images[0], images[1], clamped)
        if metadata.prompts is not None and self._rswa is not None:
            return bound.layer.with_prompts(metadata.prompts, self._rswa)
        return bound.causal

    def _scales(self, layer: Any, metadata: AttngenMetadata, views: _Views) -> dict[str, Tensor]:
        if not self._fp8 or self._scaled_rows:
            return views.scales
        requests = metadata.seq_lens.shape[0]
        return {
            "k_descale": engines.scale_of_requests(layer._k_scale, requests, self.num_kv_heads),
            "v_descale": engines.scale_of_requests(layer._v_scale, requests, self.num_kv_heads),
        }

    def _over_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttngenMetadata, out: Tensor, choice: VariantCall
    ) -> Tensor:
        """Attention among the tokens of each request, without a cache; returns the log-sum-exp (heads, tokens)."""
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        result, lse = attention_varlen(
            q, k, v, starts, starts, longest, longest, variant=choice.variant, softmax_scale=self.scale,
            return_lse=True, **choice.arguments,
        )  # fmt: skip
        out.copy_(result)
        return lse

    def _over_ranks(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttngenMetadata, out: Tensor,
        bound: _Bound,
    ) -> None:  # fmt: skip
        """Attention whose earlier keys lie on all ranks of decode context parallelism.

        Each rank attends with the heads of all to the keys that it has; the parts of a head are joined where its
        queries are, together with the step's own keys.
        """
        group, views = get_dcp_group(), self._views_of(layer, kv_cache)
        heads = group.all_gather(q.contiguous(), dim=1)
        before = bound.both_ways
        part, lse = attention_paged(
            heads, views.keys, views.values, metadata.batch(views.block_size).page_table, metadata.context_lens,
            cu_seqlens_q=metadata.query_start_loc, max_seqlen_q=metadata.max_query_len, variant=before.variant,
            softmax_scale=self.scale, page_layout="HND", split_size=self._split_size, return_lse=True,
            **self._scales(layer, metadata, views), **before.arguments,
        )  # fmt: skip
        combine = dcp.dcp_a2a_lse_reduce if self._exchange else dcp.cp_lse_ag_out_rs
        context, context_lse = combine(part, lse.transpose(0, 1), group, return_lse=True)
        own = before if metadata.causal is False else bound.causal
        own_lse = self._over_tokens(q, k, v, metadata, out, own)
        joined, _ = merge([context, out], [context_lse.transpose(0, 1), own_lse])
        out.copy_(joined)


class _Views(NamedTuple):
    """A cache, as keys and values, and what writes to it."""

    cache: Tensor
    keys: Tensor
    values: Tensor
    block_size: int
    k_scale: Tensor | None
    scales: dict[str, Tensor]
    written: PagedCache


def _rows_and_scales(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (blocks, kv_heads, block size, key and value side by side) of a cache in e4m3, and the scales of keys and of
    values, float32 (blocks, kv_heads, block size).

    vLLM counts two scales in each row. Here all rows of a KV head in a block come first, and its scales follow them,
    since copies ask for rows at multiples of 16 bytes. No other code knows what a block holds.
    """
    blocks, heads, rows, content = cache.shape
    step, of_head, of_row, one = cache.stride()
    if (of_row, one) != (content, 1):  # heads lie within a row: the block gets an order of its own
        if (of_head, of_row, one) != (content, heads * content, 1):
            raise NotImplementedError(f"{NAME} does not serve {_SCALED_ROWS} in blocks that are not contiguous")
        of_head = rows * content
    begin, width = cache.storage_offset(), content - 2 * _SCALE_BYTES
    assert width % head_dim == 0, "the cache has no room for scales"
    together = cache.as_strided((blocks, heads, rows, width), (step, of_head, width, 1), begin)
    words = torch.empty(0, dtype=torch.float32, device=cache.device).set_(cache.untyped_storage())
    places = (begin + rows * width, begin + rows * width + _SCALE_BYTES)
    k_scales, v_scales = (
        words.as_strided((blocks, heads, rows), (step // 4, of_head // 4, 2), place // 4) for place in places
    )
    return together, k_scales, v_scales


class _Bound(NamedTuple):
    """A layer, its variant, and the variant that sees keys after the query, too."""

    layer: Layer
    causal: VariantCall
    both_ways: VariantCall


def configured_mask(config: VllmConfig) -> Mask | None:
    """The user's mask: ``{"attngen": …}`` of ``--additional-config``, else the environment's."""
    more = config.additional_config
    return engines.configured(more.get("attngen") if isinstance(more, Mapping) else None)
