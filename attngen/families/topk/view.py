"""View of the kernel that selects the largest scores."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.families.topk import schedule as topk
from attngen.families.topk import warps
from attngen.plan.model import Plan
from attngen.render.cuda_arguments import argument_lines
from attngen.render.header import command


@dataclass(frozen=True, slots=True)
class TopkLaunch:
    """One launch of a kernel that selects: the candidates that shared memory holds, the most that it selects, and the
    blocks of a multiprocessor."""

    symbol: str
    argument_lines: tuple[str, ...]
    capacity: int
    largest_k: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TopkView:
    """Everything that the template of a selection names beside the plan itself."""

    template: str
    command: str
    summary: str
    pdl: bool
    vectors: int
    bins: int
    selection_bytes: int
    launches: tuple[TopkLaunch, ...]


def topk_view(plan: Plan, template: str) -> TopkView:
    """View of a plan that selects the largest scores of rows."""
    return TopkView(
        template=template,
        command=command(plan),
        summary="Indices of the k largest scores of each row, ascending; of equal scores the lower indices.",
        pdl=plan.launch(plan.main).pdl,
        vectors=topk.VECTORS,
        bins=topk.BINS,
        selection_bytes=topk.SHARED,
        launches=tuple(
            TopkLaunch(
                launch.symbol,
                argument_lines(plan, launch.arguments, written={"out"}),
                topk.CAPACITY[launch.name],
                launch.tile_m,
                topk.BLOCKS[launch.name],
            )
            for launch in plan.launches
        ),
    )


@dataclass(frozen=True, slots=True)
class WarpsLaunch:
    """One launch of a kernel whose warps select: the scores that a lane holds."""

    symbol: str
    argument_lines: tuple[str, ...]
    values: int


@dataclass(frozen=True, slots=True)
class WarpsView:
    """Everything that the template of a selection by warps names beside the plan itself."""

    template: str
    command: str
    summary: str
    pdl: bool
    launches: tuple[WarpsLaunch, ...]


def warps_view(plan: Plan, template: str) -> WarpsView:
    """View of a plan whose warps select the largest scores of short rows."""
    return WarpsView(
        template=template,
        command=command(plan),
        summary="Indices of the k largest scores of each short row, ascending; of equal scores the lower indices.",
        pdl=plan.launch(plan.main).pdl,
        launches=tuple(
            WarpsLaunch(
                launch.symbol, argument_lines(plan, launch.arguments, written={"out"}), warps.VALUES[launch.name]
            )
            for launch in plan.launches
        ),
    )
