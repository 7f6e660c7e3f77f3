"""Calls of ``append_kv`` that differ in their numbers of tokens and sequences only, prepared once for all of them."""

from __future__ import annotations

from typing import Any

import torch

from attngen.runtime.arguments.keys import PLAIN, note
from attngen.runtime.arguments.kinds import UnlikeError, note_rows, note_scale, note_table, note_vector
from attngen.runtime.cache import RecentCache
from attngen.runtime.helpers.append_arguments import FIELDS, Append
from attngen.runtime.helpers.append_kernel import PreparedAppend
from attngen.runtime.helpers.launches import Resized
from attngen.runtime.helpers.operands import MOST
from attngen.runtime.helpers.path import Kind
from attngen.runtime.registry.lookup import registry

#: Sizes that are kept for each kind.
_KEPT_SIZES = 1024

_PLACES = {name: place for place, name in enumerate(FIELDS.tensors)}
_TOKENS = [(name, _PLACES[name]) for name in ("k", "v", "q", "q_out")]
_VECTORS = [(name, _PLACES[name]) for name in ("cache_seqlens", "batch_index", "rotary_offsets")]
_CACHES = [(name, _PLACES[name]) for name in ("k_cache", "v_cache", "rotary_cos", "rotary_sin")]
_SCALES = [(name, _PLACES[name]) for name in ("k_descale", "v_descale")]


def kind_of(call: Append) -> Kind | None:
    """Kind of a call, and its sizes: rows of its tensors of tokens, extents of what names sequences and of scales, and
    the columns and the stride of its page table. None if it has no kind."""
    key: list[Any] = [registry.generation, call.page_layout, call.rotary_interleaved, type(call.rotary_interleaved)]
    addresses = [0] * len(FIELDS.tensors)
    tokens: list[int] = []
    sequences: list[int] = []
    scales: list[tuple[bool, int]] = []
    offsets = width = stride = -1
    try:
        for name, place in _TOKENS:
            tensor = getattr(call, name)
            key.append(tensor is None)
            if tensor is not None:
                addresses[place], rows = _note_tokens(key, tensor)
                tokens.append(rows)
        for name, place in _CACHES:
            tensor = getattr(call, name)
            key.append(tensor is None)
            if tensor is not None:
                addresses[place] = note(key, tensor)
        for name, place in _VECTORS:
            vector = getattr(call, name)
            key.append(vector is None)
            if vector is not None:
                addresses[place], length = note_vector(key, vector)
                sequences.append(length)
        key += (call.cu_seqlens is None, call.page_table is None, call.slots is None)
        if call.cu_seqlens is not None:
            addresses[_PLACES["cu_seqlens"]], offsets = note_vector(key, call.cu_seqlens)
        if call.page_table is not None:
            addresses[_PLACES["page_table"]], rows, width, stride = note_table(key, call.page_table)
            sequences.append(rows)
        if call.slots is not None:
            addresses[_PLACES["slots"]], rows = _note_tokens(key, call.slots)
            tokens.append(rows)
        if call.k_descale is not None or call.v_descale is not None:
            pages = None if call.page_table is None and call.slots is None else call.k_cache.shape[0]
            for name, place in _SCALES:
                scale = getattr(call, name)
                key.append(scale is None)
                if scale is not None:
                    addresses[place], of = note_scale(key, scale, pages)
                    scales += [of] if of is not None else []
    except (UnlikeError, ValueError, IndexError, RuntimeError):  # also tensors of another rank, and without memory
        return None
    return Kind(tuple(key), (tuple(tokens), tuple(sequences), tuple(scales), offsets, width, stride), addresses)


def _note_tokens(key: list[Any], tensor: Any) -> tuple[int, int]:
    """As ``note_rows``, and of tensors of one sequence the extent of its tokens."""
    if type(tensor) not in PLAIN:
        raise UnlikeError
    shape = tensor.shape
    if shape[0] != 1 or len(shape) not in (2, 4):
        return note_rows(key, tensor)
    _, rows, *rest = shape
    address: int = tensor.data_ptr()
    key += (
        "one", tensor.dtype, *rest, tensor.stride()[1:], tensor.get_device(), address & 15, tensor.is_neg(), rows > 1,
        not address, tensor.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    return address, rows


class AppendCalls:
    """What is prepared for all calls of a kind."""

    __slots__ = ("_of_token", "_one", "_packed", "_page_rows", "_seqlen", "_sized", "prepared")

    def __init__(self, prepared: PreparedAppend, call: Append) -> None:
        """``call``: the one of the kind for which a launch is ``prepared``."""
        self.prepared = prepared
        self._sized: RecentCache[Resized] = RecentCache(_KEPT_SIZES)
        self._packed = call.cu_seqlens is not None
        self._one = not self._packed and call.k.shape[0] == 1
        self._seqlen = call.k.shape[-3]
        #: Rows of all heads for each token.
        self._of_token = 2 * call.k.shape[-2] + (0 if call.q is None else call.q.shape[-2])
        self._page_rows = call.k_cache.shape[1 if call.page_layout == "NHD" else 2]

    def resized(self, sizes: tuple[Any, ...]) -> Resized | None:
        """The launch of a call of these sizes; None where something about them needs a look."""
        known = self._sized[sizes]
        if known is not None:
            return known
        rows, sequences, scales, offsets, width, stride = sizes
        count = rows[0]
        batch = offsets - 1 if self._packed else 1 if self._one else count
        if not (count > 0 and batch > 0) or rows.count(count) != len(rows) or sequences.count(batch) != len(sequences):
            return None
        if any((number == batch) is not same for same, number in scales):
            return None
        tokens, seqlen = (count, count) if self._packed or self._one else (count * self._seqlen, self._seqlen)
        if (tokens + 1024) * self._of_token > MOST or width * self._page_rows > MOST:
            return None
        known = self.prepared.resize(
            tokens * self._of_token,
            {
                "tokens": tokens, "batch": batch, "seqlen_new": seqlen, "max_pages": max(width, 0),
                ("page_table", "b"): max(stride, 0),
            },
        )  # fmt: skip
        self._sized.put(sizes, known)
        return known
