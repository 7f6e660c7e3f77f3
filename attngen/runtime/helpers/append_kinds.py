"""Calls of ``append_kv`` that differ in their numbers of tokens and sequences only, prepared once for all of them."""

from __future__ import annotations

from typing import Any

from attngen.runtime.arguments.keys import PLAIN, note
from attngen.runtime.arguments.kinds import UnlikeError, note_rows, note_scale, table_at, vector_at
from attngen.runtime.arguments.seen import Free, SeenTensors, seen
from attngen.runtime.cache import RecentCache
from attngen.runtime.helpers.append_arguments import FIELDS, Append
from attngen.runtime.helpers.append_kernel import PreparedAppend
from attngen.runtime.helpers.launches import Resized
from attngen.runtime.helpers.operands import MOST
from attngen.runtime.helpers.path import Kind
from attngen.runtime.registry.lookup import registry

#: Sizes that are kept for each kind.
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


def seen_key(call: Append) -> tuple[Any, ...] | None:
    """Key of the tensors by which calls of this call's kind are recognized."""
    k, interleaved = call.k, call.rotary_interleaved
    if type(k) not in PLAIN:
        return None
    try:
        axis, shape = _token_axis(call), k.shape
        many = shape[axis] > 1
    except (IndexError, RuntimeError):
        return None
    return registry.generation, len(shape), axis, many, call.page_layout, interleaved, type(interleaved)


def sizes_of(call: Append) -> tuple[Any, ...]:
    """Sizes, as ``kind_of`` has them, of a call whose tensors are like those of an earlier call of its kind."""
    k, v, k_cache, _, lengths, table, slots, index, starts, _, q, q_out, _, _, _, turned, k_descale, v_descale = call
    axis = _token_axis(call)
    tokens: tuple[int, ...] = (k.shape[axis], v.shape[axis])
    for rows_of in (q, q_out, slots):
        if rows_of is not None:
            tokens += (rows_of.shape[axis],)
    width = stride = -1
    sequences: tuple[int, ...] = () if lengths is None else (lengths.shape[0],)
    if table is not None:
        (rows, width), stride = table.shape, table.stride()[0]
        sequences += (rows,)
    for vector in (index, turned):
        if vector is not None:
            sequences += (vector.shape[0],)
    scales: tuple[tuple[bool, int], ...] = ()
    if k_descale is not None or v_descale is not None:
        pages = None if table is None and slots is None else k_cache.shape[0]
        for scale in (k_descale, v_descale):
            if scale is not None and scale.dim() == 2:
                scales += ((scale.shape[0] != pages, scale.shape[0]),)
    return tokens, sequences, scales, -1 if starts is None else starts.shape[0], width, stride


def kind_of(call: Append) -> Kind | None:
    """Kind of a call, and its sizes: rows of its tensors of tokens, extents of what names sequences and of scales, and
    the columns and the stride of its page table. None if it has no kind."""
    (
        k, v, k_cache, v_cache, lengths, table, slots, index, starts, page_layout, q, q_out, cos, sin, interleaved,
        turned, k_descale, v_descale,
    ) = call  # fmt: skip
    offsets = width = stride = -1
    sequences: tuple[int, ...] = ()
    scales: tuple[tuple[bool, int], ...] = ()
    addresses = [0] * len(FIELDS.tensors)
    try:
        device = k.get_device()
        axis = _token_axis(call)
        key: list[Any] = [
            registry.generation, device, axis, page_layout, interleaved, type(interleaved), lengths is None,
            table is None, slots is None, index is None, starts is None, q is None, q_out is None, cos is None,
            sin is None, turned is None, k_descale is None, v_descale is None,
        ]  # fmt: skip
        addresses[_K], rows = note_rows(key, k, device, axis)
        addresses[_V], of_v = note_rows(key, v, device, axis)
        tokens: tuple[int, ...] = (rows, of_v)
        addresses[_K_CACHE], addresses[_V_CACHE] = note(key, k_cache), note(key, v_cache)
        if q is not None:
            addresses[_Q], rows = note_rows(key, q, device, axis)
            tokens += (rows,)
        if q_out is not None:
            addresses[_Q_OUT], rows = note_rows(key, q_out, device, axis)
            tokens += (rows,)
        if slots is not None:
            addresses[_SLOTS], rows = note_rows(key, slots, device, axis)
            tokens += (rows,)
        if cos is not None or sin is not None:
            addresses[_COS], addresses[_SIN] = note(key, cos), note(key, sin)
        if lengths is not None:
            addresses[_LENGTHS], rows = vector_at(lengths, device)
            sequences += (rows,)
        if table is not None:
            addresses[_TABLE], rows, width, stride = table_at(table, device)
            sequences += (rows,)
        if starts is not None:
            addresses[_STARTS], offsets = vector_at(starts, device)
        for place, vector in ((_INDEX, index), (_TURNED, turned)):
            if vector is not None:
                addresses[place], rows = vector_at(vector, device)
                sequences += (rows,)
        if k_descale is not None or v_descale is not None:
            pages = None if table is None and slots is None else k_cache.shape[0]
            for place, scale in ((_K_DESCALE, k_descale), (_V_DESCALE, v_descale)):
                if scale is not None:
                    addresses[place], of = note_scale(key, scale, pages, device)
                    scales += (of,) if of is not None else ()
    except (UnlikeError, AttributeError, ValueError, IndexError, RuntimeError):  # also other ranks, and no memory
        return None
    return Kind(tuple(key), (tokens, sequences, scales, offsets, width, stride), addresses)


class AppendCalls:
    """What is prepared for all calls of a kind."""

    __slots__ = ("_of_token", "_one", "_packed", "_page_rows", "_seqlen", "kept", "prepared")

    def __init__(self, prepared: PreparedAppend, call: Append) -> None:
        """``call``: the one of the kind for which a launch is ``prepared``."""
        self.prepared = prepared
        #: The launches of sizes that calls had before.
        self.kept: RecentCache[Resized] = RecentCache(_KEPT_SIZES)
        self._packed = call.cu_seqlens is not None
        #: Whether there is a single sequence, of all tokens.
        self._one = not self._packed and (call.packed or call.k.shape[0] == 1)
        self._seqlen = call.k.shape[-3]
        #: Rows of all heads for each token.
        self._of_token = 2 * call.k.shape[-2] + (0 if call.q is None else call.q.shape[-2])
        self._page_rows = call.k_cache.shape[1 if call.page_layout == "NHD" else 2]

    def resized(self, sizes: tuple[Any, ...]) -> Resized | None:
        """The launch of a call of new sizes; None where something about them needs a look."""
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
        resized = self.prepared.resize(
            tokens * self._of_token,
            {
                "tokens": tokens, "batch": batch, "seqlen_new": seqlen, "max_pages": max(width, 0),
                ("page_table", "b"): max(stride, 0),
            },
        )  # fmt: skip
        self.kept.put(sizes, resized)
        return resized
