"""An attention backend of SGLang: metadata once a step, the pool's own writes, and ``attention_paged`` once a layer.

The pools stay as SGLang lays them out, of which pages are views. Imported by SGLang alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_spec
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.engines import layers as engines
from attngen.integrations.engines.layers import Layer, Mask, Step, VariantCall
from attngen.integrations.sglang.plugin import NAME
from attngen.runtime.operations.attention.layers import PagedBatch, PagedLayer

_EIGHT_BITS = (torch.float8_e4m3fn,)

#: Algorithms of drafts whose trees come as ``EagleVerifyInput``.
_TREES = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass
class Tables:
    """Page tables and numbers of keys of the requests. All int32, on the device."""

    pages: Tensor  # (requests, most pages)
    lengths: Tensor  # (requests,)
    batch: PagedBatch | None = None  # the same as layers take it, made by the first one


@dataclass
class AttngenMetadata:
    """One step: what all layers share."""

    starts: Tensor  # (requests + 1,) int32, where the queries of each request begin
    longest_query: int
    own: Tables
    longest: int  # keys that any request may have
    num_decodes: int | None = None  # requests at an end that have one query each, if others have more; see _decodes
    window: Tables | None = None  # of layers with a sliding window, where they have a pool of their own
    encoder: Tables | None = None  # of cross attention
    window_slots: Tensor | None = None  # where new tokens go in the pool of windows
    arguments: dict[str, Any] = field(default_factory=dict)  # of the user's mask
    image_token_ranges: Tensor | None = None  # (queries, 2) int32, first and last position of an image, set by models
    images: Tensor | None = None  # the same, (2, queries)
    tree: Tensor | None = None  # (requests, drafts, drafts) bool, the ones that each draft of a tree sees


class AttngenAttnBackend(AttentionBackend):
    """Attention of a model runner."""

    needs_cpu_seq_lens = True

    #: SGLang's name for backends whose metadata take ``image_token_ranges`` from Gemma 4.
    fa_impl_ver = 4

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        reason = self._refusal(model_runner)
        if reason is not None:
            raise ValueError(f"--attention-backend {NAME} does not serve {reason}")
        self.device = model_runner.device
        self.page_size = model_runner.page_size
        self.kv_index_translator = model_runner.kv_index_translator
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.max_context_len = model_runner.model_config.context_len
        self.most_pages = -(-self.max_context_len // self.page_size)
        pool = self.token_to_kv_pool
        self.use_sliding_window_kv_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self.draft_tokens = get_spec().speculative_num_draft_tokens or 1
        self.forward_metadata: AttngenMetadata | None = None
        deterministic = get_exec().deterministic.enable_deterministic_inference
        self._split_size = engines.INVARIANT_SPLIT if deterministic else None
        self._mask = engines.configured()
        #: What the draft stage fills in place, with a row of as many drafts for each draft; None of chains.
        self._verify_mask = _verify_mask(0, self.draft_tokens, self.device) if self._has_trees else None
        self._graphs: dict[tuple[int, int], AttngenMetadata] = {}
        self._layers: dict[tuple[int, int | None], _Layer] = {}

    def _decodes(self, forward_batch: Any) -> int | None:
        """Requests with one query at one end of a batch with prompts, as ``num_decodes`` counts them: SGLang puts those
        that decode behind the prompts. None where all are alike, or where the host does not know."""
        mode, extents = forward_batch.forward_mode, forward_batch.extend_seq_lens_cpu
        if mode.is_decode_or_idle() or mode.is_target_verify() or not extents or max(extents) < 2:
            return None
        ahead, behind = (
            next(place for place, count in enumerate(order) if count > 1) for order in (extents, reversed(extents))
        )
        return (-behind if behind >= ahead else ahead) or None

    def _refusal(self, runner: Any) -> str | None:
        """First feature of a runner that is not supported, or None."""
        model, spec = runner.model_config, get_spec()
        if runner.is_draft_worker:
            return "draft models; --speculative-draft-attention-backend takes another backend"
        if (spec.speculative_eagle_topk or 0) > 1 and (reason := self._tree_reason(runner, spec)):
            return f"trees of drafts (--speculative-eagle-topk above 1) {reason}"
        if runner.kv_index_translator.is_translating:
            return "--enable-unified-memory, whose slots are translated at each read"
        if getattr(model, "is_local_attention_model", False):
            return "chunked local attention"
        if model.is_encoder_decoder and runner.page_size != 1:
            return "cross attention with pages of more than one token"
        return self._form_reason(runner) or self._card_reason(runner)

    def _tree_reason(self, runner: Any, spec: Any) -> str | None:
        """The first reason against trees of drafts for a model, or None."""
        if spec.speculative_algorithm not in _TREES:
            return f"of {spec.speculative_algorithm}; trees are those of {', '.join(_TREES)}"
        if runner.sliding_window_size is not None:
            return "with sliding windows"
        return None if engines.configured() is None else "with a user's mask"

    def _card_reason(self, runner: Any) -> str | None:
        """The first kind of kernels that a model needs and the runner's card lacks, or None."""
        if torch.device(runner.device).type != "cuda":
            return None
        return engines.card_reason(*torch.cuda.get_device_capability(runner.device), *self._kinds(runner))

    def _kinds(self, runner: Any) -> list[str]:
        """Kinds of kernels (``cards.KINDS``) that a model asks for."""
        return engines.paged_kinds(max(_head_dims(runner)), fp8=_in_8_bits(runner))

    def _form_reason(self, runner: Any) -> str | None:
        """The first unsupported property of a model's heads or cache, or None."""
        reasons = (engines.head_dim_reason(dim, fp8=_in_8_bits(runner)) for dim in _head_dims(runner))
        return next(filter(None, reasons), None)

    # Metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Metadata of a step that runs without a graph."""
        starts, longest_query, lengths, longest = self._extents(forward_batch)
        most = min(engines.bound_of(-(-longest // self.page_size)), self.most_pages)
        indices = forward_batch.req_pool_indices
        encoder = None
        offset = forward_batch.encoder_lens
        if offset is not None:
            width = max(int(offset.max()), 1) if offset.numel() else 1
            encoder = Tables(self._gathered(indices, None, width), offset.to(torch.int32))
        tokens = self._gathered(indices, offset, most * self.page_size)
        self.forward_metadata = AttngenMetadata(
            starts, longest_query, Tables(self._as_pages(tokens), lengths), longest, self._decodes(forward_batch),
            encoder=encoder,
        )  # fmt: skip
        if self._verify_mask is not None and forward_batch.forward_mode.is_target_verify():
            mask = forward_batch.spec_info.custom_mask
            self.forward_metadata.tree = self._as_trees(mask, forward_batch.batch_size)
        self._set_window(self.forward_metadata, tokens, forward_batch)
        self._set_arguments(self.forward_metadata, forward_batch)

    @property
    def verify_mask(self) -> Any:
        """SGLang's ``VerifyMask`` of trees of drafts: pairs of drafts alone, which graphs read in place."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: metadata hold the tensors that the draft stage fills."""

    @property
    def _has_trees(self) -> bool:
        return (get_spec().speculative_eagle_topk or 0) > 1

    def _as_trees(self, mask: Tensor, count: int) -> Tensor:
        """Pairs of drafts of some requests, of a mask that holds nothing else."""
        drafts = self.draft_tokens
        return mask[: count * drafts * drafts].view(count, drafts, drafts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tensors that captured graphs read, for batches of up to ``max_bs`` requests."""
        del max_num_tokens
        if self._verify_mask is not None:
            self._verify_mask = _verify_mask(max_bs, self.draft_tokens, self.device)

        def table() -> Tensor:
            return torch.zeros(max_bs, self.most_pages, dtype=torch.int32, device=self.device)

        self._lengths = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self._own_table = table()
        self._window_table = table() if self.use_sliding_window_kv_pool else None
        self._window_slots = None
        if self.use_sliding_window_kv_pool:
            self._window_slots = torch.zeros(
                max_bs * self.draft_tokens, dtype=torch.int64, device=self.device
            )  # fmt: skip
        self._steps = torch.arange(0, max_bs + 1, dtype=torch.int32, device=self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors of a graph for a batch, of decoding or of drafts to verify."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(f"{NAME} has graphs for decoding and for verifying drafts, not for {mode.name}")
        if forward_batch.encoder_lens is not None:
            raise NotImplementedError(f"{NAME} has no graphs for cross attention; pass --disable-cuda-graph")
        count = forward_batch.batch_size
        queries = self.draft_tokens if mode.is_target_verify() else 1
        metadata = self._graphs.get((count, queries))
        if metadata is None:
            metadata = self._graphs[count, queries] = AttngenMetadata(
                self._steps[: count + 1] * queries, queries, Tables(self._own_table[:count], self._lengths[:count]),
                self.max_context_len,
            )  # fmt: skip
            if self._window_table is not None:
                metadata.window = Tables(self._window_table[:count], metadata.own.lengths)
            if self._verify_mask is not None and mode.is_target_verify():
                metadata.tree = self._as_trees(self._verify_mask.buffer, count)
        if metadata.tree is not None and not in_capture:
            given = forward_batch.spec_info.custom_mask
            if given.data_ptr() != metadata.tree.data_ptr():  # of a batch that had no room in it
                metadata.tree.view(-1)[: given.shape[0]].copy_(given)
        added = queries if mode.is_target_verify() else 0
        torch.add(forward_batch.seq_lens[:count], added, out=metadata.own.lengths)
        most = self._most(forward_batch, added)
        tokens = self._gathered(forward_batch.req_pool_indices[:count], None, most * self.page_size)
        metadata.own.pages[:, :most].copy_(self._as_pages(tokens))
        if metadata.window is not None and self._window_slots is not None:
            metadata.window.pages[:, :most].copy_(self._as_pages(self._in_window_pool(tokens)))
            slots = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
            metadata.window_slots = self._window_slots[: count * queries]
            if slots is None or in_capture:
                metadata.window_slots.zero_()
            else:
                metadata.window_slots[: slots.shape[0]].copy_(slots)
        self.forward_metadata = metadata
        self._set_arguments(metadata, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a request of padding: the one that SGLang writes."""
        return 1

    def _most(self, forward_batch: Any, added: int) -> int:
        """Pages of the longest request of a batch, as far as the host knows."""
        known = forward_batch.seq_lens_cpu
        if known is None or not known.numel():
            return self.most_pages
        return min(-(-(int(known.max()) + added) // self.page_size), self.most_pages)

    def _extents(self, forward_batch: Any) -> tuple[Tensor, int, Tensor, int]:
        """Starts and longest number of queries, lengths of keys and their bound, of a step without a graph."""
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        count = lengths.shape[0]
        added, queries = 0, 1
        if mode.is_target_verify():
            added = queries = self.draft_tokens
        elif not mode.is_decode_or_idle():
            extents = forward_batch.extend_seq_lens
            starts = torch.nn.functional.pad(extents.cumsum(0, dtype=torch.int32), (1, 0))
            host = forward_batch.extend_seq_lens_cpu
            longest = max(host) if host else int(extents.max())
            return starts, max(longest, 1), lengths.to(torch.int32), self._longest(forward_batch, 0)
        starts = torch.arange(0, (count + 1) * queries, queries, dtype=torch.int32, device=lengths.device)
        return starts, queries, (lengths + added).to(torch.int32), self._longest(forward_batch, added)

    def _longest(self, forward_batch: Any, added: int) -> int:
        known = forward_batch.seq_lens_cpu
        if known is None or not known.numel():
            return int(self.max_context_len)
        return max(int(known.max()) + added, 1)

    def _gathered(self, indices: Tensor, offset: Tensor | None, width: int) -> Tensor:
        """Slots of the tokens of requests, (requests, width), from ``offset`` (requests,) on."""
        if offset is None:
            rows: Tensor = self.req_to_token[indices, :width]
            return rows
        columns = offset.long()[:, None] + torch.arange(width, device=offset.device)
        return self.req_to_token[indices[:, None], columns.clamp(max=self.req_to_token.shape[1] - 1)]

    def _as_pages(self, tokens: Tensor) -> Tensor:
        """Pages of slots: of the first token of each page."""
        if self.page_size == 1:
            return tokens.to(torch.int32)
        return (tokens[:, :: self.page_size] // self.page_size).to(torch.int32)

    def _in_window_pool(self, tokens: Tensor) -> Tensor:
        """Slots of tokens in the pool of layers with a sliding window."""
        slots: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(tokens)
        return slots

    def _set_window(self, metadata: AttngenMetadata, tokens: Tensor, forward_batch: Any) -> None:
        if not self.use_sliding_window_kv_pool:
            return
        metadata.window = Tables(self._as_pages(self._in_window_pool(tokens)), metadata.own.lengths)
        metadata.window_slots = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)

    def _set_arguments(self, metadata: AttngenMetadata, forward_batch: Any) -> None:
        if self._mask is None:
            return
        tokens = metadata.longest_query * forward_batch.batch_size
        if forward_batch.extend_num_tokens is not None:
            tokens = forward_batch.extend_num_tokens
        step = Step(metadata.starts, metadata.own.lengths, tokens, metadata.longest_query, metadata.longest)
        metadata.arguments = dict(self._mask.of_step(step))

    # Layers

    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       sinks: Tensor | None = None, return_lse: bool = False, **more: Any) -> Any:  # fmt: skip
        """Attention of prompts, of parts of them, and of drafts to verify, over pages."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, return_lse, more)

    def forward_decode(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       sinks: Tensor | None = None, return_lse: bool = False, **more: Any) -> Any:  # fmt: skip
        """Attention of one new token for each request, over pages."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, return_lse, more)

    def support_triton(self) -> bool:
        return True

    def _forward(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool, sinks: Tensor | None,
        return_lse: bool, more: dict[str, Any],
    ) -> Any:  # fmt: skip
        given = sorted(name for name, value in more.items() if value is not None)
        if given:
            raise NotImplementedError(f"{NAME} does not serve '{given[0]}' of a layer")
        metadata = self.forward_metadata
        assert metadata is not None, "init_forward_metadata comes first"
        if k is not None and save:
            place = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
            self._write(layer, place, k, v)
        own = self._layer(layer, sinks)
        tables, choice = self._choice(own, layer, metadata)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        tokens = queries.shape[0]
        out = queries.new_empty(tokens, layer.tp_q_head_num, layer.v_head_dim)
        batch = tables.batch
        if batch is None or batch.tokens != tokens:
            batch = tables.batch = PagedBatch(
                tables.pages, tables.lengths, metadata.starts, engines.bound_of_queries(metadata.longest_query), tokens,
                metadata.num_decodes,
            )  # fmt: skip
        lse = self._paged(own, layer, choice)(queries, out, batch, return_lse=return_lse)
        return out.view(tokens, -1) if lse is None else (out, lse.transpose(0, 1).contiguous())

    def _write(self, layer: Any, place: KVWriteLoc, k: Tensor, v: Tensor) -> None:
        """Write new keys and values to the pool."""
        self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)

    def _paged(self, own: _Layer, layer: Any, choice: VariantCall) -> PagedLayer:
        """The calls of a layer with a variant."""
        key, value = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if own.paged is None or own.choice is not choice or own.cache != key.data_ptr():
            keys = paged_kv_view(key, self.page_size, layer.tp_k_head_num, layer.head_dim)
            values = paged_kv_view(value, self.page_size, layer.tp_v_head_num, layer.v_head_dim)
            scales = {}
            if keys.dtype in _EIGHT_BITS:
                given = {"k_descale": layer.k_scale, "v_descale": layer.v_scale}
                scales = {name: _scale(scale, key.device) for name, scale in given.items()}
            own.cache, own.choice = key.data_ptr(), choice
            own.paged = PagedLayer(
                keys, values, variant=choice.variant, softmax_scale=layer.scaling, split_size=self._split_size,
                arguments=choice.arguments, **scales,
            )  # fmt: skip
        return own.paged

    def _layer(self, layer: Any, sinks: Tensor | None) -> _Layer:
        """Description of a layer, made when it first runs."""
        key = (layer.layer_id, None if sinks is None else sinks.data_ptr())
        own = self._layers.get(key)
        if own is None:
            if getattr(layer, "xai_temperature_len", -1) > 0:
                raise NotImplementedError(f"{NAME} does not serve xai_temperature_len")
            reason = engines.combination_reason(bool(layer.logit_cap), False, sinks is not None)
            if reason is not None:
                raise NotImplementedError(f"{NAME} does not serve {reason}")
            # SGLang's window does not count the query's own key.
            inside = layer.sliding_window_size
            window = None if inside is None or inside < 0 or layer.is_cross_attention else inside + 1
            logits = None if sinks is None else engines.float32_on(sinks.device, sinks.detach())
            own = self._layers[key] = _Layer(Layer(window, float(layer.logit_cap or 0.0), None, logits))
        return own

    def _choice(self, own: _Layer, layer: Any, metadata: AttngenMetadata) -> tuple[Tables, VariantCall]:
        """Tables and variant of a layer."""
        if layer.is_cross_attention:
            if metadata.encoder is None:
                raise CallError("cross attention needs the lengths of encoders")
            return metadata.encoder, own.both_ways
        window = own.layer.window
        in_window = window is not None and metadata.window is not None
        tables = metadata.window if in_window and metadata.window is not None else metadata.own
        if layer.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL):
            return tables, own.both_ways
        if metadata.tree is not None:
            return tables, own.over_tree(metadata.tree)
        if self._mask is not None and self._mask.for_window(window):
            masked = own.masked(self._mask)
            if metadata.arguments:
                masked = masked._replace(arguments={**masked.arguments, **metadata.arguments})
            return tables, masked
        if metadata.image_token_ranges is not None:
            if metadata.images is None:
                metadata.images = metadata.image_token_ranges.t().contiguous()
            return tables, own.layer.with_images(metadata.images[0], metadata.images[1], clamped=True)
        return tables, own.causal


class _Layer:
    """A layer, its variants, and the calls that it made last."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.causal, self.both_ways = layer.causal(), layer.bidirectional()
        self.choice: VariantCall | None = None
        self.cache = 0  # its address
        self.paged: PagedLayer | None = None
        self._masked: VariantCall | None = None
        self._over_tree: tuple[Tensor, VariantCall] | None = None

    def over_tree(self, tree: Tensor) -> VariantCall:
        """The variant of trees of drafts; the same value in calls with the same tensor."""
        known = self._over_tree
        if known is None or known[0] is not tree:
            known = self._over_tree = tree, self.layer.with_tree(tree)
        return known[1]

    def masked(self, mask: Mask) -> VariantCall:
        """The user's mask in the layer's place."""
        if self._masked is None:
            self._masked = self.layer.own(mask)
        return self._masked


def _verify_mask(requests: int, drafts: int, device: Any) -> Any:
    """SGLang's mask of trees of drafts, with room for some requests."""
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    buffer = torch.zeros(requests * drafts * drafts, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)


def _head_dims(runner: Any) -> tuple[int, ...]:
    """Head dims of a model's layers; those with a window may have another one."""
    model = runner.model_config
    return model.head_dim, getattr(model, "swa_head_dim", None) or model.head_dim


def _in_8_bits(runner: Any) -> bool:
    """Whether the cache is in e4m3."""
    return getattr(runner, "kv_cache_dtype", None) in _EIGHT_BITS


def _scale(scale: Any, device: torch.device) -> Tensor:
    """A scale of a cache, () or one for each KV head."""
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=device)
    return tensor.reshape(() if tensor.numel() == 1 else -1)
