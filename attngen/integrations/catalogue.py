"""The variants that integrations ask for, as values: those of ``specs/integrations/`` and the presets.

They are kept as JSON, as in a kernel's manifest, so that a call needs neither YAML nor the part that builds.
``attngen.tools.integration_variants`` writes the file. A value finds the kernels that compute exactly it, in whichever
package they were built, and no other kernel that happens to have the same name.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from attngen.lang.variant import Variant

FILE = Path(__file__).with_name("variants.json")


@cache
def _table() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@cache
def variant(name: str) -> Variant:
    """Return a variant by its name; KeyError for one that no integration uses. Always the same object."""
    return Variant.from_dict(_table()[name])
