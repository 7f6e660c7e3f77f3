"""The backward of latent attention (``v: key``) against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.runtime.geometry import sizes
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.gpu.test_decode import on_gpu
from tests.gpu.test_listed import compare, in_double
from tests.runtime.pages import starts_of

PACKAGE = "mla_backward_tests"
VALUES = 512


def to_build() -> list[Prepared]:
    return prepare_each(load_spec(Path(__file__).with_name("mla_backward.yaml")))[0]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_mla_backward")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels whose values are keys are for Hopper")
    kernels()


def own_of(variant: str, batch: int, keys: int, heads: int) -> dict[str, Tensor]:
    """The tensors that a variant reads."""
    if variant == "segments":
        return {"segment": torch.sort(torch.randint(0, 4, (batch, keys), dtype=torch.int32), dim=-1).values}
    return {"sinks": torch.randn(heads)} if variant == "sinks" else {}


def gradients(
    own: dict[str, Tensor], q: Tensor, k: Tensor, grads: list[Tensor], run: Any, **given: Any
) -> dict[str, Tensor | None]:
    """Gradients of q and k through v, which is the head of k."""
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    out, lse = run(q, k, k[..., :VALUES], return_lse=True, package=PACKAGE, **own, **given)
    torch.autograd.backward((out, lse), tuple(grad.to(of) for grad, of in zip(grads, (out, lse), strict=True)))
    return {"q": q.grad, "k": k.grad}


def check(own: dict[str, Tensor], q: Tensor, k: Tensor, grads: list[Tensor], run: Any, **given: Any) -> None:
    exact = gradients(
        in_double(own), q.double(), k.double(), [grad.double() for grad in grads], run, backend="reference", **given
    )
    plain = gradients(own, q, k, grads, run, backend="reference", **given)
    got = gradients(on_gpu(own), q.cuda(), k.cuda(), [grad.cuda() for grad in grads], run, **given)
    compare(got, exact, plain)


def dense(
    variant: str, *, heads: int, queries: int, keys: int, kv_heads: int = 1, batch: int = 2, head_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    torch.manual_seed(heads + queries)
    q = torch.randn(batch, queries, heads, head_dim).to(dtype)
    k = torch.randn(batch, keys, kv_heads, head_dim).to(dtype)
    grads = [torch.randn(batch, queries, heads, VALUES).to(dtype), torch.randn(batch, heads, queries)]
    check(own_of(variant, batch, keys, heads), q, k, grads, attngen.attention, variant=variant)


@pytest.mark.parametrize(
    ("heads", "queries", "keys"),
    [
        (1, 1, 1), (1, 130, 90), (16, 7, 64), (16, 65, 65), (16, 40, 300), (16, 130, 90), (24, 1, 1), (24, 40, 300),
        (24, 65, 65), (128, 1, 1), (128, 7, 64), (128, 30, 70),
    ],
)  # fmt: skip
def test_heads_and_lengths(heads: int, queries: int, keys: int) -> None:
    dense("causal", heads=heads, queries=queries, keys=keys)


@pytest.mark.parametrize("variant", ["full", "first_and_near", "segments", "head_windows", "sinks"])
def test_masks_and_sinks(variant: str) -> None:
    dense(variant, heads=16, queries=330, keys=330, batch=1)


def test_several_kv_heads() -> None:
    dense("causal", heads=24, kv_heads=2, queries=70, keys=100)


def test_512_columns_in_fp16() -> None:
    dense("causal", heads=32, queries=60, keys=200, head_dim=512, dtype=torch.float16)


def test_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several chunks, the last one smaller, and parts of two sequences in one of them."""
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 1)
    dense("causal", heads=64, queries=170, keys=100, batch=3)


@pytest.mark.parametrize(("variant", "heads"), [("causal", 16), ("full", 128)])
def test_packed_sequences(variant: str, heads: int) -> None:
    of_q, of_k = ([70, 1, 0, 190], [70, 300, 5, 180]) if heads == 16 else ([30, 1, 0, 50], [70, 130, 5, 64])
    torch.manual_seed(9)
    q, k = torch.randn(sum(of_q), heads, 576).bfloat16(), torch.randn(sum(of_k), 1, 576).bfloat16()
    starts = [starts_of(of_q), starts_of(of_k)]
    grads = [torch.randn(sum(of_q), heads, VALUES).bfloat16(), torch.randn(heads, sum(of_q))]

    def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        own = (start.to(q.device) for start in starts)
        return attngen.attention_varlen(q, k, v, *own, max(of_q), max(of_k), variant=variant, **given)

    check({}, q, k, grads, run)


def test_used_keys() -> None:
    """Rows after the used keys hold anything."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 20, 16, 576).bfloat16(), torch.randn(2, 200, 1, 576).bfloat16()
    used = torch.tensor([130, 17], dtype=torch.int32)
    grads = [torch.randn(2, 20, 16, VALUES).bfloat16(), torch.randn(2, 16, 20)]
    for b, count in enumerate(used.tolist()):
        k[b, count:] = 0.0

    def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        if q.is_cuda:
            rows = k.detach().clone()
            for b, count in enumerate(used.tolist()):
                rows[b, count:] = torch.nan
            k.data = rows
            v = k[..., :VALUES]
        return attngen.attention(q, k, v, variant="causal", seqused_k=used.to(q.device), **given)

    check({}, q, k, grads, run)
