"""Memory of an emulated thread, in words: what it wrote, and elsewhere a function of the address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngen.compile.emulate.values import UNKNOWN, bits_of, word_of


class Memory:
    """Words by their address. ``initial`` gives those that were never written."""

    def __init__(self, initial: Callable[[int], Any]) -> None:
        self._initial = initial
        self._words: dict[int, Any] = {}
        self._lost = False  # something was written to an unknown address

    def load(self, address: int, size: int) -> list[Any]:
        """Return the words of ``size`` bytes from an address that is a multiple of the size of an element."""
        if self._lost:
            return [UNKNOWN] * max(1, size // 4)
        if size >= 4:
            return [self._word(address + 4 * i) for i in range(size // 4)]
        value, unknown = bits_of(self._word(address & ~3))
        shift, mask = 8 * (address & 3), (1 << 8 * size) - 1
        return [UNKNOWN if unknown >> shift & mask else value >> shift & mask]

    def store(self, address: Any, size: int, words: list[Any]) -> None:
        """Write ``size`` bytes; words may be unknown. With an unknown address, nothing is known any more."""
        if address is UNKNOWN:
            self._lost = True
        elif size >= 4:
            for i, word in enumerate(words):
                self._words[address + 4 * i] = word
        else:
            (old, lost), (new, unknown) = bits_of(self._word(address & ~3)), bits_of(words[0])
            shift, mask = 8 * (address & 3), (1 << 8 * size) - 1
            place = mask << shift
            self._words[address & ~3] = word_of(
                old & ~place | (new & mask) << shift, lost & ~place | (unknown & mask) << shift
            )

    def _word(self, address: int) -> Any:
        word = self._words.get(address)
        return self._initial(address) if word is None else word
