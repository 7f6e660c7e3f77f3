"""The barriers of the clustered CUDA backward, by simulation: no interleaving waits forever, waits for a phase that is
over, or reads what is not there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.families.hopper_backward.cluster_protocol import Case, Cluster, Rules
from tests.plan.simulation import ProtocolError
from tests.sampling import sampled

RUNS = 150


@sampled(form={"plain": (False, False), "ordered": (True, False), "reads_ds": (False, True)}, overlap=["roles", "dv"])
def test_the_rules_of_the_templates_hold(form: tuple[bool, bool], overlap: str) -> None:
    ordered, reads_ds = form
    random = Random(0)
    for _ in range(RUNS):
        case = replace(Case.random(random), overlap=overlap, ordered=ordered, reads_ds=reads_ds)
        Cluster(case, Rules(), random).run()


@pytest.mark.parametrize(
    ("rule", "becomes"),
    [
        ("release_to_both", "read|phase"),
        ("taken_by_both", "deadlock|read"),
        ("wait_for_place", "read|phase"),
        ("wait_for_landing", "read"),
        ("all_probabilities", "read"),
        ("meet_before_ds", "read"),
        ("q_until_dk", "read"),
        ("dout_until_dv", "read"),
        ("dout_until_dp", "read"),
        ("wait_for_rows", "read"),
        ("end_fills_a_stage", "deadlock"),
        ("end_waits_its_turn", "phase|read"),
        ("taken_by_reader", "read|phase"),
        ("dv_behind_dp", "read"),
        ("sums_are_remembered", "read"),
        ("copies_land", "has left"),
        ("leave_together", "has left"),
        ("wait_for_turn", "added dQ"),
        ("told_when_added", "told|phase"),
        ("one_turn_at_a_time", "added dQ|phase"),
        ("s_after_dp", "read|phase"),
        ("dp_after_s", "read|phase"),
        ("part_until_read", "read|phase"),
    ],
)
def test_a_rule_that_is_broken_is_found(rule: str, becomes: str) -> None:
    """The model fails when any one of its rules is broken."""
    random = Random(2)
    with pytest.raises(ProtocolError, match=becomes):
        for _ in range(RUNS):
            Cluster(Case.random(random), Rules(**{rule: False}), random).run()


def test_a_step_needs_a_stage_for_each_part_of_dout() -> None:
    """As the plan insists."""
    with pytest.raises(ProtocolError, match="deadlock"):
        Cluster(Case(steps=1, q_stages=2, parts=2, stages=1, overlap="roles"), Rules(), Random(0)).run()
