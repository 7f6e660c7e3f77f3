"""Dense attention with the largest logit of each row, for libraries that return it."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.runtime.operations.attention import entry, largest


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, variant: str | Variant = "full", softmax_scale: float | None = None,
    seqused_k: Tensor | None = None, layout: str = "bshd", backend: str | None = None, package: str | None = None,
    deterministic: bool = False, **arguments: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``attngen.attention`` that returns output, log-sum-exp, and the largest logit of each row (batch, heads,
    seqlen_q). Raises what that does."""
    if torch._C._is_any_autocast_enabled():
        q, k, v = entry.as_autocast(q, k, v)
    given = entry.dense(
        q, k, v, None, None, None, seqused_k, arguments, None, variant, softmax_scale, True, deterministic, layout,
        backend, package, None,
    )  # fmt: skip
    return largest.attend_rows(entry.run_or_trace, given)
