"""A small bounded cache whose reads cost little more than a dictionary's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The ``limit`` entries that were used last. Safe between threads: each step is one atomic dictionary call."""

    __slots__ = ("_entries", "_limit")

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[Hashable, Value] = OrderedDict()
        self._limit = limit

    def get(self, key: Hashable) -> Value | None:
        """Return the entry of a key and mark it as used, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            try:
                self._entries.move_to_end(key)
            except KeyError:  # another thread has just evicted it
                return entry
        return entry

    def put(self, key: Hashable, value: Value) -> None:
        """Store an entry, and drop the one that was not used for longest if there are too many."""
        self._entries[key] = value
        while len(self._entries) > self._limit:
            try:
                self._entries.popitem(last=False)
            except KeyError:
                return

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
