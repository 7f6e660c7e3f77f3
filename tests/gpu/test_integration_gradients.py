"""Training through the drop-ins, on the backward kernels of the shipped specs.

Gradients are compared with those of plain PyTorch in the same dtype, both against float64 or float32. The largest error
may be three times as large, as docs/training.md says.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attngen.integrations import sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.runtime.registry.lookup import Package
from tests.gpu.family import same
from tests.gpu.packages import (
    BATCH,
    HEADS,
    KV_HEADS,
    exact,
    flash_options,
    larger,
    model,
    no_worse,
    only_package,
    qkv,
)
from tests.integrations import oracles
from tests.integrations.flash_attn.test_flash_attn import OPTIONS as FLASH_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import OPTIONS as SDPA_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import described
from tests.integrations.transformers.families import MAKERS, batch, gradients, logits


def leaves(rows: int, keys: int, dim: int, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    return [t.requires_grad_() for t in qkv(rows, keys, dim, dtype, **options)]


def no_worse_gradients(grads: Any, plain: Any, exact: Any) -> None:
    size = max(float(wanted.abs().max()) for wanted in exact)  # with one key for each query dQ and dK are 0
    for one, other, wanted in zip(grads, plain, exact, strict=True):
        no_worse(one, other, wanted.double(), times=3, least=1e-3 * size)


# --- flash-attn's functions ---------------------------------------------------------------------------------


@only_package("flash_attn")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("given", FLASH_OPTIONS, ids=str)
def test_flash_attn(given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    options = flash_options(given)
    inputs = leaves(257, 300, dim, dtype)
    weights = torch.randn(BATCH, 257, HEADS, dim, device="cuda").to(dtype)
    grads = torch.autograd.grad(flash_attn.flash_attn_func(*inputs, **options), inputs, weights)
    exact = torch.autograd.grad(oracles.flash_attention(*inputs, **options)[0], inputs, weights.double())
    plain = torch.autograd.grad(oracles.flash_attention(*inputs, **options, compute=dtype)[0], inputs, weights)
    no_worse_gradients(grads, plain, exact)


@only_package("flash_attn")
@pytest.mark.parametrize("given", FLASH_OPTIONS, ids=str)
def test_flash_attn_varlen(given: dict[str, Any], only: Package) -> None:
    options = flash_options(given)
    lengths_q, lengths_k = (257, 130), (300, 165)
    starts_q, starts_k = (
        torch.tensor([0, n, n + m], dtype=torch.int32, device="cuda") for n, m in (lengths_q, lengths_k)
    )
    torch.manual_seed(3)
    inputs = [torch.randn(n, h, 64, device="cuda") for n, h in ((387, HEADS), (465, KV_HEADS), (465, KV_HEADS))]
    inputs = [t.bfloat16().requires_grad_() for t in inputs]
    weights = torch.randn(387, HEADS, 64, device="cuda").bfloat16()
    out = flash_attn.flash_attn_varlen_func(*inputs, starts_q, starts_k, 257, 300, **options)
    grads = torch.autograd.grad(out, inputs, weights)

    def by_sequence(compute: torch.dtype) -> tuple[Tensor, ...]:
        parts = []
        for i in range(2):
            rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
            own = dict(options)
            slopes = own.get("alibi_slopes")
            if slopes is not None and slopes.dim() == 2:
                own["alibi_slopes"] = slopes[i]
            one = [t[None, where] for t, where in zip(inputs, (rows, keys, keys), strict=True)]
            parts.append(oracles.flash_attention(*one, **own, compute=compute)[0][0])
        return torch.autograd.grad(torch.cat(parts), inputs, weights.to(compute))

    no_worse_gradients(grads, by_sequence(torch.bfloat16), by_sequence(torch.float64))


@only_package("flash_attn")
def test_flash_attn_packed_tensors_get_one_gradient(only: Package) -> None:
    torch.manual_seed(2)
    packed = torch.randn(BATCH, 200, 3, HEADS, 64, device="cuda").bfloat16().requires_grad_()
    weights = torch.randn(BATCH, 200, HEADS, 64, device="cuda").bfloat16()
    grad = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), packed, weights)
    split = torch.autograd.grad(flash_attn.flash_attn_func(*packed.unbind(2), causal=True), packed, weights)
    assert same(grad, split)


@only_package("flash_attn")
def test_flash_attn_compiles_with_its_backward(only: Package) -> None:
    inputs = leaves(257, 257, 64, torch.bfloat16)
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, causal=True, window_size=(99, 0)).float().square().sum()

    grads = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for one, wanted in zip(grads, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        assert float((one - wanted).abs().max()) <= 1e-2 * float(wanted.abs().max())


# --- scaled_dot_product_attention ---------------------------------------------------------------------------


def dense_sdpa(
    q: Tensor, k: Tensor, v: Tensor, compute: torch.dtype, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention by plain operations in ``compute``; a row that sees no key gives 0, and takes no gradient.

    Dropout multiplies the probabilities by ``factors``.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1).to(compute) for t in (k, v))
    scores = q.to(compute) @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if is_causal:
        hidden |= torch.ones_like(hidden).triu(1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden |= ~attn_mask
    elif attn_mask is not None:
        hidden |= attn_mask.isneginf()
        scores = scores + attn_mask.masked_fill(attn_mask.isneginf(), 0.0).to(compute)
    p = torch.softmax(scores.masked_fill(hidden, torch.finfo(compute).min), dim=-1).masked_fill(hidden, 0.0)
    return (p if factors is None else p * factors.to(compute)) @ v


@only_package("sdpa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("variant", "given"), SDPA_OPTIONS, ids=described)
def test_sdpa(variant: str, given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    if variant == "bias_fp32":
        variant = {torch.bfloat16: "bias_bf16", torch.float16: "bias_fp16"}[dtype]
    inputs = leaves(257, 300, dim, dtype, heads_first=True)
    options = larger(given, 257, 300, dtype)
    weights = torch.randn(BATCH, HEADS, 257, dim, device="cuda").to(dtype)
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(*inputs, **options, enable_gqa=True)
    assert dict(routed.variants) == {variant: 1}, routed.report()
    grads = torch.autograd.grad(out, inputs, weights)
    plain, wanted = (
        torch.autograd.grad(dense_sdpa(*inputs, compute, **options), inputs, weights.to(compute))
        for compute in (dtype, torch.float64)
    )
    no_worse_gradients(grads, plain, wanted)


@only_package("sdpa")
@pytest.mark.parametrize("of_mask", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_sdpa_with_rows_of_the_least_value(dim: int, dtype: torch.dtype, of_mask: torch.dtype, only: Package) -> None:
    """Rows of ``finfo.min`` are the mean of the values in torch; masks of padding have such rows."""
    if of_mask not in (dtype, torch.float32):
        pytest.skip("torch refuses such masks")
    torch.manual_seed(dim)
    inputs = leaves(257, 300, dim, dtype, heads_first=True)
    mask = torch.randn(BATCH, HEADS, 257, 300, device="cuda").to(of_mask)
    least = torch.finfo(of_mask).min
    mask[:, :, ::3], mask[:, :, 1::6, 7:] = least, least
    mask[:, :, 2::12], mask[:, :, 2::12, 40:] = -torch.inf, least
    weights = torch.randn(BATCH, HEADS, 257, dim, device="cuda").to(dtype)
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    assert routed.routed == 1, routed.report()
    results = [out, *torch.autograd.grad(out, inputs, weights)]
    exact = dense_sdpa(*inputs, torch.float64, attn_mask=mask)
    for one, wanted in zip(results, [exact, *torch.autograd.grad(exact, inputs, weights.double())], strict=True):
        assert float((one.double() - wanted).norm() / wanted.norm()) < 2e-2


@only_package("sdpa")
def test_sdpa_leaves_a_mask_that_learns_to_torch(only: Package) -> None:
    q, k, v = leaves(100, 100, 64, torch.bfloat16, heads_first=True)
    bias = torch.randn(HEADS, 100, 100, device="cuda").bfloat16().requires_grad_()
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    assert dict(routed.reasons) == {"the mask asks for a gradient": 1}
    (gradient,) = torch.autograd.grad(out.float().square().sum(), bias)
    assert gradient.any()


@only_package("sdpa")
@pytest.mark.parametrize("reentrant", [False, True])
def test_sdpa_in_checkpointed_layers_under_autocast(reentrant: bool, only: Package) -> None:
    """The backward recomputes the layers in a thread of autograd, there on the same kernels."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(256, nhead=4, dropout=0.0, batch_first=True, device="cuda") for _ in range(2)
    )
    x = torch.randn(2, 150, 256, device="cuda", requires_grad=True)

    def all_gradients(kept: bool) -> list[Tensor]:
        layers.zero_grad(set_to_none=True)
        x.grad = None
        y = x
        with torch.autocast("cuda", torch.bfloat16):
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=reentrant) if kept else layer(y)
        y.float().square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    with sdpa() as routed:
        plain, kept = all_gradients(False), all_gradients(True)
    assert dict(routed.variants) == {"full": 2 + 2 * 2}, routed.report()
    assert len(plain) == len(kept) == 1 + sum(1 for _ in layers.parameters())
    for one, other in zip(kept, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


# --- transformers -------------------------------------------------------------------------------------------


def near(actual: dict[str, Tensor], plain: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that each gradient errs at most twice as much as eager's in bf16, or by one unit of the largest one.

    The error of fewer than 16 numbers is itself uncertain by one over the root of how many they are.
    """
    size = {name: float(gradient.square().mean().sqrt()) for name, gradient in wanted.items()}
    unit = 2**-8 * max(size.values())
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.isfinite(actual[name]).all(), name
        error, allowed = (float((t[name].float() - gradient).square().mean().sqrt()) for t in (actual, plain))
        doubt = gradient.numel() ** -0.5 if gradient.numel() < 16 else 0.0
        assert error <= 2 * (1 + doubt) * allowed + unit, (name, error, allowed, unit)


def of_batch(one: Any, family: str, padding: str, times: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return gradients(one, logits(one, batch(family, padding, "cuda", dtype, times)))


@only_package("transformers")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", MAKERS)
def test_transformers(family: str, padding: str, only: Package) -> None:
    times = {"none": 10, "left": 1}[padding]  # several tiles, and one
    if family == "t5":
        times = 1  # its logits are not scaled: with more keys eager's own gradients are noise in bf16
    actual, plain = (
        of_batch(model(family, name, all_experts=True), family, padding, times) for name in ("attngen", "eager")
    )
    near(actual, plain, of_batch(exact(family, all_experts=True), family, padding, times, torch.float32))


@only_package("transformers")
def test_transformers_with_gaps_in_the_padding(only: Package) -> None:
    """A mask that is known as a tensor only; that of T5 carries a bias that learns."""
    for family in ("llama", "gemma2", "t5"):
        made = []
        for one, dtype in (
            (model(family, "attngen", all_experts=True), torch.bfloat16),
            (model(family, "eager", all_experts=True), torch.bfloat16),
            (exact(family, all_experts=True), torch.float32),
        ):
            given = batch(family, "none", "cuda", dtype)
            given.inputs["attention_mask"][:, 3] = 0
            given.inputs["attention_mask"][1, 9:11] = 0
            made.append(gradients(one, logits(one, given)))
        near(*made)


@only_package("transformers")
@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_with_gradient_checkpointing(reentrant: bool, only: Package) -> None:
    given = batch("mistral", "left", "cuda", torch.bfloat16, times=10)
    trained = model("mistral", "attngen", all_experts=True)
    wanted = gradients(trained, logits(trained, given))
    trained.train()
    trained.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trained.enable_input_require_grads()
    try:
        actual = gradients(trained, logits(trained, given))
    finally:
        trained.gradient_checkpointing_disable()
        trained.disable_input_require_grads()
        trained.eval()
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-2, atol=1e-2 * float(gradient.abs().max()))


@only_package("transformers")
def test_transformers_under_autocast(only: Package) -> None:
    """Weights in float32, attention in bf16."""
    given = batch("llama", "left", "cuda", torch.float32, times=10)
    by_attention = []
    for name in ("attngen", "eager"):
        trained = model("llama", name, all_experts=True, dtype=torch.float32)
        with torch.autocast("cuda", torch.bfloat16):
            out = logits(trained, given)
        by_attention.append(gradients(trained, out))
    wanted_model = model("llama", "eager", all_experts=True, dtype=torch.float32)
    near(*by_attention, gradients(wanted_model, logits(wanted_model, given)))
