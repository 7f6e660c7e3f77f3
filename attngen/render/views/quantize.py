"""Plan → what the template of the kernel that quantizes is filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Argument, Plan
from attngen.plan.schedules import quantize_tiles
from attngen.render.header import argument_groups, command

_TYPES = {
    "i32": "int", "i64": "long long", "fp32": "float", "u8": "unsigned char", "u32": "uint32_t", "void": "void",
}  # fmt: skip
_WRITTEN = frozenset({"q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale", "maxima"})


@dataclass(frozen=True, slots=True)
class QuantizeView:
    """Everything that the template names beside the plan itself."""

    template: str
    command: str
    summary: str
    argument_lines: tuple[str, ...]
    pdl: bool  # it may start before the work ahead of it is done


def quantize_view(plan: Plan, template: str) -> QuantizeView:
    """Return the view of a plan."""
    lines = argument_groups(plan.arguments, lambda argument: _declaration(plan, argument), width=110)
    return QuantizeView(
        template=template,
        command=command(plan),
        summary="Queries, keys and values become 8 bits and scales; rows of Q and K are rotated and transformed.",
        argument_lines=(*lines[:-1], lines[-1].removesuffix(",")),
        pdl=plan.launch(plan.main).pdl,
    )


@dataclass(frozen=True, slots=True)
class TilesLaunch:
    """What the template of tiles names of one launch."""

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
    main: TilesLaunch
    kept: TilesLaunch
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
        kept=_tiles_launch(plan, quantize_tiles.KEPT),
        rotated=_tiles_launch(plan, quantize_tiles.ROTATED),
    )


def _tiles_launch(plan: Plan, name: str) -> TilesLaunch:
    launch = plan.launch(name)
    lines = argument_groups(launch.arguments, lambda argument: _declaration(plan, argument), width=110)
    lines = (*lines[:-1], lines[-1].removesuffix(","))
    return TilesLaunch(launch.symbol, lines, launch.pdl, launch.stages, launch.shared_bytes)


def _declaration(plan: Plan, argument: Argument) -> str:
    if argument.kind == "descriptor":
        return f"const __grid_constant__ TensorMap {argument.name},"
    if not argument.type.startswith("*"):
        return f"{_TYPES[argument.type]} {argument.name},"
    name = argument.type.removeprefix("*")
    written = _TYPES.get(name, plan.operands.q.cuda)
    return f"{'' if argument.of in _WRITTEN else 'const '}{written}* {argument.name},"
