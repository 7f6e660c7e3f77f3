"""``attngen.debug``: scores and probabilities of chosen rows, and where a call differs from the reference."""

from __future__ import annotations

import importlib.util
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError, LoadError
from attngen.inspect import comparison
from tests.runtime.support import FakeDriver, kernel

HEADS, KV_HEADS, DIM = 4, 2, 16
BIASED = attngen.variant(
    "q_pos >= kv and kv >= skip", "s + gain * bias[h, kv]", sink="extra[h]", name="biased_sunk",
    scalars={"skip": {"type": "int32", "min": 0}, "gain": {"type": "fp32", "default": 2.0}},
    tensors={
        "bias": {"dtype": "fp32", "shape": ["h", "seqlen_k"], "grad": True}, "extra": {"dtype": "fp32", "shape": ["h"]}
    },
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    from attngen.runtime.arguments import torch_state
    from attngen.runtime.device import driver as drivers
    from attngen.runtime.operations.attention import kernel_call
    from attngen.runtime.registry.lookup import registry

    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))
    registry.clear()
    kernel_call.PREPARED.clear()
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, Tensor))
    with drivers.use(FakeDriver()) as fake:
        yield fake
    registry.clear()


def tensors(batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = (batch, queries, HEADS), (batch, keys, KV_HEADS), (batch, keys, KV_HEADS)
    return [torch.randn(*shape, DIM, dtype=torch.float64).to(dtype) for shape in shapes]


def forms() -> dict[str, tuple[list[Tensor], dict[str, Any], Any]]:
    """The same two sequences in every form of a call, with the function that runs it; the second has 20 keys."""
    q, k, v = tensors(2, 9, 30)
    used = torch.tensor([30, 20], dtype=torch.int32)
    own = {"skip": 2, "bias": torch.randn(HEADS, 30, dtype=torch.float32), "extra": torch.rand(HEADS)}
    packed = [q.flatten(0, 1), torch.cat([k[0], k[1, :20]]), torch.cat([v[0], v[1, :20]])]
    starts = {"cu_seqlens_q": torch.tensor([0, 9, 18], dtype=torch.int32), "max_seqlen_q": 9}
    starts_k = {"cu_seqlens_k": torch.tensor([0, 30, 50], dtype=torch.int32), "max_seqlen_k": 30}
    pages = [torch.cat([t[0], t[1]]).unflatten(0, (6, 10)) for t in (k, v)]
    table = torch.tensor([[0, 1, 2], [3, 4, 99]], dtype=torch.int32)
    return {
        "dense": ([q, k, v], {**own, "seqused_k": used}, attngen.attention),
        "bhsd": (
            [t.transpose(1, 2).contiguous() for t in (q, k, v)], {**own, "seqused_k": used, "layout": "bhsd"},
            lambda *a, **o: attngen.attention(*a, **o),
        ),
        "varlen": (packed, {**own, **starts, **starts_k}, attngen.attention_varlen),
        "paged": ([q, *pages], {**own, "page_table": table, "seqused_k": used}, attngen.attention_paged),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["dense", "bhsd", "varlen", "paged"])
def test_probabilities_are_what_values_are_multiplied_by(form: str) -> None:
    inputs, options, run = forms()[form]
    out, lse = run(*inputs, variant=BIASED, return_lse=True, **options)
    values = tensors(2, 9, 30)[2]
    rows, heads = (0, 3, 8), (1, 2)
    for b, keys in enumerate((30, 20)):
        scores = attngen.debug.scores(*inputs, variant=BIASED, rows=[0, 3, -1], heads=slice(1, 3), b=b, **options)
        assert (scores.rows, scores.heads, scores.b) == (rows, heads, b)
        assert scores.logits.shape == scores.mask.shape == scores.probabilities.shape == (2, 3, keys)
        seen = (torch.arange(keys) <= torch.tensor(rows)[:, None] + keys - 9) & (torch.arange(keys) >= 2)
        assert torch.equal(scores.mask, seen.expand(2, 3, keys))
        assert bool(scores.logits[~scores.mask].isneginf().all())
        by_head = values[b, :keys].repeat_interleave(2, 1).transpose(0, 1)[list(heads)]
        got = scores.probabilities @ by_head
        wanted = {"bhsd": out[b].transpose(0, 1), "varlen": out[9 * b : 9 * b + 9]}.get(form, out[b])
        torch.testing.assert_close(got, wanted[list(rows)][:, list(heads)].transpose(0, 1))
        sums = lse[:, 9 * b : 9 * b + 9] if form == "varlen" else lse[b]
        torch.testing.assert_close(scores.lse, sums[list(heads)][:, list(rows)].double())
        assert bool((scores.probabilities.sum(-1) < 1).all())  # a sink takes its share


def test_logits_are_those_after_the_score() -> None:
    q, k, v = tensors(1, 5, 7, torch.float32)
    scores = attngen.debug.scores(q, k, v, variant="softcap", cap=3.0, rows=2, heads=3, dtype=torch.float32)
    s = q[0, 2, 3] @ k[0, :, 1].T / math.sqrt(DIM)
    torch.testing.assert_close(scores.logits[0, 0][scores.mask[0, 0]], (3 * torch.tanh(s / 3))[scores.mask[0, 0]])
    assert scores.logits.dtype == torch.float32


def test_few_rows_of_16k_keys_take_little() -> None:
    q, k, v = tensors(1, 16384, 16384, torch.bfloat16)
    scores = attngen.debug.scores(q, k, v, variant="causal", rows=[5, 16383], heads=0)
    assert scores.mask.sum(-1).tolist() == [[6, 16384]]
    compared = attngen.debug.compare(q[:, :4], k, v, variant="causal", rows=3, heads=[0, 2])
    assert compared.ok
    with pytest.raises(CallError, match=r"4 heads x 16384 rows x 16384 keys are more than .* logits; choose fewer"):
        attngen.debug.scores(q, k, v, variant="causal")


def test_dropout_and_rows_that_see_nothing() -> None:
    from attngen.lang.check import compile_variant

    q, k, v = tensors(2, 6, 6)
    state = torch.tensor([5, 7])
    dropped = compile_variant("strictly_dropped", "q_pos > kv", dropout=True)
    options = {"variant": dropped, "dropout_p": 0.3, "rng_state": state}
    scores = attngen.debug.scores(q, k, v, b=1, **options)
    wanted = attngen.attention(q, k, v, **options)[1].transpose(0, 1)
    torch.testing.assert_close(scores.probabilities @ v[1].repeat_interleave(2, 1).transpose(0, 1), wanted)
    assert not scores.probabilities[:, 0].any()
    assert bool(scores.lse[:, 0].isneginf().all())
    compared = attngen.debug.compare(*(t.bfloat16() for t in (q, k, v)), variant=dropped, dropout_p=0.3, gradients=True)
    assert compared.ok, compared


def test_a_sink_is_left_out_of_the_log_sum_exp_without_keys_too() -> None:
    q, k, v = tensors(1, 4, 0)
    apart = attngen.variant(keys="index", sink="0.5", sink_in_lse=False)
    none = torch.full((1, 4, 2), -1, dtype=torch.int32)
    compared = attngen.debug.compare(q, k, v, variant=apart, indices=none, return_lse=True)
    assert compared.ok, compared


@pytest.mark.parametrize("form", ["dense", "bhsd", "varlen", "paged"])
def test_the_reference_in_its_dtype_is_close_and_the_report_says_what_ran(form: str) -> None:
    inputs, options, _ = forms()[form]
    rounded = [t.to(torch.bfloat16) for t in inputs]
    report = attngen.debug.compare(*rounded, variant=BIASED, gradients=form != "paged", **options)
    assert report.ok, report
    assert {part.what for part in report.parts} == {"out", "lse"} | (
        set() if form == "paged" else {"dq", "dk", "dv", "dbias"}
    )
    assert "the reference in bfloat16 beside float64, since q is on cpu" in str(report)
    part = next(part for part in report.parts if (part.what, part.b) == ("out", 1))
    assert 0 < part.largest < part.allowed
    assert part.error.shape == (HEADS, 9)


def test_a_kernel_that_is_wrong_is_told_by_head_and_tile(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.runtime.registry.lookup import package_of_kernels, registry
    from tests.runtime.support import variant

    made = variant("wrong", "q_pos >= kv")
    registry.add(package_of_kernels([kernel(made, head_dim=64, tiles=(32, 16))], "memory"))
    torch.manual_seed(0)
    q = torch.randn(2, 100, 4, 64).to(torch.bfloat16)
    k, v = (torch.randn(2, 100, 2, 64).to(torch.bfloat16) for _ in range(2))
    report = attngen.debug.compare(q, k, v, variant="wrong")
    assert report.ok, report
    assert "fwd_sm90a_pointer_bf16_d64_wrong_dense, tiles of 32 x 16" in report.ran
    attend = comparison._attend

    def broken(*given: Any, **more: Any) -> Any:
        out, lse = attend(*given, **more)
        out[1, 70:73, 2] += 0.5
        out[0, 5, 0, 0] = math.nan
        lse[1, 3, 99] += 0.1
        return out, lse

    monkeypatch.setattr(comparison, "_attend", broken)
    report = attngen.debug.compare(q, k, v, variant="wrong")
    assert not report.ok
    told = {(one.what, one.b, one.head, one.tile, one.count) for one in report.differences}
    assert told == {("out", 1, 2, 2, 3), ("out", 0, 0, 0, 1), ("lse", 1, 3, 3, 1)}
    assert report.differences[0].row == 5
    assert "out: sequence 1, head 2, tile 2 (queries 64 to 95): 3 differ, most of all 7" in str(report)
    assert "█" in str(report.plot(b=1)).splitlines()[4]
    assert attngen.debug.compare(q, k, v, variant="wrong", rows=slice(0, 64), heads=[1, 2], b=1).ok


def test_a_gradient_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 40, 40, torch.bfloat16)
    attend = comparison._attend

    def broken(inputs: Any, options: Any, variant: Any, **more: Any) -> Any:
        if inputs[0].dtype == torch.bfloat16:
            inputs = [inputs[0], inputs[1] + 0, inputs[2]]
            if inputs[1].requires_grad:
                inputs[1].register_hook(lambda g: g * (1 + (torch.arange(40) == 7).to(g.dtype))[:, None, None])
        return attend(inputs, options, variant, **more)

    monkeypatch.setattr(comparison, "_attend", broken)
    report = attngen.debug.compare(q, k, v, variant="causal", gradients=True)
    assert {(one.what, one.row) for one in report.differences} == {("dk", 7)}
    assert "(keys 0 to 127)" in str(report)


def test_very_many_rows_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.ALL_ROWS, "cpu", 1000)
    monkeypatch.setattr(comparison, "SAMPLED", 8)
    q, k, v = tensors(1, 300, 20, torch.float32)
    report = attngen.debug.compare(q, k, v, variant="full")
    (part, _) = report.parts
    assert part.rows[0] == 0
    assert part.rows[-1] == 299
    assert len(part.rows) <= 10
    assert "rows are a sample" in str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 5}, "rows must lie within 0 .. 4, got 5"),
        ({"rows": ["a"]}, "rows must be numbers, got 'a'"),
        ({"heads": 9}, "heads must lie within 0 .. 3, got 9"),
        ({"b": 1}, "b must be 0 to 0, the number of a sequence, got 1"),
        ({"dtype": torch.float16}, "dtype must be torch.float64 or torch.float32"),
        ({"widow": 1}, "unknown argument 'widow'"),
    ],
)
def test_what_is_asked_wrongly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError, match=message):
        attngen.debug.scores(*tensors(1, 5, 5), variant="causal", **options)


def test_pictures() -> None:
    scores = attngen.debug.scores(*tensors(1, 5, 5), variant="causal")
    text = str(scores.plot("mask", h=2)).splitlines()
    assert text[0] == "causal, mask of head 2 of sequence 0: queries down, keys across"
    assert text[2:4] == ["0 |█    |", "1 |██   |"]
    with pytest.raises(CallError, match="what must be one of probabilities, logits, mask, got 'maks'; did you mean"):
        scores.plot("maks")
    compared = attngen.debug.compare(*tensors(1, 5, 5), variant="causal")
    with pytest.raises(CallError, match="dq was not compared; compared: lse of sequence 0, out of sequence 0"):
        compared.plot("dq")
    stream = io.BytesIO()
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(LoadError, match="needs matplotlib"):
            scores.plot().save(stream)
        assert scores.plot()._repr_png_() is None
    else:
        scores.plot().save(stream)
        assert stream.getvalue()[:4] == b"\x89PNG"


def test_gradients_that_are_zero_may_be_off_by_rounding() -> None:
    """In rows that see one key, dP and D cancel but for their rounding to float32."""
    q, k, v = (torch.randn(2, n, 8, 64, dtype=torch.bfloat16) for n in (9, 1, 1))
    compared = attngen.debug.compare(q, k, v, variant="full", gradients=True)
    (dq,) = {part.allowed for part in compared.parts if part.what == "dq"}
    assert compared.ok
    assert 0 < dq < 1e-3


def test_gradients_in_float32_may_be_off_by_their_sums() -> None:
    """As ``verify`` allows: sums that are added up in order are off by more units the longer they are."""
    allowed = []
    for rows in (8, 2048):
        q, k, v = torch.ones(1, rows, 1, 16), torch.ones(1, 4, 1, 16), torch.ones(1, 4, 1, 16)
        dout = torch.full((1, rows, 1, 16), 1.0 / rows)
        compared = attngen.debug.compare(q, k, v, variant="full", gradients=True, dout=dout)
        allowed += [part.allowed for part in compared.parts if part.what == "dv"]  # of the same gradient
    assert allowed[1] > 1.5 * allowed[0]


def test_what_has_no_gradient_is_said() -> None:
    inputs, options, _ = forms()["paged"]
    with pytest.raises(CallError, match="keys in pages have no gradient to compare"):
        attngen.debug.compare(*inputs, variant=BIASED, gradients=True, **options)
