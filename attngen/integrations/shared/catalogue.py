"""The variants that integrations ask for, by name: those of ``specs/integrations/`` and the presets."""

from __future__ import annotations

from functools import cache

from attngen import resources
from attngen.lang.variant import Variant
from attngen.runtime.registry import presets
from attngen.runtime.registry.presets import DROPOUT, is_shipped

__all__ = ["DROPOUT", "FILE", "SERVES", "is_shipped", "variant"]

FILE = resources.variants_file()

#: Features of variants by which drop-ins compute what libraries define.
SERVES = ("mask", "score", "sink", "dropout", "keys", "sink_in_lse")


@cache
def variant(name: str) -> Variant:
    """A shipped variant. Raises CallError for one with a feature that drop-ins do not serve."""
    shipped = presets.variant(name)
    shipped.require(SERVES, "a drop-in")
    return shipped
