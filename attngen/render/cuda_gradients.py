"""The user's mathematics in a CUDA backward: probabilities with the derivatives of their logits, and what sees a tile.

A block keeps keys and goes along the queries. A lane holds elements of two keys, its rows, whose columns are queries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attngen.lang.bands import classify
from attngen.lang.emit import Binding
from attngen.lang.facts import index
from attngen.lang.folding import PRODUCT, fold_logit, is_finite
from attngen.lang.ir import Expr, names
from attngen.lang.simplify import FALSE, TRUE
from attngen.plan.model import Plan
from attngen.plan.schedules.hopper_backward import derivative
from attngen.render.cuda_math import Steps, declarations, declared, masking, used, with_corners
from attngen.render.expressions import (
    CUDA,
    QUERIES,
    corner_bindings,
    emit_for,
    facts_of,
    scalar_bindings,
)

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_KV_FIRST = index("kv_first")
_ROW_NAMES = ("kv", "kv_packed", "row")
_COLUMN_NAMES = ("q_row", "q_pos", "q_packed")


@dataclass(frozen=True, slots=True)
class Probabilities:
    """How products become probabilities: the steps of partial and of full tiles, and what ``exp2`` is taken of.

    dK and dQ are multiplied by ``factor`` at the end: what all pairs share of the derivative of the logit by the
    product. ``weighted`` is the probability times the rest of it, which elements call ``derivative``; None without.
    """

    block: tuple[str, ...]
    partial: Steps
    full: Steps
    exponent: str
    factor: Expr
    weighted: str | None


def probabilities(plan: Plan) -> Probabilities:
    """Return the lines of a step."""
    variant = plan.variant
    logit = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    slope = derivative(variant, fast_math=plan.fast_math)
    roots = [logit.value, logit.multiplier, *([] if slope.varying is None else [slope.varying])]
    block: dict[str, None] = {}  # lines that are the same for all steps
    found, multiplier = [], ""
    for partial in (True, False):
        bound = _elements(plan)
        scored = emit_for(plan, CUDA, roots, bound, inner="q")
        hoisted, body = list(scored.hoisted), list(scored.body)
        if slope.varying is not None:
            body.append(f"const float derivative = {scored.results[2]};")
        if variant.score is not None:
            body.append(f"x = {scored.results[0]};")
        if partial:
            mask = masking(plan, bound, declared([*hoisted, *body]), key="8 * row", along=QUERIES)
            hoisted += [line for line in mask.hoisted if line not in hoisted]
            body = [*mask.body, *mask.ends, *body, mask.test]
        once, hoisted = _once(hoisted)
        block |= dict.fromkeys(once)
        found.append(_steps(hoisted, body))
        multiplier = scored.results[1]
    if variant.score is None:
        block = {"const float scale_log2e = softmax_scale * kLog2e;": None, **block}
        multiplier = "scale_log2e"
    return Probabilities(
        block=tuple(block),
        partial=found[0],
        full=found[1],
        exponent=_exponent(multiplier),
        factor=slope.factor,
        weighted=_weighted(slope.varying),
    )


def _weighted(slope: Expr | None) -> str | None:
    """Return the probability times the derivative of its logit; zero times infinity is no zero, so it is selected."""
    if slope is None:
        return None
    return "x * derivative" if is_finite(slope) else "x != 0.0f ? x * derivative : 0.0f"


def _once(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part lines into those that depend on arguments of the kernel only, and the others."""
    varying = {*_ROW_NAMES, "kv_first", "b", "h", "hk", "q_begin", "k_begin", "seqlen_q", "seqlen_k"}
    parts: tuple[list[str], list[str]] = ([], [])
    for line in lines:
        depends = not varying.isdisjoint(re.findall(r"\w+", line))
        if depends:
            varying.update(declared([line]))
        parts[depends].append(line)
    return parts


def _exponent(multiplier: str) -> str:
    """Return the logarithm of a probability."""
    lse = "(j == 0 ? lse.x : lse.y)"
    return f"x - {lse}" if multiplier == "1.0f" else f"fmaf(x, {multiplier}, -{lse})"


def factor(plan: Plan, expr: Expr) -> tuple[tuple[str, ...], str]:
    """Return the lines and the text of the factor of dK and dQ."""
    code = emit_for(plan, CUDA, [expr], scalar_bindings(plan, CUDA))
    return (*code.hoisted, *code.body), code.results[0]


def _steps(hoisted: Sequence[str], body: Sequence[str]) -> Steps:
    """Return the lines of a tile, each where it runs least often: for the tile, a key, a query, or each pair."""
    row_names = set(_ROW_NAMES)
    row, tile = [], []
    for line in hoisted:
        if row_names & set(re.findall(r"\w+", line)):
            row.append(line)
            row_names.update(declared([line]))
        else:
            tile.append(line)
    varying = {"x", "derivative", *row_names}
    column, element = [], []
    for line in body:
        if varying & set(re.findall(r"\w+", line)):
            element.append(line)
            varying.update(declared([line]))
        else:
            column.append(line)
    column = used(column, element)
    row = used(row, element)
    row = [*_key_lines("\n".join([*row, *element])), *row]
    texts = set(re.findall(r"\w+", "\n".join(element)))
    return Steps(
        tile=tuple(used(tile, [*row, *column, *element])),
        row=tuple(row),
        row_values=tuple((type, name) for type, name in declarations(row) if name in texts),
        key=(*_query_lines("\n".join([*column, *element])), *column),
        element=tuple(element),
    )


def _elements(plan: Plan) -> dict[str, Binding]:
    """Return the bindings of a pair. Queries and keys beyond the end repeat the last one, so that loads stay inside."""
    rows = {
        "q": Binding("q_row", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _Q, below=frozenset({"total_q"})),
        "kv": Binding("kv", _KV, below=frozenset({"seqlen_k", "total_k"})),
        "kv_global": Binding("kv_packed", _KV, below=frozenset({"seqlen_k", "total_k"})),
        PRODUCT.name: Binding("x", _Q | _KV),
        _KV_FIRST.name: Binding("kv_first"),
        "q_start": Binding("q_begin"),
        "kv_start": Binding("k_begin"),
    }
    return scalar_bindings(plan, CUDA) | rows


def _key_lines(texts: str) -> list[str]:
    lines = []
    if re.search(r"\bkv(_packed)?\b", texts):
        lines.append(
            "const int kv = min(kv_first + 8 * row, seqlen_k - 1);  // keys behind the end repeat the last one"
        )
    if re.search(r"\bkv_packed\b", texts):
        lines.append("const int kv_packed = k_begin + kv;")
    return lines


def _query_lines(texts: str) -> list[str]:
    wanted = [name for name in _COLUMN_NAMES if re.search(rf"\b{name}\b", texts)]
    lines = []
    if wanted:
        lines.append(
            "const int q_row = min(q_first + 8 * i + j, seqlen_q - 1);  // rows behind the end repeat the last one"
        )
    if "q_pos" in wanted:
        lines.append("const int q_pos = q_row + (seqlen_k - seqlen_q);")
    if "q_packed" in wanted:
        lines.append("const int q_packed = q_begin + q_row;")
    return lines


# --- which queries see a tile of keys -----------------------------------------------------------------------


def query_word(plan: Plan) -> tuple[str, ...]:
    """Return the lines that make the bits of 32 tiles: from the tile map, or by classifying them in the kernel."""
    if plan.driver == "tile_map":
        rows = "b * stride_tile_map_b + h * stride_tile_map_h + kv_tile * stride_tile_map_kv"
        return (
            f"const int* tile_map = tile_map_ptr + {rows};",
            "const uint32_t partial_word = tile_map[words + word];",
            "const uint32_t visible_word = tile_map[word] | partial_word;",
        )
    may, must = classify(plan.variant.mask, facts_of(plan))
    code = emit_for(plan, CUDA, [may, must], corner_bindings(plan, CUDA, QUERIES), prefix="tiles_", inner="q")
    asked = names(may) | names(must)
    lines = ["const int candidate = 32 * word + lane;"]
    if asked & {"q_lo", "q_hi", "q_pos_lo", "q_pos_hi"}:
        lines.append("const int q_lo = candidate * kBlockM, q_hi = q_lo + (kBlockM - 1);")
    if asked & {"q_pos_lo", "q_pos_hi"}:
        lines.append("const int q_pos_lo = q_lo + (seqlen_k - seqlen_q), q_pos_hi = q_hi + (seqlen_k - seqlen_q);")
    inside = "candidate >= visible_lo && candidate < visible_hi"
    # a tile behind which queries end is one that the mask cuts, if it is not out of sight
    behind = "(candidate + 1) * kBlockM > seqlen_q"
    seen = inside if may == TRUE else f"{inside} && (({code.results[0]}) || {behind})"
    whole = "false" if must == FALSE else f"({code.results[1]}) && !({behind})"
    return with_corners(
        [
            *lines,
            *code.hoisted,
            *code.body,
            f"const bool seen = {seen};",
            "const uint32_t visible_word = __ballot_sync(~0u, seen);",
            f"const uint32_t partial_word = __ballot_sync(~0u, !({whole}));",
        ],
        along=QUERIES,
    )
