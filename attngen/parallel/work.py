"""The forward and the backward of one rank, which computes while keys and their gradients are exchanged.

They overlap in one of two ways. By rows: rows whose keys all lie on the rank are computed first, the others once their
keys have arrived; in the backward the others come first, and the gradients of their keys return meanwhile. By heads:
the keys of one KV head are exchanged first, and those of the others arrive while that head is computed. All ranks
overlap in the same way, since they enter the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.assembly import Assembly
from attngen.parallel.exchange import Group
from attngen.parallel.gathers import Gather, copy
from attngen.parallel.pieces import Options, Part, Piece, Selection
from attngen.parallel.routes import Needs
from attngen.parallel.segments import Segments
from attngen.parallel.streams import TwoStreams
from attngen.parallel.transfers import Flight, Transfer, head_start

#: Most segments of a forward that run as calls of their own, and the least rows of each; more or shorter ones are
#: packed in one call.
_MOST_CALLS, _LONG = 3, 2048

#: Values of a piece's call, from what the caller passed.
Values = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Work:
    """What one rank computes, in two pieces, and what it exchanges.

    ``here``: the rows that see only the rank's own keys, of which the call gets ``here_keys[1]`` from number
    ``here_keys[0]`` on. ``rest``: the other rows, which see the keys of ``assembly``, own and received ones. Either may
    be None. ``by_heads``: keys travel in two groups of heads, and their gradients return in three.
    """

    group: Group
    transfer: Transfer
    assembly: Assembly
    rest: Piece | None
    here: Piece | None = None
    here_keys: tuple[int, int] = (0, 0)
    by_heads: bool = False
    exchanges: bool = True  # whether any rank sends anything
    keeps: bool = False  # whether the backward gets the keys of the forward, on all ranks
    #: The calls of a forward over ``rest``: pieces, and the first of their keys and how many.
    forwards: tuple[tuple[Piece, int, int], ...] = ()

    def kept_shapes(self, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what ``forward`` keeps."""
        return [(k[0], self.assembly.rows, k[2] * k[3] + v[2] * v[3])] if self.keeps else []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Any], options: Options, *, lse: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Output, log-sum-exp and the keys to keep for the backward. q, k and v are (batch, rows, heads, head_dim)."""
        batch, held, heads, _ = q.shape
        out = q.new_empty((batch, held, heads, v.shape[3]))
        sums = torch.empty((batch, heads, held), dtype=_sums_dtype(q), device=q.device) if lse else None
        parts = _parts(heads, k.shape[2], (1, -1) if self.by_heads else (-1,))
        flights = [self._start(k, v, part) for part in parts]
        head_start(q.device) if self.exchanges else None
        # Calls alternate between two streams, so that one starts while the last blocks of another still run. The packed
        # call of ``here`` may also write zeros to rows of ``rest`` that lie between its own. These are then stored
        # after it: if they are one run of rows, which the kernel of ``rest`` writes in place, by running it on the same
        # stream, else by copying its result at the end.
        clears = self.here is not None and self.here.covers_others
        number = int(self.here is not None and not (clears and self.rest is not None and self.rest.rows.is_run))
        every: list[Tensor] = []
        copies: list[Callable[[], None]] = []
        with TwoStreams(q.device) as streams:
            if self.here is not None:
                own_k, own_v = (x.narrow(1, *self.here_keys) for x in (k, v))
                self.here.forward(q, own_k, own_v, out, sums, _all(heads, k.shape[2]), values, options)()
            for part, flight in zip(parts, flights, strict=True):
                with streams.on(number):
                    every.append(streams.handed(self._keys(k, v, part, flight)))
                    assembled = streams.event()
                part_k, part_v = _split(every[-1], k, v, part)
                for piece, start, count in self.forwards:
                    with streams.on(number):
                        streams.wait(assembled)
                        piece_k, piece_v = (x.narrow(1, start, count) for x in (part_k, part_v))
                        copy_rows = piece.forward(q, piece_k, piece_v, out, sums, part, values, options)
                        copies.append(copy_rows) if clears else copy_rows()
                    number += 1
        for copy_rows in copies:
            copy_rows()
        kept = every if keep and self.keeps else []
        return out, sums, kept

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        kept: Sequence[Tensor], values: Mapping[str, Any], asked: Sequence[str], options: Options,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k and v, and of the tensors ``asked``, in float32."""
        heads, kv_heads = q.shape[2], k.shape[2]
        parts = _parts(heads, kv_heads, (1, -1, 1) if self.by_heads else (-1,))
        arriving = _parts(heads, kv_heads, (1, -1) if self.by_heads else (-1,))
        # Keys travel in two collectives, also for three groups of gradients: behind a third one, which may still wait
        # for other ranks, the first collective of gradients would start only after the next kernel.
        flights = [] if kept else [self._start(k, v, group) for group in arriving]
        own: dict[str, Tensor] = {
            name: torch.zeros_like(values[name], dtype=_sums_dtype(q), memory_format=torch.contiguous_format)
            for name in asked
        }
        of_rows: list[tuple[Part, Tensor]] = []
        of_keys: list[tuple[Tensor, Tensor, Flight]] = []
        if flights:
            head_start(q.device)
        groups = zip(arriving, flights, strict=True)
        keys, group = (kept[0], arriving[0]) if kept else (None, None)
        for part in parts:
            if group is None or part.kv_heads[0] >= sum(group.kv_heads):
                group, flight = next(groups)
                keys = self._keys(k, v, group, flight)
            assert keys is not None
            part_k, part_v = (part.among(x, group) for x in _split(keys, k, v, group))
            if self.rest is not None:
                d_rows, dk, dv, d_own = self.rest.backward(
                    q, part_k, part_v, out, lse, dout, dlse, part, values, asked, options
                )
                part.add(self.rest.variant, own, d_own)
                of_rows.append((part, d_rows))
            else:
                dk, dv = torch.zeros_like(part_k), torch.zeros_like(part_v)
            of_keys.append((dk, dv, self.transfer.start_back(self.assembly.back(dk, dv), self.group)))
            if self.exchanges and (part is not parts[-1] or self.here is not None):
                head_start(q.device)
        rows_here = keys_here = None
        if self.here is not None:
            own_k, own_v = (x.narrow(1, *self.here_keys) for x in (k, v))
            every = _all(heads, kv_heads)
            rows_here, *keys_here, d_own = self.here.backward(
                q, own_k, own_v, out, lse, dout, dlse, every, values, asked, options
            )
            every.add(self.here.variant, own, d_own)
        dk, dv = self._gradients_of_keys(k, v, parts, of_keys, keys_here)
        return self._gradient_of_rows(q, of_rows, rows_here), dk, dv, own

    def _gradient_of_rows(self, q: Tensor, rest: list[tuple[Part, Tensor]], here: Tensor | None) -> Tensor:
        """The gradient of q: rows of ``rest``, by groups of heads, and rows of ``here``."""
        whole = here if here is not None and self.here is not None and self.here.rows.whole else None
        if whole is None and len(rest) == 1 and self.rest is not None and self.rest.rows.whole:
            return rest[0][1]
        dq = torch.empty_like(q, memory_format=torch.contiguous_format) if whole is None else whole
        if here is not None and whole is None and self.here is not None:
            self.here.rows.put(dq, here, 1)
        for part, rows in rest:
            if self.rest is not None:
                self.rest.rows.put(part.of(dq), rows, 1)
        return dq

    def _gradients_of_keys(
        self, k: Tensor, v: Tensor, parts: Sequence[Part], rest: Sequence[tuple[Tensor, Tensor, Flight]],
        here: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of the rank's own k and v: sums of those of ``here``, of ``rest``, and of other ranks."""
        whole = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
        if here is not None:
            whole = self._of_own_rows(whole, here)
        for part, (dk, dv, flight) in zip(parts, rest, strict=True):
            places = [part.of_keys(x).transpose(0, 1) for x in whole]
            widths = [x.shape[2] * x.shape[3] for x in places]
            came = flight.wait()
            if self.transfer.gathers:  # own rows are among those that come back
                for place, total in zip(places, self.transfer.summed(came).split(widths, dim=2), strict=True):
                    copy(place, total.unflatten(2, place.shape[2:]))
                continue
            for place, gradient, back in zip(places, (dk, dv), came.split(widths, dim=2), strict=True):
                sources = gradient.transpose(0, 1), back.unflatten(2, place.shape[2:])
                self._sums(place, *sources, *([] if here is None else [place]))
        return whole[0], whole[1]

    def _of_own_rows(self, whole: list[Tensor], here: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``here`` among those of all own keys, (batch, rows, heads, head_dim), which else are 0."""
        begin, count = self.here_keys
        if count == self.transfer.held:
            return list(here)
        for x, gradient in zip(whole, here, strict=True):
            x.narrow(1, 0, begin).zero_()
            copy(x.narrow(1, begin, count), gradient)
            x.narrow(1, begin + count, self.transfer.held - begin - count).zero_()
        return whole

    @cached_property
    def _sums(self) -> Gather:
        """Gradients of own rows as keys: of the keys of ``rest``, those that came back, and with ``here`` what is there
        already, where one of the others is added to it."""
        (rows, keys), sent = self.assembly.own, self.transfer.send
        first, second = self.assembly.rows, self.assembly.rows + len(sent)
        listed: tuple[np.ndarray, ...] = (keys, first + np.arange(len(sent)))
        if self.here is None:
            return Gather(self.transfer.held, np.concatenate([rows, sent]), np.concatenate(listed))
        added = np.union1d(rows, sent)
        of_added = [np.arange(len(added)), *(np.searchsorted(added, each) for each in (rows, sent))]
        return Gather(len(added), np.concatenate(of_added), np.concatenate([second + added, *listed]), added)

    def _start(self, k: Tensor, v: Tensor, part: Part) -> Flight:
        """The exchange of the keys of some heads."""
        return self.transfer.start(*_rows_first(k, v, part), self.group)

    def _keys(self, k: Tensor, v: Tensor, part: Part, flight: Flight) -> Tensor:
        """The keys of some heads, K and V side by side, once they have arrived."""
        return self.assembly.keys(*_rows_first(k, v, part), flight.wait())


def _rows_first(k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    return part.of_keys(k).transpose(0, 1), part.of_keys(v).transpose(0, 1)


def _sums_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _all(heads: int, kv_heads: int) -> Part:
    return Part((0, heads), (0, kv_heads))


def _parts(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> list[Part]:
    """Groups of KV heads with their query heads; of the sizes −1 is what is left, and groups of none are left out."""
    fixed = sum(size for size in sizes if size > 0)
    counts = [size if size > 0 else kv_heads - fixed for size in sizes] if kv_heads > fixed else [1] * kv_heads
    group, start, parts = heads // kv_heads if kv_heads else 0, 0, []
    for count in counts:
        parts.append(Part((start * group, count * group), (start, count)))
        start += count
    return parts


def _split(keys: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """K and V, (batch, keys, heads, head_dim), of keys side by side."""
    count = part.kv_heads[1]
    width = count * k.shape[3]
    return keys[..., :width].unflatten(2, (count, k.shape[3])), keys[..., width:].unflatten(2, (count, v.shape[3]))


# --- what a rank computes of its rows -----------------------------------------------------------------------


def by_segments(
    needs: Needs, rank: int, group: Group, source: Any, variant: Variant, segments: Segments,
    here: tuple[Segments, Segments] | None, *, positions: bool, by_heads: bool, exchanges: bool, keeps: bool,
) -> Work:  # fmt: skip
    """The work of a rank whose rows are segments; ``here`` are those whose keys all lie on the rank, and the others, if
    they overlap by rows. Without ``positions``, segments that see the same keys are one sequence."""
    tokens = needs.tokens
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    own, rest = here if here is not None else (segments.take(np.zeros(len(segments), dtype=bool)), segments)
    fresh: np.ndarray = np.ones(len(rest), dtype=bool)  # segments whose keys are not those of the segment before
    if not positions:
        fresh[1:] = (rest.lo[1:] != rest.lo[:-1]) | (rest.hi[1:] != rest.hi[:-1])
    keys = _ranges(rest.lo[fresh], rest.hi[fresh])
    assembly = Assembly.of(keys, transfer.places, tokens.tile, held, transfer.received)

    def local(rows: np.ndarray) -> np.ndarray:
        here: np.ndarray = tokens.offsets[rows // tokens.tile] + rows % tokens.tile
        return here

    piece_here, keys_here = None, (0, 0)
    if len(own):
        first, low = local(own.begin), local(own.lo)
        last: np.ndarray = local(own.end - 1) + 1
        high: np.ndarray = local(own.hi - 1) + 1
        start, key = int(first[0]), int(low[0])
        lengths = _with_gaps(first - start, last - start, low - key, high - key)
        rows = Selection(np.arange(start, int(last[-1])), held)
        keys_here = key, int(high[-1]) - key
        piece_here = Piece(rows, source, variant, lengths if len(lengths[0]) > 1 else None)
    piece_rest = None
    if len(rest):
        rows = Selection(local(_ranges(rest.begin, rest.end)), held)
        starts = np.flatnonzero(fresh)
        packed = np.add.reduceat(rest.end - rest.begin, starts), (rest.hi - rest.lo)[starts]
        piece_rest = Piece(rows, source, variant, packed if len(starts) > 1 else None)
    return Work(
        group, transfer, assembly, piece_rest, piece_here, keys_here, by_heads, exchanges, keeps,
        _forwards(piece_rest, assembly, held),
    )  # fmt: skip


def _forwards(rest: Piece | None, assembly: Assembly, held: int) -> tuple[tuple[Piece, int, int], ...]:
    """The calls of a forward: few long segments one by one, the longest first, since kernels of dense rows are faster
    than those of packed ones."""
    if rest is None:
        return ()
    if rest.lengths is None or not rest.rows.whole or len(rest.lengths[0]) > _MOST_CALLS:
        return ((rest, 0, assembly.rows),)
    counts, keys = rest.lengths
    if int(counts.min()) < _LONG:
        return ((rest, 0, assembly.rows),)
    first, start = np.cumsum(counts) - counts, np.cumsum(keys) - keys
    calls = [
        (Piece(Selection(np.arange(row, row + count), held), rest.source, rest.variant), int(at), int(number))
        for row, count, at, number in zip(first, counts, start, keys, strict=True)
    ]
    order = np.argsort(-(counts * keys), kind="stable")
    return tuple(calls[i] for i in order)


def by_positions(
    needs: Needs, rank: int, group: Group, source: Any, variant: Variant, *, by_heads: bool, exchanges: bool,
    keeps: bool,
) -> Work:  # fmt: skip
    """The work of a rank whose rows are one call of a variant that reads their positions."""
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    assembly = Assembly.of(needs.key_positions(rank), transfer.places, needs.tokens.tile, held, transfer.received)
    piece = Piece(Selection(np.arange(held), held), source, variant) if held else None
    return Work(
        group, transfer, assembly, piece, by_heads=by_heads, exchanges=exchanges, keeps=keeps,
        forwards=_forwards(piece, assembly, held),
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
