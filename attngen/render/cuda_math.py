"""The user's mathematics as CUDA lines: the logits of a tile, and which tiles a row box sees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attngen.lang.bands import Bands, bands, classify
from attngen.lang.emit import Binding
from attngen.lang.folding import PRODUCT, fold_logit
from attngen.lang.ir import names
from attngen.lang.segments import segments
from attngen.lang.simplify import FALSE, TRUE
from attngen.plan.model import Plan
from attngen.render.expressions import (
    CUDA,
    SEQLEN_K,
    TILE_N,
    corner_bindings,
    emit_for,
    emit_named,
    facts_of,
    hull_ends,
    inward,
    numbered,
    scalar_bindings,
    settled,
)

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ROW_NAMES = ("q_row", "q_pos", "q_packed")


@dataclass(frozen=True, slots=True)
class Logits:
    """How products become logits: lines once for a tile of work, once for a row, and once for an element ``x`` of a
    partial and of a full tile (none where nothing happens to it); and the factor that leads to units of log2."""

    work: tuple[str, ...]
    row: tuple[str, ...]
    partial: tuple[str, ...]
    full: tuple[str, ...]
    multiplier: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which tiles a box of rows sees: the lines that find it out, and the ends of ranges by the names of their
    fields."""

    lines: tuple[str, ...]
    visible: tuple[tuple[str, str], ...]
    full: tuple[tuple[str, str], ...]
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Word:
    """The lines that list 32 tiles as bits: ``visible_word``, and ``partial_word`` of those that need the mask."""

    lines: tuple[str, ...]


def logits(plan: Plan) -> Logits:
    """Return the lines of the logits."""
    variant = plan.variant
    folded = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    hoisted: dict[str, None] = {}
    bodies: list[list[str]] = []
    multiplier = ""
    for ragged in (True, False):
        bound = _elements(plan, ragged=ragged)
        scored = emit_for(plan, CUDA, [folded.value, folded.multiplier], bound)
        hoisted |= dict.fromkeys(scored.hoisted)
        lines = [*scored.body]
        if variant.score is not None:
            lines.append(f"x = {scored.results[0]};")
        if ragged:
            masked = emit_for(plan, CUDA, [variant.mask], bound, taken=_declared([*scored.hoisted, *scored.body]))
            hoisted |= dict.fromkeys(masked.hoisted)
            tests = ["kv < seqlen_k"]
            if variant.masked:
                test = masked.results[0]
                tests.append(f"({test})" if "||" in test or "?" in test else test)
            lines += [*masked.body, f"if (!({' && '.join(tests)})) x = kMasked;"]
        bodies.append(_with_keys(lines))
        multiplier = scored.results[1]
    row, work = _split(list(hoisted))
    if variant.score is None:
        work, multiplier = ["const float scale_log2e = softmax_scale * kLog2e;", *work], "scale_log2e"
    elif not re.fullmatch(r"[\w.]+", multiplier):
        work, multiplier = [*work, f"const float scale_log2e = {multiplier};"], "scale_log2e"
    texts = "\n".join([*row, *bodies[0], *bodies[1]])
    return Logits(tuple(work), (*_row_lines(texts), *row), tuple(bodies[0]), tuple(bodies[1]), multiplier)


def _elements(plan: Plan, *, ragged: bool) -> dict[str, Binding]:
    """Return the bindings of an element. Rows beyond the end repeat the last one; keys may lie beyond it if ragged."""
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    return scalar_bindings(plan, CUDA) | {
        "q": Binding("q_row", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _Q, below=frozenset({"total_q"})),
        "kv": Binding("kv", _KV, below=keys),
        "kv_global": Binding("kv_packed", _KV, below=keys),
        PRODUCT.name: Binding("x", _Q | _KV),
    }


def _with_keys(lines: list[str]) -> list[str]:
    """Return the lines of an element behind the index of its key, where they use it."""
    texts = "\n".join(lines)
    before = []
    if re.search(r"\bkv(_packed)?\b", texts):
        before.append("const int kv = kv_first + 8 * (i / 2) + i % 2;")
    if "kv_packed" in texts:
        before.append("const int kv_packed = k_begin + kv;")
    return [*before, *lines]


def _row_lines(texts: str) -> list[str]:
    used = [name for name in _ROW_NAMES if re.search(rf"\b{name}\b", texts)]
    if not used:
        return []
    lines = ["const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows behind the end repeat the last one"]
    if "q_pos" in used:
        lines.append("const int q_pos = q_row + (seqlen_k - seqlen_q);")
    if "q_packed" in used:
        lines.append("const int q_packed = q_begin + q_row;")
    return lines


def _split(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines that depend on the row, and those that are the same for all rows of a tile of work."""
    varying = set(_ROW_NAMES)
    row, work = [], []
    for line in lines:
        if varying & set(re.findall(r"\w+", line)):
            row.append(line)
            varying.update(_declared([line]))
        else:
            work.append(line)
    return row, work


def _declared(lines: Iterable[str]) -> list[str]:
    """Return the names that statements declare."""
    return [match[1] for line in lines if (match := re.match(r"const [\w ]+[ *]+(\w+) = ", line))]


@dataclass(frozen=True, slots=True)
class Elements:
    """The mask of one element of the classifier: what comes before all, lines for the element, and the test."""

    hoisted: tuple[str, ...]
    lines: tuple[str, ...]
    visible: str


def elements(plan: Plan) -> Elements:
    """Return the mask of one pair of row and key, neither of which need be inside the sequence."""
    bound = _elements(plan, ragged=True)
    masked = emit_for(plan, CUDA, [plan.variant.mask], bound)
    row, work = _split(masked.hoisted)
    texts = "\n".join([*row, *masked.body, *masked.results])
    lines = []
    if re.search(r"\bq_pos\b", texts):
        lines.append("const int q_pos = q_row + (seqlen_k - seqlen_q);")
    if re.search(r"\bq_packed\b", texts):
        lines.append("const int q_packed = q_begin + q_row;")
    if re.search(r"\bkv_packed\b", texts):
        lines.append("const int kv_packed = k_begin + kv;")
    return Elements(tuple(work), (*lines, *row, *masked.body), masked.results[0])


# --- which tiles a box of rows sees -------------------------------------------------------------------------


def tiles(plan: Plan) -> Tiles:
    """Return the ranges of visible and of full tiles, or the hull that a listing goes through."""
    found = bands(plan.variant.mask, facts_of(plan), over="kv")
    if plan.driver != "ranges":
        texts, lines = emit_named(plan, CUDA, hull_ends(plan, found))
        lines += [f"const int {name} = {text};" for name, text in texts.items() if text != name]
        return Tiles(_with_corners(lines), (("visible_lo", "visible_hi"),), (), texts)
    bounded = Bands(found.visible, (), exact=True)
    visible = list(segments(bounded, TILE_N, SEQLEN_K, facts_of(plan)).partial)
    full = [inward(plan, interval) for interval in found.full]
    ends = numbered("visible", visible) | numbered("full", full)
    texts, lines = emit_named(plan, CUDA, {name: settled(plan, end) for name, end in ends.items()})
    fields = list(ends)
    pairs = [(fields[i], fields[i + 1]) for i in range(0, len(fields), 2)]
    corners = _with_corners(lines, list(texts.values()))
    return Tiles(corners, tuple(pairs[: len(visible)]), tuple(pairs[len(visible) :]), texts)


def _with_corners(lines: Sequence[str], others: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the lines behind definitions of the corners that they, or the ``others``, use."""
    texts = "\n".join([*lines, *others])
    corners = []
    if "q_pos_lo" in texts:
        corners.append("const int q_pos_lo = q_start + (seqlen_k - seqlen_q);")
    if "q_pos_hi" in texts:
        corners.append("const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);")
    return (*corners, *lines)


def word(plan: Plan) -> Word:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.driver == "tile_map":
        rows = "b * stride_tile_map_b + h * stride_tile_map_h + q_start / kBlockM * stride_tile_map_q"
        return Word(
            (
                f"const int* tile_map = tile_map_ptr + {rows};",
                "const uint32_t partial_word = tile_map[words + word];",
                "const uint32_t visible_word = tile_map[word] | partial_word;",
            )
        )
    may, must = classify(plan.variant.mask, facts_of(plan))
    code = emit_for(plan, CUDA, [may, must], corner_bindings(plan, CUDA), prefix="tiles_")
    lines = ["const int candidate = 32 * word + lane;"]
    if {"kv_lo", "kv_hi"} & (names(may) | names(must)):
        lines += ["const int kv_lo = candidate * kBlockN, kv_hi = kv_lo + (kBlockN - 1);"]
    listed = "candidate >= visible_lo && candidate < visible_hi"
    seen = listed if may == TRUE else f"{listed} && ({code.results[0]})"
    # the mask's code runs in the ragged last tile too, since keys end in it
    whole = "false" if must == FALSE else f"({code.results[1]}) && (candidate + 1) * kBlockN <= seqlen_k"
    lines += [
        *code.hoisted,
        f"const bool seen = {seen};",
        "const uint32_t visible_word = __ballot_sync(~0u, seen);",
        f"const uint32_t partial_word = __ballot_sync(~0u, !({whole}));",
    ]
    return Word(_with_corners(lines))
