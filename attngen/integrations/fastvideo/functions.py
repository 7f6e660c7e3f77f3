"""Video sparse attention (VSA) of ``fastvideo_kernel``: ``video_sparse_attn`` and the block-sparse attention in it.

The forms are those of fastvideo-kernel 0.3. Tokens lie in tiles of the video, such as 4 × 4 × 4 = 64, each a block that
padding may fill up: its first tokens are the valid ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.integrations.shared.arguments import contiguous_rows, tensor
from attngen.integrations.shared.blocks import SPEC, Pairs, candidate, of_bools, of_lists, sizes_of
from attngen.integrations.shared.choice import attend
from attngen.runtime.operations.topk.call import topk as largest

__all__ = ["block_sparse_attn", "block_sparse_attn_from_indices", "video_sparse_attn", "video_sparse_attn_bshd"]

#: Tokens of the blocks of ``block_sparse_attn``. A ``block_size`` below it is the side of a cube, as in VSA. From there
#: on it counts tokens: the default, 64, would be a cube of 262,144.
TOKENS = 64


def video_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variable_block_sizes: Tensor,
    q_variable_block_sizes: Tensor,
    topk: int,
    block_size: int | tuple[int, int, int] = 64,
    compress_attn_weight: Tensor | None = None,
) -> Tensor:
    """The sum of attention to means of blocks, and of attention to the ``topk`` blocks of keys with the highest scores
    there: q, k, v and the result are (b, h, s, d), with as many heads in k and v as in q.

    ``variable_block_sizes`` (key blocks,) and ``q_variable_block_sizes`` (query blocks,) are the valid tokens of each
    block; a mean is the sum over all tokens of a block, so that padding must be 0, divided by them. ``block_size`` is
    (frames, height, width) of a block, the side of a cube, or 64 tokens or more: a multiple of 64 in all, which divides
    both lengths. ``compress_attn_weight``, of the shape of q, multiplies the first part. Of equal scores those of the
    first blocks count as higher. All but the choice of blocks is differentiable. Raises CallError, and NoKernelError.
    """
    given = (variable_block_sizes, q_variable_block_sizes, topk, block_size, compress_attn_weight)
    return _video(q, k, v, *given, axis=2)


def video_sparse_attn_bshd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variable_block_sizes: Tensor,
    q_variable_block_sizes: Tensor,
    topk: int,
    block_size: int | tuple[int, int, int] = 64,
    compress_attn_weight: Tensor | None = None,
) -> Tensor:
    """As ``video_sparse_attn``, with (b, s, h, d) in place of (b, h, s, d)."""
    given = (variable_block_sizes, q_variable_block_sizes, topk, block_size, compress_attn_weight)
    return _video(q, k, v, *given, axis=1)


def block_sparse_attn_from_indices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_idx: Tensor,
    q2k_num: Tensor,
    variable_block_sizes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention of each 64 queries of q (b, h, sq, d) to the blocks of 64 keys that they list.

    Of the list ``q2k_idx`` (b, h, query blocks, capacity) the first ``q2k_num`` (b, h, query blocks) entries count, and
    of key block i the first ``variable_block_sizes[i]`` keys. Returns the output, and the log-sum-exp of base 2, (b, h,
    sq) in float32, which has no gradient. A query that sees no key has 0 and −inf. Raises CallError, and NoKernelError.
    """
    q, k, v = _rows(2, q=q, k=k, v=v)
    pairs = _pairs(q, k, TOKENS)
    indices, counts = (_integers(name, given) for name, given in (("q2k_idx", q2k_idx), ("q2k_num", q2k_num)))
    shown = of_lists(("q2k_idx", "q2k_num"), indices, counts, pairs)
    return _attend(q, k, v, shown, pairs, variable_block_sizes)


def block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_map: Tensor,
    variable_block_sizes: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``block_sparse_attn_from_indices``, with bools in place of lists: ``block_map`` (b, h, query blocks, key
    blocks), or without b."""
    q, k, v = _rows(2, q=q, k=k, v=v)
    pairs = _pairs(q, k, TOKENS)
    block_map = block_map[None] if tensor("block_map", block_map).dim() == 3 else block_map
    return _attend(q, k, v, of_bools("block_map", block_map, pairs), pairs, variable_block_sizes)


def _video(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, q_sizes: Tensor, topk: int,
    block_size: int | tuple[int, int, int], weight: Tensor | None, *, axis: int,
) -> Tensor:  # fmt: skip
    """Both parts, for tensors whose tokens are an axis."""
    tokens = _tokens(block_size)
    if isinstance(q_sizes, int):
        raise CallError(
            "q_variable_block_sizes must be a torch.Tensor, got int; where early releases have topk, pass the valid "
            "tokens of query blocks first"
        )
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise CallError(f"topk must be an integer of at least 1, got {topk!r}")
    q, k, v = _rows(axis, q=q, k=k, v=v)
    pairs = _pairs(q, k, tokens)
    for name, length in (("q", pairs.queries), ("k", pairs.keys)):
        if length % tokens:
            raise CallError(
                f"{name} has {length} tokens, which blocks of {tokens} do not divide; fill it up with zeros to "
                f"{-(-length // tokens) * tokens}"
            )
    counts = [_valid(name, given, blocks) for name, given, blocks in (
        ("q_variable_block_sizes", q_sizes, pairs.blocks[2]), ("variable_block_sizes", sizes, pairs.blocks[3]),
    )]  # fmt: skip
    means = [_means(each, tokens, valid) for each, valid in ((q, counts[0]), (k, counts[1]), (v, counts[1]))]
    scores = means[0] @ means[1].mT / math.sqrt(q.shape[-1])
    coarse = torch.softmax(scores, dim=-1) @ means[2]
    chosen = largest(scores.detach().float(), min(topk, pairs.blocks[3]))
    fine, _ = _attend(q, k, v, of_lists(("topk", ""), chosen, None, pairs), pairs, counts[1])
    whole = fine.transpose(1, 2).unflatten(1, (-1, tokens))
    part = coarse.transpose(1, 2)[:, :, None]
    if weight is not None:
        if tensor("compress_attn_weight", weight).shape != q.transpose(1, axis).shape:
            wanted = tuple(q.transpose(1, axis).shape)
            raise CallError(f"compress_attn_weight must have shape {wanted}, as q, got {tuple(weight.shape)}")
        part = part * weight.transpose(1, axis).unflatten(1, (-1, tokens))
    return (whole + part).flatten(1, 2).transpose(1, axis)


def _attend(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, pairs: Pairs, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Output (b, h, s, d) and log-sum-exp of base 2 of the pairs of a block mask, for q, k and v of (b, s, h, d)."""
    valid = sizes_of("variable_block_sizes", _valid("variable_block_sizes", sizes, pairs.blocks[3]), pairs)
    out, lse = attend([candidate(shown, pairs, sizes=valid)], q, k, v, spec=SPEC, return_lse=True)
    return out.transpose(1, 2), lse.detach() / math.log(2)


def _means(rows: Tensor, tokens: int, valid: Tensor) -> Tensor:
    """Sums of blocks of tokens over their valid ones, (b, h, blocks, d) in the dtype of ``rows`` (b, s, h, d)."""
    sums = rows.unflatten(1, (-1, tokens)).sum(2, dtype=torch.promote_types(rows.dtype, torch.float32))
    return (sums / valid[:, None, None]).to(rows.dtype).transpose(1, 2)


def _tokens(block_size: int | tuple[int, int, int]) -> int:
    if isinstance(block_size, int) and not isinstance(block_size, bool):
        return block_size if block_size >= TOKENS else block_size**3
    if isinstance(block_size, (tuple, list)) and len(block_size) == 3 and all(isinstance(n, int) for n in block_size):
        return math.prod(block_size)
    raise CallError(f"block_size must be an integer or three of them, such as (4, 4, 4), got {block_size!r}")


def _rows(axis: int, **tensors: Tensor) -> list[Tensor]:
    """q, k and v as (b, s, h, d), with contiguous rows and as many heads each."""
    for name, given in tensors.items():
        if tensor(name, given).dim() != 4:
            raise CallError(f"{name} must have 4 dimensions, got shape {tuple(given.shape)}")
    q, k, v = (each.transpose(1, axis) for each in contiguous_rows(**tensors))
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        heads = ", ".join(str(each.shape[2]) for each in (q, k, v))
        raise CallError(f"q, k and v must have the same number of heads, got {heads}; repeat those of k and v")
    return [q, k, v]


def _pairs(q: Tensor, k: Tensor, tokens: int) -> Pairs:
    pairs = Pairs(q.shape[0], q.shape[2], q.shape[1], k.shape[1], tokens, tokens)
    pairs.check("block_size")
    return pairs


def _valid(name: str, sizes: Tensor, blocks: int) -> Tensor:
    """Valid tokens of blocks, (blocks,) int32."""
    if tensor(name, sizes).shape != (blocks,):
        raise CallError(f"{name} must have shape ({blocks},), one number for each block, got {tuple(sizes.shape)}")
    return _integers(name, sizes)


def _integers(name: str, given: Tensor) -> Tensor:
    if tensor(name, given).is_floating_point():
        raise CallError(f"{name} must hold integers, got {given.dtype}")
    return given.to(torch.int32)
