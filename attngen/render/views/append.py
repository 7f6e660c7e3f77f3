"""Plan → what the template of the kernel that appends to caches is filled with."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.model import Argument, Plan
from attngen.plan.schedules.append import CACHES, ELEMENTS
from attngen.render.header import argument_groups, command

_TYPES = {"i32": "int", "i64": "long long", "void": "void", "fp32": "float"}
_WRITTEN = frozenset({"q_out", "k_cache", "v_cache"})


@dataclass(frozen=True, slots=True)
class AppendView:
    """Everything that the template names beside the plan itself."""

    template: str
    command: str
    summary: str
    argument_lines: tuple[str, ...]
    quantizes: bool  # the cache has fewer bits
    pdl: bool  # it may start before the work ahead of it is done


def append_view(plan: Plan, template: str) -> AppendView:
    """Return the view of a plan."""
    lines = argument_groups(plan.arguments, lambda argument: _declaration(plan, argument), width=110)
    return AppendView(
        template=template,
        command=command(plan),
        summary="New keys and values go into a cache; keys and queries are rotated on the way."
        if not plan.descaled
        else "New keys and values go into a cache in 8 bits; keys and queries are rotated on the way.",
        argument_lines=(*lines[:-1], lines[-1].removesuffix(",")),
        quantizes=plan.descaled,
        pdl=plan.launch(plan.main).pdl,
    )


def _declaration(plan: Plan, argument: Argument) -> str:
    if not argument.type.startswith("*"):
        return f"{_TYPES[argument.type]} {argument.name},"
    name = argument.type.removeprefix("*")
    element = (plan.operands.k if argument.of in CACHES else plan.operands.q).cuda
    element = _TYPES[name] if argument.of not in ELEMENTS else element
    return f"{'' if argument.of in _WRITTEN else 'const '}{element}* {argument.name},"
