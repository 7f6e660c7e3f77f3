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
        "sglang.srt.configs.model_config": {"AttentionArch": AttentionArch},
        "sglang.srt.layers": {}, "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
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
            "_dispatch_mla_subtype": lambda attn, batch: "absorbed",
            "_handle_attention_backend": lambda attn, batch, backend_name: f"as {backend_name}",
        },
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.runtime_context": {"get_exec": None, "get_spec": None},
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
