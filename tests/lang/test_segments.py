"""Segments: the natural loops for the usual masks, and each visible tile exactly once for any intervals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from attngen.lang.bands import Bands, Facts, Interval, bands
from attngen.lang.check import compile_variant
from attngen.lang.ir import Expr, Op, walk
from attngen.lang.printing import canonical
from attngen.lang.segments import Segments, segments
from attngen.lang.simplify import integer, maximum, minimum, mul
from attngen.lang.spans import LIMIT
from attngen.lang.variant import Monotone, Scalar, Tensor
from tests.lang.bruteforce import FACTS, check_segments, var
from tests.sampling import few

DECLARED = {
    "window": Scalar("window", "int32", min=1, max=2**20),
    "sinks": Scalar("sinks", "int32", min=0, max=2**20),
    "prefix": Scalar("prefix", "int32", min=0),
    "doc": Tensor("doc", "int32", ("b", "seqlen_k"), Monotone(1)),
    "flag": Tensor("flag", "bool", ("b",)),
}


def cut(mask: str | bool, tile: int | Expr = 128, extent: Expr | None = None) -> Segments:
    used = [d for name, d in DECLARED.items() if name in str(mask)]
    scalars, tensors = ([d for d in used if isinstance(d, kind)] for kind in (Scalar, Tensor))
    variant = compile_variant("test", mask, None, scalars, tensors)
    facts = Facts.of(variant)
    facts = Facts({**facts.ranges, "BLOCK_N": (16, 256)}, facts.tensors)
    return segments(bands(variant.mask, facts), tile, extent or var("seqlen_k"), facts)


def texts(spans: Segments) -> tuple[list[str], list[str]]:
    full, partial = ([f"{canonical(lo)} .. {canonical(hi)}" for lo, hi in part] for part in (spans.full, spans.partial))
    return full, partial


CASES: dict[str, tuple[str | bool, list[str], list[str]]] = {
    "full": (True, ["0 .. (seqlen_k + 127) // 128"], []),
    "causal": (
        "q_pos >= kv",
        ["0 .. (q_pos_lo + 1) // 128"],
        ["max((q_pos_lo + 1) // 128, 0) .. q_pos_hi // 128 + 1"],
    ),
    "sliding_window": (
        "0 <= q_pos - kv and q_pos - kv < window",
        ["max((q_pos_hi - window) // 128 + 1, 0) .. (q_pos_lo + 1) // 128"],
        [
            "max((q_pos_lo - window + 1) // 128, 0) .. max((q_pos_hi - window) // 128 + 1, 0)",
            "max((q_pos_lo + 1) // 128, max((q_pos_hi - window) // 128 + 1, 0)) .. q_pos_hi // 128 + 1",
        ],
    ),
    "window that fits its tile": (
        "0 <= q_pos - kv and q_pos - kv < 128",
        ["max(q_pos_hi // 128, 0) .. (q_pos_lo + 1) // 128"],
        [
            "max((q_pos_lo + 1) // 128 - 1, 0) .. max(q_pos_hi // 128, 0)",
            "max((q_pos_lo + 1) // 128, max(q_pos_hi // 128, 0)) .. q_pos_hi // 128 + 1",
        ],
    ),
    "prefix_lm": (
        "q_pos >= kv or kv < prefix",
        ["0 .. min(max(q_pos_lo + 1, prefix), seqlen_k) // 128"],
        ["min(max(q_pos_lo + 1, prefix), seqlen_k) // 128 .. (min(max(q_pos_hi + 1, prefix), seqlen_k) + 127) // 128"],
    ),
    "sinks alone": (
        "q_pos >= kv and kv < sinks",
        ["0 .. min(q_pos_lo + 1, sinks) // 128"],
        ["max(min(q_pos_lo + 1, sinks) // 128, 0) .. (min(q_pos_hi + 1, sinks) + 127) // 128"],
    ),
    "causal_packed": (
        "q_pos >= kv and doc[b, q_pos] == doc[b, kv]",
        [
            "(first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) + 127) // 128 .. "
            "(q_pos_lo + 1) // 128 if doc[b, max(q_pos_lo, 0)] == doc[b, max(q_pos_hi, 0)] else 0"
        ],
        [
            "first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) // 128 .. "
            "min((first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) + 127) // 128, q_pos_hi // 128 + 1)",
            "max((q_pos_lo + 1) // 128 if doc[b, max(q_pos_lo, 0)] == doc[b, max(q_pos_hi, 0)] else 0, "
            "(first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) + 127) // 128) .. q_pos_hi // 128 + 1",
        ],
    ),
    "not bounded": (
        "q_pos >= kv and (q_pos - kv) % 3 == 0",
        [],
        ["0 .. q_pos_hi // 128 + 1"],
    ),
    "nothing": ("kv < 0", [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_loops_read_as_written_by_hand(name: str) -> None:
    mask, full, partial = CASES[name]
    assert texts(cut(mask)) == (full, partial)


def test_a_band_without_whole_tiles_is_one_range() -> None:
    """So is one whose ends are too long for a proof that nothing lies before its first tile."""
    reach = "({0} if {0} >= 0 else 1073741823)".format
    mask = f"q_pos - kv <= {reach('left')} and kv - q_pos <= {reach('right')} and q_pos // chunk == kv // chunk"
    scalars = [
        Scalar(name, "int32", min=least, max=2**30 - 1) for name, least in (("left", -1), ("right", -1), ("chunk", 1))
    ]
    variant = compile_variant("test", mask, None, scalars, [])
    facts = Facts.of(variant)
    intervals = bands(variant.mask, facts, "q")
    only = segments(replace(intervals, full=()), var("BLOCK_M"), var("seqlen_q"), facts)
    assert (len(intervals.visible), len(only.full), len(only.partial)) == (1, 0, 1)


def test_whole_tiles_of_a_named_size() -> None:
    """As a kernel asks: tiles of BLOCK_N keys, the ragged last one left to a loop of its own."""
    spans = cut("q_pos >= kv", var("BLOCK_N"), mul(var("whole_tiles"), var("BLOCK_N")))
    assert texts(spans) == (
        ["0 .. min((q_pos_lo + 1) // BLOCK_N, whole_tiles)"],
        ["max(min((q_pos_lo + 1) // BLOCK_N, whole_tiles), 0) .. min(q_pos_hi // BLOCK_N + 1, whole_tiles)"],
    )
    assert texts(cut(True, var("BLOCK_N"), mul(var("whole_tiles"), var("BLOCK_N")))) == (["0 .. whole_tiles"], [])


def test_a_sink_tile_that_overlaps_the_window_runs_once() -> None:
    spans = cut("q_pos >= kv and (q_pos - kv < window or kv < sinks)")
    assert len(spans.full) == 2
    assert len(spans.partial) == 3
    for partial_or_full in (spans.full, spans.partial):
        lo, _ = partial_or_full[-1]
        assert "sinks" in canonical(lo)


def test_usual_loops_need_no_int64() -> None:
    for mask, _, _ in CASES.values():
        spans = cut(mask)
        ends = [end for part in (spans.full, spans.partial) for span in part for end in span]
        assert not any(isinstance(n, Op) and n.wide for end in ends for n in walk(end))


# --- any intervals ----------------------------------------------------------------------------------------

_NAMES = ("a", "b0", "c", "d", "e")


def _end(source: random.Random) -> Expr | None:
    kind = source.randrange(6)
    if kind == 0:
        return None
    end: Expr = var(source.choice(_NAMES)) if kind < 4 else integer(source.randrange(-5, 40))
    return source.choice([minimum, maximum])(end, var(source.choice(_NAMES))) if kind == 3 else end


def test_a_start_near_the_end_of_int64_is_clipped_before_it_is_rounded() -> None:
    """``(x - 3) // 128`` is written as ``(x + 125) // 128 - 1``, which ``x`` may be too large for."""
    variant = compile_variant(
        "test", "max(kv + 3, w) // 3 * 3 >= max(q, w) // 3 * 3", None, [Scalar("w", "int64", min=0)]
    )
    facts = Facts.of(variant)
    intervals = bands(variant.mask, facts)
    for tile in (8, 128):
        cut = segments(intervals, tile, var("seqlen_k"), facts)
        for w in (0, 5, 2**63 - 1):
            for q_lo in (0, 7, 150, 400):
                env = {"w": w, "q_lo": q_lo, "q_hi": q_lo + 9, "seqlen_k": 300}
                check_segments(replace(intervals, full=()), cut, tile, env, {}, 300)


def _pairs(source: random.Random) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Return visible intervals and full ones, each inside a visible one."""
    visible = [Interval(_end(source), _end(source)) for _ in range(source.randrange(LIMIT + 1))]
    full = []
    for v in visible[: source.randrange(LIMIT + 1)]:
        lo, hi = _end(source), _end(source)
        inner_lo = v.lo if lo is None else lo if v.lo is None else maximum(lo, v.lo)
        inner_hi = v.hi if hi is None else hi if v.hi is None else minimum(hi, v.hi)
        full.append(Interval(inner_lo, inner_hi))
    source.shuffle(full)
    return tuple(visible), tuple(full)


@few("seed", range(100), always=(0, 3, 6, 7), often=range(0, 100, 10))
def test_each_tile_runs_exactly_once(seed: int) -> None:
    source = random.Random(seed)
    visible, full = _pairs(source)
    intervals = Bands(visible, full, True)
    facts = Facts({**FACTS.ranges, **dict.fromkeys(_NAMES, (-(2**31), 2**31 - 1))}, FACTS.tensors)
    tile = source.choice([1, 2, 3, 8, 16])
    ragged = segments(intervals, tile, var("seqlen_k"), facts)
    whole = segments(intervals, var("BLOCK_N"), mul(var("whole_tiles"), var("BLOCK_N")), facts)
    for _ in range(15):
        extent = source.randrange(60)
        env = {name: source.choice([source.randrange(-9, 70), 2**31 - 1, -(2**31)]) for name in _NAMES}
        env |= {"seqlen_k": extent, "BLOCK_N": tile, "whole_tiles": extent // tile}
        check_segments(intervals, ragged, tile, env, {}, extent)
        check_segments(intervals, whole, tile, env, {}, extent // tile * tile)
