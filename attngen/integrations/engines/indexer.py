"""The indexer of serving engines' sparse models (DeepSeek-V3.2, GLM-5): which keys of its request a token attends to.

An engine projects queries and weights, and writes its cache of keys in 8 bits; here keys are scored and selected, with
the pages of the cache read where they lie. Scores are in memory only between the two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import NoKernelError
from attngen.integrations.engines.layers import Layer
from attngen.operations import INDEX_SCORES, TOPK, TOPK_VARIANT
from attngen.runtime.operations.index_scores.call import index_scores
from attngen.runtime.operations.shared.launches import takes
from attngen.runtime.operations.shared.path import kernels_of
from attngen.runtime.operations.topk.call import topk
from attngen.runtime.registry.binding import find

#: The environment variable with which users ask for it, in both engines.
VARIABLE = "ATTNGEN_INDEXER"

#: Bytes of a key, and those of its scale, a float32 number. A page has its keys first, then their scales.
KEY_BYTES, SCALE_BYTES = 128, 4

#: The most heads that kernels take (docs/index_scores.md).
MOST_HEADS = 128

_CAUSAL = Layer().causal().variant


def require_kernels(device: torch.device | str) -> None:
    """Raise NoKernelError where calls on a device would run in torch, which is slow and waits for the GPU."""
    if torch.device(device).type != "cuda":
        return
    wanted = (INDEX_SCORES, "fp8_e4m3", "paged", KEY_BYTES)
    scores = [one for one in find(_CAUSAL, None).kernels if takes(one, "cu_seqlens_q")]
    selections = [one for one in kernels_of(TOPK, TOPK_VARIANT, torch.float32) if takes(one, "page_table")]
    forms = [(one.direction, one.dtype, one.layout, one.head_dim_qk) for one in scores]
    if wanted not in forms or not selections:
        raise NoKernelError(
            f"{VARIABLE} needs kernels that are not built; run 'attngen build specs/integrations/engines_sparse.yaml'"
        )


class IndexKeys(NamedTuple):
    """An indexer's cache: keys (pages, page_size, 128) in e4m3, and their scales (pages, page_size) float32."""

    keys: Tensor
    scales: Tensor

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.keys.shape[1]


def index_keys(pages: Tensor, page_size: int) -> IndexKeys:
    """View of a cache of bytes, (pages, page_size * 132) or (pages, page_size, 132), whose pages may lie apart."""
    count, step, first = pages.shape[0], pages.stride(0), pages.storage_offset()
    values = page_size * KEY_BYTES
    keys = pages.as_strided((count, page_size, KEY_BYTES), (step, KEY_BYTES, 1)).view(torch.float8_e4m3fn)
    scales = pages.as_strided((count, page_size * SCALE_BYTES), (step, 1), first + values)
    return IndexKeys(keys, scales.view(torch.float32))


class Requests(NamedTuple):
    """The requests of a step: pages (requests, max_pages) int32 and keys (requests,) int32 of each; ``longest``, at
    least the most keys of one. ``starts`` (requests + 1,) int32: first tokens, None where all have as many."""

    page_table: Tensor
    lengths: Tensor
    longest: int
    starts: Tensor | None = None


def select_keys(
    q: Tensor, weights: Tensor, keys: IndexKeys, requests: Requests, lengths: Tensor, count: int, *,
    slots: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Select the ``count`` keys with the largest scores for each token, among those up to its own.

    ``q`` is (requests, tokens of each, heads, 128) float8_e4m3fn, or (tokens, heads, 128) with ``starts``; ``weights``
    are float32 of the same shape without its last axis, and ``lengths`` int32 without both: the keys that a token sees,
    0 for one that belongs to no request. Returns positions within the request, ascending, or with ``slots`` places in
    the cache, and -1 behind them. It does not wait for the GPU, and may be captured in a graph.
    """
    page_size = keys.page_size
    table = requests.page_table[:, : -(-requests.longest // page_size)]
    scores = weights.new_empty((*q.shape[:-2], table.shape[1] * page_size))
    packed = requests.starts is not None
    index_scores(
        q, keys.keys, weights, k_scale=keys.scales, variant=_CAUSAL, page_table=table, seqused_k=requests.lengths,
        cu_seqlens_q=requests.starts, max_seqlen_q=q.shape[0] if packed else None, out=scores,
    )  # fmt: skip
    if not slots:
        return topk(scores, count, lengths=lengths, out=out)
    return topk(
        scores, count, lengths=lengths, page_table=table, page_size=page_size, cu_seqlens_q=requests.starts, out=out
    )


def rows_of(requests: Requests, first: int, end: int) -> Requests:
    """The requests of some tokens of a step, ``first`` to ``end``: those of others have none, and all end at the keys
    of their last token here. ``requests`` have ``starts``."""
    assert requests.starts is not None
    starts = requests.starts.clamp(first, end)
    later = (requests.starts - starts)[1:].clamp(min=0)
    lengths = (requests.lengths - later).where(starts.diff() > 0, 0).to(torch.int32)
    return requests._replace(lengths=lengths, starts=starts - first)
