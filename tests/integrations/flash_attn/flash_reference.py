"""Random tensors of the cases of flash-attention's grids, and what plain torch computes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tests.integrations.flash_attn.flash_grids import FP8


class Tensors:
    """Random tensors and numbers of one case."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._chance = Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers that ``dtype`` has, in bfloat16 for one of 8 bits."""
        numbers = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return numbers.to(torch.bfloat16).to(dtype).to(torch.bfloat16) if dtype == FP8 else numbers.to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def number(self, low: int, beyond: int) -> int:
        """An integer from ``low`` to below ``beyond``."""
        return self._chance.randrange(low, beyond)

    def lengths(self, longest: int, batch: int, *, zeros: bool = False) -> list[int]:
        """Lengths at most 20 below the longest; with ``zeros``, every fifth and the last are 0."""
        actual = [self.number(max(0 if zeros else 1, longest - 20), longest + 1) for _ in range(batch)]
        return [0 if zeros and (i % 5 == 0 or i == batch - 1) else n for i, n in enumerate(actual)]

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device, dtype=torch.int32)

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Mask:
    """Keys that the queries of a sequence see, besides its length: what the file's arguments say."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0

    def seen(self, rows: int, keys: int, pad: int, device: str) -> Tensor | None:
        """Pairs (rows, keys) that are seen, the last query aligned with the last key; None for all."""
        left, right = self.window[0], 0 if self.causal else self.window[1]
        if max(left, right) < 0 and not self.chunk and not pad:
            return None
        key = torch.arange(keys, device=device)[None]
        position = torch.arange(rows, device=device)[:, None] + keys - rows
        seen = (key >= pad).expand(rows, keys)
        if left >= 0:
            seen = seen & (key >= position - left)
        if right >= 0:
            seen = seen & (key <= position + right)
        if self.chunk:  # counted from the first key that is not padding
            first = position - (position - pad) % self.chunk
            seen = seen & (key >= first) & (key < first + self.chunk)
        return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, *, softcap: float = 0.0, exact: bool,
    rounded: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one sequence, q (rows, h, d) over k and v (keys, hk, d), in q's dtype.

    All steps are in float32 if ``exact``, else in q's dtype, with the scale on k. Probabilities are ``rounded`` to a
    dtype.
    """
    dtype, scale, group = q.dtype, q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    if exact:
        q, k, v = q.float() * scale, k.float(), v.float()
    else:
        k = k * scale
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    p = torch.softmax(s, dim=-1).to(v.dtype)
    if seen is not None:
        p = p.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
    if rounded is not None:
        p = p.to(rounded).to(p.dtype)
    return torch.einsum("hqk,khd->qhd", p, v).to(dtype)


@dataclass
class Wanted:
    """Results of sequences, exact and of plain torch, one after the other; with gradients if they are asked for."""

    exact: list[Tensor]
    plain: list[Tensor]
    gradients: tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]

    @classmethod
    def none(cls) -> Wanted:
        return cls([], [], ([], []))

    def add(
        self, inputs: Sequence[Tensor], scales: Sequence[Tensor | None], seen: Tensor | None, softcap: float,
        rounded: torch.dtype | None, dout: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute one sequence. ``scales`` (hk,) multiply q, k and v."""
        for exact, outs, gradients in (
            (True, self.exact, self.gradients[0]), (False, self.plain, self.gradients[1]),
        ):  # fmt: skip
            leaves = [t.detach().requires_grad_(dout is not None) for t in inputs]
            q, k, v = (_scaled(t, scale, exact) for t, scale in zip(leaves, scales, strict=True))
            out = attention(q, k, v, seen, softcap=softcap, exact=exact, rounded=None if exact else rounded)
            out = out.to(inputs[0].dtype)
            outs.append(out.detach())
            if dout is not None:
                gradients.append(torch.autograd.grad(out, leaves, dout))


def _scaled(t: Tensor, scale: Tensor | None, exact: bool) -> Tensor:
    if scale is None:
        return t.float() if exact else t
    by_head = scale.repeat_interleave(t.shape[1] // scale.shape[0])
    product = t.float() * by_head[None, :, None]
    return product if exact else product.to(t.dtype)


def beyond(name: str, actual: Tensor, exact: Tensor, plain: Tensor, factor: float, extra: float = 0.0) -> str | None:
    """Say by how much a result is wrong, or None: the limit is ``factor`` times the error of plain torch, and what
    rounding of the exact result costs."""
    if not exact.numel():
        return None
    error = (actual.float() - exact.float()).abs().max().item()
    allowed = (plain.float() - exact.float()).abs().max().item()
    rounding = 2 * (exact + 0.3 - 0.3 - exact).abs().max().item()
    if error <= factor * allowed + rounding + extra:
        return None
    return f"{name} is off by {error:.3g}; plain torch by {allowed:.3g}, rounding {rounding:.3g}"
