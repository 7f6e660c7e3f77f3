"""A rendered kernel: one source file, its name and the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.plan.catalogue import SCHEDULES
from attngen.plan.model import Plan
from attngen.render.environment import environment
from attngen.render.triton_view import triton_view


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one kernel; ``name`` is its file stem and the name of the function that it defines."""

    name: str
    text: str
    backend: str

    @property
    def file_name(self) -> str:
        """The name of the file that holds the text."""
        return f"{self.name}.py"


def render(plan: Plan) -> Source:
    """Return the source of a plan. The same plan gives the same bytes: no time, no path of this machine."""
    template = next(s.template for s in SCHEDULES if s.name == plan.schedule)
    text = environment(plan.backend).get_template(template).render(plan=plan, view=triton_view(plan, template))
    return Source(plan.name, _tidy(text), plan.backend)


def _tidy(text: str) -> str:
    """Strip trailing blanks; two blank lines between definitions, one before the comment that opens a paragraph."""
    text = re.sub(r"[ \t]+\n", "\n", text).strip() + "\n"
    text = re.sub(r"\n{2,}", "\n\n", text)
    text = re.sub(r"(?<=[^\n:])\n(    # )", r"\n\n\1", text)
    return re.sub(r"\n+(@triton\.jit)", r"\n\n\n\1", text)
