"""The shapes that a kernel is verified on: lengths around its tile, more queries than keys, none, one, and many."""

from __future__ import annotations

from dataclasses import dataclass

#: Tiles in one word of a kernel's list of tiles; cases with a few more need a second word.
_WORD_TILES = 32


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one call. ``q_lengths`` and ``k_lengths`` have an entry for each sequence, equal ones in a dense call.

    ``used`` is seqused_k, or None. ``page_size`` is that of a call over pages, where queries of equal lengths come
    without offsets; 0 in other calls. ``values`` says what the variant's scalars and integer tensors hold: random
    values, or the least or greatest that is declared.
    """

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    used: tuple[int, ...] | None = None
    values: str = "random"  # random | least | most
    page_size: int = 0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.q_lengths)

    @property
    def seqlen_q(self) -> int:
        """The longest query sequence; every one in a dense call."""
        return max(self.q_lengths)

    @property
    def seqlen_k(self) -> int:
        """The longest key sequence."""
        return max(self.k_lengths)

    @property
    def max_pages(self) -> int:
        """Entries of a row of the page table: more than the longest sequence needs."""
        return -(-self.seqlen_k // self.page_size) + 2


def dense_cases(tile_m: int, tile_n: int, *, small: bool = False) -> tuple[Case, ...]:
    """Return the cases of a dense kernel; ``small`` ones suit an interpreter."""
    m, n = tile_m, tile_n
    cases = [
        Case("ragged", (m + 7,) * 2, (2 * n + 5,) * 2, values="random"),
        Case("more queries than keys", (m + 9,), (n // 2 + 1,), heads=1),
        Case("seqused_k", (m - 1,) * 3, (3 * n + 1,) * 3, used=(2 * n + 3, 0, n)),
        Case("least values", (m,), (2 * n,), heads=1, values="least"),
        Case("greatest values", (m + 3,), (2 * n + 1,), heads=1, values="most"),
        Case("one query", (1,), (3 * n + 5,), heads=4, kv_heads=2),
    ]
    if small:
        return tuple(cases)
    return (
        *cases,
        Case("decoding", (1,) * 3, (9 * n,) * 3, heads=8, kv_heads=2, used=(9 * n, 1, 4 * n + 7)),
        Case("one key", (m + 1,), (1,), heads=2),
        Case("square", (5 * m,) * 2, (5 * m,) * 2, heads=6, kv_heads=3),
        Case("long rows", (2 * m + 31,), ((_WORD_TILES + 3) * n + 17,), heads=2, kv_heads=2),
        Case("long", (1000,), (1511,), heads=4, kv_heads=1),
    )


def varlen_cases(tile_m: int, tile_n: int, *, small: bool = False) -> tuple[Case, ...]:
    """Return the cases of a kernel for packed sequences."""
    m, n = tile_m, tile_n
    cases = [
        Case("packed", (m + 3, 1, m), (2 * n + 1, n, 5)),
        Case("empty sequences", (0, m + 1, 3), (7, n + 2, 0), heads=1),
        Case("seqused_k", (m, 7, 2), (2 * n + 3, n + 1, 3), used=(n + 5, 0, 3)),
        Case("least values", (m, 2), (n + 1, 2 * n), values="least"),
        Case("greatest values", (3, m + 3), (2 * n, n - 1), values="most"),
    ]
    if small:
        return tuple(cases)
    return (
        *cases,
        Case("one query each", (1,) * 5, (3 * n, 1, n + 1, 7 * n + 3, 2), heads=8, kv_heads=2),
        Case("long", (1000, 13, 300), (1511, 700, 299), heads=4, kv_heads=1),
        Case("long rows", (2 * m + 31, 5), ((_WORD_TILES + 3) * n + 17, 40), heads=2, kv_heads=2),
    )


def paged_cases(tile_m: int, tile_n: int, *, small: bool = False) -> tuple[Case, ...]:
    """Return the cases of a kernel for keys in pages of all kinds of sizes, shorter and longer than a tile."""
    m, n = tile_m, tile_n
    cases = [
        Case("prompts and single tokens", (m + 3, 1, m), (2 * n + 1, n, 5), page_size=16),
        Case("empty sequences", (0, m + 1, 3), (7, n + 2, 0), heads=1, page_size=1),
        Case("queries of equal lengths", (3,) * 4, (2 * n + 3, 0, n, 1), heads=4, page_size=2 * n),
        Case("least values", (m, 2), (n + 1, 2 * n), values="least", page_size=32),
        Case("greatest values", (3, m + 3), (2 * n, n - 1), values="most", page_size=48),
    ]
    if small:
        return tuple(cases)
    return (
        *cases,
        Case("one token each", (1,) * 5, (3 * n, 1, n + 1, 7 * n + 3, 2), heads=8, kv_heads=2, page_size=16),
        Case("one token, many keys", (1,), ((_WORD_TILES + 3) * n + 17,), heads=16, kv_heads=1, page_size=64),
        Case("a whole page", (5, 64), (256, 512), heads=4, kv_heads=4, page_size=256),
        Case("long", (1000, 13, 300), (1511, 700, 299), heads=4, kv_heads=1, page_size=128),
        Case("long rows", (2 * m + 31, 5), ((_WORD_TILES + 3) * n + 17, 40), heads=2, kv_heads=2, page_size=80),
    )


_CASES = {"dense": dense_cases, "varlen": varlen_cases, "paged": paged_cases}


def cases_of(layout: str, tile_m: int, tile_n: int, *, small: bool = False) -> tuple[Case, ...]:
    """Return the cases of a kernel by its layout."""
    return _CASES[layout](tile_m, tile_n, small=small)
