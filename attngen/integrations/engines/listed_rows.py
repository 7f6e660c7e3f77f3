"""Sparse latent attention of serving engines: each token attends to the rows of a cache that an indexer selected.

The whole cache is one sequence of rows, and the tokens of a step are its queries, whatever requests they belong to. So
prompts, decoding and drafts are one launch, whose only inputs beside the queries are lists and their lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attngen.dtypes import LATENT_ROWS
from attngen.errors import CallError
from attngen.integrations.shared import catalogue
from attngen.runtime.operations.attention.entry import attention

#: Each query sees the first ``topk_length`` rows of its list; and the same with a logit for each head without a value.
_LISTED, _LISTED_SINK = catalogue.variant("listed_keys"), catalogue.variant("listed_keys_sink")

#: Columns of a latent row, which are its value.
RANK = 512

#: Columns of queries that kernels exist for, with and without rotary ones.
COLUMNS = (576, 512)

#: Bytes of a row in 8 bits: latents in e4m3 with four scales, and 64 rotary columns in bf16, 0 in models without them.
PACKED_BYTES = LATENT_ROWS["fp8_mla_656"].bytes


class CacheRows(NamedTuple):
    """The rows of a cache as keys and values of one sequence with one KV head."""

    keys: Tensor
    values: Tensor
    columns: int  # of queries


def cache_rows(rows: Tensor) -> CacheRows:
    """Rows (rows, 576 or 512) in 16 bits or float8_e4m3fn, or (rows, 656) of bytes in any dtype of 8 bits. Raises
    CallError for others."""
    width = rows.shape[-1]
    if rows.element_size() == 1 and width == PACKED_BYTES:
        keys = rows.view(torch.uint8)[None, :, None]
        return CacheRows(keys, keys, COLUMNS[0])
    if (rows.element_size() == 1 and rows.dtype != torch.float8_e4m3fn) or width not in COLUMNS:
        raise CallError(
            f"rows of a latent cache have {COLUMNS[0]} or {COLUMNS[1]} columns of 16 bits or of e4m3, or "
            f"{PACKED_BYTES} bytes, got {width} of {rows.dtype}"
        )
    keys = rows[None, :, None]
    return CacheRows(keys, keys[..., :RANK], width)


def attend_to_listed(
    queries: Tensor, rows: CacheRows, slots: Tensor, counts: Tensor, softmax_scale: float, *,
    sinks: Tensor | None = None, k_descale: Tensor | None = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of ``queries`` (tokens, heads, columns) to the rows that ``slots`` (tokens, topk) int32 lists, of which
    the first ``counts`` (tokens,) int32 count. Others than rows of the cache, such as -1, are ignored. ``sinks``
    (heads,) float32 are logits that join the softmax; ``k_descale`` () float32 is the scale of rows in e4m3.

    Returns the output (tokens, heads, 512), and with ``return_lse`` the natural log-sum-exp (tokens, heads), which
    leaves sinks out; 0 and -inf for a token without a row. It does not wait for the GPU, and may be captured in a
    graph.
    """
    own = {"indices": slots[None], "topk_length": counts[None]}
    variant = _LISTED
    if sinks is not None:
        own["sinks"], variant = sinks, _LISTED_SINK
    result = attention(
        queries[None], rows.keys, rows.values, variant=variant, softmax_scale=softmax_scale, return_lse=return_lse,
        k_descale=k_descale, **own,
    )  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out[0], None if lse is None else lse[0].transpose(0, 1)
