"""The order of sums of the CUDA backward, and parts of tiles of keys, by simulation: no interleaving of blocks waits
forever, adds in another order, or to what nobody stored."""

from __future__ import annotations

from random import Random

import pytest

from tests.families.hopper_backward.order_protocol import Grid, Launch, Rules
from tests.families.hopper_backward.parts_protocol import Parts
from tests.families.hopper_backward.parts_protocol import Rules as PartRules
from tests.plan.simulation import ProtocolError
from tests.sampling import few

RUNS = 150


@few("seed", range(3))
def test_dq_is_added_up_in_the_order_of_keys_and_rounded_and_no_block_waits_forever(seed: int) -> None:
    random = Random(seed)
    for _ in range(RUNS):
        Launch(Grid.random(random), Rules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("wait_for_turn", "added"),
        ("told_when_landed", "added"),
        ("all_are_taken", "deadlock"),
        ("end_is_told", "deadlock"),
        ("empty_are_told", "deadlock"),
        ("whole_chain", "added"),
        ("for_this_turn", "added"),
        ("near_alone", "added"),
        ("counted_when_landed", "rounded"),
        ("empty_are_counted", "deadlock"),
    ],
)
def test_a_rule_of_the_order_that_is_broken_is_found(rule: str, becomes: str) -> None:
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Launch(Grid.random(random), Rules(**{rule: False}), random).run()


# --- parts of tiles of keys ---------------------------------------------------------------------------------


def test_parts_of_a_tile_are_added_once_and_in_their_order() -> None:
    random = Random(0)
    for _ in range(RUNS):
        Parts(PartRules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("stored_before_counted", "not stored"),
        ("one_is_last", "wrote"),
        ("empty_are_stored", "not stored"),
        ("whole_count_as_parts", "deadlock"),
        ("in_order", "wrote"),
    ],
)
def test_a_rule_of_parts_that_is_broken_is_found(rule: str, becomes: str) -> None:
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Parts(PartRules(**{rule: False}), random).run()
