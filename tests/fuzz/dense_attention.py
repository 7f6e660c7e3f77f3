"""Attention of one sequence over all of its pairs in float64, with gradients, and how far kernels may be off, by row.

Rounding P and dS to 16 bits errs at random, so that errors of a row add up like the root of squares. A pair too many or
too few in a row of 700 keys exceeds the limit some five times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of the spacing of 16-bit floats at 1.
_EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

#: Of what rounding each term changes. D is made of the output, which is rounded, too.
_SHARE = {"out": 1.2, "dv": 1.2, "dq": 2.0, "dk": 2.0}

#: Below it, P and dS in fp16 have fewer bits.
_FLOOR = {torch.bfloat16: 1e-6, torch.float16: 4e-5}

#: Of a log-sum-exp: sums in float32, and exponentials with 22 bits.
_LSE = 2e-5


@dataclass(frozen=True)
class Exact:
    """Results of one sequence: (heads, rows, d) or (kv_heads, keys, d), and the size of errors of each row."""

    results: dict[str, Tensor]
    sizes: dict[str, Tensor]  # (heads, rows): the root of the sum of squares of the terms that are rounded
    lse: Tensor
    shown: Tensor  # share of visible pairs

    def ratios(self, results: dict[str, Tensor], lse: Tensor) -> dict[str, Tensor]:
        """Error of each row of each result, (heads, rows), in units of what is allowed; infinite for NaN."""
        off = torch.where(self.lse == lse, 0.0, (self.lse - lse).abs())
        ratios = {"lse": off / (_LSE + 2e-6 * self.lse.abs().nan_to_num(posinf=0.0))}
        for name, given in results.items():
            exact, dtype = self.results[name], given.dtype
            off = (given.double() - exact).norm(dim=-1)
            limit = _EPS[dtype] * (_SHARE[name] * self.sizes[name] + exact.norm(dim=-1)) + _FLOOR[dtype]
            limit = torch.where(self.sizes[name] == 0, 0.0, limit)  # no visible pair
            ratios[name] = torch.where(off == 0, 0.0, off / limit)
        return {name: torch.where(ratio.isnan(), torch.inf, ratio) for name, ratio in ratios.items()}

    def describe(self, name: str, ratio: Tensor, given: Tensor) -> str:
        """Places where a result is off, by its ratios."""
        head, row = divmod(int(ratio.argmax()), ratio.shape[1])
        exact = self.lse if name == "lse" else self.results[name].norm(dim=-1)
        given = given if name == "lse" else given.double().norm(dim=-1)
        values = f"{float(given[head, row]):.6g} instead of {float(exact[head, row]):.6g}"
        worst = f"{float(ratio[head, row]):.3g} times the limit"
        return f"{name}[head {head}, row {row}]: {values}, {worst}; {int((ratio > 1).sum())} rows are beyond it"


def attend(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor, score: Callable[[Tensor], Tensor] | None
) -> Exact:
    """Attention of one sequence: q and dout (rows, heads, d), k and v (keys, kv_heads, d); ``visible`` is the mask."""
    rows, heads, width = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    q, dout = (one.double().transpose(0, 1) for one in (q, dout))
    k, v = (one.double().transpose(0, 1).repeat_interleave(group, 0) for one in (k, v))
    scale = width**-0.5
    logits = q @ k.transpose(1, 2) * scale
    visible = visible.broadcast_to(heads, rows, keys)
    slope = torch.ones_like(logits)
    if score is not None:
        logits = logits.detach().requires_grad_()
        scores = score(logits).broadcast_to(logits.shape)
        visible = visible & (scores > -torch.inf)
        if scores.requires_grad:
            slope = torch.autograd.grad(torch.where(visible, scores, 0.0).sum(), logits)[0]
        logits = scores.detach()
    logits = torch.where(visible, logits, -torch.inf)
    lse = logits.logsumexp(-1) if keys else logits.new_full((heads, rows), -torch.inf)
    p = torch.where(visible, torch.exp(logits - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0)
    out = p @ v
    chain = p * slope * scale
    ds = chain * (dout @ v.transpose(1, 2) - (dout * out).sum(-1, keepdim=True))
    squares = ds**2 + (chain * (dout * out).norm(dim=-1, keepdim=True)) ** 2

    def of_kv_heads(one: Tensor) -> Tensor:
        return one.unflatten(0, (kv_heads, group)).sum(1)

    def square(one: Tensor) -> Tensor:
        return (one**2).sum(-1, keepdim=True)

    results = {
        "out": out, "dq": ds @ k, "dk": of_kv_heads(ds.transpose(1, 2) @ q), "dv": of_kv_heads(p.transpose(1, 2) @ dout)
    }  # fmt: skip
    sizes = {
        "out": p**2 @ square(v),
        "dq": squares @ square(k),
        "dk": of_kv_heads(squares.transpose(1, 2) @ square(q)),
        "dv": of_kv_heads((p**2).transpose(1, 2) @ square(dout)),
    }
    shown = visible.double().mean().nan_to_num()
    return Exact(results, {name: one.squeeze(-1).sqrt() for name, one in sizes.items()}, lse, shown)
