"""Plan → what the template of the kernel that quantizes is filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Argument, Plan
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


def _declaration(plan: Plan, argument: Argument) -> str:
    if not argument.type.startswith("*"):
        return f"{_TYPES[argument.type]} {argument.name},"
    name = argument.type.removeprefix("*")
    written = _TYPES.get(name, plan.operands.q.cuda)
    return f"{'' if argument.of in _WRITTEN else 'const '}{written}* {argument.name},"
