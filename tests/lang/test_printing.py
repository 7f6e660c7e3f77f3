"""Canonical text: minimal parentheses, and it parses back to the same IR."""

from __future__ import annotations

import pytest

from attngen.lang.ir import Const, Op, Search, Type, Var
from attngen.lang.printing import canonical
from tests.lang import randoms
from tests.sampling import seeds


@seeds(40, always=3)
@pytest.mark.parametrize("kind", ["mask", "float"])
def test_random_expressions_parse_back(seed: int, kind: str) -> None:
    expr = randoms.expression(seed, kind=kind, depth=4, logit=kind == "float")
    text = canonical(expr)
    variant = randoms.declare(text, kind)
    again = variant.mask if kind == "mask" else variant.score
    assert again == expr
    assert canonical(again) == text


@pytest.mark.parametrize(
    "text",
    [
        "q_pos >= kv",
        "0 <= q_pos - kv and q_pos - kv < window",
        "not (q == 1 or kv == 2) and flag",
        "q == 1 or kv == 2 and flag",
        "(q == 1 or kv == 2) and flag",
        "q == 1 or (kv == 2 or flag)",
        "q - (kv - 1) > 0",
        "q - kv - 1 > 0",
        "(q - kv) * 2 > 0",
        "q - kv * 2 > 0",
        "-q ** 2 > 0",
        "(-q) ** 2 > 0",
        "((q % 9) ** 2) ** 2 > 0",
        "(-1) ** 3 == -1",
        "(q & 3 | kv) ^ 5 > 0",
        "q << (kv & 7) >> 2 > 0",
        "q & kv >> 1 > 0",
        "~q + ~(q + 1) > 0",
        "(q > 1) == (kv > 1)",
        "(q > 1) ^ (kv > 1)",
        "(not flag) == flag",
        "(q if flag else kv) > 1",
        "(flag if q > 1 else not flag) if kv > 1 else flag",
        "flag if q > 1 else flag if kv > 1 else not flag",
        "min(q, max(kv, 1)) > 0",
        "doc[b, min(kv, 3)] == tiny[q & 3, kv % 5]",
        "int(flag) + q > 1",
        "gain < inf and gain > -inf",
        "gain * 0.5 - q < 1.0",
        "float(q) == kv",
        "bias > 1e-10",
    ],
)
def test_text_that_is_canonical_stays(text: str) -> None:
    assert canonical(randoms.declare(text, "mask").mask) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("((q)) >= (kv)", "q >= kv"),
        ("0 <= q < 3", "0 <= q and q < 3"),
        ("(q > 1) & (kv > 1)", "q > 1 and kv > 1"),
        ("clamp(q, 0, 3) > 1", "min(max(q, 0), 3) > 1"),
        ("stride > q", "3 > q"),
        ("f(q, 2) > 1", "(q - 2 if q > 2 else 2 - q) > 1"),
        ("s", "s"),
    ],
)
def test_spellings(text: str, printed: str) -> None:
    kind = "float" if text == "s" else "mask"
    variant = randoms.declare(text, kind)
    assert canonical(variant.mask if kind == "mask" else Var("s", Type.FLOAT)) == printed


def test_conversions_that_the_check_puts_back_are_not_printed() -> None:
    score = randoms.declare("s * q + tanh(kv) / 2 + (1 if flag else gain)", "float").score
    assert score is not None
    assert canonical(score) == "s * q + tanh(kv) / 2.0 + (1.0 if flag else gain)"


def test_a_search_prints_for_people() -> None:
    position = Search(
        "doc",
        1,
        (Var("b", Type.INT), Const(0, Type.INT)),
        Var("q", Type.INT),
        True,
        Var("seqlen_k", Type.INT),
    )
    text = canonical(Op("add", (position, Const(1, Type.INT)), Type.INT))
    assert text == "first(doc[b, :] > q, seqlen_k) + 1"
