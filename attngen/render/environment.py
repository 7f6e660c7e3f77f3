"""One Jinja environment per target language; the delimiters collide neither with Python nor with PTX."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attngen import resources

_LINE_STATEMENTS = {"triton": "#%", "cuda": "//%", "package": "#%"}


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
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
