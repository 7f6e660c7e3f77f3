"""The barriers of the CUDA backward, by simulation: no interleaving waits forever or reads what is not there."""

from __future__ import annotations

from random import Random

import pytest

from tests.plan.backward_protocol import Backward, Case, Rules
from tests.plan.protocol import ProtocolError

RUNS = 150


@pytest.mark.parametrize("seed", range(3))
def test_the_rules_of_the_templates_hold(seed: int) -> None:
    random = Random(seed)
    for _ in range(RUNS):
        Backward(Case.random(random), Rules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("wait_for_adder", "deadlock|added"),
        ("meet_before_dq", "read"),
        ("two_buffers", "read"),
        ("meet_after_rows", "read"),
        ("keys_until_products", "read"),
        ("release_end", "deadlock"),
        ("all_see_the_end", "deadlock|read"),
    ],
)
def test_a_rule_that_is_broken_is_found(rule: str, becomes: str) -> None:
    """What the model could not find, it could not exclude either."""
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Backward(Case.random(random), Rules(**{rule: False}), random).run()
