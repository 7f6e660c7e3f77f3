"""The shipped presets as values, which calls know without a build: the reference runs them on any device.

They are read from the JSON that integrations use as well, so that neither YAML nor the part that builds is needed. A
package that ships this runtime goes without this module.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from attngen import resources
from attngen.lang.check import restore_variant
from attngen.lang.variant import Variant


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted; none in an installation that lacks the shipped specs."""
    try:
        folder = resources.specs_dir() / "presets"
    except FileNotFoundError:
        return ()
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


@cache
def _table() -> dict[str, Any]:
    return json.loads(resources.variants_file().read_text("utf-8"))


@cache
def preset(name: str) -> Variant | None:
    """Return a preset by its name, always the same object; None if there is none of that name."""
    return restore_variant(_table()[name]) if name in preset_names() else None
