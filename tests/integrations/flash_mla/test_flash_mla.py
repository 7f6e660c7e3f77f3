"""FlashMLA's functions for dense decoding: the reference against plain torch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.dtypes import LATENT_ROWS
from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_mla import functions as flash_mla
from attngen.integrations.flash_mla.functions import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from attngen.integrations.shared import choice
from attngen.runtime.device import driver as drivers
from tests.runtime.latent_caches import latent_cache
from tests.runtime.pages import cache
from tests.runtime.support import FakeDriver
from tests.sampling import few

HEADS, DIM = 3, 24  # of the reference, which takes any
DIM_V = 16


def given(queries: int = 2) -> tuple[Any, torch.Tensor]:
    c = cache([11, 40, 2], 16, kv_heads=1, head_dim=DIM, dtype=torch.float64)
    torch.manual_seed(1)
    return c, torch.randn(3, queries, HEADS, DIM, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_against_plain_torch(causal: bool) -> None:
    c, q = given()
    metadata, splits = get_mla_metadata(c.seqused_k, 2 * HEADS, 1)
    out, lse = flash_mla_with_kvcache(
        q, c.k_pages, c.page_table, c.seqused_k, DIM_V, metadata, splits, causal=causal, softmax_scale=0.3
    )
    assert (out.shape, lse.shape) == ((3, 2, HEADS, DIM_V), (3, HEADS, 2))
    for b, keys in enumerate(c.keys):
        logits = 0.3 * torch.einsum("qhd,kd->hqk", q[b], keys[:, 0])
        if causal:
            seen = torch.arange(keys.shape[0]) <= torch.arange(2)[:, None] + keys.shape[0] - 2
            logits = logits.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(lse[b], logits.logsumexp(-1))
        torch.testing.assert_close(out[b], torch.einsum("hqk,kd->qhd", logits.softmax(-1), keys[:, 0, :DIM_V]))


@pytest.mark.parametrize(
    "changed",
    [
        {"extra_k_cache": torch.zeros(1)}, {"extra_topk_length": torch.ones(1)}, {"attn_sink": torch.zeros(HEADS)},
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_by_name(changed: dict[str, Any]) -> None:
    c, q = given()
    with pytest.raises(NoKernelError, match=f"{next(iter(changed))} is not supported"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, DIM_V, None, **changed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_rows_of_e4m3_without_indices(causal: bool, scaled: bool) -> None:
    """Elements times a scale, of the cache and of q; a missing scale is 1."""
    c = cache([11, 40, 2], 16, kv_heads=1, head_dim=576, dtype=torch.float32)
    torch.manual_seed(3)
    q = torch.randn(3, 2, HEADS, 576).to(torch.float8_e4m3fn)
    scales = {"descale_q": torch.full((1,), 0.3), "descale_k": torch.full((1,), 1.7)} if scaled else {}
    rows = c.k_pages.to(torch.float8_e4m3fn)
    given = rows.view(torch.uint8) if causal else rows
    out, lse = flash_mla_with_kvcache(
        q, given, c.page_table, c.seqused_k, 512, causal=causal, is_fp8_kvcache=True, **scales
    )
    assert (out.dtype, out.shape, lse.shape) == (torch.bfloat16, (3, 2, HEADS, 512), (3, HEADS, 2))
    by_q, by_k = (0.3, 1.7) if scaled else (1.0, 1.0)
    wanted, wanted_lse = flash_mla_with_kvcache(
        (q.float() * by_q).bfloat16().double(), rows.double() * by_k, c.page_table, c.seqused_k, 512, causal=causal
    )
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-4)


def sparse_given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    q, kv = torch.randn(5, HEADS, DIM, dtype=torch.float64), torch.randn(40, 1, DIM, dtype=torch.float64)
    indices = torch.stack([torch.randperm(60)[:12] - 8 for _ in range(5)]).int()[:, None]
    indices[3] = -1
    return q, kv, indices, torch.tensor([12, 7, 0, 12, 30], dtype=torch.int32)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("sinks", [None, [-1.0, 2.0, -torch.inf], [torch.inf, 0.0, 3.0]])
def test_sparse_prefill_against_plain_torch(counted: bool, sinks: list[float] | None) -> None:
    """A query attends to the rows of its list; what names no row, or is not counted, does not matter."""
    q, kv, indices, counts = sparse_given()
    sink = None if sinks is None else torch.tensor(sinks)
    given = q, kv, indices, 0.3, DIM_V, sink, counts if counted else None
    out, largest, lse = flash_mla_sparse_fwd(*given, return_max_logits=True)
    assert (out.shape, lse.shape) == ((5, HEADS, DIM_V), (5, HEADS))
    assert largest is not None
    assert largest.shape == (5, HEADS)
    assert flash_mla_sparse_fwd(*given)[1] is None
    for i in range(5):
        listed = indices[i, 0, : counts[i] if counted else None]
        rows = kv[listed[(listed >= 0) & (listed < 40)].long(), 0]
        logits = 0.3 * q[i] @ rows.T
        most = logits.amax(-1) if rows.numel() else torch.full((HEADS,), -torch.inf)
        torch.testing.assert_close(largest[i], most, check_dtype=False, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(lse[i], logits.logsumexp(-1), check_dtype=False, rtol=1e-5, atol=1e-5)
        total = logits.logsumexp(-1) if sink is None else torch.logaddexp(logits.logsumexp(-1), sink.double())
        wanted = (logits - total[:, None]).exp() @ rows[:, :DIM_V] if rows.numel() else torch.zeros(HEADS, DIM_V)
        torch.testing.assert_close(out[i], wanted, check_dtype=False)


def test_arguments_of_sparse_prefill_that_disagree_are_named() -> None:
    q, kv, indices, _ = sparse_given()
    with pytest.raises(CallError, match=r"q must have shape \(s_q, heads, head_dim\)"):
        flash_mla_sparse_fwd(q[None], kv, indices, 1.0, DIM_V)
    with pytest.raises(CallError, match="must have one KV head, got 1 and 2"):
        flash_mla_sparse_fwd(q, kv, indices.expand(5, 2, 12), 1.0, DIM_V)
    with pytest.raises(CallError, match="d_v is 99, but kv has 24 columns"):
        flash_mla_sparse_fwd(q, kv, indices, 1.0, 99)
    with pytest.raises(CallError, match=r"attn_sink must have shape \(3,\)"):
        flash_mla_sparse_fwd(q, kv, indices, 1.0, DIM_V, torch.zeros(4))


def test_arguments_that_disagree_are_named() -> None:
    c, q = given()
    with pytest.raises(CallError, match="block_table and cache_seqlens are needed"):
        flash_mla_with_kvcache(q, c.k_pages, None, None, DIM_V)
    with pytest.raises(CallError, match="is_fp8_kvcache is True, but k_cache has torch.float64"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, DIM_V, is_fp8_kvcache=True)
    with pytest.raises(CallError, match="descale_k belongs to a cache in 8 bits"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, DIM_V, descale_k=torch.ones(1))
    with pytest.raises(CallError, match="descale_q belongs to q in 8 bits"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, DIM_V, descale_q=torch.ones(1))
    with pytest.raises(CallError, match="head_dim_v is 32, but k_cache has 24 columns"):
        flash_mla_with_kvcache(q, c.k_pages, c.page_table, c.seqused_k, 32)


def test_latents_and_rotary_columns_are_appended_as_values_and_keys() -> None:
    """A row of the cache has the latents, then the rotary columns: views of both are what ``append_kv`` writes."""
    table = torch.arange(9, dtype=torch.int32).reshape(3, 3)
    pages = torch.zeros(9, 16, 1, DIM)
    torch.manual_seed(2)
    latents, rotary = torch.randn(3, 2, 1, DIM_V), torch.randn(3, 2, 1, DIM - DIM_V)
    angles = torch.randn(64, (DIM - DIM_V) // 2)
    lengths = torch.tensor([0, 15, 30], dtype=torch.int32)
    attngen.append_kv(
        rotary, latents, pages[..., DIM_V:], pages[..., :DIM_V], lengths, page_table=table, rotary_cos=angles.cos(),
        rotary_sin=angles.sin(), rotary_interleaved=True,
    )  # fmt: skip
    for b, length in enumerate(lengths.tolist()):
        for j in range(2):
            row = pages[table[b, (length + j) // 16], (length + j) % 16, 0]
            torch.testing.assert_close(row[:DIM_V], latents[b, j, 0])
            cos, sin = angles[length + j].cos(), angles[length + j].sin()
            even, odd = rotary[b, j, 0, 0::2], rotary[b, j, 0, 1::2]
            turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten()
            torch.testing.assert_close(row[DIM_V:], turned)
    assert (pages != 0).any(-1).sum() == 6


@pytest.mark.parametrize("name", LATENT_ROWS)
@pytest.mark.parametrize("lists", ["all", "counted", "with sinks"])
def test_indices_into_caches_in_8_bits(name: str, lists: str) -> None:
    """Slots of the whole cache, of any dtype of one byte; lists may name no key."""
    torch.manual_seed(5)
    pages, columns = latent_cache(name, pages=7, page_size=16)
    q = torch.randn(2, 3, HEADS, columns.shape[-1], dtype=torch.bfloat16)
    indices = torch.randint(-20, 7 * 16 + 20, (2, 3, 24), dtype=torch.int32)
    indices[1, 1] = -1
    lengths = torch.tensor([24, 9], dtype=torch.int32) if lists == "counted" else None
    sinks = torch.tensor([0.5, -torch.inf, torch.inf]) if lists == "with sinks" else None
    given = [pages.view(dtype) for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn)]
    out, lse = flash_mla_with_kvcache(
        q, given[len(lists) % 3], None, None, 512, get_mla_metadata()[0], indices=indices, topk_length=lengths,
        attn_sink=sinks, is_fp8_kvcache=True,
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((2, 3, HEADS, 512), (2, HEADS, 3))
    for b in range(2):
        for i in range(3):
            entries = indices[b, i, : 24 if lengths is None else int(lengths[b])].long()
            keys = columns.flatten(0, 1)[entries[(entries >= 0) & (entries < 7 * 16)]].double()
            logits = q[b, i].double() @ keys.T / columns.shape[-1] ** 0.5
            wanted_lse = logits.logsumexp(-1)
            weights = torch.exp(logits - (wanted_lse if sinks is None else torch.logaddexp(wanted_lse, sinks))[:, None])
            wanted = weights.nan_to_num(0.0) @ keys[:, :512]
            torch.testing.assert_close(out[b, i].double(), wanted, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[b, :, i].double(), wanted_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", LATENT_ROWS)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("sinks", [None, [0.5, -torch.inf, torch.inf]])
def test_rows_of_two_caches(name: str, counted: bool, sinks: list[float] | None) -> None:
    """Both lists are one: a sink counts once, and a query may have keys in one cache, in the other, or in none."""
    torch.manual_seed(6)
    pages, columns = latent_cache(name, pages=7, page_size=16)
    more, more_columns = latent_cache(name, pages=5, page_size=4)
    q = torch.randn(2, 3, HEADS, columns.shape[-1], dtype=torch.bfloat16)
    indices = torch.randint(-20, 7 * 16 + 20, (2, 3, 24), dtype=torch.int32)
    extra = torch.randint(-5, 5 * 4 + 5, (2, 3, 10), dtype=torch.int32)
    indices[0, 1], extra[0, 2], indices[1, 0], extra[1, 0] = -1, -1, -1, -1
    counts, extra_counts = torch.tensor([24, 9], dtype=torch.int32), torch.tensor([3, 10], dtype=torch.int32)
    sink = None if sinks is None else torch.tensor(sinks)
    out, lse = flash_mla_with_kvcache(
        q, pages, None, None, 512, get_mla_metadata()[0], indices=indices, is_fp8_kvcache=True,
        topk_length=counts if counted else None, attn_sink=sink, extra_k_cache=more, extra_indices_in_kvcache=extra,
        extra_topk_length=extra_counts if counted else None,
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((2, 3, HEADS, 512), (2, HEADS, 3))
    for b in range(2):
        for i in range(3):
            lists = (indices[b, i], columns, counts), (extra[b, i], more_columns, extra_counts)
            keys = []
            for entries, rows, numbers in lists:
                used = entries[: int(numbers[b]) if counted else None].long()
                keys.append(rows.flatten(0, 1)[used[(used >= 0) & (used < rows.shape[0] * rows.shape[1])]].double())
            both = torch.cat(keys)
            logits = q[b, i].double() @ both.T / columns.shape[-1] ** 0.5
            wanted_lse = logits.logsumexp(-1)
            total = wanted_lse if sink is None else torch.logaddexp(wanted_lse, sink.double())
            wanted = torch.exp(logits - total[:, None]).nan_to_num(0.0) @ both[:, :512]
            torch.testing.assert_close(out[b, i].double(), wanted, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[b, :, i].double(), wanted_lse, atol=1e-3, rtol=1e-3)


def test_arguments_of_a_second_cache_that_disagree() -> None:
    pages, columns = latent_cache("fp8_mla_656", pages=2, page_size=16)
    q = torch.randn(1, 1, HEADS, columns.shape[-1], dtype=torch.bfloat16)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)

    def call(**extra: torch.Tensor) -> None:
        flash_mla_with_kvcache(q, pages, None, None, 512, indices=indices, **extra)

    with pytest.raises(CallError, match="go together: extra_indices_in_kvcache is missing"):
        call(extra_k_cache=pages)
    with pytest.raises(CallError, match="go together: extra_k_cache is missing"):
        call(extra_indices_in_kvcache=indices)
    with pytest.raises(
        CallError, match="extra_topk_length counts entries of extra_indices_in_kvcache, which is missing"
    ):
        call(extra_topk_length=torch.ones(1, dtype=torch.int32))
    with pytest.raises(CallError, match="must have the format of k_cache, 656 columns in torch.uint8, got 576"):
        call(extra_k_cache=columns[:, :, None], extra_indices_in_kvcache=indices)
    with pytest.raises(CallError, match=r"q and extra_indices_in_kvcache must have shape"):
        call(extra_k_cache=pages, extra_indices_in_kvcache=indices[0])
    with pytest.raises(CallError, match=r"extra_topk_length must have shape \(1,\)"):
        call(extra_k_cache=pages, extra_indices_in_kvcache=indices, extra_topk_length=torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize("page_size", [1, 3])
def test_pages_of_a_second_cache_begin_at_multiples_of_16_bytes(page_size: int) -> None:
    """584 bytes a row are none: a page of few of them has to be padded."""
    pages, columns = latent_cache("fp8_mla_584", pages=2, page_size=16)
    q = torch.randn(1, 1, HEADS, columns.shape[-1], dtype=torch.bfloat16)
    given = {"indices": torch.zeros(1, 1, 4, dtype=torch.int32), "extra_indices_in_kvcache": torch.zeros(1, 1, 4).int()}
    packed = torch.zeros(5, page_size, 1, 584, dtype=torch.uint8)
    with pytest.raises(CallError, match="contiguous rows at multiples of 16 bytes"):
        flash_mla_with_kvcache(q, pages, None, None, 512, extra_k_cache=packed, **given)
    padded = torch.zeros(5, 592 * page_size, dtype=torch.uint8)[:, : 584 * page_size].view(5, page_size, 1, 584)
    flash_mla_with_kvcache(q, pages, None, None, 512, extra_k_cache=padded, **given)


def test_a_second_cache_has_no_gradients() -> None:
    cache = torch.randn(2, 16, 1, 576, dtype=torch.bfloat16)
    q = torch.randn(1, 1, HEADS, 576, dtype=torch.bfloat16)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    given = {"indices": indices, "extra_k_cache": cache.clone().requires_grad_(), "extra_indices_in_kvcache": indices}
    with pytest.raises(CallError, match=r"extra_k_cache requires gradients.*extra_k_cache.detach\(\)"):
        flash_mla_with_kvcache(q, cache, None, None, 512, **given)
    with torch.no_grad():
        flash_mla_with_kvcache(q, cache, None, None, 512, **given)


def test_caches_and_flags_that_disagree() -> None:
    pages, columns = latent_cache("fp8_mla_656", pages=2, page_size=16)
    q = torch.randn(1, 1, HEADS, columns.shape[-1], dtype=torch.bfloat16)
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)
    with pytest.raises(CallError, match="is_fp8_kvcache is False, but k_cache has torch.uint8"):
        flash_mla_with_kvcache(q, pages, None, None, 512, indices=indices, is_fp8_kvcache=False)
    with pytest.raises(NoKernelError, match="causal is not supported"):
        flash_mla_with_kvcache(q, pages, None, None, 512, indices=indices, causal=True)
    with pytest.raises(NoKernelError, match="descale_k is not supported: the rows hold their scales"):
        flash_mla_with_kvcache(q, pages, None, None, 512, indices=indices, descale_k=torch.ones(1))
    with pytest.raises(NoKernelError, match="without indices a cache of 656 bytes a token is not supported"):
        flash_mla_with_kvcache(q, pages, indices[0], indices[0, 0], 512)
    with pytest.raises(CallError, match="descale_k must be one float32 number"):
        flash_mla_with_kvcache(q, pages[..., :576], indices[0], indices[0, 0], 512, descale_k=torch.ones(2))
    with pytest.raises(CallError, match="head_dim_v is 256, but values of the cache have 512"):
        flash_mla_with_kvcache(q, pages, None, None, 256, indices=indices)


def two_caches(name: str, *, queries: int, sink: bool) -> dict[str, Any]:
    torch.manual_seed(8)
    pages, columns = latent_cache(name, pages=7, page_size=16)
    more, _ = latent_cache(name, pages=5, page_size=4)
    counts = torch.tensor([24, 9], dtype=torch.int32), torch.tensor([3, 10], dtype=torch.int32)
    return {
        "q": torch.randn(2, queries, HEADS, columns.shape[-1], dtype=torch.bfloat16), "k_cache": pages,
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "extra_k_cache": more,
        "indices": torch.randint(-20, 7 * 16 + 20, (2, queries, 24), dtype=torch.int32), "topk_length": counts[0],
        "extra_indices_in_kvcache": torch.randint(-5, 5 * 4 + 5, (2, queries, 10), dtype=torch.int32),
        "extra_topk_length": counts[1], "attn_sink": torch.tensor([0.5, -torch.inf, 2.0]) if sink else None,
    }  # fmt: skip


@few("name", LATENT_ROWS, always=0)
def test_compiled_calls_of_two_caches(name: str) -> None:
    given = two_caches(name, queries=2, sink=True)
    program = torch.compile(flash_mla_with_kvcache, fullgraph=True, backend="eager")
    for compiled, eager in zip(program(**given), flash_mla_with_kvcache(**given), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_one_call_reads_both_caches(sink: bool, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is launched besides, once constants are kept: not in a graph either, if metadata holds them."""
    given = two_caches("fp8_mla_584", queries=queries, sink=sink)
    del given["topk_length"]
    metadata, calls = get_mla_metadata()[0], []

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return choice.attend(*args, **kwargs, backend="reference")

    monkeypatch.setattr(flash_mla, "attend", attend)
    monkeypatch.setattr(choice, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: len(calls) > 0)
    with drivers.use(FakeDriver()):
        for _ in range(2):
            flash_mla_with_kvcache(**given, tile_scheduler_metadata=metadata)
    assert len(calls) == 2
    (first, first_options), (second, second_options) = calls
    assert first[0][0].arguments["topk_length"] is second[0][0].arguments["topk_length"]
    assert first_options["pages"].page_table is second_options["pages"].page_table
    assert len(metadata.constants) == 3
