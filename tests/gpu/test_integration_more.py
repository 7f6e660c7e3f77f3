"""More of the drop-ins on kernels of the shipped specs: torch's CausalBias, other head dims and float32, version 3 of
flash-attn, forward and backward by themselves, static caches, masks that are added beside softcap.

Errors are compared with those that plain PyTorch makes in the same dtype, both against float64 or float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attngen.integrations import sdpa
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.transformers import implementation as attngen_transformers
from attngen.runtime.registry.lookup import Package
from tests.gpu.packages import BATCH, HEADS, KV_HEADS, exact, model, no_worse, only_package
from tests.gpu.test_integration_gradients import dense_sdpa, leaves, no_worse_gradients
from tests.integrations import oracles
from tests.integrations.flash_attn.test_flash_passes import merged
from tests.integrations.transformers import families
from tests.integrations.transformers.families import batch, logits
from tests.sampling import sampled

DIMS = [(80, 80), (96, 96), (112, 112), (256, 256), (192, 128)]
DTYPES = [torch.bfloat16, torch.float16]


def of_dims(rows: int, keys: int, dims: tuple[int, int], dtype: torch.dtype, *, heads_first: bool = False) -> Any:
    """Return leaves q, k and v whose head dims are those of q and k, and of v."""
    q, k, _ = leaves(rows, keys, dims[0], dtype, heads_first=heads_first)
    return q, k, leaves(rows, keys, dims[1], dtype, heads_first=heads_first)[2]


def compare(out: Tensor, inputs: Any, wanted: Any, dtype: torch.dtype) -> None:
    """Compare an output and its gradients; ``wanted`` gives the output of some inputs, computed in a dtype.

    Exact gradients are those of inputs in float64: where they pass through one of 16 bits, they are rounded to it.
    """
    weights = torch.randn_like(out)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    plain, precise = wanted(inputs, dtype), wanted(wide, torch.float64)
    no_worse(out.detach(), plain.detach(), precise.detach())
    gradients = torch.autograd.grad(out, inputs, weights)
    no_worse_gradients(
        gradients, torch.autograd.grad(plain, inputs, weights), torch.autograd.grad(precise, wide, weights.double())
    )


# --- flash-attn ---------------------------------------------------------------------------------------------


@only_package("flash_attn")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (90, 40)}, {"softcap": 2.0}], ids=str)
def test_other_head_dims(given: dict[str, Any], dims: tuple[int, int], dtype: torch.dtype, only: Package) -> None:
    inputs = of_dims(257, 300, dims, dtype)
    out = flash_attn.flash_attn_func(*inputs, **given)
    compare(out, inputs, lambda tensors, c: oracles.flash_attention(*tensors, **given, compute=c)[0], dtype)


@only_package("flash_attn")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "given",
    [
        {"attention_chunk": 100}, {"attention_chunk": 100, "causal": True},
        {"attention_chunk": 90, "window_size": (50, 20), "softcap": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_attention_chunk(given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    for rows, keys in ((257, 300), (300, 257)):
        inputs = leaves(rows, keys, dim, dtype)
        out = flash_attn_3.flash_attn_func(*inputs, **given, num_splits=3, pack_gqa=True, sm_margin=4)
        compare(out, inputs, lambda tensors, c: oracles.flash_attention(*tensors, **given, compute=c)[0], dtype)


@only_package("flash_attn")
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"attention_chunk": 50}, {"softcap": 2.0}], ids=str)
def test_used_queries(given: dict[str, Any], only: Package) -> None:
    """Rows that are not used hold NaN; nothing waits for the GPU."""
    lengths_q, lengths_k, used_q, used_k = (257, 130, 20), (300, 165, 40), (100, 130, 0), (300, 17, 40)
    starts = [torch.tensor([0, *n], device="cuda").cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]
    used = [torch.tensor(n, dtype=torch.int32, device="cuda") for n in (used_q, used_k)]
    torch.manual_seed(3)
    shapes = ((407, HEADS), (505, KV_HEADS), (505, KV_HEADS))
    inputs = [torch.randn(n, h, 64, device="cuda").bfloat16() for n, h in shapes]
    inputs[0][100:257] = float("nan")
    inputs[0][387:] = float("nan")
    inputs = [t.requires_grad_() for t in inputs]
    call = (*starts, 257, 300, *used)
    flash_attn_3.flash_attn_varlen_func(*inputs, *call, **given)  # loads and prepares
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = flash_attn_3.flash_attn_varlen_func(*inputs, *call, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, weights)
    for i in range(3):
        first, first_k = int(starts[0][i]), int(starts[1][i])
        rows, keys = slice(first, first + used_q[i]), slice(first_k, first_k + used_k[i])
        idle = slice(first + used_q[i], first + lengths_q[i])
        assert not out[idle].any()
        assert not gradients[0][idle].any()
        assert not gradients[1][first_k + used_k[i] : first_k + lengths_k[i]].any()
        if not used_q[i]:
            continue
        parts = [t[None, where].detach().requires_grad_() for t, where in zip(inputs, (rows, keys, keys), strict=True)]
        results = [oracles.flash_attention(*parts, **given, compute=c)[0] for c in (torch.bfloat16, torch.float64)]
        plain, precise = results
        no_worse(out[rows].detach(), plain[0].detach(), precise[0].detach())
        of_plain = torch.autograd.grad(plain, parts, weights[None, rows])
        of_precise = torch.autograd.grad(precise, parts, weights[None, rows].double())
        mine = [t[None, where] for t, where in zip(gradients, (rows, keys, keys), strict=True)]
        no_worse_gradients(mine, of_plain, of_precise)


@only_package("flash_attn")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_ring(dim: int, causal: bool, softcap: float, only: Package) -> None:
    """One part of the keys after the other, forward and backward, gives the output and the gradients of the whole."""
    count, part, dtype = 3, 130, torch.bfloat16
    inputs = leaves(count * part, count * part, dim, dtype)
    dout = torch.randn(BATCH, count * part, HEADS, dim, device="cuda").to(dtype)
    q, k, v, douts = (t.detach().chunk(count, dim=1) for t in (*inputs, dout))
    gradients = [[torch.zeros_like(one, dtype=torch.float32) for one in t] for t in (q, k, v)]
    outs = []
    for i in range(count):
        seen = range(i + 1) if causal else range(count)
        options = {j: [None, causal and i == j, -1, -1, softcap, None] for j in seen}
        forwards = [flash_attn._flash_attn_forward(q[i], k[j], v[j], 0.0, *options[j], False) for j in seen]
        out, lse = merged([(piece.float(), piece_lse) for piece, piece_lse, *_ in forwards])
        outs.append(out.to(dtype))
        for j in seen:
            step = [torch.full_like(t, float("nan")) for t in (q[i], k[j], v[j])]
            flash_attn._flash_attn_backward(douts[i], q[i], k[j], v[j], outs[i], lse, *step, 0.0, *options[j], False)
            for whose, place, gradient in zip(gradients, (i, j, j), step, strict=True):
                whose[place] += gradient
    results = {
        c: oracles.flash_attention(*inputs, causal=causal, softcap=softcap, compute=c)[0]
        for c in (dtype, torch.float64)
    }
    plain, precise = results[dtype], results[torch.float64]
    no_worse(torch.cat(outs, dim=1), plain.detach(), precise.detach())
    no_worse_gradients(
        [torch.cat(parts, dim=1).to(dtype) for parts in gradients],
        torch.autograd.grad(plain, inputs, dout),
        torch.autograd.grad(precise, inputs, dout.double()),
    )


@only_package("flash_attn")
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_passes_are_those_of_a_call(deterministic: bool, rate: float, only: Package) -> None:
    if deterministic and rate:
        pytest.skip("no shipped spec has a backward with dropout in a fixed order")
    inputs = leaves(257, 300, 64, torch.bfloat16)
    torch.manual_seed(1)
    whole = flash_attn.flash_attn_func(*inputs, rate, causal=True, softcap=2.0, deterministic=deterministic)
    dout = torch.randn(whole.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    wanted = torch.autograd.grad(whole, inputs, dout)
    torch.manual_seed(1)
    options = (None, True, -1, -1, 2.0, None)
    out, lse, _, state = flash_attn._flash_attn_forward(*inputs, rate, *options, False)
    gradients = [torch.empty_like(t) for t in inputs]
    flash_attn._flash_attn_backward(dout, *inputs, out, lse, *gradients, rate, *options, deterministic, state)
    assert torch.equal(out, whole)
    for one, other in zip(gradients, wanted, strict=True):
        if deterministic:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


# --- scaled_dot_product_attention ---------------------------------------------------------------------------


@only_package("sdpa")
@pytest.mark.parametrize("rows", [257, 300])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias(make: Any, rows: int, only: Package) -> None:
    inputs = leaves(rows, 300, 64, torch.bfloat16, heads_first=True)
    bias = make(rows, 300)
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(*inputs, bias, enable_gqa=True)
    name = "causal" if make is causal_lower_right and rows != 300 else "causal_top_left"
    assert dict(routed.variants) == {name: 1}, routed.report()
    mask = bias._materialize(out.device)
    compare(out, inputs, lambda tensors, c: dense_sdpa(*tensors, c, attn_mask=mask), torch.bfloat16)


@only_package("sdpa")
def test_a_causal_bias_that_falls_back(only: Package) -> None:
    q, k, v = (t.detach() for t in leaves(100, 130, 40, torch.bfloat16, heads_first=True))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    for make in (causal_upper_left, causal_lower_right):
        wanted = F.scaled_dot_product_attention(q, k, v, make(100, 130))
        with sdpa() as routed:
            out = F.scaled_dot_product_attention(q, k, v, make(100, 130))
        assert torch.equal(out, wanted)
        assert routed.fell_back == 1


@only_package("sdpa")
@pytest.mark.parametrize(("dims", "dtype"), [(d, t) for d in DIMS for t in DTYPES] + [
    ((64, 64), torch.float32)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["full", "causal_top_left", "allowed", "bias"])
def test_sdpa_at_other_head_dims(kind: str, dims: tuple[int, int], dtype: torch.dtype, only: Package) -> None:
    inputs = of_dims(257, 300, dims, dtype, heads_first=True)
    if dtype == torch.float32 and kind == "allowed":
        pytest.skip("no shipped spec has its backward in float32")
    options: dict[str, Any] = {"is_causal": kind == "causal_top_left"}
    if kind == "allowed":
        options["attn_mask"] = torch.rand(257, 300, device="cuda") < 0.6
    elif kind == "bias":
        options["attn_mask"] = torch.randn(257, 300, device="cuda").to(dtype)
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(*inputs, **options, enable_gqa=True)
    assert routed.routed == 1, routed.report()
    compare(out, inputs, lambda tensors, c: dense_sdpa(*tensors, c, **options), dtype)


# --- transformers -------------------------------------------------------------------------------------------


@only_package("transformers")
@sampled(family=["llama", "gemma2", "gpt_oss"], padding=["left", "none"])
@torch.no_grad()
def test_steps_against_a_static_cache(
    family: str, padding: str, only: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask is read pair by pair, in prefill or in the steps that transformers compiles."""
    served: list[str] = []
    tensor_mask = attngen_transformers._tensor_mask
    monkeypatch.setattr(
        attngen_transformers, "_tensor_mask", lambda *given: served.append("tensor") or tensor_mask(*given)
    )
    given = batch(family, padding, "cuda", torch.bfloat16)
    tokens, step_logits = families.generate(model(family, "attngen"), given, cache_implementation="static")
    _, dynamic = families.generate(model(family, "attngen"), given)
    assert not served
    assert tokens.shape[1] == families.LENGTH + 8
    torch.testing.assert_close(step_logits[0], dynamic[0], rtol=5e-2, atol=5e-2 * float(dynamic[0].abs().max()))


@only_package("transformers")
@pytest.mark.parametrize("by_head", [False, True])
@torch.no_grad()
def test_a_mask_that_is_added_beside_softcap(by_head: bool, only: Package) -> None:
    n, times = 10 * families.LENGTH, 10
    allowed = torch.rand(3, 4 if by_head else 1, n, n, device="cuda") < 0.6
    allowed |= torch.eye(n, dtype=torch.bool, device="cuda")
    made = []
    for one, dtype in (
        (model("gemma2", "attngen"), torch.bfloat16), (model("gemma2", "eager"), torch.bfloat16),
        (exact("gemma2"), torch.float32),
    ):  # fmt: skip
        given = batch("gemma2", "none", "cuda", dtype, times)
        given.inputs["attention_mask"] = torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)
        made.append(logits(one, given).float())
    out, plain, wanted = made
    error, least = ((t - wanted).square().mean().sqrt().item() for t in (out, plain))
    assert error <= 2 * least
