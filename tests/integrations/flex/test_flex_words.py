"""Elementwise functions of torch in a score_mod, beside torch's own FlexAttention on the CPU: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as theirs

from attngen.errors import CallError
from attngen.integrations.flex import attention as ours
from tests.integrations.flex.test_flex_attention import dense, qkv
from tests.sampling import few

_TABLE = torch.linspace(-1.0, 1.0, 32)
_NAN = torch.tensor(torch.nan)
_LEARNED = torch.tensor([0.5, -0.75, 1.5, 2.0], requires_grad=True)


def near(x: Tensor) -> Tensor:
    """A number within ±0.9 that depends on x."""
    return 0.9 * torch.tanh(x)


def t5_bucket(q: Tensor, kv: Tensor) -> Tensor:
    """T5's relative position bucket of a causal decoder: exact up to 16, then logarithmic up to 128."""
    n = torch.clamp(q - kv, min=0)
    large = (16 + torch.log(n / 16) / torch.log(torch.tensor(8.0)) * 16).int()
    return torch.where(n < 16, n, torch.clamp(large, max=31))


#: Of the score, the query and the key. None of them is at a kink for any score that occurs.
WORDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # to integers, and rounding
    "int": lambda s, q, kv: s + (s * 3).int() * 0.1,
    "sums and products of bools": lambda s, q, kv: torch.where((q > kv) + (s > 0) * (kv > 9), s, 0.0),
    "long": lambda s, q, kv: s * (q / 7.0).long(),
    "int16": lambda s, q, kv: s + (q * 1.7 - 9).to(torch.int16) / 3,
    "bool": lambda s, q, kv: s * (q - kv).bool(),
    "round": lambda s, q, kv: s + torch.round(s * 2 + 0.1) * 0.2,
    "round of halves": lambda s, q, kv: s + torch.round((q - kv) * 0.5) * 0.1,
    "round to decimals": lambda s, q, kv: s + torch.round(s * 0.77, decimals=1),
    "trunc": lambda s, q, kv: s + torch.trunc(s * 3),
    "fix": lambda s, q, kv: s + torch.fix(s * 3),
    "frac": lambda s, q, kv: s + torch.frac(s * 1.7),
    "floor": lambda s, q, kv: s + torch.floor(s * 3),
    "div, floor": lambda s, q, kv: s + torch.div(s * 3, 0.7, rounding_mode="floor"),
    "div, trunc": lambda s, q, kv: s + torch.div(s * 3, 0.7, rounding_mode="trunc"),
    "fmod": lambda s, q, kv: torch.fmod(s * 5, 1.3),
    "fmod by what varies": lambda s, q, kv: torch.fmod(s, 0.7 + kv * 0.01),
    "remainder": lambda s, q, kv: torch.remainder(s * 5, 1.3),
    # signs and special values
    "sign": lambda s, q, kv: s * torch.sign(s) + torch.sign(q - kv),
    "sgn": lambda s, q, kv: s + torch.sgn(s),
    "signbit": lambda s, q, kv: torch.where(torch.signbit(s), s * 2, s),
    "copysign": lambda s, q, kv: torch.copysign(s, q - kv + 0.5),
    "copysign of a number": lambda s, q, kv: s + torch.copysign(s, torch.tensor(-1.0)),
    "heaviside": lambda s, q, kv: s + torch.heaviside((q - kv).float(), torch.tensor(0.5)),
    "angle": lambda s, q, kv: s + torch.angle(s) * 0.1,
    "isnan": lambda s, q, kv: torch.where(torch.isnan(s / (s - s)), s, s * 2),
    "isinf": lambda s, q, kv: torch.where(torch.isinf(s * 1e30 * 1e30), s, s * 2),
    "isfinite": lambda s, q, kv: torch.where(torch.isfinite(s), s, 0.0),
    "isposinf": lambda s, q, kv: torch.where(torch.isposinf(s * 1e30 * 1e30), s, s * 2),
    "nan_to_num": lambda s, q, kv: s + torch.nan_to_num(torch.log((q - kv).float()), nan=-1.0, neginf=-2.0),
    "masked_fill": lambda s, q, kv: s.masked_fill(q < kv - 20, -5.0),
    "masked_fill, hidden": lambda s, q, kv: s.masked_fill(kv > q + 20, -torch.inf),
    "fmax, fmin": lambda s, q, kv: (
        torch.fmax(s, torch.where(kv > 9, 0.1, _NAN)) + torch.fmin(torch.where(q > 9, 0.1, _NAN), s)
    ),
    "maximum, minimum": lambda s, q, kv: torch.maximum(s, kv * 0.01) + torch.minimum(s, q * 0.01),
    "clamp by tensors": lambda s, q, kv: torch.clamp(s, kv * -0.01, q * 0.02),
    # activations
    "relu": lambda s, q, kv: functional.relu(s),
    "relu6": lambda s, q, kv: functional.relu6(s * 9),
    "leaky_relu": lambda s, q, kv: functional.leaky_relu(s, 0.2),
    "prelu": lambda s, q, kv: functional.prelu(s, torch.tensor(0.3)),
    "elu": lambda s, q, kv: functional.elu(s, 0.7),
    "celu": lambda s, q, kv: functional.celu(s, 0.7),
    "selu": lambda s, q, kv: functional.selu(s),
    "gelu": lambda s, q, kv: functional.gelu(s),
    "gelu by tanh": lambda s, q, kv: functional.gelu(s, approximate="tanh"),
    "silu": lambda s, q, kv: functional.silu(s),
    "mish": lambda s, q, kv: functional.mish(s),
    "softplus": lambda s, q, kv: functional.softplus(s * 4, beta=2.0, threshold=9.0),
    "log_sigmoid": lambda s, q, kv: functional.logsigmoid(s),
    "hardtanh": lambda s, q, kv: functional.hardtanh(s, -0.7, 0.4),
    "hardswish": lambda s, q, kv: functional.hardswish(s * 3),
    "hardsigmoid": lambda s, q, kv: functional.hardsigmoid(s * 3),
    "hardshrink": lambda s, q, kv: functional.hardshrink(s, 0.3),
    "softshrink": lambda s, q, kv: functional.softshrink(s, 0.3),
    "softsign": lambda s, q, kv: functional.softsign(s),
    "tanhshrink": lambda s, q, kv: functional.tanhshrink(s * 3),
    "threshold": lambda s, q, kv: functional.threshold(s, 0.1, -0.3),
    "logit": lambda s, q, kv: torch.logit(torch.sigmoid(s) * 0.9, eps=1e-3),
    # exponentials and powers
    "exp, exp2, expm1": lambda s, q, kv: torch.exp(s) - torch.exp2(s) + torch.expm1(s),
    "expm1 near 0": lambda s, q, kv: torch.expm1(s * 1e-6) * 1e6,
    "log, log2, log10": lambda s, q, kv: torch.log(s.exp() + 1) - torch.log2(s.exp() + 1) + torch.log10(s.exp() + 1),
    "log1p": lambda s, q, kv: torch.log1p(s.abs() * 3),
    "log1p near 0": lambda s, q, kv: torch.log1p(s * 1e-6) * 1e6,
    "logaddexp": lambda s, q, kv: torch.logaddexp(s, kv * 0.05),
    "logaddexp2": lambda s, q, kv: torch.logaddexp2(s, kv * 0.05),
    "xlogy": lambda s, q, kv: torch.xlogy((q - kv).abs() * 0.1, s.abs() + 0.1),
    "entr": lambda s, q, kv: torch.special.entr(torch.sigmoid(s)),
    "pow": lambda s, q, kv: (s.abs() + 0.2) ** (kv * 0.05),
    "pow of negative numbers": lambda s, q, kv: (near(s) - 1.5) ** (kv % 4).float(),
    "pow by the score": lambda s, q, kv: torch.pow(1.0 + kv * 0.02, s),
    "pow of a number": lambda s, q, kv: s * 2.0 ** (-(q - kv).abs() * 0.1),
    "float_power": lambda s, q, kv: torch.float_power(s, 2.0).float(),
    "square, cube": lambda s, q, kv: s.square() + s**3,
    "sqrt, rsqrt, reciprocal": lambda s, q, kv: (1 + s * s).sqrt() + (1 + s * s).rsqrt() + (1 + s * s).reciprocal(),
    "hypot": lambda s, q, kv: torch.hypot(s, 1.0 + kv * 0.1),
    "ldexp": lambda s, q, kv: torch.ldexp(s, kv % 3),
    # trigonometry
    "sin, cos, tan": lambda s, q, kv: torch.sin(s) + torch.cos(s) + torch.tan(near(s)),
    "sinc": lambda s, q, kv: s + torch.sinc((q - kv) * 0.5) + torch.sinc(s),
    "asin, acos, atan": lambda s, q, kv: torch.asin(near(s)) - torch.acos(near(s)) + torch.atan(s * 3),
    "atan2": lambda s, q, kv: torch.atan2(s, (q - kv).float()) + torch.atan2(kv + 1.0, s),
    "sinh, cosh, tanh": lambda s, q, kv: torch.sinh(s) - torch.cosh(s) + torch.tanh(s),
    "asinh, acosh, atanh": lambda s, q, kv: torch.asinh(s) + torch.acosh(1.1 + s * s) + torch.atanh(near(s)),
    "deg2rad, rad2deg": lambda s, q, kv: torch.deg2rad(s * 90) + torch.rad2deg(s * 0.01),
    # errors and interpolation
    "erf, erfc": lambda s, q, kv: torch.erf(s) + 2 * torch.erfc(s * 0.5),
    "ndtr": lambda s, q, kv: torch.special.ndtr(s),
    "lerp": lambda s, q, kv: torch.lerp(s, kv * 0.01, 0.3),
    "lerp by a tensor": lambda s, q, kv: torch.lerp(s, s * s, torch.sigmoid(s)),
    "addcmul, addcdiv": lambda s, q, kv: torch.addcmul(s, s, s, value=0.2) + torch.addcdiv(s, s, kv + 1.0, value=0.2),
    "division by what may be 0": lambda s, q, kv: torch.where(s == 0, s, 1 / s).clamp(-2, 2),
    # tables
    "T5's buckets": lambda s, q, kv: s + _TABLE[t5_bucket(q, kv)],
    "a table by distance": lambda s, q, kv: s + _TABLE[torch.clamp(((q - kv) * 0.4).round().int(), -3, 15)],
}


def score_mod(word: str) -> Any:
    return lambda s, b, h, q, kv: WORDS[word](s, q, kv)


@few("word", WORDS, always=range(0, len(WORDS), 6))
def test_words_are_those_of_torch(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = qkv()
    mod = score_mod(word)
    out, lse = ours.flex_attention(q, k, v, mod, return_lse=True)
    with torch.no_grad():
        wanted, wanted_lse = theirs.flex_attention(*(t.detach() for t in (q, k, v)), mod, return_lse=True)
    assert torch.allclose(lse, wanted_lse, atol=2e-5, rtol=1e-4)
    assert torch.allclose(out, wanted, atol=2e-5, rtol=1e-4)
    plain, _ = dense(q, k, v, None, mod)
    towards = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad(one, [q, k, v], towards) for one in (out, plain))
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)


def test_an_index_that_is_never_negative_has_no_other_case() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + _TABLE[(4 * torch.log1p((q - kv).abs().float())).int()] + _TABLE[(q / 7.0).long()]

    actual = ours.meaning(None, mod, torch.device("cpu")).variant.fields["score"]
    assert " if " not in actual
    q, k, v = (t.detach() for t in qkv())
    assert torch.allclose(ours.flex_attention(q, k, v, mod), dense(q, k, v, None, mod)[0], atol=2e-5, rtol=1e-4)


def test_learned_exponents_have_gradients() -> None:
    q, k, v = qkv()

    def mod(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (s.abs() + 0.3) ** _LEARNED[h] / torch.exp(_LEARNED[h])

    out, (plain, _) = ours.flex_attention(q, k, v, mod), dense(q, k, v, None, mod)
    towards = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad(one, [q, _LEARNED], towards) for one in (out, plain))
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)


#: Of torch's operations on elements, those without an equivalent; of special functions, by their prefix.
_REFUSED = {
    "digamma", "erfinv", "frexp", "gcd", "i0", "igamma", "igammac", "lcm", "lgamma", "mvlgamma", "nextafter",
    "polygamma", "special_", "rrelu", "equal",  # random; a single bool
}  # fmt: skip
#: Special functions that torch decomposes.
_TRACED = {"special_entr", "special_xlog1py"}


def test_torchs_operations_on_elements_are_traced_or_listed_as_refused() -> None:
    operations = [
        (name, getattr(packet, overload))
        for name in dir(torch.ops.aten)
        if hasattr(packet := getattr(torch.ops.aten, name), "overloads") and not name.startswith("_foreach")
        for overload in packet.overloads()
    ]
    tagged = [
        (name, one) for name, one in operations
        if torch.Tag.pointwise in one.tags and not one._schema.is_mutable and not name.endswith("_backward")
    ]  # fmt: skip
    untraced = {name for name, one in tagged} - {name for name, one in tagged if _is_traced(one)}
    assert {"special_" if name.startswith("special_") else name for name in untraced} == _REFUSED
    assert _TRACED.isdisjoint(untraced)
    assert len({name for name, _ in tagged}) > 150


def _is_traced(operation: Any) -> bool:
    """Whether a score may hold an operation, of the score, of an index or of a condition."""
    arguments = operation._schema.arguments
    given = [argument for argument in arguments if not argument.has_default_value()]
    if operation._overloadpacket in (torch.ops.aten.clamp, torch.ops.aten.clip):  # which need one limit
        given = arguments[:2]
    numbers = {"number": 2, "Scalar": 2, "int": 1, "float": 0.5, "bool": True}

    def applied(s: Tensor, operand: Tensor) -> Tensor:
        result = operation(*(numbers.get(str(argument.type), operand) for argument in given))
        return s + (result[0] if isinstance(result, tuple) else result).float()

    for mod in (
        lambda s, b, h, q, kv: applied(s, s),
        lambda s, b, h, q, kv: applied(s, q % 8),
        lambda s, b, h, q, kv: applied(s, q > kv),
    ):
        with suppress(CallError):
            ours.meaning(None, mod, torch.device("cpu"))
            return True
    return False


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (torch.lgamma, "lgamma"),
        (torch.digamma, "digamma"),
        (torch.special.i0, "i0"),
        (torch.erfinv, "erfinv"),
        (lambda s: torch.nextafter(s, s + 1), "nextafter"),
        (lambda s: torch.frexp(s).mantissa, "frexp"),
        (lambda s: s.bfloat16().float(), "a rounding to bfloat16"),
        (torch.rand_like, "random numbers"),
        (lambda s: torch.bucketize(s, _TABLE), "bucketize"),
    ],
)
def test_what_stays_refused_is_named(word: Callable[[Tensor], Tensor], reason: str) -> None:
    q, k, v = (t.detach() for t in qkv())
    with pytest.raises(CallError, match=reason):
        ours.flex_attention(q, k, v, lambda s, b, h, m, n: word(s))
