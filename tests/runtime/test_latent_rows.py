"""Caches of latents in bytes: the reference and append_kv against bytes decoded by hand, and what calls refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.dtypes import LATENT_ROWS
from attngen.errors import CallError, PlanError
from attngen.inspect.cases import Case
from attngen.lab.verify.inputs import Element, make_inputs
from attngen.plan import plan
from attngen.runtime.arguments.latent_rows import cache_of, representable, unpacked
from attngen.schema import expand, load_spec_text
from attngen.schema.presets import preset
from tests.runtime.latent_caches import FORMS, ROTARY, empty_cache, latent_cache

LISTED = attngen.variant(keys="index", name="listed_for_tests")


def test_forms() -> None:
    assert {name: row.bytes for name, row in LATENT_ROWS.items()} == {"fp8_mla_656": 656, "fp8_mla_584": 584}
    assert {name: (row.latents, row.group, row.scales_after_rows) for name, row in LATENT_ROWS.items()} == FORMS


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("variant", ["causal", "listed"])
def test_reference_over_pages(name: str, variant: str) -> None:
    torch.manual_seed(1)
    cache, columns = latent_cache(name, 9, 16)
    torch.testing.assert_close(unpacked(name, cache)[:, :, 0].double(), columns, rtol=1e-6, atol=0.0)
    table = torch.tensor([[4, 1, 8], [0, 7, 2**30]], dtype=torch.int32)
    lengths = torch.tensor([41, 18], dtype=torch.int32)
    q = torch.randn(2, 3, 4, columns.shape[-1], dtype=torch.float64)
    own = {"indices": torch.randint(-3, 45, (2, 3, 10), dtype=torch.int32)} if variant == "listed" else {}
    call: dict[str, Any] = {"variant": LISTED if own else variant, "return_lse": True, "backend": "reference", **own}
    actual = attngen.attention_paged(q, cache, cache, table, lengths, **call)
    pages = columns[:, :, None]
    wanted = attngen.attention_paged(q, pages, pages[..., :512], table, lengths, **call)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


def test_reference_over_dense_and_packed_sequences() -> None:
    cache, columns = latent_cache("fp8_mla_656", 2, 20)
    q = torch.randn(2, 3, 4, 576, dtype=torch.float64)
    k = columns[:, :, None]
    wanted = attngen.attention(q, k, k[..., :512], variant="causal", backend="reference")
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(attngen.attention(q, cache, cache, variant="causal", backend="reference"), wanted)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([0, 20, 40], dtype=torch.int32)
    rows = cache.flatten(0, 1)
    out = attngen.attention_varlen(q.flatten(0, 1), rows, rows, *starts, 3, 20, variant="causal", backend="reference")
    torch.testing.assert_close(out, wanted.flatten(0, 1))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("page_layout", ["NHD", "HND"])
def test_append(name: str, page_layout: str) -> None:
    torch.manual_seed(2)
    latents, rotary = torch.randn(2, 5, 1, FORMS[name][0]).bfloat16(), torch.randn(2, 5, 1, ROTARY).bfloat16()
    latents[0, 0, 0, :128], latents[1, 2, 0, 130], latents[1, 3, 0, 3] = 0.0, torch.nan, torch.inf
    cache = empty_cache(name, 20, 16, fill=7)
    given = cache if page_layout == "NHD" else cache.transpose(1, 2)
    before = cache.as_strided((20 * cache.stride(0),), (1,)).clone()
    table, lengths = torch.randperm(20)[:8].view(2, 4).int(), torch.tensor([30, 3], dtype=torch.int32)
    angles = torch.randn(100, ROTARY // 2)
    attngen.append_kv(
        rotary, latents, given, given, lengths, page_table=table, page_layout=page_layout,
        rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=True,
    )  # fmt: skip
    columns, group = unpacked(name, cache), FORMS[name][1]
    for b in range(2):
        for j in range(5):
            position = int(lengths[b]) + j
            row = columns[table[b, position // 16], position % 16, 0]
            a, c = rotary[b, j, 0].float().view(-1, 2).unbind(-1)
            cos, sin = angles[position].cos(), angles[position].sin()
            rotated = torch.stack((a * cos - c * sin, a * sin + c * cos), -1).flatten().bfloat16().float()
            assert torch.equal(row[-ROTARY:], rotated)
            exact, held = latents[b, j, 0].float().view(-1, group), row[:-ROTARY].view(-1, group)
            lost = ~exact.isfinite().all(-1)  # all columns that share a scale with NaN or an infinity
            assert held[lost].isnan().all()
            limit = exact.abs().amax(-1, keepdim=True)
            assert ((held - exact).abs() <= exact.abs() / 16 + limit / 448 / 512 * 2)[~lost].all()
    written = cache.as_strided((20 * cache.stride(0),), (1,)) != before
    assert 0 < written.sum() <= 10 * LATENT_ROWS[name].bytes


def test_what_calls_refuse() -> None:
    cache, _ = latent_cache("fp8_mla_656", 2, 16)
    other, _ = latent_cache("fp8_mla_584", 2, 16)
    q = torch.randn(2, 1, 4, 576)
    for given, message in (
        ((q, cache, cache[..., :512]), "pass the cache of 656 bytes a token as v, too"),
        ((q, cache[..., :600], cache[..., :600]), "k has 600 bytes a token.*656 or 584"),
        ((q, other, other), "q has head_dim 576, but k has 512"),
        (
            (q[..., :512], other[:, ::2], other[:, ::2]),
            "must be pages of one KV head",
        ),
    ):
        with pytest.raises(CallError, match=message):
            attngen.attention(*given, variant="causal", backend="reference")
    k, v = torch.randn(2, 1, 1, 64).bfloat16(), torch.randn(2, 1, 1, 512).bfloat16()
    at = torch.zeros(2, dtype=torch.int32)
    for changed, message in (
        ((k, v[..., :448], cache, cache), "of head_dim 64 and 512, got 64 and 448"),
        ((k.half(), v.half(), cache, cache), "takes torch.bfloat16"),
        ((k, v, cache, cache.clone()), "is one tensor"),
    ):
        with pytest.raises(CallError, match=message):
            attngen.append_kv(*changed, at)
    with pytest.raises(CallError, match="k_descale is for a cache in 8 bits"):
        attngen.append_kv(k, v, cache, cache, at, k_descale=torch.ones(()))


@pytest.mark.parametrize("name", FORMS)
def test_inputs_of_verification_are_exact(name: str) -> None:
    """Those of kernels are the numbers that plain torch reads."""
    dim = LATENT_ROWS[name].columns
    columns = representable(name, torch.randn(3, 16, 1, dim))
    assert torch.equal(unpacked(name, cache_of(name, columns)), columns)
    assert torch.equal(columns.bfloat16().float(), columns)
    case = Case("pages", (2, 1), (20, 9), heads=4, kv_heads=1, page_size=16)
    inputs = make_inputs(
        preset("causal"), case, "paged", Element("bf16", dim, 512, kv_dtype=name, v_of_key=True), "cpu", 3
    )
    assert inputs.packed is not None
    assert inputs.packed.k.dtype == torch.bfloat16
    call = inputs.bind(preset("causal"))
    assert (call.kv_dtype, call.head_dim_qk, call.head_dim_v) == (name, dim, 512)


SPEC = """
schema: 1
arch: [sm90a]
variants: {{listed: {{keys: index}}}}
kernels: [{{{}}}]
"""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("head_dim: {qk: 576, v: 512}, v: key, kv_dtype: fp8_mla_584, layout: paged", "has rows of head_dim"),
        ("head_dim: 512, v: key, kv_dtype: fp8_mla_584, layout: dense", "follow the rows of each page"),
        ("head_dim: {qk: 576, v: 512}, v: key, dtype: fp16, kv_dtype: fp8_mla_656", "rotary columns in bf16"),
        ("head_dim: 128, kv_dtype: fp8_mla_656", "a cache of latents"),
    ],
)
def test_what_specs_refuse(fields: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        for kernel in expand(
            load_spec_text(SPEC.format(fields if "variant" in fields else f"variant: listed, {fields}"))
        ):
            plan(kernel)


@pytest.mark.parametrize("shape", [(), (2, 1), (9, 1, 1)])
def test_rows_of_e4m3_have_one_scale_for_keys_and_values(shape: tuple[int, ...]) -> None:
    """One scale for all, for each sequence, or for each page."""
    torch.manual_seed(4)
    rows, scale = (30 * torch.randn(9, 16, 1, 576)).to(torch.float8_e4m3fn), 0.01 + 0.03 * torch.rand(shape)
    table, lengths = torch.randperm(9).int()[:8].view(2, 4), torch.tensor([60, 17], dtype=torch.int32)
    q = torch.randn(2, 3, 4, 576).bfloat16()
    call: dict[str, Any] = {"variant": "causal", "return_lse": True}
    given = q, rows, rows[..., :512], table, lengths
    out, lse = attngen.attention_paged(*given, k_descale=scale, **call)
    again, _ = attngen.attention_paged(*given, k_descale=scale, v_descale=scale, **call)
    assert torch.equal(out, again)
    of_rows = scale.double()[table].repeat_interleave(16, 1) if len(shape) == 3 else scale.double()
    for b, length in enumerate(lengths.tolist()):
        keys = rows[table[b].long()].flatten(0, 1).double()
        exact = (keys * (of_rows if shape == () else of_rows[b]).view(-1, 1, 1))[None, :length]
        wanted, wanted_lse = attngen.attention(q[b : b + 1].double(), exact, exact[..., :512], **call)
        torch.testing.assert_close(out[b : b + 1].double(), wanted, rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(lse[b : b + 1].double(), wanted_lse, rtol=1e-4, atol=1e-4)
    with pytest.raises(CallError, match="v_descale is missing"):
        attngen.attention_paged(q, rows, rows[..., :512].clone(), table, lengths, k_descale=scale, **call)
