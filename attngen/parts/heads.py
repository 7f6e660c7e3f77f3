"""Heads of a group that share what a mask decides."""

from __future__ import annotations

from attngen.lang.ir import names
from attngen.lang.variant import Variant


def by_head(variant: Variant) -> bool:
    """Whether the queries that see a tile of keys differ from head to head."""
    return "h" in names(variant.mask)
