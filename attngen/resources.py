"""Folders of specs and templates: the top level of a checkout, or inside an installed wheel.

A checkout is preferred, since an editable install may hold an outdated copy of them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def root() -> Path:
    """Return the folder that holds ``specs/``, ``tuned/`` and ``templates/``.

    Raises FileNotFoundError for an installation that lacks them.
    """
    checkout, installed = _PACKAGE.parent, _PACKAGE / "_data"
    for folder in (checkout, installed):
        # Both folders are checked: a stray "templates" in site-packages is not a checkout.
        if (folder / "specs" / "presets").is_dir() and (folder / "templates").is_dir():
            return folder
    raise FileNotFoundError(f"attngen's specs and templates are neither in {checkout} nor in {installed}")


def specs_dir() -> Path:
    """Return the folder of the shipped specs; its ``presets/`` holds one spec for each preset variant."""
    return root() / "specs"


def spec_file(path: Path) -> Path:
    """Return the path of a spec: this one, or where there is no such file and it is written as in a checkout, such as
    ``specs/hopper.yaml``, that of the shipped spec."""
    shipped = root() / path
    return shipped if path.parts[:1] == ("specs",) and not os.path.exists(path) and os.path.isfile(shipped) else path


def tuned_file(name: str | Path) -> Path:
    """Return a file of measured choices: the one of this path, or where there is none, the shipped one of this name,
    such as ``h200``."""
    path = Path(name)
    shipped = tuned_dir() / f"{path}.yaml"
    return shipped if not path.exists() and path.name == str(path) and shipped.is_file() else path


def tuned_dir() -> Path:
    """The folder of the shipped choices: a table for each schedule that has one, and files of ``attngen tune``."""
    return root() / "tuned"


def templates_dir() -> Path:
    """Return the folder of the kernel templates, one subfolder for each backend."""
    return root() / "templates"


def variants_file() -> Path:
    """Return the file of the shipped variants as JSON: the presets, and what integrations ask for."""
    return _PACKAGE / "integrations" / "variants.json"


def record_file() -> Path:
    """The file of recorded GPU test runs; a checkout or an installation may have none yet."""
    return root() / "tests" / "gpu" / "record.json"


def licence_file() -> Path:
    """Return the file of attngen's licence, which every copy of its runtime or generator includes."""
    return root() / "LICENSE"


def display_name(path: Path) -> str:
    """Name a file for headers and manifests: relative to the checkout if it lies in it, else its bare name.

    Never an absolute path, so that what is generated is the same on every machine.
    """
    resolved = path.resolve()
    return resolved.relative_to(root()).as_posix() if resolved.is_relative_to(root()) else path.name
