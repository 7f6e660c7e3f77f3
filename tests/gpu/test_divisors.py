"""Divisions by scalars of a call, forward and backward, against torch in float64: divisors of all sizes, and dividends
below 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare
from attngen.schema import load_spec
from tests.gpu.family import only_known, package_of_spec

SPEC = Path(__file__).with_name("divisors.yaml")
DEVICE = "cuda"
#: Queries and keys: ragged, and with queries before the first key.
LENGTHS = ((517, 517), (389, 200), (130, 643))
Pairs = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
MASKS: dict[str, Pairs] = {
    "chunks": lambda q, kv, p, n, w: (p >= kv) & (p // n == kv // n),
    "dilated": lambda q, kv, p, n, w: (p >= kv) & ((p - kv) % n == 0),
    "frames": lambda q, kv, p, n, w: (q // n >= kv // n) & (q // n - kv // n < w),
    "volume": lambda q, kv, p, n, w: (
        ((q // (n * w) - kv // (n * w)).abs() <= 1)
        & ((q // n % w - kv // n % w).abs() <= 1)
        & ((q % n - kv % n).abs() <= 3)
    ),
    "remainders": lambda q, kv, p, n, w: ((kv - p) // n >= -w) & ((kv - p - 5) % n != 1),
    "halves": lambda q, kv, p, n, w: torch.where(
        q >= w, torch.where(kv < w, kv // n < q // n, q // n == kv // n), (q // n == kv // n) & (kv < w)
    ),
    "distances": lambda q, kv, p, n, w: p >= kv,
}
DIVISORS = (1, 2, 3, 7, 64, 641, 4096, 2**31 - 1)


def to_build() -> list[Prepared]:
    return prepare(load_spec(SPEC))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Make these kernels known, and no others."""
    with only_known(package_of_spec(SPEC)):
        yield


def by_torch(
    name: str, n: int, w: int, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return out, dq, dk and dv, (1, seqlen, heads, head_dim), computed in a dtype."""
    q, k, v = (x.detach().to(dtype).transpose(1, 2).requires_grad_() for x in inputs)
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(k.shape[2], device=q.device)[None, :]
    position = row + k.shape[2] - q.shape[2]
    seen = MASKS[name](row, key, position, n, w)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if name == "distances":
        s = s + (0.125 * ((key - position) // n) + 0.01 * ((position - key) % n).clamp(max=50)).to(dtype)
    some = seen.any(-1, keepdim=True)  # a query that sees no key gives 0
    s = s.masked_fill(~(seen | ~some), -math.inf)
    out = s.float().softmax(-1).to(dtype) @ v if dtype != torch.float64 else s.softmax(-1) @ v
    out = out * some.to(dtype)
    out.backward(dout.to(dtype).transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, *(t.grad for t in (q, k, v) if t.grad is not None))]


@pytest.mark.parametrize("n", DIVISORS)
@pytest.mark.parametrize(("name", "dim"), [*((name, 64) for name in MASKS), ("chunks", 128), ("frames", 128),
                                           ("volume", 128)])  # fmt: skip
def test_divisions_are_those_of_torch(name: str, dim: int, n: int) -> None:
    n = min(n, {"frames": 65536, "volume": 4096}.get(name, n))
    w = {"halves": 150, "volume": 5}.get(name, 3)
    given = {"n": n, "w": w} if name in ("frames", "volume", "remainders", "halves") else {"n": n}
    for queries, keys in LENGTHS:
        generator = torch.Generator(DEVICE).manual_seed(queries + n % 1000)

        def random(length: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(1, length, 2, dim, generator=generator, device=DEVICE).bfloat16()

        inputs = random(queries), random(keys), random(keys)
        dout = random(queries)
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attngen.attention(q, k, v, variant=name, **given)
        out.backward(dout)
        exact = by_torch(name, n, w, inputs, dout, torch.float64)
        plain = by_torch(name, n, w, inputs, dout, torch.bfloat16)
        for number, (actual, wanted, usual) in enumerate(zip((out, q.grad, k.grad, v.grad), exact, plain, strict=True)):
            assert actual is not None
            allowed = 3 * (usual.double() - wanted).norm() + 2e-3 * wanted.norm() + 1e-6
            if number in (1, 2):  # dQ and dK of a query that sees one key are 0, but for the rounding of O
                allowed += 5e-3 * dout.double().norm()
            assert (actual.detach().double() - wanted).norm() <= allowed, (queries, keys, number)
