"""Every header of the CUDA kernels, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from attngen.resources import templates_dir


@cache
def headers() -> Mapping[str, str]:
    """The texts of all headers, those of every family too; a source has those alone that it includes."""
    return {path.name: path.read_text() for path in sorted((templates_dir() / "cuda").rglob("*.cuh"))}
