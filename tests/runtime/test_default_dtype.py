"""``torch.set_default_dtype`` changes no result: scales and log-sum-exps are float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.integrations.flex_attention import flex_attention

Q, K, V = (torch.randn(2, n, h, 16) for n, h in ((9, 4), (12, 2), (12, 2)))
BIASED = attngen.variant(mask="kv / 3 <= q + 1", score="s + kv / (q + 2) + sqrt(kv) * slope[h]", sink="h / 3",
                         tensors={"slope": {"dtype": "float32", "shape": ["h"]}})  # fmt: skip
SLOPES = torch.rand(4)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def quantized(**options: Any) -> tuple[Tensor, ...]:
    values = attngen.quantize(Q, K, V, **options)
    out = attngen.attention(values.q, values.k, values.v, **values.descales)
    return (*(x.float() for x in values[:3]), *values[3:], out)


def scored(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + kv / (q + 2)


def gradients() -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in (Q, K, V)]
    return torch.autograd.grad(attngen.attention(*leaves, variant=BIASED, slope=SLOPES).sum(), leaves)


CALLS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    **{f"scales of {g}": (lambda g=g: quantized(granularity=g)) for g in ("tensor", "head", 64, "token")},
    "given signs": lambda: quantized(granularity="tensor", signs=torch.ones(16, dtype=torch.float32)),
    "a score of integers": lambda: attngen.attention(Q, K, V, variant=BIASED, slope=SLOPES, return_lse=True),
    "no keys": lambda: attngen.attention(Q, K[:, :0], V[:, :0], variant=BIASED, slope=SLOPES, return_lse=True),
    "gradients": gradients,
    "FlexAttention": lambda: (flex_attention(*(x.transpose(1, 2) for x in (Q, K, V)), scored, enable_gqa=True),),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_results_do_not_depend_on_it(name: str, dtype: torch.dtype) -> None:
    wanted = CALLS[name]()
    torch.set_default_dtype(dtype)
    for actual, same in zip(CALLS[name](), wanted, strict=True):
        assert actual.dtype == same.dtype
        assert torch.equal(actual, same)
