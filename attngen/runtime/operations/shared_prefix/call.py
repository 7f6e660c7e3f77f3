"""The pages that sequences of a batch begin with in common, found on the device, and attention that reads them once.

All queries that share a prefix attend to it as those of one sequence, so that a block has many rows for each key that
it loads; each sequence attends to what it has of its own; and the two results are merged by their log-sum-exps. Sizes
do not depend on what is found: a graph may capture both steps, and the tables may change between its replays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments.shapes import check_rank
from attngen.runtime.operations.attention.entry import attention_paged
from attngen.runtime.operations.merge.call import merge
from attngen.runtime.operations.shared_prefix.parts import PrefixParts, parts_of
from attngen.runtime.operations.shared_prefix.search import find

#: Arguments of ``attention_paged`` that a shared prefix does not take, and why.
_ELSEWHERE = dict.fromkeys(
    ("cu_seqlens_q", "max_seqlen_q", "page_table", "seqused_k"), "goes to attngen.shared_prefix, which finds the prefix"
) | dict.fromkeys(
    ("num_decodes", "num_splits", "split_size"), "is not served, since two launches share the keys of a sequence"
)


@dataclass(frozen=True)
class SharedPrefix:
    """The prefixes that sequences of a batch share, as ``shared_prefix`` finds them; all tensors are on the device.

    Where several may be found, one of no keys stands behind them, for the queries whose sequence has none.
    """

    #: (prefixes, max_pages) int32: the pages of a sequence that has each prefix.
    page_table: Tensor
    #: (prefixes,) int32: keys of each, whole pages; 0 of one that is not there.
    lengths: Tensor
    #: (prefixes,) int64: the number of that sequence.
    leaders: Tensor
    #: (batch, max_pages) int32: the pages that follow the prefix in each sequence; all pages of one without it.
    own_page_table: Tensor
    #: (batch,) int32: keys in these.
    own_lengths: Tensor
    #: (prefixes + 1,) int32: where the queries of each prefix begin.
    starts: Tensor
    #: Where one may be found, (batch, 1) or (total_q,) bool: queries whose sequence does not have it.
    outside: Tensor | None = None
    #: (batch + 1,) int32, where the queries of each sequence begin, and the most of one; None for as many in each.
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    #: Where several prefixes may be found, (batch,) int64: the sequences in the order of their prefixes, in which the
    #: tensors above have them; and (queries of the batch,) int64, the rows of q in this order.
    sequences: Tensor | None = None
    rows: Tensor | None = None
    #: What layers keep for those alike.
    held: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def length(self) -> Tensor:
        """(prefixes,) int32: keys of each prefix that may be found, whole pages; 0 of one that is not there."""
        return self.lengths if self.sequences is None else self.lengths[:-1]

    def update(self, other: SharedPrefix) -> None:
        """Take the values of another one of the same sizes, in place: a graph that reads these tensors reads them."""
        for one in fields(self):
            own, new = getattr(self, one.name), getattr(other, one.name)
            if isinstance(own, Tensor) and isinstance(new, Tensor):
                own.copy_(new)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        variant: str | Variant = "causal",
        softmax_scale: float | None = None,
        page_layout: str = "NHD",
        out: Tensor | None = None,
        return_lse: bool = False,
        backend: str | None = None,
        package: str | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over pages that reads the keys of a prefix once for all sequences that share it.

        The result is that of ``attention_paged`` with the page table and the lengths in which the prefix was found, up
        to rounding: a part is rounded to the dtype of its output before it is merged. There is no backward.

        Args:
            q: (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim), as said when the prefix was found.
            k_pages: As for ``attention_paged``.
            v_pages: As for ``attention_paged``.
            variant: One whose queries see all keys before them, such as ``causal``, ``full`` or ``causal_sink``. The
                keys of the prefix need a kernel of ``full``; with a score, such as that of ``softcap``, one of the same
                variant without mask and sink, named ``softcap_full``. A score may read s, h, hk, and scalars and
                tensors of the variant.
            softmax_scale: As for ``attention_paged``.
            page_layout: As for ``attention_paged``.
            out: Tensor for the output, into which it is copied.
            return_lse: Also return the log-sum-exp, with the sink if the variant's has it.
            backend: As for ``attention_paged``.
            package: As for ``attention_paged``.
            q_descale: Scale of a float8_e4m3fn q, ().
            k_descale: Scales of a float8_e4m3fn cache, as for ``attention_paged``. Of one for each sequence, those that
                share a prefix must have the same.
            v_descale: The same of v.
            **arguments: Scalars and tensors of the variant.

        Returns:
            As ``attention_paged``.

        Raises:
            CallError: The variant has a mask or a score that depends on positions, or q has another form than the
                prefix was found for; and as ``attention_paged``.
            NoKernelError: As ``attention_paged``; also if no kernel takes the keys of the prefix.
        """
        if elsewhere := arguments.keys() & _ELSEWHERE.keys():
            name = min(elsewhere)
            raise CallError(f"{name} {_ELSEWHERE[name]}")
        parts = parts_of(variant, package)
        packed = self.cu_seqlens_q is not None
        if q.dim() != (3 if packed else 4):
            raise CallError(f"q must have {3 if packed else 4} dimensions, as the prefix was found for, got {q.dim()}")
        if q_descale is not None and q_descale.dim():
            raise CallError(f"q_descale must have shape () with a shared prefix, got {tuple(q_descale.shape)}")
        if self.sequences is not None:
            self._check_order(parts)
            q = q.index_select(0, self._order)
        own_scales = [self._of_sequences(scale, k_pages, self.sequences) for scale in (k_descale, v_descale)]
        scales = [self._of_sequences(scale, k_pages, self.leaders) for scale in (k_descale, v_descale)]
        both, shape = (k_pages, v_pages), q.shape
        flat = q if packed else q.reshape(-1, *shape[2:])
        prefix, prefix_lse = attention_paged(
            flat, *both, self.page_table, self.lengths, cu_seqlens_q=self.starts, max_seqlen_q=flat.shape[0],
            variant=parts.prefix, softmax_scale=softmax_scale, page_layout=page_layout, return_lse=True,
            backend=backend, package=package, q_descale=q_descale, k_descale=scales[0], v_descale=scales[1],
            **parts.of_prefix(arguments),
        )  # fmt: skip
        result, lse = attention_paged(
            q, *both, self.own_page_table, self.own_lengths, cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q, variant=variant, softmax_scale=softmax_scale, page_layout=page_layout,
            return_lse=True, backend=backend, package=package, q_descale=q_descale, k_descale=own_scales[0],
            v_descale=own_scales[1], **arguments,
        )  # fmt: skip
        prefix = prefix.view(result.shape)
        if not packed:
            prefix_lse = prefix_lse.view(-1, *shape[:2]).transpose(0, 1)
        if self.outside is not None:
            prefix_lse = prefix_lse.masked_fill(self.outside if packed else self.outside[:, None], -math.inf)
        merged, merged_lse = merge([prefix, result], [prefix_lse, lse])
        if self.sequences is not None:
            merged = (torch.empty_like(merged) if out is None else out).index_copy_(0, self._order, merged)
            if return_lse:
                merged_lse = torch.empty_like(merged_lse).index_copy_(1 if packed else 0, self._order, merged_lse)
        elif out is not None:
            merged = out.copy_(merged)
        return (merged, merged_lse) if return_lse else merged

    @property
    def _order(self) -> Tensor:
        """The rows of q, or its sequences, in the order of their prefixes."""
        order = self.sequences if self.rows is None else self.rows
        assert order is not None, "of several prefixes"
        return order

    def _check_order(self, parts: PrefixParts) -> None:
        """Raise CallError for a variant that tells sequences apart, which have another order here."""
        if parts.by_sequence:
            raise CallError(
                f"{parts.by_sequence}: it reads 'b', and sequences are put in the order of several prefixes; allowed: "
                "with one prefix"
            )

    @staticmethod
    def _of_sequences(scale: Tensor | None, k_pages: Tensor, sequences: Tensor | None) -> Tensor | None:
        """Scales of some sequences, of those of all; one of all of them, or of pages, as it is."""
        if scale is None or sequences is None or scale.dim() < 2 or scale.shape[0] == k_pages.shape[0]:
            return scale
        return scale.index_select(0, sequences)


def shared_prefix(
    page_table: Tensor,
    seqused_k: Tensor,
    page_size: int,
    *,
    prefixes: int = 1,
    seqlen_q: int = 1,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    total_q: int | None = None,
) -> SharedPrefix:
    """Find the prefixes of pages that sequences of a batch share, on the device, without waiting for it.

    One after the other, each among the sequences that have none yet. A sequence that shares many pages with many others
    is compared with these, and the prefix is as long as saves most reads: its pages, times the sequences beyond one
    that have it. The first one saves at least half of what any could. A page belongs to a prefix only if all queries of
    these sequences see all of its keys. Some thirty small operations of torch find each, once for all layers of a step.

    Args:
        page_table: (batch, max_pages) int32, as for ``attention_paged``.
        seqused_k: (batch,) int32, keys of each sequence, including those of its queries.
        page_size: Keys of a page.
        prefixes: The most prefixes that are found, each with sequences of its own. Launches do not depend on how many
            there are.
        seqlen_q: Queries of each sequence, in calls with q (batch, seqlen_q, heads, head_dim).
        cu_seqlens_q: (batch + 1,) int32, where packed queries of each sequence begin, in calls with q (total_q, heads,
            head_dim).
        max_seqlen_q: At least the largest number of packed queries of a sequence.
        total_q: Number of packed queries, the rows of q.

    Returns:
        The prefixes, whose ``attention`` is called in each layer.

    Raises:
        CallError: Arguments are wrong or do not fit each other.
    """
    check_rank("page_table", page_table, 2, "batch x pages")
    batch, width = page_table.shape
    if seqused_k.shape != (batch,):
        raise CallError(f"seqused_k must have shape ({batch},) beside page_table, got {tuple(seqused_k.shape)}")
    if not batch or not width:
        raise CallError(f"page_table must have sequences and pages, got shape {tuple(page_table.shape)}")
    for name, number in (("page_size", page_size), ("prefixes", prefixes)):
        if number < 1:
            raise CallError(f"{name} must be at least 1, got {number}")
    total = batch * seqlen_q
    if cu_seqlens_q is not None:
        if cu_seqlens_q.shape != (batch + 1,):
            raise CallError(f"cu_seqlens_q must have shape ({batch + 1},), got {tuple(cu_seqlens_q.shape)}")
        if max_seqlen_q is None or total_q is None:
            raise CallError("max_seqlen_q and total_q are needed with cu_seqlens_q: the device alone knows its values")
        total = total_q
    queries = torch.full_like(seqused_k, seqlen_q) if cu_seqlens_q is None else cu_seqlens_q.diff()
    # Pages that all queries of a sequence see whole; none if it has no queries.
    whole = (seqused_k - queries).clamp(min=0).div(page_size, rounding_mode="floor")
    leaders, pages, number, skipped = find(page_table, torch.where(queries > 0, whole, 0), prefixes)
    own, sequences, rows, outside = page_table, None, None, None
    if prefixes == 1:
        starts = torch.arange(2, dtype=torch.int32, device=page_table.device) * total
        outside = number > 0
        outside = outside[:, None] if cu_seqlens_q is None else outside.index_select(0, _of_rows(cu_seqlens_q, total))
    else:
        leaders, pages = torch.cat([leaders, leaders[:1]]), pad(pages, (0, 1))
        before = torch.arange(prefixes, dtype=number.dtype, device=number.device)
        ends = ((number <= before[:, None]) * queries).sum(1).to(torch.int32)
        starts = pad(pad(ends, (1, 0)), (0, 1), value=total)
        sequences = number.argsort(stable=True)
        own, seqused_k, skipped = (one.index_select(0, sequences) for one in (page_table, seqused_k, skipped))
        if cu_seqlens_q is not None:
            begins = cu_seqlens_q.index_select(0, sequences)
            cu_seqlens_q = pad(queries.index_select(0, sequences).cumsum(0, dtype=torch.int32), (1, 0))
            at = torch.arange(total, device=number.device)  # rows behind those of all sequences stay there
            moved = (begins - cu_seqlens_q[:-1]).index_select(0, _of_rows(cu_seqlens_q, total))
            rows = at + torch.where(at < cu_seqlens_q[-1], moved, 0)
    place = torch.arange(width, dtype=torch.int32, device=page_table.device)
    return SharedPrefix(
        page_table.index_select(0, leaders), (pages * page_size).to(torch.int32), leaders,
        own.gather(1, (place + skipped[:, None]).clamp(max=width - 1)),
        (seqused_k - skipped * page_size).to(torch.int32), starts, outside, cu_seqlens_q, max_seqlen_q, sequences, rows,
    )  # fmt: skip


def _of_rows(cu_seqlens_q: Tensor, total: int) -> Tensor:
    """The sequence of each of ``total`` rows of packed queries; the last one of rows behind all of them."""
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens_q.device)
    return torch.searchsorted(cu_seqlens_q[1:-1].contiguous(), rows, right=True)
