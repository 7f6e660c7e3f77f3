"""A rendered kernel: one source file, its name and the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name

from attngen import resources
from attngen.plan.catalogue import named
from attngen.plan.model import Plan
from attngen.render.environment import environment

_SUFFIXES = {"triton": "py", "cuda": "cu"}


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one kernel; ``name`` is its file stem and the name of the function that it defines."""

    name: str
    text: str
    backend: str
    headers: Mapping[str, str] = field(default_factory=dict)  # text of each included file by its name

    def __repr__(self) -> str:
        return f"Source({self.file_name}: {self.text.count(chr(10))} lines, {len(self.headers)} headers)"

    @property
    def file_name(self) -> str:
        """The name of the file that holds the text."""
        return f"{self.name}.{_SUFFIXES[self.backend]}"


def render(plan: Plan) -> Source:
    """Return the source of a plan. The same plan gives the same bytes: no time, no path of this machine."""
    schedule = named(plan.schedule)
    view = resolve_name(schedule.view)(plan, schedule.template)
    text = (
        environment(plan.backend, schedule.templates)
        .get_template(schedule.template)
        .render(plan=plan, structure=plan.structure, view=view)
    )
    if plan.backend == "triton":
        return Source(plan.name, _tidy(text), plan.backend)
    return Source(plan.name, _tidy_cuda(text), plan.backend, headers())


@cache
def headers() -> Mapping[str, str]:
    """The text of every header that CUDA sources include, by its name: those of a family alone lie in its folder."""
    paths = (resources.templates_dir() / "cuda").rglob("*.cuh")
    return {path.name: path.read_text("utf-8") for path in sorted(paths, key=lambda path: path.name)}


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
