"""Models of transformers whose queries choose blocks of keys: Qwen4Exp (QSA) and MiniMax-M3 (MSA).

These classes choose with operations of their own, QSA for one query after the other, and hide all other keys by a mask
of all pairs. ``serve`` has them choose by ``attngen.index_scores`` or ``attngen.block_scores``, and ``attngen.topk``,
and pass on lists, which attention over keys by index reads. What they choose is the same. Models with another
implementation of attention run as they did.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.integrations.shared import catalogue
from attngen.integrations.shared.choice import NO_LIMIT, VariantCandidate
from attngen.integrations.transformers.mask_structure import MaskStructure, StructuredMask
from attngen.runtime.operations.index_scores.call import block_scores, index_scores
from attngen.runtime.operations.topk.call import topk

#: The spec with the kernels of these models.
SPEC = "sparse_gqa"

#: By the end of a module of transformers: its class that chooses, and what its ``forward`` becomes.
_CLASSES = {
    ".qwen4_exp.modeling_qwen4_exp": ("Qwen4ExpTextQSAIndexer", "_of_qsa"),
    ".minimax_m3_vl.modeling_minimax_m3_vl": ("MiniMaxM3VLIndexer", "_of_msa"),
}

#: Names of implementations whose calls take lists.
IMPLEMENTATIONS = {"attngen"}


@torch.compiler.assume_constant_result  # dynamo cannot trace changes of classes
def serve(config: type) -> None:
    """Have the models of a config choose blocks with attngen's functions, if they choose any. Again changes nothing."""
    package = config.__module__.rpartition(".")[0]
    for end, (name, choice) in _CLASSES.items():
        if end.startswith(f".{package.rpartition('.')[2]}."):
            _replace(f"{package}.{end.rpartition('.')[2]}", name, choice)


@cache
def _replace(module: str, name: str, choice: str) -> None:
    cls = getattr(sys.modules[module], name)
    cls.forward = globals()[choice](cls.forward)


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """Blocks of keys by their numbers, int32: (b, sq, n) for all heads, or (b, sq, hk, n), -1 for none. Block i is
    ``block`` keys from ``start[b] + i * block`` on, where ``start`` (b,) is 0 if it is None. ``whole``: these are
    all."""

    blocks: Tensor
    block: int
    start: Tensor | None = None
    whole: bool = False

    def candidates(self, structure: MaskStructure) -> list[VariantCandidate]:
        """The variants that attend to these blocks, up to each query's own key; empty where none does."""
        per_head = self.blocks.dim() == 4
        name = f"{'head_' * per_head}blocks_of_{self.block}"
        if not per_head:
            if self.start is None and catalogue.is_shipped(f"listed_{name}"):
                return [VariantCandidate(f"listed_{name}", {"indices": self.blocks})]
            return [VariantCandidate("listed_positions", {"indices": self.positions()})]
        if not catalogue.is_shipped(f"listed_{name}"):
            return []
        if structure.start is None:
            return [VariantCandidate(f"listed_{name}", {"indices": self.blocks})]
        padding = {"start": structure.start, "stop": structure.stop}
        return [VariantCandidate(f"padded_{name}", {"indices": self.blocks, **padding})]

    def positions(self) -> Tensor:
        """The keys of the blocks, by their places."""
        of_block = torch.arange(self.block, device=self.blocks.device, dtype=torch.int32)
        keys = self.blocks[..., None] * self.block + of_block
        if self.start is not None:
            keys = keys + self.start.view(-1, *[1] * (keys.dim() - 1))
        return keys.where(self.blocks[..., None] >= 0, -1).flatten(-2)

    def dense(self, keys: int, heads: int) -> Tensor:
        """The lists as bools, True for keys of a block, (b, 1, sq, keys) or (b, heads, sq, keys)."""
        at = self.positions()
        at = at.unsqueeze(2) if at.dim() == 3 else at
        at = at.where((at >= 0) & (at < keys), keys).transpose(1, 2).long()
        chosen = torch.zeros(*at.shape[:-1], keys + 1, dtype=torch.bool, device=at.device).scatter(-1, at, True)[
            ..., :keys
        ]
        return chosen.repeat_interleave(heads // chosen.shape[1], dim=1) if chosen.shape[1] > 1 else chosen


class ListedMask(StructuredMask):
    """A mask of which each query sees the keys of some blocks.

    A model combines the mask of its forward pass with the keys that a layer has chosen: of that mask, this is the
    result.
    """

    lists: ChosenBlocks
    mask: StructuredMask

    @staticmethod
    def choosing(given: StructuredMask, lists: ChosenBlocks) -> ListedMask:
        """The mask that is given, with these blocks chosen."""
        nothing = torch.empty_strided(tuple(given.shape), (0,) * 4, dtype=torch.bool, device=given.device)
        mask: ListedMask = torch.Tensor._make_subclass(ListedMask, nothing)
        mask.structure, mask.lists, mask.mask, mask._built = given.structure, lists, given, None
        mask._build = lambda: given.dense() & lists.dense(given.shape[-1], 1)
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """The mask itself for what a model combines it with; else as other masks do."""
        if func in (torch.Tensor.__and__, torch.Tensor.__rand__) and len(args) == 2 and not kwargs:
            for mask, other in (args, args[::-1]):
                if isinstance(mask, ListedMask) and other is mask.mask:
                    return mask
        return super().__torch_function__(func, types, args, kwargs)


def is_causal(structure: MaskStructure) -> bool:
    """Whether a mask hides padding and later keys, and nothing else."""
    alone = structure.chunk is None and structure.doc is None and structure.subtree_end is None
    return alone and structure.right == 0 and structure.left == NO_LIMIT


def _scored(tensor: Tensor) -> Tensor:
    """In the dtype of scores: products are float32 in these models, whatever their inputs are."""
    return tensor if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.float()


# --- QSA ------------------------------------------------------------------------------------------------------


def _of_qsa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Choose complete blocks of keys by the sums of relu(q · k) over heads, k a mean of the block; all keys of an
    incomplete block are seen."""

    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, *rest: Any,
                **kwargs: Any) -> Tensor:  # fmt: skip
        if not isinstance(attention_mask, StructuredMask) or not is_causal(attention_mask.structure):
            return original(self, hidden_states, position_embeddings, attention_mask, *rest, **kwargs)
        held = [*rest, *kwargs.values()]
        with torch.no_grad():
            lists = _qsa(self, hidden_states, position_embeddings, attention_mask, held[0] if held else None)
        return ListedMask.choosing(attention_mask, lists)

    return forward


def _qsa(self: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], mask: StructuredMask, held: Any) -> ChosenBlocks:
    batch, queries = hidden.shape[:2]
    dim, block, count = self.index_head_dim, self.compress_ratio, self.block_topk
    cos, sin = embeddings  # of all keys so far
    total = cos.shape[1]
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    q, keys = self.index_qk_proj(hidden).split([self.index_n_heads * dim, dim], dim=-1)
    q = rotate(
        self.q_layernorm(q.unflatten(-1, (-1, dim))), cos=cos[:, -queries:], sin=sin[:, -queries:], unsqueeze_dim=2
    )
    if held is not None:
        keys = held.update_indexer(keys, self.layer_idx)
    blocks = total // block
    structure = mask.structure
    start = structure.start
    if blocks <= count and not hidden.is_meta:  # a model without data is asked for the calls of long prompts
        every = torch.arange(blocks + 1, dtype=torch.int32, device=hidden.device)
        return ChosenBlocks(every.expand(batch, queries, -1), block, start, whole=True)
    at = torch.arange(blocks * block, device=hidden.device).expand(batch, -1)
    if start is not None:  # blocks are counted from the first key that is not padding
        at = (at + start[:, None]).clamp(max=total - 1)
    groups = keys.gather(1, at[..., None].expand(-1, -1, dim)).unflatten(1, (blocks, block))
    pooled = self.k_layernorm(groups.float().mean(2).to(keys.dtype))[:, :, None]
    first = at[:, ::block, None].expand(-1, -1, cos.shape[-1])
    pooled = rotate(pooled, cos=cos.gather(1, first), sin=sin.gather(1, first), unsqueeze_dim=2)[:, :, 0]

    context = torch.full((batch,), total - queries, dtype=torch.int32, device=hidden.device)
    context = context if start is None else context - start
    seen = context[:, None] + torch.arange(1, queries + 1, dtype=torch.int32, device=hidden.device)
    if structure.stop is not None and start is not None:
        seen = seen.minimum((structure.stop - start)[:, None])
    seen = seen.clamp(min=0)
    complete = seen // block
    lists = complete.new_empty(batch, queries, count + 1)
    if not lists.is_meta:  # a model without data is asked for its calls alone
        weights = q.new_full((1,), 1 / math.sqrt(dim), dtype=torch.float32).expand(q.shape[:-1])
        scores = index_scores(
            _scored(q),
            _scored(pooled),
            weights,
            variant=catalogue.variant("complete_blocks"),
            ratio=block,
            context=context,
        )
        topk(scores, count, lengths=complete, out=lists[..., :count])
    lists[..., count] = complete.where(seen % block > 0, -1)
    return ChosenBlocks(lists, block, start)


# --- MSA ------------------------------------------------------------------------------------------------------


def _of_msa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Choose blocks of keys for each head by the largest q · k in each, and always those before a query."""

    @wraps(original)
    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor) -> Tensor:
        if self.config._attn_implementation not in IMPLEMENTATIONS or hidden_states.is_meta:
            return original(self, hidden_states, position_embeddings, cache, position_ids)
        with torch.no_grad():
            return _msa(self, hidden_states, position_embeddings, cache, position_ids)

    return forward


def _msa(self: Any, hidden: Tensor, embeddings: tuple[Tensor, Tensor], held: Any, positions: Tensor) -> Tensor:
    """Numbers of blocks (b, heads, sq, n) int64, -1 behind them."""
    cos, sin = (each[..., : self.head_dim] for each in embeddings)
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    q = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
    k = self.k_norm(self.k_proj(hidden)[:, :, None])
    q, k = rotate(q, k, cos, sin, unsqueeze_dim=2)
    k = k.transpose(1, 2)
    if held is not None:
        k = held.layers[self.layer_idx].update_index(k)
    # Positions of real tokens follow each other; padding has any, which none is larger than.
    last = positions.argmax(-1, keepdim=True)
    context = (positions.gather(-1, last) - last)[:, 0].to(torch.int32)
    scores = block_scores(
        _scored(q), _scored(k[:, 0]), self.block_size, variant=catalogue.variant("up_to_own"), context=context
    )
    if self.local_blocks > 0:
        before = torch.arange(self.local_blocks, device=hidden.device)
        local = (positions[..., None] // self.block_size - before).clamp(min=0)
        scores = scores.scatter(-1, local[:, :, None].expand(-1, -1, scores.shape[2], -1), torch.inf)
    chosen = topk(scores, min(self.topk_blocks, scores.shape[-1]))
    return chosen.transpose(1, 2).long()


def lists_of_heads(module: Any, block_indices: Tensor, kv_heads: int) -> ChosenBlocks:
    """The blocks that a module passes on for each head of its index, (b, heads, sq, n). Raises NoKernelError for heads
    that are not as many as KV heads, or a part of them."""
    heads, block = block_indices.shape[1], int(getattr(getattr(module, "indexer", None), "block_size", 0))
    if not block or kv_heads % heads:
        raise NoKernelError(
            f"{type(module).__name__} selects blocks of keys for {heads} heads, of a size that it does not say or for "
            f"another number of heads than {kv_heads}; attn_implementation='sdpa' serves it"
        )
    lists = block_indices.transpose(1, 2).to(torch.int32)
    return ChosenBlocks(lists.repeat_interleave(kv_heads // heads, dim=2).contiguous(), block)
