"""Variants settled by their ranges mean the same, pair by pair, and say so in the shortest form."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.constant_conditions import fold_conditions, reads_products
from attngen.lang.eager import evaluate
from attngen.lang.ir import Const, Type
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor, Variant

SCALARS = [Scalar("n", "int32", min=1, max=4), Scalar("c", "bool", const=False), Scalar("x", "fp32")]
TENSORS = [Tensor("size", "int32", ("h",), range=(2, 9))]

#: mask, score, and what they become.
SETTLED = [
    ("false", None, "False", None),
    ("kv < 0", "s * 2", "False", None),
    ("q_pos >= kv and c", None, "False", None),
    ("n > 4 or size[h] < 2", None, "False", None),
    ("true", "-inf", "False", None),
    ("q_pos >= kv", "-inf if kv >= 0 else s", "False", None),
    ("kv >= 0", None, "True", None),
    ("kv >= 0 and q >= kv", None, "q >= kv", None),
    ("q >= kv or n < 1", "s if kv < 0 else 1.0", "q >= kv", "1.0"),
    ("q >= kv", "s + (3.0 if n > 0 else x)", "q >= kv", "s + 3.0"),
]
UNDECIDED = [
    ("q < kv and q > kv", "s"),  # each by itself may be true
    ("q >= kv", "s"),
    ("kv < n and q_pos >= 0", "s if x < x else -inf"),  # x may be NaN
    ("kv >= seqlen_k - n", "s - inf"),  # of an infinite s
    ("size[h] < 3", "s if kv < 1 else -inf"),
]


def variant(mask: str, score: str | None) -> Variant:
    return compile_variant("v", mask == "true" or (mask != "false" and mask), score, SCALARS, TENSORS)


def logits(of: Variant) -> list[torch.Tensor]:
    """Return the logits of all pairs, -inf where the mask hides one, for some values of scalars and lengths."""
    values = []
    for n, seqlen_k, x in itertools.product((1, 4), (1, 6), (0.5, float("nan"))):
        q, kv, s = torch.arange(5)[:, None], torch.arange(seqlen_k)[None, :], torch.linspace(-1, 1, 5)[:, None]
        names = {
            "n": n, "x": x, "q": q, "kv": kv, "q_pos": q + seqlen_k - 5, "h": 0, "s": s, "seqlen_q": 5,
            "seqlen_k": seqlen_k,
        }  # fmt: skip
        tensors = {"size": torch.tensor([7])}
        visible = evaluate(of.mask, names, tensors).broadcast_to(5, seqlen_k)
        score = s if of.score is None else evaluate(of.score, names, tensors)
        hidden = torch.tensor(-torch.inf)
        values.append(torch.where(visible, torch.as_tensor(score, dtype=torch.float32), hidden))
    return values


@pytest.mark.parametrize(("mask", "score", "settled_mask", "settled_score"), SETTLED)
def test_conditions_that_ranges_decide_are_folded(
    mask: str, score: str | None, settled_mask: str, settled_score: str | None
) -> None:
    before = variant(mask, score)
    after = fold_conditions(before)
    assert canonical(after.mask) == settled_mask
    assert (after.score and canonical(after.score)) == settled_score
    assert (after.scalars, after.tensors) == (before.scalars, before.tensors)
    for one, other in zip(logits(before), logits(after), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert restore_variant(after.to_dict()) == after


@pytest.mark.parametrize(("mask", "score"), UNDECIDED)
def test_other_conditions_are_left_alone(mask: str, score: str) -> None:
    before = variant(mask, score)
    assert fold_conditions(before) is before


def test_a_score_may_need_no_product() -> None:
    assert reads_products(variant("true", None))
    assert reads_products(variant("true", "2 * s"))
    assert not reads_products(variant("true", "x * abs(q - kv)"))
    assert fold_conditions(variant("false", "s")).mask == Const(False, Type.BOOL)
