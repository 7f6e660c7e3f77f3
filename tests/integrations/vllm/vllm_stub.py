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
    def validate_configuration(cls, head_size: int, dtype: torch.dtype, **options: Any) -> list[str]:
        reasons = []
        if not cls.supports_head_size(head_size):  # type: ignore[attr-defined]
            reasons.append("head_size not supported")
        if dtype not in cls.supported_dtypes:  # type: ignore[attr-defined]
            reasons.append("dtype not supported")
        if options.get("use_mla"):
            reasons.append("MLA not supported")
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
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1, dcp_comm_backend="ag_rs"
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
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()  # type: ignore[attr-defined]


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
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {"VllmConfig": Config, "get_current_vllm_config_or_none": lambda: CURRENT[0]},
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
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.dcp": {"dcp_a2a_lse_reduce": None, "cp_lse_ag_out_rs": None},
    }  # fmt: skip
    return module_tree(contents)


def install() -> dict[str, ModuleType]:
    """Put the stub in vLLM's place, for as long as the process lives, and return its modules."""
    made = modules()
    sys.modules.update(made)
    return made
