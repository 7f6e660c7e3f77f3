"""Barriers of the forward and the backward by mma.sync: no order of warps ends in a deadlock, or reads too early."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest

from tests.families.mma_backward import mma_protocol
from tests.families.mma_forward import mma_forward_protocol
from tests.plan.simulation import ProtocolError

_MODELS = {"forward": mma_forward_protocol, "backward": mma_protocol}
_RULES = [(name, field.name) for name, model in _MODELS.items() for field in fields(model.Rules)]


@pytest.mark.parametrize("name", list(_MODELS))
def test_every_order_of_warps_reads_what_was_meant(name: str) -> None:
    model = _MODELS[name]
    for seed in range(300):
        model.Block(model.Rules(), Random(seed)).run()


@pytest.mark.parametrize(("name", "rule"), _RULES)
def test_every_wait_is_needed(name: str, rule: str) -> None:
    model = _MODELS[name]
    rules = replace(model.Rules(), **{rule: False})
    with pytest.raises(ProtocolError):
        for seed in range(300):
            model.Block(rules, Random(seed)).run()
