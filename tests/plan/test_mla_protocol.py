"""The barriers of latent attention, by simulation: no interleaving waits forever, or reads what is not there."""

from __future__ import annotations

from random import Random

import pytest

from tests.plan.mla_protocol import Case, Latent, Rules
from tests.plan.simulation import ProtocolError

RUNS = 100


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_rules_of_the_templates_hold(blocks: int) -> None:
    random = Random(0)
    for _ in range(RUNS):
        Latent(Case(Case.random(random).parts, blocks), Rules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("both_release", "read|deadlock"),
        ("released_after_values", "read"),
        ("wait_for_p", "read"),
        ("meet_after_sums", "read"),
        ("copies_wait", "read|deadlock"),
    ],
)
def test_a_rule_that_is_broken_is_found(rule: str, becomes: str) -> None:
    """The model fails when any one of its rules is broken."""
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Latent(Case.random(random), Rules(**{rule: False}), random).run()
