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
class QuantizeTilesView(QuantizeView):
    """What the template of tiles names, too."""

    heads_of_a_tile: str
    groups: int
    boxes: int
    rotates: bool
    rotated_stages: int
    angle_pitch: int  # bytes
    shared_operands: int  # bytes
    shared_bytes: int


def tiles_view(plan: Plan, template: str) -> QuantizeTilesView:
    """Return the view of a plan of schedule ``quantize_tiles``."""
    common = quantize_view(plan, template)
    heads = quantize_tiles.BOXES * quantize_tiles.BOX_BYTES // plan.operands.q.bytes // plan.head_dim_qk
    return QuantizeTilesView(
        template=template,
        command=common.command,
        summary="Queries, keys and values become 8 bits and scales of blocks; rows of Q and K are transformed.",
        argument_lines=common.argument_lines,
        pdl=common.pdl,
        heads_of_a_tile="one head" if heads == 1 else f"{heads} heads",
        groups=quantize_tiles.GROUPS,
        boxes=quantize_tiles.BOXES,
        rotates=quantize_tiles.rotates(plan),
        rotated_stages=quantize_tiles.ROTATED_STAGES,
        angle_pitch=quantize_tiles.angle_pitch(plan),
        shared_operands=quantize_tiles.operand_bytes(plan),
        shared_bytes=quantize_tiles.shared_bytes(plan),
    )


def _declaration(plan: Plan, argument: Argument) -> str:
    if argument.kind == "descriptor":
        return f"const __grid_constant__ TensorMap {argument.name},"
    if not argument.type.startswith("*"):
        return f"{_TYPES[argument.type]} {argument.name},"
    name = argument.type.removeprefix("*")
    written = _TYPES.get(name, plan.operands.q.cuda)
    return f"{'' if argument.of in _WRITTEN else 'const '}{written}* {argument.name},"
