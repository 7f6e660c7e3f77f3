"""How a plan overlaps calls with exchanges. It follows from the visits of all ranks, so that all decide alike."""

from __future__ import annotations

from typing import Literal

import numpy as np

from attngen.parallel.cost import Cost
from attngen.parallel.routes import Needs, Tokens
from attngen.parallel.segments import Segments
from attngen.parallel.visits import Visits, runs_of_tiles

#: By rows, by heads, or not at all.
Overlap = Literal["rows", "heads", "none"]

#: Seconds that a second group of heads costs: more copies, and smaller calls.
_GROUP = 150e-6

#: Least seconds of an exchange that is cut into groups of heads.
_WORTH = 40e-6


def tiles_here(visits: Visits, tokens: Tokens) -> np.ndarray:
    """Whether each tile of rows sees only keys of the run of rows that it lies in."""
    start, end = runs_of_tiles(tokens.owner)
    return (visits.first >= start) & (visits.last <= end)


def overlap(visits: Visits, needs: Needs, cost: Cost, *, segments: bool, heads_alike: bool) -> Overlap:
    """How a layer overlaps: by rows only where kernels take segments, by heads only where these are alike."""
    tokens = needs.tokens

    def tiles(which: np.ndarray) -> np.ndarray:
        counts = np.bincount(tokens.owner[which], weights=visits.tiles[which], minlength=tokens.ranks)
        return np.array([cost.of_tiles(float(count), tokens.tile) for count in counts])

    sending = np.array([cost.of_tokens(float(rows)) for rows in needs.received])
    whole = tiles(np.ones(len(tokens.owner), dtype=bool))
    by_heads = float((whole + sending / cost.kv_heads).max()) + _GROUP
    by_rows = np.inf
    if segments and not needs.tiles.all():
        here = tiles(tiles_here(visits, tokens))
        by_rows = float((np.maximum(here, sending) + whole - here).max())
    if heads_alike and cost.kv_heads > 1 and sending.max() > _WORTH and by_heads < by_rows:
        return "heads"
    return "rows" if by_rows < np.inf else "none"


def cut(segments: Segments, visits: Visits, tokens: Tokens, *, positions: bool) -> tuple[Segments, Segments]:
    """The segments of one rank in two: those whose keys lie in their own run of rows, and the others."""
    start, end = runs_of_tiles(tokens.owner)
    tile = tokens.tile
    run: np.ndarray = segments.begin // tile
    low, high = start[run] * tile, np.minimum(end[run] * tile, tokens.seqlen)
    at = np.where((segments.lo >= low) & (segments.hi <= high), segments.begin, segments.end)
    first = segments.lo.copy()
    if positions:
        for i in np.flatnonzero((at == segments.end) & (at > segments.begin)).tolist():
            tiles = np.arange(segments.begin[i] // tile, -(-segments.end[i] // tile))
            inside = np.flatnonzero(visits.first[tiles] * tile >= low[i])
            if len(inside):
                at[i] = max(segments.begin[i], tiles[inside[0]] * tile)
                first[i] = visits.first[tiles[inside[0]]] * tile
    rest, here = segments.split(at, first)
    return here, rest
