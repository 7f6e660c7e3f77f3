"""Plan → what the template of the kernel that widens caches is filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Argument, Plan
from attngen.plan.schedules.widen import WRITTEN
from attngen.render.header import argument_groups, command

_TYPES = {"i32": "int", "i64": "long long", "fp32": "float", "u8": "unsigned char"}


@dataclass(frozen=True, slots=True)
class WidenView:
    """Everything that the template names beside the plan itself."""

    template: str
    command: str
    summary: str
    argument_lines: tuple[str, ...]
    pdl: bool  # it may start before the work ahead of it is done


def widen_view(plan: Plan, template: str) -> WidenView:
    """Return the view of a plan."""
    lines = argument_groups(plan.arguments, lambda argument: _declaration(plan, argument), width=110)
    return WidenView(
        template=template,
        command=command(plan),
        summary=f"Used keys and values of a cache in 8 bits in {plan.dtype_name}, times their scales.",
        argument_lines=(*lines[:-1], lines[-1].removesuffix(",")),
        pdl=plan.launch(plan.main).pdl,
    )


def _declaration(plan: Plan, argument: Argument) -> str:
    if not argument.type.startswith("*"):
        return f"{_TYPES[argument.type]} {argument.name},"
    if argument.of in WRITTEN:
        return f"{plan.operands.q.cuda}* {argument.name},"
    return f"const {_TYPES[argument.type.removeprefix('*')]}* {argument.name},"
