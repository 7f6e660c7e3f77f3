"""A rendered kernel: one source file, its name and the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name

from attngen.plan.catalogue import named
from attngen.plan.model import Plan
from attngen.render.environment import environment
from attngen.render.includes import header_folders, included

_SUFFIXES = {"triton": "py", "cuda": "cu"}


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one kernel; ``name`` is its file stem and the name of the function that it defines."""

    name: str
    text: str
    backend: str
    headers: Mapping[str, str] = field(default_factory=dict)  # text of each header that it includes, by name

    def __repr__(self) -> str:
        return f"Source({self.file_name}: {self.text.count(chr(10))} lines, {len(self.headers)} headers)"

    @property
    def file_name(self) -> str:
        """The name of the file that holds the text."""
        return f"{self.name}.{_SUFFIXES[self.backend]}"


def render(plan: Plan) -> Source:
    """Return the source of a plan. The same plan gives the same bytes: no time, no path of this machine.

    Raises CompileError for a CUDA source whose headers are not found (``attngen.render.includes``).
    """
    schedule = named(plan.schedule)
    view = resolve_name(schedule.view)(plan, schedule.template)
    text = (
        environment(plan.backend, schedule.templates)
        .get_template(schedule.template)
        .render(plan=plan, structure=plan.structure, view=view)
    )
    if plan.backend == "triton":
        return Source(plan.name, _tidy(text), plan.backend)
    text = _tidy_cuda(text)
    folders = header_folders(schedule.template, schedule.templates)
    return Source(plan.name, text, plan.backend, included(plan.name, text, folders))


def _tidy_cuda(text: str) -> str:
    """Strip trailing blanks and repeated blank lines; none after an opening brace."""
    text = re.sub(r"[ \t]+\n", "\n", text).strip() + "\n"
    text = re.sub(r"^ +#pragma", "#pragma", text, flags=re.MULTILINE)
    text = re.sub(r"\n{2,}", "\n\n", text)
    return re.sub(r"\n+(\n *})", r"\1", re.sub(r"\{\n\n", "{\n", text))


def _tidy(text: str) -> str:
    """Strip trailing blanks; two blank lines between definitions, one before the comment that opens a paragraph."""
    text = re.sub(r"[ \t]+\n", "\n", text).strip() + "\n"
    text = re.sub(r"\n{2,}", "\n\n", text)
    text = re.sub(r"(?<=[^\n:])\n(    # )", r"\n\n\1", text)
    return re.sub(r"\n+(@triton\.jit)", r"\n\n\n\1", text)
