"""Models of serving engines whose tokens attend to blocks of keys that an index chooses, over keys and values of KV
heads: MiniMax-M3 (MSA, blocks of 128 for each KV head) and Qwen3.8-Flash-Next (QSA, blocks of 4 for all heads).

An engine projects, rotates and writes its caches; here blocks are scored and selected, and attended to, with the pages
of the caches read where they lie. Tokens of prompts are sequences of one query each, whatever is mixed. The first
columns of a list are what a token always sees, so that entries of -1 stand last and no call reads them. These columns,
the tokens' pages and how many entries their lists have are the same in all layers of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.integrations.engines.indexer import Requests
from attngen.integrations.engines.layers import Layer
from attngen.integrations.shared.catalogue import variant
from attngen.lang.variant import Variant
from attngen.operations import BLOCK_SCORES, INDEX_SCORES, TOPK, TOPK_VARIANT
from attngen.runtime.operations.attention.entry import attention_paged
from attngen.runtime.operations.index_scores.call import block_scores, index_scores
from attngen.runtime.operations.shared.path import kernels_of
from attngen.runtime.operations.topk.call import topk
from attngen.runtime.registry.binding import find

#: The environment variable with which users ask for it, in both engines.
VARIABLE = "ATTNGEN_BLOCK_LISTS"

_CAUSAL = Layer().causal().variant


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists of blocks of a model: of so many keys, ``count`` chosen ones and ``always`` others."""

    block: int
    count: int
    always: int
    per_head: bool

    @property
    def variant(self) -> Variant:
        """The variant of attention over these lists."""
        return variant(self.name)

    @property
    def name(self) -> str:
        """Its name."""
        return f"counted_{'head_' * self.per_head}blocks_of_{self.block}"

    @property
    def entries(self) -> int:
        """Entries of a list."""
        return self.count + self.always


def require_kernels(lists: Lists, head_dim: int, index_dtype: str, device: torch.device | str) -> None:
    """Raise NoKernelError where calls on a device would run in torch, or not at all."""
    if torch.device(device).type != "cuda":
        return
    scores, name = (BLOCK_SCORES, _CAUSAL) if lists.per_head else (INDEX_SCORES, variant("complete_blocks"))
    scoring = [(one.direction, one.dtype, one.layout) for one in find(name, None).kernels]
    attending = [(one.direction, one.dtype, one.layout, one.head_dim_qk) for one in find(lists.variant, None).kernels]
    if (
        (scores, index_dtype, "paged") not in scoring
        or ("forward", "bf16", "paged", head_dim) not in attending
        or not kernels_of(TOPK, TOPK_VARIANT, torch.float32)
    ):
        raise NoKernelError(
            f"{VARIABLE} needs kernels that are not built; run 'attngen build specs/integrations/sparse_gqa.yaml'"
        )


class TokenRows(NamedTuple):
    """Sequences of as many tokens each: pages (sequences, max_pages) int32; keys (sequences,) int32 up to the last
    token's own, 0 for one that belongs to no request; and the entries of each list that are read, (sequences, tokens of
    each) int32, or (sequences, tokens of each, heads). Tokens of a mixed step are sequences of their own."""

    page_table: Tensor
    lengths: Tensor
    counts: Tensor


def tokens_of(lists: Lists, page_table: Tensor, request: Tensor, lengths: Tensor, heads: int) -> TokenRows:
    """The tokens of a step whose requests have rows of a page table: ``request`` (tokens,) is the row of each."""
    return TokenRows(page_table[request.long()], lengths, counts_of(lists, lengths, heads)[:, None])


def counts_of(lists: Lists, lengths: Tensor, heads: int) -> Tensor:
    """Entries of each token's list that may name keys, the first ones: as ``start_lists``, (tokens, heads) int32 or
    (tokens,)."""
    if not lists.per_head:
        return (lengths // lists.block + 1).clamp(max=lists.entries).where(lengths > 0, 0).to(torch.int32)
    blocks = (lengths + (lists.block - 1)) // lists.block
    return blocks.clamp(max=lists.entries).to(torch.int32)[:, None].expand(-1, heads).contiguous()


def lengths_of_tokens(starts: Tensor, used: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Request of each packed token, and the keys that it sees (tokens,) int32: those up to its own, which end at its
    request's last token; 0 behind all requests. ``starts`` (requests + 1,) int32, ``used`` (requests,) int32."""
    place = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], place, right=True).clamp(max=len(used) - 1)
    lengths = used[request] - starts[1:][request] + place + 1
    return request, lengths.clamp(min=0).where(place < starts[-1], 0).to(torch.int32)


def start_lists(lists: Lists, lengths: Tensor, heads: int, out: Tensor | None = None) -> Tensor:
    """Lists of tokens with the entries that each always has, in the first columns; the others are not written.

    ``lengths`` (tokens,) int32 are the keys up to each token's own. Lists of each of ``heads`` are (tokens, heads,
    entries) and begin with the token's own block and those before it; of all heads (tokens, entries), and begin with
    the block that may be incomplete.
    """
    tokens = len(lengths)
    shape = (tokens, heads, lists.entries) if lists.per_head else (tokens, lists.entries)
    out = lengths.new_empty(shape) if out is None else out
    if not lists.always:
        return out
    last = (lengths - 1 if lists.per_head else lengths).div(lists.block, rounding_mode="floor")
    entries = last[:, None] - torch.arange(lists.always, device=lengths.device, dtype=torch.int32)
    out[..., : lists.always] = entries.clamp(min=-1).view(tokens, *[1] * (out.dim() - 2), lists.always)
    return out


def choosable(lists: Lists, lengths: Tensor, heads: int) -> Tensor:
    """Number of blocks that each token may choose from: those before the ones that it always sees. As ``start_lists``,
    (tokens, heads) int32 or (tokens,)."""
    if not lists.per_head:
        return lengths // lists.block
    own = (lengths + (lists.block - 1)) // lists.block
    earlier = (own - lists.always).clamp(min=0).to(torch.int32)
    return earlier[:, None].expand(-1, heads).contiguous()


def choose_head_blocks(q: Tensor, keys: Tensor, lists: Lists, requests: Requests, blocks: Tensor, out: Tensor) -> None:
    """Write the chosen blocks of each token and index head into the last columns of ``out``, -1 behind them.

    ``q`` is (requests, tokens of each, heads, columns), or (tokens, heads, columns) with ``starts``; ``keys`` (pages,
    page_size, columns) of the same dtype. ``blocks`` are those of ``choosable``. It does not wait for the GPU, and may
    be captured in a graph.
    """
    table = requests.page_table[:, : -(-requests.longest // keys.shape[1])]
    count = -(-table.shape[1] * keys.shape[1] // lists.block)
    scores = q.new_empty((*q.shape[:-1], count), dtype=torch.float32)
    packed = requests.starts is not None
    block_scores(
        q, keys, lists.block, variant=_CAUSAL, page_table=table, seqused_k=requests.lengths,
        cu_seqlens_q=requests.starts, max_seqlen_q=q.shape[0] if packed else None, out=scores,
    )  # fmt: skip
    rows = scores.flatten(0, -3)
    topk(rows, lists.count, lengths=blocks, out=out[..., -lists.count :])


def choose_blocks(
    q: Tensor,
    keys: Tensor,
    scale: float,
    lists: Lists,
    requests: Requests,
    context: Tensor,
    blocks: Tensor,
    out: Tensor,
) -> None:
    """Write the chosen complete blocks of each token into the last columns of ``out``, -1 behind them.

    As ``choose_head_blocks``, but ``keys`` are those of blocks, one each, ``requests`` count and page these, and
    scores are ``scale`` times sums over heads of relu(q · k). ``context`` (requests,) int32: the keys, not blocks,
    before the first token of each.
    """
    table = requests.page_table[:, : -(-requests.longest // keys.shape[1])]
    scores = q.new_empty((*q.shape[:-2], table.shape[1] * keys.shape[1]), dtype=torch.float32)
    weights = scores.new_full((1,), scale).expand(q.shape[:-1])
    packed = requests.starts is not None
    index_scores(
        q, keys, weights, variant=variant("complete_blocks"), page_table=table, seqused_k=requests.lengths,
        cu_seqlens_q=requests.starts, max_seqlen_q=q.shape[0] if packed else None, out=scores, ratio=lists.block,
        context=context,
    )  # fmt: skip
    topk(scores.flatten(0, -2), lists.count, lengths=blocks, out=out[..., -lists.count :])


def attend_to_blocks(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, lists: Lists, tokens: TokenRows, scale: float, out: Tensor
) -> None:
    """Attention of q (sequences, tokens of each, heads, columns) over pages k and v (pages, page_size, kv_heads,
    columns) into ``out``, with lists (sequences, tokens of each, …)."""
    attention_paged(
        q, k, v, tokens.page_table, tokens.lengths, variant=lists.variant, indices=chosen, topk_length=tokens.counts,
        softmax_scale=scale, out=out,
    )  # fmt: skip
