"""Block-Sparse-Attention's functions: heads that see all keys, the first and the last ones, or blocks, in one call.

The forms are those of block_sparse_attn 0.0.2 (https://github.com/mit-han-lab/Block-Sparse-Attention). Sequences are
packed: q is (total_q, heads, head_dim), k and v are (total_k, kv_heads, head_dim), and blocks of 128 queries and 128
keys are counted from the beginning of each sequence. Types of heads and their numbers are read on the device: on a GPU
nothing waits for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attngen.errors import CallError
from attngen.integrations.shared.arguments import contiguous_rows, tensor
from attngen.integrations.shared.blocks import SPEC, Pairs, candidate, of_bools
from attngen.integrations.shared.choice import VariantCandidate, attend, with_dropout
from attngen.lang.blocks import BLOCK_MASK
from attngen.runtime.arguments.torch_state import is_traced

__all__ = ["block_sparse_attn_func", "block_streaming_attn_func", "token_streaming_attn_func"]

BLOCK = 128

#: More keys than a sequence has.
_ALL = 2**30


def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor | None,
    base_blockmask: Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences, (total_q, heads, head_dim), in which each head has a type.

    ``head_mask_type`` (heads,) int32 is

    - 0 for a head that sees all keys;
    - −1 for one that streams. It sees the first and the last keys, as many of each as ``streaming_info`` (heads, 2)
      int32, or flat, says in blocks, or in single keys with ``exact_streaming``, which needs ``is_causal``. The last
      keys are those up to the query with ``is_causal``, else the last of the sequence;
    - 1 for one that sees blocks, the i-th of these heads those of ``base_blockmask[:, i]``, (batch, such heads, query
      blocks, key blocks) bool. A number n beyond 1 selects ``base_blockmask[:, n - 1]``.

    ``is_causal`` aligns the last query of a sequence with its last key, for all heads. ``p_dropout`` is the rate at
    which probabilities are dropped, from 0 to below 1.

    With ``return_attn_probs`` the result is (out, lse, empty): lse (batch, heads, max_seqlen_q_) is float32, natural,
    −inf for a query that sees no key, and after the end of a sequence. With ``deterministic`` gradients have the same
    bits on every run. Raises CallError, and NoKernelError.
    """
    heads = _Heads(head_mask_type, streaming_info, base_blockmask, exact_streaming)
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q_, max_seqlen_k_)
    return _attend(q, k, v, packing, heads, p_dropout, deterministic, softmax_scale, is_causal, return_attn_probs)


def token_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> Any:
    """As ``block_sparse_attn_func`` with ``is_causal`` and ``exact_streaming``, for heads of types 0 and −1."""
    heads = _Heads(head_mask_type, streaming_info, None, True)
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q_, max_seqlen_k_)
    return _attend(q, k, v, packing, heads, 0.0, deterministic, softmax_scale, True, return_attn_probs)


def block_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    head_mask_type: Tensor,
    streaming_info: Tensor,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    return_attn_probs: bool = False,
) -> Any:
    """As ``block_sparse_attn_func``, for heads of types 0 and −1, which stream by blocks."""
    heads = _Heads(head_mask_type, streaming_info, None, False)
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q_, max_seqlen_k_)
    return _attend(q, k, v, packing, heads, p_dropout, deterministic, softmax_scale, is_causal, return_attn_probs)


class _Heads(NamedTuple):
    """The heads of a call: their types, and what types mean."""

    types: Tensor
    streaming: Tensor | None
    blocks: Tensor | None
    exact: bool


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: tuple[Tensor, Tensor, Any, Any], heads: _Heads, rate: float,
    deterministic: bool, softmax_scale: float | None, causal: bool, return_attn_probs: bool,
) -> Any:  # fmt: skip
    q, k, v = contiguous_rows(q=q, k=k, v=v)
    if q.dim() != 3:
        raise CallError(f"q must be packed, (total_q, heads, head_dim), got shape {tuple(q.shape)}")
    starts_q, starts_k = (tensor(f"cu_seqlens_{name}", starts) for name, starts in zip("qk", packing[:2], strict=True))
    longest_q, longest_k = (int(longest) for longest in packing[2:])
    pairs = Pairs(starts_q.shape[0] - 1, q.shape[1], longest_q, longest_k, BLOCK, BLOCK)
    _check(heads, pairs, causal)
    chosen = _candidate(heads, pairs, starts_q.diff(), starts_k.diff(), causal)
    result = attend(
        with_dropout([chosen], rate), q, k, v, spec=SPEC, packing=(starts_q, starts_k, longest_q, longest_k),
        softmax_scale=softmax_scale, return_lse=return_attn_probs, deterministic=deterministic,
    )  # fmt: skip
    if not return_attn_probs:
        return result
    out, lse = result
    place = torch.arange(longest_q, device=q.device)
    rows = torch.where(place < starts_q.diff()[:, None], starts_q[:-1, None] + place, q.shape[0])
    lse = pad(lse, (0, 1), value=-torch.inf)[:, rows.long()].transpose(0, 1)
    return out, lse, q.new_empty(0)


def _candidate(heads: _Heads, pairs: Pairs, queries: Tensor, keys: Tensor, causal: bool) -> VariantCandidate:
    """The variant of a call, with a block mask of all of its heads; ``queries`` and ``keys`` (b,) are lengths."""
    types = heads.types[:, None, None]
    shown: Tensor = types == 0
    if heads.streaming is not None:
        first, last = heads.streaming.reshape(pairs.heads, 2).unbind(-1)
        streams = _streams(pairs, first[:, None, None], last[:, None, None], queries, keys, causal, heads.exact)
        shown = shown | ((types < 0) & streams)
    if heads.blocks is not None:
        ones = heads.types == 1
        places = torch.where(ones, ones.cumsum(0), heads.types) - 1
        given = heads.blocks.index_select(1, places.clamp(0, heads.blocks.shape[1] - 1))
        shown = shown | ((types > 0) & given.to(torch.bool))
    shown = shown.expand(pairs.blocks)
    if not heads.exact:
        return candidate(shown, pairs, causal=causal)
    stream = heads.types < 0
    limits = {
        name: torch.where(stream, given, _ALL).to(torch.int32)
        for name, given in (("sink_keys", first), ("local_keys", last))
    }
    return VariantCandidate("blocks_128_streaming", {BLOCK_MASK.name: shown, **limits})


def _streams(
    pairs: Pairs, first: Tensor, last: Tensor, queries: Tensor, keys: Tensor, causal: bool, exact: bool
) -> Tensor:
    """The blocks, (b, h, query blocks, key blocks), that streaming heads see; ``causal`` hides some keys of these."""
    row = torch.arange(pairs.blocks[2], device=first.device)[:, None]
    column = torch.arange(pairs.blocks[3], device=first.device)
    behind = (keys - queries)[:, None, None, None]  # the position of the first query
    if exact:  # blocks with a key that is seen
        earliest = row * BLOCK + behind - last + 1
        return (column * BLOCK < first) | ((column + 1) * BLOCK > earliest)
    end = row + 1 - (-behind // BLOCK) if causal else -(-keys // BLOCK)[:, None, None, None]
    return (column < first) | (column >= end - last)


def _check(heads: _Heads, pairs: Pairs, causal: bool) -> None:
    """Raise CallError for what disagrees. Numbers are read on the CPU alone, and not in a trace."""
    _check_integers("head_mask_type", heads.types, [(pairs.heads,)])
    if heads.streaming is not None:
        _check_integers("streaming_info", heads.streaming, [(2 * pairs.heads,), (pairs.heads, 2)])
    if heads.exact and not (causal and heads.streaming is not None):
        raise CallError("exact_streaming needs is_causal and streaming_info; without it, streaming_info counts blocks")
    blocks = heads.blocks
    if blocks is not None:
        if tensor("base_blockmask", blocks).dim() != 4 or not blocks.shape[1]:
            raise CallError(f"base_blockmask must have 4 dimensions and a head, got shape {tuple(blocks.shape)}")
        of_bools("base_blockmask", blocks, pairs._replace(heads=blocks.shape[1]))
    if heads.types.device.type != "cpu" or is_traced(heads.types):
        return
    types = heads.types.tolist()
    if heads.streaming is None and min(types, default=0) < 0:
        raise CallError("head_mask_type has −1, for which streaming_info says how many keys or blocks are seen")
    most = max([types.count(1), *types])
    known = 0 if blocks is None else blocks.shape[1]
    if most > known:
        got = "base_blockmask is None" if blocks is None else f"base_blockmask has {known}"
        raise CallError(f"head_mask_type selects {most} heads of base_blockmask, but {got}; 0 sees all keys")


def _check_integers(name: str, given: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if tuple(tensor(name, given).shape) not in shapes or given.dtype != torch.int32:
        allowed = " or ".join(str(shape) for shape in shapes)
        raise CallError(f"{name} must be int32 of shape {allowed}, got {given.dtype} of {tuple(given.shape)}")
