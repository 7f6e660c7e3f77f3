"""Whether a contestant computes what it is timed for: some heads of its output against float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.lang.eager import evaluate
from attngen.runtime.arguments import Call, bind
from attngen.runtime.dropout import kept, rate_of
from attngen.runtime.reference import names_of
from attngen.tools.bench_workloads import Workload

#: Largest ‖out − reference‖ / ‖reference‖ by dtype: several times what rounding the weights and the output explains.
TOLERANCE: Mapping[str, float] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5}

#: Elements of the score matrix that are held at a time, in float64.
_ELEMENTS = 2**25


class Oracle:
    """The first head of the first sequence and the last head of the last one, computed in float64."""

    def __init__(self, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q, k and v are (batch, seqlen, heads, head_dim). Raises IndexError for a load out of extent."""
        case = work.case
        call = bind(
            work.variant, q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
            arguments=work.arguments,
        )  # fmt: skip
        self._limit = TOLERANCE[case.dtype]
        self._picked = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        with torch.no_grad():
            self._wanted = torch.stack([_head(call, q, k, v, b, h) for b, h in self._picked])

    def error(self, out: Tensor) -> float:
        """Return ‖out − reference‖ / ‖reference‖ (Frobenius) over the heads; infinity for a NaN."""
        found = torch.stack([out[b, :, h] for b, h in self._picked]).double()
        error = float((found - self._wanted).norm() / self._wanted.norm())
        return math.inf if math.isnan(error) else error

    def problem(self, error: float) -> str | None:
        """Say what is wrong with an error, or return None if rounding explains it."""
        return None if error <= self._limit else f"wrong: relative error {error:.1e} exceeds {self._limit:.0e}"


def _head(call: Call, q: Tensor, k: Tensor, v: Tensor, b: int, h: int) -> Tensor:
    """Return the output of one head, (seqlen, head_dim), in float64."""
    hk = h // (call.heads // call.kv_heads)
    keys, values = k[b, :, hk].double(), v[b, :, hk].double()
    step = max(_ELEMENTS // call.seqlen_k, 1)
    parts = []
    for first in range(0, call.seqlen_q, step):
        shown = slice(first, min(first + step, call.seqlen_q))
        names: dict[str, Any] = names_of(
            call, b, shown, call.seqlen_q, call.seqlen_k, b * call.seqlen_q, b * call.seqlen_k
        )
        names |= {"h": torch.tensor(h, device=q.device), "hk": torch.tensor(hk, device=q.device)}
        logits = (q[b, shown, h].double() @ keys.T * call.scale)[None]
        visible = evaluate(call.variant.mask, names, call.tensors, torch.float64).broadcast_to(logits.shape)
        if call.variant.score is not None:
            logits = evaluate(call.variant.score, {**names, "s": logits}, call.tensors, torch.float64, guard=visible)
        logits = torch.where(visible, logits, -math.inf)
        if call.variant.sink is not None:
            sink = evaluate(call.variant.sink, names, call.tensors, torch.float64).broadcast_to(*logits.shape[:2], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(nan=0.0)[..., : len(keys)]  # dead rows
        if call.variant.dropout:
            weights = torch.where(kept(call, b, shown, len(keys))[h], weights * rate_of(call)[1], 0.0)
        parts.append(weights[0] @ values)
    return torch.cat(parts)
