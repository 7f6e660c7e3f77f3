"""Stand-in for the parts of SGLang that attngen's backend uses; ``engine_contracts`` checks the real ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.integrations.engines.stubs import module_tree


class AttentionArch(IntEnum):
    MLA = auto()
    MHA = auto()


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY


class IdSpaceKind(Enum):
    FULL = auto()
    SLIDING_WINDOW = auto()


class AttentionBackend:
    pass


class TreeMaskMode(IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1


@dataclass(frozen=True)
class VerifyMask:
    buffer: Tensor
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True

    def fits(self, bs: int) -> bool:
        return bs <= self.max_bs


@dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None

    @classmethod
    def for_layer(cls, batch: Any, layer: Any, *, swa_loc: Tensor | None = None) -> KVWriteLoc:
        return cls(batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc, swa_loc)


class Pool:
    """One layer's keys and values by slot."""

    def __init__(self, slots: int, page_size: int, dtype: torch.dtype, kv_heads: int, dim: int) -> None:
        del page_size
        self.buffers = tuple(torch.zeros(slots, kv_heads, dim).to(dtype) for _ in "kv")

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, ...]:
        return self.buffers

    def place(self, location: KVWriteLoc) -> Tensor:
        return location.loc

    def set_kv_buffer(
        self, layer: Any, location: KVWriteLoc, k: Tensor, v: Tensor, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        for buffer, new, scale in zip(self.buffers, (k, v), (k_scale, v_scale), strict=True):
            buffer[self.place(location)] = (new if scale is None else new / scale).to(buffer.dtype)


class SWAKVPool(Pool):
    """A pool of layers with a window, whose slots differ from those of the others."""

    swa_layer_nums = 1

    def __init__(self, slots: int, page_size: int, *more: Any) -> None:
        super().__init__(slots, page_size, *more)
        pages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(slots // page_size - 1) + 1])
        self.mapping = (pages[:, None] * page_size + torch.arange(page_size)).flatten()

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return self.mapping[slots.long()]

    def place(self, location: KVWriteLoc) -> Tensor:
        assert location.swa_loc is not None
        return location.swa_loc


class MLAPool:
    """One layer's latent rows by slot."""

    def __init__(self, slots: int, dtype: torch.dtype, columns: int, rank: int) -> None:
        self.rows, self.rank = torch.zeros(slots, 1, columns).to(dtype), rank

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.rows, self.rows[..., : self.rank]

    def set_kv_buffer(self, layer: Any, location: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        self.rows[location.loc] = k


class DSAPool:
    """One layer's latent rows by slot, for sparse attention; rows of 656 bytes in e4m3."""

    def __init__(self, rows: Tensor) -> None:
        self.dsa_kv_cache_store_fp8 = rows.element_size() == 1
        self.dtype = torch.float8_e4m3fn if self.dsa_kv_cache_store_fp8 else torch.bfloat16
        self.kv_cache_dim = rows.shape[-1]
        self.rows = rows.flatten(0, 1).unsqueeze(1)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.rows.view(self.dtype) if self.dsa_kv_cache_store_fp8 else self.rows


class DeepseekSparseAttnBackend(AttentionBackend):
    """Metadata of sparse latent attention, and which form a step runs in: the lists are slots already."""

    use_mha = False
    _kv_shard_pool = None

    def __init__(self, model_runner: Any) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.dsa_kv_cache_store_fp8 = self.token_to_kv_pool.dsa_kv_cache_store_fp8
        self.enable_auto_select_prefill_impl = True
        self.dsa_prefill_impl, self.dsa_decode_impl = "flashmla_auto", "fa3"

    def init_forward_metadata(self, batch: Any) -> None:
        added = 3 if batch.forward_mode.is_target_verify() else 0
        counts = [1] * batch.batch_size if batch.forward_mode.is_decode_or_idle() else batch.extend_seq_lens_cpu
        used = batch.seq_lens + added
        lengths = zip(counts, used.tolist(), strict=True)
        of_tokens = [place + 1 for count, length in lengths for place in range(length - count, length)]
        seen = torch.tensor(of_tokens, dtype=torch.int32).to(batch.seq_lens.device)
        pages = self.req_to_token[: len(counts), : int(used.max()) : 64] // 64
        self.forward_metadata = SimpleNamespace(
            dsa_cache_seqlens_int32=seen.clamp(max=24),
            dsa_seqlens_expanded=seen,
            cache_seqlens_int32=used.int(),
            flashmla_metadata=self._compute_flashmla_metadata(cache_seqlens=None, seq_len_q=1),  # type: ignore
            real_page_table=pages.repeat_interleave(counts[0], 0) if added else pages,
            indexer_seq_lens_cpu=used.cpu(),
            dsa_extend_seq_lens_list=counts,
            cu_seqlens_q=torch.tensor([0, *counts], device=used.device).cumsum(0, dtype=torch.int32),
        )

    def get_indexer_metadata(self, layer_id: int, batch: Any) -> DSAIndexerMetadata:
        return DSAIndexerMetadata(self.forward_metadata)

    def forward_extend(self, *given: Any, **more: Any) -> Any:
        return self._forward(self.dsa_prefill_impl, *given, **more)

    def forward_decode(self, *given: Any, **more: Any) -> Any:
        return self._forward(self.dsa_decode_impl, *given, **more)

    def _forward(
        self, form: str, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True,
        q_rope: Any = None, topk_indices: Any = None, attn_sink: Any = None,
    ) -> Any:  # fmt: skip
        if self.use_mha:
            return self._forward_standard_mha(q, k, v, layer, batch, self.forward_metadata)  # type: ignore
        heads = layer.tp_q_head_num
        q_all = torch.cat([q.view(-1, heads, layer.v_head_dim), q_rope.view(len(q), heads, -1)], dim=-1)
        given = {
            "q_all": q_all, "kv_cache": self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            "page_table_1": topk_indices, "sm_scale": layer.scaling, "v_head_dim": layer.v_head_dim,
        }  # fmt: skip
        if form == "flashmla_kv":
            return self._forward_flashmla_kv(**given, layer=layer, metadata=self.forward_metadata)  # type: ignore
        assert form == "flashmla_sparse"
        lengths = self.forward_metadata.dsa_cache_seqlens_int32
        return self._forward_flashmla_sparse(**given, topk_length=lengths, attn_sink=attn_sink)  # type: ignore


@dataclass(frozen=True)
class DSAIndexerMetadata:
    attn_metadata: Any
    force_unfused_topk: bool = False

    def get_seqlens_int32(self) -> Tensor:
        return self.attn_metadata.cache_seqlens_int32

    def get_seqlens_expanded(self) -> Tensor:
        return self.attn_metadata.dsa_seqlens_expanded

    def get_page_table_64(self) -> Tensor:
        return self.attn_metadata.real_page_table

    def get_indexer_seq_len_cpu(self) -> Tensor:
        return self.attn_metadata.indexer_seq_lens_cpu

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self.attn_metadata.dsa_extend_seq_lens_list


class Indexer:
    def _get_topk_paged(self, *args: Any) -> Any:
        return "theirs", args

    def _get_topk_ragged(self, *args: Any) -> Any:
        return "theirs", args

    @staticmethod
    def _get_index_k_read_buffer(pool: Any, layer_id: int) -> Tensor:
        return pool.index_pages

    @staticmethod
    def _get_mqa_logits_budget_bytes(device: Any) -> int:
        return BUDGET[0]


#: Whether attention takes slots, not positions.
FUSED = [True]

#: Bytes of scores that prompts may take, above which steps are split.
BUDGET = [1 << 30]


def _should_chunk(*, num_rows: int, num_cols: int, get_budget_bytes: Any, rocm: bool) -> tuple[bool, int]:
    return 4 * num_rows * num_cols > get_budget_bytes(), get_budget_bytes()


class AttentionBackendRegistry:
    handlers: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, name: str, handler: Any) -> None:
        cls.handlers[name] = handler


def layer(heads: int, dim: int, scaling: float, kv_heads: int, **more: Any) -> Any:
    """A layer with the fields of SGLang's."""
    return SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=kv_heads, tp_v_head_num=kv_heads, head_dim=dim, qk_head_dim=dim,
        v_head_dim=dim, scaling=scaling, xai_temperature_len=-1, **more,
    )  # fmt: skip


def latent(like: Tensor) -> Any:
    """Stand-in for the parts of an engine that steps of latent attention need; tensors have the device and the dtype of
    ``like``."""

    def latent_layer(*given: Any, v_head_dim: int, **more: Any) -> Any:
        made = layer(*given, k_scale=None, v_scale=None, **more)
        made.v_head_dim = v_head_dim
        return made

    def pool(slots: int, page_size: int) -> MLAPool:
        del page_size
        made = MLAPool(slots, like.dtype, 576, 512)
        made.rows = made.rows.to(like)
        return made

    return SimpleNamespace(pool=pool, layer=latent_layer, modes=ForwardMode, kinds=AttentionType, like=like)


def paged_kv_view(buffer: Tensor, page_size: int, kv_heads: int, dim: int) -> Tensor:
    return buffer.view(-1, page_size, kv_heads, dim)


def modules() -> dict[str, ModuleType]:
    """The modules of the stub by name."""
    listed: list[str] = []
    chunked: list[str] = []
    backends: dict[str, Any] = {}
    contents: dict[str, dict[str, Any]] = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.configs": {},
        "sglang.srt.configs.model_config": {
            "AttentionArch": AttentionArch,
            "get_dsa_index_kpool": lambda config: config.index_kpool,
            "is_deepseek_dsa": lambda config: getattr(config, "index_topk", None) is not None,
        },
        "sglang.srt.layers": {}, "sglang.srt.layers.attention": {}, "sglang.srt.layers.attention.qsa": {},
        "sglang.srt.layers.attention.qsa.config": {
            "is_qwen_qsa": lambda config: getattr(config, "indexer_n_heads", None) is not None
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.attention.verify_mask": {"VerifyMask": VerifyMask},
        "sglang.srt.speculative": {}, "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": TreeMaskMode},
        "sglang.srt.layers.attention.dsa_backend": {"DeepseekSparseAttnBackend": DeepseekSparseAttnBackend},
        "sglang.srt.layers.attention.dsa": {},
        "sglang.srt.layers.attention.dsa.dsa_indexer": {"Indexer": Indexer, "get_token_to_kv_pool": None},
        "sglang.srt.layers.attention.dsa.dsa_indexer_metadata": {"DSAIndexerMetadata": DSAIndexerMetadata},
        "sglang.srt.layers.attention.mqa_logits_utils": {"mqa_logits_should_chunk": _should_chunk},
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: FUSED[0]))},
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": lambda name: lambda make: backends.setdefault(name, make),
        },
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
        "sglang.srt.mem_cache": {}, "sglang.srt.mem_cache.layout": {},
        "sglang.srt.mem_cache.kv_loc_plan": {"IdSpaceKind": IdSpaceKind},
        "sglang.srt.mem_cache.layout.paged_view": {"paged_kv_view": paged_kv_view},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.models": {},
        "sglang.srt.models.deepseek_common": {},
        "sglang.srt.models.deepseek_common.attention_backend_handler": {
            "AttentionBackendRegistry": AttentionBackendRegistry,
            "handle_attention_dsa": lambda attn, batch: "sparse",
            "_dispatch_mla_subtype": lambda attn, batch: "absorbed",
            "_handle_attention_backend": lambda attn, batch, backend_name: f"as {backend_name}",
        },
        "sglang.srt.models.deepseek_common.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["dsa"]},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.runtime_context": {"get_exec": None, "get_parallel": None, "get_spec": None},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "listed": listed, "chunked": chunked, "add_attention_backend_choices": listed.extend,
            "add_chunked_prefix_cache_attention_backend": chunked.append,
            "add_deterministic_attention_backend_choices": [].extend,
            "add_radix_supported_deterministic_attention_backend_choices": [].extend,
        },
    }  # fmt: skip
    return module_tree(contents)


def install() -> dict[str, ModuleType]:
    """Put the stub in SGLang's place, for as long as the process lives, and return its modules."""
    made = modules()
    sys.modules.update(made)
    return made
