"""Functions of the language in CUDA kernels: short forms, without branches that would serialize matrix products."""

from __future__ import annotations

import pytest

from attngen.render import render
from tests.compile.test_conditions import kernel, serialized_and_spills
from tests.sampling import few

#: Scores, and what their text has with ``fast_math``.
WORDS = {
    "s + round(s) * 0.1 + trunc(s) * 0.1 + int(s) * 0.1": ("rintf(", "truncf(", "__float2int_rz("),
    "0.5 * s * (1.0 + erf(0.70710678 * s))": ("tanh_approx(",),
    "log1p(exp(s)) + expm1(-abs(s))": ("__logf(1.0f + ", "__expf(", " - 1.0f"),
    "atan2(s, kv + 1) + atan(s)": ("atan2f(", "atanf("),
    "(abs(s) + 1.0) ** (0.1 * kv)": ("exp2_fast(", "__log2f("),
    "s ** (kv % 3)": ("exp2_fast(", "__log2f(fabsf("),
    "(0.0 if isnan(s) else sign(s)) + slope[h] / s": (" != ", "choose("),
    "s + bias[int(log(max(q - kv, 1) / 16) * 8) % 32]": ("__float2int_rz(", "__logf("),
}


@pytest.mark.parametrize("score", WORDS)
def test_words_in_their_short_forms(score: str) -> None:
    text = render(kernel(score, 64, "bf16", "dense", backend="cuda")).text
    assert [form for form in WORDS[score] if form not in text] == []


@few("score", reversed(WORDS), always=0, often=range(0, 9, 3))
def test_words_of_a_forward(score: str) -> None:
    serialized, _ = serialized_and_spills(kernel(score, 64, "bf16", "dense", backend="cuda"))
    assert not serialized


@pytest.mark.exhaustive
@few("score", [*WORDS][1:3], often=())
def test_words_of_a_backward(score: str) -> None:
    serialized, _ = serialized_and_spills(
        kernel(score, 64, "bf16", "dense", passes="backward", backward="{backend: cuda}")
    )
    assert not serialized


@pytest.mark.parametrize("score", [*WORDS][5:6])
def test_the_library_computes_powers_without_fast_math(score: str) -> None:
    text = render(kernel(score, 64, "bf16", "dense", backend="cuda", fast_math="false")).text
    assert "powf(" in text
