"""Barriers of the backward by mma.sync: no order of its warps ends in a deadlock, or reads what is not there yet."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest

from tests.plan.mma_protocol import Block, Rules
from tests.plan.simulation import ProtocolError


def test_every_order_of_warps_reads_what_was_meant() -> None:
    for seed in range(300):
        Block(Rules(), Random(seed)).run()


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_every_wait_is_needed(rule: str) -> None:
    rules = replace(Rules(), **{rule: False})
    with pytest.raises(ProtocolError):
        for seed in range(300):
            Block(rules, Random(seed)).run()
