"""Calls of ``append_kv`` that differ in their numbers of tokens and sequences only, prepared once for all of them."""

from __future__ import annotations

from attngen.runtime.arguments.keys import note
from attngen.runtime.arguments.kinds import (
    UnlikeError,
    by_page,
    note_rows,
    note_scale,
    rows_of_scales_fit,
    table_at,
    vector_at,
)
from attngen.runtime.arguments.seen import Free, SeenTensors, seen
from attngen.runtime.cache import RecentCache
from attngen.runtime.operations.append.arguments import FIELDS, Append
from attngen.runtime.operations.append.kernel import PreparedAppend
from attngen.runtime.operations.shared.launches import Resized
from attngen.runtime.operations.shared.operands import MOST
from attngen.runtime.operations.shared.path import Kind
from attngen.runtime.registry.lookup import registry

#: Sizes that are kept for each kind. Not measured: a bound of memory.
_KEPT_SIZES = 1024

#: Places of tensors among the addresses of a call.
(
    _K, _V, _K_CACHE, _V_CACHE, _LENGTHS, _TABLE, _SLOTS, _INDEX, _STARTS, _Q, _Q_OUT, _COS, _SIN, _TURNED, _K_DESCALE,
    _V_DESCALE,
) = range(len(FIELDS.tensors))  # fmt: skip


#: Places of vectors of int32 among the addresses, and the fields of all tensors in the record.
_VECTORS = frozenset({_LENGTHS, _TABLE, _INDEX, _STARTS, _TURNED})
_FIELDS = tuple(map(Append._fields.index, FIELDS.tensors))


#: Places of tensors that have rows of tokens.
_TOKENS = (_K, _V, _Q, _Q_OUT, _SLOTS)


def _token_axis(call: Append) -> int:
    """The axis that counts tokens: the first, or the second if there is a single sequence with an axis of its own."""
    shape = call.k.shape
    return 1 if shape[0] == 1 and len(shape) == 4 and call.cu_seqlens is None else 0


def seen_tensors(call: Append) -> SeenTensors | None:
    """The tensors by which calls of this call's kind are recognized; None where they cannot be."""
    axis, first = _token_axis(call), ((0,), ())
    many = call.k.shape[axis] > 1
    # the stride of the only sequence is arbitrary
    free: dict[int, Free] = dict.fromkeys(_TOKENS, ((axis,) if many else (), (0,) if axis else ()))
    free |= dict.fromkeys((_LENGTHS, _INDEX, _STARTS, _TURNED), first) | {_TABLE: ((0, 1), (0,))}
    pages = None if call.page_table is None and call.slots is None else call.k_cache.shape[0]
    for place, scale in ((_K_DESCALE, call.k_descale), (_V_DESCALE, call.v_descale)):
        if scale is not None and scale.dim() == 2 and scale.shape[0] not in (1, pages):
            free[place] = first
    return seen(call, (), _FIELDS, len(_FIELDS), _VECTORS, free)


_NOT_OF_PAGES = False, False


def seen_key(call: Append) -> tuple[object, ...] | None:
    """Key of the tensors by which calls of this call's kind are recognized."""
    k, interleaved = call.k, call.rotary_interleaved
    try:
        one = k.shape[0] == 1
        of_pages: tuple[bool, ...] = _NOT_OF_PAGES
        if call.k_descale is not None or call.v_descale is not None:
            pages = None if call.page_table is None and call.slots is None else call.k_cache.shape[0]
            of_pages = by_page((call.k_descale, call.v_descale), pages)
    except (AttributeError, IndexError, RuntimeError):
        return None
    return registry.generation, one, call.page_layout, interleaved, type(interleaved), of_pages


def sizes_of(call: Append, axis: int) -> tuple[object, ...]:
    """All that calls of a kind differ in beside addresses, as a key of numbers; ``axis`` counts tokens."""
    k, v, _, _, lengths, table, slots, index, starts, _, q, q_out, _, _, _, turned, k_scale, v_scale = call
    sizes: tuple[object, ...] = (
        k.shape[axis], v.shape[axis], -1 if lengths is None else lengths.shape[0],
        -1 if slots is None else slots.shape[axis], -1 if starts is None else starts.shape[0],
    )  # fmt: skip
    if table is not None:
        sizes += (*table.shape, table.stride(0))
    if q is not None or index is not None:
        sizes += tuple([None if one is None else one.shape for one in (q, q_out, index, turned)])
    if k_scale is not None or v_scale is not None:
        sizes += tuple([None if one is None else one.shape for one in (k_scale, v_scale)])
    return sizes


def kind_of(call: Append) -> Kind | None:
    """Kind of a call; None if it has none."""
    (
        k, v, k_cache, v_cache, lengths, table, slots, index, starts, page_layout, q, q_out, cos, sin, interleaved,
        turned, k_descale, v_descale,
    ) = call  # fmt: skip
    addresses = [0] * len(FIELDS.tensors)
    try:
        device = k.get_device()
        axis = _token_axis(call)
        key: list[object] = [
            registry.generation, device, axis, page_layout, interleaved, type(interleaved), lengths is None,
            table is None, slots is None, index is None, starts is None, q is None, q_out is None, cos is None,
            sin is None, turned is None, k_descale is None, v_descale is None,
        ]  # fmt: skip
        for place, rows in ((_K, k), (_V, v), (_Q, q), (_Q_OUT, q_out), (_SLOTS, slots)):
            if rows is not None:
                addresses[place] = note_rows(key, rows, device, axis)
        addresses[_K_CACHE], addresses[_V_CACHE] = note(key, k_cache), note(key, v_cache)
        if cos is not None or sin is not None:
            addresses[_COS], addresses[_SIN] = note(key, cos), note(key, sin)
        if table is not None:
            addresses[_TABLE] = table_at(table, device)
        for place, vector in ((_LENGTHS, lengths), (_STARTS, starts), (_INDEX, index), (_TURNED, turned)):
            if vector is not None:
                addresses[place] = vector_at(vector, device)
        pages = None if table is None and slots is None else k_cache.shape[0]
        for place, scale in ((_K_DESCALE, k_descale), (_V_DESCALE, v_descale)):
            if scale is not None:
                addresses[place] = note_scale(key, scale, pages, device)
    except (UnlikeError, AttributeError, ValueError, IndexError, RuntimeError):  # also other ranks, and no memory
        return None
    return Kind(tuple(key), addresses)


class AppendCalls:
    """Prepared launches for all append calls of a kind."""

    __slots__ = ("_axis", "_kept", "_of_token", "_one", "_packed", "_page_rows", "_seqlen", "prepared")

    def __init__(self, prepared: PreparedAppend, call: Append) -> None:
        """``call``: the one of the kind for which a launch is ``prepared``."""
        self.prepared = prepared
        #: The launches of sizes that calls had before.
        self._kept: RecentCache[Resized] = RecentCache(_KEPT_SIZES)
        self._packed, self._axis = call.cu_seqlens is not None, _token_axis(call)
        #: Whether there is a single sequence, of all tokens.
        self._one = not self._packed and (call.packed or call.k.shape[0] == 1)
        self._seqlen = call.k.shape[-3]
        #: Rows of all heads for each token.
        self._of_token = 2 * call.k.shape[-2] + (0 if call.q is None else call.q.shape[-2])
        self._page_rows = call.k_cache.shape[1 if call.page_layout == "NHD" else 2]

    def ready(self, call: Append) -> Resized | None:
        """The launch of a call of the kind, kept for others of the same sizes; None where something about its sizes
        needs a look."""
        sizes = sizes_of(call, self._axis)
        known = self._kept[sizes]
        if known is None:
            known = self._resized(call)
            if known is not None:
                self._kept.put(sizes, known)
        return known

    def _resized(self, call: Append) -> Resized | None:
        k, v, k_cache, _, lengths, table, slots, index, starts, _, q, q_out, _, _, _, turned, k_scale, v_scale = call
        axis = self._axis
        count = k.shape[axis]
        for rows in (v, q, q_out, slots):
            if rows is not None and rows.shape[axis] != count:
                return None
        batch = 1 if self._one else count if starts is None else starts.shape[0] - 1
        for vector in (lengths, table, index, turned):
            if vector is not None and vector.shape[0] != batch:
                return None
        width = stride = 0
        if table is not None:
            width, stride = table.shape[1], table.stride(0)
        tokens, seqlen = (count, count) if self._packed or self._one else (count * self._seqlen, self._seqlen)
        if not (count > 0 and batch > 0) or (tokens + 1024) * self._of_token > MOST or width * self._page_rows > MOST:
            return None
        if k_scale is not None or v_scale is not None:
            pages = None if table is None and slots is None else k_cache.shape[0]
            if not rows_of_scales_fit((k_scale, v_scale), pages, batch):
                return None
        return self.prepared.resize(
            tokens * self._of_token,
            {
                "tokens": tokens, "batch": batch, "seqlen_new": seqlen, "max_pages": width,
                ("page_table", "b"): stride,
            },
        )  # fmt: skip
