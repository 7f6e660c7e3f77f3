"""The forward and the backward of one rank, which computes while keys and their gradients are exchanged.

They overlap in one of two ways. By rows: rows whose keys all lie on the rank are computed first, the others once their
keys have arrived; in the backward the others come first, and the gradients of their keys return meanwhile. By heads:
the keys of few KV heads are exchanged first, and those of the others arrive while these are computed. All ranks
overlap in the same way, since they enter the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.assembly import Assembly
from attngen.parallel.direct import MOST_RUNS, DirectTransfer
from attngen.parallel.gathers import Gather, Rows, copy, in_pieces, of_each, side_by_side, widths_of
from attngen.parallel.groups import GroupReference
from attngen.parallel.overlap import first_group
from attngen.parallel.routes import Needs
from attngen.parallel.segments import RowSegments
from attngen.parallel.stages import CallOptions, HeadGroup, RowSelection, Stage
from attngen.parallel.streams import Streams
from attngen.parallel.transfers import PendingTransfer, Transfer, head_start

#: Most calls that segments of a forward are cut into, and the least rows of a segment that is a call of its own.
#: Not measured.
_MOST_CALLS, _LONG = 3, 512

#: Values of a stage's call, from what the caller passed.
Values = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class RankAttention:
    """Calls of one rank, in two stages, and its exchanges.

    ``local``: the rows that see only the rank's own keys, of which the call gets ``local_keys[1]`` from number
    ``local_keys[0]`` on. ``remote``: the other rows, which see the keys of ``assembly``, own and received ones. Either
    may be None. ``by_heads``: keys travel in two groups of heads, and their gradients return in three.
    """

    group: GroupReference
    transfer: Transfer
    assembly: Assembly
    remote: Stage | None
    local: Stage | None = None
    local_keys: tuple[int, int] = (0, 0)
    by_heads: bool = False
    forward_groups: int = 1  # groups of heads in which keys of a forward pass travel
    direct: DirectTransfer | None = None  # how keys travel by heads, if not by a collective
    exchanges: bool = True  # whether any rank sends anything
    keeps: bool = False  # whether the backward gets the keys of the forward, on all ranks
    #: The calls of a forward over ``remote``, and over ``local``: stages, the first of their keys and how many.
    forwards: tuple[tuple[Stage, int, int], ...] = ()
    local_forwards: tuple[tuple[Stage, int, int], ...] = ()

    def kept_shapes(self, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what ``forward`` keeps."""
        count = self._key_groups(q[2], k[2])[0].kv_heads[1]
        return [(k[0], self.assembly.rows, count * (k[3] + v[3]))] if self.keeps else []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: CallOptions, *, lse: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output, log-sum-exp and the keys to keep for the backward. q, k and v are (batch, rows, heads, head_dim)."""
        batch, held, heads, _ = q.shape
        out = q.new_empty((batch, held, heads, v.shape[3]))
        sums = torch.empty((batch, heads, held), dtype=_sums_dtype(q), device=q.device) if lse else None
        keys = self._exchanged(k, v, self._forward_groups(heads, k.shape[2]))
        # Calls alternate between two streams, so that one starts while the last blocks of another still run. The packed
        # call of ``local`` may also write zeros to rows of ``remote`` that lie between its own. These are then stored
        # after it: where kernels write them in place, by running these on the same stream, else by copying the result
        # at the end.
        in_order = any(stage.covers_others for stage, _, _ in self.local_forwards)
        copies: list[Callable[[], None]] = []
        with Streams(q.device) as streams:
            with streams.copying():
                for each in keys:
                    each.put_own()
            if self.exchanges and self.local_forwards:
                head_start(q.device)
            for stage, start, count in self.local_forwards:
                with streams.attention(stage.work * heads):
                    own_k, own_v = (x.narrow(1, start, count) for x in (k, v))
                    every = _all(heads, k.shape[2])
                    copies.append(stage.forward(q, own_k, own_v, out, sums, every, values, options))
            for each in keys:
                with streams.copying():
                    each.put_received()
                    if each is not keys[-1]:  # the next exchange starts when this one ends
                        head_start(q.device)
                    assembled = streams.event()
                for stage, start, count in self.forwards:
                    work = stage.work * each.group.heads[1]
                    with streams.attention(work, assembled, same_lane=in_order and stage.rows.is_run):
                        stage_k, stage_v = each.part(start, count)
                        copies.append(stage.forward(q, stage_k, stage_v, out, sums, each.group, values, options))
        # Copies come last: one before a kernel would wait until the kernel of the other stream leaves a multiprocessor.
        for copy_rows in copies:
            copy_rows()
        return out, sums, [keys[0].room] if keep and self.keeps else []

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        kept: Sequence[Tensor], values: Mapping[str, Any], asked: Sequence[str], options: CallOptions,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k and v, and of the tensors ``asked``, in float32."""
        heads, kv_heads = q.shape[2], k.shape[2]
        first = first_group(heads, kv_heads)
        head_groups = _head_groups(heads, kv_heads, (first, -1, first) if self.by_heads else (-1,))
        # Keys travel in two collectives, also for three groups of gradients: behind a third one, which may still wait
        # for other ranks, the first collective of gradients would start only after the next kernel.
        key_groups = self._key_groups(heads, kv_heads)
        sent = self._exchanged(k, v, key_groups[len(kept) :])
        rooms = [*kept, *(each.room for each in sent)]
        own: dict[str, Tensor] = {
            name: torch.zeros_like(values[name], dtype=_sums_dtype(q), memory_format=torch.contiguous_format)
            for name in asked
        }
        at_once = len(head_groups) == 1 and self.local is None and self.remote is not None and self.remote.rows.whole
        dq = None if at_once else torch.empty_like(q, memory_format=torch.contiguous_format)
        # The rows of ``local`` may have those of ``remote`` between them, which are then copied after it.
        last = self.local is not None and (self.local.rows.whole or self.local.covers_others)
        whole = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
        used: list[Any] = []  # tensors that the stream of copies reads live until the end
        # Copies and sums are enqueued after the next kernel, so that they run while its last blocks do, and after what
        # that one's gradients are sent from: the collective goes first.
        later: Callable[[Any], None] = _nothing
        with Streams(q.device) as streams:
            with streams.copying():
                for each in sent:
                    each.put_own()
            if sent:
                head_start(q.device)
            assembled: list[Any] = [None] * len(kept)
            for each in sent:
                with streams.copying():
                    each.put_received()
                    assembled.append(streams.event())
            for head_group in head_groups:
                number = next(n for n, each in enumerate(key_groups) if head_group.kv_heads[0] < sum(each.kv_heads))
                streams.wait(assembled[number])
                head_k, head_v = (
                    head_group.among(x, key_groups[number]) for x in _split(rooms[number], k, v, key_groups[number])
                )
                d_remote = None
                if self.remote is not None:
                    d_remote, dk, dv, d_own = self.remote.backward(
                        q, head_k, head_v, out, lse, dout, dlse, head_group, values, asked, options,
                        (None if last else dq, None, None),
                    )  # fmt: skip
                    head_group.add(self.remote.variant, own, d_own)
                else:
                    dk, dv = torch.zeros_like(head_k), torch.zeros_like(head_v)
                pending = self.transfer.start_back(self.assembly.back(dk, dv), self.group())
                used.append((d_remote, dk, dv, pending))
                put = None if last or dq is None or d_remote is None else (head_group.of(dq), d_remote)
                follows = later is not _nothing or head_group is not head_groups[-1] or self.local is not None
                if self.exchanges and follows:
                    head_start(q.device)  # for the collective, before sums and the next kernel
                started = streams.event()
                later(started)
                later = partial(self._copy_and_add, streams, put, whole, head_group, dk, dv, pending)
            if self.local is not None:
                own_k, own_v, *places = (x.narrow(1, *self.local_keys) for x in (k, v, *whole))
                every = _all(heads, kv_heads)
                d_local, *d_keys, d_own = self.local.backward(
                    q, own_k, own_v, out, lse, dout, dlse, every, values, asked, options,
                    (None if self.local.rows.whole else dq, *places),
                )  # fmt: skip
                every.add(self.local.variant, own, d_own)
                later(started)
                whole = self._of_own_rows(whole, d_keys)
                self._add_gradients(whole, head_group, dk, dv, pending)
                if self.local.rows.whole:
                    dq = d_local
                elif dq is not None:
                    self.local.rows.put(dq, d_local, 1)
                if last and dq is not None and d_remote is not None and self.remote is not None:
                    self.remote.rows.put(dq, d_remote, 1)
            else:
                later(started)
        return d_remote if dq is None else dq, whole[0], whole[1], own

    def _key_groups(self, heads: int, kv_heads: int) -> tuple[HeadGroup, ...]:
        """The heads whose keys travel together in a backward."""
        return _head_groups(heads, kv_heads, (first_group(heads, kv_heads), -1) if self.by_heads else (-1,))

    def _forward_groups(self, heads: int, kv_heads: int) -> tuple[HeadGroup, ...]:
        """The heads whose keys travel together in a forward, in the first group those of a backward's."""
        if self.forward_groups == 1:
            return _head_groups(heads, kv_heads, (-1,))
        first = first_group(heads, kv_heads)
        later = max(min(self.forward_groups - 1, kv_heads - first), 1)
        ends = [(kv_heads - first) * n // later for n in range(later + 1)]
        return _head_groups(heads, kv_heads, (first, *(b - a for a, b in pairwise(ends[:-1])), -1))

    def _exchanged(self, k: Tensor, v: Tensor, key_groups: Sequence[HeadGroup]) -> list[_GatheredKeys]:
        """The keys of each group of heads, whose exchanges are started."""
        k, v = in_pieces(k), in_pieces(v)
        shared = None if self.by_heads or not key_groups else self.assembly.room(k, v)
        keys: list[_GatheredKeys] = []
        for key_group in key_groups:
            if keys:  # so that the exchange before begins, which packing more rows would delay
                head_start(k.device)
            keys.append(self._start(k, v, key_group, shared))
        if shared is not None:
            keys[0].own = self.assembly.own_rows(shared, k, v)
        return keys

    def _copy_and_add(
        self, streams: Streams, put: tuple[Tensor, Tensor] | None, whole: Sequence[Tensor], head_group: HeadGroup,
        dk: Tensor, dv: Tensor, pending: PendingTransfer, after: Any,
    ) -> None:  # fmt: skip
        """Copy the gradients of rows of ``remote`` to their places, and without ``local`` add up those of keys, after
        an event."""
        with streams.copying(after):
            if put is not None and self.remote is not None:
                self.remote.rows.put(*put, 1)
            if self.local is None:
                self._add_gradients(whole, head_group, dk, dv, pending)

    def _add_gradients(
        self, whole: Sequence[Tensor], head_group: HeadGroup, dk: Tensor, dv: Tensor, pending: PendingTransfer
    ) -> None:
        """Add up the gradients of the rank's own k and v, of some heads: ``dk`` and ``dv`` of ``remote``, those that
        come back from other ranks, and with ``local`` what ``whole`` holds already."""
        own_k, own_v = (head_group.of_keys(x) for x in whole)
        widths = widths_of(own_k, own_v)
        returned = pending.wait()
        if self.transfer.gathers:  # own rows are among those that come back
            for place, total in zip((own_k, own_v), self.transfer.summed(returned).split(widths, dim=2), strict=True):
                copy(place.transpose(0, 1), total.unflatten(2, place.shape[2:]))
            return
        places = [Rows.placed(own_k), Rows.placed(own_v)]
        self._sums(places, of_each(dk, dv), side_by_side(returned, widths), *([] if self.local is None else [places]))

    def _of_own_rows(self, whole: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``local`` among those of all own keys, (batch, rows, heads, head_dim), which else are 0."""
        begin, count = self.local_keys
        if count == self.transfer.held:
            return list(gradients)
        for x, gradient in zip(whole, gradients, strict=True):
            x.narrow(1, 0, begin).zero_()
            place = x.narrow(1, begin, count)
            if place.data_ptr() != gradient.data_ptr():
                copy(place, gradient)
            x.narrow(1, begin + count, self.transfer.held - begin - count).zero_()
        return whole

    @cached_property
    def _sums(self) -> Gather:
        """Gradients of own rows as keys: of the keys of ``remote``, those that came back, and with ``local`` what is
        there already, where one of the others is added to it."""
        (rows, keys), sent = self.assembly.own, self.transfer.send
        first, second = self.assembly.rows, self.assembly.rows + len(sent)
        listed: tuple[np.ndarray, ...] = (keys, first + np.arange(len(sent)))
        if self.local is None:
            return Gather(self.transfer.held, np.concatenate([rows, sent]), np.concatenate(listed))
        added = np.union1d(rows, sent)
        of_added = [np.arange(len(added)), *(np.searchsorted(added, each) for each in (rows, sent))]
        return Gather(len(added), np.concatenate(of_added), np.concatenate([second + added, *listed]), added)

    def _start(self, k: Tensor, v: Tensor, head_group: HeadGroup, shared: Tensor | None) -> _GatheredKeys:
        """The keys of some heads, whose exchange is started: in the part of these heads of ``shared``, or in a tensor
        of their own."""
        of_group = head_group.of_keys(k), head_group.of_keys(v)
        widths, head_dims = widths_of(*of_group), (k.shape[3], v.shape[3])
        if shared is not None:
            first, (width, _) = head_group.kv_heads[0], widths_of(k, v)
            columns = first * k.shape[3], width + first * v.shape[3]
            place = self.assembly.place(shared) if head_group.kv_heads[1] == k.shape[2] else None
            pending = self.transfer.start(*of_group, self.group(), place)
            put = None if place is not None else partial(self.assembly.put_received, shared, columns, widths)
            return _GatheredKeys(head_group, shared, columns, head_dims, pending, put)
        room = self.assembly.room(*of_group)
        put_own = self.assembly.own_rows(room, *of_group)
        columns = 0, widths[0]
        if self.direct is not None and len(k) * self.direct.most <= MOST_RUNS:
            put_own()
            pending = self.direct.start(room, *of_group, self.group())
            return _GatheredKeys(
                head_group, room, columns, head_dims, pending, partial(self.direct.put_received, room, widths)
            )
        place = self.assembly.place(room)
        pending = self.transfer.start(*of_group, self.group(), place)
        put = None if place is not None else partial(self.assembly.put_received, room, columns, widths)
        return _GatheredKeys(head_group, room, columns, head_dims, pending, put, put_own)


@dataclass
class _GatheredKeys:
    """Keys of some heads that are put together in ``room``, (batch, keys, width): in each row, K of these heads is at
    the first of ``columns`` and V at the second."""

    group: HeadGroup
    room: Tensor
    columns: tuple[int, int]
    head_dims: tuple[int, int]
    pending: PendingTransfer
    put: Callable[[Tensor], None] | None  # what puts rows that arrived there, if they are not received in their places
    own: Callable[[], None] | None = None  # what puts own rows there, perhaps those of other heads, too

    def put_own(self) -> None:
        """Put own rows there."""
        if self.own is not None:
            self.own()

    def put_received(self) -> None:
        """Wait for the rows that arrive, and put them there."""
        received = self.pending.wait()
        if self.put is not None:
            self.put(received)

    def part(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Some of the keys: K and V, (batch, keys, heads, head_dim)."""
        batch, rows, width = self.room.shape
        k, v = (
            self.room.as_strided(
                (batch, count, self.group.kv_heads[1], dim), (rows * width, width, dim, 1), start * width + column
            )
            for column, dim in zip(self.columns, self.head_dims, strict=True)
        )
        return k, v


def _nothing(after: Any) -> None:
    pass


def _sums_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _all(heads: int, kv_heads: int) -> HeadGroup:
    return HeadGroup((0, heads), (0, kv_heads))


@lru_cache(maxsize=256)
def _head_groups(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> tuple[HeadGroup, ...]:
    """Groups of KV heads with their query heads; of the sizes −1 is what is left, and groups of none are left out."""
    fixed = sum(size for size in sizes if size > 0)
    counts = [size if size > 0 else kv_heads - fixed for size in sizes] if kv_heads > fixed else [1] * kv_heads
    group, start, head_groups = heads // kv_heads if kv_heads else 0, 0, []
    for count in counts:
        head_groups.append(HeadGroup((start * group, count * group), (start, count)))
        start += count
    return tuple(head_groups)


def _split(keys: Tensor, k: Tensor, v: Tensor, head_group: HeadGroup) -> tuple[Tensor, Tensor]:
    """K and V, (batch, keys, heads, head_dim), of keys side by side."""
    count = head_group.kv_heads[1]
    width = count * k.shape[3]
    return keys[..., :width].unflatten(2, (count, k.shape[3])), keys[..., width:].unflatten(2, (count, v.shape[3]))


# --- what a rank computes of its rows -----------------------------------------------------------------------


def by_segments(
    needs: Needs, rank: int, group: GroupReference, source: Any, variant: Variant, segments: RowSegments,
    stages: tuple[RowSegments, RowSegments] | None, *, positions: bool, by_heads: bool, forward_groups: int,
    exchanges: bool, keeps: bool,
) -> RankAttention:  # fmt: skip
    """The calls of a rank whose rows are segments. ``stages`` are those whose keys all lie on the rank, and the others,
    if they overlap by rows. Without ``positions``, segments that see the same keys are one sequence."""
    sharding = needs.sharding
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    own, rest = stages if stages is not None else (segments.take(np.zeros(len(segments), dtype=bool)), segments)
    fresh: np.ndarray = np.ones(len(rest), dtype=bool)  # segments whose keys are not those of the segment before
    if not positions:
        fresh[1:] = (rest.lo[1:] != rest.lo[:-1]) | (rest.hi[1:] != rest.hi[:-1])
    keys = _ranges(rest.lo[fresh], rest.hi[fresh])
    assembly = Assembly.of(keys, transfer.places, sharding, held, transfer.received)
    direct = DirectTransfer.of(needs, rank, transfer, assembly) if by_heads and not transfer.gathers else None

    local_stage, local_keys = None, (0, 0)
    local_forwards: tuple[tuple[Stage, int, int], ...] = ()
    if len(own):
        first, low = sharding.local(own.begin), sharding.local(own.lo)
        last: np.ndarray = sharding.local(own.end - 1) + 1
        high: np.ndarray = sharding.local(own.hi - 1) + 1
        start, key = int(first[0]), int(low[0])
        lengths = _with_gaps(first - start, last - start, low - key, high - key)
        rows = RowSelection(np.arange(start, int(last[-1])), held)
        local_keys = key, int(high[-1]) - key
        local_stage = Stage(rows, source, variant, lengths if len(lengths[0]) > 1 else None, own.work)
        local_forwards = _forwards(local_stage, *local_keys, held, (first, last - first, low, high - low))
    remote_stage = None
    forwards: tuple[tuple[Stage, int, int], ...] = ()
    if len(rest):
        rows = RowSelection(sharding.local(_ranges(rest.begin, rest.end)), held)
        starts = np.flatnonzero(fresh)
        packed = np.add.reduceat(rest.end - rest.begin, starts), (rest.hi - rest.lo)[starts]
        remote_stage = Stage(rows, source, variant, packed if len(starts) > 1 else None, rest.work)
        counts = rest.hi - rest.lo
        alone = (sharding.local(rest.begin), rest.end - rest.begin, np.cumsum(counts) - counts, counts)
        forwards = _forwards(remote_stage, 0, assembly.rows, held, alone if bool(fresh.all()) else ())
    return RankAttention(
        group, transfer, assembly, remote_stage, local_stage, local_keys, by_heads=by_heads,
        forward_groups=forward_groups, direct=direct, exchanges=exchanges, keeps=keeps,
        forwards=forwards, local_forwards=local_forwards,
    )  # fmt: skip


def _forwards(
    whole: Stage | None, begin: int, keys: int, held: int, segments: Sequence[np.ndarray] = ()
) -> tuple[tuple[Stage, int, int], ...]:
    """The calls of a forward, instead of that of ``whole`` to ``keys`` from number ``begin`` on, those with most work
    first. ``segments``: the first row of each, the number of rows, the first key and the number of keys.

    Few long segments are calls of their own, since kernels of dense rows are faster than those of packed ones. Else
    segments that follow one another are one call, if these are few. Such calls store in place, and to no rows between.
    """
    if whole is None:
        return ()
    if whole.lengths is None or not segments:
        return ((whole, begin, keys),)
    row, rows, key, counts = segments
    if len(row) <= _MOST_CALLS and int(rows.min()) >= _LONG:
        firsts: np.ndarray = np.arange(len(row))
    else:
        after = (row[1:] == row[:-1] + rows[:-1]) & (key[1:] == key[:-1] + counts[:-1])
        firsts = np.flatnonzero(np.append(True, ~after))
        if not 1 < len(firsts) <= _MOST_CALLS:
            return ((whole, begin, keys),)
    calls = []
    for a, b in pairwise([*firsts.tolist(), len(row)]):
        lengths = None if b == a + 1 else (rows[a:b], counts[a:b])
        work = float((rows[a:b] * (counts[a:b] - rows[a:b] / 2)).sum())
        stage = Stage(
            RowSelection(np.arange(row[a], row[b - 1] + rows[b - 1]), held), whole.source, whole.variant, lengths, work
        )
        calls.append((stage, int(key[a]), int(counts[a:b].sum())))
    return tuple(sorted(calls, key=lambda call: -call[0].work))


def by_positions(
    needs: Needs, rank: int, group: GroupReference, source: Any, variant: Variant, *, by_heads: bool,
    forward_groups: int, exchanges: bool, keeps: bool,
) -> RankAttention:  # fmt: skip
    """The calls of a rank whose rows are one call of a variant that reads their positions."""
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    assembly = Assembly.of(needs.key_positions(rank), transfer.places, needs.sharding, held, transfer.received)
    direct = DirectTransfer.of(needs, rank, transfer, assembly) if by_heads and not transfer.gathers else None
    stage = Stage(RowSelection(np.arange(held), held), source, variant) if held else None
    return RankAttention(
        group, transfer, assembly, stage, by_heads=by_heads, forward_groups=forward_groups, direct=direct,
        exchanges=exchanges, keeps=keeps, forwards=_forwards(stage, 0, assembly.rows, held),
    )  # fmt: skip


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The numbers of all ranges, one after the other."""
    counts = end - begin
    return np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))


def _with_gaps(first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of packed sequences, with sequences without keys, and without rows, for what lies between segments."""
    rows: list[int] = []
    keys: list[int] = []
    row = key = 0
    for a, b, c, d in zip(first.tolist(), last.tolist(), low.tolist(), high.tolist(), strict=True):
        if a > row:
            rows, keys = [*rows, a - row], [*keys, 0]
        if c > key:
            rows, keys = [*rows, 0], [*keys, c - key]
        rows, keys = [*rows, b - a], [*keys, d - c]
        row, key = b, d
    return np.array(rows, dtype=np.int64), np.array(keys, dtype=np.int64)
