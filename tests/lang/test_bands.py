"""Bands: exact and minimal for the masks that people use, never wrong for any other, alike over both axes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from attngen.lang.bands import Bands, Facts, bands
from attngen.lang.check import compile_variant
from attngen.lang.ir import Expr, Op, Var, rewrite, walk
from attngen.lang.printing import canonical
from attngen.lang.spans import LIMIT
from attngen.lang.variant import Monotone, Scalar, Tensor, Variant
from tests.lang.bruteforce import FACTS, Masks, UnguardedError, World, check_bands, const, load, op, var
from tests.sampling import few, seeds

DECLARED = {
    "shift": Scalar("shift", "int32"),
    "window": Scalar("window", "int32", min=1),
    "width": Scalar("width", "int32", const=128),
    "sinks": Scalar("sinks", "int32", min=0),
    "chunk": Scalar("chunk", "int32", min=1, max=2**20),
    "dilation": Scalar("dilation", "int32", min=1),
    "radius": Scalar("radius", "int32", min=0, max=2**10),
    "doc": Tensor("doc", "int32", ("b", "seqlen_k"), Monotone(1)),
    "start": Tensor("start", "int32", ("b", "seqlen_k"), Monotone(1), range=(0, "seqlen_k")),
    "size": Tensor("size", "int32", ("b",), range=(0, "seqlen_k")),
    "global_row": Tensor("global_row", "bool", ("b",)),
    "allowed": Tensor("allowed", "bool", ("seqlen_q", "seqlen_k")),
    "lookback": Tensor("lookback", "int32", ("h",), range=(0, 4096)),
}


def variant(mask: str | bool) -> Variant:
    used = [d for name, d in DECLARED.items() if name in str(mask)]
    scalars, tensors = ([d for d in used if isinstance(d, kind)] for kind in (Scalar, Tensor))
    return compile_variant("test", mask, None, scalars, tensors)


def texts(intervals: Bands) -> tuple[list[str], list[str], bool]:
    def text(end: Expr | None) -> str:
        return "" if end is None else canonical(end)

    visible, full = (
        [f"{text(i.lo)} .. {text(i.hi)}".strip() for i in part] for part in (intervals.visible, intervals.full)
    )
    return visible, full, intervals.exact


@dataclass
class Case:
    """A mask and its intervals: of keys for a box of queries, and of queries for a box of keys."""

    mask: str | bool
    visible: list[str]
    full: list[str]
    visible_q: list[str]
    full_q: list[str]
    exact: bool = True


WINDOW = "min(window, 1073741823)"
SHIFT = "seqlen_q - seqlen_k"
SAME = "doc[b, max(q_pos_lo, 0)] == doc[b, max(q_pos_hi, 0)]"

CASES = {
    "full": Case(True, [".."], [".."], [".."], [".."]),
    "causal": Case(
        "q_pos >= kv",
        [".. q_pos_hi + 1"],
        [".. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .."],
        [f"{SHIFT} + kv_hi .."],
    ),
    "causal, written otherwise": Case(
        "not (kv - q_pos > 0)",
        [".. q_pos_hi + 1"],
        [".. q_pos_lo + 1"],
        ["kv_lo - seqlen_k + seqlen_q .."],
        ["kv_hi - seqlen_k + seqlen_q .."],
    ),
    "causal_top_left": Case("q >= kv", [".. q_hi + 1"], [".. q_lo + 1"], ["kv_lo .."], ["kv_hi .."]),
    "sliding_window": Case(
        "0 <= q_pos - kv and q_pos - kv < window",
        [f"q_pos_lo - {WINDOW} + 1 .. q_pos_hi + 1"],
        [f"q_pos_hi - {WINDOW} + 1 .. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .. {SHIFT} + kv_hi + {WINDOW}"],
        [f"{SHIFT} + kv_hi .. {SHIFT} + kv_lo + {WINDOW}"],
    ),
    "constant window": Case(
        "0 <= q_pos - kv < width",
        ["q_pos_lo - 127 .. q_pos_hi + 1"],
        ["q_pos_hi - 127 .. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .. {SHIFT} + kv_hi + 128"],
        [f"{SHIFT} + kv_hi .. {SHIFT} + kv_lo + 128"],
    ),
    "symmetric window": Case(
        "abs(q - kv) <= width",
        ["q_lo - 128 .. q_hi + 129"],
        ["q_hi - 128 .. q_lo + 129"],
        ["kv_lo - 128 .. kv_hi + 129"],
        ["kv_hi - 128 .. kv_lo + 129"],
    ),
    "window per head": Case(
        "q_pos >= kv and q_pos - kv <= lookback[h]",
        ["q_pos_lo - lookback[h] .. q_pos_hi + 1"],
        ["q_pos_hi - lookback[h] .. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .. {SHIFT} + kv_hi + lookback[h] + 1"],
        [f"{SHIFT} + kv_hi .. {SHIFT} + kv_lo + lookback[h] + 1"],
    ),
    "prefix_lm": Case(
        "q_pos >= kv or kv < size[b]",
        [".. max(q_pos_hi + 1, size[b])"],
        [".. max(q_pos_lo + 1, size[b])"],
        [".. seqlen_q if kv_lo < size[b] else 0", f"{SHIFT} + kv_lo .."],
        [".. seqlen_q if kv_hi < size[b] else 0", f"{SHIFT} + kv_hi .."],
    ),
    "sink_window": Case(
        "q_pos >= kv and (q_pos - kv < window or kv < sinks)",
        [".. min(q_pos_hi + 1, sinks)", f"q_pos_lo - {WINDOW} + 1 .. q_pos_hi + 1"],
        [".. min(q_pos_lo + 1, sinks)", f"q_pos_hi - {WINDOW} + 1 .. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .. max({SHIFT} + kv_hi + {WINDOW}, seqlen_q if kv_lo < sinks else 0)"],
        [f"{SHIFT} + kv_hi .. max({SHIFT} + kv_lo + {WINDOW}, seqlen_q if kv_hi < sinks else 0)"],
    ),
    "chunked": Case(
        "q_pos >= kv and q_pos // chunk == kv // chunk",
        ["q_pos_lo // chunk * chunk .. q_pos_hi + 1"],
        ["q_pos_hi // chunk * chunk .. q_pos_lo + 1"],
        [f"{SHIFT} + kv_lo .. {SHIFT} + kv_hi // chunk * chunk + chunk"],
        [f"{SHIFT} + kv_hi .. {SHIFT} + kv_lo // chunk * chunk + chunk"],
    ),
    "chunked by a shift": Case(
        "q >> 6 == kv >> 6",
        ["q_lo // 64 * 64 .. q_hi // 64 * 64 + 64"],
        ["q_hi // 64 * 64 .. q_lo // 64 * 64 + 64"],
        ["kv_lo // 64 * 64 .. kv_hi // 64 * 64 + 64"],
        ["kv_hi // 64 * 64 .. kv_lo // 64 * 64 + 64"],
    ),
    "packed_documents": Case(
        "doc[b, q_pos] == doc[b, kv]",
        ["first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) .. "
         "first(doc[b, :] > doc[b, max(q_pos_hi, 0)], seqlen_k)"],
        ["first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) .. "
         f"first(doc[b, :] > doc[b, max(q_pos_hi, 0)], seqlen_k) if {SAME} else 0"],
        [f"{SHIFT} + first(doc[b, :] >= doc[b, kv_lo], seqlen_k) .. "
         f"{SHIFT} + first(doc[b, :] > doc[b, kv_hi], seqlen_k)"],
        [f"{SHIFT} + first(doc[b, :] >= doc[b, kv_lo], seqlen_k) .. "
         f"{SHIFT} + first(doc[b, :] > doc[b, kv_hi], seqlen_k) if doc[b, kv_lo] == doc[b, kv_hi] else 0"],
    ),
    "causal_packed": Case(
        "q_pos >= kv and doc[b, q_pos] == doc[b, kv]",
        ["first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) .. q_pos_hi + 1"],
        [f"first(doc[b, :] >= doc[b, max(q_pos_lo, 0)], seqlen_k) .. q_pos_lo + 1 if {SAME} else 0"],
        [f"{SHIFT} + kv_lo .. {SHIFT} + first(doc[b, :] > doc[b, kv_hi], seqlen_k)"],
        [f"{SHIFT} + kv_hi .. {SHIFT} + first(doc[b, :] > doc[b, kv_hi], seqlen_k) "
         "if doc[b, kv_lo] == doc[b, kv_hi] else 0"],
    ),
    "documents by their start": Case(
        "start[b, q_pos] <= kv and kv <= q_pos",
        ["start[b, max(q_pos_lo, 0)] .. q_pos_hi + 1"],
        ["start[b, max(q_pos_hi, 0)] .. q_pos_lo + 1"],
        [f"kv_lo - seqlen_k + seqlen_q .. {SHIFT} + first(start[b, :] > kv_hi, seqlen_k)"],
        [f"kv_hi - seqlen_k + seqlen_q .. {SHIFT} + first(start[b, :] > kv_lo, seqlen_k)"],
    ),
    "lengths": Case(
        "kv < size[b]",
        [".. size[b]"],
        [".. size[b]"],
        [".. seqlen_q if kv_lo < size[b] else 0"],
        [".. seqlen_q if kv_hi < size[b] else 0"],
    ),
    "flag": Case(
        "global_row[b] or q_pos >= kv",
        [".. max(seqlen_k if global_row[b] else 0, q_pos_hi + 1)"],
        [".. max(seqlen_k if global_row[b] else 0, q_pos_lo + 1)"],
        [".. seqlen_q if global_row[b] else 0", f"{SHIFT} + kv_lo .."],
        [".. seqlen_q if global_row[b] else 0", f"{SHIFT} + kv_hi .."],
    ),
    "strided": Case(
        "3 * kv <= 2 * q",
        [".. q_hi * 2 // 3 + 1"],
        [".. q_lo * 2 // 3 + 1"],
        ["(kv_lo * 3 + 1) // 2 .."],
        ["(kv_hi * 3 + 1) // 2 .."],
    ),
    "all but one": Case(
        "kv != q",
        [".. q_hi", "q_lo + 1 .."],
        [".. q_lo", "q_hi + 1 .."],
        [".. kv_hi", "kv_lo + 1 .."],
        [".. kv_lo", "kv_hi + 1 .."],
    ),
    "dilated": Case(
        "q_pos >= kv and (q_pos - kv) % dilation == 0",
        [".. q_pos_hi + 1"],
        [],
        [f"{SHIFT} + kv_lo .."],
        [],
        exact=False,
    ),
    "neighbourhood_2d": Case(
        "abs(q // chunk - kv // chunk) <= radius and abs(q % chunk - kv % chunk) <= radius",
        ["(q_lo // chunk - radius) * chunk .. (q_hi // chunk + radius) * chunk + chunk"],
        [],
        ["(kv_lo // chunk - radius) * chunk .. (kv_hi // chunk + radius) * chunk + chunk"],
        [],
        exact=False,
    ),
    "allowed": Case("allowed[q, kv]", [".."], [], [".."], [], exact=False),
    "coefficient of unknown sign": Case("kv * shift < q * shift", [".."], [], [".."], [], exact=False),
    "nothing": Case("kv < 0", [], [], [], []),
    "known to hold": Case("kv < seqlen_k and q_pos < seqlen_k", [".."], [".."], [".."], [".."]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bands_read_as_written_by_hand(name: str) -> None:
    case = CASES[name]
    chosen = variant(case.mask)
    facts = Facts.of(chosen)
    assert texts(bands(chosen.mask, facts)) == (case.visible, case.full, case.exact)
    assert texts(bands(chosen.mask, facts, over="q")) == (case.visible_q, case.full_q, case.exact)


def test_usual_masks_need_no_int64() -> None:
    far = {("chunked", "q"), ("strided", "q"), ("neighbourhood_2d", "kv"), ("neighbourhood_2d", "q")}
    for name, case in CASES.items():
        chosen = variant(case.mask)
        for over in ("kv", "q"):
            intervals = bands(chosen.mask, Facts.of(chosen), over)
            ends = [e for i in (*intervals.visible, *intervals.full) for e in (i.lo, i.hi) if e is not None]
            wide = any(isinstance(n, Op) and n.wide for e in ends for n in walk(e))
            assert wide == ((name, over) in far), (name, over)


def test_packed_heads_take_the_widest_window() -> None:
    chosen = variant("q_pos >= kv and kv >= h")
    intervals = bands(chosen.mask, Facts.of(chosen), heads="packed")
    assert texts(intervals)[:2] == (["h_lo .. q_pos_hi + 1"], ["h_hi .. q_pos_lo + 1"])


def test_packed_positions_are_positions_of_the_sequence() -> None:
    chosen = variant("q_global - q >= kv_global")
    assert texts(bands(chosen.mask, Facts.of(chosen)))[0] == [".. q_start - kv_start + 1"]


def test_more_than_four_intervals_become_their_hull() -> None:
    mask = variant(" or ".join(f"({n}000 <= q - kv and q - kv < {n}100)" for n in range(1, 7))).mask
    intervals = bands(mask)
    assert texts(intervals)[0] == ["q_lo - 6099 .. q_hi - 999"]
    assert len(intervals.full) <= LIMIT
    assert not intervals.exact


def test_large_masks_are_given_up_rather_than_exploded() -> None:
    nested = "q"
    for n in range(2, 9):
        nested = f"({nested} + kv % {n}) % {n + 20}"
    assert texts(bands(variant(f"kv < {nested}").mask)) == ([".."], [], False)
    cases = "q"
    for n in range(12):
        cases = f"({cases} if kv < q - {n} else {n})"
    assert bands(variant(f"kv < {cases}").mask).exact in (True, False)


# --- transposition ----------------------------------------------------------------------------------------

_SWAPPED = {"q": "kv", "kv": "q", "seqlen_q": "seqlen_k", "seqlen_k": "seqlen_q"}
_SWAPPED |= {f"{a}_{end}": f"{b}_{end}" for a, b in (("q", "kv"), ("kv", "q")) for end in ("lo", "hi")}


def swapped(expr: Expr | None) -> Expr | None:
    """Return an expression with queries and keys exchanged."""

    def rule(node: Expr) -> Expr | None:
        return Var(_SWAPPED.get(node.name, node.name), node.type) if isinstance(node, Var) else None

    return None if expr is None else rewrite(expr, rule)


@seeds(60, always=10)
def test_bands_over_queries_are_the_transpose(seed: int) -> None:
    """``q_pos`` apart, queries and keys are alike: exchanging them in the mask exchanges them in the bands."""
    masks = Masks(random.Random(seed), ("q", "kv", "q", "kv"))
    mask = masks.mask(2)
    if {"q_pos", "q_global", "kv_global"} & {n.name for n in walk(mask) if isinstance(n, Var)} or any(
        not isinstance(n, Op | Var) and hasattr(n, "tensor") for n in walk(mask)
    ):
        return
    over_kv, over_q = bands(mask, FACTS), bands(swapped(mask), FACTS, over="q")
    for a, b in ((over_kv.visible, over_q.visible), (over_kv.full, over_q.full)):
        assert [(swapped(i.lo), swapped(i.hi)) for i in a] == [(i.lo, i.hi) for i in b]


# --- brute force ------------------------------------------------------------------------------------------


@few("name", CASES, always=range(0, 25, 6))
def test_usual_masks_by_brute_force(name: str) -> None:
    chosen = variant(CASES[name].mask)
    facts = Facts.of(chosen)
    for seed in range(4):
        source = random.Random(f"{name} {seed}")
        world = World.random(source)
        k = int(world.env["seqlen_k"])
        world.env |= {"chunk": source.randrange(1, 9), "sinks": source.choice([0, 1, 5, 2**31 - 1])}
        world.env |= {"dilation": source.randrange(1, 4), "radius": source.randrange(3)}
        rows = range(world.arrays["doc"].shape[1])
        world.arrays |= {
            "start": world.arrays["doc"].clip(0) * 0 + sorted(source.randrange(k + 1) for _ in rows),
            "size": world.arrays["length"].clip(0, k),
            "global_row": world.arrays["length"] > 3,
            "allowed": world.arrays["sparse"],
            "lookback": world.arrays["reach"],
        }
        try:
            check_bands(chosen.mask, world, source, facts)
        except UnguardedError:
            continue


@seeds(100, always=5)
def test_no_position_is_lost_and_no_full_position_is_wrong(seed: int) -> None:
    source = random.Random(seed)
    mask, world = Masks(source).mask(seed % 4), World.random(source)
    try:
        check_bands(mask, world, source)
    except UnguardedError:
        return


def test_wrapping_conditions_are_not_taken_for_each_other() -> None:
    """Seen: two conditions that may wrap around in int64 were both unknown, hence "equal"."""
    wraps = [op("lt", op("add", var("big"), var(name)), const(3)) for name in ("q", "kv")]
    assert texts(bands(op("eq", *wraps), FACTS)) == ([".."], [], False)


def test_a_tensor_longer_than_the_sequence_is_not_cut_short() -> None:
    """``doc`` may have more than ``seqlen_k`` elements, so tiles of rows beyond that have no known bound."""
    ahead = op("add", var("q_pos"), const(2))
    mask = op("ge", load("doc", var("b"), ahead), load("doc", var("b"), var("kv")))
    last = "doc[b, max(min(q_pos_hi + 2, seqlen_k - 1), 0)] if q_pos_hi + 2 <= seqlen_k - 1 else 2147483647"
    assert texts(bands(mask, FACTS))[0] == [f".. first(doc[b, :] > ({last}), seqlen_k)"]


def test_the_end_of_a_causal_document_is_not_searched_for() -> None:
    """The last query that a row is compared with is itself a key of its document, unless it lies behind all keys."""
    visible, full, exact = texts(bands(variant("q >= kv and doc[b, q] == doc[b, kv]").mask, FACTS))
    assert [end.split(" .. ")[1] for end in visible] == ["min(q_hi + 1, seqlen_k)"]
    assert exact
    assert all(text.count("first(") == 1 for text in full)


def test_an_index_that_is_not_solved_makes_nothing_full() -> None:
    """Seen: ``T[i] == x`` was full wherever x is the same for all rows, though nothing was known of i."""
    position = op("floordiv", var("kv"), op("add", var("kv"), const(1)))
    assert texts(bands(op("eq", load("token", position), var("b")), FACTS)) == ([".."], [], False)


def test_bands_are_kept_for_the_same_facts_alone() -> None:
    """Bands are kept by mask and facts: equal facts in another order find them; facts that say less do not."""
    mask = variant("doc[b, q] == doc[b, kv]").mask
    tensors = {declared.name: declared for declared in DECLARED.values() if isinstance(declared, Tensor)}
    sorted_, plain = Facts({}, tensors), Facts({}, {"doc": Tensor("doc", "int32", ("b", "seqlen_k"))})
    for _ in range(2):
        assert bands(mask, sorted_).exact
        assert not bands(mask, plain).exact
    other_order = Facts({}, dict(reversed([*tensors.items()])))
    assert hash(other_order) == hash(sorted_)
    assert bands(mask, other_order) is bands(mask, sorted_)
    ranges = {"window": (1, 8), "sinks": (0, 4)}
    assert hash(Facts(ranges)) == hash(Facts(dict(reversed([*ranges.items()]))))
    assert Facts(ranges) != Facts({**ranges, "window": (1, 9)})
