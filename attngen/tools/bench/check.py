"""Whether a contestant computes what it is timed for: some heads of its results against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.lang.eager import evaluate
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.dropout import kept, rate_of
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import names_of
from attngen.tools.bench.workloads import Workload

#: Largest ‖out − reference‖ / ‖reference‖ by dtype: several times what rounding the weights and the output explains.
TOLERANCE: Mapping[str, float] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5, "fp8_e4m3": 5e-2}

#: Factor for gradients: their products take rounded weights, rounded gradients of these, and a rounded output.
_GRADIENTS = 2

#: Elements of the score matrix that are held at a time, in float64.
_ELEMENTS = 2**25


class Judge(Protocol):
    """Knows the right results of a case."""

    def error(self, found: Any) -> float:
        """Return the error of what a call returned; infinity for a NaN."""

    def problem(self, error: float) -> str | None:
        """Return what is wrong with an error, or None if rounding explains it."""


class Oracle:
    """The first head of the first sequence and the last head of the last one, computed in float64."""

    def __init__(self, work: Workload, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q, k and v are (batch, seqlen, heads, head_dim). Raises IndexError for a load out of extent."""
        case = work.case
        call = _bound(work, q, k, v)
        self._limit = TOLERANCE[case.dtype]
        self._picked = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        with torch.no_grad():
            self._wanted = torch.stack([_head(call, q, k, v, b, h) for b, h in self._picked])

    def error(self, out: Tensor) -> float:
        """Return ‖out − reference‖ / ‖reference‖ (Frobenius) over the heads; infinity for a NaN."""
        return _relative(torch.stack([out[b, :, h] for b, h in self._picked]), self._wanted)

    def problem(self, error: float) -> str | None:
        """See ``Judge``."""
        return _problem(error, self._limit)


class GradientOracle:
    """dQ, dK and dV of the first KV head of the first sequence and of the last one of the last, in float64."""

    def __init__(self, work: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        """All are (batch, seqlen, heads, head_dim). Raises IndexError for a load out of extent."""
        case = work.case
        call = _bound(work, q.detach(), k.detach(), v.detach())
        self._limit = _GRADIENTS * TOLERANCE[case.dtype]
        self._group = case.heads // case.kv_heads
        self._picked = sorted({(0, 0), (case.batch - 1, case.kv_heads - 1)})
        found = [_gradients(call, q.detach(), k.detach(), v.detach(), dout, b, hk) for b, hk in self._picked]
        self._wanted = [torch.stack(gradients) for gradients in zip(*found, strict=True)]

    def error(self, gradients: Sequence[Tensor]) -> float:
        """Return the largest ‖gradient − reference‖ / ‖reference‖ (Frobenius) of dQ, dK and dV; infinity for a NaN."""
        dq, dk, dv = gradients
        of_group = [dq[b, :, hk * self._group : (hk + 1) * self._group] for b, hk in self._picked]
        found = (of_group, *([gradient[b, :, hk] for b, hk in self._picked] for gradient in (dk, dv)))
        errors = (_relative(torch.stack(parts), wanted) for parts, wanted in zip(found, self._wanted, strict=True))
        return max(errors)

    def problem(self, error: float) -> str | None:
        """See ``Judge``."""
        return _problem(error, self._limit)


def _bound(work: Workload, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return bind(
        work.variant, q, k, v, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=work.arguments,
    )  # fmt: skip


def _relative(found: Tensor, wanted: Tensor) -> float:
    error = float((found.double() - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(error) else error


def _problem(error: float, limit: float) -> str | None:
    return None if error <= limit else f"wrong: relative error {error:.1e} exceeds {limit:.0e}"


def _head(call: Call, q: Tensor, k: Tensor, v: Tensor, b: int, h: int) -> Tensor:
    """Return the output of one head, (seqlen, head_dim), in float64."""
    hk = h // (call.heads // call.kv_heads)
    keys, values = k[b, :, hk].double(), v[b, :, hk].double()
    return torch.cat([_rows(call, q[b, shown, h].double(), keys, values, b, h, shown) for shown in _pieces(call)])


def _gradients(call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, b: int, hk: int) -> tuple[Tensor, ...]:
    """Return dQ of all heads of a group, (seqlen, group, head_dim), and dK and dV of their KV head, in float64."""
    group = call.heads // call.kv_heads
    keys, values = (t[b, :, hk].double().requires_grad_() for t in (k, v))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    heads = []
    for h in range(hk * group, (hk + 1) * group):
        rows = []
        for shown in _pieces(call):
            queries = q[b, shown, h].double().requires_grad_()
            with torch.enable_grad():
                out = _rows(call, queries, keys, values, b, h, shown)
            found = torch.autograd.grad(out, (queries, keys, values), dout[b, shown, h].double())
            rows.append(found[0])
            dk += found[1]
            dv += found[2]
        heads.append(torch.cat(rows))
    return torch.stack(heads, dim=1), dk, dv


def _pieces(call: Call) -> Iterator[slice]:
    """Yield query rows, as many at a time as their scores may take memory."""
    step = max(_ELEMENTS // call.seqlen_k, 1)
    for first in range(0, call.seqlen_q, step):
        yield slice(first, min(first + step, call.seqlen_q))


def _rows(call: Call, queries: Tensor, keys: Tensor, values: Tensor, b: int, h: int, shown: slice) -> Tensor:
    """Return the output of some query rows of a head, (rows, head_dim), in the dtype of the inputs."""
    names: dict[str, Any] = names_of(call, b, shown, call.seqlen_q, call.seqlen_k, b * call.seqlen_q, b * call.seqlen_k)
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
    weights = torch.softmax(logits, dim=-1).nan_to_num(nan=0.0)[..., : len(keys)]  # dead rows
    if call.variant.dropout:
        weights = torch.where(kept(call, b, shown, len(keys))[h], weights * rate_of(call)[1], 0.0)
    return weights[0] @ values
