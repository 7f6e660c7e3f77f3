"""``quantize="fp8"``: errors beside float64, means of keys, variants that do not allow these, and sageattn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.dtypes import DESCALES
from attngen.errors import CallError
from attngen.integrations.sageattention.functions import sageattn, sageattn_varlen
from attngen.lab.verify.inputs import in_groups
from attngen.lang.shifts import shifts_with_logits
from attngen.plan import plan
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.device.tensormap import reason_against
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.operations.quantize.call import quantize_by_sample
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.runtime.registry.order import against_form
from attngen.schema import expand, load_spec_text, preset
from tests.runtime.support import kernel_of


def made(seed: int = 0, *, queries: int = 48, keys: int = 96, dim: int = 64, shift: float = 0.0) -> list[Tensor]:
    """q, k and v in bf16, the keys ``shift`` times a vector of their own apart from 0."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, h, dim, generator=generator) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    k = k + shift * torch.randn(2, 1, 2, dim, generator=generator)
    return [t.bfloat16() for t in (q, k, v)]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return attngen.attention(q.double(), k.double(), v.double(), backend="reference", **options)


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("variant", ["full", "causal"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_errors_are_those_of_8_bits(variant: str, layout: str) -> None:
    q, k, v = made()
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    wanted = exact(q, k, v, variant=variant, layout=layout)
    out = attngen.attention(q, k, v, variant=variant, layout=layout, quantize="fp8")
    assert out.dtype == torch.bfloat16
    assert out.shape == q.shape
    assert error(out, wanted) < 0.06


def test_what_keys_have_in_common_costs_nothing() -> None:
    """Keys far from 0, all in one direction: 8 bits of the keys themselves would lose what tells them apart."""
    q, k, v = made(shift=8.0)
    wanted = exact(q, k, v)
    out = attngen.attention(q, k, v, quantize="fp8")
    x = attngen.quantize(q, k, v)
    plain = attngen.attention(x.q, x.k, x.v, softmax_scale=64**-0.5, **x.descales)
    assert error(out, wanted) < 0.08
    assert error(out, wanted) < 0.5 * error(plain, wanted)


def test_the_mean_of_many_keys_is_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.runtime.operations.quantize.sampled.SAMPLE", 20)
    q, k, v = made(shift=8.0)
    wanted, lse = exact(q, k, v, return_lse=True)
    for layout in ("bshd", "bhsd"):
        tensors = (q, k, v) if layout == "bshd" else [t.transpose(1, 2) for t in (q, k, v)]
        out, log = attngen.attention(*tensors, quantize="fp8", layout=layout, return_lse=True)
        assert error(out if layout == "bshd" else out.transpose(1, 2), wanted) < 0.08
        assert float((log - lse).abs().max()) < 0.3


def test_a_compiled_program() -> None:
    q, k, v = made(shift=2.0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q, k, v, variant="causal", quantize="fp8", return_lse=True)

    with torch.no_grad():
        compiled = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
    for mine, eager in zip(compiled, call(q, k, v), strict=True):
        assert torch.equal(mine, eager)


def test_the_log_sum_exp_is_that_of_the_keys_themselves() -> None:
    for layout in ("bshd", "bhsd"):
        q, k, v = made(shift=2.0)
        if layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        _, wanted = exact(q, k, v, variant="causal", layout=layout, return_lse=True)
        _, lse = attngen.attention(q, k, v, variant="causal", layout=layout, quantize="fp8", return_lse=True)
        assert lse.dtype == torch.float32
        assert float((lse - wanted).abs().max()) < 0.1


def test_a_scale_of_the_softmax() -> None:
    q, k, v = made()
    wanted = exact(q, k, v, softmax_scale=0.05)
    assert error(attngen.attention(q, k, v, softmax_scale=0.05, quantize="fp8"), wanted) < 0.06


def test_a_soft_cap_sees_keys_with_their_mean() -> None:
    q, k, v = made(shift=1.0)
    wanted = exact(q, k, v, variant="softcap", cap=5.0)
    assert error(attngen.attention(q, k, v, variant="softcap", cap=5.0, quantize="fp8"), wanted) < 0.1


def test_what_lies_beyond_a_length_changes_nothing() -> None:
    q, k, v = made()
    used = torch.tensor([70, 37], dtype=torch.int32)
    out = attngen.attention(q, k, v, seqused_k=used, quantize="fp8")
    for b, n in enumerate(used.tolist()):
        k[b, n:], v[b, n:] = torch.nan, torch.inf
    assert torch.equal(attngen.attention(q, k, v, seqused_k=used, quantize="fp8"), out)


def test_float16_stays_float16() -> None:
    q, k, v = (t.half() for t in made())
    out = attngen.attention(q, k, v, quantize="fp8")
    assert out.dtype == torch.float16
    assert error(out, exact(q, k, v)) < 0.06


@pytest.mark.parametrize(
    ("score", "sink", "allowed"),
    [
        (None, None, True), ("s + 0.5 * (kv - q_pos)", None, True), ("0.5 * kv + s", None, True),
        ("s - 0.5 * abs(q_pos - kv)", None, True), ("2.0 * s", None, False), ("3.0 - s", None, False),
        ("5.0 * tanh(s / 5.0)", None, False), (None, "0.5", False),
    ],
)  # fmt: skip
def test_variants_whose_logits_may_be_shifted(score: str | None, sink: str | None, allowed: bool) -> None:
    made_variant = attngen.variant("q_pos >= kv", score, sink=sink, name="shifted")
    assert shifts_with_logits(made_variant.value) is allowed


def test_wrong_calls() -> None:
    q, k, v = made()
    with pytest.raises(CallError, match="quantize must be 'fp8', or None, got 'fp4'"):
        attngen.attention(q, k, v, quantize="fp4")
    with pytest.raises(CallError, match=r"q is torch.float32 with 4 axes"):
        attngen.attention(q.float(), k, v, quantize="fp8")
    with pytest.raises(CallError, match="q_descale is for tensors that are quantized already"):
        attngen.attention(q, k, v, quantize="fp8", q_descale=torch.ones(()))
    with pytest.raises(CallError, match="has no backward"):
        attngen.attention(q.requires_grad_(), k, v, quantize="fp8")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_sageattn(layout: str, causal: bool) -> None:
    q, k, v = made(queries=64, keys=64, shift=2.0)
    if layout == "HND":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    name = "bhsd" if layout == "HND" else "bshd"
    wanted, wanted_lse = exact(q, k, v, variant="causal" if causal else "full", layout=name, return_lse=True)
    out, lse = sageattn(q, k, v, layout, causal, None, True, smooth_k=True, pv_accum_dtype="fp32+fp16")
    assert out.shape == q.shape
    assert error(out, wanted) < 0.06
    assert float((lse - wanted_lse).abs().max()) < 0.1
    assert torch.equal(sageattn(q, k, v, tensor_layout=layout, is_causal=causal), out)


def test_sageattn_of_packed_sequences() -> None:
    q, k, v = (t[0] for t in made(queries=90, keys=90, shift=2.0))
    starts = torch.tensor([0, 50, 90], dtype=torch.int32)
    out = sageattn_varlen(q, k, v, starts, starts, 50, 50, is_causal=True)
    for rows in (slice(0, 50), slice(50, 90)):
        wanted = exact(q[None, rows], k[None, rows], v[None, rows], variant="causal")
        assert error(out[None, rows], wanted) < 0.08


def test_what_sageattn_would_ignore_is_refused() -> None:
    q, k, v = made()
    with pytest.raises(CallError, match="attn_mask is not supported"):
        sageattn(q, k, v, "NHD", attn_mask=torch.ones(48, 96))
    with pytest.raises(CallError, match="'scale' is no argument of SageAttention"):
        sageattn(q, k, v, "NHD", scale=1.0)
    with pytest.raises(CallError, match="tensor_layout must be one of HND, NHD, got 'BSHD'"):
        sageattn(q, k, v, "BSHD")


def of_spec(transposed: str) -> Kernel:
    """The kernel of full attention in 8 bits, head dim 64."""
    text = (
        f"schema: 1\npackage: tested\narch: [sm90a]\nkernels:\n"
        f"  - {{variant: full, head_dim: 64, dtype: fp8_e4m3, transposed_v: {transposed}}}\n"
    )
    (spec,) = expand(load_spec_text(text))
    resources = {"registers": 0, "spills": 0, "shared_memory": 1024, "cubin_bytes": 0, "compile_seconds": 0.0}
    return kernel_of({**plan(spec).to_dict(), "resources": resources})


def test_kernels_that_take_v_in_groups() -> None:
    """They take nothing else, and no other kernel takes it; its descriptor is that of the tensor."""
    q, k, v = (t.to(torch.float8_e4m3fn) for t in made())
    grouped = in_groups(v)
    assert grouped.shape == (2, 2, 3, 64, 32)
    full = preset("full")
    settings: dict[str, Any] = {"softmax_scale": None, "seqused_k": None, "return_lse": False}
    calls = [bind(full, q, k, one, None, **settings) for one in (v, grouped)]
    assert [call.v.in_groups for call in calls] == [False, True]
    assert {(call.seqlen_k, call.kv_heads, call.head_dim_v) for call in calls} == {(96, 2, 64)}
    for call in calls:
        call.descales, call.scale_blocks = {name: torch.ones(2, 2) for name in DESCALES}, (0,)
    for name, takes in (("false", [True, False]), ("groups", [False, True])):
        reasons = [against_form(of_spec(name), call) for call in calls]
        assert [reason is None for reason in reasons] == takes
        assert any("in groups of keys" in str(reason) for reason in reasons)
    (parameter,) = (one for one in of_spec("groups").main.entry.layout.parameters if one.name == "v_map")
    assert parameter.box == (1, 1, 4, 64, 32)
    assert reason_against("v", calls[1].v.shape, calls[1].v.strides, 1) is None
    for wrong in (grouped[:, :1], grouped[:, :, :2], grouped[..., :16], grouped.float()):
        with pytest.raises(CallError):
            bind(full, q, k, wrong, None, **settings)
    with pytest.raises(CallError, match="v in groups of keys is for kernels"):
        attngen.attention(q, k, grouped, **{name: torch.ones(2, 2) for name in DESCALES})


def test_v_is_grouped_only_for_a_kernel_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def quantized(*tensors: Tensor, grouped: bool, **options: Any) -> Any:
        asked.append(grouped)
        return quantize_by_sample(*tensors, grouped=grouped, **options)

    monkeypatch.setattr("attngen.runtime.operations.attention.quantized.quantize_by_sample", quantized)
    q, k, v = made()
    for kernels in ([of_spec("false")], [of_spec("false"), of_spec("groups")]):
        registry.clear()
        registry.add(package_of_kernels(kernels, "memory"))
        attngen.attention(q, k, v, quantize="fp8")
        attngen.attention(q, k, v, quantize="fp8", backend="reference")
    assert asked == [False, False, True, False]
