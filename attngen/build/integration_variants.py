"""Writing the variants that integrations name: ``python -m attngen.build.integration_variants``."""

from __future__ import annotations

import json
from typing import Any

from attngen.lang.variant import Variant
from attngen.resources import specs_dir, variants_file


def variants() -> dict[str, Variant]:
    """Return every preset and every variant of ``specs/integrations/`` by name."""
    from attngen.schema import load_spec, preset, preset_names

    by_name = {name: preset(name) for name in preset_names()}
    for path in sorted((specs_dir() / "integrations").glob("*.yaml")):
        for name, declared in load_spec(path).variants.items():
            assert by_name.setdefault(name, declared.variant) == declared.variant, f"{path}: another '{name}'"
    return by_name


def text() -> str:
    """The contents of the file of variants."""
    rows: dict[str, Any] = {name: variant.to_dict() for name, variant in sorted(variants().items())}
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    variants_file().write_text(text())
