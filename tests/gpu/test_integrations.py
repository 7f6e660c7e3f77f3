"""The drop-ins on kernels of the shipped specs: flash-attn's functions, SDPA, and ten families of transformers.

Errors are compared with those that plain PyTorch makes in the same dtype, against float64 or float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from attngen.errors import NoKernelError
from attngen.integrations import sdpa
from attngen.integrations.diffusers import backend as diffusers
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.torch_sdpa import flash as torch_flash
from attngen.runtime.registry.lookup import Package
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
from tests.integrations.diffusers import test_diffusers as test_of_diffusers
from tests.integrations.flash_attn.test_flash_attn import OPTIONS as FLASH_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import OPTIONS as SDPA_OPTIONS
from tests.integrations.torch_sdpa.test_sdpa import described
from tests.integrations.transformers import families
from tests.integrations.transformers.families import DECODERS, MAKERS, PADDINGS, batch, logits

DTYPES = [torch.bfloat16, torch.float16]


# --- flash-attn's functions ---------------------------------------------------------------------------------


@only_package("flash_attn")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("given", FLASH_OPTIONS, ids=str)
def test_flash_attn(given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    options = flash_options(given)
    for rows, keys in ((257, 421), (421, 257), (1, 300)):
        q, k, v = qkv(rows, keys, dim, dtype)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
        exact, exact_lse = oracles.flash_attention(q, k, v, **options)
        plain, _ = oracles.flash_attention(q, k, v, **options, compute=dtype)
        no_worse(out, plain, exact)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=2e-3)


@only_package("flash_attn")
@pytest.mark.parametrize("given", FLASH_OPTIONS, ids=str)
def test_flash_attn_varlen(given: dict[str, Any], only: Package) -> None:
    options = flash_options(given)
    lengths_q, lengths_k = (257, 130), (300, 65)
    starts_q, starts_k = (
        torch.tensor([0, n, n + m], dtype=torch.int32, device="cuda") for n, m in (lengths_q, lengths_k)
    )
    torch.manual_seed(3)
    q = torch.randn(387, HEADS, 64, device="cuda").bfloat16()
    k, v = (torch.randn(365, KV_HEADS, 64, device="cuda").bfloat16() for _ in "kv")
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 257, 300, **options)
    for i in range(2):
        rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        own = dict(options)
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[i]
        one = (q[None, rows], k[None, keys], v[None, keys])
        exact, plain = (oracles.flash_attention(*one, **own, compute=c)[0] for c in (torch.float64, torch.bfloat16))
        no_worse(out[rows], plain[0], exact[0])


@only_package("flash_attn")
def test_flash_attn_packed_tensors_and_caches(only: Package) -> None:
    torch.manual_seed(2)
    packed = torch.randn(BATCH, 200, 3, HEADS, 64, device="cuda").bfloat16()
    q, k, v = packed.unbind(2)
    exact, plain = (
        oracles.flash_attention(q, k, v, causal=True, compute=c)[0] for c in (torch.float64, torch.bfloat16)
    )
    no_worse(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), plain, exact)

    k_cache, v_cache = (torch.randn(BATCH, 256, KV_HEADS, 64, device="cuda").bfloat16() for _ in "kv")
    q, new_k, new_v = qkv(3, 3, 64, torch.bfloat16)
    used = torch.tensor([17, 250], dtype=torch.int32, device="cuda")
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, cache_seqlens=used, causal=True)
    for b, length in enumerate((20, 253)):
        one = (q[b : b + 1], k_cache[b : b + 1, :length], v_cache[b : b + 1, :length])
        assert torch.equal(one[1][0, -3:], new_k[b])
        exact, plain = (
            oracles.flash_attention(*one, causal=True, compute=c)[0] for c in (torch.float64, torch.bfloat16)
        )
        no_worse(out[b : b + 1], plain, exact)


@only_package("flash_attn")
def test_flash_attn_says_what_to_build(only: Package) -> None:
    with pytest.raises(NoKernelError) as caught:
        flash_attn.flash_attn_func(*qkv(8, 8, 48, torch.bfloat16), causal=True)
    assert "variants that would serve it: causal, window" in str(caught.value)
    assert "head_dim of q and k is 64, the call has 48" in str(caught.value)
    assert "attngen build " in str(caught.value)


@only_package("flash_attn")
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_flash_attention(causal: bool, only: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA's flash backend while attngen is torch's flash attention, forward and backward."""
    served: list[Any] = []
    attend = torch_flash._attend
    monkeypatch.setattr(torch_flash, "_attend", lambda *given: (served.append(given), attend(*given))[1])
    q, k, v = (t.requires_grad_() for t in qkv(257, 257, 64, torch.bfloat16, heads_first=True))
    k, v = (t.detach().repeat_interleave(HEADS // KV_HEADS, 1).requires_grad_() for t in (k, v))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(*tensors, is_causal=causal)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    torch_flash.register()
    activate_flash_attention_impl("attngen")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            results = call(q, k, v)
    finally:
        restore_flash_attention_impl()
    assert len(served) == 1
    with sdpa_kernel(SDPBackend.MATH):
        plain, wide = call(q, k, v), call(*(t.detach().double().requires_grad_() for t in (q, k, v)))
    for mine, other, wanted in zip(results, plain, wide, strict=True):
        no_worse(mine, other, wanted)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        call(q, k, v)
    assert len(served) == 1


# --- scaled_dot_product_attention ---------------------------------------------------------------------------


@only_package("sdpa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("variant", "given"), SDPA_OPTIONS, ids=described)
def test_sdpa(variant: str, given: dict[str, Any], dim: int, dtype: torch.dtype, only: Package) -> None:
    if variant == "bias_fp32":
        variant = {torch.bfloat16: "bias_bf16", torch.float16: "bias_fp16"}[dtype]
    q, k, v = qkv(257, 300, dim, dtype, heads_first=True)
    options = larger(given, 257, 300, dtype)
    with sdpa() as routed:
        out = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
    assert dict(routed.variants) == {variant: 1}, routed.report()
    torch.cuda.synchronize()
    if "attn_mask" in options:  # torch's kernels were seen to crash on masks that repeat one column
        options["attn_mask"] = options["attn_mask"].broadcast_to(*q.shape[:3], k.shape[2]).contiguous()
    plain = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
    no_worse(out, plain, oracles.sdpa(q, k, v, **options, enable_gqa=True))


@only_package("sdpa")
def test_sdpa_falls_back(only: Package) -> None:
    """Calls that no kernel takes give torch's own bits, and the reason."""
    with sdpa(explain=True) as routed:
        for dim, dtype in ((40, torch.bfloat16), (80, torch.float32)):
            q, k, v = qkv(100, 100, dim, dtype, heads_first=True)
            for _ in range(2):
                out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                with torch.no_grad():
                    assert torch.equal(out, torch._C._nn.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert routed.routed == 0
    assert routed.fell_back == 4
    assert "head_dim of q and k is 64, the call has 40" in routed.report()
    assert "head_dim of q and k is 64, the call has 80" in routed.report()


@only_package("sdpa")
def test_sdpa_in_a_cuda_graph(only: Package) -> None:
    q, k, v = qkv(128, 128, 64, torch.bfloat16, heads_first=True)
    with sdpa() as routed:
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert routed.routed == 2, routed.report()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


@only_package("sdpa")
@pytest.mark.parametrize("mask", [None, "causal", "bool", "bias"])
def test_diffusers(mask: str | None, only: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that is registered with a stub of diffusers: tokens come before heads."""
    backends = test_of_diffusers.registry(monkeypatch)
    diffusers.register()
    attend, _ = backends[test_of_diffusers.Names("attngen")]
    q, k, v = qkv(257, 300, 64, torch.bfloat16)
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": mask == "causal"}
    if mask in ("bool", "bias"):
        given = torch.randn(BATCH, 1, 257, 300, device="cuda")
        options["attn_mask"] = given > -1 if mask == "bool" else given.bfloat16()
    out = attend(q, k, v, **options)
    assert diffusers.served.routed == 1, diffusers.served.report()
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].expand(-1, HEADS, -1, -1).contiguous()
    plain = F.scaled_dot_product_attention(*rows, **options)
    no_worse(out, plain.transpose(1, 2), oracles.sdpa(*rows, **options).transpose(1, 2))


# --- transformers -------------------------------------------------------------------------------------------


@only_package("transformers")
@pytest.mark.parametrize("times", [1, 20])  # one tile, and several
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", MAKERS)
@torch.no_grad()
def test_logits(family: str, padding: str, times: int, only: Package) -> None:
    given = batch(family, padding, "cuda", torch.bfloat16, times)
    actual, plain = (logits(model(family, name), given) for name in ("attngen", "eager"))
    close(actual, plain, logits(exact(family), batch(family, padding, "cuda", times=times)))


@only_package("transformers")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_cached_decoding(family: str, padding: str, only: Package) -> None:
    given = batch(family, padding, "cuda", torch.bfloat16, times=10)
    actual, plain = (families.step_by_step(model(family, name), given, prefill=120) for name in ("attngen", "eager"))
    close(actual, plain, logits(exact(family), batch(family, padding, "cuda", times=10)))


@only_package("transformers")
@pytest.mark.parametrize("family", ["whisper", "t5"])
@torch.no_grad()
def test_encoder_decoders_generate(family: str, only: Package) -> None:
    """Greedy decoding against both caches; where rounding decides tokens differ, so the first logits are compared."""
    given = batch(family, "none", "cuda", torch.bfloat16)
    _, scores = families.generate(model(family, "attngen"), given)
    _, plain = families.generate(model(family, "eager"), given)
    _, wanted = families.generate(exact(family), batch(family, "none", "cuda"))
    close(scores[0], plain[0], wanted[0])


@only_package("transformers")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_static_cache(family: str, only: Package) -> None:
    """transformers compiles the decoding step for a static cache on a GPU."""
    given = batch(family, "left", "cuda", torch.bfloat16)
    tokens, step_logits = families.generate(model(family, "attngen"), given, cache_implementation="static")
    _, dynamic = families.generate(model(family, "attngen"), given)
    assert torch.isfinite(step_logits).all()
    assert tokens.shape[1] == families.LENGTH + 8
    torch.testing.assert_close(step_logits[0], dynamic[0], rtol=5e-2, atol=5e-2 * float(dynamic[0].abs().max()))


@only_package("transformers")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_packed_by_cu_seqlens(family: str, only: Package) -> None:
    lengths = (150, 1, 70)
    torch.manual_seed(11)
    ids = torch.randint(3, families.VOCABULARY, (1, sum(lengths)), device="cuda")
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 150, "max_length_k": 150}
    packed = model(family, "attngen")(input_ids=ids, position_ids=positions, use_cache=False, **packing).logits
    for start, stop in zip(offsets.tolist()[:-1], offsets.tolist()[1:], strict=True):
        alone = {"input_ids": ids[:, start:stop], "use_cache": False}
        plain, wanted = (one(**alone).logits for one in (model(family, "eager"), exact(family)))
        close(packed[:, start:stop], plain, wanted)


def close(actual: Tensor, plain: Tensor, wanted: Tensor) -> None:
    """Assert that most tokens err at most twice as much as eager's do in the same dtype, by their root mean squares.

    The median token, since one that a router sends to another expert for a rounding errs by anything.
    """
    assert actual.shape == wanted.shape
    assert torch.isfinite(actual).all()
    error, allowed = ((t.float() - wanted).square().mean(dim=-1).sqrt().median().item() for t in (actual, plain))
    assert error <= 2 * allowed + 1e-6 * float(wanted.abs().max()), (error, allowed)
