"""A score that is −inf by its form hides pairs as a mask does, so that kernels skip them."""

from __future__ import annotations

import pytest
import torch

from attngen.lang.check import compile_variant
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor, Variant
from attngen.runtime.operations.attention.entry import attention

LEAST, LEAST_OF_BF16 = (repr(torch.finfo(dtype).min) for dtype in (torch.float32, torch.bfloat16))


def variant(mask: str | None, score: str) -> Variant:
    tensors = [Tensor("bias", "fp32", ("seqlen_k",))]
    return compile_variant("own", mask, score, [Scalar("w", "int32", min=1)], tensors)


@pytest.mark.parametrize(
    ("mask", "score", "seen", "rest"),
    [
        (None, "s if abs(q - kv) <= w else -inf", "abs(q - kv) <= w", None),
        ("q >= kv", "-inf if q - kv > w else s * 2", "q >= kv and not q - kv > w", "s * 2.0"),
        (None, "s + (0 if q >= kv else -inf)", "q >= kv", None),
        (None, "(0.5 if q >= kv else -inf) + s", "q >= kv", "0.5 + s"),
        (None, "(s if kv < w else -inf) if q >= kv else -inf", "q >= kv and kv < w", None),
        (None, "bias[kv] if kv < w else -inf", "kv < w", "bias[kv]"),
        # of a dtype's least value too, if each row sees its first key
        (None, f"s if q >= kv else {LEAST}", "q >= kv", None),
        (None, f"{LEAST_OF_BF16} if q < kv else s * 2", "not q < kv", "s * 2.0"),
        (
            "q // w >= kv // w",
            f"s if kv <= q or kv < 4 else {LEAST}",
            "q // w >= kv // w and (kv <= q or kv < 4)",
            None,
        ),
        (None, "(-inf if q < kv else s) if h == 0 else s", "not q < kv if h == 0 else True", None),
        (
            "q >= kv",
            "(s * 2 if kv < w else -inf) if h == 0 else s + (0 if q - kv < w else -inf)",
            "q >= kv and (kv < w if h == 0 else q - kv < w)",
            "s * 2.0 if h == 0 else s",
        ),
    ],
)
def test_a_condition_becomes_the_mask(mask: str | None, score: str, seen: str, rest: str | None) -> None:
    compiled = variant(mask, score)
    assert canonical(compiled.mask) == seen
    assert (None if compiled.score is None else canonical(compiled.score)) == rest


@pytest.mark.parametrize(
    "score",
    [
        "s if s > 0 else -inf",  # the logit decides
        "s if q >= kv else -1000.0",
        "(s if s > 0 else -inf) if h == 0 else s",
        "s if q >= kv else inf",
        f"s if q_pos >= kv else {LEAST}",  # the first queries may see no key
        f"s if q >= kv and q - kv < w else {LEAST}",
        f"s if bias[kv] > 0 else {LEAST}",
        f"bias[kv] if q >= kv else {LEAST}",  # bias may be -inf
        f"s if q >= kv else {LEAST} / 2",
        f"s + (0 if q >= kv else {LEAST})",
        "bias[kv] + (0 if q >= kv else -inf)",  # bias may be inf: the sum is NaN then
        "(0 if q >= kv else -inf) * s",
    ],
)
def test_scores_that_become_no_mask(score: str) -> None:
    compiled = variant(None, score)
    assert not compiled.masked
    assert compiled.score is not None


def test_a_guard_still_guards() -> None:
    """The table is read at visible pairs alone, as the condition asked."""
    guarded = compile_variant(
        "own", None, "s + table[q - kv] if 0 <= q - kv and q - kv < 4 else -inf", [], [Tensor("table", "fp32", (4,))],
    )  # fmt: skip
    assert guarded.masked
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 8) for _ in range(3))
    table = torch.randn(4)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    logits = (q[0, :, 0] @ k[0, :, 0].T) / 8**0.5 + table[distance.clamp(0, 3)]
    logits = logits.masked_fill((distance < 0) | (distance >= 4), -torch.inf)
    wanted = logits.softmax(-1) @ v[0, :, 0]
    torch.testing.assert_close(attention(q, k, v, variant=guarded, table=table)[0, :, 0], wanted)


@pytest.mark.parametrize("condition", ["q >= kv", "q_pos >= kv", "q - kv < 2 and kv <= q", "kv > 20"])
def test_least_values_are_those_of_torch(condition: str) -> None:
    """In a row that sees no key, softmax gives all keys the same weight."""
    chosen = compile_variant("own", None, f"s if {condition} else {LEAST}", [], [])
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 13, 1, 8), torch.randn(1, 9, 1, 8), torch.randn(1, 9, 1, 8)
    row, key = torch.arange(13)[:, None], torch.arange(9)
    seen = eval(condition.replace("and", "&").replace("q - kv < 2", "(q - kv < 2)").replace("kv <= q", "(kv <= q)"),
                {"q": row, "kv": key, "q_pos": row - 4})  # fmt: skip
    logits = ((q[0, :, 0] @ k[0, :, 0].T) / 8**0.5).masked_fill(~seen, torch.finfo(torch.float32).min)
    wanted = logits.softmax(-1) @ v[0, :, 0]
    torch.testing.assert_close(attention(q, k, v, variant=chosen)[0, :, 0], wanted)
