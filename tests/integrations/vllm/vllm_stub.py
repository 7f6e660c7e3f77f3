"""Stand-in for the parts of vLLM that attngen's backend uses: names, fields and defaults are those of its releases.

``install`` puts it in the place of vLLM, for tests of the backend's own logic. That vLLM has these names, with these
meanings, is what ``engine_contracts`` checks in its releases.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tests.integrations.engines.stubs import module_tree

Decode = TypeVar("Decode")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()  # type: ignore[attr-defined]

    @classmethod
    def validate_configuration(cls, head_size: int, dtype: torch.dtype, **options: Any) -> list[str]:
        reasons = []
        if not cls.supports_head_size(head_size):  # type: ignore[attr-defined]
            reasons.append("head_size not supported")
        if dtype not in cls.supported_dtypes:  # type: ignore[attr-defined]
            reasons.append("dtype not supported")
        if options.get("use_mla") and not hasattr(cls, "is_mla"):
            reasons.append("MLA not supported")
        if options.get("use_sparse") and not cls.is_sparse():
            reasons.append("sparse not supported")
        if options.get("use_batch_invariant") and not hasattr(cls, "supports_batch_invariance"):
            reasons.append("batch invariance not supported")
        if options.get("kv_cache_dtype", "auto") not in cls.supported_kv_cache_dtypes:  # type: ignore[attr-defined]
            reasons.append("kv_cache_dtype not supported")
        capability = options.get("device_capability")
        if not cls.supports_compute_capability(capability):  # type: ignore[attr-defined]
            reasons.append("compute capability not supported")
        return reasons


class AttentionMetadataBuilder:
    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class AttentionImpl:
    dcp_world_size = 1
    dcp_rank = 0


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        return replace(self, **changes)


@dataclass
class Config:
    model_config: Any = field(default_factory=lambda: SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None))
    scheduler_config: Any = field(default_factory=lambda: SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=1024))
    parallel_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            dcp_comm_backend="ag_rs",
        )
    )
    additional_config: dict[str, Any] = field(default_factory=dict)


class Registry(Enum):
    FLASH_ATTN = "flash"


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


@dataclass
class MLACommonMetadata(Generic[Decode]):
    num_decode_tokens: int
    slot_mapping: Tensor
    decode: Decode | None = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, metadata_cls: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = metadata_cls

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> Any:
        """Metadata of a batch without long prompts."""
        del common_prefix_len
        decode = self._build_decode(  # type: ignore[attr-defined]
            block_table_tensor=common.block_table_tensor, seq_lens_device=common.seq_lens,
            max_seq_len=common.max_seq_len, query_start_loc_cpu=common.query_start_loc_cpu,
            query_start_loc_device=common.query_start_loc, num_decode_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len, dcp_tot_seq_lens_device=None,
        )  # fmt: skip
        return self.metadata_cls(common.num_actual_tokens, common.slot_mapping, decode)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        return self.build(0, common_attn_metadata)


class MLACommonImpl(AttentionImpl):
    need_to_return_lse_for_decode = False

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init__(self, num_heads: int, head_size: int, scale: float, *others: Any, kv_lora_rank: int) -> None:
        self.num_heads, self.head_size, self.scale, self.kv_lora_rank = num_heads, head_size, scale, kv_lora_rank


def _convert(metadata: SparseMLACommonMetadata, cache: Tensor, topk: Tensor) -> tuple[Tensor, Tensor]:
    """Positions as rows of the cache, and how many of them count: vLLM's operator, in torch."""
    size, stride = metadata.block_size, cache.stride(0) // cache.shape[-1]
    slots, counts = torch.full_like(topk, -1), (topk >= 0).sum(-1).int()
    for token, row in enumerate(topk):
        place = row[row >= 0].long()
        table = metadata.block_table[metadata.req_id_per_token[token]]
        slots[token, : len(place)] = table[place // size] * stride + (place % size).int()
    return slots, counts


@dataclass
class SparseMLACommonMetadata:
    block_table: Tensor
    req_id_per_token: Tensor
    query_start_loc: Tensor
    block_size: int
    num_decode_tokens: int


class SparseMLACommonMetadataBuilder(AttentionMetadataBuilder):
    dcp_world_size = 1
    reorder_batch_threshold: int

    def _init_reorder_batch_threshold(self, threshold: int, **supports: bool) -> None:
        assert all(supports.values())
        self.reorder_batch_threshold = threshold

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> Any:
        del common_prefix_len
        tokens = common.num_actual_tokens
        requests = _requests_of_tokens(
            common.query_start_loc, common.query_start_loc.new_zeros(tokens), int(common.query_start_loc[-1]), tokens
        )
        return self.metadata_cls(  # type: ignore[attr-defined]
            common.block_table_tensor, requests, common.query_start_loc, self.kv_cache_spec.block_size, tokens
        )


class SparseMLACommonImpl(AttentionImpl):
    is_sparse = True
    need_to_return_lse_for_decode = False
    supports_dense_mha_prefill = True

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *others: Any, kv_lora_rank: int, topk_indices_buffer: Tensor
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.kv_lora_rank = num_heads, head_size, scale, kv_lora_rank
        self.topk_indices_buffer = topk_indices_buffer

    def forward_mqa(self, q: Any, cache: Tensor, metadata: SparseMLACommonMetadata, layer: Any) -> Any:
        tokens = len(q[0] if isinstance(q, tuple) else q)
        slots, counts = _convert(metadata, cache, self.topk_indices_buffer[:tokens])
        return self._forward_mqa_kernel(
            q, cache, slots, counts, layer=layer, block_size=metadata.block_size, is_decode=True
        )

    def _forward_mqa_kernel(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def _align_blocks_to_rows(spec: Any) -> Any:
    return replace(spec, block_stride_alignment=spec.state_content_size_bytes)


def _flat_kv_row_view(cache: Tensor, block_size: int) -> tuple[Tensor, int]:
    stride, columns = cache.stride(0) // cache.shape[-1], cache.shape[-1]
    return cache.as_strided(((len(cache) - 1) * stride + block_size, columns), (columns, 1)), stride


def _requests_of_tokens(starts: Tensor, out: Tensor, mapped: int, tokens: int) -> Tensor:
    place = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    own = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    out[:tokens] = torch.where(place < mapped, own, 0).int()
    return out[:tokens]


class CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class PrefillRowShard:
    """A rank's rows of the prompts of a step, here from ``first`` on, of a step whose metadata say so."""

    def __init__(self, first: int) -> None:
        self.first = first

    @classmethod
    def from_metadata(cls, prefill: Any, num_decode_tokens: int) -> PrefillRowShard | None:
        del num_decode_tokens
        first = getattr(prefill, "rows_of_rank_from", None)
        return None if first is None else cls(first)

    def narrow(self, chunk: Any) -> tuple[int, int, Tensor, Tensor] | None:
        first = max(self.first, chunk.token_start)
        if first >= chunk.token_end:
            return None
        own = slice(first - chunk.token_start, None)
        return first, chunk.token_end, chunk.cu_seqlen_ks[own], chunk.cu_seqlen_ke[own]

    def exchange_topk(self, buffer: Tensor, width: int) -> None:
        buffer[: self.first, :width] = 5  # what other ranks selected


#: The context that ``get_forward_context`` returns.
CONTEXT = SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)


def sparse_attn_indexer(*args: Any, **options: Any) -> Any:
    """vLLM's own indexer: what it was given."""
    return args, options


def _reserve(buffer: Tensor, device: torch.device) -> None:
    del buffer, device


class MLAPrefillBackend:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


class PrefillRegistry(Enum):
    FLASH_ATTN = "flash"


#: The configuration that ``get_current_vllm_config_or_none`` returns.
CURRENT: list[Any] = [None]


def _local_lengths(lengths: Tensor, ranks: int = 1, rank: int = 0, interleave: int = 1) -> Tensor:
    whole = lengths // interleave // ranks * interleave
    return whole + (lengths - whole * ranks - rank * interleave).clamp(0, interleave)


def modules() -> dict[str, ModuleType]:
    """The modules of the stub by name."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 1},
        "vllm.config": {
            "VllmConfig": Config, "get_current_vllm_config_or_none": lambda: CURRENT[0],
            "get_current_vllm_config": lambda: CURRENT[0] or Config(), "CUDAGraphMode": CUDAGraphMode,
        },
        "vllm.compilation": {},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda function: function},
        "vllm.forward_context": {"get_forward_context": lambda: CONTEXT},
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "PrefillRowShard": PrefillRowShard, "_reserve_row_shard_exchange_transient": _reserve
        },
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_dcp_group": lambda: None, "get_dcp_world_size_and_rank": lambda enabled=True: (1, 0)
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            each.__name__: each
            for each in (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType,
                         CommonAttentionMetadata, MultipleOf)
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": _local_lengths},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": Registry, "register_backend": None},
        "vllm.v1.attention.backends.mla": {},
        "vllm.v1.attention.backends.mla.sparse_utils": {
            "align_blocks_to_rows": _align_blocks_to_rows, "flat_kv_row_view": _flat_kv_row_view
        },
        "vllm.v1.attention.backends.mla.prefill": {},
        "vllm.v1.attention.backends.mla.prefill.base": {"MLAPrefillBackend": MLAPrefillBackend},
        "vllm.v1.attention.backends.mla.prefill.registry": {
            "MLAPrefillBackendEnum": PrefillRegistry, "register_mla_prefill_backend": None
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {},
        "vllm.model_executor.layers.attention.mla_attention": {
            each.__name__: each
            for each in (MLACommonBackend, MLACommonDecodeMetadata, MLACommonImpl, MLACommonMetadata,
                         MLACommonMetadataBuilder, QueryLenSupport)
        },
        "vllm.model_executor.layers.attention.sparse_mla_attention": {
            each.__name__: each
            for each in (SparseMLACommonImpl, SparseMLACommonMetadata, SparseMLACommonMetadataBuilder)
        },
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.metadata": {"compute_token_to_req_indices": _requests_of_tokens},
        "vllm.v1.attention.ops.dcp": {"dcp_a2a_lse_reduce": None, "cp_lse_ag_out_rs": None},
    }  # fmt: skip
    return module_tree(contents)


def install() -> dict[str, ModuleType]:
    """Put the stub in vLLM's place, for as long as the process lives, and return its modules."""
    made = modules()
    sys.modules.update(made)
    return made
