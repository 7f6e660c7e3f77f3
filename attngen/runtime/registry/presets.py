"""The shipped variants as values: presets, which calls know without a build, and those that integrations ask for.

They are kept as JSON, as in a kernel's manifest, so that a call needs neither YAML nor the modules that build.
``attngen.build.integration_variants`` writes the file. A value finds the kernels that compute exactly it, in
whichever package they were built, and no other kernel that happens to have the same name.

Every variant has a sibling with dropout, of the same fields, ``dropout: true`` and a name of its own, whether a shipped
spec builds it or not. A package that ships this runtime goes without this module.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from attngen import resources
from attngen.lang.check import restore_variant, with_dropout
from attngen.lang.variant import Variant

#: Suffix of the name of a variant's sibling with dropout.
DROPOUT = "_dropout"


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


def is_shipped(name: str) -> bool:
    """Whether a shipped spec declares a variant."""
    return name in _table()


@cache
def variant(name: str) -> Variant:
    """A shipped variant by its name, always the same object; KeyError for a name that there is not."""
    if name not in _table() and name.endswith(DROPOUT):
        return replace(with_dropout(variant(name.removesuffix(DROPOUT))), name=name)
    return restore_variant(_table()[name])


def preset(name: str) -> Variant | None:
    """Return a preset by its name, always the same object; None if there is none of that name."""
    return variant(name) if name in preset_names() else None
