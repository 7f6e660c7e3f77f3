"""Sinks in a variant: what may stand in one, and that it is kept."""

from __future__ import annotations

import pytest

from attngen.errors import SpecError
from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.ir import Const, Type
from attngen.lang.printing import canonical
from attngen.lang.variant import Scalar, Tensor, Variant

TENSORS = [Tensor("sinks", "bf16", ("b", "h"), grad=True), Tensor("pad", "bool", ("b",))]
SCALARS = [Scalar("shift", "fp32"), Scalar("rank", "int32")]


def sink(text: str | float) -> Variant:
    return compile_variant("v", "q_pos >= kv", None, SCALARS, TENSORS, {"lowered": "sinks[b, h] - shift"}, sink=text)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("sinks[b, h]", "sinks[b, h]"),
        ("lowered * 2", "(sinks[b, h] - shift) * 2.0"),
        ("rank", "float(rank)"),
        ("h // 2 + hk - kv_heads", "float(h // 2 + hk - kv_heads)"),
        ("-inf if pad[b] else 0", "-inf if pad[b] else 0.0"),
        (-0.5, "-0.5"),
    ],
)
def test_a_sink_is_a_float_over_batch_and_head(text: str | float, printed: str) -> None:
    variant = sink(text)
    assert variant.sink is not None
    assert variant.sink.type is Type.FLOAT
    assert canonical(variant.sink) == printed
    assert restore_variant(variant.to_dict()) == variant
    assert variant.sink_text == (text if isinstance(text, str) else None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s", "'s' is the logit"),
        ("sinks[b, h] * q", "'q' is not allowed; allowed: b, h, hk, heads, kv_heads and what is declared"),
        ("float(kv)", "'kv' is not allowed"),
        ("q_pos - 1", "'q_pos' is not allowed"),
        ("1.0 * seqlen_k", "'seqlen_k' is not allowed"),
        ("pad[b]", "must be a number, got a condition"),
        ("sink[h]", "unknown tensor 'sink'; did you mean 'sinks'"),
    ],
)
def test_sinks_that_differ_within_a_head_are_refused(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason) as raised:
        sink(text)
    assert raised.value.field == "sink"


def test_a_variant_without_a_sink_says_nothing_of_it() -> None:
    variant = compile_variant("v")
    assert variant.sink is None
    assert not {"sink", "sink_text"} & variant.to_dict().keys()


def test_a_sink_counts_among_what_a_variant_uses() -> None:
    assert sink("lowered").uses() == ({"q_pos", "kv", "b", "h", "shift"}, {"sinks"})
    assert sink("lowered").let[0][0] == "lowered"
    assert sink("lowered").uses(Const(1.0, Type.FLOAT)) == (frozenset(), frozenset())
