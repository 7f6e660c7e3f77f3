"""``attngen explain``: speeds that are expected on cards without wgmma agree with those of docs/notebook/mma.md."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from attngen import cli
from attngen.families.mma_forward.explain import MmaForwardExplanation
from attngen.parts.explained.base import explanation_of
from attngen.plan import Plan, plan
from attngen.schema import expand, load_spec_text


def planned(fields: str, variant: str = "full") -> Plan:
    text = f"schema: 1\npackage: t\nkernels:\n  - {{variant: {variant}, {fields}}}\n"
    return plan(expand(load_spec_text(text))[0])


@pytest.mark.parametrize(
    ("fields", "tflops"),
    [
        ("arch: sm80, head_dim: 64, dtype: bf16", {"A100": 193}),
        ("arch: sm80, head_dim: 128, dtype: bf16", {"A100": 208}),
        ("arch: sm80, head_dim: 192, dtype: bf16", {"A100": 189}),
        ("arch: sm80, head_dim: 256, dtype: bf16", {"A100": 192}),
        ("arch: sm89, head_dim: 128, dtype: bf16", {"L40S": 300, "RTX 4090": 153}),
        ("arch: sm89, head_dim: 64, dtype: fp8_e4m3", {"L40S": 490, "RTX 4090": 281}),
        ("arch: sm89, head_dim: 256, dtype: fp8_e4m3", {"L40S": 540, "RTX 4090": 294}),
        ("arch: sm120a, head_dim: 128, dtype: bf16", {"RTX PRO 6000": 408, "RTX 5090": 195}),
        ("arch: sm120a, head_dim: 128, dtype: fp8_e4m3", {"RTX PRO 6000": 742, "RTX 5090": 374}),
    ],
)
def test_expected_speeds_are_those_from_counts_of_cubins(fields: str, tflops: dict[str, int]) -> None:
    explanation = explanation_of(planned(fields))
    assert isinstance(explanation, MmaForwardExplanation)
    assert explanation.expected() == pytest.approx(tflops, rel=0.04)


def test_other_kernels_have_no_expected_speed() -> None:
    for fields in ("arch: sm90a, head_dim: 64, dtype: bf16", "arch: sm80, head_dim: 64, dtype: fp32"):
        assert "expected" not in explanation_of(planned(fields)).facts()


@pytest.mark.exhaustive
def test_explain_says_that_no_card_was_measured() -> None:
    result = CliRunner().invoke(
        cli.group, ["explain", "specs/ampere.yaml", "fwd_sm80_mma_bf16_d128_causal_m128n64s3w4"]
    )
    assert "TFLOP/s (A100) in full tiles, by arithmetic" in result.stdout
    assert "no such card was measured" in result.stdout
