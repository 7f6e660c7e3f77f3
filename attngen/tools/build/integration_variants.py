"""Writing the variants that integrations name: ``python -m attngen.tools.build.integration_variants``."""

from __future__ import annotations

import json
from typing import Any

from attngen.integrations.catalogue import FILE
from attngen.lang.variant import Variant
from attngen.resources import specs_dir


def variants() -> dict[str, Variant]:
    """Return every preset and every variant of ``specs/integrations/`` by name."""
    from attngen.schema import load_spec, preset, preset_names

    found = {name: preset(name) for name in preset_names()}
    for path in sorted((specs_dir() / "integrations").glob("*.yaml")):
        for name, declared in load_spec(path).variants.items():
            assert found.setdefault(name, declared.variant) == declared.variant, f"{path}: another '{name}'"
    return found


def text() -> str:
    """Return what the file of variants holds."""
    rows: dict[str, Any] = {name: variant.to_dict() for name, variant in sorted(variants().items())}
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
