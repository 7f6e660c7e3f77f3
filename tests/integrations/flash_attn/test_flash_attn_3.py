"""flash-attn 3's functions against dense attention in float64, on the CPU, so by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.integrations.flash_attn import v2 as flash_attn
from attngen.integrations.flash_attn import v3 as flash_attn_3
from attngen.integrations.flash_attn.used_queries import UsedQueries
from tests.integrations.flash_attn.test_flash_attn import BATCH, DIM, HEADS, KV_HEADS, near, qkv
from tests.integrations.oracles import flash_attention
from tests.sampling import few

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.7},
    {"window_size": (3, 2), "softcap": 1.5},
    {"attention_chunk": 4},
    {"attention_chunk": 4, "causal": True},
    {"attention_chunk": 5, "window_size": (2, 1)},
    {"attention_chunk": 5, "window_size": (3, 0), "softcap": 1.5},
    {"attention_chunk": 100, "softcap": 1.5},
]
#: Arguments that tune flash-attn's kernels.
TUNING: list[dict[str, Any]] = [
    {"num_splits": 4}, {"num_splits": 0}, {"pack_gqa": True}, {"pack_gqa": False}, {"sm_margin": 8},
]  # fmt: skip


@few("given", OPTIONS, ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize(("rows", "keys"), [(9, 13), (13, 9), (1, 13)])
def test_every_combination(given: dict[str, Any], rows: int, keys: int) -> None:
    inputs = [t.requires_grad_() for t in qkv(rows, keys)]
    out, lse = flash_attn_3.flash_attn_func(*inputs, **given, return_attn_probs=True)
    wanted = flash_attention(*inputs, **given)
    near((out, lse), wanted)
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), inputs, weights)
    near(gradients, torch.autograd.grad(wanted, inputs, tuple(w.double() for w in weights)))


@pytest.mark.parametrize("tuning", TUNING, ids=str)
def test_what_tunes_changes_nothing(tuning: dict[str, Any]) -> None:
    q, k, v = qkv()
    plain = flash_attn_3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, causal=True, **tuning), plain)
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, causal=True, deterministic=True), plain)


def test_packed_tensors_are_views() -> None:
    packed = torch.randn(BATCH, 9, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    out = flash_attn_3.flash_attn_qkvpacked_func(packed, None, True, num_heads_q=HEADS, attention_chunk=4)
    near(out, flash_attention(q, k, v, causal=True, attention_chunk=4)[0])
    stacked = torch.randn(BATCH, 9, 3, HEADS, DIM)
    near(flash_attn_3.flash_attn_qkvpacked_func(stacked), flash_attention(*stacked.unbind(2))[0])
    for wrong, heads in ((packed, None), (packed, 5), (packed, 8), (stacked[:, :, :2], None)):
        with pytest.raises(CallError, match="qkv must have shape"):
            flash_attn_3.flash_attn_qkvpacked_func(wrong, num_heads_q=heads)


# --- used lengths -------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (5, 0, 11, 3), (7, 4, 13, 6)
USED_Q, USED_K = (2, 0, 11, 0), (7, 1, 9, 0)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_sequence(
    inputs: list[Tensor], starts: tuple[Tensor, Tensor], used: tuple[Any, Any], given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Results of each sequence by itself; 0 and −inf for queries that are not used, and after the last."""
    q, k, v = inputs
    parts, sums, behind = [], [], 0
    for i in range(len(starts[0]) - 1):
        (first, last), (first_k, _) = (s[i : i + 2].tolist() for s in starts)
        count, count_k = used[0][i], used[1][i]
        rows, keys = slice(first, first + count), slice(first_k, first_k + count_k)
        out, lse = flash_attention(q[None, rows], k[None, keys], v[None, keys], **given)
        idle = last - first - count
        parts += [out[0], out.new_zeros(idle, *out.shape[2:])]
        sums += [lse[0], lse.new_full((lse.shape[1], idle), float("-inf"))]
        behind = last
    rest = q.shape[0] - behind
    parts.append(parts[0].new_zeros(rest, *parts[0].shape[1:]))
    sums.append(sums[0].new_full((sums[0].shape[0], rest), float("-inf")))
    return torch.cat(parts), torch.cat(sums, dim=1)


@few("given", [*OPTIONS, {"deterministic": True, "causal": True}], ids=str, always=range(0, 999, 3))
@pytest.mark.parametrize("behind", [0, 3])
def test_only_used_queries_are_computed(given: dict[str, Any], behind: int) -> None:
    """Rows after those that are used, also those that hold NaN, do not matter, and take no gradient."""
    torch.manual_seed(3)
    inputs = [
        torch.randn(sum(lengths) + behind, heads, DIM)
        for lengths, heads in ((LENGTHS_Q, HEADS), (LENGTHS_K, KV_HEADS), (LENGTHS_K, KV_HEADS))
    ]
    starts = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    for sequence, (first, used) in enumerate(zip(starts[0].tolist(), USED_Q, strict=False)):
        inputs[0][first + used : first + LENGTHS_Q[sequence]] = float("nan")
    inputs = [t.requires_grad_() for t in inputs]
    used = tuple(torch.tensor(n, dtype=torch.int32) for n in (USED_Q, USED_K))
    out, lse = flash_attn_3.flash_attn_varlen_func(*inputs, *starts, 11, 13, *used, **given, return_attn_probs=True)
    given = {name: value for name, value in given.items() if name != "deterministic"}
    wanted = by_sequence(inputs, starts, (USED_Q, USED_K), given)
    near((out, lse), wanted)
    weights = torch.randn_like(out), torch.where(lse.isinf(), 0.0, torch.randn_like(lse))
    weights[0][wanted[0].detach().abs().sum(dim=(1, 2)) == 0] = 1e4
    gradients = torch.autograd.grad((out, lse), inputs, weights)
    near(gradients, torch.autograd.grad(wanted, inputs, tuple(w.double() for w in weights)))


@pytest.mark.parametrize("packed_k", [False, True])
def test_batches_with_used_lengths(packed_k: bool) -> None:
    """q has a batch axis, and k has one or is packed."""
    q, k, v = (t.requires_grad_() for t in qkv())
    used = torch.tensor([9, 4], dtype=torch.int32)
    keys = (k.flatten(0, 1), v.flatten(0, 1)) if packed_k else (k, v)
    starts = torch.tensor([0, 13, 26], dtype=torch.int32) if packed_k else None
    out, lse = flash_attn_3.flash_attn_varlen_func(
        q, *keys, None, starts, None, 13, seqused_q=used, causal=True, return_attn_probs=True
    )
    assert (out.shape, lse.shape) == (q.shape, (BATCH, HEADS, 9))
    for b, count in enumerate((9, 4)):
        part = slice(b, b + 1)
        wanted = flash_attention(q[part, :count], k[part], v[part], causal=True)
        near((out[part, :count], lse[part, :, :count]), wanted)
        assert not out[part, count:].any()
        assert lse[part, :, count:].isneginf().all()


def test_used_keys_alone() -> None:
    q, k, v = qkv()
    used = torch.tensor([13, 5], dtype=torch.int32)
    out = flash_attn_3.flash_attn_varlen_func(q, k, v, None, None, None, None, seqused_k=used, causal=True)
    for b, count in enumerate((13, 5)):
        part = slice(b, b + 1)
        near(out[part], flash_attention(q[part], k[part, :count], v[part, :count], causal=True)[0])


def test_used_lengths_that_cannot_be_are_refused() -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv(9, 9))
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    for wrong, message in (
        (torch.tensor([9, 10], dtype=torch.int32), r"seqused_q\[1\] is 10; the sequence has 9 queries"),
        (torch.tensor([-1, 9], dtype=torch.int32), r"seqused_q\[0\] is -1; the sequence has 9 queries"),
        (torch.tensor([9, 9]), r"seqused_q must be int32 of shape \(2,\), got torch.int64"),
        (torch.tensor([9], dtype=torch.int32), r"seqused_q must be int32 of shape \(2,\), got torch.int32 of shape"),
        ([9, 9], r"seqused_q must be int32 of shape \(2,\), got \[9, 9\]"),
    ):
        with pytest.raises(CallError, match=message):
            flash_attn_3.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, wrong)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="q must have 3 dimensions with cu_seqlens"):
        flash_attn_3.flash_attn_varlen_func(q[None], k, v, starts, starts, 9, 9)


def test_nothing_at_all() -> None:
    empty = torch.zeros(0, HEADS, DIM), *(torch.zeros(0, KV_HEADS, DIM) for _ in "kv")
    starts, used = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    out = flash_attn_3.flash_attn_varlen_func(*empty, starts, starts, 0, 0, used)
    assert out.shape == (0, HEADS, DIM)


@pytest.mark.exhaustive
def test_used_queries_are_compiled_once() -> None:
    torch._dynamo.reset()

    def program(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, used: Tensor) -> Any:
        return flash_attn_3.flash_attn_varlen_func(q * 2, k, v, starts, starts, 12, 12, used, causal=True)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)
    for turn, lengths in enumerate(((7, 12), (3, 5), (9, 2))):
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        used = torch.tensor([2, 1], dtype=torch.int32)
        inputs = [torch.randn(sum(lengths), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            near(compiled(*inputs, starts, used), program(*inputs, starts, used))


# --- arguments ----------------------------------------------------------------------------------------------


def test_quantized_tensors_take_scales_for_each_sequence_and_kv_head() -> None:
    q, k, v = ((8 * t).to(torch.float8_e4m3fn) for t in qkv())
    scales = [0.05 + torch.rand(q.shape[0], KV_HEADS) for _ in range(3)]
    plain = [
        t.float() * scale.repeat_interleave(t.shape[2] // KV_HEADS, dim=1)[:, None, :, None]
        for t, scale in zip((q, k, v), scales, strict=True)
    ]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **named)
    wanted, wanted_lse = flash_attn_3.flash_attn_func(*plain, causal=True, return_attn_probs=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0, rtol=2**-8)
    torch.testing.assert_close(lse, wanted_lse)
    ones = flash_attn_3.flash_attn_func(q, k, v)  # as there, 1 where none is given
    torch.testing.assert_close(
        ones.float(), flash_attn_3.flash_attn_func(*(t.float() for t in (q, k, v))), atol=0, rtol=2**-8
    )


@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_in_8_bits_gets_new_keys_and_is_read(paged: bool, of_q: torch.dtype) -> None:
    torch.manual_seed(3)
    q, new_k, new_v = (torch.randn(3, 2, heads, 32).bfloat16() for heads in (8, 2, 2))
    caches = [torch.randn(6, 16, 2, 32).to(torch.float8_e4m3fn) for _ in "kv"]
    lengths = torch.tensor([0, 9, 14] if not paged else [3, 20, 30], dtype=torch.int32)
    table = torch.tensor([[5, 0], [1, 4], [2, 3]], dtype=torch.int32) if paged else None
    shape = (6, 2) if paged else (3, 2)
    scales = {name: torch.rand(shape) + 0.5 for name in ("k_descale", "v_descale")}
    both = zip(caches, scales.values(), strict=True)
    wide = [cache[: shape[0]].float() * scale[:, None, :, None] for cache, scale in both]
    q = q.to(of_q)
    of_8_bits = {"q_descale": torch.tensor(0.5)} if of_q == torch.float8_e4m3fn else {}
    out = flash_attn_3.flash_attn_with_kvcache(
        q, *caches, new_k, new_v, cache_seqlens=lengths, page_table=table, causal=True, **scales, **of_8_bits
    )
    units = q.float() * (0.5 if of_8_bits else 1.0)
    wanted = flash_attn_3.flash_attn_with_kvcache(
        units, *wide, new_k.float(), new_v.float(), cache_seqlens=lengths, page_table=table, causal=True
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.1, rtol=0.05)  # new keys are rounded to 8 bits


def test_what_no_kernel_has_is_refused() -> None:
    with pytest.raises(NoKernelError, match="qv is not supported"):
        flash_attn_3.flash_attn_func(*qkv(), qv=torch.ones(1))
    with pytest.raises(CallError, match="k_descale is for quantized tensors"):
        flash_attn_3.flash_attn_func(*qkv(), k_descale=torch.ones(()))
    with pytest.raises(CallError, match="attention_chunk must be an integer from 1 to"):
        flash_attn_3.flash_attn_func(*qkv(), attention_chunk=-1)


@pytest.mark.parametrize(
    "pair", [torch.tensor([3, 2]), torch.tensor([3, 2], dtype=torch.int32), [3, torch.tensor(2)], "numpy"], ids=str
)
def test_a_window_may_be_a_tensor_or_an_array(pair: Any) -> None:
    pair = pytest.importorskip("numpy").array([3, 2]) if isinstance(pair, str) else pair
    q, k, v = qkv()
    wanted = flash_attn_3.flash_attn_func(q, k, v, window_size=(3, 2))
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, window_size=pair), wanted)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=pair), wanted)
    assert torch.equal(
        flash_attn_3.flash_attn_func(q, k, v, attention_chunk=torch.tensor(4)),
        flash_attn_3.flash_attn_func(q, k, v, attention_chunk=4),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", [(3,), (3, 2, 1), "ab", (0.5, 1), torch.tensor([0.5, 1]), 3, None, (True, 1)], ids=str)
def test_another_window_is_refused(pair: Any) -> None:
    with pytest.raises(CallError, match="window_size must be"):
        flash_attn_3.flash_attn_func(*qkv(), window_size=pair)


def test_rows_of_a_page_table_are_those_of_cache_batch_idx() -> None:
    q, k, v = qkv(2, 16)
    table = torch.tensor([[9, 9], [2, 3], [9, 9], [0, 1]], dtype=torch.int32)
    index = torch.tensor([3, 1], dtype=torch.int32)
    pages = [t.reshape(4, 8, *t.shape[2:]) for t in (k, v)]
    used = torch.tensor([16, 11], dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": used, "causal": True}
    wanted = flash_attn_3.flash_attn_with_kvcache(q, k, v, **options)
    out = flash_attn_3.flash_attn_with_kvcache(q, *pages, page_table=table, cache_batch_idx=index, **options)
    near(out, wanted)
    with pytest.raises(CallError, match=r"cache_batch_idx\[1\] is 4; the page table has 4 rows"):
        flash_attn_3.flash_attn_with_kvcache(
            q, *pages, page_table=table, cache_batch_idx=index + torch.tensor([0, 3], dtype=torch.int32), **options
        )


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (5, 2)}, {}], ids=str)
def test_chunks_are_counted_from_the_first_key_that_is_not_padding(options: dict[str, Any], softcap: float) -> None:
    q, k, v = qkv(3, 16)
    pads, used = [5, 0], [16, 11]
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(used, dtype=torch.int32), softcap=softcap, attention_chunk=4, **options,
        cache_leftpad=torch.tensor(pads, dtype=torch.int32),
    )  # fmt: skip
    for b, (pad, end) in enumerate(zip(pads, used, strict=True)):
        part = slice(b, b + 1)
        wanted, _ = flash_attention(
            q[part], k[part, pad:end], v[part, pad:end], attention_chunk=4, softcap=softcap, **options
        )
        near(out[part], wanted)


def test_queries_of_chunks_have_positions_of_their_own() -> None:
    """As under a causal mask: only without any mask do all have the position of the first."""
    q, k, v = qkv(3, 16)
    angles = torch.rand(16, DIM // 2)
    used = torch.tensor([9, 12], dtype=torch.int32)
    given: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": used}
    new = k[:, :3].clone(), v[:, :3].clone()
    with_chunk = flash_attn_3.flash_attn_with_kvcache(q, k.clone(), v.clone(), *new, attention_chunk=1000, **given)
    with_window = flash_attn_3.flash_attn_with_kvcache(q, k.clone(), v.clone(), *new, window_size=(500, 500), **given)
    without = flash_attn_3.flash_attn_with_kvcache(q, k.clone(), v.clone(), *new, **given)
    near(with_chunk, with_window)
    assert not torch.allclose(with_chunk, without, atol=1e-2)


@pytest.mark.parametrize("rows", [2, 3])
def test_rotary_tables_in_8_bits(rows: int) -> None:
    """Beside a cache in 8 bits: as many queries as new keys, and more."""
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(rows, 16))
    angles = torch.rand(16, DIM // 2)
    tables = [t.to(torch.float8_e4m3fn) for t in (angles.cos(), angles.sin())]
    used = torch.tensor([9, 12], dtype=torch.int32)
    new = k[:, :2].clone(), v[:, :2].clone()
    actual, wanted = (
        flash_attn_3.flash_attn_with_kvcache(
            q, k.clone(), v.clone(), *new, rotary_cos=cos, rotary_sin=sin,
            cache_seqlens=used, causal=True,
        )
        for cos, sin in (tables, [t.float() for t in tables])
    )  # fmt: skip
    assert torch.equal(actual, wanted)


def test_a_cache_call_returns_what_flash_attn_3_does() -> None:
    q, k, v = qkv()
    out, lse, *partial = flash_attn_3.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    near((out, lse), flash_attention(q, k, v, causal=True))
    assert [t.numel() for t in partial] == [0, 0]
    with pytest.raises(CallError, match="cu_seqlens_k_new says where new keys begin"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, cu_seqlens_k_new=offsets((1, 1)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_partial_results_are_combined(dtype: torch.dtype | None) -> None:
    q, k, v = qkv()
    outs, lses = zip(*(flash_attention(q, k[:, part], v[:, part]) for part in (slice(4), slice(4, 13))), strict=True)
    stacked = torch.stack([t.float() for t in outs]), torch.stack([t.float().transpose(1, 2) for t in lses])
    nothing = torch.full_like(stacked[0][:1], float("nan")), torch.full_like(stacked[1][:1], float("-inf"))
    partial = [torch.cat(pair) for pair in zip(stacked, nothing, strict=True)]
    out, lse = flash_attn_3.flash_attn_combine(*partial, out_dtype=dtype)
    assert out.dtype == (dtype or torch.float32)
    wanted, wanted_lse = flash_attention(q, k, v)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5 if dtype is None else 1e-2, rtol=1e-2)
    near(lse, wanted_lse.transpose(1, 2))
    room = torch.empty_like(out)
    assert flash_attn_3.flash_attn_combine(*partial, room)[0] is room
    assert torch.equal(room, out)
    for wrong, reason in (
        ((partial[0].half(), partial[1]), "out_partial must be float32"),
        ((partial[0], partial[1][0]), "lse_partial must be float32 of shape"),
        ((*partial, room[:1]), "out must have shape"),
        ((*partial, room, torch.float64), "but out_dtype is torch.float64"),
    ):
        with pytest.raises(CallError, match=reason):
            flash_attn_3.flash_attn_combine(*wrong)


# --- forward and backward by themselves ---------------------------------------------------------------------


def test_passes() -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    q, k, v = inputs
    room = torch.empty_like(q)
    with torch.no_grad():
        out, lse, *partial = flash_attn_3._flash_attn_forward(q, k, v, out_=room, causal=True, window_size_left=5)
    assert out is room
    assert [t.numel() for t in partial] == [0, 0]
    wanted = flash_attention(*inputs, causal=True, window_size=(5, -1))
    near((out, lse), wanted)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(t) for t in inputs]
    sums = flash_attn_3._flash_attn_backward(
        dout, q, k, v, out, lse, dq=gradients[0], dk=gradients[1], dv=gradients[2], is_causal=True, window_size_left=5
    )
    near(tuple(gradients), torch.autograd.grad(wanted[0], inputs, dout.double()))
    assert sums.shape == (BATCH, HEADS, 128)
    near(sums[..., :9], (dout.double() * wanted[0]).sum(-1).transpose(1, 2))
    with pytest.raises(NoKernelError, match="page_table is not supported"):
        flash_attn_3._flash_attn_forward(q, k, v, page_table=torch.zeros(1))


@pytest.mark.parametrize("packed", [False, True])
def test_passes_with_used_lengths(packed: bool) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    used_q, used_k = (torch.tensor(n, dtype=torch.int32) for n in ((9, 4), (7, 13)))
    starts = tuple(torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 13)) if packed else (None, None)
    longest = (9, 13) if packed else (None, None)
    with torch.no_grad():
        given = [t.flatten(0, 1) if packed else t for t in (q, k, v)]
        out, lse, *_ = flash_attn_3._flash_attn_forward(
            *given, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], seqused_q=used_q, seqused_k=used_k,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], causal=True,
        )  # fmt: skip
        dout = torch.randn_like(out)
        gradients = [torch.empty_like(t) for t in given]
        flash_attn_3._flash_attn_backward(
            dout, *given, out, lse, *starts, used_q, used_k, *longest, *gradients, is_causal=True
        )
    dout = dout.view(q.shape)
    loss: Any = 0.0
    for b, (count, count_k) in enumerate(((9, 7), (4, 13))):
        one = flash_attention(q[b : b + 1, :count], k[b : b + 1, :count_k], v[b : b + 1, :count_k], causal=True)[0]
        near(out.view(q.shape)[b, :count], one[0])
        loss = loss + (one * dout[b, :count]).sum()
    for one, other in zip(gradients, torch.autograd.grad(loss, (q, k, v)), strict=True):
        near(one.view(other.shape), other)


def test_both_versions_agree() -> None:
    q, k, v = qkv()
    assert torch.equal(
        flash_attn_3.flash_attn_func(q, k, v, 0.5, True, window_size=(4, -1)),
        flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, True, (4, -1)),
    )


def test_used_rows_of_8_bits_are_moved_as_bytes() -> None:
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 3, 5], [2, 1]))
    rows = torch.randn(5, 1, 16).to(torch.float8_e4m3fn)
    used = UsedQueries.of(starts, lengths, 5).together(rows)
    assert used.dtype == rows.dtype
    assert torch.equal(used.float()[:3], rows.float()[[0, 1, 3]])
    assert not used.float()[3:].any()
