"""The check of a contender: some heads of its results against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.lab.bench.workloads import Workload
from attngen.lang.eager import evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.dropout import kept, rate_of
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import names_of, weights_of

#: Largest ‖out − reference‖ / ‖reference‖ by dtype: several times what rounding the weights and the output explains.
TOLERANCE: Mapping[str, float] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5, "fp8_e4m3": 5e-2}

#: Factor for gradients: their products take rounded weights, rounded gradients of these, and a rounded output.
_GRADIENTS = 2

#: Elements of the score matrix that are held at a time, in float64.
_ELEMENTS = 2**25


#: Features of variants that oracles compute.
SERVES = ("mask", "score", "sink", "dropout", "weights", "max_logits")


class Oracle:
    """The first head of the first sequence and the last head of the last one, computed in float64."""

    def __init__(self, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q, k and v are (batch, seqlen, heads, head_dim). Raises IndexError for a load out of extent."""
        case = work.case
        call = _bound(work, q, k, v)
        self.limit = TOLERANCE[case.dtype]
        self._picked = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        with torch.no_grad():
            self._expected = torch.stack([_head(call, q, k, v, b, h) for b, h in self._picked])

    def error(self, out: Tensor) -> float:
        """Relative error over the heads."""
        return relative_error(torch.stack([out[b, :, h] for b, h in self._picked]), self._expected)


class GradientOracle:
    """dQ, dK and dV of the first KV head of the first sequence and of the last one of the last, in float64."""

    def __init__(self, work: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        """All are (batch, seqlen, heads, head_dim). Raises IndexError for a load out of extent."""
        case = work.case
        call = _bound(work, q.detach(), k.detach(), v.detach())
        self.limit = _GRADIENTS * TOLERANCE[case.dtype]
        self._group = case.heads // case.kv_heads
        self._picked = sorted({(0, 0), (case.batch - 1, case.kv_heads - 1)})
        of_heads = [_gradients(call, q.detach(), k.detach(), v.detach(), dout, b, hk) for b, hk in self._picked]
        self._expected = [torch.stack(gradients) for gradients in zip(*of_heads, strict=True)]

    def error(self, gradients: Sequence[Tensor]) -> float:
        """The largest relative error of dQ, dK and dV."""
        dq, dk, dv = gradients
        of_group = [dq[b, :, hk * self._group : (hk + 1) * self._group] for b, hk in self._picked]
        picked = (of_group, *([gradient[b, :, hk] for b, hk in self._picked] for gradient in (dk, dv)))
        return max(
            relative_error(torch.stack(heads), expected) for heads, expected in zip(picked, self._expected, strict=True)
        )


def _bound(work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return bind(
        work.variant, q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=work.arguments,
    )  # fmt: skip


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ (Frobenius), ``expected`` in float64; infinity for a NaN."""
    error = float((actual.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def _head(call: Call, q: Tensor, k: Tensor, v: Tensor, b: int, h: int) -> Tensor:
    """The output of one head, (seqlen, head_dim), in float64."""
    hk = h // (call.heads // call.kv_heads)
    keys, values = k[b, :, hk].double(), v[b, :, hk].double()
    return torch.cat([_out(call, q[b, rows, h].double(), keys, values, b, h, rows) for rows in _query_rows(call)])


def _gradients(call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, b: int, hk: int) -> tuple[Tensor, ...]:
    """dQ of all heads of a group, (seqlen, group, head_dim), and dK and dV of their KV head, in float64."""
    group = call.heads // call.kv_heads
    keys, values = (t[b, :, hk].double().requires_grad_() for t in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    heads = []
    for h in range(hk * group, (hk + 1) * group):
        dq = []
        for rows in _query_rows(call):
            queries = q[b, rows, h].double().requires_grad_()
            with torch.enable_grad():
                out = _out(call, queries, keys, values, b, h, rows)
            gradients = torch.autograd.grad(out, (queries, keys, values), dout[b, rows, h].double())
            dq.append(gradients[0])
            dk += gradients[1]
            dv += gradients[2]
        heads.append(torch.cat(dq))
    return torch.stack(heads, dim=1), dk, dv


def _query_rows(call: Call) -> Iterator[slice]:
    """Yield query rows, as many at a time as their scores may take memory."""
    step = max(_ELEMENTS // call.seqlen_k, 1)
    for first in range(0, call.seqlen_q, step):
        yield slice(first, min(first + step, call.seqlen_q))


def _out(call: Call, queries: Tensor, keys: Tensor, values: Tensor, b: int, h: int, rows: slice) -> Tensor:
    """The output of some query rows of a head, (rows, head_dim), in the dtype of the inputs."""
    call.variant.require(SERVES, "the oracle of benchmarks")
    names: dict[str, Any] = names_of(call, b, rows, call.seqlen_q, call.seqlen_k, b * call.seqlen_q, b * call.seqlen_k)
    hk = h // (call.heads // call.kv_heads)
    names |= {"h": torch.tensor(h, device=keys.device), "hk": torch.tensor(hk, device=keys.device)}
    logits = (queries @ keys.T * call.scale)[None]
    visible = evaluate(call.variant.mask, names, call.tensors, torch.float64).broadcast_to(logits.shape)
    if call.variant.score is not None:
        logits = evaluate(call.variant.score, {**names, "s": logits}, call.tensors, torch.float64, guard=visible)
    logits = torch.where(visible, logits, -math.inf)
    if call.variant.sink is not None:
        sink = evaluate(call.variant.sink, names, call.tensors, torch.float64).broadcast_to(*logits.shape[:2], 1)
        logits = torch.cat([logits, sink], dim=-1)
    if call.variant.has_lse:
        weights = torch.softmax(logits, dim=-1).nan_to_num(nan=0.0)[..., : len(keys)]  # dead rows
    else:
        weights = weights_of(call.variant, logits)
    if call.variant.dropout:
        weights = torch.where(kept(call, b, rows, len(keys))[h], weights * rate_of(call)[1], 0.0)
    return weights[0] @ values
