"""Weights as a field of a variant: kept in JSON, and what may not stand beside them."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.errors import SpecError
from attngen.lang.check import compile_variant, restore_variant
from attngen.lang.variant import WEIGHTS


def test_weights_are_a_part_of_the_definition_and_of_the_json_form() -> None:
    plain, sigmoid = compile_variant("v"), compile_variant("v", weights="sigmoid")
    assert "weights" not in plain.to_dict()
    assert restore_variant(sigmoid.to_dict()) == sigmoid
    assert sigmoid.definition != plain.definition
    assert plain.differences(sigmoid) == [("weights", "softmax", "sigmoid")]
    assert plain.has_lse
    assert not sigmoid.has_lse


@pytest.mark.parametrize(
    ("given", "field"),
    [({"sink": "1.0"}, "sink"), ({"keys": "index"}, "keys"), ({"dropout": True}, "dropout")],
)
def test_what_says_something_of_a_softmax_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"leave out '{field}' or 'weights: sigmoid'") as raised:
        compile_variant("v", weights="sigmoid", **given)
    assert raised.value.field == field


def test_unknown_weights_of_a_manifest_are_refused() -> None:
    with pytest.raises(SpecError, match=f"weights must be one of {', '.join(WEIGHTS)}, got 'relu'"):
        restore_variant({**compile_variant("v").to_dict(), "weights": "relu"})
