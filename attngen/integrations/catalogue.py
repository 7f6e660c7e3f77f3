"""The variants that integrations ask for, as values: those of ``specs/integrations/`` and the presets.

They are kept as JSON, as in a kernel's manifest, so that a call needs neither YAML nor the modules that build.
``attngen.tools.build.integration_variants`` writes the file. A value finds the kernels that compute exactly it, in
whichever package they were built, and no other kernel that happens to have the same name.

Every variant has a sibling with dropout, of the same fields, ``dropout: true`` and a name of its own, whether a shipped
spec builds it or not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from attngen import resources
from attngen.lang.check import restore_variant, with_dropout
from attngen.lang.variant import Variant

FILE = resources.variants_file()

#: Suffix of the name of a variant's sibling with dropout.
DROPOUT = "_dropout"


@cache
def _table() -> dict[str, Any]:
    return json.loads(FILE.read_text("utf-8"))


@cache
def variant(name: str) -> Variant:
    """Return a variant by its name; KeyError for one that no integration uses. Always the same object."""
    if name not in _table() and name.endswith(DROPOUT):
        return replace(with_dropout(variant(name.removesuffix(DROPOUT))), name=name)
    return restore_variant(_table()[name])


def is_shipped(name: str) -> bool:
    """Whether a shipped spec declares a variant."""
    return name in _table()
