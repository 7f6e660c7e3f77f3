"""The pages that sequences of a batch begin with in common, found on the device, and attention that reads them once.

All queries that share the prefix attend to it as those of one sequence, so that a block has many rows for each key
that it loads; each sequence attends to what it has of its own; and the two results are merged by their log-sum-exps.
Sizes do not depend on what is found: a graph may capture both steps, and the tables may change between its replays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError
from attngen.lang.printing import canonical
from attngen.lang.variant import Variant
from attngen.runtime.arguments.shapes import check_rank
from attngen.runtime.operations.attention.entry import attention_paged
from attngen.runtime.operations.merge.call import merge
from attngen.runtime.registry.binding import find

#: Features of variants whose queries see every key of a prefix, and see it in the same way wherever they stand.
_SERVED = {"mask", "sink", "sink_in_lse"}
_CAUSAL = "q_pos >= kv"


@dataclass(frozen=True)
class SharedPrefix:
    """The prefix that sequences of a batch share, as ``shared_prefix`` finds it; all tensors are on the device."""

    #: (1, max_pages) int32: the pages of a sequence that has the prefix.
    page_table: Tensor
    #: (1,) int32: keys of the prefix, whole pages; 0 if nothing is shared.
    length: Tensor
    #: (batch, max_pages) int32: the pages that follow the prefix in each sequence; all pages of one without it.
    own_page_table: Tensor
    #: (batch,) int32: keys in these.
    own_lengths: Tensor
    #: (batch, 1) or (total_q,) bool: queries whose sequence does not have the prefix.
    outside: Tensor
    #: (batch + 1,) int32, where the queries of each sequence begin, and the most of one; None for as many in each.
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None

    def update(self, other: SharedPrefix) -> None:
        """Take the values of another one of the same sizes, in place: a graph that reads these tensors reads them."""
        for name in ("page_table", "length", "own_page_table", "own_lengths", "outside"):
            getattr(self, name).copy_(getattr(other, name))
        if self.cu_seqlens_q is not None and other.cu_seqlens_q is not None:
            self.cu_seqlens_q.copy_(other.cu_seqlens_q)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        variant: str | Variant = "causal",
        package: str | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over pages that reads the keys of the prefix once for all sequences that share it.

        The result is that of ``attention_paged`` with the page table and the lengths in which the prefix was found, up
        to rounding: a part is rounded to the dtype of q before it is merged. There is no backward.

        Args:
            q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim), as said when the prefix was found.
            k_pages: As for ``attention_paged``.
            v_pages: As for ``attention_paged``.
            variant: One whose queries see all keys before them, such as ``causal``, ``full`` or ``causal_sink``,
                without a score. The keys of the prefix need a kernel of ``full``.
            package: As for ``attention``.
            return_lse: Also return the log-sum-exp, with the sink if the variant's has it.
            **options: Further arguments of ``attention_paged``, and of the variant.

        Returns:
            As ``attention_paged``.

        Raises:
            CallError: The variant has a mask or a score that depends on positions, or q has another form than the
                prefix was found for; and as ``attention_paged``.
            NoKernelError: As ``attention_paged``; also if no kernel of ``full`` takes the prefix.
        """
        own_options = _of_own_keys(variant, package, options)
        packed = self.cu_seqlens_q is not None
        if q.dim() != (3 if packed else 4):
            raise CallError(f"q must have {3 if packed else 4} dimensions, as the prefix was found for, got {q.dim()}")
        rows = q[None] if packed else q.reshape(1, -1, *q.shape[2:])
        given = {name: value for name, value in options.items() if name not in own_options}
        both = k_pages, v_pages
        prefix, prefix_lse = attention_paged(
            rows, *both, self.page_table, self.length, variant="full", package=package, return_lse=True, **given
        )
        out, lse = attention_paged(
            q, *both, self.own_page_table, self.own_lengths, cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q, variant=variant, package=package, return_lse=True, **options,
        )  # fmt: skip
        prefix = prefix.view(out.shape)
        prefix_lse = prefix_lse[0] if packed else prefix_lse.view(-1, *q.shape[:2]).transpose(0, 1)
        outside = self.outside if packed else self.outside[:, None]
        merged = merge([prefix, out], [prefix_lse.masked_fill(outside, -math.inf), lse])
        return merged if return_lse else merged[0]


def shared_prefix(
    page_table: Tensor,
    seqused_k: Tensor,
    page_size: int,
    *,
    seqlen_q: int = 1,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    total_q: int | None = None,
) -> SharedPrefix:
    """Find the prefix of pages that sequences of a batch share, on the device, without waiting for it.

    Of the sequences that begin with the most common page, the first is compared with the others. The prefix is as long
    as saves most reads: its pages, times the sequences beyond one that have it. A page belongs to it only if all
    queries of these sequences see all of its keys. Some twenty small operations of torch find it, once for all layers
    of a step.

    Args:
        page_table: (batch, max_pages) int32, as for ``attention_paged``.
        seqused_k: (batch,) int32, keys of each sequence, including those of its queries.
        page_size: Keys of a page.
        seqlen_q: Queries of each sequence, in calls with q (batch, seqlen_q, heads, head_dim).
        cu_seqlens_q: (batch + 1,) int32, where packed queries of each sequence begin, in calls with q (total_q, heads,
            head_dim).
        max_seqlen_q: At least the largest number of packed queries of a sequence.
        total_q: Number of packed queries, the rows of q.

    Returns:
        The prefix, whose ``attention`` is called in each layer.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    check_rank("page_table", page_table, 2, "batch x pages")
    batch, width = page_table.shape
    if seqused_k.shape != (batch,):
        raise CallError(f"seqused_k must have shape ({batch},) beside page_table, got {tuple(seqused_k.shape)}")
    if not batch or not width:
        raise CallError(f"page_table must have sequences and pages, got shape {tuple(page_table.shape)}")
    if page_size < 1:
        raise CallError(f"page_size must be at least 1, got {page_size}")
    queries: Tensor | int = seqlen_q
    if cu_seqlens_q is not None:
        if cu_seqlens_q.shape != (batch + 1,):
            raise CallError(f"cu_seqlens_q must have shape ({batch + 1},), got {tuple(cu_seqlens_q.shape)}")
        if max_seqlen_q is None or total_q is None:
            raise CallError("max_seqlen_q and total_q are needed with cu_seqlens_q: the device alone knows its values")
        queries = cu_seqlens_q.diff()
    place = torch.arange(width, dtype=torch.int32, device=page_table.device)
    # Pages that all queries of a sequence see whole; none if it has no queries.
    whole = (seqused_k - queries).clamp(min=0).div(page_size, rounding_mode="floor")
    if cu_seqlens_q is not None:
        whole = torch.where(queries > 0, whole, 0)
    begun = whole > 0
    first = page_table[:, 0]
    alike = (first[:, None] == first) & begun[:, None] & begun
    leader = alike.sum(1).argmax(keepdim=True)  # one of the largest group that has its first page in common
    row = page_table.index_select(0, leader)
    same = (page_table == row) & (place < whole[:, None]) & (place < whole.index_select(0, leader)[:, None])
    matched = same.cumprod(1).sum(1)  # pages that each sequence begins with as the leader does
    saved = matched * ((matched[:, None] <= matched).sum(1) - 1)
    pages = matched.index_select(0, saved.argmax(keepdim=True)) * (saved.amax() > 0)
    has = (matched >= pages) & (pages > 0)
    skipped = torch.where(has, pages, 0)
    own = page_table.gather(1, (place + skipped[:, None]).clamp(max=width - 1))
    outside = ~has
    if cu_seqlens_q is None:
        outside = outside[:, None]
    else:
        at = torch.arange(total_q or 0, dtype=torch.int32, device=page_table.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), at, right=True)
        outside = outside.index_select(0, sequence.clamp(max=batch - 1))
    return SharedPrefix(
        row, (pages * page_size).to(torch.int32), own, (seqused_k - skipped * page_size).to(torch.int32), outside,
        cu_seqlens_q, max_seqlen_q,
    )  # fmt: skip


def _of_own_keys(variant: str | Variant, package: str | None, options: dict[str, Any]) -> set[str]:
    """Names of arguments that only the part of each sequence takes: those of the variant. Raises CallError for one
    whose queries do not see all keys before them, or that has a score."""
    known = find(variant, package).variant
    known.require(_SERVED, "a shared prefix")
    if known.masked and canonical(known.mask) != _CAUSAL:
        raise CallError(f"{known.name}: its mask may hide keys of a shared prefix; allowed: full and causal masks")
    return {*(one.name for one in known.scalars), *(one.name for one in known.tensors)}
