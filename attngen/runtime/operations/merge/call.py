"""Attention over parts of the keys, merged: results of one query over disjoint keys, weighted by their log-sum-exps.

With L = log(sum of exp(L_i)) the output over all keys is the sum of exp(L_i - L) * out_i: exact, in any order and any
grouping of the parts. A prefix that a batch shares is computed once and merged with what each sequence has of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.runtime.arguments import arrays
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, LAYOUTS


def merge(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, layout: Literal["bshd", "bhsd"] = "bshd"
) -> tuple[Tensor, Tensor]:
    """Merge results of one query over disjoint sets of keys into the result over all of them.

    Any number of parts, in any order. A log-sum-exp of -inf means that the row saw no key of the part: the part adds
    nothing, whatever its output holds. Both results are differentiable. A sink must be part of at most one of the
    parts.

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
    _check(parts, logs, layout)
    compute = torch.float64 if torch.float64 in (parts[0].dtype, *(log.dtype for log in logs)) else torch.float32
    by_part = torch.stack(torch.broadcast_tensors(*(log.to(compute) for log in logs)))
    # No gradient flows through the reference: the results do not depend on it.
    peak = by_part.detach().amax(dim=0)
    seen = peak != -math.inf
    peak = torch.where(seen, peak, 0.0)
    weights = torch.exp(by_part - peak)
    total = torch.where(seen, weights.sum(dim=0), 1.0)
    lse = torch.where(seen, peak + torch.log(total), -math.inf)
    shares = _beside_rows(weights / total, parts[0].dim(), layout)
    unseen = _beside_rows(by_part == -math.inf, parts[0].dim(), layout)
    # Shares have the dtype of the arithmetic, and their products with the parts, too.
    weighted = [
        share * torch.where(absent, 0.0, part) for part, share, absent in zip(parts, shares, unseen, strict=True)
    ]
    return functools.reduce(torch.add, weighted).to(parts[0].dtype), lse


def _beside_rows(rows: Tensor, rank: int, layout: str) -> tuple[Tensor, ...]:
    """Return numbers of each part and row, laid out as log-sum-exps are, so that they broadcast to the outputs."""
    return ((rows if rank == 4 and layout == "bhsd" else rows.transpose(-1, -2))[..., None]).unbind(0)


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


def _check(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...], layout: str) -> None:
    """Raise CallError unless outputs and log-sum-exps fit each other."""
    if layout not in LAYOUTS:
        raise CallError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}{suggest(str(layout), LAYOUTS)}")
    if not outs or len(outs) != len(lses):
        raise CallError(f"merge takes as many log-sum-exps as outputs, at least one, got {len(outs)} and {len(lses)}")
    first = outs[0]
    leader = next((out for out in outs if out.dim() == 4 and out.shape[0] != 1), first)
    if first.dtype not in ATTENTION_DTYPES:
        raise CallError(f"outs[0] has dtype {first.dtype}; allowed: {', '.join(map(str, ATTENTION_DTYPES))}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dim() not in (3, 4) or out.dim() != first.dim():
            raise CallError(
                f"outs[{i}] must have {'3 or 4' if i == 0 else first.dim()} dimensions, got shape {tuple(out.shape)}"
            )
        if out.dtype != first.dtype or out.device != first.device:
            raise CallError(
                f"outs[0] has {first.dtype} on {first.device}, but outs[{i}] has {out.dtype} on {out.device}"
            )
        if lse.dtype not in (torch.float32, torch.float64) or lse.device != first.device:
            raise CallError(f"lses[{i}] must be float32 on {first.device}, got {lse.dtype} on {lse.device}")
        rows = tuple(out.shape[:-1])
        wanted = rows if layout == "bhsd" and out.dim() == 4 else (*rows[:-2], rows[-1], rows[-2])
        if tuple(lse.shape) != wanted:
            raise CallError(f"lses[{i}] must have shape {wanted} beside outs[{i}], got {tuple(lse.shape)}")
        shared = out.dim() == 4 and out.shape[0] == 1
        if out.shape[1:] != leader.shape[1:] or not (shared or out.shape[0] == leader.shape[0]):
            raise CallError(f"one of outs has shape {tuple(leader.shape)}, but outs[{i}] has {tuple(out.shape)}")
