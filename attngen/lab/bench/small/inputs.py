"""The tensors of a call of little work, and its expected output."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attngen.dtypes import dtype as dtype_row
from attngen.lab.bench.check import relative_error
from attngen.lab.bench.small.shapes import DTYPE, Shape
from attngen.lab.bench.timing import input_sets
from attngen.lang.variant import Variant
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.operations.attention.entry import attention
from attngen.schema import preset


class SmallInputs:
    """Random q, k and v of a call, (batch, seqlen, heads, head_dim), in as many sets as exceed twice the L2 cache."""

    def __init__(self, shape: Shape, device: torch.device, l2_bytes: int, generator: torch.Generator) -> None:
        self.shape = shape
        dtype = getattr(torch, dtype_row(DTYPE).torch)

        def new(length: int, heads: int) -> Tensor:
            sizes = (shape.batch, length, heads, shape.head_dim)
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        rows = ((shape.seqlen_q, shape.heads), (shape.seqlen_k, shape.kv_heads), (shape.seqlen_k, shape.kv_heads))
        self.sets = [tuple(new(*each) for each in rows) for _ in range(input_sets(shape.input_bytes, l2_bytes))]

    def calls(self, package: str) -> list[Callable[[], Any]]:
        """A call of attngen on each set, on the kernels of a package alone."""
        keywords: dict[str, Any] = {"variant": self.shape.variant, "package": package, **self.shape.arguments}
        return [partial(attention, *each, **keywords) for each in self.sets]

    def error(self, out: Tensor) -> float:
        """Relative error of the last set over the first KV head of the first sequence and the last one of the last."""
        group = self.shape.heads // self.shape.kv_heads
        picked = [out[b : b + 1, :, hk * group : (hk + 1) * group] for b, hk in self._picked]
        return relative_error(torch.cat(picked), self._expected)

    @property
    def _picked(self) -> list[tuple[int, int]]:
        return sorted({(0, 0), (self.shape.batch - 1, self.shape.kv_heads - 1)})

    @cached_property
    def _expected(self) -> Tensor:
        shape, (q, k, v) = self.shape, self.sets[-1]
        group, expected = shape.heads // shape.kv_heads, []
        for b, hk in self._picked:
            one = (
                q[b : b + 1, :, hk * group : (hk + 1) * group],
                *(each[b : b + 1, :, hk : hk + 1] for each in (k, v)),
            )
            out = attention(
                *(each.double() for each in one), variant=preset(shape.variant), backend="reference", **shape.arguments
            )
            assert isinstance(out, Tensor)
            expected.append(out)
        return torch.cat(expected)


def call_of(shape: Shape, variant: Variant) -> Call:
    """The call as selection sees it; it has no memory."""
    dtype = getattr(torch, dtype_row(DTYPE).torch)
    q = torch.empty(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim, dtype=dtype, device="meta")
    k = torch.empty(shape.batch, shape.seqlen_k, shape.kv_heads, shape.head_dim, dtype=dtype, device="meta")
    return bind(
        variant, q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=shape.arguments,
    )  # fmt: skip
