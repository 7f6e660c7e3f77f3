"""Attention over parts of the keys, merged: results of one query over disjoint keys, weighted by their log-sum-exps.

With L = log(sum of exp(L_i)) the output over all keys is the sum of exp(L_i - L) * out_i: exact, in any order and any
grouping of the parts. A prefix that a batch shares is computed once and merged with what each sequence has of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments import arrays
from attngen.runtime.operations.merge import in_torch
from attngen.runtime.operations.merge.arguments import Merge, check, check_parts
from attngen.runtime.operations.merge.kernel import MERGES, is_for_kernel


def merge(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, layout: Literal["bshd", "bhsd"] = "bshd"
) -> tuple[Tensor, Tensor]:
    """Merge results of one query over disjoint sets of keys into the result over all of them.

    Any number of parts, in any order. A log-sum-exp of -inf means that the row saw no key of the part: the part adds
    nothing, whatever its output holds. Both results are differentiable. A sink must be part of at most one of the
    parts.

    On a GPU two parts in 16 bits without gradients are one launch, which allocates the results alone and may be
    captured in a graph: any spec with ``layout: paged`` builds the kernel of its dtype. It moves rows 16 bytes at a
    time, which must be aligned to as many. All other calls run a few operations of torch.

    Args:
        outs: Outputs of one shape, dtype and device: (batch, seqlen, heads, head_dim), or packed (total, heads,
            head_dim). A sequence of tensors, or one tensor with one more axis in front. Shapes may broadcast along the
            batch, as for a prefix that all sequences share.
        lses: Their natural log-sum-exps, as many: (batch, heads, seqlen), or (heads, total); float32 or float64.
        layout: ``'bshd'`` as above, or ``'bhsd'`` for outputs (batch, heads, seqlen, head_dim).

    Returns:
        The output, in the dtype of ``outs``, and its log-sum-exp, float32, or float64 if an input is. All
        arithmetic has that dtype. A row without any key gives 0 and -inf.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    (parts, of_arrays), (logs, beside_arrays) = _listed("outs", outs), _listed("lses", lses)
    if of_arrays or beside_arrays:
        served: tuple[Tensor, Tensor] = arrays.serve(
            functools.partial(merge, layout=layout), {"outs": parts, "lses": logs}
        )
        return served
    if is_for_kernel(parts, logs):
        return MERGES.serve(Merge(parts[0], parts[1], logs[0], logs[1], layout), _traced)
    check_parts(parts, logs, layout)
    return in_torch.merge(parts, logs, layout)


def _traced(call: Merge) -> tuple[Tensor, Tensor]:
    """Call the operator; what is traced is this function and nothing below it."""
    from attngen.runtime.operations.merge import operator as merge_operator

    check(call)
    return merge_operator.call(call)


def _listed(name: str, tensors: Any) -> tuple[Any, bool]:
    """The parts, and whether one of them is an array, or all of them together are."""
    if isinstance(tensors, Tensor):
        if tensors.dim() == 0:
            raise CallError(f"{name} must be a sequence of tensors, or a tensor with one more axis, got a number")
        return tensors.unbind(0), False
    if arrays.is_array(tensors):
        return tensors, True
    if not isinstance(tensors, Iterable):
        raise CallError(f"{name} must be a sequence of tensors, or a tensor, got {type(tensors).__name__}")
    listed, of_arrays = tuple(tensors), False
    for i, tensor in enumerate(listed):
        if not isinstance(tensor, Tensor):
            if not arrays.is_array(tensor):
                raise CallError(f"{name}[{i}] must be a torch.Tensor, got {type(tensor).__name__}")
            of_arrays = True
    return listed, of_arrays
