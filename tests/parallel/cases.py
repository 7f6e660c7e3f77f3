"""Masks and scores of every kind, with the values that a plan and a call take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.parallel import Cost

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8

#: Slow kernels and links: with them plans overlap by heads where they can.
SLOW = Cost(64, 32, HEAD_DIM, tflops=1e-9, gigabytes=1e-6)

_BY_TOKEN = {"dtype": "int32", "shape": ["b", "seqlen_k"]}
_SORTED = {**_BY_TOKEN, "monotone": {"axis": 1}}


@dataclass(frozen=True)
class Case:
    """One variant, and the values of a plan (``fixed``) and of its calls (``passed``) for some number of tokens.

    ``graded`` names values whose gradient is compared. Packed cases have ``documents``, the lengths as shares.
    """

    name: str
    variant: Any
    fixed: Callable[[int], dict[str, Any]] = lambda _: {}
    passed: Callable[[int], dict[str, Any]] = lambda _: {}
    graded: tuple[str, ...] = ()
    documents: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def cu_seqlens(self, seqlen: int) -> list[int] | None:
        """Offsets of the documents."""
        if not self.documents:
            return None
        ends = torch.tensor([0, *self.documents]).cumsum(0) * seqlen // sum(self.documents)
        return [int(end) for end in ends]


def _ids(seqlen: int, shares: tuple[int, ...] = (3, 1, 5, 2, 7)) -> Tensor:
    """Number of the document of each token, two sequences."""
    ends = torch.tensor([0, *shares]).cumsum(0) * seqlen // sum(shares)
    first = torch.repeat_interleave(torch.arange(len(shares)), ends.diff())
    return torch.stack([first, first.flip(0).max() - first.flip(0)]).to(torch.int32)


def _starts(seqlen: int) -> Tensor:
    ids = _ids(seqlen)
    return torch.stack([torch.searchsorted(row, row) for row in ids]).to(torch.int32)


def _random(*shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7), dtype=torch.int32)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8))


def cases() -> Iterator[Case]:
    """All of them."""
    variant = attngen.variant
    for preset in ("full", "causal", "causal_top_left"):
        yield Case(preset, preset)
    yield Case("window", "sliding_window", lambda s: {"window": s // 7})
    yield Case("narrow_window", "sliding_window", lambda s: {"window": 3})
    yield Case("sink_window", "sink_window", lambda s: {"window": s // 9, "sinks": 5})
    yield Case("prefix_lm", "prefix_lm", lambda s: {"prefix": torch.tensor([s // 3, s // 2], dtype=torch.int32)})
    yield Case("documents", "packed_documents", lambda s: {"doc": _ids(s)})
    yield Case("bidirectional", "packed_bidirectional", lambda s: {"doc": _ids(s)})
    yield Case("document_starts", "causal_packed", lambda s: {"doc_start": _starts(s)})
    yield Case("chunked", "chunked", lambda s: {"chunk": s // 5})
    yield Case("dilated", "dilated", lambda s: {"window": s // 4, "dilation": 3})
    yield Case("neighbourhood", "neighbourhood_2d", lambda s: {"width": 12, "radius": 2})
    yield Case("causal_sink", "causal_sink", passed=lambda s: {"sinks": _normal(HEADS)}, graded=("sinks",))
    yield Case("window_sink", "sliding_window_sink", lambda s: {"window": s // 6},
               lambda s: {"sinks": _normal(HEADS)}, ("sinks",))  # fmt: skip
    yield Case("alibi", "alibi", passed=lambda s: {"slope": _normal(HEADS).abs()})
    yield Case("softcap", "softcap", passed=lambda s: {"cap": 2.0})
    yield Case("softcap_window", "softcap_window", lambda s: {"window": s // 5}, lambda s: {"cap": 2.0})
    yield Case(
        "unordered_segments",
        variant("seg[b, q] == seg[b, kv]", tensors={"seg": _BY_TOKEN}, name="segments"),
        lambda s: {"seg": _random(BATCH, s, high=4)},
    )
    yield Case(
        "runs_of_segments",
        variant("seg[b, q_pos] == seg[b, kv] and seg[b, kv] > 0 and q_pos >= kv", tensors={"seg": _BY_TOKEN},
                name="runs"),
        lambda s: {"seg": _ids(s)[:, torch.arange(s).roll(s // 3)].contiguous()},
    )  # fmt: skip
    yield Case(
        "window_by_row",
        variant("q >= kv and q - kv < width[b, q]", tensors={"width": _BY_TOKEN}, name="window_by_row"),
        lambda s: {"width": _random(BATCH, s, high=s // 4)},
    )
    yield Case(
        "start_of_document",
        variant("start[doc[b, q]] <= kv and kv <= q_pos", name="start_of_document",
                tensors={"doc": _SORTED, "start": {"dtype": "int32", "shape": ["documents"]}}),
        lambda s: {"doc": _ids(s)[:1].expand(BATCH, s).contiguous(),
                   "start": torch.tensor([0, 3, 4, 9, 11], dtype=torch.int32) * s // 18},
    )  # fmt: skip
    yield Case(
        "previous_token",
        variant("q >= kv and (kv == 0 or keep[b, max(kv - 1, 0)] > 0)", tensors={"keep": _BY_TOKEN}, name="previous"),
        lambda s: {"keep": _random(BATCH, s, high=2)},
    )
    yield Case(
        "head_windows",
        variant("q >= kv and q - kv < reach[h]", tensors={"reach": {"dtype": "int32", "shape": ["h"]}}, name="by_head"),
        lambda s: {"reach": torch.tensor([4, s // 8, s // 3, s], dtype=torch.int32)},
    )
    yield Case("tile_neighbours", variant("abs(q // 20 - kv // 20) <= 1", name="tile_neighbours"))
    yield Case(
        "sliding_tiles",  # a window of tiles in two dimensions
        variant("abs(q // 8 % 5 - kv // 8 % 5) <= 1 and abs(q // 40 - kv // 40) <= 1", name="sliding_tiles"),
    )
    yield Case("every_seventh", variant("q >= kv and (kv % 7 == 0 or q - kv < 9)", name="every_seventh"))
    yield Case("from_the_end", variant("kv >= seqlen_k - 10 or q == kv", name="from_the_end"))
    yield Case("nothing_for_some", variant("q >= kv + 30", name="nothing_for_some"))
    yield Case(
        "packed_position", variant("q_global - b * seqlen_q >= kv_global - b * seqlen_k", name="packed_position")
    )
    yield Case(
        "biases",
        variant("q >= kv", "s + by_row[b, q] * by_key[h, kv] + table[min(q - kv, 15)]", name="biases", tensors={
            "by_row": {"dtype": "float32", "shape": ["b", "seqlen_q"], "grad": True},
            "by_key": {"dtype": "float32", "shape": ["h", "seqlen_k"], "grad": True},
            "table": {"dtype": "float32", "shape": [16], "grad": True},
        }),
        passed=lambda s: {"by_row": _normal(BATCH, s), "by_key": _normal(HEADS, s), "table": _normal(16)},
        graded=("by_row", "by_key", "table"),
    )  # fmt: skip
    yield Case(
        "pair_bias",
        variant("q >= kv", "s + bias[h, q, kv]", name="pair_bias", tensors={
            "bias": {"dtype": "float32", "shape": ["h", "seqlen_q", "seqlen_k"], "grad": True}}),
        passed=lambda s: {"bias": _normal(HEADS, s, s)},
        graded=("bias",),
    )  # fmt: skip
    documents = (1, 4, 2, 0, 9, 3)
    yield Case("varlen_causal", "causal", documents=documents)
    yield Case("varlen_full", "full", documents=documents)
    yield Case("varlen_window", "sliding_window", lambda s: {"window": s // 12}, documents=documents)
    yield Case("varlen_one_document", "causal", documents=(1,))
    yield Case(
        "varlen_by_document",
        variant("q >= kv and kv < prefix[b]", "s + gain[b] * (kv - q) / seqlen_k", name="by_document", tensors={
            "prefix": {"dtype": "int32", "shape": ["b"]}, "gain": {"dtype": "float32", "shape": ["b"], "grad": True}}),
        lambda s: {"prefix": torch.tensor([5, s, 7, 1, s // 4, 2], dtype=torch.int32)},
        lambda s: {"gain": _normal(6)}, ("gain",), documents,
    )  # fmt: skip
    yield Case(
        "varlen_global_table",
        variant("q >= kv", "s + bias[kv_global] - bias[q_global]", name="global_table", tensors={
            "bias": {"dtype": "float32", "shape": ["total_k"], "grad": True}}),
        passed=lambda s: {"bias": _normal(s)}, graded=("bias",), documents=documents,
    )  # fmt: skip
    yield Case("transposed", "causal", options={"layout": "bhsd"})
