"""Prefixes of pages that sequences share: which one it is, against brute force, and attention that reads it once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.errors import CallError
from attngen.lang.variant import Tensor as Declared
from tests.runtime.pages import starts_of
from tests.runtime.support import variant

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


def best_saving(whole: list[list[int]]) -> int:
    """Pages that the best prefix of some sequences saves."""
    beginnings = {tuple(chain[:pages]) for chain in whole for pages in range(1, len(chain) + 1)}
    return max((len(each) * (sum(has(chain, each) for chain in whole) - 1) for each in beginnings), default=0)


def has(chain: list[int], beginning: Sequence[int]) -> bool:
    return tuple(chain[: len(beginning)]) == tuple(beginning)


@pytest.mark.parametrize("prefixes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(15))
def test_prefixes_save_half_of_what_the_best_would(seed: int, prefixes: int) -> None:
    """And sequences have what they had: the pages of their prefix, if they have one, and their own."""
    chains, keys, queries = batch_of(seed)
    table, used, starts = table_of(chains), torch.tensor(keys, dtype=torch.int32), starts_of(queries)
    shape = {"max_seqlen_q": max(queries), "total_q": sum(queries) + 2}  # two rows of padding
    prefix = attngen.shared_prefix(table, used, PAGE, prefixes=prefixes, cu_seqlens_q=starts, **shape)
    whole = [
        chain[: max(held - own, 0) // PAGE] if own else []
        for chain, held, own in zip(chains, keys, queries, strict=True)
    ]
    order = list(range(len(chains))) if prefix.sequences is None else prefix.sequences.tolist()
    own = dict(zip(order, zip(prefix.own_lengths.tolist(), prefix.own_page_table.tolist(), strict=True), strict=True))
    skipped = {b: (keys[b] - left) // PAGE for b, (left, _) in own.items()}
    for b, (left, row) in own.items():
        assert left == keys[b] - PAGE * skipped[b]
        assert row[: len(chains[b]) - skipped[b]] == chains[b][skipped[b] :]
    left_over, members = set(order), []
    for number, length in enumerate(prefix.length.tolist()):
        pages = prefix.page_table[number, : length // PAGE].tolist()
        most = best_saving([whole[b] for b in left_over])
        with_it = {b for b in left_over if pages and has(whole[b], pages)}
        assert len(pages) * max(len(with_it) - 1, 0) >= most / 2
        assert all(skipped[b] == len(pages) for b in with_it)
        left_over -= with_it
        members.append(sorted(with_it))
    assert all(skipped[b] == 0 for b in left_over)
    rows = [row for b in order for row in range(int(starts[b]), int(starts[b + 1]))]
    if prefix.sequences is None:
        assert prefix.outside is not None
        assert prefix.outside.tolist()[: len(rows)] == [b in left_over for b in order for _ in range(queries[b])]
        assert prefix.starts.tolist() == [0, len(rows) + 2]
    else:
        assert prefix.rows is not None
        assert prefix.rows.tolist() == [*rows, len(rows), len(rows) + 1]
        ends = [sum(queries[b] for of_it in members[:count] for b in of_it) for count in range(prefixes + 1)]
        assert prefix.starts.tolist() == [*ends, len(rows) + 2]
        assert (prefix.lengths[-1], prefix.outside) == (0, None)


def caches(count: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(count, PAGE, KV_HEADS, DIM, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("prefixes", [1, 3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["causal", "causal_sink", "softcap"])
def test_packed_queries(name: str, seed: int, prefixes: int) -> None:
    chains, keys, queries = batch_of(seed)
    torch.manual_seed(seed)
    table, used, starts = table_of(chains), torch.tensor(keys, dtype=torch.int32), starts_of(queries)
    pages = caches(1 + max(map(max, chains)))
    q = torch.randn(sum(queries), HEADS, DIM, dtype=torch.float64)
    given: dict[str, Any] = {"variant": name, "return_lse": True}
    if name == "causal_sink":
        given["sinks"] = torch.randn(HEADS)
    if name == "softcap":
        given["cap"] = 2.0
    shape = {"cu_seqlens_q": starts, "max_seqlen_q": max(queries)}
    prefix = attngen.shared_prefix(table, used, PAGE, prefixes=prefixes, total_q=len(q), **shape)
    out, lse = attngen.attention_paged(q, *pages, table, used, **shape, **given)
    mine, mine_lse = prefix.attention(q, *pages, **given)
    torch.testing.assert_close(mine, out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine_lse, lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefixes", [1, 2])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_as_many_queries_in_each_sequence(name: str, seqlen_q: int, prefixes: int) -> None:
    """And the tensors of one prefix take the values of another one."""
    torch.manual_seed(2)
    trunk = list(range(5))
    chains = [[*trunk, 5, 6], [*trunk, 7], [8, 9], [*trunk[:3], 10, 11, 12]]
    others = [[13, 14, 15, 16, 17, 18, 19], [13, 14, 1], [13, 14, 2, 3], [20]]
    pages, q = caches(21), torch.randn(4, seqlen_q, HEADS, DIM, dtype=torch.float64)
    held = None
    for rows, keys, pages_of in ((chains, [27, 23, 7, 24], 3), (others, [28, 12, 13, 3], 2)):
        table = torch.full((4, 7), -1, dtype=torch.int32)
        for row, chain in zip(table, rows, strict=True):
            row[: len(chain)] = torch.tensor(chain, dtype=torch.int32)
        used = torch.tensor(keys, dtype=torch.int32)
        prefix = attngen.shared_prefix(table, used, PAGE, prefixes=prefixes, seqlen_q=seqlen_q)
        if held is None:
            held = prefix
        held.update(prefix)
        assert held.length.tolist() == [PAGE * pages_of, 0][:prefixes]
        plain = attngen.attention_paged(q, *pages, table, used, variant=name, return_lse=True)
        out = torch.empty_like(q)
        mine = held.attention(q, *pages, variant=name, return_lse=True, out=out)
        assert mine[0].data_ptr() == out.data_ptr()
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefixes", [1, 2])
@pytest.mark.parametrize("of", ["tensor", "sequence", "page"])
def test_caches_in_8_bits(of: str, prefixes: int) -> None:
    """Sequences that share a prefix have one scale; scales of pages are those of a prefix's pages, too."""
    torch.manual_seed(4)
    chains = [[0, 1, 2, 3], [4, 5, 6], [0, 1, 7], [4, 5, 8, 9], [10]]
    table, used = table_of(chains), torch.tensor([15, 12, 9, 14, 3], dtype=torch.int32)
    pages = tuple(one.float().to(torch.float8_e4m3fn) for one in caches(11))
    shape = {"tensor": (), "sequence": (5, KV_HEADS), "page": (11, KV_HEADS)}[of]
    scales = {name: 0.1 + torch.rand(shape) for name in ("k_descale", "v_descale")}
    if of == "sequence":
        for scale in scales.values():
            scale[2], scale[3] = scale[0], scale[1]
    q = torch.randn(5, 1, HEADS, 16).bfloat16()[..., :DIM]
    wanted = attngen.attention_paged(q, *pages, table, used, **scales)
    prefix = attngen.shared_prefix(table, used, PAGE, prefixes=prefixes)
    assert prefix.length.tolist() == [2 * PAGE] * prefixes
    torch.testing.assert_close(prefix.attention(q, *pages, **scales), wanted, rtol=2e-2, atol=2e-2)


def test_sinks_of_sequences_take_one_prefix() -> None:
    sinking = variant("sinking", sink="sinks[b, h]", tensors=[Declared("sinks", "fp32", ("b", "h"))])
    table, used = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([9, 9], dtype=torch.int32)
    q, pages = torch.randn(2, 1, HEADS, DIM), (torch.randn(1, PAGE, KV_HEADS, DIM),) * 2
    given = {"variant": sinking, "sinks": torch.randn(2, HEADS)}
    wanted = attngen.attention_paged(q, *pages, table, used, **given)
    torch.testing.assert_close(attngen.shared_prefix(table, used, PAGE).attention(q, *pages, **given), wanted)
    with pytest.raises(CallError, match="sinking: it reads 'b', and sequences are put in the order of several"):
        attngen.shared_prefix(table, used, PAGE, prefixes=2).attention(q, *pages, **given)


def test_what_is_refused() -> None:
    table, used = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([9, 9], dtype=torch.int32)
    prefix = attngen.shared_prefix(table, used, PAGE)
    q, pages = torch.randn(2, 1, HEADS, DIM), (torch.randn(1, PAGE, KV_HEADS, DIM),) * 2
    for name, more, message in (
        ("sliding_window", {"window": 4}, "sliding_window: its mask may hide keys of a shared prefix; allowed: full"),
        ("alibi", {}, "alibi: its score reads 'kv', which a shared prefix does not know; allowed: h, hk, s, and scal"),
        ("causal", {"cu_seqlens_q": used}, "cu_seqlens_q goes to attngen.shared_prefix, which finds the prefix"),
        ("causal", {"max_seqlen_q": 1}, "max_seqlen_q goes to attngen.shared_prefix, which finds the prefix"),
        ("causal", {"num_splits": 2}, "num_splits is not served, since two launches share the keys of a sequence"),
        ("causal", {"q_descale": torch.ones(2, KV_HEADS)}, r"q_descale must have shape \(\) with a shared prefix"),
    ):
        with pytest.raises(CallError, match=message):
            prefix.attention(q, *pages, variant=name, **more)
    with pytest.raises(CallError, match="q must have 4 dimensions, as the prefix was found for, got 3"):
        prefix.attention(q[0], *pages)
    for given, more, message in (
        ((table[0], used, PAGE), {}, "page_table must have 2 dimensions"),
        ((table, used[:1], PAGE), {}, r"seqused_k must have shape \(2,\)"),
        ((table[:0], used[:0], PAGE), {}, "must have sequences and pages"),
        ((table, used, 0), {}, "page_size must be at least 1, got 0"),
        ((table, used, PAGE), {"prefixes": 0}, "prefixes must be at least 1, got 0"),
        ((table, used, PAGE), {"cu_seqlens_q": used}, r"cu_seqlens_q must have shape \(3,\)"),
        ((table, used, PAGE), {"cu_seqlens_q": starts_of([1, 1])}, "max_seqlen_q and total_q are needed"),
    ):
        with pytest.raises(CallError, match=message):
            attngen.shared_prefix(*given, **more)
