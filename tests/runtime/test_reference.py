"""The eager reference against masks written by hand, against torch, and against itself in other forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import CallError
from attngen.lang.check import compile_variant
from attngen.lang.variant import Scalar
from attngen.lang.variant import Tensor as Declared
from attngen.runtime.reference import eager as reference_module
from attngen.schema import preset, preset_names
from tests.runtime.hand_masks import arguments, by_hand
from tests.runtime.support import variant, window_variant
from tests.sampling import few, sampled

SHAPES = [(2, 4, 2, 33, 33), (1, 2, 1, 9, 40), (2, 2, 2, 40, 9)]  # batch, heads, kv_heads, seqlen_q, seqlen_k


def tensors(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, *, dim: int = 8, dtype: Any = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seqlen_q * 100 + seqlen_k)
    q = torch.randn(batch, seqlen_q, heads, dim, dtype=dtype)
    k = torch.randn(batch, seqlen_k, kv_heads, dim, dtype=dtype)
    return q, k, torch.randn(batch, seqlen_k, kv_heads, dim + 2, dtype=dtype)


@sampled(always=10, shape=[*SHAPES], name=preset_names())
def test_preset_equals_its_mask_by_hand(name: str, shape: tuple[int, ...]) -> None:
    batch, heads, _, seqlen_q, seqlen_k = shape
    q, k, v = (tensor.requires_grad_() for tensor in tensors(*shape))
    given = arguments(name, batch, heads, seqlen_q, seqlen_k)
    out, lse = attngen.attention(q, k, v, variant=preset(name), softmax_scale=0.7, return_lse=True, **given)
    rows = [by_hand(name, given, b, q[b], k[b], v[b], 0.7) for b in range(batch)]
    wanted, wanted_lse = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    weight = torch.randn_like(out)
    alive = wanted_lse.detach() != -math.inf
    gradients = torch.autograd.grad((out * weight).sum() + lse[alive].sum(), (q, k, v))
    expected = torch.autograd.grad((wanted * weight).sum() + wanted_lse[alive].sum(), (q, k, v))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0))


@few("name", preset_names(), always=range(0, 999, 3))
def test_varlen_equals_each_sequence_alone(name: str) -> None:
    lengths = [(5, 5), (0, 3), (7, 12), (4, 0), (11, 6)]
    longest_q, longest_k = 11, 12
    heads, kv_heads = 4, 2
    given = arguments(name, len(lengths), heads, longest_q, longest_k)
    parts = [tensors(1, heads, kv_heads, *length) for length in lengths]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    starts = [torch.tensor([0, *(length[i] for length in lengths)]).cumsum(0).int() for i in range(2)]
    out, lse = attngen.attention_varlen(
        q, k, v, *starts, longest_q, longest_k, variant=preset(name), return_lse=True, **given
    )
    assert out.shape == (q.shape[0], heads, v.shape[-1])
    assert lse.shape == (heads, q.shape[0])
    for b, part in enumerate(parts):
        rows = slice(int(starts[0][b]), int(starts[0][b + 1]))
        alone, alone_lse = by_hand(name, given, b, *(t[0] for t in part), 1 / math.sqrt(8))
        torch.testing.assert_close(out[rows], alone)
        torch.testing.assert_close(lse[:, rows], alone_lse)


def test_full_and_causal_equal_sdpa() -> None:
    q, k, v = tensors(2, 4, 2, 50, 50, dtype=torch.float32)
    for name, causal in (("full", False), ("causal", True)):
        out = attngen.attention(q, k, v, variant=preset(name))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(out, wanted.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_compute_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in tensors(1, 2, 2, 20, 20))
    out, lse = attngen.attention(q, k, v, variant=preset("causal"), return_lse=True)
    exact = attngen.attention(q.double(), k.double(), v.double(), variant=preset("causal"))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, atol=torch.finfo(dtype).eps * 4, rtol=torch.finfo(dtype).eps)


def test_layout_bhsd_is_a_transposed_view() -> None:
    q, k, v = tensors(2, 4, 2, 10, 12)
    out, lse = attngen.attention(q, k, v, variant=preset("causal"), return_lse=True)
    turned, turned_lse = attngen.attention(
        *(t.transpose(1, 2).contiguous() for t in (q, k, v)), variant=preset("causal"), layout="bhsd", return_lse=True
    )
    torch.testing.assert_close(turned, out.transpose(1, 2))
    torch.testing.assert_close(turned_lse, lse)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(1, 4, 2, 40, 40))
    slope = torch.rand(4, dtype=torch.float64, requires_grad=True)
    whole = attngen.attention(q, k, v, variant=preset("alibi"), slope=slope)
    gradients = torch.autograd.grad(whole.square().sum(), (q, k, v, slope))
    monkeypatch.setattr(reference_module, "CHUNK_ELEMENTS", {"cpu": 4 * 40 * 7})
    parts = attngen.attention(q, k, v, variant=preset("alibi"), slope=slope)
    torch.testing.assert_close(parts, whole)
    for ours, theirs in zip(torch.autograd.grad(parts.square().sum(), (q, k, v, slope)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_used_keys_count_as_the_length() -> None:
    q, k, v = tensors(3, 2, 2, 8, 30)
    used = torch.tensor([30, 8, 0], dtype=torch.int32)
    k, v = k.clone(), v.clone()
    for b, length in enumerate(used.tolist()):
        k[b, length:], v[b, length:] = math.nan, math.inf
    out, lse = attngen.attention(q, k, v, variant=preset("causal"), seqused_k=used, return_lse=True)
    for b, length in enumerate(used.tolist()):
        alone, alone_lse = by_hand("causal", {}, b, q[b], k[b, :length], v[b, :length], 1 / math.sqrt(8))
        torch.testing.assert_close(out[b], alone)
        torch.testing.assert_close(lse[b], alone_lse)
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()


def test_used_keys_of_packed_sequences() -> None:
    q, k, v = (t[0] for t in tensors(1, 2, 2, 10, 20))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 10], [0, 12, 20]))
    used = torch.tensor([7, 3], dtype=torch.int32)
    out = attngen.attention_varlen(q, k, v, cu_q, cu_k, 6, 12, variant=preset("full"), seqused_k=used)
    for rows, keys in ((slice(0, 4), slice(0, 7)), (slice(4, 10), slice(12, 15))):
        torch.testing.assert_close(out[rows], by_hand("full", {}, 0, q[rows], k[keys], v[keys], 1 / math.sqrt(8))[0])


def test_dead_rows_are_zero_and_take_no_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 1, 12, 5))  # the first 7 queries stand before every key
    out, lse = attngen.attention(q, k, v, variant=preset("causal"), return_lse=True)
    assert not out[:, :7].any()
    assert (lse[:, :, :7] == -math.inf).all()
    weight = torch.ones_like(out)
    quiet = torch.autograd.grad(out, (q, k, v), weight, retain_graph=True)
    weight[:, :7] = 1e4
    loud = torch.autograd.grad(out, (q, k, v), weight)
    assert not loud[0][:, :7].any()
    for before, after in zip(quiet, loud, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_hidden_values_do_not_leak(bad: float) -> None:
    chosen = compile_variant("cut", "q_pos >= kv and kv < limit", scalars=[Scalar("limit", "int32")])
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 2, 10, 10))
    clean = attngen.attention(q, k, v, variant=chosen, limit=8)
    gradients = torch.autograd.grad(clean.sum(), (q, k, v))
    soiled_k, soiled_v = k.detach().clone(), v.detach().clone()
    soiled_k[:, 8:], soiled_v[:, 8:] = bad, bad
    inputs = q, soiled_k.requires_grad_(), soiled_v.requires_grad_()
    soiled = attngen.attention(*inputs, variant=chosen, limit=8)
    assert torch.equal(soiled, clean)
    for ours, theirs in zip(torch.autograd.grad(soiled.sum(), inputs), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_pair_does_not_leak_where_others_see_the_key(bad: float) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 2, 10, 10))
    clean = attngen.attention(q, k, v, variant=window_variant(), window=3)
    soiled_k, soiled_v = k.detach().clone(), v.detach().clone()
    soiled_k[:, 8:], soiled_v[:, 8:] = bad, bad
    soiled = attngen.attention(q, soiled_k, soiled_v, variant=window_variant(), window=3)
    assert torch.equal(soiled[:, :8], clean[:, :8])
    (ours,) = torch.autograd.grad(soiled[:, :8].sum(), q)
    (theirs,) = torch.autograd.grad(clean[:, :8].sum(), q)
    torch.testing.assert_close(ours[:, :8], theirs[:, :8])


def test_visible_values_propagate() -> None:
    q, k, v = tensors(1, 1, 1, 10, 10)
    k[0, 4, 0, 0] = math.nan
    out = attngen.attention(q, k, v, variant=window_variant(), window=3)
    hit = out.isnan().all(-1)[0, :, 0]
    assert hit.tolist() == [4 <= row < 7 for row in range(10)]
    q, k, v = tensors(1, 1, 1, 10, 10)
    v[0, 4, 0, 1] = math.nan
    out = attngen.attention(q, k, v, variant=window_variant(), window=3)
    assert out.isnan().nonzero()[:, 1].tolist() == [4, 5, 6]
    assert out.isnan().nonzero()[:, 3].tolist() == [1, 1, 1]


def test_a_score_of_minus_infinity_hides_a_pair() -> None:
    chosen = compile_variant(
        "bias", None, score="s + bias[q, kv]", tensors=[Declared("bias", "fp32", ("seqlen_q", "seqlen_k"))]
    )
    q, k, v = tensors(1, 2, 2, 6, 9)
    bias = torch.randn(6, 9)
    bias[2], bias[4, :5] = -math.inf, -math.inf
    v = v.clone()
    out, lse = attngen.attention(q, k, v, variant=chosen, bias=bias, return_lse=True)
    assert not out[:, 2].any()
    assert (lse[:, :, 2] == -math.inf).all()
    v[:, 0] = math.nan
    assert attngen.attention(q, k, v, variant=chosen, bias=bias)[:, [2, 4]].isfinite().all()


def test_the_mask_guards_the_loads_of_the_score() -> None:
    chosen = compile_variant(
        "table", "0 <= q_pos - kv and q_pos - kv < n", score="s + log(table[q_pos - kv])",
        scalars=[Scalar("n", "int32", min=1)], tensors=[Declared("table", "fp32", ("n",), grad=True)],
    )  # fmt: skip
    q, k, v = (t.requires_grad_() for t in tensors(1, 1, 1, 8, 8))
    table = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    out = attngen.attention(q, k, v, variant=chosen, n=3, table=table)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, table))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[3].abs().min() > 0


def test_a_load_that_nothing_guards_raises() -> None:
    chosen = compile_variant("table", None, score="s + table[kv]", tensors=[Declared("table", "fp32", (4,))])
    q, k, v = tensors(1, 1, 1, 3, 5)
    with pytest.raises(IndexError, match="table"):
        attngen.attention(q, k, v, variant=chosen, table=torch.zeros(4))


def test_gradients_of_scalars_and_tensors_pass_gradcheck() -> None:
    chosen = compile_variant(
        "soft", "q_pos >= kv", score="cap * tanh((s + slope[h] * (kv - q_pos)) / cap)",
        scalars=[Scalar("cap", "fp32", min=0.1, grad=True)], tensors=[Declared("slope", "fp32", ("h",), grad=True)],
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any, slope: Any, cap: Any) -> Any:
        return attngen.attention(q, k, v, variant=chosen, slope=slope, cap=cap, return_lse=True)

    inputs = [t.requires_grad_() for t in tensors(1, 2, 1, 4, 5, dim=3)]
    inputs += [
        torch.rand(2, dtype=torch.float64).requires_grad_(),
        torch.tensor(2.0, dtype=torch.float64).requires_grad_(),
    ]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


#: Scores with an infinite derivative where an argument is not chosen, and the same written so that none is computed.
_UNCHOSEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "s + clamp(log(abs(s)), -5, 5)": lambda s, w: s + torch.where(s == 0, -5.0, _safe(torch.log, s, -5.0).clamp(-5, 5)),
    "s + max(sqrt(abs(s)), 0.5)": lambda s, w: s + _safe(torch.sqrt, s, 0.5).clamp(min=0.5),
    "s + max(0.5, sqrt(abs(s)))": lambda s, w: s + _safe(torch.sqrt, s, 0.5).clamp(min=0.5),
    "s - min(rsqrt(abs(s)), 2.0)": lambda s, w: s - _safe(torch.rsqrt, s, 2.0).clamp(max=2.0),
    "s + ceil(sqrt(abs(s)))": lambda s, w: s + torch.ceil(s.abs().sqrt()).detach(),
    "s * (1.0 if sqrt(abs(s)) < 1.0 else 0.5)": lambda s, w: s * torch.where(s.abs() < 1, 1.0, 0.5),
    "s + (sqrt(abs(s)) if s != 0 else 0.0)": lambda s, w: s + _safe(torch.sqrt, s, 0.0),
    "s + sqrt(abs(s)) ** 0": lambda s, w: s + 1.0,
    "s + max(log(w[h]), -4.0)": lambda s, w: s + _safe(torch.log, w, -4.0).clamp(min=-4.0)[:, None, None],
    "s * max(sqrt(w[h]), 0.1)": lambda s, w: s * _safe(torch.sqrt, w, 0.1).clamp(min=0.1)[:, None, None],
    "s + log(w[h])": lambda s, w: s + torch.where(w > 0, w, 1.0).log()[:, None, None] + (w == 0)[:, None, None] * -1e30,
}


def _safe(function: Any, x: torch.Tensor, at_zero: float) -> torch.Tensor:
    return torch.where(x == 0, at_zero, function(torch.where(x == 0, 1.0, x.abs())))


@sampled(form=["dense", "varlen", "paged"], score=[*_UNCHOSEN])
def test_what_is_not_chosen_takes_no_gradient(score: str, form: str) -> None:
    """Seen: NaN in gradients of scores whose min, max, clamp or -inf leaves out an infinite derivative."""
    chosen = variant("unchosen", "q_pos >= kv", score=score, tensors=[Declared("w", "fp32", ("h",), grad=True)])
    q, k, v = (t[0] for t in tensors(1, 3, 1, 5, 7))
    q[1], w = 0.0, torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    inputs = [t.detach().requires_grad_() for t in (q, k, v, w)]
    q, k, v, w = inputs
    logits = _UNCHOSEN[score](torch.einsum("qhd,kgd->hqk", q, k) / math.sqrt(8), w)
    hidden = torch.arange(7) > torch.arange(5)[:, None] + 2
    probabilities = torch.where((logits > -1e29) & ~hidden, logits, -math.inf).softmax(-1).nan_to_num(0.0)
    wanted = torch.einsum("hqk,kgd->qhd", probabilities, v)
    dout = torch.randn_like(wanted)
    cu_q, cu_k = torch.tensor([0, 5]).int(), torch.tensor([0, 7]).int()
    uses: dict[str, Any] = {"variant": chosen, "w": w}
    if form == "dense":
        out = attngen.attention(q[None], k[None], v[None], **uses)[0]
    elif form == "varlen":
        out = attngen.attention_varlen(q, k, v, cu_q, cu_k, 5, 7, **uses)
    else:
        pages = [torch.cat([t, t.new_zeros(1, 1, t.shape[-1])]).unflatten(0, (2, 4)) for t in (k, v)]
        table, used = torch.tensor([[0, 1]]).int(), torch.tensor([7]).int()
        out = attngen.attention_paged(q[None], *pages, table, used, **uses)[0]
    torch.testing.assert_close(out, wanted)
    gradients = torch.autograd.grad(out, inputs, dout, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(wanted, inputs, dout, allow_unused=True, materialize_grads=True)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, torch.where(other.isnan(), 0.0, other))


def test_a_score_that_hides_every_pair_has_gradients_of_zero() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 1, 4, 5))
    out, lse = attngen.attention(q, k, v, variant=variant("hides", score="log(0.0 * s)"), return_lse=True)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum() + lse.clamp(min=0.0).sum(), (q, k, v)):
        assert not gradient.any()


@pytest.mark.parametrize("shape", [(0, 2, 1, 4, 4), (1, 2, 1, 0, 4), (1, 2, 1, 4, 0), (1, 0, 0, 4, 4)], ids=str)
def test_empty_work_has_the_right_shapes(shape: tuple[int, ...]) -> None:
    batch, heads, _, seqlen_q, _ = shape
    q, k, v = (t.requires_grad_() for t in tensors(*shape, dtype=torch.float32))
    out, lse = attngen.attention(q, k, v, variant=preset("causal"), return_lse=True)
    assert out.shape == (batch, seqlen_q, heads, 10)
    assert lse.shape == (batch, heads, seqlen_q)
    assert not out.any()
    assert (lse == -math.inf).all()
    for tensor, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


@pytest.mark.exhaustive
def test_4k_by_4k_fits_in_little_memory() -> None:
    q = torch.randn(1, 4096, 2, 16, requires_grad=True)
    out = attngen.attention(q, q, q, variant=preset("causal"))
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.shape == q.shape


def test_a_variant_without_mask_and_score() -> None:
    q, k, v = tensors(1, 1, 1, 4, 4)
    plain = variant("plain", None)
    torch.testing.assert_close(
        attngen.attention(q, k, v, variant=plain), attngen.attention(q, k, v, variant=preset("full"))
    )


def test_lengths_on_the_cpu_are_checked() -> None:
    q, k, v = (t[0] for t in tensors(1, 1, 1, 6, 6))
    good = torch.tensor([0, 2, 6], dtype=torch.int32)
    for bad, message in (
        ([0, 4, 2], "must not decrease, but cu_seqlens_k\\[2\\] = 2 follows 4"),
        ([1, 2, 6], "must start with 0, got 1"),
        ([0, 2, 7], "ends at 7, beyond the 6 rows"),
    ):
        with pytest.raises(CallError, match=message):
            attngen.attention_varlen(q, k, v, good, torch.tensor(bad, dtype=torch.int32), 6, 6, variant=preset("full"))
    with pytest.raises(CallError, match="max_seqlen_q is 3, but sequence 1 has length 4"):
        attngen.attention_varlen(q, k, v, good, good, 3, 6, variant=preset("full"))
    with pytest.raises(CallError, match=r"seqused_k\[0\] is 3; sequence 0 has 2 keys"):
        used = torch.tensor([3, 0], dtype=torch.int32)
        attngen.attention_varlen(q, k, v, good, good, 6, 6, variant=preset("full"), seqused_k=used)
