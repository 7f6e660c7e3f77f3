"""Paged batches that decode some sequences beside whole prompts: two calls, each on the kernel that suits it.

In a single call, a sequence that decodes would have a tile for many queries, and only one query in it. The two calls
run at the same time, on two streams. Decoding waits for memory, and may leave multiprocessors to prompts. These wait
for the tensor cores, and take all multiprocessors once decoding is done.

A caller may say which sequences decode. If not, both calls are of the whole batch, and each kernel finds its own
sequences by their lengths, which the host does not know. The host estimates how many there are of either kind from the
numbers of sequences and of all queries, and the longest length.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attngen.errors import CallError, NoKernelError
from attngen.lang.variant import Variant
from attngen.runtime.arguments import arrays, torch_state
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import ATTENTION_DTYPES, Results
from attngen.runtime.arguments.given import Given, changer
from attngen.runtime.arguments.guard import may_repeat
from attngen.runtime.arguments.kinds import has_kinds
from attngen.runtime.arguments.paging import FEW_ROWS
from attngen.runtime.arguments.shapes import length_of
from attngen.runtime.cache import RecentCache
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.heads_in_l2 import prompts_of
from attngen.runtime.operations.attention import pairs
from attngen.runtime.operations.attention.beside import SideStream, heads_axis, left_to_prompts
from attngen.runtime.registry.binding import find
from attngen.runtime.registry.lookup import registry
from attngen.runtime.registry.select import against_device

#: Sequences of a batch among which kernels find those that they attend for: 32 bits of 32 lanes.
MOST_LISTED = 1024

#: Some sequences probably decode if the longest one has so many times as many queries as the others on average. Where
#: none does after all, a launch was for nothing. Not measured.
_ALIKE = 4

#: Whether kernels can leave out sequences by their queries, as ``_DIVISIBLE``.
_LEAVE_OUT: RecentCache[tuple[bool, str | Variant]] = RecentCache(256)

#: Whether a batch may be divided for a variant (``_divisible``). The values keep variants alive, whose identity is in
#: the key.
_DIVISIBLE: RecentCache[tuple[bool, str | Variant]] = RecentCache(256)

#: The index vectors of the two parts of a batch: all layers of a step divide the same ones. The key has their
#: addresses, whose memory the values keep alive.
_DIVIDED: RecentCache[tuple[Vectors, Vectors]] = RecentCache(8)

#: The parts of a call: by their sequences, and by the queries of these; and a call into a given output.
_of_sequences = changer("q_descale k_descale v_descale seqused_k cu_seqlens_q page_table max_seqlen_q sm_margin")
_of_few = changer("max_seqlen_q sm_margin most_queries")
_of_many = changer("out least_queries")
_into = changer("out")


class Vectors(NamedTuple):
    """The index vectors of a part of a batch, and its sequences."""

    page_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    sequences: slice


def attend(run: Callable[[Given], Results], num_decodes: int, given: Given, *, whole: bool = False) -> Results:
    """Result of a paged call whose first, or last, ``num_decodes`` sequences have at most one query each. Raises
    CallError. ``whole``: both launches may be of the whole batch, which are recognized as one call."""
    last = type(num_decodes) is int and num_decodes < 0
    count = length_of("num_decodes", -num_decodes if last else num_decodes)
    if given.cu_seqlens_q is None:
        raise CallError("num_decodes goes with cu_seqlens_q: without, all sequences have as many queries")
    if not _apart(count, last, given):
        if not isinstance(given.q, Tensor) and arrays.is_array(given.q):
            return arrays.serve_given(partial(attend, run, num_decodes, whole=whole), given)
        return run(given)
    if whole and _are_unlike(given):
        return _attend_unlike(run, given, lambda one: _attend_apart(run, count, last, one))
    return _attend_apart(run, count, last, given)


def _attend_apart(run: Callable[[Given], Results], count: int, last: bool, given: Given) -> Results:
    """Result of a paged call that may be divided after its first, or before its last, ``count`` sequences."""
    few, many = _divided(count, last, given)
    prompts = _part(given, many, given.max_seqlen_q, given.sm_margin)
    q = given.q
    if not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return run(_into(prompts, run(_part(given, few, 1, given.sm_margin))))
    decodes = _part(given, few, 1, left_to_prompts(q, q.shape[0], given.k, given.layout, count))
    with SideStream(q.get_device()) as side:
        prompts = _into(prompts, run(decodes))
        side.switch()
        return run(prompts)


def few_queries(given: Given) -> int:
    """Most queries of a sequence that decodes in a launch of its own, beside the other sequences of a batch; 0 where a
    single launch probably is as fast, or kernels cannot leave out sequences."""
    q, k, longest = given.q, given.k, given.max_seqlen_q
    table: Tensor = given.page_table
    if given.cu_seqlens_q is None or type(longest) is not int or longest <= FEW_ROWS:
        return 0
    for tensor in (q, k, given.v, table, given.seqused_k, given.cu_seqlens_q):
        if not isinstance(tensor, Tensor):
            return 0
    if table.dim() != 2 or q.dim() != 3 or k.dim() != 4 or not torch_state.on_gpu(q):
        return 0
    batch, rows = table.shape[0], q.shape[0]
    if batch == k.shape[0] or not are_unlike(batch, rows, longest):
        return 0
    if given.num_splits or given.split_size or given.return_lse or given.backend is not None:
        return 0
    if not _leave_out(given):
        return 0
    return max(FEW_ROWS * k.shape[heads_axis(given.layout)] // max(q.shape[1], 1), 1)


def are_unlike(batch: int, rows: int, longest: int) -> bool:
    """Whether some sequences of a batch probably decode beside longer ones, by all rows and the longest sequence."""
    if not 1 < batch <= MOST_LISTED or _ALIKE * (rows - longest) >= longest * (batch - 1):
        return False
    return prompts_of(rows, batch, longest) != batch


def attend_ragged(run: Callable[[Given], Results], given: Given) -> Results:
    """Result of a call that ``may_repeat``, and if it is paged, does not say which sequences decode."""
    return _attend_unlike(run, given, run) if _are_unlike(given) else run(given)


def _are_unlike(given: Given) -> bool:
    """``are_unlike`` for the sequences of a call; not where something that is wrong with it is refused later."""
    longest = given.max_seqlen_q
    table: Tensor = given.page_table
    try:
        return type(longest) is int and are_unlike(table.shape[0], given.q.shape[0], longest)
    except (AttributeError, IndexError):  # no tensor
        return False


def _attend_unlike(run: Callable[[Given], Results], given: Given, otherwise: Callable[[Given], Results]) -> Results:
    """Result of a paged call whose sequences probably are of both kinds; ``otherwise`` where kernels cannot leave out
    sequences."""
    known = pairs.recognized(given)
    if known is not None:
        pair, addresses = known
        table: Tensor = given.page_table
        ready = pair.ready(given, table.shape[0], given.q.shape[0], given.max_seqlen_q)
        if ready is not None:
            return pair.attend(given, addresses, ready)
    few = few_queries(given)
    return attend_by_length(run, few, given) if few else otherwise(given)


def attend_by_length(run: Callable[[Given], Results], few: int, given: Given) -> Results:
    """Result of a paged call in which sequences of at most ``few`` queries decode in a launch of their own."""
    q, longest = given.q, given.max_seqlen_q
    table: Tensor = given.page_table
    batch = table.shape[0]
    assert longest is not None, "``few_queries`` is 0 then"
    try:
        if torch.cuda.is_current_stream_capturing():
            return run(_of_many(given, run(_of_few(given, few, given.sm_margin, few)), few + 1))
        count = batch - prompts_of(q.shape[0], batch, longest)
        decodes = _of_few(given, few, left_to_prompts(q, q.shape[0], given.k, given.layout, count), few)
        with SideStream(q.get_device()) if q.is_cuda else nullcontext() as side:
            prompts = _of_many(given, run(decodes), few + 1)
            if side is not None:
                side.switch()
            result = run(prompts)
        pairs.note(given, few, decodes, prompts)
        return result
    except NoKernelError:  # those that leave out sequences do not take such tensors
        _LEAVE_OUT.put(_kind(given), (False, given.variant))
        return run(given)


def _leave_out(given: Given) -> bool:
    """Whether a batch may be divided, and kernels for both parts can leave out sequences by their queries."""
    q, k, v = given.q, given.k, given.v
    variant: object = given.variant
    package: object = given.package
    if not (isinstance(variant, str | Variant) and isinstance(package, str | None)):
        return False
    key = _kind(given)
    known = _LEAVE_OUT[key]
    if known is None and not _divisible(variant, package):
        known = False, variant
        _LEAVE_OUT.put(key, known)
    if known is None:
        device, driver = q.get_device(), drivers.current()
        dtypes = ATTENTION_DTYPES.get(q.dtype), ATTENTION_DTYPES.get(k.dtype)
        bounds: dict[bool, set[str | None]] = {False: set(), True: set()}
        for kernel in find(variant, package).kernels:
            alike = kernel.layout == "paged" and (kernel.dtype, kernel.dtype_of("k").name) == dtypes
            alike = alike and (kernel.head_dim_qk, kernel.head_dim_v) == (q.shape[-1], v.shape[-1])
            if alike and against_device(kernel, device, driver) is None:
                bounds[kernel.split_kv] |= kernel.main.bounds
        known = "most_queries" in bounds[True] and "least_queries" in bounds[False], variant
        _LEAVE_OUT.put(key, known)
    return known[0]


def _kind(given: Given) -> tuple[object, ...]:
    """Key of the properties that decide whether kernels can leave out sequences."""
    q, k, variant = given.q, given.k, given.variant
    named = variant if isinstance(variant, str) else id(variant)
    return named, given.package, registry.generation, q.dtype, k.dtype, q.shape[-1], given.v.shape[-1], q.get_device()


def _divided(count: int, last: bool, given: Given) -> tuple[Vectors, Vectors]:
    """The index vectors of the sequences that decode, and of the others."""
    table: Tensor = given.page_table
    used: Tensor = given.seqused_k
    starts: Tensor = given.cu_seqlens_q
    key = (
        count, last, table.shape, table.stride(), used.stride(), starts.stride(), table.data_ptr(), used.data_ptr(),
        starts.data_ptr(), table.dtype, used.dtype, starts.dtype, table.get_device(),
    )  # fmt: skip
    known = _DIVIDED[key]
    if known is None:
        batch = table.shape[0]
        border = batch - count if last else count
        parts = [
            Vectors(table[of], used[of], starts[of.start : of.stop + 1], of)
            for of in (slice(0, border), slice(border, batch))
        ]
        known = (parts[1], parts[0]) if last else (parts[0], parts[1])
        _DIVIDED.put(key, known)
    return known


def _part(given: Given, vectors: Vectors, longest: object, margin: int) -> Given:
    """The call of a part of a batch; rows of q and of the output stay where they are."""
    all_pages: Tensor = given.page_table
    batch, (table, used, starts, part) = all_pages.shape[0], vectors
    scales = [_scales_of(scale, batch, part) for scale in (given.q_descale, given.k_descale, given.v_descale)]
    return _of_sequences(given, *scales, used, starts, table, longest, margin)


def _apart(count: int, last: bool, given: Given) -> bool:
    """Whether to make two calls. If not, the single call reports all errors of its arguments but those of
    ``num_decodes``, which raise here."""
    q = given.q
    table: Tensor = given.page_table
    used: Tensor = given.seqused_k
    starts: Tensor = given.cu_seqlens_q
    for tensor in (q, given.k, given.v, table, used, starts):
        if not isinstance(tensor, Tensor):
            return False
    if table.dim() != 2 or q.dim() != 3 or given.k.dim() != 4:
        return False
    batch = table.shape[0]
    if count > batch:
        raise CallError(f"num_decodes is {-count if last else count}, but page_table has {batch} rows")
    if not torch_state.on_gpu(q) or not may_repeat(q):
        if q.device.type == "cpu" or debugging.active():
            _check(count, last, starts)
        return False
    if not 0 < count < batch != given.k.shape[0] or used.shape != (batch,) or starts.shape != (batch + 1,):
        return False
    fixed = given.num_splits or given.split_size or given.return_lse or given.backend == "reference"
    return not fixed and _divisible(given.variant, given.package)


def _check(count: int, last: bool, starts: Tensor) -> None:
    """Raise CallError unless the first, or the last, ``count`` sequences have at most one query each."""
    rows = starts.diff().tolist()
    first = len(rows) - count if last else 0
    for b in range(first, min(first + count, len(rows))):
        if rows[b] > 1:
            raise CallError(f"num_decodes is {-count if last else count}, but sequence {b} has {rows[b]} queries")


def _divisible(variant: str | Variant, package: str | None) -> bool:
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


def _scales_of(scale: object, batch: int, part: slice) -> object:
    """Scales for a part of the sequences: a slice if each sequence has its own, else all."""
    return scale[part] if isinstance(scale, Tensor) and scale.dim() == 2 and scale.shape[0] == batch else scale
