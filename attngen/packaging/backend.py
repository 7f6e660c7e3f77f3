"""The build backend of the source distributions that ``attngen package`` makes: hatchling, with attngen's hook.

Such a distribution finds this module in its own copy of attngen, whatever attngen is installed. What else it needs is
in its pyproject.toml, so that there are no further requirements to return.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngen.packaging.make import build_target

__all__ = ["build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable"]

_Settings = Mapping[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None) -> str:
    """Compile the kernels of the project in the current folder; return the name of the wheel."""
    return build_target("wheel", Path.cwd(), Path(wheel_directory)).name


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Pack the project in the current folder again; return the name of the archive."""
    return build_target("sdist", Path.cwd(), Path(sdist_directory)).name


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """Requirements of hatchling for an editable installation, beyond those for a wheel."""
    return ["editables"]


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Compile the kernels of the project in the current folder for an editable installation of it."""
    return build_target("wheel", Path.cwd(), Path(wheel_directory), version="editable").name
