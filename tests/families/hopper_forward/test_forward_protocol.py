"""The barriers of the Hopper kernels, by simulation: no interleaving waits forever or reads what is not there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.families.hopper_forward.forward_protocol import Case, Forward, Rules
from tests.plan.simulation import ProtocolError

RUNS = 400


@pytest.mark.parametrize("seed", range(4))
def test_the_rules_of_the_templates_hold(seed: int) -> None:
    random = Random(seed)
    for _ in range(RUNS):
        case = Case.random(random)
        Forward(case, Rules(), random).run()


def shared(case: Case, random: Random) -> Case:
    """Return the case of a block that shares the keys of its work tile, and may have none."""
    works = ((),) if random.random() < 0.1 else case.works[:1]
    return replace(case, works=works, q_stages=1, shares=True)


def test_blocks_that_share_keys() -> None:
    random = Random(0)
    for _ in range(RUNS):
        Forward(shared(Case.random(random), random), Rules(), random).run()
    with pytest.raises(ProtocolError, match="read partial results"):
        for _ in range(RUNS):
            case = shared(replace(Case.random(random), consumers=2, pingpong=False), random)
            Forward(case, Rules(meet_before_partials=False), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes", "pingpong"),
    [
        ("last_product_before_skips", "deadlock", True),
        ("last_product_before_skips", "deadlock", False),
        ("turn_for_skipped", "deadlock", True),
        ("meet_before_release", "deadlock", False),
        ("skips_are_bounded", "deadlock|read", True),
        ("skips_are_bounded", "deadlock|read", False),
        ("only_leader_awaits_skipped", "deadlock", True),
        ("only_leader_awaits_skipped", "deadlock", False),
        ("value_loader_says_so", "loader of V read record|deadlock", True),
        ("v_until_product", "read", True),
        ("v_until_product", "read", False),
        ("two_tiles_of_values", "read values", True),
        ("two_tiles_of_values", "read values", False),
        ("warps_release_biases", "deadlock|read", True),
        ("warps_release_biases", "deadlock|read", False),
        ("skipped_biases", "deadlock|read", True),
    ],
)
def test_a_rule_that_is_broken_is_found(rule: str, becomes: str, pingpong: bool) -> None:
    """The model fails when any one of its rules is broken."""
    random = Random(1)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            case = replace(Case.random(random), consumers=2, pingpong=pingpong, skips=True)
            if rule == "value_loader_says_so":
                case = replace(case, value_loader=True, bias_stages=0)
            if "biases" in rule:
                case = replace(case, value_loader=False, bias_stages=2)
            Forward(case, Rules(**{rule: False}), random).run()
