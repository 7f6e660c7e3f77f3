"""The barriers of latent attention, by simulation: no interleaving waits forever, or reads what is not there."""

from __future__ import annotations

from random import Random

import pytest

from tests.families.latent.mla_protocol import Case, Latent, Merging, Rules
from tests.plan.simulation import ProtocolError

RUNS = 100


@pytest.mark.parametrize("few", [False, True])
def test_loaders_and_consumers(few: bool) -> None:
    random = Random(0)
    for _ in range(RUNS):
        parts = tuple(random.randint(0, 5) for _ in range(random.randint(1, 3)))
        Latent(Case(parts, few), Rules(), random).run()


def test_blocks_that_merge_need_not_be_resident_together() -> None:
    random = Random(0)
    for _ in range(10 * RUNS):
        Merging(Rules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("released_after_values", "read"),
        ("wait_for_p", "read"),
        ("meet_after_sums", "read|deadlock"),
    ],
)
def test_a_rule_of_a_block_that_is_broken_is_found(rule: str, becomes: str) -> None:
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Latent(Case.random(random), Rules(**{rule: False}), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [("stored_before_counted", "partial"), ("last_does_the_rest", "merged"), ("reset_by_last", "counters")],
)
def test_a_rule_of_merging_that_is_broken_is_found(rule: str, becomes: str) -> None:
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(10 * RUNS):
            Merging(Rules(**{rule: False}), random).run()
