"""The plan of a kernel that selects the largest scores, in words."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.plan.model import Plan


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Label and text of each line of its explanation."""
    most = max(launch.tile_m for launch in plan.launches)
    yield "does", "selects the k largest scores of each row, ties by lower index; writes their indices, ascending"
    if plan.schedule == "topk_short":
        yield "rows", f"of up to {most} scores, and any k"
        yield "block", f"a row for each of its {plan.num_warps} warps, which hold it in registers"
        yield "moves", "4 B of a score in, once"
        return
    yield "k", f"up to {most}"
    yield "block", f"{plan.threads} threads have a row, and load {plan.tile_n} scores at once"
    yield "moves", "4 B of a score in, once"
