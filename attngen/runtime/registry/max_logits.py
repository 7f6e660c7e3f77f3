"""Variants whose results have the largest logits, by the names of those without."""

from __future__ import annotations

from attngen.lang.variant import Variant
from attngen.runtime.cache import PREPARED_CALLS, RecentCache
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import registry

#: Names by which calls find a variant with its largest logits, by what they name, and what that keeps alive.
_NAMES: RecentCache[tuple[str, str | Variant]] = RecentCache(PREPARED_CALLS)


def with_max_logits(variant: str | Variant, package: str | None) -> str:
    """Name of the variant of a call that wants the largest logits, too. Raises CallError."""
    key = variant if isinstance(variant, str) else id(variant), package, registry.generation
    try:
        known = _NAMES[key]
    except TypeError:  # no variant
        known = None
    if known is None:
        known = registry.declare(find(variant, package).variant.with_max_logits()), variant
        _NAMES.put(key, known)
    return known[0]
