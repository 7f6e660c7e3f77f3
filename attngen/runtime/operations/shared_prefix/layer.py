"""The layers of a model behind prefixes that requests share, which an engine calls step after step.

The first layer of a step looks at its calls, and layers like it repeat their launches (``attention.layers``), in the
same memory for the results of both parts. So a layer is four launches, or five with several prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attngen.dtypes import CHUNK_BYTES
from attngen.lang.variant import Variant
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.operations.attention.layers import PagedBatch, PagedLayer
from attngen.runtime.operations.merge.arguments import Merge
from attngen.runtime.operations.merge.kernel import MERGES, PreparedMerge
from attngen.runtime.operations.shared_prefix.call import SharedPrefix
from attngen.runtime.operations.shared_prefix.parts import parts_of

if TYPE_CHECKING:
    from attngen.runtime.operations.shared.launches import Resized


class SharedPrefixLayer:
    """The attention of one layer over its pages: what its calls have in common, as ``SharedPrefix.attention`` takes it.

    ``k_descale`` and ``v_descale`` have shape (), or (kv_heads,) with a scale for each KV head. Raises CallError for a
    variant that a shared prefix does not serve.
    """

    __slots__ = ("_given", "_own", "_prefix", "_scales")

    def __init__(
        self, k_pages: Tensor, v_pages: Tensor, *, variant: str | Variant, softmax_scale: float,
        page_layout: str = "NHD", k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        parts = parts_of(variant, None)
        self._prefix, self._own = (
            PagedLayer(
                k_pages, v_pages, variant=each, softmax_scale=softmax_scale, page_layout=page_layout,
                k_descale=k_descale, v_descale=v_descale, arguments=given,
            )
            for each, given in ((parts.prefix, parts.of_prefix(arguments)), (variant, arguments))
        )  # fmt: skip
        options = {"variant": variant, "softmax_scale": softmax_scale, "page_layout": page_layout, **arguments}
        self._given: tuple[Tensor, Tensor, dict[str, Any]] = k_pages, v_pages, options
        self._scales = {"k_descale": k_descale, "v_descale": v_descale}

    def __call__(self, q: Tensor, out: Tensor, prefix: SharedPrefix) -> None:
        """Write the attention of packed queries (tokens, heads, head_dim) to ``out``, whose rows lie one behind the
        other."""
        if not torch_state.on_gpu(q) or not may_repeat(q):
            k_pages, v_pages, options = self._given
            of_all = prefix.own_lengths.shape[0], -1
            scales: dict[str, Any] = {
                name: scale if scale is None or scale.dim() == 0 else scale.expand(of_all)
                for name, scale in self._scales.items()
            }
            prefix.attention(q, k_pages, v_pages, out=out, **options, **scales)
            return
        step = _step_of(prefix, q, out)
        order, given = prefix.rows, q
        if order is not None:
            torch.index_select(q, 0, order, out=step.sorted)
            given = step.sorted
        prefix_lse = self._prefix(given, step.of_prefix, step.prefix, return_lse=True)
        own_lse = self._own(given, step.of_own, step.own, return_lse=True)
        assert prefix_lse is not None
        assert own_lse is not None
        if prefix.outside is not None:
            prefix_lse.masked_fill_(prefix.outside, -math.inf)
        if order is None:
            step.merge(prefix_lse, own_lse, out)
        else:
            step.merge(prefix_lse, own_lse, step.sorted)
            out.index_copy_(0, order, step.sorted)


@dataclass
class _Step:
    """The batches of both parts in a step, and memory for their results, which layers alike share."""

    prefix: PagedBatch
    own: PagedBatch
    of_prefix: Tensor
    of_own: Tensor
    sorted: Tensor
    _lse: Tensor
    _merged: tuple[PreparedMerge, Resized] | None = None

    def merge(self, prefix_lse: Tensor, own_lse: Tensor, out: Tensor) -> None:
        """Merge both parts into ``out``."""
        tensors = self.of_prefix, self.of_own, prefix_lse, own_lse
        ready = self._merged
        if ready is not None:
            merges, sizes = ready
            merges([*(one.data_ptr() for one in tensors), out.data_ptr(), self._lse.data_ptr()], sizes)
            return
        call = Merge(*tensors, "bshd")
        out.copy_(MERGES.run(call)[0])
        repeatable = MERGES.repeatable(call)
        if repeatable is not None and isinstance(repeatable[0], PreparedMerge) and not out.data_ptr() % CHUNK_BYTES:
            self._merged = repeatable[0], repeatable[2]


def _step_of(prefix: SharedPrefix, q: Tensor, out: Tensor) -> _Step:
    key = q.shape, out.shape, out.dtype
    step = prefix.held.get(key)
    if step is None:
        tokens, starts, most = q.shape[0], prefix.cu_seqlens_q, prefix.max_seqlen_q
        assert starts is not None, "queries are packed"
        assert most is not None
        of_both = out.new_empty((2, *out.shape))
        step = prefix.held[key] = _Step(
            PagedBatch(prefix.page_table, prefix.lengths, prefix.starts, tokens, tokens),
            PagedBatch(prefix.own_page_table, prefix.own_lengths, starts, most, tokens),
            of_both[0], of_both[1], torch.empty_like(q) if prefix.rows is not None else q,
            torch.empty(out.shape[1], tokens, dtype=torch.float32, device=out.device),
        )  # fmt: skip
    assert isinstance(step, _Step)
    return step
