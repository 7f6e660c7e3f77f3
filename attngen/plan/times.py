"""Times of Hopper forward kernels for a launch, a work tile and a step, from those that were measured; the runtime
predicts calls from these (``runtime.prediction``) and takes the kernel that should be done first."""

from __future__ import annotations

from collections.abc import Iterable
from math import log, prod
from typing import TYPE_CHECKING, Any

from attngen.lang.bands import Bands
from attngen.lang.declared import Scalar
from attngen.lang.host import KEYS_OF_SCALAR, KEYS_OF_SMALL, evaluate, written
from attngen.lang.spans import Interval
from attngen.plan.traits import bands_of
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.measured_times import TileTimes, measured_times

if TYPE_CHECKING:
    from attngen.plan.model import Plan

#: Tokens of the long sequence by which ``first_see_most`` compares first and last queries. Not measured: as many as
#: long calls of benchmarks have.
_LONG = 16384
#: Tokens of the same where a kernel that is ready for longer ones loses nothing: a window of a few thousand keys is a
#: short one (docs/notebook/softmax_and_masks.md, "Functions that the suite does not have").
_LONGEST = 2**17

#: Keys of a tile of the backward, by which ``first_seen_most`` compares.
_TILE = 128

#: Times as many queries or keys from which on they count as many more (docs/notebook/softmax_and_masks.md, "Long rows,
#: and blocks that end together").
_MANY = 4

#: Nanoseconds that the blocks of a cluster add to a work tile whose keys they split: they wait and merge results
#: (docs/notebook/hopper_forward.md, "Sharing the keys of a tile").
MERGE = 2000.0

#: Time of a step in 8 bits over that of one in 16. Not measured; it lies between the half that products take and the
#: whole that exponentials do, and only decides between tiles.
_ONE_BYTE = 0.75

#: Work tiles in the middle of a long sequence by which ``row_time`` compares tiles. Not measured: a few, since tiles of
#: keys do not begin where those of queries do.
_SAMPLED = 6

#: Steps that a work tile loses where its consumers skip what their own rows do not see, as predictions of calls have
#: it; and where rows see no tile of keys that all of them see, so that a partial one comes first and row maxima rise
#: later (docs/notebook/tiles.md, "Narrow bands").
_SKIPPING_STEPS, _PARTIAL_STEPS = 2, 1


def times_of(
    consumers: int, tile_n: int, columns: int, element_bytes: int, *, shared: bool = False
) -> tuple[float, float, float]:
    """Return the nanoseconds of a launch, a work tile and a step.

    Of a kernel that was not measured they are those of the nearest one that was: first of as many consumers, then of as
    many columns, then of as many keys, with the step scaled by its pairs and columns.
    ``shared``: blocks share the keys of a work tile.
    """

    def distance(row: TileTimes) -> tuple[float, ...]:
        of_consumers, of_keys, of_columns = row.sizes
        pairs = ((of_consumers, consumers), (of_columns, columns), (of_keys, tile_n))
        return tuple(abs(log(one / other)) for one, other in pairs)

    measured = measured_times()
    near = min(measured.times, key=distance)
    scale = consumers * tile_n * columns / prod(near.sizes)
    if element_bytes == 1:
        scale *= _ONE_BYTE
    return measured.launch_ns, near.work_tile_ns + MERGE * shared, round(near.step_ns * scale, 1)


def row_time(spec: KernelSpec, consumers: int, tile_n: int, columns: int) -> float | None:
    """Predicted nanoseconds of a row in the middle of a long sequence, in 16 bits; None if bounds do not decide.

    Scalars are assumed as in ``first_see_most``. docs/notebook/tiles.md, "Narrow bands", has predictions beside times.
    """
    rows, bands = 64 * consumers, bands_of(spec)
    starts = [_LONG // 2 // rows * rows + rows * i for i in range(_SAMPLED)]
    names: dict[str, Any] = {"seqlen_q": _LONG, "seqlen_k": _LONG}
    ends = [start + rows - 1 for start in starts]
    names |= {"q_lo": starts, "q_pos_lo": starts, "q_hi": ends, "q_pos_hi": ends}
    names |= {scalar.name: _assumed(scalar) for scalar in spec.variant.scalars}
    visible, full = (_ends(part, names, _SAMPLED) for part in (bands.visible, bands.full))
    if not visible or full is None:
        return None
    steps = sum(max(-(-to // tile_n) - at // tile_n, 0) for interval in visible for at, to in interval)
    for whole in zip(*full, strict=True):
        if tile_n < rows - 64:
            steps += _SKIPPING_STEPS
        elif all(to // tile_n <= -(-at // tile_n) for at, to in whole):
            steps += _PARTIAL_STEPS
    _, tile, step = times_of(consumers, tile_n, columns, 2)
    return (tile + steps / _SAMPLED * step) / rows


def is_measured(consumers: int, tile_n: int, columns: int, element_bytes: int) -> bool:
    """Whether a kernel of these sizes has times of its own."""
    sizes = (row.sizes for row in measured_times().times)
    return element_bytes == 2 and (consumers, tile_n, columns) in sizes


def tuned_times(own: Plan, chosen: Plan, speedup: float) -> tuple[float, ...]:
    """Return the times of a kernel that was measured to be ``speedup`` times as fast as another one of the same work.

    Long calls, of which it was measured, are predicted to differ by just as much; short ones by their tiles, too.
    """
    if not (own.times and chosen.times):
        return ()
    launch, tile, _ = chosen.times
    pairs = chosen.tile_m * chosen.tile_n / (own.tile_m * own.tile_n)
    return launch, tile, round(own.times[-1] * pairs / speedup, 1)


def visible_keys(spec: KernelSpec) -> tuple[tuple[Any, Any], ...]:
    """Return the intervals of keys that a tile of queries may see, as manifests hold them; none if all."""
    return _written(bands_of(spec))


def first_see_most(spec: KernelSpec) -> bool:
    """Whether the first queries of a long sequence see more keys than the last ones; False if bounds do not decide.

    A scalar without a default is assumed to be a fixed share of the keys, as in predictions.
    """
    seen = _seen_at(spec, (0, _LONG - 1), KEYS_OF_SCALAR)
    return seen is not None and seen[0] > seen[1]


def first_see_many_more(spec: KernelSpec) -> bool:
    """Whether the first queries of a long sequence see many more keys than those in its middle; False if bounds do not
    decide. Scalars are assumed to be small."""
    seen = _seen_at(spec, (0, _LONG // 2), KEYS_OF_SMALL)
    return seen is not None and seen[0] > _MANY * seen[1]


def _seen_at(spec: KernelSpec, queries: tuple[int, int], keys: int) -> tuple[int, int] | None:
    """Keys that two queries of a long sequence see; None if bounds do not decide. ``keys``: as of ``_assumed``."""
    names: dict[str, Any] = {"seqlen_q": _LONG, "seqlen_k": _LONG}
    names |= {name: list(queries) for name in ("q_lo", "q_hi", "q_pos_lo", "q_pos_hi")}
    names |= {scalar.name: _assumed(scalar, keys) for scalar in spec.variant.scalars}
    intervals = _ends(bands_of(spec).visible, names, 2)
    if intervals is None:
        return None
    first, last = (sum(max(ends[place][1] - ends[place][0], 0) for ends in intervals) for place in (0, 1))
    return first, last


def _ends(intervals: Iterable[Interval], names: dict[str, Any], count: int) -> list[list[tuple[int, int]]] | None:
    """First keys and ends of intervals of a long sequence; None if lengths and scalars do not decide. ``names`` has
    values of ``count`` places."""
    evaluated = []
    for interval in intervals:
        lo, hi = (evaluate(written(end), names, count) for end in (interval.lo, interval.hi))
        if (lo is None and interval.lo is not None) or (hi is None and interval.hi is not None):
            return None
        ends = zip(lo or [0] * count, hi or [_LONG] * count, strict=True)
        evaluated.append([(max(at, 0), min(to, _LONG)) for at, to in ends])
    return evaluated


def last_see_most(spec: KernelSpec) -> bool:
    """Whether the last queries of a long sequence see more keys than those in its middle, by half at least; False if
    bounds do not decide. Scalars are assumed as in ``first_see_most``. The half was not measured: it keeps out windows,
    whose tiles all take about as long."""
    seen = _seen_at(spec, (_LONG // 2, _LONG - 1), KEYS_OF_SCALAR)
    return seen is not None and 2 * seen[1] >= 3 * seen[0] > 0


def first_seen_most(spec: KernelSpec) -> bool:
    """Whether many more queries of a long sequence see its first keys than see those in its middle; False if bounds do
    not decide. Scalars are assumed as above, but small ones: a window beside a few first keys."""
    names: dict[str, Any] = {"seqlen_q": _LONGEST, "seqlen_k": _LONGEST, "kv_lo": [0, _LONGEST // 2]}
    names |= {scalar.name: _assumed(scalar, KEYS_OF_SMALL) for scalar in spec.variant.scalars}
    names["kv_hi"] = [at + _TILE - 1 for at in names["kv_lo"]]
    first, middle = 0, 0
    for interval in bands_of(spec, "q").visible:
        lo, hi = (evaluate(written(end), names, 2) for end in (interval.lo, interval.hi))
        if (lo is None and interval.lo is not None) or (hi is None and interval.hi is not None):
            return False
        ends = zip(lo or [0, 0], hi or [_LONGEST] * 2, strict=True)
        seen = [max(min(to, _LONGEST) - max(at, 0), 0) for at, to in ends]
        first, middle = first + seen[0], middle + seen[1]
    return first > _MANY * middle


def _assumed(scalar: Scalar, keys: int = KEYS_OF_SCALAR) -> Any:
    value = scalar.default if scalar.const is None else scalar.const
    if value is not None:
        return value
    low, high = (end if isinstance(end, int) else none for end, none in ((scalar.min, 0), (scalar.max, _LONG)))
    return min(max(_LONG // keys, low), high)


def visible_queries(spec: KernelSpec) -> tuple[tuple[Any, Any], ...]:
    """Return the intervals of queries that may see a tile of keys, as manifests hold them; none if all."""
    return _written(bands_of(spec, "q"))


def _written(bands: Bands) -> tuple[tuple[Any, Any], ...]:
    intervals = tuple((written(interval.lo), written(interval.hi)) for interval in bands.visible)
    return () if (None, None) in intervals else intervals
