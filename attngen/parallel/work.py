"""What one rank does in a call by keys: exchanges that are under way while it computes what needs none of them.

Two ways to overlap. By rows: the rows whose keys all lie here are computed first, the others when their keys have
arrived; in the backward the others come first, and their gradients return meanwhile. By heads: keys of few heads are
exchanged first, and those of the others arrive while these are computed. What overlaps how is the same on all ranks,
since they enter the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attngen.lang.variant import Variant
from attngen.parallel.assembly import Assembly
from attngen.parallel.exchange import Group
from attngen.parallel.pieces import Options, Part, Piece, Rows
from attngen.parallel.routes import Needs
from attngen.parallel.segments import Segments
from attngen.parallel.transfers import Flight, Transfer, head_start

#: Values of a piece's call, from what the caller passed.
Values = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Work:
    """The pieces of one rank, and what it exchanges.

    ``here`` sees the rank's own rows from ``here_keys[0]`` on, as many as ``here_keys[1]``, and ``rest`` the keys of
    ``assembly``; either may be None. ``values`` gives a piece's tensors and scalars. ``by_heads``: keys travel in two
    groups of heads forward, and in three backward.
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
        if self.here is not None:
            own_k, own_v = (x.narrow(1, *self.here_keys) for x in (k, v))
            self.here.forward(q, own_k, own_v, out, sums, _all(heads, k.shape[2]), values, options)
        kept = []
        for part, (own, flight) in zip(parts, flights, strict=True):
            keys = self.assembly.keys(own, flight.wait())
            if self.rest is not None:
                self.rest.forward(q, *_split(keys, k, v, part), out, sums, part, values, options)
            if keep and self.keeps:
                kept.append(keys)
        return out, sums, kept

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None,
        kept: Sequence[Tensor], values: Mapping[str, Any], asked: Sequence[str], options: Options,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k and v, and of the tensors ``asked``, in float32."""
        heads, kv_heads = q.shape[2], k.shape[2]
        parts = _parts(heads, kv_heads, (1, -1, 1) if self.by_heads else (-1,))
        flights = [] if kept else [self._start(k, v, part) for part in parts]
        own: dict[str, Tensor] = {
            name: torch.zeros_like(values[name], dtype=_sums_dtype(q), memory_format=torch.contiguous_format)
            for name in asked
        }
        dq: Tensor | None = None
        returning: list[tuple[Tensor | None, Flight]] = []
        if flights:
            head_start(q.device)
        for i, part in enumerate(parts):
            keys = kept[0] if kept else self.assembly.keys(flights[i][0], flights[i][1].wait())
            part_k, part_v = _split(keys, k, v, part)
            total = None if self.transfer.gathers else _zeros(k, v, part)
            if self.rest is not None:
                d_rows, dk, dv, d_own = self.rest.backward(
                    q, part_k, part_v, out, lse, dout, dlse, part, values, asked, options
                )
                part.add(self.rest.variant, own, d_own)
                if dq is None and self.rest.rows.whole and len(parts) == 1:
                    dq = d_rows
                else:
                    dq = torch.zeros_like(q, memory_format=torch.contiguous_format) if dq is None else dq
                    self.rest.rows.put(part.of(dq), d_rows, 1)
            else:
                dk, dv = torch.zeros_like(part_k), torch.zeros_like(part_v)
            back = self.assembly.back(dk, dv, total)
            returning.append((total, self.transfer.start_back(back, self.group)))
            if self.exchanges:
                head_start(q.device)
        if self.here is not None:
            own_k, own_v = (x.narrow(1, *self.here_keys) for x in (k, v))
            every = _all(heads, kv_heads)
            d_rows, dk, dv, d_own = self.here.backward(
                q, own_k, own_v, out, lse, dout, dlse, every, values, asked, options
            )
            every.add(self.here.variant, own, d_own)
            dq = self._with_rows_here(dq, d_rows, q)
            total = returning[0][0]
            assert total is not None  # what is gathered leaves nothing to overlap by rows
            place = total.narrow(0, *self.here_keys)
            at = 0
            for gradient in (dk, dv):
                rows = gradient.transpose(0, 1).flatten(2)
                place.narrow(2, at, rows.shape[2]).add_(rows)
                at += rows.shape[2]
        totals = [self.transfer.collected(total, flight.wait()) for total, flight in returning]
        dk, dv = _joined(totals, parts, k, v)
        if dq is None:
            dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        return dq, dk, dv, own

    def _with_rows_here(self, dq: Tensor | None, d_rows: Tensor, q: Tensor) -> Tensor:
        """The gradient of q with that of the rows of ``here``, whose rows that ``rest`` has too are 0."""
        assert self.here is not None
        if dq is None:
            if self.here.rows.whole:
                return d_rows
            dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
            self.here.rows.put(dq, d_rows, 1)
            return dq
        assert self.rest is not None
        if self.here.rows.whole:
            self.rest.rows.put(d_rows, self.rest.rows.of(dq, 1), 1)
            return d_rows
        here = self.here.rows.view(dq, 1)
        assert here is not None
        here.add_(d_rows)
        return dq

    def _start(self, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Flight]:
        """Own rows of K and V side by side, (rows, batch, width), and their exchange."""
        own = torch.cat([part.of_keys(x).flatten(2) for x in (k, v)], dim=2).transpose(0, 1).contiguous()
        return own, self.transfer.start(own, self.group)


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


def _zeros(k: Tensor, v: Tensor, part: Part) -> Tensor:
    """Room for the gradients of own rows of K and V side by side, in float32."""
    width = part.kv_heads[1] * (k.shape[3] + v.shape[3])
    return torch.zeros((k.shape[1], k.shape[0], width), dtype=_sums_dtype(k), device=k.device)


def _joined(totals: Sequence[Tensor], parts: Sequence[Part], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of k and v from those of groups of heads, side by side."""
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    for total, part in zip(totals, parts, strict=True):
        for whole, rows in zip((dk, dv), _split(total.transpose(0, 1), k, v, part), strict=True):
            part.of_keys(whole).copy_(rows)
    return dk, dv


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
    fresh = np.ones(len(rest), dtype=bool)  # segments whose keys are not those of the segment before
    if not positions:
        fresh[1:] = (rest.lo[1:] != rest.lo[:-1]) | (rest.hi[1:] != rest.hi[:-1])
    keys = _ranges(rest.lo[fresh], rest.hi[fresh])
    assembly = Assembly.of(keys, transfer.places, tokens.tile, held, transfer.received)
    place = transfer.places

    def local(rows: np.ndarray) -> np.ndarray:
        return place[rows // tokens.tile] + rows % tokens.tile

    piece_here, keys_here = None, (0, 0)
    if len(own):
        first, last = local(own.begin), local(own.end - 1) + 1
        low, high = local(own.lo), local(own.hi - 1) + 1
        start, key = int(first[0]), int(low[0])
        lengths = _with_gaps(first - start, last - start, low - key, high - key)
        rows = Rows(np.arange(start, int(last[-1])), held)
        keys_here = key, int(high[-1]) - key
        piece_here = Piece(rows, source, variant, lengths if len(lengths[0]) > 1 else None)
    piece_rest = None
    if len(rest):
        rows = Rows(local(_ranges(rest.begin, rest.end)), held)
        starts = np.flatnonzero(fresh)
        packed = np.add.reduceat(rest.end - rest.begin, starts), (rest.hi - rest.lo)[starts]
        piece_rest = Piece(rows, source, variant, packed if len(starts) > 1 else None)
    return Work(group, transfer, assembly, piece_rest, piece_here, keys_here, by_heads, exchanges, keeps)


def by_positions(
    needs: Needs, rank: int, group: Group, source: Any, variant: Variant, *, by_heads: bool, exchanges: bool,
    keeps: bool,
) -> Work:  # fmt: skip
    """The work of a rank whose rows are one call of a variant that reads their positions."""
    transfer = Transfer.of(needs, rank)
    held = transfer.held
    assembly = Assembly.of(
        needs.key_positions(rank), transfer.places, needs.tokens.tile, held, transfer.received
    )
    piece = Piece(Rows(np.arange(held), held), source, variant) if held else None
    return Work(group, transfer, assembly, piece, by_heads=by_heads, exchanges=exchanges, keeps=keeps)


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The numbers of all ranges, one after the other."""
    counts = end - begin
    return np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))


def _with_gaps(
    first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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
