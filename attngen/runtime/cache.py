"""A small bounded cache whose reads cost little more than a dictionary's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class RecentCache(Generic[Value]):
    """At most ``limit`` entries, among them the ``limit`` / 2 that were used last.

    Entries live in two halves. What is used moves to the young one; when that is full it becomes the old one, whose
    entries, which nothing has used meanwhile, are dropped. So a read of what is used often is one look-up, and orders
    nothing. Safe between threads: each step is one atomic dictionary call, and an entry that a race drops is made anew.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}
        self._half = max(limit // 2, 1)

    def get(self, key: Hashable) -> Value | None:
        """Return the entry of a key, or None."""
        entry = self._young.get(key)
        if entry is None:
            entry = self._old.get(key)
            if entry is not None:
                self.put(key, entry)
        return entry

    def put(self, key: Hashable, value: Value) -> None:
        """Store an entry; the old half is dropped where the young one is full."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
