"""The variants that ranks call, as values that ``attngen.attention`` takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attngen.errors import SpecError
from attngen.lang.variant import Variant
from attngen.variants import PythonVariant, checked, python_variant


@lru_cache(maxsize=256)
def called(variant: Variant) -> PythonVariant:
    """Make a variant for calls from one that was made from another: it goes through the checks of every variant."""
    try:
        from attngen.schema.writing import declaration
    except ModuleNotFoundError as error:
        raise SpecError(
            f"attngen.parallel needs {error.name}, which is not installed: pip install 'attngen[build]'"
        ) from None
    fields: dict[str, Any] = declaration(variant)
    for scalar in variant.scalars:
        if scalar.grad:
            fields["scalars"][scalar.name]["grad"] = True
    return python_variant(checked(variant.name, fields), fields)
