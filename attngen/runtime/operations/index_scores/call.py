"""Scores of keys, or of blocks of keys, for an index: what attention by key index chooses its keys by."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.operations.index_scores.arguments import IndexScores
from attngen.runtime.operations.index_scores.kernel import SCORES


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    variant: str | Variant = "causal",
    k_scale: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    package: str | None = None,
    **arguments: object,
) -> Tensor:
    """Score all keys for each query, to select few of them: the sum over heads of weights * relu(q · k), under a mask.

    It does not wait for the GPU, and may be captured in a graph. An entry ``passes: index_scores`` of a spec brings
    kernels for Hopper, with head_dim 64 or 128 and up to 128 heads; other calls are some operations of torch. There is
    no derivative.

    Source: DeepSeek-V3.2, "lightning indexer".

    Args:
        q: (batch, seqlen_q, heads, head_dim), float8_e4m3fn, bfloat16 or float16. With ``cu_seqlens_q`` packed,
            (total_q, heads, head_dim), and so are ``weights`` and the scores.
        k: (batch, seqlen_k, head_dim) in the dtype of q: all heads share the keys. With ``page_table`` a cache, (pages,
            page_size, head_dim). Strides of the last axis of q and k are 1; others are multiples of 16 bytes, so that a
            cache may have scales behind the keys of each page.
        weights: (batch, seqlen_q, heads) float32, of any sign. A scale of a query and a head belongs here, as relu(s x)
            = s relu(x).
        variant: Name of a variant, or a result of ``attngen.variant``, of which only the mask counts. One with a score,
            a sink or dropout is refused, and so is a mask that differs from head to head.
        k_scale: (batch, seqlen_k), or (pages, page_size), float32 and positive: multiplies the scores of a key.
        seqused_k: (batch,) int32, the number of keys of each sequence that count; pages need it.
        page_table: (batch, max_pages) int32, the pages of each sequence in the order of its keys. Entries beyond a
            sequence's length are not read.
        cu_seqlens_q: (batch + 1,) int32, where packed queries of each sequence begin; with ``page_table``.
        max_seqlen_q: At least the largest number of packed queries of a sequence.
        out: Tensor for the scores, whose rows may have any stride. Of pages, columns from ``seqused_k`` of a sequence
            on get -inf or stay as they are, so that a call takes no longer for what a table has room for; ``topk`` with
            ``lengths`` does not read them. Rows that belong to no sequence stay as they are.
        package: Look for kernels in this package only.
        **arguments: Scalars and tensors of the variant.

    Returns:
        (batch, seqlen_q, seqlen_k) float32, with pages (batch, seqlen_q, max_pages * page_size), of packed queries
        (total_q, max_pages * page_size); -inf where the mask hides a key, so that ``topk`` never selects it.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
        NoKernelError: The variant is not known.
    """
    tensors = (q, k, weights, k_scale)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise CallError("index_scores is not differentiable; call it under torch.no_grad()")
    call = IndexScores(
        q, k, weights, k_scale, seqused_k, cu_seqlens_q, page_table, out, max_seqlen_q, variant, package,
        tuple(arguments.items()),
    )  # fmt: skip
    return SCORES.serve(call, _traced)


def block_scores(
    q: Tensor,
    k: Tensor,
    block: int,
    *,
    variant: str | Variant = "causal",
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    package: str | None = None,
    **arguments: object,
) -> Tensor:
    """Score all blocks of keys for each query and head, to select few of them: the largest q · k in a block, under a
    mask.

    Block i is the keys from ``i * block`` on. It does not wait for the GPU, and may be captured in a graph. An entry
    ``passes: block_scores`` of a spec brings kernels for Hopper, with head_dim 64 or 128, up to 8 heads and blocks of a
    multiple of 64 keys; other calls are some operations of torch. There is no derivative.

    Source: MiniMax-M3, whose index chooses blocks of 128 keys for each KV head.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float8_e4m3fn, bfloat16 or float16. With ``cu_seqlens_q`` packed,
            (total_q, heads, head_dim), and so are the scores.
        k: As in ``index_scores``: (batch, seqlen_k, head_dim), or with ``page_table`` (pages, page_size, head_dim).
        block: Keys of a block.
        variant: As in ``index_scores``: only its mask counts.
        seqused_k: As in ``index_scores``, as are the next three.
        page_table: (batch, max_pages) int32.
        cu_seqlens_q: (batch + 1,) int32, with ``page_table``.
        max_seqlen_q: At least the largest number of packed queries of a sequence.
        out: Tensor for the scores, whose rows may have any stride. Of pages, blocks after the last key of a sequence
            get -inf or stay as they are; ``topk`` with ``lengths`` does not read them. Rows that belong to no sequence
            stay as they are.
        package: Look for kernels in this package only.
        **arguments: Scalars and tensors of the variant.

    Returns:
        (batch, seqlen_q, heads, blocks) float32, or (total_q, heads, blocks), with a block for each ``block`` of
        seqlen_k, or max_pages * page_size, keys, the last of which may be incomplete; -inf where the mask hides all
        keys of a block, so that ``topk`` never selects it.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
        NoKernelError: The variant is not known.
    """
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, k)):
        raise CallError("block_scores is not differentiable; call it under torch.no_grad()")
    call = IndexScores(
        q, k, None, None, seqused_k, cu_seqlens_q, page_table, out, max_seqlen_q, variant, package,
        tuple(arguments.items()), block,
    )  # fmt: skip
    if block is None:
        raise CallError("block must be a positive integer, got None")
    return SCORES.serve(call, _traced)


def _traced(call: IndexScores) -> Tensor:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.index_scores import operator as index_scores_operator

    if call.out is None:
        return index_scores_operator.call(call)
    return call.out.copy_(index_scores_operator.call(call._replace(out=None)))
