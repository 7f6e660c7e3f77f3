"""The largest scores of each row, exactly, with ties to the lower index."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.operations.topk.kernel import SELECTION, Topk, check


def topk(
    scores: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Select the k largest scores of each row, exactly: indices that attention by key index takes.

    Of equal scores those with lower indices are selected, -0 equals 0, and NaN is larger than infinity. -inf is what
    hidden keys have, and is never selected. Values are ``scores.gather(-1, indices.long())``, where there is no -1.

    It does not wait for the GPU, allocates nothing but the result, and may be captured in a graph: one launch, which
    reads scores once, or a long row twice where a sample of it led to a threshold that is too high. Any spec with an
    entry ``passes: index_scores`` brings the kernel. It takes rows that are contiguous and evenly spaced, and k up to
    3,072, or up to 19,456 where a block may have 200 KB of shared memory; other calls sort in torch. There is no
    derivative.

    Args:
        scores: (..., columns) float32, with any strides.
        k: Number of indices of a row, at least 1.
        lengths: (...,) int32; scores of a row from there on are not read.
        page_table: (batch, max_pages) int32, the pages of each sequence. The result is slots of the cache then: index i
            becomes page_table[b, i // page_size] * page_size + i % page_size. The first axis of scores is the batch.
        page_size: Number of keys in a page.
        cu_seqlens_q: (batch + 1,) int32, with ``page_table``: scores are (total_q, columns), and those of sequence b
            begin at row cu_seqlens_q[b].
        out: (..., k) int32 for the result, whose rows may lie apart.

    Returns:
        (..., k) int32, in the order of indices. Rows with fewer than k scores above -inf end with -1.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    return SELECTION.serve(Topk(scores, k, lengths, page_table, cu_seqlens_q, page_size, out), _traced)


def _traced(call: Topk) -> Tensor:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.topk import operator as topk_operator

    check(call)
    if call.out is None:
        return topk_operator.call(call)
    return call.out.copy_(topk_operator.call(call._replace(out=None)))
