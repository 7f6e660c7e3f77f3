"""The plan of a kernel that selects the largest scores, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    most = max(launch.tile_m for launch in plan.launches)
    yield "does", "selects the k largest scores of each row, ties by lower index; writes their indices, ascending"
    yield "k", f"up to {most}"
    yield "block", f"{plan.threads} threads have a row, and load {plan.tile_n} scores at once"
    yield "moves", "4 B of a score in, once"
