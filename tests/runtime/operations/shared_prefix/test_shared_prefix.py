"""Prefixes of pages that sequences share: which one it is, against brute force, and attention that reads it once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from tests.runtime.pages import starts_of

PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8


def table_of(chains: list[list[int]]) -> Tensor:
    """A page table whose rows end with pages that do not exist."""
    width = max(map(len, chains))
    return torch.tensor([chain + [-7] * (width - len(chain)) for chain in chains], dtype=torch.int32)


def batch_of(seed: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Pages, keys and queries of some sequences, which come from a few trees of prefixes."""
    chance = random.Random(seed)
    pages = iter(range(10_000))
    trunks: list[list[int]] = [[]]
    for _ in range(4):
        trunks.append(chance.choice(trunks) + [next(pages) for _ in range(chance.randrange(1, 4))])
    chains, keys, queries = [], [], []
    for _ in range(chance.randrange(1, 9)):
        chain = chance.choice(trunks) + [next(pages) for _ in range(chance.randrange(1, 4))]
        chains.append(chain)
        keys.append(chance.choice([0, 1, PAGE * len(chain), chance.randrange(PAGE * len(chain) + 1)]))
        queries.append(chance.randrange(0, min(keys[-1], 3) + 1))
    return chains, keys, queries


def shared_pages(chains: list[list[int]], keys: list[int], queries: list[int]) -> tuple[int, list[bool]]:
    """Pages of the prefix, and which sequences have it, as the docstring says."""
    whole = [
        chain[: max(held - own, 0) // PAGE] if own else []
        for chain, held, own in zip(chains, keys, queries, strict=True)
    ]
    begun = [chain for chain in whole if chain]
    if not begun:
        return 0, [False] * len(chains)
    leader = max(begun, key=lambda chain: sum(other[0] == chain[0] for other in begun))  # the first of them

    def common(chain: list[int]) -> int:
        count = 0
        while count < min(len(chain), len(leader)) and chain[count] == leader[count]:
            count += 1
        return count

    lengths = [common(chain) for chain in whole]
    saved = {pages: pages * (sum(length >= pages for length in lengths) - 1) for pages in lengths}
    best = max(saved, key=lambda pages: saved[pages])
    pages = best if saved[best] > 0 else 0
    return pages, [pages > 0 and length >= pages for length in lengths]


@pytest.mark.parametrize("seed", range(60))
def test_the_prefix_is_that_of_brute_force(seed: int) -> None:
    chains, keys, queries = batch_of(seed)
    table, used, starts = table_of(chains), torch.tensor(keys, dtype=torch.int32), starts_of(queries)
    prefix = attngen.shared_prefix(
        table, used, PAGE, cu_seqlens_q=starts, max_seqlen_q=max(queries), total_q=sum(queries)
    )
    pages, members = shared_pages(chains, keys, queries)
    assert prefix.length.tolist() == [pages * PAGE]
    assert prefix.outside.tolist() == [not has for has, own in zip(members, queries, strict=True) for _ in range(own)]
    own_pages = prefix.own_page_table, prefix.own_lengths
    for has, chain, held, row, left in zip(members, chains, keys, *own_pages, strict=True):
        skipped = pages if has else 0
        assert left == held - skipped * PAGE
        assert row[: len(chain) - skipped].tolist() == chain[skipped:]
    if pages:
        assert prefix.page_table[0, :pages].tolist() == chains[members.index(True)][:pages]


def caches(count: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(count, PAGE, KV_HEADS, DIM, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("variant", ["causal", "causal_sink"])
def test_packed_queries(variant: str, seed: int) -> None:
    chains, keys, queries = batch_of(seed)
    torch.manual_seed(seed)
    table, used, starts = table_of(chains), torch.tensor(keys, dtype=torch.int32), starts_of(queries)
    pages = caches(1 + max(map(max, chains)))
    q = torch.randn(sum(queries), HEADS, DIM, dtype=torch.float64)
    given: dict[str, Any] = {"variant": variant, "return_lse": True}
    if variant == "causal_sink":
        given["sinks"] = torch.randn(HEADS)
    shape = {"cu_seqlens_q": starts, "max_seqlen_q": max(queries)}
    prefix = attngen.shared_prefix(table, used, PAGE, total_q=len(q), **shape)
    out, lse = attngen.attention_paged(q, *pages, table, used, **shape, **given)
    mine, mine_lse = prefix.attention(q, *pages, **given)
    torch.testing.assert_close(mine, out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine_lse, lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("variant", ["causal", "full"])
def test_as_many_queries_in_each_sequence(variant: str, seqlen_q: int) -> None:
    """And the tensors of one prefix take the values of another one."""
    torch.manual_seed(2)
    trunk = list(range(5))
    chains = [[*trunk, 5, 6], [*trunk, 7], [8, 9], [*trunk[:3], 10, 11, 12]]
    others = [[13, 14, 15, 16, 17, 18, 19], [13, 14, 1], [13, 14, 2, 3], [20]]
    pages, q = caches(21), torch.randn(4, seqlen_q, HEADS, DIM, dtype=torch.float64)
    held = None
    for rows, keys in ((chains, [27, 23, 7, 24]), (others, [28, 10, 13, 3])):
        table = torch.full((4, 7), -1, dtype=torch.int32)
        for row, chain in zip(table, rows, strict=True):
            row[: len(chain)] = torch.tensor(chain, dtype=torch.int32)
        used = torch.tensor(keys, dtype=torch.int32)
        prefix = attngen.shared_prefix(table, used, PAGE, seqlen_q=seqlen_q)
        if held is None:
            held = prefix
        held.update(prefix)
        assert held.length.tolist() == [PAGE * shared_pages(rows, keys, [seqlen_q] * 4)[0]]
        assert held.length > 0
        plain = attngen.attention_paged(q, *pages, table, used, variant=variant)
        torch.testing.assert_close(held.attention(q, *pages, variant=variant), plain, rtol=1e-9, atol=1e-9)


def test_what_is_refused() -> None:
    table, used = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([9, 9], dtype=torch.int32)
    prefix = attngen.shared_prefix(table, used, PAGE)
    q, pages = torch.randn(2, 1, HEADS, DIM), (torch.randn(1, PAGE, KV_HEADS, DIM),) * 2
    for variant, more, message in (
        ("sliding_window", {"window": 4}, "sliding_window: its mask may hide keys of a shared prefix; allowed: full"),
        ("alibi", {}, "alibi: a shared prefix does not serve 'score'"),
    ):
        with pytest.raises(CallError, match=message):
            prefix.attention(q, *pages, variant=variant, **more)
    with pytest.raises(CallError, match="q must have 4 dimensions, as the prefix was found for, got 3"):
        prefix.attention(q[0], *pages)
    for given, more, message in (
        ((table[0], used, PAGE), {}, "page_table must have 2 dimensions"),
        ((table, used[:1], PAGE), {}, r"seqused_k must have shape \(2,\)"),
        ((table[:0], used[:0], PAGE), {}, "must have sequences and pages"),
        ((table, used, 0), {}, "page_size must be at least 1, got 0"),
        ((table, used, PAGE), {"cu_seqlens_q": used}, r"cu_seqlens_q must have shape \(3,\)"),
        ((table, used, PAGE), {"cu_seqlens_q": starts_of([1, 1])}, "max_seqlen_q and total_q are needed"),
    ):
        with pytest.raises(CallError, match=message):
            attngen.shared_prefix(*given, **more)
