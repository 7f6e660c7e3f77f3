"""Dropout through the drop-ins, on the reference: the pairs that a call draws are dropped, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attngen.integrations.transformers as attngen_transformers
from attngen.integrations import sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from tests.integrations import oracles
from tests.integrations.drops import factors, next_dense_factors, next_factors
from tests.integrations.flash_attn.test_flash_attn import BATCH, DIM, HEADS, KV_HEADS, near, options_of, qkv
from tests.integrations.flash_attn.test_flash_attn import OPTIONS as FLASH_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import OPTIONS as SDPA_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import described
from tests.integrations.torch_sdpa.test_sdpa import qkv as heads_first
from tests.integrations.transformers import families
from tests.integrations.transformers.families import MAKERS, batch, gradients, logits
from tests.sampling import few, sampled

RATE = 0.25


# --- flash-attn's functions ---------------------------------------------------------------------------------


@few("given", FLASH_OPTIONS, ids=str, always=range(0, 999, 3))
def test_flash_attn(given: dict[str, Any]) -> None:
    """Outputs, the log-sum-exp of the softmax before dropout, and gradients through both."""
    options = options_of(given)
    inputs = [t.requires_grad_() for t in qkv()]
    drops = factors(5, RATE, BATCH, HEADS, 9, 13)
    out, lse, probabilities = flash_attn.flash_attn_func(*inputs, RATE, **options, return_attn_probs=True)
    wanted = oracles.flash_attention(*inputs, **options, factors=drops)
    near((out, lse), wanted)
    assert probabilities.numel() == 0
    assert float((drops == 0).float().mean()) == pytest.approx(RATE, abs=0.1)
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), inputs, weights)
    near(gradients, torch.autograd.grad(wanted, inputs, tuple(w.double() for w in weights)))


@pytest.mark.parametrize("given", [{}, {"window_size": (3, 2)}, {"alibi": (HEADS,), "causal": True}], ids=str)
def test_flash_attn_varlen(given: dict[str, Any]) -> None:
    options = options_of(given)
    starts_q, starts_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ((5, 16), (7, 10)))
    q, k, v = torch.randn(16, HEADS, DIM), torch.randn(10, KV_HEADS, DIM), torch.randn(10, KV_HEADS, DIM)
    torch.manual_seed(6)
    drops = next_factors(RATE, [(5, 7), (11, 3)], HEADS)
    torch.manual_seed(6)
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 11, 7, RATE, **options)
    for i, mine in enumerate(drops):
        rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        wanted = oracles.flash_attention(q[None, rows], k[None, keys], v[None, keys], **options, factors=mine[None])
        near(out[rows], wanted[0][0])


def test_packed_forms_of_flash_attn_draw_the_same() -> None:
    packed = torch.randn(BATCH, 9, 3, HEADS, DIM)
    q, k, v = packed.unbind(2)
    flat, starts = packed.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32)
    results = []
    for call in (
        lambda: flash_attn.flash_attn_func(q, k, v, RATE, causal=True),
        lambda: flash_attn.flash_attn_qkvpacked_func(packed, RATE, causal=True),
        lambda: flash_attn.flash_attn_kvpacked_func(q, packed[:, :, 1:], RATE, causal=True),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(flat, starts, 9, RATE, causal=True),
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            flat[:, 0], flat[:, 1:], starts, starts, 9, 9, RATE, causal=True
        ),
    ):
        torch.manual_seed(7)
        results.append(call().view(BATCH, 9, HEADS, DIM))
    for one in results[1:]:
        torch.testing.assert_close(one, results[0])
    near(results[0], oracles.flash_attention(q, k, v, causal=True, factors=factors(7, RATE, BATCH, HEADS, 9, 9))[0])


@pytest.mark.exhaustive
def test_a_compiled_program_draws_as_an_eager_one() -> None:
    """Activation checkpointing in it drops the same again."""
    inputs = [t.requires_grad_() for t in qkv()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, RATE, causal=True).sin()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v) + checkpoint(attend, q, k, v, use_reentrant=False)

    def step(run: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(8)
        out = run(*inputs)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    near(step(compiled), step(program))
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


# --- scaled_dot_product_attention ---------------------------------------------------------------------------


@few("kv_heads", [4, 1])
@pytest.mark.parametrize(("variant", "options"), SDPA_OPTIONS, ids=described)
def test_sdpa(variant: str, options: dict[str, Any], kv_heads: int) -> None:
    """Against torch's own function for a mask of dropout that is known."""
    inputs = [t.requires_grad_() for t in heads_first(kv_heads=kv_heads)]
    stays = factors(9, RATE, 2, 4, 7, 11) > 0
    with sdpa(backend="reference") as routed:
        out = F.scaled_dot_product_attention(*inputs, dropout_p=RATE, **options, enable_gqa=True)
    assert dict(routed.variants) == {f"{variant}_dropout": 1}
    given = {"attn_mask": None, "is_causal": False, "scale": None, **options}
    mask = given["attn_mask"]
    if mask is not None:
        mask = torch.where(mask, 0.0, -math.inf).double() if mask.dtype == torch.bool else mask.double()
    wanted, _ = torch.ops.aten._scaled_dot_product_attention_math(
        *(t.double() for t in inputs), mask, RATE, given["is_causal"], stays, scale=given["scale"], enable_gqa=True
    )
    near(out, wanted)
    weights = torch.randn_like(out)
    near(torch.autograd.grad(out, inputs, weights), torch.autograd.grad(wanted, inputs, weights.double()))


def test_as_many_are_dropped_as_by_torch() -> None:
    """Equal logits and values of 1: the output counts what is kept, and its spread is that of as many coins."""
    keys = 512
    q, k = torch.zeros(2, 4, 256, 8), torch.zeros(2, 4, keys, 8)
    spread = math.sqrt(RATE / (1 - RATE) / keys)
    torch.manual_seed(10)
    with sdpa(backend="reference") as routed:
        for function in (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
            rows = function(q, k, torch.ones_like(k), dropout_p=RATE)[..., 0]
            assert abs(float(rows.mean()) - 1) <= 5 * spread / math.sqrt(rows.numel())
            assert float(rows.std()) == pytest.approx(spread, rel=0.1)
    assert routed.routed == 1


def test_the_generator_moves_for_calls_that_drop_and_no_others() -> None:
    q, k, v = heads_first()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with sdpa(backend="reference"):
        F.scaled_dot_product_attention(q, k, v)
        assert torch.equal(torch.get_rng_state(), before)
        first, second = (F.scaled_dot_product_attention(q, k, v, dropout_p=RATE) for _ in "ab")
        torch.manual_seed(11)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=RATE), first)
    assert not torch.equal(first, second)


def test_modules_of_torch_drop_while_they_train() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with sdpa(backend="reference") as routed:
        layer(x)
        layer(x, src_key_padding_mask=padding)
        layer.eval()(x)
    assert dict(routed.variants) == {"full_dropout": 1, "bias_fp32_dropout": 1, "full": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_drop_the_same_again(reentrant: bool) -> None:
    q, k, v = (t.requires_grad_() for t in heads_first())

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=RATE).sin()

    def step(kept: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(12)
        out = checkpoint(forward, q, k, v, use_reentrant=reentrant) if kept else forward(q, k, v)
        for tensor in (q, k, v):
            tensor.grad = None
        out.square().sum().backward()
        return tuple(t.grad.clone() for t in (q, k, v))

    with sdpa(backend="reference") as routed:
        near(step(True), step(False))
    assert dict(routed.variants) == {"full_dropout": 3}


# --- transformers -------------------------------------------------------------------------------------------


def train(model: Any, rate: float = RATE) -> Any:
    """Put a model into training mode, with dropout in its attention alone."""
    model.train()
    for module in model.modules():
        for name in ("attention_dropout", "dropout"):
            if "Attention" in type(module).__name__ and isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)
    return model


@pytest.fixture
def dropping_as_attngen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Give eager attention the numbers that attngen's would draw; the rates of its calls."""
    rates: list[float] = []

    def dropout(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return given
        rates.append(p)
        return given * next_dense_factors(p, *given.shape).to(given.dtype)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    return rates


@sampled(always=2, padding=["none", "left"], family=[*MAKERS])
def test_families_train_as_eager_does(family: str, padding: str, dropping_as_attngen: list[float]) -> None:
    given = batch(family, padding)
    made = []
    for implementation in ("attngen", "eager"):
        model = train(families.make(family, head_dim=8, implementation=implementation))
        torch.manual_seed(13)
        actual = logits(model, given)
        made.append((actual.detach(), gradients(model, actual)))
        assert bool(dropping_as_attngen) == (implementation == "eager")
    assert set(dropping_as_attngen) == {RATE}
    (ours, our_gradients), (theirs, their_gradients) = made
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())
    assert our_gradients.keys() == their_gradients.keys()
    # T5 scales no logit: float32 loses up to 4e-5 of a gradient in eager attention and in ours, beside float64
    loss = 1e-4 if family == "t5" else 2e-5
    for name, wanted in their_gradients.items():
        assert float((our_gradients[name] - wanted).abs().max()) <= loss * max(1.0, float(wanted.abs().max())), name


def test_a_module_that_does_not_train_drops_nothing() -> None:
    q, k, v = heads_first()
    module = torch.nn.Module()
    before = torch.get_rng_state()
    actual, plain = (
        attngen_transformers.attention(module.eval(), q, k, v, None, p, is_causal=False)[0] for p in (0.5, 0.0)
    )
    assert torch.equal(actual, plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(
        attngen_transformers.attention(module.train(), q, k, v, None, 0.5, is_causal=False)[0], plain
    )


def test_packed_sequences_drop_too() -> None:
    starts = torch.tensor([0, 6, 16], dtype=torch.int32)
    packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 10, "max_length_k": 10}
    q, k, v = (torch.randn(1, 4, 16, 8) for _ in "qkv")
    torch.manual_seed(14)
    drops = next_factors(RATE, [(6, 6), (10, 10)], 4)
    torch.manual_seed(14)
    out, _ = attngen_transformers.attention(torch.nn.Module(), q, k, v, None, RATE, is_causal=True, **packing)
    for part, mine in zip((slice(0, 6), slice(6, 16)), drops, strict=True):
        one = [t[:, :, part].transpose(1, 2) for t in (q, k, v)]
        near(out[:, part], oracles.flash_attention(*one, causal=True, factors=mine[None])[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("padding", [pytest.param("none", marks=pytest.mark.exhaustive), "left"])
def test_a_compiled_model_draws_as_an_eager_one(padding: str) -> None:
    """Also where its padding is a tensor of bools, and that of the eager one a span."""
    given = batch("llama", padding)
    model = train(families.make("llama", head_dim=8, implementation="attngen"))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, model):
        torch.manual_seed(16)
        results.append(gradients(model, logits(run, given, use_cache=False)))
    for name, wanted in results[1].items():
        torch.testing.assert_close(results[0][name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_drops_the_same_again(reentrant: bool) -> None:
    given = batch("mistral", "left")
    results = []
    for checkpointed in (False, True):
        model = train(families.make("mistral", head_dim=8, implementation="attngen"))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(15)
        results.append(gradients(model, logits(model, given)))
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted)
