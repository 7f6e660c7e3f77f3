"""Paged batches that decode some sequences beside whole prompts: two calls, each on the kernel that suits it.

In a single call, a sequence that decodes would have a tile for many queries, and only one query in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attngen.dtypes import DESCALES
from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments import torch_state
from attngen.runtime.arguments.kinds import has_kinds
from attngen.runtime.arguments.shapes import length_of
from attngen.runtime.arguments.torch_state import is_traced, watching
from attngen.runtime.cache import RecentCache
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import registry

#: Whether a batch may be divided for a variant (``_divisible``). The values keep variants alive, whose identity is in
#: the key.
_DIVISIBLE: RecentCache[tuple[bool, Any]] = RecentCache(256)


def attend(
    call: Callable[..., Any], num_decodes: int, q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    seqused_k: Tensor, *, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, out: Tensor | None, **others: Any,
) -> Any:  # fmt: skip
    """Result of a paged ``call`` whose first ``num_decodes`` sequences have at most one query each. Raises
    CallError."""
    tensors = (q, k_pages, v_pages, page_table, seqused_k)
    options = {"max_seqlen_q": max_seqlen_q, "out": out, **others}
    first = length_of("num_decodes", num_decodes)
    if cu_seqlens_q is None:
        raise CallError("num_decodes goes with cu_seqlens_q: without, all sequences have as many queries")
    if not _apart(first, *tensors, cu_seqlens_q, others):
        return call(*tensors, cu_seqlens_q=cu_seqlens_q, **options)
    batch, scales = page_table.shape[0], {name: others.pop(name) for name in DESCALES}
    for part, longest in ((slice(0, first), 1), (slice(first, batch), max_seqlen_q)):
        of_part = {name: _of_sequences(scale, batch, part) for name, scale in scales.items()}
        starts = cu_seqlens_q[part.start : part.stop + 1]
        out = call(
            q, k_pages, v_pages, page_table[part], seqused_k[part], cu_seqlens_q=starts, max_seqlen_q=longest, out=out,
            **of_part, **others,
        )  # fmt: skip
    return out


def _apart(
    first: int, q: Any, k: Any, v: Any, table: Any, used: Any, starts: Any, others: dict[str, Any]
) -> bool:  # fmt: skip
    """Whether to make two calls. If not, the single call reports all errors of its arguments but those of
    ``num_decodes``, which raise here."""
    if not all(isinstance(tensor, Tensor) for tensor in (q, k, v, table, used, starts)) or table.dim() != 2:
        return False
    batch = table.shape[0]
    if first > batch:
        raise CallError(f"num_decodes is {first}, but page_table has {batch} rows")
    if not torch_state.on_gpu(q) or debugging.active() or is_traced(q) or watching():
        if q.device.type == "cpu" or debugging.active():
            _check(first, starts)
        return False
    if not 0 < first < batch != k.shape[0] or used.shape != (batch,) or starts.shape != (batch + 1,):
        return False
    fixed = others["num_splits"] or others["split_size"] or others["return_lse"] or others["backend"] == "reference"
    return not fixed and _divisible(others["variant"], others["package"])


def _check(first: int, starts: Tensor) -> None:
    """Raise CallError unless the ``first`` sequences have at most one query each."""
    for b, count in enumerate(starts[: first + 1].diff().tolist()):
        if count > 1:
            raise CallError(f"num_decodes is {first}, but sequence {b} has {count} queries")


def _divisible(variant: Any, package: Any) -> bool:
    """Whether a part of a batch gives the same results by itself: the variant reads nothing by batch entry, and has no
    dropout, whose random numbers depend on it."""
    named = isinstance(variant, str)
    if not (named or isinstance(variant, Variant)) or not isinstance(package, str | None):
        return False
    key = variant if named else id(variant), package, registry.generation
    known = _DIVISIBLE[key]
    if known is None:
        seen = find(variant, package).variant
        known = has_kinds(seen) and "b" not in seen.uses()[0] and not seen.dropout, variant
        _DIVISIBLE.put(key, known)
    return known[0]


def _of_sequences(scale: Tensor | None, batch: int, part: slice) -> Tensor | None:
    """Scales for a part of the sequences: a slice if each sequence has its own, else all."""
    return scale[part] if scale is not None and scale.dim() == 2 and scale.shape[0] == batch else scale
