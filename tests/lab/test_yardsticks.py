"""The limits of ``verify``: a right kernel keeps them whatever its score is, and planted faults exceed them.

The kernels here are models in float32, tile by tile, with the roundings of real ones: probabilities and dS in the
dtype of q, exponents in units of log2, an approximate tanh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attngen.dtypes import dtype as dtype_row
from attngen.inspect.cases import Case
from attngen.inspect.contract import Expected, Tally, deviation
from attngen.inspect.gradient_contract import ExpectedGradients, expected_gradients, gradient_deviation
from attngen.lab.verify.inputs import Inputs
from attngen.lab.verify.trial import prepare_case
from attngen.lang.check import compile_variant
from attngen.lang.eager import evaluate
from attngen.lang.variant import Tensor as Tensor_
from attngen.runtime.arguments.checked import Call
from attngen.runtime.launch.gradients import GradientBuffers
from attngen.runtime.reference.eager import names_of, reference
from tests.sampling import few

LOG2E = 1.4426950408889634
TILE = 16
SEEDS, QUICK = range(20), range(1)
CASES = (
    Case("ragged", (23,) * 2, (37,) * 2),
    Case("more queries than keys", (25,), (9,), heads=1),
    Case("one query", (1,), (53,), heads=4, kv_heads=2),
)

#: Scores that make logits large, that overflow 16 bits, that sharpen, and that are approximated.
SCORES = (
    ("s * 8.0", "fp16"), ("s * 30.0", "fp16"), ("s * 2000.0", "fp16"), ("s * 20000.0", "fp16"),
    ("8.0 * exp(s)", "fp16"), ("s - 4.0 * abs(q - kv)", "fp16"), ("s * s * s", "fp16"), ("s + 900.0", "fp16"),
    ("50.0 * tanh(s / 5.0)", "fp16"), ("s * 30.0", "bf16"), ("s * s * 0.5", "bf16"), ("s * 8.0", "fp32"),
    ("s * 100.0", "fp32"), ("s + 900.0", "fp32"), ("s * 0.5", "fp16"), ("s * 0.5", "fp32"),
    ("0.5 * s * (1.0 + erf(0.70710678 * s))", "bf16"), ("8.0 * erf(s)", "fp16"), ("4.0 * silu(s)", "bf16"),
    ("16.0 * sigmoid(s)", "bf16"),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """Error of a model kernel."""

    edge: int = 0  # keys that the mask shows too many
    scale: float = 1.0
    dropped: int | None = None  # a tile of keys
    lse: float = 0.0


RIGHT = Fault()
FAULTS = {
    "a key too many": Fault(edge=1),
    "a key too few": Fault(edge=-1),
    "no scale": Fault(scale=32**0.5),
    "a dropped tile": Fault(dropped=0),
}
#: Scores are computed in float32, whatever q holds, so that no rounding to 16 bits excuses a log-sum-exp.
A_THOUSANDTH = Fault(lse=1e-3)


@cache
def kernel(score: str, dtype: str, mask: str = "q_pos >= kv") -> Any:
    variant = compile_variant("x", mask, score)
    return SimpleNamespace(
        dtype=dtype,
        head_dim_qk=32,
        head_dim_v=32,
        v_of_key=False,
        variant=variant,
        layout="dense",
        scale_block=0,
        transposed_v=False,
        grouped_v=False,
        dtype_of=lambda name: dtype_row(dtype),
    )


class ShortForms(TorchFunctionMode):
    """A tanh as coarse as the hardware's, and the functions that kernels make of it with ``fast_math``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SHORT_FORMS:
            return func(*args, **(kwargs or {}))
        return SHORT_FORMS[func](*args)


def coarse_tanh(x: Tensor) -> Tensor:
    exact = torch.tanh(x)
    mantissa, exponent = torch.frexp(exact.detach())
    return exact + (torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent) - exact.detach())


SHORT_FORMS: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.tanh: coarse_tanh,
    torch.sigmoid: lambda x: 0.5 * coarse_tanh(0.5 * x) + 0.5,
    torch.nn.functional.silu: lambda x: 0.5 * x * coarse_tanh(0.5 * x) + 0.5 * x,
    torch.erf: lambda x: coarse_tanh(x * (1.1296758 + 0.09979271 * x * x)),
}


class Model:
    """The arithmetic of a kernel, one head and one sequence at a time."""

    def __init__(self, score: str, dtype: str, call: Call, inputs: Inputs, fault: Fault) -> None:
        self.call, self.inputs, self.fault, self.dtype = call, inputs, fault, inputs.q.dtype
        shown = f"q_pos + {fault.edge} >= kv" if fault.edge >= 0 else f"q_pos >= kv + {-fault.edge}"
        self.variant = kernel(score, dtype, shown).variant
        self.group = call.heads // call.kv_heads

    def logits(self, b: int, h: int, *, grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return (products, logits in units of log2), both (rows, keys)."""
        q, k = self.inputs.q[b, :, h].float(), self.inputs.k[b, :, h // self.group].float()
        rows, keys = q.shape[0], k.shape[0]
        products = (q @ k.T).requires_grad_(grad)
        names = {**names_of(self.call, b, slice(0, rows), rows, keys, 0, 0), "h": h}
        s = products * (self.call.scale * self.fault.scale)
        assert self.variant.score is not None
        with ShortForms():
            value = evaluate(self.variant.score, {**names, "s": s}).reshape(rows, keys)
        seen = evaluate(self.variant.mask, names).reshape(rows, keys).clone()
        if self.fault.dropped is not None:
            seen[:, self.fault.dropped * TILE : (self.fault.dropped + 1) * TILE] = False
        return products, torch.where(seen, value * LOG2E, -math.inf)

    def forward(self) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros(self.call.out_shape(), dtype=self.dtype), torch.zeros(self.call.lse_shape())
        for b, h in ((b, h) for b in range(self.call.batch) for h in range(self.call.heads)):
            _, logits = self.logits(b, h)
            v = self.inputs.v[b, :, h // self.group].float()
            top = torch.full((logits.shape[0], 1), -math.inf)
            total, acc = torch.zeros(logits.shape[0], 1), torch.zeros(logits.shape[0], v.shape[1])
            for first in range(0, logits.shape[1], TILE):
                tile = logits[:, first : first + TILE]
                new = torch.maximum(top, tile.amax(1, keepdim=True))
                safe = torch.where(new == -math.inf, 0.0, new)
                p, old = torch.exp2(tile - safe), torch.exp2(top - safe)
                total = total * old + p.sum(1, keepdim=True)
                acc = acc * old + p.to(self.dtype).float() @ v[first : first + TILE]
                top = new
            out[b, :, h] = (acc / torch.where(total == 0, 1.0, total)).to(self.dtype)
            lse[b, h] = ((torch.where(total == 0, -math.inf, top) + torch.log2(total)) / LOG2E)[:, 0] + self.fault.lse
        return out, lse

    def backward(self, wanted: ExpectedGradients) -> GradientBuffers:
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
        for b, h in ((b, h) for b in range(self.call.batch) for h in range(self.call.heads)):
            products, logits = self.logits(b, h, grad=True)
            above, hk = wanted.dout[b, :, h].float(), h // self.group
            lse = wanted.lse[b, h][:, None]
            alive = torch.isfinite(lse)
            given = torch.where(alive, lse + self.fault.lse, math.inf)
            p = torch.exp2(logits.detach() - given * LOG2E)
            delta = (above * wanted.out[b, :, h].float()).sum(1, keepdim=True) - wanted.dlse[b, h][:, None]
            ds = torch.where(alive, p * (above @ v[b, :, hk].float().T - delta), 0.0)
            (slope,) = torch.autograd.grad(logits, products, ds / LOG2E)
            rounded = slope.nan_to_num(nan=0.0).to(self.dtype).float()
            dq[b, :, h] = rounded @ k[b, :, hk].float()
            dk[b, :, hk] += rounded.T @ q[b, :, h].float()
            dv[b, :, hk] += p.to(self.dtype).float().T @ torch.where(alive, above, 0.0)
        actual = {name: t.to(self.dtype) for name, t in (("dq", dq), ("dk", dk), ("dv", dv))}
        return GradientBuffers(
            q, k, v, wanted.out, wanted.lse, wanted.dout, wanted.dlse, **actual, workspaces={}
        )  # fmt: skip


@cache
def forward_cases(score: str, dtype: str, seed: int) -> list[tuple[Inputs, Call, Expected]]:
    return [prepare_case(kernel(score, dtype), case, "cpu", 100 * seed + i) for i, case in enumerate(CASES)]


@cache
def backward_cases(score: str, dtype: str, seed: int) -> list[tuple[Inputs, Call, ExpectedGradients]]:
    cases = []
    for inputs, call, _ in forward_cases(score, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        cases.append((inputs, call, expected_gradients(call, inputs.q, inputs.k, inputs.v, generator)))
    return cases


def forwards(score: str, dtype: str, seed: int, fault: Fault = RIGHT) -> Tally:
    return Tally(
        [
            deviation(call, *Model(score, dtype, call, inputs, fault).forward(), wanted)
            for inputs, call, wanted in forward_cases(score, dtype, seed)
        ]
    )


def backwards(score: str, dtype: str, seed: int, fault: Fault = RIGHT) -> Tally:
    with torch.enable_grad():
        return Tally(
            [
                gradient_deviation(call, Model(score, dtype, call, inputs, fault).backward(wanted), wanted)
                for inputs, call, wanted in backward_cases(score, dtype, seed)
            ]
        )


def excess(tally: Tally) -> str:
    """Errors that exceed their limits, in words; empty if none does."""
    parts = [f"{d.max_error:.1e} > {d.max_allowed:.1e}" for d in tally.deviations if not d.max_error <= d.max_allowed]
    parts += [
        f"lse {d.lse_error:.1e} > {d.lse_allowed:.1e}" for d in tally.deviations if not d.lse_error <= d.lse_allowed
    ]
    parts += [text for d in tally.deviations for text in d.wrong]
    if not tally.rmse <= tally.rmse_allowed:
        parts.append(f"rmse {tally.rmse:.2e} > {tally.rmse_allowed:.2e}")
    assert bool(parts) != tally.ok
    return "; ".join(parts)


def judge(score: str, dtype: str, seeds: range) -> None:
    """Right kernels pass with every seed, and none with a fault does."""
    refused, missed = {}, []
    for seed in seeds:
        for name, run in (("forward", forwards), ("backward", backwards)):
            if text := excess(run(score, dtype, seed)):
                refused[name, seed] = text
            missed += [(name, seed, fault) for fault in FAULTS if run(score, dtype, seed, FAULTS[fault]).ok]
    assert (refused, missed) == ({}, [])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, and other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@few(("score", "dtype"), SCORES, always=(0, 8))
def test_limits_admit_right_kernels_and_no_others(score: str, dtype: str) -> None:
    judge(score, dtype, QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("score", "dtype"),
    [pytest.param(*one, marks=[] if place % 10 == 0 else [pytest.mark.long]) for place, one in enumerate(SCORES)],
)
def test_limits_hold_with_every_seed(score: str, dtype: str) -> None:
    judge(score, dtype, SEEDS)


@few(
    ("score", "dtype"),
    [("s * s * 0.5", "bf16"), ("s * 2.0", "fp32"), ("s * 2.0", "fp16"), ("s * 0.5", "fp16")],
    always=1,
)
def test_a_log_sum_exp_that_is_off_by_a_thousandth_fails(score: str, dtype: str) -> None:
    for seed in SEEDS[:8]:
        actual = forwards(score, dtype, seed, A_THOUSANDTH)
        assert not actual.ok
        assert excess(actual).startswith("lse")


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_the_arithmetic_of_a_fused_backward_is_right(layout: str, dropout: bool) -> None:
    """Learned biases, sinks, groups of heads, used keys, empty sequences: close to float64 in float32."""
    learned = [Tensor_("bias", "fp32", ("h", "seqlen_q"), grad=True), Tensor_("sinks", "fp32", ("h",), grad=True)]
    variant = compile_variant(
        "x", "q_pos >= kv", "s * 2.0 + bias[h, q]", (), learned, sink="sinks[h]", dropout=dropout
    )  # fmt: skip
    dense = Case("dense", (20,) * 2, (33,) * 2, heads=4, kv_heads=2, used=(33, 5))
    case = dense if layout == "dense" else Case("packed", (13, 0, 3), (13, 7, 0), heads=4, kv_heads=2)
    subject = SimpleNamespace(
        dtype="fp32",
        head_dim_qk=32,
        head_dim_v=16,
        v_of_key=False,
        variant=variant,
        layout=layout,
        scale_block=0,
        transposed_v=False,
        grouped_v=False,
        dtype_of=lambda name: dtype_row("fp32"),
    )
    inputs, call, _ = prepare_case(subject, case, "cpu", 3)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(1))
    assert set(wanted.truth) == {"q", "k", "v", "bias", "sinks"}
    for draw in wanted.fused:
        for name, truth in wanted.truth.items():
            assert (draw[name].double() - truth).abs().max() < 2e-6 * truth.abs().max()


def test_keys_that_are_values_have_both_gradients() -> None:
    """Expected gradients of k and of v become the gradient of k, of which v is a view."""
    latent = SimpleNamespace(**vars(kernel("s * 0.5", "fp32")) | {"v_of_key": True, "head_dim_v": 16})
    inputs, call, _ = prepare_case(latent, CASES[0], "cpu", 3)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(1)).of_keys()
    q, k = (tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k))
    out, lse = reference(call, q, k, k[..., :16], compute=torch.float64)
    seen = ~wanted.dead.transpose(1, 2)[..., None]
    torch.autograd.backward(
        (out, torch.where(wanted.dead, 0.0, lse)),
        (wanted.dout.double() * seen, torch.where(wanted.dead, 0.0, wanted.dlse).double()),
    )
    assert set(wanted.truth) == set(wanted.plain) == {"q", "k"}
    for name, leaf in (("q", q), ("k", k)):
        torch.testing.assert_close(wanted.truth[name], leaf.grad)


@pytest.mark.exhaustive
def test_roundings_of_terms_are_those_of_a_kernel() -> None:
    """The gradient of a factor sums P (dP - D) times the product, of which a kernel rounds P times the product."""
    gain = Tensor_("gain", "fp32", (), grad=True)
    subject = SimpleNamespace(
        **vars(kernel("s", "bf16")) | {"variant": compile_variant("x", "q_pos >= kv", "s * gain", (), [gain])}
    )
    errors = []
    for seed in range(8):
        inputs, call, _ = prepare_case(subject, CASES[0], "cpu", seed)
        wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(seed))
        q, k, v, out, dout = (
            t.double().transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v, wanted.out, wanted.dout)
        )
        products = q @ k.transpose(2, 3) * call.scale
        seen = torch.ones(products.shape[-2:], dtype=torch.bool).tril(products.shape[-1] - products.shape[-2])
        logits = torch.where(seen, products * call.tensors["gain"].double(), -math.inf)
        live = torch.isfinite(wanted.lse)[..., None]
        p = torch.where(live, torch.exp(logits - wanted.lse.double().nan_to_num(neginf=0.0)[..., None]), 0.0)
        ds = dout @ v.transpose(2, 3) - ((dout * out).sum(-1) - wanted.dlse.double())[..., None]
        term = p * products
        errors.append(float(((term.bfloat16().double() - term) * ds).sum().abs()) / wanted.roundings["gain"])
    assert 0.5 < max(errors) < 3.0
    exact = SimpleNamespace(**vars(subject) | {"dtype": "fp32", "dtype_of": lambda name: dtype_row("fp32")})
    inputs, call, _ = prepare_case(exact, CASES[0], "cpu", 0)
    assert expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator()).roundings == {"gain": 0.0}


def test_tensors_that_only_the_sink_reads_have_no_rounded_terms() -> None:
    tensors = [Tensor_("slope", "fp32", ("h",)), Tensor_("sinks", "fp32", ("h",), grad=True)]
    variant = compile_variant("x", "q_pos >= kv", "s + slope[h] * (kv - q_pos)", (), tensors, sink="sinks[h]")
    subject = SimpleNamespace(**vars(kernel("s", "bf16")) | {"variant": variant})
    inputs, call, _ = prepare_case(subject, CASES[0], "cpu", 3)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(3))
    assert wanted.roundings == {"sinks": 0.0}


def test_terms_that_cancel_are_rounded_apart() -> None:
    """A single key reads one element twice, and its exact gradient is 0: kernels round the sum of rows and that of keys
    in two places."""
    total = Tensor_("total", "fp32", ("h", "seqlen_k"), grad=True)
    score = "s + (total[h, q_pos] - total[h, kv])"
    subject = SimpleNamespace(
        **vars(kernel("s", "bf16")) | {"variant": compile_variant("x", "q_pos >= kv", score, (), [total])}
    )
    inputs, call, _ = prepare_case(subject, Case("one key", (9,), (1,), heads=2), "cpu", 3)
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(3))
    assert not wanted.truth["total"].any()
    v, out, dout = (t[0, -1].double() for t in (inputs.v, wanted.out, wanted.dout))
    term = (dout * v).sum(-1) - (dout * out).sum(-1) + wanted.dlse[0, :, -1].double()  # P is 1
    error = float((term.bfloat16().double() - term).abs().max())
    assert 0 < error < 6 * wanted.roundings["total"]
    assert wanted.roundings["total"] < 2**-7 * float(term.abs().max())
