"""The user's mathematics in the kernels of a Triton backward: probabilities, their derivatives, and what they reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.folding import ONE, PRODUCT, Slope, fold_slope, fold_variant, is_finite
from attngen.lang.ir import Expr, Load, Var, names
from attngen.lang.simplify import mul
from attngen.lang.statements import Code, Statement, declared, depending, joined, leaf, reads, statement, written
from attngen.plan.model import Plan
from attngen.plan.own_gradients import differentiable
from attngen.plan.symbols import extent_name, gradient_pointer
from attngen.render.expressions import KEYS, QUERIES, TRITON, Along, emit_for, in_product, scalar_bindings
from attngen.render.triton_math import assign, hide, of_pairs

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV


@dataclass(frozen=True, slots=True)
class TileOrientation:
    """Layout of a kernel's tile, and the axis of its loop: keys by rows and queries by columns, or the other way.

    ``row`` and ``key`` turn the name of a vector into one of a tile.
    """

    along: Along
    row: str
    key: str
    tile: str

    def of_row(self, name: str) -> str:
        """Return a vector of query rows as part of a tile: a pattern."""
        return f"{{{name}}}{self.row}"


#: dK and dV: keys by rows, so that the products with P and dS take these from registers.
BY_KEYS = TileOrientation(QUERIES, "[None, :]", "[:, None]", "[BLOCK_N, BLOCK_M]")
#: dQ: queries by rows, as in the forward.
BY_QUERIES = TileOrientation(KEYS, "[:, None]", "[None, :]", "[BLOCK_M, BLOCK_N]")


@dataclass(frozen=True, slots=True)
class GradientLines:
    """Everything of a kernel that depends on mask and score: lines before its loop, inside it and after it.

    A step goes from the product to the ``logit``, hides what is not visible (``mask``, where a tile needs it), and
    takes the probability and its ``derivative``, dS. ``factor`` multiplies the finished dQ or dK. ``before`` and
    ``after`` the loop stand the lines of the gradients of the variant's own tensors. Of the lines before the loop
    those ``of_head`` differ from head to head; ``mask_by_head``: the tiles do, too.
    """

    hoisted: tuple[Statement, ...]
    of_head: tuple[Statement, ...]
    logit: tuple[Statement, ...]
    mask: tuple[Statement, ...]
    derivative: tuple[Statement, ...]
    factor_lines: tuple[Statement, ...]
    factor: Code
    before: tuple[Statement, ...]
    after: tuple[Statement, ...]
    mask_by_head: bool


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The gradient of one element that the score reads: its number among all, and its derivative."""

    number: int
    load: Load
    derivative: Code
    axes: frozenset[str]  # of the element
    indices: tuple[Code, ...]

    @property
    def name(self) -> str:
        return f"gradient_{self.number}"


def gradients(plan: Plan, form: TileOrientation, before: Sequence[Statement]) -> GradientLines:
    """Return the statements of a kernel; ``before`` are those that stand earlier, whose names are not used again."""
    variant, inner = plan.variant, form.along.axis
    logit = fold_variant(variant, fast_math=plan.fast_math)
    own = differentiable(plan) if form is BY_QUERIES else ()
    slope = fold_slope(logit, own, fast_math=plan.fast_math)
    if form is BY_KEYS and "h" in names(slope.factor):  # dK sums over the heads of a group
        slope = Slope(ONE, mul(slope.varying or ONE, slope.factor), slope.loads)
    bound = _elements(plan, form)
    roots: list[Expr] = [logit.value, logit.multiplier, slope.varying or ONE]
    for load, by_load in slope.loads:
        roots += [by_load, *load.indices]
    taken = declared(before)
    scored = emit_for(plan, TRITON, roots, bound, taken=taken, inner=inner)
    taken += declared([*scored.hoisted, *scored.body])
    masked = emit_for(plan, TRITON, [variant.mask], bound, taken=taken, inner=inner)
    hoisted = [*scored.hoisted, *masked.hoisted]
    taken += declared([*masked.hoisted, *masked.body])
    factor = emit_for(plan, TRITON, [slope.factor], bound, taken=taken)
    tensors = _own_tensors(slope, scored)
    plain = variant.score is None
    lines = [*scored.body] if plain else [*scored.body, assign("logit", of_pairs(scored, form.tile))]
    inside = written("{q_index}[None, :] < {seqlen_q}" if form is BY_KEYS else "{kv_index}[None, :] < {seqlen_k}")
    name = "s" if plain else "logit"
    mask = [*masked.body, *hide(name, [inside, *[masked.results[0]] * variant.masked])]
    multiplier = leaf("scale_log2e") if plain else scored.results[1]
    derivative = _derivative(plan, form, name, multiplier, scored, slope, tensors)
    if variant.dropout:
        derivative = _dropped(form, derivative)
    for part in (lines, mask, derivative):
        _number_pairs(form, part, earlier=lines if part is not lines else [])
    kept, number = ("q_packed", "{q_begin} + {q_row}") if form is BY_QUERIES else ("kv_packed", "{k_begin} + {kv_row}")
    if kept in reads([*hoisted, *lines, *mask, *derivative]):
        hoisted.insert(0, assign(kept, number))
    by_row = [tensor for tensor in tensors if "kv" not in tensor.axes]
    of_head, shared = depending(hoisted, {"h"})
    return GradientLines(
        hoisted=shared,
        of_head=of_head,
        logit=tuple(lines),
        mask=tuple(mask),
        derivative=tuple(derivative),
        factor_lines=factor.hoisted,
        factor=factor.results[0],
        before=tuple(assign(tensor.name, "tl.zeros([BLOCK_M], tl.float32)") for tensor in by_row),
        after=tuple(_finish(plan, tensor) for tensor in by_row),
        mask_by_head="h" in names(variant.mask) or plan.iteration == "tile_map",
    )


def _own_tensors(slope: Slope, scored: EmittedMany) -> list[_Tensor]:
    """Code for each tensor element that gets a gradient: its derivative, then its indices."""
    tensors, place = [], 3
    for number, (load, _) in enumerate(slope.loads):
        end = place + 1 + len(load.indices)
        axes = frozenset[str]().union(*scored.axes[place + 1 : end])
        tensors.append(_Tensor(number, load, scored.results[place], axes, scored.results[place + 1 : end]))
        place = end
    return tensors


def _number_pairs(form: TileOrientation, lines: list[Statement], earlier: Sequence[Statement]) -> None:
    """Put the statements that number the queries or keys of a step before the first ones that read them."""
    read, known = reads(lines), declared(earlier)
    needed = (
        {"q_pos": "{q_index} + ({seqlen_k} - {seqlen_q})", "q_packed": "{q_begin} + {q_index}"}
        if form is BY_KEYS
        else {"kv_packed": "{k_begin} + {kv_index}"}
    )
    for name, value in needed.items():
        if name in read and name not in known:
            lines.insert(0, assign(name, value))


def _derivative(
    plan: Plan,
    form: TileOrientation,
    logit: str,
    multiplier: Code,
    scored: EmittedMany,
    slope: Slope,
    tensors: Sequence[_Tensor],
) -> list[Statement]:
    """Return the statements from the logit to dS, which lacks the factor. A pair that is hidden has the probability 0.

    Where a derivative of the score may be infinite, such a pair is selected away: zero times infinity is not zero.
    """
    scaled = leaf(logit) if multiplier.text == "1.0" else written("{} * {}", leaf(logit), _factor(multiplier))
    if not plan.variant.has_lse:
        lines = [assign("p", written("1.0 / (1.0 + tl.exp2(-({})))", scaled))]
        return _with_ds(plan, lines, written("{p} * (1.0 - {p}) * {dp}"), scored, slope, tensors)
    argument = written("{} - {}", scaled, written(form.of_row("lse_log2")))
    if not plan.fast_math:  # a probability is at most 1, however large the logit is that was rounded
        argument = written("tl.minimum({}, 0.0, propagate_nan=tl.PropagateNan.ALL)", argument)
    lines = [assign("p", written("tl.exp2({})", argument))]
    value = written("{p} * ({dp} - {})", written(form.of_row("delta")))
    return _with_ds(plan, lines, value, scored, slope, tensors)


def _with_ds(
    plan: Plan, lines: list[Statement], value: Code, scored: EmittedMany, slope: Slope, tensors: Sequence[_Tensor]
) -> list[Statement]:
    """The ``lines`` of the probability, and those from the derivative by a logit, ``value``, to dS."""
    varying = None if slope.varying is None else _factor(scored.results[2])
    derivatives = [slope.varying, *(derivative for _, derivative in slope.loads)]
    certain = all(is_finite(derivative) for derivative in derivatives if derivative is not None)
    if not tensors:
        value = value if varying is None else written("{} * {}", value, varying)
        return [*lines, assign("ds", value if certain else written("tl.where({p} != 0.0, {}, 0.0)", value))]
    # rows after the last one must not add to what is shared
    guard = written("({q_index}[:, None] < {seqlen_q}) & ({p} != 0.0)")
    lines.append(assign("dlogit", written("tl.where({}, {}, 0.0)", guard, value)))
    lines += [line for tensor in tensors for line in _contribute(plan, tensor, guard)]
    whole = leaf("dlogit") if varying is None else written("tl.where({}, {dlogit} * {}, 0.0)", guard, varying)
    return [*lines, assign("ds", whole)]


def _factor(value: Code) -> Code:
    return in_product(value, TRITON)


def _dropped(form: TileOrientation, derivative: Sequence[Statement]) -> list[Statement]:
    """Return the statements from the logit to dS with dropout: what is dropped has a dP of 0 and no part in dV."""
    unit = written("{b} * {heads} + {h}" if form is BY_KEYS else "{unit}")
    state = "{dropout_seed}, {dropout_offset}, {}, {dropout_threshold}"
    dropped = written(f"kept_pairs({state}, {{q_start}}, {{kv_start}}, BLOCK_M, BLOCK_N)", unit)
    lines = [
        assign("kept", written("tl.trans({})", dropped) if form is BY_KEYS else dropped),
        assign("dp", "tl.where({kept}, {dp} * {dropout_scale}, 0.0)"),
        *derivative,
    ]
    return [*lines, assign("p", "tl.where({kept}, {p}, 0.0)")] if form is BY_KEYS else lines


def _elements(plan: Plan, form: TileOrientation) -> dict[str, Binding]:
    """Return the bindings inside a step. What a block keeps stays inside its sequence by repeating the last one."""
    nothing: frozenset[str] = frozenset()
    by_keys = form is BY_KEYS
    rows, keys = ("q_index", "kv_row") if by_keys else ("q_row", "kv_index")
    inside_k = frozenset({"seqlen_k", "total_k"}) if by_keys else nothing

    def query(text: str, end: str) -> Binding:
        return Binding(form.of_row(text), _Q, below=nothing if by_keys else frozenset({end}))

    return scalar_bindings(plan, TRITON) | {
        "q": query(rows, "seqlen_q"),
        "q_pos": query("q_pos", "seqlen_k"),
        "q_global": query("q_packed", "total_q"),
        "kv": Binding(f"{{{keys}}}{form.key}", _KV, below=inside_k),
        "kv_global": Binding(f"{{kv_packed}}{form.key}", _KV, below=inside_k),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


# --- gradients of the variant's own tensors -----------------------------------------------------------------


def _contribute(plan: Plan, tensor: _Tensor, guard: Code) -> list[Statement]:
    """Return the statements that add what one tile gives: to a sum of each row where the element is one of a row."""
    value = leaf("dlogit")
    if tensor.derivative.text != "1.0":
        value = written("tl.where({}, {dlogit} * {}, 0.0)", guard, _factor(tensor.derivative))
    if "kv" not in tensor.axes:
        return [statement("{} += tl.sum({}, 1)", leaf(tensor.name), value)]
    if tensor.axes == _KV:
        return [_add(plan, tensor, written("tl.sum({}, 0)[None, :]", value), [])]
    contribution = leaf("contribution")
    return [assign("contribution", value), _add(plan, tensor, contribution, [written("({} != 0.0)", contribution)])]


def _finish(plan: Plan, tensor: _Tensor) -> Statement:
    """Return the statement that adds the sums of all rows to the element, or each to that of its row."""
    sums = leaf(tensor.name)
    if tensor.axes:
        return _add(plan, tensor, written("{}[:, None]", sums), [written("({q_index}[:, None] < {seqlen_q})")])
    return _add(plan, tensor, written("tl.sum({})", sums), [])


def _add(plan: Plan, tensor: _Tensor, value: Code, tests: list[Code]) -> Statement:
    declared = plan.variant.tensor(tensor.load.tensor)
    extents = [leaf(extent_name(declared, axis)) for axis in range(len(declared.shape))]
    parts, tests = [leaf(gradient_pointer(declared.name))], list(tests)
    for axis, (index, node) in enumerate(zip(tensor.indices, tensor.load.indices, strict=True)):
        wide = index if index.text.lstrip("-").isdecimal() else written("{}.to(tl.int64)", _factor(index))
        parts.append(joined(" * ", [wide, *extents[axis + 1 :]]))
        if not (isinstance(node, Var) and (node.name, declared.shape[axis]) in _NEVER_OUTSIDE):
            tests.append(written("({index} >= 0) & ({index} < {})", extents[axis], index=index))
    mask = written(", mask={}", joined(" & ", tests)) if tests else ""
    return statement('tl.atomic_add({}, {}{}, sem="relaxed")', joined(" + ", parts), value, mask)


#: Pairs of index and extent that are inside by their meaning.
_NEVER_OUTSIDE = {("b", "b"), ("h", "h"), ("h", "heads"), ("hk", "hk"), ("hk", "kv_heads")}
