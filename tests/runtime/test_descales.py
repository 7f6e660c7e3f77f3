"""Calls of quantized tensors: what their scales may be, and what the reference makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.dtypes import DESCALES
from attngen.errors import CallError

FP8 = torch.float8_e4m3fn
FORM = r"float32 of shape \(\) or \(batch, kv_heads\) = \(2, 2\)"


def operands(*, heads: int = 4, kv_heads: int = 2, layout: str = "bshd") -> tuple[Tensor, ...]:
    """Return q, k and v in 8 bits, of 2 sequences."""
    shapes = ((2, 40, heads, 32), (2, 50, kv_heads, 32), (2, 50, kv_heads, 16))
    tensors = [(8 * torch.randn(shape)).to(FP8) for shape in shapes]
    return tuple(x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in tensors)


def scales() -> dict[str, Tensor]:
    """Return scales for each batch entry and KV head, with strides of their own."""
    return {name: (0.05 + torch.rand(2, 2)).t() for name in DESCALES}


def in_units(x: Tensor, scale: Tensor) -> Tensor:
    """Return (b, s, heads, d) times the scale of its batch entry and KV head."""
    return x.float() * scale.expand(2, 2).repeat_interleave(x.shape[2] // 2, dim=1)[:, None, :, None]


@pytest.mark.parametrize("variant", ["full", "causal", "softcap", "causal_sink"])
def test_elements_stand_for_themselves_times_their_scale(variant: str) -> None:
    own: dict[str, Any] = {"softcap": {"cap": 5.0}, "causal_sink": {"sinks": torch.randn(4)}}.get(variant, {})
    q, k, v = operands()
    given = scales() | {"v_descale": torch.tensor(0.5)}
    out, lse = attngen.attention(q, k, v, variant=variant, return_lse=True, **given, **own)
    plain = [in_units(x, given[f"{name}_descale"]) for name, x in zip("qkv", (q, k, v), strict=True)]
    wanted, wanted_lse = attngen.attention(*plain, variant=variant, return_lse=True, **own)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0, rtol=2**-8)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_tokens_have_scales_of_their_own(block: int) -> None:
    shapes = ((2, 200, 4, 32), (2, 300, 2, 32), (2, 300, 2, 16))
    q, k, v = ((8 * torch.randn(shape)).to(FP8) for shape in shapes)
    counts = [(2, x.shape[2], -(-x.shape[1] // block)) for x in (q, k, v)]
    given = dict(zip(DESCALES, (0.05 + torch.rand(shape) for shape in counts), strict=True))
    out = attngen.attention(q, k, v, variant="causal", **given)
    plain = []
    for x, scale in zip((q, k, v), given.values(), strict=True):
        rows = torch.arange(x.shape[1]) // block
        plain.append(x.float() * scale.transpose(1, 2)[:, rows, :, None])
    torch.testing.assert_close(out.float(), attngen.attention(*plain, variant="causal"), atol=0, rtol=2**-8)
    one = {**given, "v_descale": torch.tensor(0.3)}  # beside blocks one scale serves all of them
    plain[2] = v.float() * 0.3
    out = attngen.attention(q, k, v, variant="causal", **one)
    torch.testing.assert_close(out.float(), attngen.attention(*plain, variant="causal"), atol=0, rtol=2**-8)
    with pytest.raises(CallError, match=r"v_descale must be .*blocks of 1 or 64 or 128 tokens"):
        attngen.attention(q, k, v, **{**given, "v_descale": torch.ones(2, 2, 9)})


def test_queries_and_keys_may_have_scales_of_their_own() -> None:
    q, k, v = operands()
    given = {
        "q_descale": 0.05 + torch.rand(2, 4, 40), "k_descale": 0.05 + torch.rand(2, 2, 50),
        "v_descale": 0.05 + torch.rand(2, 2),
    }  # fmt: skip
    plain = [x.float() * given[f"{name}_descale"].transpose(1, 2)[..., None] for name, x in (("q", q), ("k", k))]
    wanted = attngen.attention(*plain, in_units(v, given["v_descale"]), variant="causal")
    out = attngen.attention(q, k, v, variant="causal", **given)
    torch.testing.assert_close(out.float(), wanted, atol=0, rtol=2**-8)


@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_pages_have_scales_of_their_own(page_size: int, page_layout: str) -> None:
    """Beside a row of numbers, as in an engine's cache; one of the two may be one number."""
    pages = 96 // page_size
    shape = (pages, page_size, 2) if page_layout == "NHD" else (pages, 2, page_size)
    k, v = ((8 * torch.randn(*shape, 32)).to(FP8) for _ in "kv")
    both = torch.rand(*shape, 6) + 0.1
    given = {"k_descale": both[..., 1], "v_descale": both[..., 4]}
    table = torch.randperm(pages).int().view(2, -1)
    call: dict[str, Any] = {"page_table": table, "seqused_k": torch.tensor([40, 17], dtype=torch.int32)}
    call |= {"variant": "causal", "page_layout": page_layout}
    q = torch.randn(2, 3, 4, 32)
    for scaled in (given, given | {"v_descale": torch.tensor(0.7)}):
        plain = [
            x.float() * scale[..., None] if scale.dim() else x.float() * scale
            for x, scale in zip((k, v), scaled.values(), strict=True)
        ]
        wanted = attngen.attention_paged(q, *plain, **call)
        torch.testing.assert_close(attngen.attention_paged(q, k, v, **call, **scaled), wanted)
    if page_size > 1:
        with pytest.raises(CallError, match="v_descale must be .* where the other one has a scale for each row of a"):
            attngen.attention_paged(q, k, v, **call, **(given | {"v_descale": torch.ones(2, 2)}))


def test_packed_sequences_have_the_scales_of_their_batch_entry() -> None:
    q, k, v = operands()
    given = scales()
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (40, 50))
    packed = attngen.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), starts_q, starts_k, 40, 50, **given)
    torch.testing.assert_close(packed.unflatten(0, (2, 40)), attngen.attention(q, k, v, **given))


def test_heads_may_come_first() -> None:
    q, k, v = operands(layout="bhsd")
    given = scales()
    out = attngen.attention(q, k, v, layout="bhsd", **given)
    wanted = attngen.attention(*(x.transpose(1, 2) for x in (q, k, v)), **given)
    torch.testing.assert_close(out.transpose(1, 2), wanted)


def test_no_key_gives_zeros_in_the_dtype_of_the_output() -> None:
    q, k, v = operands()
    out = attngen.attention(q, k[:, :0], v[:, :0], **scales())
    assert out.dtype == torch.bfloat16
    assert not out.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_descale": None}, rf"k_descale is missing: fp8_e4m3 tensors need a scale, {FORM}"),
        ({"v_descale": 0.5}, r"v_descale must be a torch.Tensor, got float"),
        ({"q_descale": torch.ones(2, 4)}, rf"q_descale must be {FORM}, got torch.float32 of shape \(2, 4\)"),
        ({"q_descale": torch.ones(2, 2).half()}, rf"q_descale must be {FORM}, got torch.float16"),
        ({"q_descale": torch.ones(2, 2, device="meta")}, r"q_descale is on meta, but q is on cpu"),
    ],
)
def test_scales_of_another_form_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attngen.attention(*operands(), **{**scales(), **change})


def test_scales_of_plain_tensors_are_refused() -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(CallError, match="k_descale is for quantized tensors, but k has dtype fp32; leave it out"):
        attngen.attention(q, q, q, k_descale=torch.ones(()))


def test_quantized_and_plain_tensors_are_not_mixed() -> None:
    q, k, v = operands()
    with pytest.raises(CallError, match=r"q has dtype torch.float8_e4m3fn, but k has torch.bfloat16"):
        attngen.attention(q, k.bfloat16(), v, **scales())
    with pytest.raises(CallError, match=r"k has dtype torch.float8_e4m3fn, but v has torch.bfloat16"):
        attngen.attention(q.bfloat16(), k, v.bfloat16(), **scales())
    with pytest.raises(CallError, match=r"q_descale is for quantized tensors, but q has dtype bf16"):
        attngen.attention(q.bfloat16(), k, v, **scales())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_debug_refuses_scales_that_are_no_scales(bad: float) -> None:
    given = scales()
    given["k_descale"] = torch.tensor([[0.1, 0.2], [bad, 0.3]])
    with attngen.debug(), pytest.raises(CallError, match=r"k_descale\[1, 0\] is .*; a scale is finite and positive"):
        attngen.attention(*operands(), **given)


def test_explain_and_tile_maps_take_quantized_tensors() -> None:
    q, k, v = operands()
    assert attngen.explain(q, k, v, variant="causal", **scales()).runs == "reference"
    assert attngen.tile_map(q, k, variant="causal").words is None
