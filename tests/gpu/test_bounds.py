"""Numbers and words at their limits: records of every shape of bounds, tiles beyond 2^20, scores with conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import attngen
from attngen.build.pipeline import build
from attngen.runtime.registry.lookup import registry
from tests.gpu.family import only_known

Builder = Callable[[str], None]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Builder]:
    """Build a spec into a cache of its own, whose kernels are then the only ones."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))

    def make(text: str) -> None:
        path = tmp_path / "bounds.yaml"
        path.write_text(f"schema: 1\narch: sm90a\n{text}")
        assert not build(path).failures
        registry.clear()

    with only_known():
        yield make


def needs_hopper(gigabytes: int = 1) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of this test are for Hopper")
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free memory")


def randoms(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def shown(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attention of (1, s, 1, d) in float64 where a (q, kv) mask is true."""
    logits = q[0, :, 0].double() @ k[0, :, 0].double().T / q.shape[-1] ** 0.5
    return (logits.masked_fill(~visible, -torch.inf).softmax(-1) @ v[0, :, 0].double())[None, :, None]


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_masks_without_bounds_of_full_tiles(built: Builder, consumers: int) -> None:
    """With two consumers, the second record of a work tile was at an address that its words do not allow."""
    needs_hopper()
    built(
        "variants:\n  own:\n    mask: kv <= q and q - kv <= reach[q]\n"
        "    tensors: {reach: {dtype: int32, shape: [seqlen_q]}}\n"
        f"kernels: [{{variant: own, head_dim: 64, backend: cuda, tile: {{m: {64 * consumers}, n: 64}}}}]\n"
    )
    q, k, v = (randoms(1, 1500, 1, 64, seed=seed) for seed in range(3))
    reach = torch.randint(0, 700, (1500,), device="cuda", dtype=torch.int32)
    out = attngen.attention(q, k, v, variant="own", reach=reach)
    row, key = torch.arange(1500, device="cuda")[:, None], torch.arange(1500, device="cuda")
    wanted = shown(q, k, v, (key <= row) & (row - key <= reach[:, None]))
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.alone
def test_a_forward_of_more_tiles_than_twenty_bits_count(built: Builder) -> None:
    needs_hopper(12)
    built(
        "variants:\n  own: {mask: kv <= q_pos and q_pos - kv < 100}\n"
        "kernels: [{variant: own, head_dim: 64, backend: cuda, tile: {m: 192, n: 16}}]\n"
    )
    keys, queries, last = 16 * 2**20 + 1000, 200, 400
    q, k, v = randoms(1, queries, 1, 64, seed=0), randoms(1, keys, 1, 64, seed=1), randoms(1, keys, 1, 64, seed=2)
    out = attngen.attention(q, k, v, variant="own")
    row = torch.arange(last - queries, last, device="cuda")[:, None]
    key = torch.arange(last, device="cuda")
    wanted = shown(q, k[:, -last:], v[:, -last:], (key <= row) & (row - key < 100))
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.alone
def test_a_backward_of_more_tiles_than_twenty_bits_count(built: Builder) -> None:
    needs_hopper(60)
    first = 128 * 2**20  # the first query of the tile that 20 bits do not count
    built(
        f"variants:\n  own: {{mask: kv < 64 or q < {first}}}\n"
        "kernels:\n  - {variant: own, head_dim: 16, backend: cuda}\n"
        "  - {variant: own, head_dim: 16, passes: backward, backward: {backend: cuda}}\n"
    )
    q = torch.zeros(1, first + 128, 1, 16, device="cuda", dtype=torch.bfloat16)
    q[:, first:] = randoms(1, 128, 1, 16, seed=0)
    k, v, weight = (randoms(1, 128, 1, 16, seed=seed) for seed in (1, 2, 3))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = attngen.attention(q, k, v, variant="own")
    dout = torch.zeros_like(out)
    dout[:, first:] = weight
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    rows, keys, values = (t.detach().double().requires_grad_() for t in (q[:, first:], k, v))
    visible = (torch.arange(128, device="cuda") < 64).expand(128, 128)
    wanted = torch.autograd.grad(shown(rows, keys, values, visible), (rows, keys, values), weight.double())
    for gradient, right in zip((dq[:, first:], dk, dv), wanted, strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=5e-2, rtol=5e-2)
    assert not dk[:, 64:].any()
    assert not dv[:, 64:].any()


@pytest.mark.parametrize(
    ("score", "factor"),
    [
        ("s if kv % 2 == 0 else -inf", lambda s, q, k: torch.where(k % 2 == 0, s, -torch.inf)),
        (
            "(s if kv % 4 == 0 else s * 0.5) if kv % 2 == 0 else -inf",
            lambda s, q, k: torch.where(k % 2 == 0, torch.where(k % 4 == 0, s, s * 0.5), -torch.inf),
        ),
        ("s + 1.0 if kv % 2 == 0 else 0.25 * (kv % 8)", lambda s, q, k: torch.where(k % 2 == 0, s + 1, k % 8 / 4)),
    ],
    ids=["cut", "nested", "biased"],
)
def test_scores_with_conditions(built: Builder, score: str, factor: Callable[..., torch.Tensor]) -> None:
    needs_hopper()
    built(
        f"variants:\n  own: {{mask: kv <= q_pos, score: {score!r}}}\n"
        "kernels:\n  - {variant: own, head_dim: 128, backend: cuda}\n"
        "  - {variant: own, head_dim: 128, passes: backward, backward: {backend: cuda}}\n"
    )
    q, k, v, dout = (randoms(1, 700, 1, 128, seed=seed) for seed in range(4))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = attngen.attention(q, k, v, variant="own")
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    row, key = torch.arange(700, device="cuda")[:, None], torch.arange(700, device="cuda")
    logits = factor(exact[0][0, :, 0] @ exact[1][0, :, 0].T / 128**0.5, row, key)
    weights = logits.masked_fill(key > row, -torch.inf).softmax(-1)
    wanted = (weights @ exact[2][0, :, 0])[None, :, None]
    torch.testing.assert_close(out.detach().double(), wanted.detach(), atol=2e-2, rtol=2e-2)
    for gradient, right in zip(gradients, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=6e-2, rtol=6e-2)
