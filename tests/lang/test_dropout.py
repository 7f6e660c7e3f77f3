"""Dropout in a variant: what it takes at the call, and that it is kept."""

from __future__ import annotations

import pytest

from attngen.errors import SpecError
from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.variant import Scalar, Tensor
from attngen.schema import load_spec_text

OWN = {"scalars": [Scalar("window", "int32")], "tensors": [Tensor("slope", "fp32", ("h",))]}


def test_a_variant_with_dropout_takes_a_rate_and_a_state() -> None:
    plain = compile_variant("v", "q - kv < window", "s + slope[h]", **OWN)  # type: ignore[arg-type]
    variant = compile_variant("v", "q - kv < window", "s + slope[h]", dropout=True, **OWN)  # type: ignore[arg-type]
    assert variant.scalars == (*plain.scalars, DROPOUT_P)
    assert variant.tensors == (*plain.tensors, RNG_STATE)
    assert variant.dropout
    assert not plain.dropout
    for one in (plain, variant):
        assert restore_variant(one.to_dict()) == one
    assert "dropout" not in plain.to_dict()


@pytest.mark.parametrize("name", ["dropout_p", "rng_state"])
def test_names_of_dropout_are_reserved(name: str) -> None:
    with pytest.raises(SpecError, match=f"'{name}' is reserved"):
        compile_variant("v", scalars=[Scalar(name, "fp32")])
    with pytest.raises(SpecError, match=f"unknown (name|tensor) '{name}'"):
        compile_variant("v", score=f"s * {name}" if name == "dropout_p" else f"s + {name}[0]", dropout=True)


def test_a_spec_declares_it() -> None:
    spec = load_spec_text("schema: 1\nvariants: {a: {dropout: true}, b: {mask: 'q >= kv'}}\n")
    assert spec.variants["a"].variant.dropout
    assert not spec.variants["b"].variant.dropout
