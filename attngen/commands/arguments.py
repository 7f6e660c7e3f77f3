"""The argument SPEC of commands: the path of a spec, where a shipped one needs no checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attngen import resources


class _SpecPath(click.Path):
    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        return resources.spec_file(Path(value))  # click's own looks for the file, whose name may have no bytes here


#: A path; ``specs/hopper.yaml`` also where there is no such file, as the shipped spec.
SPEC = _SpecPath(path_type=Path)
