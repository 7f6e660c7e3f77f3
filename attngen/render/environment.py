"""One Jinja environment per target language; the delimiters collide neither with Python nor with PTX."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension

from attngen import resources

_LINE_STATEMENTS = {"triton": "#%", "cuda": "//%", "package": "#%"}


class PartLines(Extension):
    """Lines that are replaced by a part, at the indentation of the line: ``//% include FILE``, and ``//% put MACRO``,
    which leaves nothing where the macro is empty."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["margin"] = _margin
        prefix = re.escape(environment.line_statement_prefix or "")
        self._line = re.compile(rf"^( *){prefix} (include|put) (.+)$", re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Write such lines in Jinja's own statements, each in one line."""

        def written(line: re.Match[str]) -> str:
            margin, kind, part = line.groups()
            text = f"<% include {part} %>" if kind == "include" else f"${{ {part} }}"
            return f"<% filter margin({len(margin)}) %>{text}<% endfilter %>"

        return self._line.sub(written, source)


def _margin(text: str, width: int) -> str:
    """Indent the lines that are not blank, and end the last one."""
    text += "\n" if text and not text.endswith("\n") else ""
    return "".join(" " * width + line if line.strip() else line for line in text.splitlines(keepends=True))


@cache
def environment(backend: str, templates: Path | None = None) -> Environment:
    """Return the environment of a backend, or of the files of a ``package``; ``templates`` are looked into first.

    An undefined name in a template is an error, never an empty string.
    """
    return Environment(
        loader=FileSystemLoader([*([templates] if templates else []), resources.templates_dir()]),
        undefined=StrictUndefined,
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        line_statement_prefix=_LINE_STATEMENTS[backend],
        extensions=[PartLines],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
