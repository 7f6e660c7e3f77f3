"""Runs of docs/figures/speed.json, from which tests recompute the figures of the docs."""

from __future__ import annotations

from functools import cache

from attngen.lab.bench.figures import BenchRun, read_runs
from tests.docs.blocks import ROOT

SPEED_FILE = ROOT / "docs/figures/speed.json"


@cache
def run(figures: str, card: str) -> BenchRun:
    """The run of these figures on the card whose name holds ``card``; there must be one."""
    (one,) = (each for each in read_runs(SPEED_FILE) if each.figures == figures and card in each.card)
    return one
