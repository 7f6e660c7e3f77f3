"""Routing of scaled_dot_product_attention: torch's results with every option, fallbacks with a reason, and hygiene."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.errors import CallError
from attngen.integrations import sdpa
from tests.integrations import oracles
from tests.sampling import few

TORCHS = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    assert F.scaled_dot_product_attention is TORCHS


def qkv(heads: int = 4, kv_heads: int = 4, rows: int = 7, keys: int = 11, dim: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(heads * 1000 + rows * 10 + keys)
    q = torch.randn(2, heads, rows, dim)
    return q, torch.randn(2, kv_heads, keys, dim), torch.randn(2, kv_heads, keys, dim + 4)


def near(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted.to(actual.dtype), rtol=1e-5, atol=1e-5)


def some_mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.6


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("full", {"scale": 0.4}),
    ("causal_top_left", {"is_causal": True}),
    ("allowed", {"attn_mask": some_mask(7, 11)}),
    ("allowed", {"attn_mask": some_mask(2, 1, 7, 11)}),
    ("allowed", {"attn_mask": some_mask(2, 1, 1, 11)}),
    ("allowed", {"attn_mask": some_mask(1, 1, 7, 1)}),
    ("allowed", {"attn_mask": some_mask(1, 11)}),
    ("allowed_by_head", {"attn_mask": some_mask(4, 7, 11)}),
    ("allowed_by_head", {"attn_mask": some_mask(2, 4, 1, 11)}),
    ("bias_fp32", {"attn_mask": torch.randn(7, 11)}),
    ("bias_fp32", {"attn_mask": torch.randn(2, 1, 7, 11), "scale": 0.4}),
    ("bias_fp32", {"attn_mask": torch.randn(1, 4, 1, 11)}),
    ("bias_fp32", {"attn_mask": torch.randn(4, 7, 1)}),
    ("bias_fp32", {"attn_mask": torch.zeros(7, 11).masked_fill(~some_mask(7, 11), float("-inf"))}),
]


def described(value: Any) -> str:
    """Name a test by what it gets; a tensor counts by its shape."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(f"{name} {list(v.shape) if isinstance(v, Tensor) else v}" for name, v in value.items())


@few("kv_heads", [4, 2, 1], always=range(0, 999, 3))
@pytest.mark.parametrize(("variant", "options"), OPTIONS, ids=described)
def test_options(variant: str, options: dict[str, Any], kv_heads: int) -> None:
    q, k, v = qkv(kv_heads=kv_heads)
    options = {**options, "enable_gqa": kv_heads != 4}
    with sdpa(backend="reference") as routed:
        out = F.scaled_dot_product_attention(q, k, v, **options)
    assert dict(routed.variants) == {variant: 1}
    near(out, oracles.sdpa(q, k, v, **options))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.randn(7, 11)}], ids=described)
def test_gradients(options: dict[str, Any]) -> None:
    inputs = [t.requires_grad_() for t in qkv(kv_heads=2)]
    mask = options.get("attn_mask")
    if mask is not None:
        options = {"attn_mask": mask.clone().requires_grad_()}
        inputs.append(options["attn_mask"])
    with sdpa(backend="reference") as routed:
        out = F.scaled_dot_product_attention(*inputs[:3], **options, enable_gqa=True)
    wanted = oracles.sdpa(*inputs[:3], **options, enable_gqa=True)
    assert routed.routed == 1
    weights = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, inputs, weights), torch.autograd.grad(wanted, inputs, weights.double()), strict=True
    ):
        near(one, other)


def test_three_dimensions() -> None:
    q, k, v = (t[0] for t in qkv())
    mask = some_mask(4, 1, 11)
    with sdpa(backend="reference") as routed:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    near(out, oracles.sdpa(q, k, v, attn_mask=mask))
    assert dict(routed.variants) == {"allowed": 1}


def test_results_lie_as_a_model_reads_them() -> None:
    """Heads beside their head_dim, so that joining them copies nothing."""
    q, k, v = qkv()
    with sdpa(backend="reference"):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.shape == (2, 4, 7, 12)
    assert out.transpose(1, 2).is_contiguous()


def test_modules_of_torch_are_routed() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    wanted = layer(x, src_key_padding_mask=padding)
    with sdpa(backend="reference") as routed:
        actual = layer(x, src_key_padding_mask=padding)
    assert routed.routed == 1
    near(actual, wanted)


def test_autocast() -> None:
    q, k, v = qkv()
    mask = torch.randn(7, 11)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = TORCHS(q, k, v, attn_mask=mask)
        with sdpa(backend="reference") as routed:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert dict(routed.variants) == {"bias_bf16": 1}
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


# --- falling back -------------------------------------------------------------------------------------------

Q, K, V = qkv()


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ((Q, K, V), {"dropout_p": 1.0}, "dropout_p is 1.0, and kernels take 0 to below 1"),
        ((Q, K, V), {"dropout_p": -0.5}, "dropout_p is -0.5, and kernels take 0 to below 1"),
        ((Q, K, V), {"scale": -0.5}, "scale is -0.5, and kernels take a positive number"),
        ((Q, K[:, :1], V[:, :1]), {}, "q has 4 heads, k and v have 1, without enable_gqa"),
        ((Q, K[:1], V[:1]), {}, "the shapes of q, k and v disagree, or broadcast"),
        ((Q[0, 0], K[0, 0], V[0, 0]), {}, "q, k and v have 2, 2 and 2 dimensions"),
        ((Q[None], K[None], V[None]), {}, "q, k and v have 5, 5 and 5 dimensions"),
        ((Q, K, V.transpose(2, 3).contiguous().transpose(2, 3)), {}, "the last dimension of q, k or v is not contig"),
        ((Q, K, torch.nn.Parameter(V).as_subclass(type("Own", (Tensor,), {}))), {}, "there is a Own among the tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fallbacks(given: tuple[Tensor, ...], options: dict[str, Any], reason: str) -> None:
    with sdpa(backend="reference", explain=True) as routed:
        out = F.scaled_dot_product_attention(*given, **options)
    torch.testing.assert_close(out, TORCHS(*given, **options))
    (told,) = routed.reasons
    assert told.startswith(reason)
    assert routed.routed == 0
    assert f"1 since {reason}" in routed.report()


def test_tensors_on_the_cpu_fall_back_unless_asked_for() -> None:
    with sdpa() as routed:
        F.scaled_dot_product_attention(Q, K, V)
    assert routed.report() == ("0 calls on attngen\n1 calls on torch:\n  1 since q is on cpu, and kernels run on GPUs")


def test_a_wrong_backend_is_refused_before_any_call() -> None:
    """It would otherwise send every call to torch, with nothing but the report to tell."""
    with pytest.raises(CallError, match="backend must be one of .*, got 'refrence'; did you mean 'reference'"):
        sdpa(backend="refrence")


def test_the_reason_shows_a_mask_as_it_was_given() -> None:
    with sdpa(backend="reference") as routed, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(Q, K, V, attn_mask=some_mask(7, 5))
    assert list(routed.reasons) == [f"the mask of shape (7, 5) does not broadcast to {(*Q.shape[:3], K.shape[2])}"]


def test_errors_are_torchs_own() -> None:
    with sdpa(backend="reference"), pytest.raises(RuntimeError) as caught:
        F.scaled_dot_product_attention(Q, K, V, attn_mask=some_mask(7, 5))
    with pytest.raises(RuntimeError) as wanted:
        TORCHS(Q, K, V, attn_mask=some_mask(7, 5))
    assert str(caught.value) == str(wanted.value)
    with sdpa(backend="reference"), pytest.raises(IndexError):
        F.scaled_dot_product_attention(Q, K, V, attn_mask=some_mask(11))  # torch asks for two dimensions
    three, whole = torch.randn(2, 7, 8), torch.ones(1, 1, 7, 8, dtype=torch.int64)
    for given, mask in (
        ((three, three, three), torch.randn(2, 1, 7, 7)),
        ((three, None, three), None),
        ((three, 3, three), None),
        ((whole, whole, whole), torch.ones(7, 7, dtype=torch.int64)),
    ):
        told = []
        for _ in range(2):
            with sdpa(backend="reference", explain=True) as routed, pytest.raises((RuntimeError, TypeError)) as caught:
                (F.scaled_dot_product_attention if not told else TORCHS)(*given, attn_mask=mask)  # type: ignore[arg-type]
            told.append((type(caught.value), str(caught.value)))
            assert routed.routed == 0
        assert told[0] == told[1]


def test_report_of_each_call() -> None:
    with sdpa(backend="reference", explain=True) as routed:
        F.scaled_dot_product_attention(Q, K, V, attn_mask=some_mask(7, 11))
        F.scaled_dot_product_attention(Q, K, V, dropout_p=0.5)
        F.scaled_dot_product_attention(Q, K, V, dropout_p=1.0)
    assert routed.report().splitlines() == [
        "2 calls on attngen: allowed 1, full_dropout 1",
        "1 calls on torch:",
        "  1 since dropout_p is 1.0, and kernels take 0 to below 1",
        "1. q 2x4x7x8, k 2x4x11x8, v 2x4x11x12, mask 7x11 bool: allowed",
        "2. q 2x4x7x8, k 2x4x11x8, v 2x4x11x12: full_dropout",
        "3. q 2x4x7x8, k 2x4x11x8, v 2x4x11x12: torch, since dropout_p is 1.0, and kernels take 0 to below 1",
    ]


def test_inside_torch_func_and_compile_torch_decides() -> None:
    with sdpa(backend="reference") as routed:
        torch.func.vmap(F.scaled_dot_product_attention)(Q, K, V)
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, K, V), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(Q), TORCHS(Q, K, V))
    assert dict(routed.reasons) == {"a transform of torch.func is active": 1}
    assert routed.routed == 0


def test_forward_mode_derivatives_are_torchs() -> None:
    with sdpa(backend="reference") as routed, sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, torch.ones_like(Q))
        out = forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, K, V)).tangent
    wanted = torch.func.jvp(lambda q: oracles.sdpa(q, K, V), (Q,), (torch.ones_like(Q),))[1]
    assert out is not None
    near(out, wanted)
    assert dict(routed.reasons) == {"forward-mode differentiation is active": 1}


# --- hygiene ------------------------------------------------------------------------------------------------


def test_restored_after_an_error() -> None:
    with pytest.raises(KeyError), sdpa():
        assert F.scaled_dot_product_attention is not TORCHS
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS


def test_the_innermost_block_decides() -> None:
    with sdpa(backend="reference") as outer:
        F.scaled_dot_product_attention(Q, K, V)
        with sdpa() as inner:
            F.scaled_dot_product_attention(Q, K, V)
        F.scaled_dot_product_attention(Q, K, V)
    assert (outer.routed, outer.fell_back, inner.routed, inner.fell_back) == (2, 0, 0, 1)


def test_one_object_may_be_entered_again() -> None:
    block = sdpa(backend="reference")
    with block as first, block as second:
        F.scaled_dot_product_attention(Q, K, V)
    assert (first.routed, second.routed) == (0, 1)


def test_another_patch_over_ours_stays() -> None:
    def patch(*arguments: Any, **options: Any) -> Tensor:
        return below(*arguments, **options)

    with sdpa(backend="reference") as routed:
        below = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = patch
    try:
        assert F.scaled_dot_product_attention is patch
        torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V), TORCHS(Q, K, V))
        assert routed.routed == 0
        with sdpa(backend="reference") as again:
            F.scaled_dot_product_attention(Q, K, V)
        assert again.routed == 1
    finally:
        F.scaled_dot_product_attention = TORCHS


def test_other_threads_are_left_alone() -> None:
    """Two threads are inside blocks of their own, a third in none, all at the same time."""
    together = threading.Barrier(3)
    counts: dict[str, tuple[int, int]] = {}
    wanted = TORCHS(Q, K, V)
    wrong: list[str] = []

    def inside(name: str, calls: int) -> None:
        with sdpa(backend="reference") as routed:
            together.wait()
            for _ in range(calls):
                if not torch.allclose(F.scaled_dot_product_attention(Q, K, V), wanted, atol=1e-5):
                    wrong.append(name)
            together.wait()
        counts[name] = (routed.routed, routed.fell_back)

    threads = [threading.Thread(target=inside, args=(name, calls)) for name, calls in (("a", 20), ("b", 30))]
    for thread in threads:
        thread.start()
    together.wait()
    for _ in range(10):
        F.scaled_dot_product_attention(Q, K, V)
    together.wait()
    for thread in threads:
        thread.join()
    assert counts == {"a": (20, 0), "b": (30, 0)}
    assert not wrong


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_are_recomputed_the_same_way(reentrant: bool) -> None:
    def forward(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, K, V).sin()

    q = Q.clone().requires_grad_()
    with sdpa(backend="reference") as routed:
        out = checkpoint(forward, q, use_reentrant=reentrant)
        # the backward of a GPU runs in a thread of autograd
        worker = threading.Thread(target=out.sum().backward)
        worker.start()
        worker.join()
    wanted = Q.clone().requires_grad_()
    TORCHS(wanted, K, V).sin().sum().backward()
    assert routed.routed == 2
    assert routed.fell_back == 0
    assert q.grad is not None
    torch.testing.assert_close(q.grad, wanted.grad, rtol=1e-5, atol=1e-5)


def test_the_package_offers_it() -> None:
    assert attngen.integrations.sdpa is sdpa
