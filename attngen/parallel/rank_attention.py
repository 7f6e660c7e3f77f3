"""The forward and the backward of one rank, which computes while keys and their gradients are exchanged.

They overlap in one of two ways. By rows: rows whose keys all lie on the rank are computed first, the others once their
keys have arrived; in the backward the others come first, and the gradients of their keys return meanwhile. By heads:
the keys of few KV heads are exchanged first, and those of the others arrive while these are computed. All ranks
overlap in the same way, since they enter the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.assembly import Assembly
from attngen.parallel.exchange import Group
from attngen.parallel.gathers import Gather, copy
from attngen.parallel.routes import Needs
from attngen.parallel.segments import Segments
from attngen.parallel.stages import HeadGroup, Options, Selection, Stage
from attngen.parallel.streams import Streams
from attngen.parallel.transfers import PendingTransfer, Transfer, head_start

#: Most segments of a forward that run as calls of their own, and the least rows of each; more or shorter ones are
#: packed in one call.
_MOST_CALLS, _LONG = 3, 2048

#: Values of a stage's call, from what the caller passed.
Values = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class RankAttention:
    """What one rank computes, in two stages, and what it exchanges.

    ``local``: the rows that see only the rank's own keys, of which the call gets ``local_keys[1]`` from number
    ``local_keys[0]`` on. ``remote``: the other rows, which see the keys of ``assembly``, own and received ones. Either
    may be None. ``by_heads``: keys travel in two groups of heads, and their gradients return in three.
    """

    group: Group
    transfer: Transfer
    assembly: Assembly
    remote: Stage | None
    local: Stage | None = None
    local_keys: tuple[int, int] = (0, 0)
    by_heads: bool = False
    exchanges: bool = True  # whether any rank sends anything
    keeps: bool = False  # whether the backward gets the keys of the forward, on all ranks
    #: The calls of a forward over ``remote``: stages, and the first of their keys and how many.
    forwards: tuple[tuple[Stage, int, int], ...] = ()

    def kept_shapes(self, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what ``forward`` keeps."""
        count = self._key_groups(q[2], k[2])[0].kv_heads[1]
        return [(k[0], self.assembly.rows, count * (k[3] + v[3]))] if self.keeps else []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: Options, *, lse: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output, log-sum-exp and the keys to keep for the backward. q, k and v are (batch, rows, heads, head_dim)."""
        batch, held, heads, _ = q.shape
        out = q.new_empty((batch, held, heads, v.shape[3]))
        sums = torch.empty((batch, heads, held), dtype=_sums_dtype(q), device=q.device) if lse else None
        key_groups = self._key_groups(heads, k.shape[2])
        keys = [self._start(k, v, key_group) for key_group in key_groups]
        # Calls alternate between two streams, so that one starts while the last blocks of another still run. The packed
        # call of ``local`` may also write zeros to rows of ``remote`` that lie between its own. These are then stored
        # after it: if they are one run of rows, which the kernel of ``remote`` writes in place, by running it on the
        # same stream, else by copying its result at the end.
        clears = self.local is not None and self.local.covers_others
        number = int(self.local is not None and not (clears and self.remote is not None and self.remote.rows.is_run))
        copies: list[Callable[[], None]] = []
        with Streams(q.device) as streams:
            with streams.copying():
                for each in keys:
                    each.put_own()
            head_start(q.device) if self.exchanges else None
            if self.local is not None:
                own_k, own_v = (x.narrow(1, *self.local_keys) for x in (k, v))
                copies.append(self.local.forward(q, own_k, own_v, out, sums, _all(heads, k.shape[2]), values, options))
            for key_group, each in zip(key_groups, keys, strict=True):
                with streams.copying():
                    each.put_received()
                    if each is not keys[-1]:  # the next exchange starts when this one ends
                        head_start(q.device)
                    assembled = streams.event()
                group_k, group_v = _split(each.room, k, v, key_group)
                for stage, start, count in self.forwards:
                    with streams.on(number):
                        streams.wait(assembled)
                        stage_k, stage_v = (x.narrow(1, start, count) for x in (group_k, group_v))
                        copies.append(stage.forward(q, stage_k, stage_v, out, sums, key_group, values, options))
                    number += 1
        # Copies come last: one before a kernel would wait until the kernel of the other stream leaves a multiprocessor.
        for copy_rows in copies:
            copy_rows()
        return out, sums, [keys[0].room] if keep and self.keeps else []

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        kept: Sequence[Tensor], values: Mapping[str, Any], asked: Sequence[str], options: Options,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k and v, and of the tensors ``asked``, in float32."""
        heads, kv_heads = q.shape[2], k.shape[2]
        first = _first_group(heads, kv_heads)
        head_groups = _head_groups(heads, kv_heads, (first, -1, first) if self.by_heads else (-1,))
        # Keys travel in two collectives, also for three groups of gradients: behind a third one, which may still wait
        # for other ranks, the first collective of gradients would start only after the next kernel.
        key_groups = self._key_groups(heads, kv_heads)
        sent = [self._start(k, v, key_group) for key_group in key_groups[len(kept) :]]
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
        # Copies and sums are enqueued after the next kernel, so that they run while its last blocks do.
        later: Callable[[], None] = _nothing
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
                        q, head_k, head_v, out, lse, dout, dlse, head_group, values, asked, options
                    )
                    head_group.add(self.remote.variant, own, d_own)
                else:
                    dk, dv = torch.zeros_like(head_k), torch.zeros_like(head_v)
                later()
                pending = self.transfer.start_back(self.assembly.back(dk, dv), self.group)
                used.append((d_remote, dk, dv, pending))
                put = None if last or dq is None or d_remote is None else (head_group.of(dq), d_remote)
                later = partial(self._copy_and_add, streams, streams.event(), put, whole, head_group, dk, dv, pending)
                if self.exchanges and (head_group is not head_groups[-1] or self.local is not None):
                    head_start(q.device)
            if self.local is not None:
                own_k, own_v = (x.narrow(1, *self.local_keys) for x in (k, v))
                every = _all(heads, kv_heads)
                d_local, *d_keys, d_own = self.local.backward(
                    q, own_k, own_v, out, lse, dout, dlse, every, values, asked, options
                )
                every.add(self.local.variant, own, d_own)
                later()
                whole = self._of_own_rows(whole, d_keys)
                self._add_gradients(whole, head_group, dk, dv, pending)
                if self.local.rows.whole:
                    dq = d_local
                elif dq is not None:
                    self.local.rows.put(dq, d_local, 1)
                if last and dq is not None and d_remote is not None and self.remote is not None:
                    self.remote.rows.put(dq, d_remote, 1)
            else:
                later()
        return d_remote if dq is None else dq, whole[0], whole[1], own

    def _key_groups(self, heads: int, kv_heads: int) -> list[HeadGroup]:
        """The heads whose keys travel together."""
        return _head_groups(heads, kv_heads, (_first_group(heads, kv_heads), -1) if self.by_heads else (-1,))

    def _copy_and_add(
        self, streams: Streams, after: Any, put: tuple[Tensor, Tensor] | None, whole: Sequence[Tensor],
        head_group: HeadGroup, dk: Tensor, dv: Tensor, pending: PendingTransfer,
    ) -> None:  # fmt: skip
        """Copy the gradients of rows of ``remote`` to their places, and without ``local`` add up those of keys."""
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
        places = [head_group.of_keys(x).transpose(0, 1) for x in whole]
        widths = [x.shape[2] * x.shape[3] for x in places]
        returned = pending.wait()
        if self.transfer.gathers:  # own rows are among those that come back
            for place, total in zip(places, self.transfer.summed(returned).split(widths, dim=2), strict=True):
                copy(place, total.unflatten(2, place.shape[2:]))
            return
        of_remote = dk.transpose(0, 1), dv.transpose(0, 1)
        back = [x.unflatten(2, place.shape[2:]) for x, place in zip(returned.split(widths, dim=2), places, strict=True)]
        self._sums(places, of_remote, back, *([] if self.local is None else [places]))

    def _of_own_rows(self, whole: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``local`` among those of all own keys, (batch, rows, heads, head_dim), which else are 0."""
        begin, count = self.local_keys
        if count == self.transfer.held:
            return list(gradients)
        for x, gradient in zip(whole, gradients, strict=True):
            x.narrow(1, 0, begin).zero_()
            copy(x.narrow(1, begin, count), gradient)
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

    def _start(self, k: Tensor, v: Tensor, head_group: HeadGroup) -> _Keys:
        """The keys of some heads, whose exchange is started."""
        k, v = (x.transpose(0, 1) for x in (head_group.of_keys(k), head_group.of_keys(v)))
        room = self.assembly.room(k, v)
        place = self.assembly.place(room)
        return _Keys(self.assembly, k, v, room, place is not None, self.transfer.start(k, v, self.group, place))


@dataclass
class _Keys:
    """Keys of some heads that are put together in ``room``, (batch, keys, width), K and V side by side: own rows of k
    and v, (rows, batch, heads, head_dim), and those that arrive, which may be ``in_place``."""

    assembly: Assembly
    k: Tensor
    v: Tensor
    room: Tensor
    in_place: bool
    pending: PendingTransfer

    def put_own(self) -> None:
        """Put own rows there."""
        self.assembly.put_own(self.room, self.k, self.v)

    def put_received(self) -> None:
        """Wait for the rows that arrive, and put them there, unless they are received in their place."""
        received = self.pending.wait()
        if not self.in_place:
            self.assembly.put_received(self.room, self.k, self.v, received)


def _nothing() -> None:
    pass


def _sums_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _all(heads: int, kv_heads: int) -> HeadGroup:
    return HeadGroup((0, heads), (0, kv_heads))


def _first_group(heads: int, kv_heads: int) -> int:
    """KV heads that travel first: those of four heads, fewer of which would leave multiprocessors idle, but at most a
    quarter."""
    return max(min(-(-4 * kv_heads // max(heads, 1)), kv_heads // 4), 1)


def _head_groups(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> list[HeadGroup]:
    """Groups of KV heads with their query heads; of the sizes −1 is what is left, and groups of none are left out."""
    fixed = sum(size for size in sizes if size > 0)
    counts = [size if size > 0 else kv_heads - fixed for size in sizes] if kv_heads > fixed else [1] * kv_heads
    group, start, head_groups = heads // kv_heads if kv_heads else 0, 0, []
    for count in counts:
        head_groups.append(HeadGroup((start * group, count * group), (start, count)))
        start += count
    return head_groups


def _split(keys: Tensor, k: Tensor, v: Tensor, head_group: HeadGroup) -> tuple[Tensor, Tensor]:
    """K and V, (batch, keys, heads, head_dim), of keys side by side."""
    count = head_group.kv_heads[1]
    width = count * k.shape[3]
    return keys[..., :width].unflatten(2, (count, k.shape[3])), keys[..., width:].unflatten(2, (count, v.shape[3]))


# --- what a rank computes of its rows -----------------------------------------------------------------------


def by_segments(
    needs: Needs, rank: int, group: Group, source: Any, variant: Variant, segments: Segments,
    stages: tuple[Segments, Segments] | None, *, positions: bool, by_heads: bool, exchanges: bool, keeps: bool,
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
    assembly = Assembly.of(keys, transfer.places, sharding.tile, held, transfer.received)

    def local_rows(rows: np.ndarray) -> np.ndarray:
        places: np.ndarray = sharding.offsets[rows // sharding.tile] + rows % sharding.tile
        return places

    local_stage, local_keys = None, (0, 0)
    if len(own):
        first, low = local_rows(own.begin), local_rows(own.lo)
        last: np.ndarray = local_rows(own.end - 1) + 1
        high: np.ndarray = local_rows(own.hi - 1) + 1
        start, key = int(first[0]), int(low[0])
        lengths = _with_gaps(first - start, last - start, low - key, high - key)
        rows = Selection(np.arange(start, int(last[-1])), held)
        local_keys = key, int(high[-1]) - key
        local_stage = Stage(rows, source, variant, lengths if len(lengths[0]) > 1 else None)
    remote_stage = None
    if len(rest):
        rows = Selection(local_rows(_ranges(rest.begin, rest.end)), held)
        starts = np.flatnonzero(fresh)
        packed = np.add.reduceat(rest.end - rest.begin, starts), (rest.hi - rest.lo)[starts]
        remote_stage = Stage(rows, source, variant, packed if len(starts) > 1 else None)
    return RankAttention(
        group, transfer, assembly, remote_stage, local_stage, local_keys, by_heads, exchanges, keeps,
        _forwards(remote_stage, assembly, held),
    )  # fmt: skip


def _forwards(remote: Stage | None, assembly: Assembly, held: int) -> tuple[tuple[Stage, int, int], ...]:
    """The calls of a forward: few long segments one by one, the longest first, since kernels of dense rows are faster
    than those of packed ones."""
    if remote is None:
        return ()
    if remote.lengths is None or not remote.rows.whole or len(remote.lengths[0]) > _MOST_CALLS:
        return ((remote, 0, assembly.rows),)
    counts, keys = remote.lengths
    if int(counts.min()) < _LONG:
        return ((remote, 0, assembly.rows),)
    first, start = np.cumsum(counts) - counts, np.cumsum(keys) - keys
    calls = [
        (Stage(Selection(np.arange(row, row + count), held), remote.source, remote.variant), int(at), int(number))
        for row, count, at, number in zip(first, counts, start, keys, strict=True)
    ]
    order = np.argsort(-(counts * keys), kind="stable")
    return tuple(calls[i] for i in order)


def by_positions(
    needs: Needs, rank: int, group: Group, source: Any, variant: Variant, *, by_heads: bool, exchanges: bool,
    keeps: bool,
) -> RankAttention:  # fmt: skip
    """The calls of a rank whose rows are one call of a variant that reads their positions."""
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    assembly = Assembly.of(needs.key_positions(rank), transfer.places, needs.sharding.tile, held, transfer.received)
    stage = Stage(Selection(np.arange(held), held), source, variant) if held else None
    return RankAttention(
        group, transfer, assembly, stage, by_heads=by_heads, exchanges=exchanges, keeps=keeps,
        forwards=_forwards(stage, assembly, held),
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
