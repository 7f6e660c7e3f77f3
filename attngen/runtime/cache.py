"""A small bounded cache whose reads cost what a dictionary's do."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")

#: Forward calls that are kept prepared, and as many backward calls; each takes a few kilobytes of host memory.
PREPARED_CALLS = 2048


class RecentCache(dict[Hashable, Value | None]):
    """At most ``limit`` entries, among them the ``limit`` / 2 that were used last; ``cache[key]`` is None if absent.

    Entries live in two halves, of which the dictionary itself is the young one. What is used moves there; when it is
    full, its entries become the old half, whose own, which nothing has used meanwhile, are dropped. So a read of what
    is used often is one look-up, and orders nothing. Safe between threads: each step is one atomic dictionary call, and
    an entry that a race drops is made again.
    """

    __slots__ = ("_half", "_old")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._old: dict[Hashable, Value | None] = {}
        self._half = max(limit // 2, 1)

    def __missing__(self, key: Hashable) -> Value | None:
        entry = self._old.get(key)
        if entry is not None:
            self.put(key, entry)
        return entry

    def get(self, key: Hashable, default: Any = None) -> Any:
        """Return the entry of a key, or ``default``."""
        entry = self[key]
        return default if entry is None else entry

    def put(self, key: Hashable, value: Value) -> None:
        """Store an entry; the old half is dropped where the young one is full."""
        if super().__len__() >= self._half:
            self._old = self.copy()
            super().clear()
        self[key] = value

    def clear(self) -> None:
        """Forget everything."""
        self._old = {}
        super().clear()

    def __len__(self) -> int:
        return len(self.keys() | self._old.keys())
