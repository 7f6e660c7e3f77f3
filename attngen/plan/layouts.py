"""Layouts: how a kernel locates queries and keys, and which of their axes have strides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Location of the queries and keys of a sequence. The last axis of q, k, v and out is contiguous, and has no
    stride.

    ``key_access``: the keys of a sequence are rows of a tensor of its own (``contiguous``), rows of one tensor from
    ``cu_seqlens_k[b]`` (``ragged``), or rows of the pages that ``page_table[b]`` lists (``paged``).
    """

    key_access: str  # contiguous | ragged | paged
    ragged_queries: bool  # q, out and lse hold the rows of all sequences, one after the other
    query_strides: tuple[str, ...]  # axes of q and out, and of their gradients
    key_strides: tuple[str, ...]  # axes of k and v, and of their gradients


LAYOUTS = {
    "dense": Layout("contiguous", False, ("b", "s", "h"), ("b", "s", "h")),
    "varlen": Layout("ragged", True, ("s", "h"), ("s", "h")),
    "paged": Layout("paged", True, ("s", "h"), ("page", "s", "h")),
}
