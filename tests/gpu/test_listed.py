"""Keys by index of ordinary head dims, lists of blocks and of each KV head, and backwards, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.build.pipeline import Prepared, prepare_each
from attngen.lang.listed import LISTS, KeyLists
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import Package, package_of_kernels
from attngen.schema import load_spec
from tests.gpu.family import compiled_kernels, known
from tests.gpu.test_decode import close, on_gpu
from tests.gpu.test_indexed import lists
from tests.runtime.pages import cache as pages_of
from tests.runtime.pages import starts_of

PACKAGE = "listed_tests"
SPEC = load_spec(Path(__file__).with_name("listed.yaml"))
VALUES = 512


def to_build() -> list[Prepared]:
    return [one for one in prepare_each(SPEC)[0] if one.plan.direction in ("forward", "backward")]


@known
def kernels() -> tuple[list[Kernel], Package]:
    """Compile the kernels of the spec, which alone are known as the package: no other takes a call."""
    built = compiled_kernels(to_build())
    return built, package_of_kernels(built, "tests/gpu/test_listed")


@pytest.fixture(autouse=True)
def _known() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the spec is for Hopper")
    kernels()


def lists_of(variant: str) -> KeyLists:
    keys = SPEC.model.variants[variant].keys
    assert keys is not None
    return LISTS[keys]


def own_of(
    variant: str, batch: int, queries: int, topk: int, keys: int, heads: int, kv_heads: int
) -> dict[str, Tensor]:
    """Tensors of a call: lists of entries, some of which name nothing, their lengths, and what a score reads."""
    held = lists_of(variant)
    names = -(-keys // held.block)
    if held.per_head:
        entries = torch.stack([lists(batch, queries, topk, names) for _ in range(kv_heads)], 2)
    else:
        entries = lists(batch, queries, topk, names)
    own = {"indices": entries}
    if held.counted:
        length = torch.randint(0, topk + 2, entries.shape[:-1], dtype=torch.int32)
        length[:, 0], length[:, -1] = -3, 2**31 - 1
        own["topk_length"] = length
    if "sinks" in variant or variant == "head_blocks":
        own["sinks"] = torch.randn(heads)
    if variant == "head_blocks":
        own["slope"] = -torch.rand(heads) / 16
    return own


def in_double(own: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in own.items()}


def values_of(k: Tensor, dims: tuple[int, int]) -> Tensor:
    """V as the first columns of K."""
    return k[..., : dims[1]]


def dense(
    variant: str, dims: tuple[int, int], *, heads: int, kv_heads: int, batch: int = 2, queries: int = 3,
    keys: int = 700, topk: int = 200, dtype: torch.dtype = torch.bfloat16, **given: Any,
) -> None:  # fmt: skip
    torch.manual_seed(heads + topk)
    q = torch.randn(batch, queries, heads, dims[0]).to(dtype)
    k = torch.randn(batch, keys, kv_heads, dims[0]).to(dtype)
    latent = dims in ((576, 512), (512, 512))
    v = None if latent else torch.randn(batch, keys, kv_heads, dims[1]).to(dtype)
    own = own_of(variant, batch, queries, topk, keys, heads, kv_heads)
    call = {"variant": variant, "return_lse": True}
    exact = k.double()
    exact_v = values_of(exact, dims) if v is None else v.double()
    wanted = attngen.attention(q.double(), exact, exact_v, backend="reference", package=PACKAGE, **call, **own)
    on_card = k.cuda()
    values = values_of(on_card, dims) if v is None else v.cuda()
    actual = attngen.attention(q.cuda(), on_card, values, package=PACKAGE, **call, **on_gpu(own), **given)
    close(actual, wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (16, 2), (34, 2), (64, 1), (100, 1), (160, 1), (6, 6)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(head_dim: int, heads: int, kv_heads: int) -> None:
    dense("listed", (head_dim, head_dim), heads=heads, kv_heads=kv_heads, queries=5)


@pytest.mark.parametrize("topk", [1, 15, 16, 17, 63, 300, 2048])
@pytest.mark.parametrize("queries", [1, 90])
def test_lengths_of_lists(topk: int, queries: int) -> None:
    dense("listed", (128, 128), topk=topk, heads=16, kv_heads=2, batch=1, queries=queries, keys=2500)
    dense("counted", (192, 128), topk=topk, heads=8, kv_heads=2, queries=min(queries, 20), dtype=torch.float16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (48, 2), (4, 4)])
@pytest.mark.parametrize("variant", ["blocks", "head_blocks"])
@pytest.mark.parametrize("topk", [1, 5, 40])
def test_blocks(variant: str, topk: int, heads: int, kv_heads: int) -> None:
    dense(variant, (128, 128), topk=topk, heads=heads, kv_heads=kv_heads, queries=9)


@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 2), (12, 1)])
@pytest.mark.parametrize("topk", [1, 3, 5, 170])
def test_blocks_of_four_keys(topk: int, heads: int, kv_heads: int) -> None:
    dense("small_blocks", (256, 256), topk=topk, heads=heads, kv_heads=kv_heads, queries=9)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("variant", ["blocks", "head_blocks"])
@pytest.mark.parametrize("topk", [1, 13])
def test_blocks_of_latent_rows(variant: str, topk: int, heads: int) -> None:
    dense(variant, (576, 512), topk=topk, heads=heads, kv_heads=1, queries=9)


def test_blocks_of_a_card_share_long_lists() -> None:
    dense("listed", (128, 128), heads=8, kv_heads=2, batch=1, queries=2, keys=9000, topk=4000)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize(
    ("variant", "dims", "heads", "kv_heads"),
    [
        ("causal", (128, 128), 16, 2), ("head_lists", (128, 128), 16, 2), ("blocks", (128, 128), 8, 2),
        ("head_blocks", (128, 128), 8, 2), ("small_blocks", (256, 256), 24, 2),
        ("blocks", (576, 512), 128, 1), ("head_blocks", (576, 512), 16, 1),
    ],
)  # fmt: skip
def test_pages(variant: str, dims: tuple[int, int], heads: int, kv_heads: int, page_size: int) -> None:
    lengths, queries, topk = [0, 5, 100, 900], 3, 40
    c = pages_of(lengths, page_size, kv_heads=kv_heads, head_dim=dims[0], head_dim_v=dims[1], dtype=torch.bfloat16)
    torch.manual_seed(3)
    q = torch.randn(len(lengths), queries, heads, dims[0]).bfloat16()
    own = own_of(variant, len(lengths), queries, topk, max(lengths), heads, kv_heads)
    call = {"variant": variant, "return_lse": True}
    latent = dims[0] == 576
    k, v = c.k_pages.double(), c.v_pages.double()
    wanted = attngen.attention_paged(
        q.double(), k, values_of(k, dims) if latent else v, c.page_table, c.seqused_k, backend="reference",
        package=PACKAGE, **call, **own,
    )  # fmt: skip
    k, v = c.k_pages.cuda(), c.v_pages.cuda()
    for given in ({}, {"num_splits": 2}):
        actual = attngen.attention_paged(
            q.cuda(), k, values_of(k, dims) if latent else v, c.page_table.cuda(), c.seqused_k.cuda(), package=PACKAGE,
            **call, **on_gpu(own), **given,
        )  # fmt: skip
        close(actual, wanted)


@pytest.mark.parametrize("variant", ["causal", "head_lists"])
def test_packed_sequences(variant: str) -> None:
    of_q, of_k, heads, kv_heads = [70, 1, 0, 12], [70, 300, 5, 4], 16, 2
    torch.manual_seed(9)
    q = torch.randn(sum(of_q), heads, 128).bfloat16()
    k, v = torch.randn(2, sum(of_k), kv_heads, 128).bfloat16()
    starts = starts_of(of_q), starts_of(of_k)
    own = own_of(variant, 4, 70, 90, 320, heads, kv_heads)
    call = {"max_seqlen_q": 70, "max_seqlen_k": 300, "variant": variant, "return_lse": True, "package": PACKAGE}
    wanted = attngen.attention_varlen(q.double(), k.double(), v.double(), *starts, backend="reference", **own, **call)
    actual = attngen.attention_varlen(
        q.cuda(), k.cuda(), v.cuda(), *(start.cuda() for start in starts), **on_gpu(own), **call
    )
    close(actual, wanted)


def compare(got: dict[str, Tensor | None], exact: dict[str, Tensor | None], plain: dict[str, Tensor | None]) -> None:
    """Gradients against float64: no further than three times what the reference errs in 16 bits."""
    for name, wanted in exact.items():
        mine, theirs = got[name], plain[name]
        assert mine is not None
        assert wanted is not None
        assert theirs is not None
        assert not mine.isnan().any(), name
        error = (mine.cpu().double() - wanted).abs()
        # of sinks: D is computed from an output of 16 bits, which the reference does not round
        own = 1e-2 if name == "sinks" else 1e-3
        bound = 3 * (theirs.double() - wanted).abs().max() + own * wanted.abs().max() + 1e-5
        assert error.max() <= bound, f"{name}: {error.max():.3g} > {bound:.3g}, at {error.argmax()}"


def gradients(
    variant: str,
    own: dict[str, Tensor],
    tensors: list[Tensor],
    latent: int,
    grads: list[Tensor],
    run: Any,
    **given: Any,
) -> dict[str, Tensor | None]:
    """Gradients of q, k and, if it is not the first columns of k (``latent``), v; and of sinks."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    own = {name: tensor.clone().requires_grad_(name == "sinks") for name, tensor in own.items()}
    q, k = leaves[:2]
    v = k[..., :latent] if latent else leaves[2]
    out, lse = run(q, k, v, variant=variant, return_lse=True, package=PACKAGE, **own, **given)
    torch.autograd.backward((out, lse), tuple(grad.to(of) for grad, of in zip(grads, (out, lse), strict=True)))
    named = dict(zip("qkv", (leaf.grad for leaf in leaves), strict=False))
    return named | ({"sinks": own["sinks"].grad} if "sinks" in own else {})


def check_gradients(
    variant: str, own: dict[str, Tensor], tensors: list[Tensor], latent: int, grads: list[Tensor], run: Any
) -> None:
    exact = gradients(
        variant, in_double(own), [t.double() for t in tensors], latent, [t.double() for t in grads], run,
        backend="reference",
    )  # fmt: skip
    plain = gradients(variant, own, tensors, latent, grads, run, backend="reference")
    got = gradients(variant, on_gpu(own), [t.cuda() for t in tensors], latent, [t.cuda() for t in grads], run)
    compare(got, exact, plain)


@pytest.mark.parametrize(
    ("variant", "dims", "heads", "kv_heads", "topk", "dtype"),
    [
        *[("listed", (576, 512), heads, 1, 200, torch.bfloat16) for heads in (1, 16, 64, 65, 128)],
        *[("listed", (576, 512), 16, 1, topk, torch.bfloat16) for topk in (1, 63, 64, 65, 700)],
        *[("counted_sinks", (576, 512), heads, 1, 130, torch.bfloat16) for heads in (24, 128)],
        ("blocks", (512, 512), 40, 1, 5, torch.float16),
        *[("listed", (128, 128), *heads, 200, torch.bfloat16) for heads in ((1, 1), (16, 2), (40, 2), (6, 6))],
        *[("listed", (64, 64), 16, 2, topk, torch.bfloat16) for topk in (1, 15, 16, 17, 64, 65, 700)],
        ("counted_sinks", (192, 128), 24, 2, 130, torch.bfloat16),
    ],
)  # fmt: skip
def test_gradients(
    variant: str, dims: tuple[int, int], heads: int, kv_heads: int, topk: int, dtype: torch.dtype
) -> None:
    batch, queries, keys = 2, 7, 300
    torch.manual_seed(heads + topk)
    latent = dims[1] if dims[1] == VALUES else 0
    shapes = [(queries, heads, dims[0]), (keys, kv_heads, dims[0]), (keys, kv_heads, dims[1])][: 2 if latent else 3]
    tensors = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
    own = own_of(variant, batch, queries, topk, keys, heads, kv_heads)
    grads = [torch.randn(batch, queries, heads, dims[1]).to(dtype), torch.randn(batch, heads, queries)]
    check_gradients(variant, own, tensors, latent, grads, attngen.attention)


@pytest.mark.parametrize(
    ("variant", "dims", "heads", "kv_heads"),
    [("causal", (576, 512), 72, 1), ("causal", (128, 128), 16, 2), ("head_lists", (128, 128), 16, 2)],
)
def test_gradients_of_packed_sequences(variant: str, dims: tuple[int, int], heads: int, kv_heads: int) -> None:
    of_q, of_k = [20, 1, 0, 12], [20, 300, 5, 4]
    torch.manual_seed(9)
    latent = dims[1] if dims[1] == VALUES else 0
    rows = [(sum(of_q), heads, dims[0]), (sum(of_k), kv_heads, dims[0]), (sum(of_k), kv_heads, dims[1])]
    tensors = [torch.randn(shape).bfloat16() for shape in rows[: 2 if latent else 3]]
    starts = [starts_of(of_q), starts_of(of_k)]
    own = own_of(variant, 4, 20, 90, 320, heads, kv_heads)
    grads = [torch.randn(sum(of_q), heads, dims[1]).bfloat16(), torch.randn(heads, sum(of_q))]

    def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        return attngen.attention_varlen(q, k, v, *(start.to(q.device) for start in starts), 20, 300, **given)

    check_gradients(variant, own, tensors, latent, grads, run)
