"""Plan → what the templates of kernels beside attention are filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.families.quantize import tiles as quantize_tiles
from attngen.parts.rows_view import HelperView, _view
from attngen.plan.model import Plan
from attngen.render.cuda_arguments import argument_lines
from attngen.render.header import command

_QUANTIZED = frozenset({
    "q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "maxima", "k_mean_out", "k_shift",
})  # fmt: skip


def quantize_view(plan: Plan, template: str) -> HelperView:
    """Return the view of a plan that quantizes."""
    summary = "Queries, keys and values become 8 bits and scales; rows of Q and K are rotated and transformed."
    return _view(plan, template, summary, _QUANTIZED)


@dataclass(frozen=True, slots=True)
class TilesLaunch:
    """Names of one launch in the template of tiles."""

    symbol: str
    argument_lines: tuple[str, ...]
    pdl: bool
    stages: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class QuantizeTilesView:
    """Everything that the template of tiles names beside the plan itself."""

    template: str
    command: str
    summary: str
    heads_of_a_tile: str
    groups: int
    boxes: int
    angle_tables: int
    angle_pitch: int  # bytes
    multiplied_operands: int  # bytes
    rotated_operands: int  # bytes
    span: int  # the largest number of 8 bits, in root mean squares of a sample
    main: TilesLaunch
    kept: TilesLaunch
    sample: TilesLaunch
    sampled: TilesLaunch
    rotated: TilesLaunch


def tiles_view(plan: Plan, template: str) -> QuantizeTilesView:
    """Return the view of a plan of schedule ``quantize_tiles``."""
    heads = quantize_tiles.BOXES * quantize_tiles.BOX_BYTES // plan.operands.q.bytes // plan.head_dim_qk
    return QuantizeTilesView(
        template=template,
        command=command(plan),
        summary="Queries, keys and values become 8 bits and scales; rows of Q and K are transformed, or rotated, too.",
        heads_of_a_tile="one head" if heads == 1 else f"{heads} heads",
        groups=quantize_tiles.GROUPS,
        boxes=quantize_tiles.BOXES,
        angle_tables=quantize_tiles.angle_tables(plan),
        angle_pitch=quantize_tiles.angle_pitch(plan),
        multiplied_operands=quantize_tiles.operand_bytes(plan, plan.main),
        rotated_operands=quantize_tiles.operand_bytes(plan, quantize_tiles.ROTATED),
        main=_tiles_launch(plan, plan.main),
        span=quantize_tiles.SPAN,
        kept=_tiles_launch(plan, quantize_tiles.KEPT),
        sample=_tiles_launch(plan, quantize_tiles.SAMPLE),
        sampled=_tiles_launch(plan, quantize_tiles.SAMPLED),
        rotated=_tiles_launch(plan, quantize_tiles.ROTATED),
    )


def _tiles_launch(plan: Plan, name: str) -> TilesLaunch:
    launch = plan.launch(name)
    lines = argument_lines(plan, launch.arguments, written=_QUANTIZED)
    return TilesLaunch(launch.symbol, lines, launch.pdl, launch.stages, launch.shared_bytes)
