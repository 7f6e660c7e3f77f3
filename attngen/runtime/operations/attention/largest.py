"""Calls with ``return_max_logits``: their variant is one whose kernels give the largest logit of each row as well."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.runtime.arguments import arrays
from attngen.runtime.arguments.checked import Results
from attngen.runtime.arguments.given import MAX_LOGITS, Given
from attngen.runtime.registry.max_logits import with_max_logits


def attend(run: Callable[[Given], Results], given: Given) -> tuple[Tensor, ...]:
    """Output of a call, its log-sum-exp if it asks for that, and the largest logit of each head (heads,)."""
    out, lse, rows = attend_rows(run, given)
    largest = of_heads(rows, given.cu_seqlens_q)
    return (out, lse, largest) if given.return_lse else (out, largest)


def attend_rows(run: Callable[[Given], Results], given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Output of a call, its log-sum-exp, and the largest logit of each row, of the log-sum-exp's shape. Raises
    CallError."""
    if not isinstance(given.return_lse, bool):
        raise CallError(f"return_lse must be True or False, got {given.return_lse!r}")
    if arrays.is_array(given.q):
        raise CallError("return_max_logits takes torch tensors; allowed: torch.from_dlpack(q), and so on")
    variant = getattr(given.variant, "handle", given.variant)  # a trace takes plain text
    if torch.compiler.is_compiling():
        from attngen.runtime.operations.attention import largest_at_trace  # what it imports of torch brings a compiler

        name = largest_at_trace.with_max_logits(variant, given.package)
    else:
        name = with_max_logits(variant, given.package)
    out, both = run(given._replace(variant=name, return_lse=MAX_LOGITS))
    lse, rows = both.unbind(-1)
    return out, lse, rows.detach()


def of_heads(rows: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """The largest of each head (heads,), from those of rows: (batch, heads, seqlen_q), or (heads, total_q), of which
    rows after the last sequence are left out."""
    axis = rows.dim() - 2
    if not rows.numel():
        return rows.new_full((rows.shape[axis],), -math.inf)
    if cu_seqlens_q is not None:
        row = torch.arange(rows.shape[-1], device=rows.device)
        rows = torch.where(row < cu_seqlens_q[-1], rows, -math.inf)
    return rows.amax(-1) if axis == 0 else rows.amax((0, 2))
