"""Random masks: the same seed gives the same one, all of the language comes up, and two evaluators agree on the CPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests.fuzz.dense_attention import attend
from tests.fuzz.language import drawn
from tests.fuzz.mask_calls import Findings, MaskCall
from tests.sampling import seeds

#: Traits that a thousand masks and scores have to show, at least some ten times each.
_FORMS = {
    "a division by a literal": r"// \d", "a division by a scalar": r"// (period|size|open)", "a remainder": r" % ",
    "a divisor of a head": r"// stride", "a negative divisor": r"(//|%) -\d", "clamp": "clamp", "min": r"\bmin\(",
    "max": r"\bmax\(", "a conditional": " if ", "and": " and ", "or": " or ", "not": "not ",
    "ids in any order": r"id_\d+\[(b, )?q\]", "windows of queries": r"window_\d+\[",
    "keys between two reads": r"first_\d+\[", "bools of pairs": r"allowed_\d+\[.*q, kv\]",
    "bools of blocks": r"blocks_\d+\[", "a score of −inf": "-inf", "a bias of pairs": "pair_bias",
    "floats": r"floor|ceil|float",
    "a head": r"\bh\b", "a range": "'range'", "a constant": "'const'", "an order": "'monotone'",
}  # fmt: skip


@pytest.mark.exhaustive
def test_a_thousand_show_all_of_the_language() -> None:
    lines = [drawn(seed).line for seed in range(1000)]
    counts = {form: sum(bool(re.search(words, line)) for line in lines) for form, words in _FORMS.items()}
    assert {form: count for form, count in counts.items() if count < 10} == {}
    assert len(set(lines)) > 950


def test_the_same_seed_gives_the_same_mask() -> None:
    assert drawn(5) == drawn(5)
    assert drawn(5).text != drawn(6).text


@seeds(200, always=8)
def test_the_reference_computes_what_the_text_says(seed: int) -> None:
    made, findings = drawn(seed), Findings()
    for layout, cases in made.cases.items():
        call = MaskCall(made, layout, cases[1], seed, "cpu")
        out, lse, gradients = call.run(backward=layout != "paged", backend="reference", variant=call.variant)
        call.compare(out, lse, gradients, findings)
    assert findings.problems == []
    assert max(findings.worst.values()) < 0.5  # half of what kernels may err


def test_a_pair_too_few_is_noticed() -> None:
    """A pair of usual weight and gradient, of 700 keys, changes its row and its key by more than is allowed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(700, 1, 64, generator=generator).bfloat16() for _ in range(4))
    visible = torch.ones(1, 700, 700, dtype=torch.bool)
    exact = attend(q, k, v, dout, visible, None)
    weights = torch.softmax(q[5, 0].double() @ k[:, 0].double().T / 8, 0)
    pulls = dout[5, 0].double() @ v[:, 0].double().T
    usual = ((weights * 700 - 1).abs() < 0.35) & ((pulls - pulls @ weights).abs() > 7)
    key = int(usual.nonzero()[0])
    visible[0, 5, key] = False
    other = attend(q, k, v, dout, visible, None)
    rounded = {name: one.bfloat16() for name, one in other.results.items()}
    ratios = exact.ratios(rounded, other.lse)
    assert min(float(ratios[name][0, 5]) for name in ("lse", "out", "dq")) > 1.2
    assert min(float(ratios[name][0, key]) for name in ("dk", "dv")) > 1.2
    right = {name: one.bfloat16() for name, one in exact.results.items()}
    assert max(float(ratio.max()) for ratio in exact.ratios(right, exact.lse).values()) < 0.5
