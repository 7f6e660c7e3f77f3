"""Steps of vLLM's models that choose blocks of keys, and what they mean in float64: for stubs and for vLLM itself."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Tokens and keys of requests: some that decode as many tokens each, one of them without keys, and prompts behind.
DECODING, PROMPTS = ((2, 300), (2, 131), (2, 0), (2, 700)), ((40, 40), (3, 290), (30, 520))

HEADS, KV_HEADS, COLUMNS, PAGE, TOPK = 4, 2, 16, 128, 3
INDEX, ATTENTION = "index", "attention"


class Step(NamedTuple):
    """Requests by their rows of a page table, and for each token its request and how many keys it sees."""

    table: Tensor
    request: Tensor
    seen: Tensor
    decoding: int
    starts: Tensor  # of prompts
    used: Tensor

    @property
    def tokens(self) -> int:
        return len(self.seen)


def step(page: int = PAGE, of_keys: int = 1) -> Step:
    """A step; pages are those of blocks of ``of_keys`` keys, if that is given."""
    every = [*DECODING, *PROMPTS]
    listed = [-(-(keys // of_keys) // page) for _, keys in every]
    table = torch.full((len(every), max(listed) + 1), 2**30, dtype=torch.int32)
    for b, own in enumerate(torch.randperm(sum(listed)).int().split(listed)):
        table[b, : len(own)] = own
    counts = [count for count, _ in every]
    seen = [max(keys - count + i + 1, 0) for count, keys in every for i in range(count)]
    request = torch.repeat_interleave(torch.arange(len(every)), torch.tensor(counts)).int()
    starts = torch.tensor([0, *accumulate(count for count, _ in PROMPTS)], dtype=torch.int32)
    used = torch.tensor([keys for _, keys in every], dtype=torch.int32)
    return Step(table, request, torch.tensor(seen, dtype=torch.int32), sum(c for c, _ in DECODING), starts, used)


def places(made: Step, token: int, number: int, page: int) -> Tensor:
    """Rows of a cache of the first keys of a token's request."""
    at = torch.arange(number)
    return made.table[made.request[token].long(), at // page] * page + at % page


def attended(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention of the heads of a token over rows of pages, for each KV head: q (heads, columns), rows (KV heads,
    n)."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = len(q) // k.shape[2]
    for hk in range(k.shape[2]):
        own, heads = rows[hk], slice(hk * group, (hk + 1) * group)
        if len(own):
            s = q[heads].double() @ k.flatten(0, 1)[own, hk].double().T * q.shape[-1] ** -0.5
            out[heads] = s.softmax(-1) @ v.flatten(0, 1)[own, hk].double()
    return out


def check_msa(module: Any, metadata: Any, context: Any) -> None:
    """Two layers of a step: lists, and attention to them. ``metadata`` makes those of a step from keyword arguments."""
    made, pages = step(), 40
    decoding = len(DECODING)
    decode = SimpleNamespace(
        seq_lens=made.used[:decoding], block_table=made.table[:decoding], max_seq_len=700, decode_query_len=2,
        max_decode_query_len=2,
    )  # fmt: skip
    prefill = SimpleNamespace(
        cu_seqlens_q=made.starts, seq_lens=made.used[decoding:], block_table=made.table[decoding:], max_query_len=40,
        max_seq_len=700, context_lens=made.used[decoding:] - made.starts.diff(),
    )  # fmt: skip
    given = metadata(
        num_decodes=decoding, num_decode_tokens=made.decoding, num_prefills=len(PROMPTS),
        num_actual_tokens=made.tokens, num_prefill_tokens=made.tokens - made.decoding, decode=decode, prefill=prefill,
    )  # fmt: skip
    context({INDEX: given, ATTENTION: given})
    buffer = torch.full((made.tokens + 5, KV_HEADS, TOPK), 77, dtype=torch.int32)
    for _ in range(2):
        cache = torch.randn(pages, PAGE, 64)
        impl = SimpleNamespace(
            block_size=128, topk_blocks=TOPK, local_blocks=1, init_blocks=0, score_type="max", num_kv_heads=KV_HEADS,
            num_index_heads=KV_HEADS, index_head_dim=64, topk_indices_buffer=buffer,
            index_cache=SimpleNamespace(prefix=INDEX, kv_cache=cache),
        )  # fmt: skip
        index_query = torch.randn(made.tokens + 3, KV_HEADS * 64)
        by_head = module.choose_for_msa(impl, index_query)
        assert [tuple(one.shape) for one in by_head] == [
            (2, made.decoding, TOPK),
            (2, made.tokens - made.decoding, TOPK),
        ]
        kv_cache = torch.randn(pages, KV_HEADS, PAGE, 2 * COLUMNS)
        q, out = torch.randn(made.tokens + 2, HEADS * COLUMNS), torch.zeros(made.tokens + 2, HEADS * COLUMNS)
        attention = SimpleNamespace(
            use_fp8_kv=False, head_size=COLUMNS, block_size=128, topk_blocks=TOPK, num_heads=HEADS, scale=COLUMNS**-0.5
        )
        layer = SimpleNamespace(layer_name=ATTENTION, topk_indices_buffer=buffer)
        assert module.attend_for_msa(attention, layer, q, kv_cache, out) is out
        k, v = kv_cache.transpose(1, 2).split(COLUMNS, dim=-1)
        for token in range(made.tokens):
            seen = int(made.seen[token])
            at = places(made, token, seen, PAGE)
            products = index_query[token].view(KV_HEADS, 64).double() @ cache.flatten(0, 1)[at].double().T
            scores = (
                torch.nn.functional.pad(products, (0, -seen % 128), value=-torch.inf).unflatten(-1, (-1, 128)).amax(-1)
            )
            scores[:, -1:] = torch.inf
            best = scores.topk(min(TOPK, scores.shape[-1])).indices
            for hk in range(KV_HEADS):
                listed = buffer[token, hk]
                assert set(listed[: best.shape[-1]].tolist()) == set(best[hk].tolist())  # those that are counted
            rows = [at[torch.isin(torch.arange(seen) // 128, best[hk])] for hk in range(KV_HEADS)]
            wanted = attended(q[token].view(HEADS, COLUMNS), k, v, rows)  # type: ignore[arg-type]
            torch.testing.assert_close(out[token].view(HEADS, COLUMNS).double(), wanted, rtol=0, atol=1e-5)
        assert (buffer[made.tokens :] == 77).all()


def check_qsa(module: Any, topk: int = 32) -> None:
    """A layer of a step: blocks of decoding and of prompts, their lists in the model's buffer, and attention to
    them."""
    made, of_blocks = step(16), step(8, 4)
    made = made._replace(request=of_blocks.request)
    heads, dim = 6, 32
    cache, q = torch.randn(120, 8, 1, dim), torch.randn(made.tokens, heads, dim)
    visible = made.seen // 4
    blocks = torch.full((made.tokens, topk // 4), 55, dtype=torch.int32)
    decoding, prompts = slice(0, made.decoding), slice(made.decoding, None)
    number = len(DECODING)
    module.select_decoding(
        q[decoding], cache, of_blocks.table[:number], visible[decoding], topk, 4, 2, blocks[decoding]
    )
    module.select_prompts(
        q[prompts],
        cache,
        of_blocks.table[number:],
        made.starts + 9,
        visible[prompts],
        topk,
        4,
        40,
        blocks[prompts],
        700,
    )
    buffer = torch.full((made.tokens + 1, topk + 4), -1, dtype=torch.int32)
    buffer[:, -1] = 0
    module.write_lists(blocks, (made.seen - 1).clamp(min=-1), visible, 4, topk, buffer[:-1])
    table = made.table
    query, gate = torch.randn(made.tokens + 1, HEADS, COLUMNS), torch.randn(made.tokens + 1, HEADS * COLUMNS)
    k, v = torch.randn(2, 140, 16, KV_HEADS, COLUMNS)
    out = torch.empty_like(query)
    request = torch.cat([made.request, made.request[:1]])
    module.attend_for_qsa(query, k, v, buffer, table, request, True, out, output_gate=gate)
    assert (out[-1] == 0).all()
    assert (buffer[:-1, topk // 4 + 2] == (made.seen > 0) * (visible + 1).clamp(max=topk // 4 + 1)).all()
    assert (buffer[:-1, 0] == visible.where(made.seen > 0, 0)).all()
    for token in range(made.tokens):
        seen = int(made.seen[token])
        keys = cache.flatten(0, 2)[places(of_blocks, token, seen // 4, 8)].double()
        scores = (q[token].double() @ keys.T).relu().sum(0)
        best = scores.topk(min(topk // 4, len(scores))).indices
        listed = blocks[token]
        assert set(listed[listed >= 0].tolist()) == set(best.tolist())
        at = torch.arange(seen)
        own = places(made, token, seen, 16)[torch.isin(at // 4, best) | (at >= seen // 4 * 4)]
        wanted = attended(query[token], k, v, own.expand(KV_HEADS, -1))
        wanted = wanted * gate[token].double().sigmoid().view_as(wanted)
        torch.testing.assert_close(out[token].double(), wanted, rtol=0, atol=1e-5)
