"""flash-attn's functions against dense attention in float64, argument by argument; on the CPU, so by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attngen.errors import CallError
from attngen.integrations.flash_attn import cache as flash_cache
from attngen.integrations.flash_attn import v2 as flash_attn
from tests.integrations.oracles import flash_attention
from tests.sampling import few

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def qkv(rows: int = 9, keys: int = 13, kv_heads: int = KV_HEADS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows * 100 + keys)
    q = torch.randn(BATCH, rows, HEADS, DIM)
    return q, torch.randn(BATCH, keys, kv_heads, DIM), torch.randn(BATCH, keys, kv_heads, DIM)


def near(actual: tuple[Any, ...] | Tensor, wanted: tuple[Tensor, ...] | Tensor) -> None:
    for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (actual, wanted)), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.7},
    {"window_size": (3, -1)},
    {"window_size": (-1, 2)},
    {"window_size": (3, 2)},
    {"window_size": (0, 0)},
    {"window_size": (4, 0)},
    {"window_size": (4, 3), "causal": True},  # causal wins over the right side
    {"window_size": (2**31 - 1, 2**31 - 1)},
    {"window_size": (None, None)},
    {"window_size": (None, 2)},
    {"window_size": (4, None), "causal": True},
    {"softcap": 1.5},
    {"softcap": 1.5, "causal": True},
    {"softcap": 1.5, "window_size": (3, 0)},
    {"softcap": 1.5, "window_size": (3, 1)},
    {"alibi": (HEADS,), "causal": True},
    {"alibi": (HEADS,)},
    {"alibi": (BATCH, HEADS), "causal": True},
    {"alibi": (BATCH, HEADS), "window_size": (3, 2)},
    {"alibi": (HEADS,), "softcap": 1.5, "causal": True},
    {"alibi": (BATCH, HEADS), "softcap": 1.5, "window_size": (3, 2)},
]


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    shape = given.get("alibi")
    options = {name: value for name, value in given.items() if name != "alibi"}
    return options if shape is None else {**options, "alibi_slopes": torch.rand(shape) + 0.1}


@few("given", OPTIONS, ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize(("rows", "keys"), [(9, 13), (13, 9), (1, 13)])
def test_every_combination(given: dict[str, Any], rows: int, keys: int) -> None:
    q, k, v = qkv(rows, keys)
    options = options_of(given)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    near((out, lse), flash_attention(q, k, v, **options))
    assert probabilities.numel() == 0
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), out)


@few("given", OPTIONS, ids=str, always=range(0, 999, 3))
def test_varlen_is_sequence_by_sequence(given: dict[str, Any]) -> None:
    options = options_of(given)
    lengths_q, lengths_k = (5, 11), (7, 3)
    starts_q, starts_k = (torch.tensor([0, n, n + m], dtype=torch.int32) for n, m in (lengths_q, lengths_k))
    q = torch.randn(16, HEADS, DIM)
    k, v = torch.randn(10, KV_HEADS, DIM), torch.randn(10, KV_HEADS, DIM)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 11, 7, **options, return_attn_probs=True
    )
    for i in range(2):
        rows, keys = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        own = dict(options)
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[i]
        wanted, wanted_lse = flash_attention(q[None, rows], k[None, keys], v[None, keys], **own)
        near((out[rows], lse[:, rows]), (wanted[0], wanted_lse[0]))


def test_packed_tensors_are_views() -> None:
    qkv_packed = torch.randn(BATCH, 9, 3, HEADS, DIM, requires_grad=True)
    q, k, v = qkv_packed.unbind(2)
    options = {"causal": True, "window_size": (4, 0)}
    near(flash_attn.flash_attn_qkvpacked_func(qkv_packed, **options), flash_attention(q, k, v, **options)[0])
    near(
        flash_attn.flash_attn_kvpacked_func(q, qkv_packed[:, :, 1:], 0.0, 0.5, True),
        flash_attention(q, k, v, softmax_scale=0.5, causal=True)[0],
    )
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = qkv_packed.flatten(0, 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(flat, starts, 9, 0.0, None, True)
    near(packed.view(BATCH, 9, HEADS, DIM), flash_attention(q, k, v, causal=True)[0])
    halves = flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], starts, starts, 9, 9, causal=True)
    near(halves, packed)


@pytest.mark.parametrize(
    "given", [{"causal": True}, {"alibi": (BATCH, HEADS), "softcap": 1.5, "window_size": (3, 2)}], ids=str
)
def test_gradients(given: dict[str, Any]) -> None:
    options = options_of(given)
    inputs = [t.requires_grad_() for t in qkv()]
    out, lse, _ = flash_attn.flash_attn_func(*inputs, **options, return_attn_probs=True)
    wanted, wanted_lse = flash_attention(*inputs, **options)
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), inputs, weights)
    near(gradients, torch.autograd.grad((wanted, wanted_lse), inputs, tuple(w.double() for w in weights)))


@pytest.mark.exhaustive
@few("given", [{"causal": True}, {"window_size": (3, 2), "softcap": 1.5}, {"alibi": (HEADS,)}], ids=str, always=(1,))
def test_lengths_and_batches_that_change_are_compiled_once(given: dict[str, Any]) -> None:
    options = options_of(given)
    torch._dynamo.reset()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_func(q * 2, k, v, **options)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for turn, (batch, length) in enumerate(((7, 12), (3, 30), (9, 5))):
        inputs = [torch.randn(batch, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            near(compiled(*inputs), program(*inputs))


def test_a_last_dimension_that_is_not_contiguous_is_copied() -> None:
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in qkv())
    assert q.stride(-1) != 1
    wanted = flash_attention(q, k, v, causal=True)[0]
    near(flash_attn.flash_attn_func(q, k, v, causal=True), wanted)
    near(flash_attn.flash_attn_with_kvcache(q, k.contiguous(), v.contiguous(), causal=True), wanted)


def test_longest_lengths_may_be_tensors() -> None:
    """torch takes a tensor of one integer where flash-attn's operators declare an int, and models pass such."""
    q, k, v = (t.flatten(0, 1) for t in qkv(9, 9))
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    longest = starts.diff().max()
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)  # type: ignore[arg-type]
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=True))


def test_tensors_without_data_have_results_of_their_shapes() -> None:
    q, k, v = (t.to("meta") for t in qkv())
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.is_meta
    assert (out.shape, lse.shape) == (q.shape, (BATCH, HEADS, 9))
    with FakeTensorMode():
        q, k, v = qkv()
        lengths = torch.full((BATCH,), 5, dtype=torch.int32)
        out = flash_attn.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=lengths)
        assert out.shape == q.shape


# --- caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (4, 0)])
def test_kvcache_reads_what_is_used(causal: bool, window_size: tuple[int, int]) -> None:
    q, k, v = qkv(rows=2, keys=12)
    used = torch.tensor([5, 12], dtype=torch.int32)
    k[0, 5:] = v[0, 5:] = float("nan")  # room for more
    options = {"causal": causal, "window_size": window_size}
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True, **options)
    for b, length in enumerate(used.tolist()):
        part = slice(b, b + 1)
        wanted, wanted_lse = flash_attention(q[part], k[part, :length], v[part, :length], **options)
        near((out[part], lse[part]), (wanted, wanted_lse))


@pytest.mark.parametrize("used", [6, torch.tensor([4, 9], dtype=torch.int32)], ids=["int", "tensor"])
def test_kvcache_appends_in_place(used: int | Tensor) -> None:
    q, k_cache, v_cache = qkv(rows=3, keys=16)
    _, new_k, new_v = qkv(rows=3, keys=3)
    before = k_cache.clone()
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, cache_seqlens=used, causal=True)
    lengths = [used] * BATCH if isinstance(used, int) else used.tolist()
    for b, length in enumerate(lengths):
        assert torch.equal(k_cache[b, length : length + 3], new_k[b])
        assert torch.equal(v_cache[b, length : length + 3], new_v[b])
        untouched = [*range(length), *range(length + 3, 16)]
        assert torch.equal(k_cache[b, untouched], before[b, untouched])
        part, end = slice(b, b + 1), length + 3
        near(out[part], flash_attention(q[part], k_cache[part, :end], v_cache[part, :end], causal=True)[0])


def test_caches_are_no_part_of_a_graph() -> None:
    """flash-attn differentiates none of this; a cache that recorded every step would keep all of them alive."""
    q, k_cache, v_cache = qkv(rows=3, keys=16)
    new = torch.randn(BATCH, 3, KV_HEADS, DIM, requires_grad=True)
    out = flash_attn.flash_attn_with_kvcache(q.requires_grad_(), k_cache, v_cache, new, new, cache_seqlens=4)
    assert not any(t.requires_grad for t in (out, k_cache, v_cache))
    assert torch.equal(k_cache[:, 4:7], new)


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 1.0}, "the rate of dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout_p": -0.1}, "the rate of dropout must be at least 0 and below 1, got -0.1"),
        ({"softcap": -1.0}, "softcap must be positive, or 0 for none"),
        ({"window_size": (3,)}, r"window_size must be \(left, right\)"),
        ({"window_size": None}, r"window_size must be \(left, right\), integers with -1 or None for no limit"),
        ({"window_size": 128}, r"window_size must be \(left, right\), .*, got 128"),
        ({"window_size": (3.5, 0)}, r"window_size must be \(left, right\), integers .*, got \(3.5, 0\)"),
        ({"softcap": None}, "softcap must be positive, or 0 for none, got None"),
        ({"alibi_slopes": [1.0] * 4}, "alibi_slopes must be a torch.Tensor, got list"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be float32 of shape \(4,\) or \(2, 4\)"),
        ({"alibi_slopes": torch.ones(4).half()}, "alibi_slopes must be float32"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        flash_attn.flash_attn_func(*qkv(), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rotary_cos": torch.ones(20, 2)}, "rotary_cos rotates new keys"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"page table must be int32 of shape \(2, max_pages\)"),
        ({"cache_batch_idx": torch.zeros(2)}, r"cache_batch_idx must be int32 of shape \(2,\), got torch.float32"),
        ({"cache_leftpad": torch.zeros(3, dtype=torch.int32)}, r"cache_leftpad must be int32 of shape \(2,\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_cache_call_refuses(options: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(CallError, match=reason):
        flash_attn.flash_attn_with_kvcache(*qkv(), **options)


def test_one_split_of_a_cache_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that asks for it goes by pages, whose calls can say so; results are the same."""
    asked: list[Any] = []
    attend = flash_cache.attend_wide
    monkeypatch.setattr(
        flash_cache,
        "attend_wide",
        lambda *given, **options: asked.append(options.get("pages")) or attend(*given, **options),
    )
    q, k, v = qkv()
    for lengths in (None, 7):
        plain, one = (
            flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, num_splits=n)
            for n in (0, 1)
        )
        near(one, (plain,))
    assert [pages and pages.num_splits for pages in asked] == [None, 1, None, 1]


def test_half_of_a_cache_update_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(CallError, match="k and v are given together"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, cache_seqlens=1)
    with pytest.raises(CallError, match="need cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v)


def test_lengths_that_a_cache_cannot_have_are_refused() -> None:
    q, k, v = qkv(rows=3, keys=13)
    with pytest.raises(CallError, match="room for 13 keys; 11 and 3 new ones do not fit"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k[:, :3], v[:, :3], cache_seqlens=11)
    for wrong in (torch.tensor([5], dtype=torch.int32), torch.tensor([5.0, 6.0])):
        with pytest.raises(CallError, match=r"cache_seqlens must be a number, or int32 of shape \(2,\)"):
            flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=wrong)
    for given, message in (
        (14, "room for 13 keys; 14 and 0 new ones do not fit"),
        (-1, "room for 13 keys; -1 and 0 new ones do not fit"),
        (2.5, "cache_seqlens must be an integer or a torch.Tensor, got float"),
        ([2, 3], "cache_seqlens must be an integer or a torch.Tensor, got list"),
        (torch.tensor([5, 14]), r"cache_seqlens\[1\] is 14; the cache has room for 13 keys, 0 of them new"),
        (torch.tensor([5, 6], device="meta"), "cache_seqlens is on meta, but q is on cpu"),
    ):
        with pytest.raises(CallError, match=message):
            flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=given)  # type: ignore[arg-type]
    with pytest.raises(CallError, match=r"cache_seqlens\[0\] is 11; the cache has room for 13 keys, 3 of them new"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k[:, :3], v[:, :3], cache_seqlens=torch.tensor([11, 2]))


def test_new_keys_that_do_not_fit_their_cache_are_refused() -> None:
    """None of these may be broadcast or cast into the cache: it would hold what nobody computed."""
    q, k, v = qkv(rows=3, keys=13)
    new_k, new_v = k[:, :2], v[:, :2]
    for given_k, given_v, message in (
        (new_k[:, :, :1], new_v, "k has 1 heads, but v has 2"),
        (new_k[:, :, :1], new_v[:, :, :1], "k has 1 heads of 8 numbers, but k_cache has 2 of 8"),
        (new_k, new_v[:1], r"k has shape \(2, 2, 2, 8\), but v has \(1, 2, 2, 8\); both must hold the same tokens"),
        (new_k, v[:, :1], r"k has shape \(2, 2, 2, 8\), but v has \(2, 1, 2, 8\); both must hold the same tokens"),
        (new_k.half(), new_v, "k has torch.float16 on cpu, but k_cache has torch.float32 on cpu"),
        (new_k, [1.0], "v must be a torch.Tensor, got list"),
    ):
        before = k.clone()
        with pytest.raises(CallError, match=message):
            flash_attn.flash_attn_with_kvcache(q, k, v, given_k, given_v, cache_seqlens=4)  # type: ignore[arg-type]
        assert torch.equal(k, before)


def test_what_is_no_tensor_is_named() -> None:
    q, k, v = qkv()
    with pytest.raises(CallError, match="k must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_func(q, None, v)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="kv must be a torch.Tensor, got list"):
        flash_attn.flash_attn_kvpacked_func(q, [k, v])  # type: ignore[arg-type]
    with pytest.raises(CallError, match="cu_seqlens_q must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], None, None, 9, 13)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="k_cache must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_with_kvcache(q, None, v)  # type: ignore[arg-type]


def test_wrong_packing_is_refused() -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv())
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 13))
    with pytest.raises(CallError, match="k_cache must have shape"):
        flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 9, 13, block_table=torch.zeros(2, 1))
    with pytest.raises(CallError, match=r"kv must have shape \(total, 2, heads, head_dim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(q, k, starts_q, starts_k, 9, 13)
