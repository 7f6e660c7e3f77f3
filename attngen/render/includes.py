"""The headers of a CUDA source: those that it includes, and those that these include."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePath

from attngen import resources
from attngen.errors import CompileError, suggest

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def header_folders(template: str, templates: Path | None = None) -> tuple[Path, ...]:
    """The folders of a kernel's headers, in the order in which they count: its template's and those above it, up to its
    family's, then that of all kernels. ``templates`` holds the template of a schedule from outside of attngen."""
    above = PurePath(template).parents
    outside = () if templates is None else tuple(templates / part for part in above)
    shipped = resources.templates_dir()
    family = (shipped / part for part in above[:-2])  # without templates/cuda and templates
    return *outside, *family, shipped / "cuda" / "include"


def included(name: str, text: str, folders: tuple[Path, ...]) -> Mapping[str, str]:
    """The text of each header that a source includes, directly or by another header, by the header's name.

    ``name`` is the source's, for errors. The first of the ``folders`` that has a header counts. Raises CompileError for
    a header that none of them has, and for headers that include each other in a circle.
    """
    texts: dict[str, str] = {}
    _add(texts, (name,), text, folders)
    return dict(sorted(texts.items()))


def _add(texts: dict[str, str], path: tuple[str, ...], text: str, folders: tuple[Path, ...]) -> None:
    """Add the headers of a file to ``texts``; ``path`` leads to it, from the source on."""
    for header in _INCLUDE.findall(text):
        if header in path:
            circle = " -> ".join((*path[path.index(header) :], header))
            raise CompileError(f"{path[0]}: headers include each other in a circle: {circle}")
        if header in texts:
            continue
        inner = _text(header, folders)
        if inner is None:
            raise _missing(header, path, folders)
        texts[header] = inner
        _add(texts, (*path, header), inner, folders)


@cache
def _text(header: str, folders: tuple[Path, ...]) -> str | None:
    for folder in folders:
        if (folder / header).is_file():
            return (folder / header).read_text("utf-8")
    return None


def _missing(header: str, path: tuple[str, ...], folders: tuple[Path, ...]) -> CompileError:
    by = "the source" if len(path) == 1 else path[-1]
    searched = ", ".join(resources.display_name(folder) for folder in folders)
    near = suggest(header, sorted(file.name for folder in folders for file in folder.glob("*.cuh")))
    return CompileError(f'{path[0]}: {by} includes "{header}", which is in none of {searched}{near}')
