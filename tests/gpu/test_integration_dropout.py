"""Dropout through the drop-ins, on kernels of the shipped specs: the pairs that a call draws are dropped, both ways.

Results are compared with those of plain PyTorch in the same dtype that drops the same pairs, both against float64 or
float32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attngen.errors import NoKernelError
from attngen.integrations import sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.runtime.registry.lookup import Package
from tests.gpu.family import same
from tests.gpu.packages import BATCH, HEADS, KV_HEADS, flash_options, larger, no_worse, only_package, qkv
from tests.gpu.test_integration_gradients import dense_sdpa, leaves, near, no_worse_gradients
from tests.integrations import oracles
from tests.integrations.drops import factors, next_dense_factors, next_factors
from tests.integrations.flash_attn.test_flash_attn import OPTIONS as FLASH_OPTIONS
from tests.integrations.test_dropout import train
from tests.integrations.torch_sdpa.test_sdpa import OPTIONS as SDPA_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import described
from tests.integrations.transformers import families
from tests.integrations.transformers.families import batch, gradients, logits

#: Its factor is 2, which has no rounding error in bf16.
RATE = 0.5

#: Calls that shipped kernels with dropout serve.
FLASH = [given for given in FLASH_OPTIONS if "alibi" not in given]
SDPA = [(variant, given) for variant, given in SDPA_OPTIONS if variant != "allowed_by_head"]


# --- flash-attn's functions ---------------------------------------------------------------------------------


@only_package("flash_attn")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("given", FLASH, ids=str)
def test_flash_attn(given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    options = flash_options(given)
    inputs = leaves(257, 300, dim, dtype)
    weights = torch.randn(BATCH, 257, HEADS, dim, device="cuda").to(dtype)
    drops = factors(1, RATE, BATCH, HEADS, 257, 300, "cuda")
    out, lse, probabilities = flash_attn.flash_attn_func(*inputs, RATE, **options, return_attn_probs=True)
    assert probabilities.numel() == 0
    grads = torch.autograd.grad(out, inputs, weights)
    (exact, exact_lse), (plain, _) = (
        oracles.flash_attention(*inputs, **options, factors=drops, compute=c) for c in (torch.float64, dtype)
    )
    no_worse(out.detach(), plain.detach(), exact.detach())
    torch.testing.assert_close(
        lse.detach().double(), exact_lse.detach(), rtol=1e-3, atol=2e-3
    )  # that of the softmax before dropout
    no_worse_gradients(
        grads, torch.autograd.grad(plain, inputs, weights), torch.autograd.grad(exact, inputs, weights.double())
    )


@only_package("flash_attn")
@pytest.mark.parametrize(
    "given", [{}, {"causal": True}, {"window_size": (40, 80)}, {"softcap": 1.5, "causal": True}], ids=str
)
def test_flash_attn_varlen(given: dict[str, Any], only: Package) -> None:
    lengths = [(257, 300), (130, 165)]
    starts_q, starts_k = (
        torch.tensor([0, n, n + m], dtype=torch.int32, device="cuda") for n, m in zip(*lengths, strict=True)
    )
    torch.manual_seed(3)
    inputs = [torch.randn(n, h, 64, device="cuda") for n, h in ((387, HEADS), (465, KV_HEADS), (465, KV_HEADS))]
    inputs = [t.bfloat16().requires_grad_() for t in inputs]
    weights = torch.randn(387, HEADS, 64, device="cuda").bfloat16()
    torch.manual_seed(2)
    drops = next_factors(RATE, lengths, HEADS, "cuda")
    torch.manual_seed(2)
    out = flash_attn.flash_attn_varlen_func(*inputs, starts_q, starts_k, 257, 300, RATE, **given)

    def by_sequence(compute: torch.dtype) -> Tensor:
        parts = []
        for i in range(2):
            rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
            one = [t[None, where] for t, where in zip(inputs, (rows, keys, keys), strict=True)]
            parts.append(oracles.flash_attention(*one, **given, factors=drops[i][None], compute=compute)[0][0])
        return torch.cat(parts)

    plain, exact = by_sequence(torch.bfloat16), by_sequence(torch.float64)
    no_worse(out.detach(), plain.detach(), exact.detach())
    no_worse_gradients(
        torch.autograd.grad(out, inputs, weights),
        torch.autograd.grad(plain, inputs, weights),
        torch.autograd.grad(exact, inputs, weights.double()),
    )


@only_package("flash_attn")
def test_seeds_decide_and_a_rate_of_zero_changes_nothing(only: Package) -> None:
    packed = torch.randn(BATCH, 200, 3, HEADS, 64, device="cuda").bfloat16()
    torch.manual_seed(3)
    first, second = (flash_attn.flash_attn_qkvpacked_func(packed, 0.1, causal=True) for _ in "ab")
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    plain = flash_attn.flash_attn_qkvpacked_func(packed, causal=True)
    assert same((flash_attn.flash_attn_qkvpacked_func(packed, 0.0, causal=True),), (plain,))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert same((flash_attn.flash_attn_qkvpacked_func(packed, 0.1, causal=True),), (first,))
    assert not torch.equal(first, second)


@only_package("flash_attn")
def test_flash_attn_compiles_and_keeps_its_numbers_for_the_backward(only: Package) -> None:
    """The output is linear in v: <dO, O> = <dV, V> for each KV head, if forward and backward dropped the same."""
    q, k, v = leaves(257, 257, 64, torch.bfloat16)
    above = torch.randn(BATCH, 257, HEADS, 64, device="cuda").bfloat16()
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, RATE, causal=True)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=False)

    for program in (attend, checkpointed):
        compiled = torch.compile(program, fullgraph=True)
        outs = []
        for _ in range(2):
            out = compiled(q, k, v)
            (dv,) = torch.autograd.grad(out, v, above)
            left = (above.double() * out.detach().double()).sum(dim=(1, 3)).view(BATCH, KV_HEADS, -1).sum(-1)
            right = (dv.double() * v.detach().double()).sum(dim=(1, 3))
            torch.testing.assert_close(left, right, rtol=3e-2, atol=3e-2 * float(left.abs().max()))
            outs.append(out.detach())
        assert not torch.equal(*outs)


@only_package("flash_attn")
def test_flash_attn_says_what_to_build(only: Package) -> None:
    with pytest.raises(NoKernelError) as caught:
        flash_attn.flash_attn_func(*qkv(8, 8, 64, torch.float32), 0.1, causal=True)
    assert "variants that would serve it: causal_dropout, window_dropout" in str(caught.value)
    assert "dtype is bf16, the call has fp32" in str(caught.value)
    slopes = torch.ones(HEADS, device="cuda")
    with pytest.raises(NoKernelError, match="no shipped spec has 'window_alibi_dropout': declare it in your own"):
        flash_attn.flash_attn_func(*qkv(8, 8, 64, torch.bfloat16), 0.1, alibi_slopes=slopes)


# --- scaled_dot_product_attention ---------------------------------------------------------------------------


@only_package("sdpa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("variant", "given"), SDPA, ids=described)
def test_sdpa(variant: str, given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    variant = variant.replace("fp32", {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]) + "_dropout"
    inputs = leaves(257, 300, dim, dtype, heads_first=True)
    options = larger(given, 257, 300, dtype)
    weights = torch.randn(BATCH, HEADS, 257, dim, device="cuda").to(dtype)
    drops = factors(4, RATE, BATCH, HEADS, 257, 300, "cuda")
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(*inputs, dropout_p=RATE, **options, enable_gqa=True)
    assert dict(routed.variants) == {variant: 1}, routed.report()
    plain, exact = (dense_sdpa(*inputs, c, **options, factors=drops) for c in (dtype, torch.float64))
    no_worse(out.detach(), plain.detach(), exact.detach())
    no_worse_gradients(
        torch.autograd.grad(out, inputs, weights),
        torch.autograd.grad(plain, inputs, weights),
        torch.autograd.grad(exact, inputs, weights.double()),
    )


@only_package("sdpa")
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_by_torch(rate: float, only: Package) -> None:
    """Equal logits and values of 1: the output counts what is kept, and its spread is that of as many coins."""
    keys = 1024
    q, k = (torch.zeros(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (2048, keys))
    v = torch.ones_like(k)
    with sdpa() as routed:
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=rate).float()[..., 0]
    assert routed.routed == 1, routed.report()
    theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=rate).float()[..., 0]
    spread = math.sqrt(rate / (1 - rate) / keys)
    assert abs(float(ours.mean()) - 1) <= 5 * spread / math.sqrt(ours.numel()) + 2e-3  # and the rounding of outputs
    assert float(ours.std()) == pytest.approx(spread, rel=0.1)
    # SDPA's kernels may round the rate to a multiple of 1/256
    assert float(theirs.mean()) == pytest.approx(float(ours.mean()), rel=3e-2)
    assert float(theirs.std()) == pytest.approx(float(ours.std()), rel=0.1)


@only_package("sdpa")
def test_sdpa_falls_back_to_the_dropout_of_torch(only: Package) -> None:
    """The reason is found before anything is drawn, also the first time."""
    q, k, v = qkv(100, 100, 64, torch.float32, heads_first=True)
    with sdpa() as routed:
        for _ in range(2):
            torch.manual_seed(5)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=RATE, enable_gqa=True)
            torch.manual_seed(5)
            plain = torch._C._nn.scaled_dot_product_attention(q, k, v, dropout_p=RATE, enable_gqa=True)
            assert torch.equal(out, plain)
    assert (routed.routed, routed.fell_back) == (0, 2)
    assert "dtype is bf16, the call has fp32" in routed.report()


@only_package("sdpa")
def test_replays_of_a_graph_draw_again(only: Package) -> None:
    q, k, v = qkv(128, 128, 64, torch.bfloat16, heads_first=True)

    def step() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=RATE, is_causal=True, enable_gqa=True)

    with sdpa() as routed:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    assert routed.routed == 2, routed.report()
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert torch.isfinite(seen[0]).all()
    assert not torch.equal(*seen)


@only_package("sdpa")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_under_autocast_drop_the_same_again(reentrant: bool, only: Package) -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(256, nhead=4, dropout=0.1, batch_first=True, device="cuda") for _ in range(2)
    )
    x = torch.randn(2, 150, 256, device="cuda", requires_grad=True)
    padding = torch.zeros(2, 150, dtype=torch.bool, device="cuda")
    padding[1, 100:] = True

    def all_gradients(kept: bool) -> list[Tensor]:
        layers.zero_grad(set_to_none=True)
        x.grad = None
        torch.manual_seed(6)
        y = x
        with torch.autocast("cuda", torch.bfloat16):
            for layer, mask in zip(layers, (None, padding), strict=True):
                y = checkpoint(layer, y, None, mask, use_reentrant=reentrant) if kept else layer(y, None, mask)
        y.float().square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    with sdpa() as routed:
        plain, kept = all_gradients(False), all_gradients(True)
    assert dict(routed.variants) == {"full_dropout": 3, "bias_bf16_dropout": 3}, routed.report()
    assert len(plain) == len(kept) == 1 + sum(1 for _ in layers.parameters())
    for one, other in zip(kept, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


# --- transformers -------------------------------------------------------------------------------------------

#: Families all of whose layers have kernels with dropout; GPT-OSS has its sinks by sigmoid(lse − sink).
SERVED = ("llama", "mistral", "gemma3", "qwen3", "gpt_oss", "modernbert", "whisper", "t5")


def trained(family: str, implementation: str, padding: str, times: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of a model that trains with dropout in its attention alone."""
    model = families.make(family, 64, implementation, "cuda", torch.bfloat16, all_experts=True).to(dtype)
    if family == "t5":  # does not scale logits, but begins with weights that do; else its gradients are noise in bf16
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("Attention.q.weight"):
                    parameter.mul_(64**-0.5)
    torch.manual_seed(7)
    return gradients(model, logits(train(model, RATE), batch(family, padding, "cuda", dtype, times)))


@pytest.fixture
def dropping_as_attngen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give eager attention the numbers that attngen's would draw."""

    def dropout(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return given
        return given * next_dense_factors(p, *given.shape, "cuda").to(given.dtype)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


@only_package("transformers")
@pytest.mark.filterwarnings("error:attention runs on the slow reference")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", SERVED)
@pytest.mark.usefixtures("dropping_as_attngen")
def test_transformers(family: str, padding: str, only: Package) -> None:
    times = 1 if family == "t5" else {"none": 10, "left": 1}[padding]  # as in test_integration_gradients
    grads, plain = (trained(family, name, padding, times, torch.bfloat16) for name in ("attngen", "eager"))
    near(grads, plain, trained(family, "eager", padding, times, torch.float32))


@only_package("transformers")
@pytest.mark.usefixtures("dropping_as_attngen")
def test_transformers_without_a_kernel_warn_and_run_the_reference(only: Package) -> None:
    with pytest.warns(RuntimeWarning, match="no shipped spec has 'softcap_dropout'"):
        grads = trained("gemma2", "attngen", "none", 1, torch.bfloat16)
    near(grads, *(trained("gemma2", "eager", "none", 1, dtype) for dtype in (torch.bfloat16, torch.float32)))


@only_package("transformers")
def test_packed_sequences_of_transformers(only: Package) -> None:
    """By cu_seqlens: seeds decide, and training drops where evaluation does not."""
    model = train(families.make("llama", 64, "attngen", "cuda", torch.bfloat16), RATE)
    ids = torch.randint(3, families.VOCABULARY, (1, 221), device="cuda")
    offsets = torch.tensor([0, 150, 151, 221], device="cuda", dtype=torch.int32)
    positions = torch.cat([torch.arange(n, device="cuda") for n in (150, 1, 70)])[None]
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 150, "max_length_k": 150}
    outputs = []
    for seed in (8, 8, 9):
        torch.manual_seed(seed)
        outputs.append(model(input_ids=ids, position_ids=positions, use_cache=False, **packing).logits.detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    model.eval()
    plain = [model(input_ids=ids, position_ids=positions, use_cache=False, **packing).logits.detach() for _ in "ab"]
    assert torch.equal(*plain)
    assert not torch.equal(plain[0], outputs[0])
