"""View of the kernels that move rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from attngen.plan.model import Plan
from attngen.render.cuda_arguments import argument_lines
from attngen.render.header import command


@dataclass(frozen=True, slots=True)
class HelperView:
    """Everything that the template of one launch names beside the plan itself."""

    template: str
    command: str
    summary: str
    argument_lines: tuple[str, ...]
    pdl: bool  # it may start before the work ahead of it is done


def _view(plan: Plan, template: str, summary: str, written: Collection[str]) -> HelperView:
    lines = argument_lines(plan, plan.arguments, written=written)
    return HelperView(template, command(plan), summary, lines, plan.launch(plan.main).pdl)
