"""The largest scores of each row, exactly, with ties to the lower index."""

from __future__ import annotations

from torch import Tensor

from attngen.runtime.operations.topk.kernel import SELECTION, Topk, check


def topk(scores: Tensor, k: int, *, lengths: Tensor | None = None) -> Tensor:
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

    Returns:
        (..., k) int32, ascending. Rows with fewer than k scores above -inf end with -1.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    return SELECTION.serve(Topk(scores, k, lengths), _traced)


def _traced(call: Topk) -> Tensor:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.topk import operator as topk_operator

    check(call)
    return topk_operator.call(call)
