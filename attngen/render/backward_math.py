"""The user's mathematics in the kernels of a Triton backward: probabilities, their derivatives, and what they reach."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.folding import ONE, PRODUCT, Slope, fold_logit, fold_slope, is_finite
from attngen.lang.ir import Expr, Load, Var, names
from attngen.lang.simplify import mul
from attngen.plan.model import Plan
from attngen.plan.own_gradients import differentiable
from attngen.plan.symbols import extent_name, gradient_pointer
from attngen.render.expressions import KEYS, QUERIES, TRITON, Along, atom, emit_for, scalar_bindings
from attngen.render.triton_math import defined, statements

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_ELEMENT = _Q | _KV


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel lays a tile out, and what it goes along: keys by rows and queries by columns, or the other way.

    ``row`` and ``key`` turn the name of a vector into one of a tile.
    """

    along: Along
    row: str
    key: str
    tile: str

    def of_row(self, name: str) -> str:
        """Return a vector of query rows as part of a tile."""
        return f"{name}{self.row}"


#: dK and dV: keys by rows, so that the products with P and dS take these from registers.
BY_KEYS = Form(QUERIES, "[None, :]", "[:, None]", "[BLOCK_N, BLOCK_M]")
#: dQ: queries by rows, as in the forward.
BY_QUERIES = Form(KEYS, "[:, None]", "[None, :]", "[BLOCK_M, BLOCK_N]")


@dataclass(frozen=True, slots=True)
class Gradients:
    """Everything of a kernel that depends on mask and score: lines before its loop, inside it and behind it.

    A step goes from the product to the ``logit``, hides what is not visible (``mask``, where a tile needs it), and
    takes the probability and its ``derivative``, dS. ``factor`` multiplies the finished dQ or dK. ``before`` and
    ``after`` the loop stand the lines of the gradients of the variant's own tensors. Of the lines before the loop
    those ``of_head`` differ from head to head; ``mask_by_head``: the tiles do, too.
    """

    hoisted: tuple[str, ...]
    of_head: tuple[str, ...]
    logit: tuple[str, ...]
    mask: tuple[str, ...]
    derivative: tuple[str, ...]
    factor_lines: tuple[str, ...]
    factor: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    mask_by_head: bool


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The gradient of one element that the score reads: its number among all, and the texts of its derivative."""

    number: int
    load: Load
    derivative: str
    axes: frozenset[str]  # of the element
    indices: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"gradient_{self.number}"


def gradients(plan: Plan, form: Form, before: Sequence[str]) -> Gradients:
    """Return the lines of a kernel; ``before`` are lines that stand earlier, whose names are not used again."""
    variant, inner = plan.variant, form.along.axis
    logit = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    own = differentiable(plan) if form is BY_QUERIES else ()
    slope = fold_slope(logit, own, fast_math=plan.fast_math)
    if form is BY_KEYS and "h" in names(slope.factor):  # dK sums over the heads of a group
        slope = Slope(ONE, mul(slope.varying or ONE, slope.factor), slope.loads)
    bound = _elements(plan, form)
    roots: list[Expr] = [logit.value, logit.multiplier, slope.varying or ONE]
    for load, by_load in slope.loads:
        roots += [by_load, *load.indices]
    taken = defined(before)
    scored = emit_for(plan, TRITON, roots, bound, taken=taken, inner=inner)
    taken += defined([*scored.hoisted, *scored.body])
    masked = emit_for(plan, TRITON, [variant.mask], bound, taken=taken, inner=inner)
    hoisted = [*scored.hoisted, *masked.hoisted]
    taken += defined([*masked.hoisted, *masked.body])
    factor = emit_for(plan, TRITON, [slope.factor], bound, taken=taken)
    tensors = _own_tensors(slope, scored)
    plain = variant.score is None
    lines = [*scored.body] if plain else [*scored.body, f"logit = {_of_pairs(scored, form)}"]
    visible = ["q_index[None, :] < seqlen_q" if form is BY_KEYS else "kv_index[None, :] < seqlen_k"]
    visible += [masked.results[0]] * variant.masked
    name = "s" if plain else "logit"
    mask = [
        *masked.body,
        f"visible = {' & '.join(f'({test})' for test in visible) if len(visible) > 1 else visible[0]}",
        f'{name} = tl.where(visible, {name}, float("-inf"))',
    ]
    derivative = _derivative(plan, form, name, "scale_log2e" if plain else scored.results[1], scored, slope, tensors)
    if variant.dropout:
        derivative = _dropped(form, derivative)
    for part in (lines, mask, derivative):
        _number_pairs(form, part, earlier=lines if part is not lines else [])
    texts = "\n".join([*hoisted, *lines, *mask, *derivative])
    kept = ("q_packed", "q_begin + q_row") if form is BY_QUERIES else ("kv_packed", "k_begin + kv_row")
    if kept[0] in texts:
        hoisted.insert(0, " = ".join(kept))
    by_row = [tensor for tensor in tensors if "kv" not in tensor.axes]
    shared, of_head = _by_head(hoisted)
    return Gradients(
        hoisted=shared,
        of_head=of_head,
        logit=tuple(lines),
        mask=tuple(mask),
        derivative=tuple(derivative),
        factor_lines=factor.hoisted,
        factor=factor.results[0],
        before=tuple(f"{tensor.name} = tl.zeros([BLOCK_M], tl.float32)" for tensor in by_row),
        after=tuple(line for tensor in by_row for line in _finish(plan, tensor)),
        mask_by_head="h" in names(variant.mask) or plan.driver == "tile_map",
    )


def _by_head(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Part lines into those that are the same for all heads and those that depend on ``h``, in order."""
    of_head = {"h"}
    parts: tuple[list[str], list[str]] = ([], [])
    for statement in statements(lines):
        depends = not of_head.isdisjoint(re.findall(r"\w+", statement))
        if depends:
            of_head |= set(defined([statement]))
        parts[depends].extend(statement.splitlines())
    return tuple(parts[0]), tuple(parts[1])


def _own_tensors(slope: Slope, scored: EmittedMany) -> list[_Tensor]:
    """Return what was emitted of each element that gets a gradient: its derivative, then its indices."""
    found, place = [], 3
    for number, (load, _) in enumerate(slope.loads):
        end = place + 1 + len(load.indices)
        axes = frozenset[str]().union(*scored.axes[place + 1 : end])
        found.append(_Tensor(number, load, scored.results[place], axes, scored.results[place + 1 : end]))
        place = end
    return found


def _number_pairs(form: Form, lines: list[str], earlier: Sequence[str]) -> None:
    """Put the lines that number the queries or keys of a step before the first lines that need them."""
    texts, known = "\n".join(lines), "\n".join(earlier)
    needed = (
        {"q_pos": "q_index + (seqlen_k - seqlen_q)", "q_packed": "q_begin + q_index"}
        if form is BY_KEYS
        else {"kv_packed": "k_begin + kv_index"}
    )
    for name, value in needed.items():
        if f"{name}[" in texts and f"{name} = " not in known:
            lines.insert(0, f"{name} = {value}")


def _of_pairs(scored: EmittedMany, form: Form) -> str:
    """Return the logit of every pair, also where the score depends on row or key alone, or on none."""
    text = scored.results[0]
    return text if scored.axes[0] == _ELEMENT else f"tl.zeros({form.tile}, tl.float32) + ({text})"


def _derivative(
    plan: Plan, form: Form, logit: str, multiplier: str, scored: EmittedMany, slope: Slope, tensors: Sequence[_Tensor]
) -> list[str]:
    """Return the lines from the logit to dS, which lacks the factor. A pair that is hidden has the probability 0.

    Where a derivative of the score may be infinite, such a pair is selected away: zero times infinity is no zero.
    """
    lse, delta = form.of_row("lse_log2"), form.of_row("delta")
    argument = f"{logit} - {lse}" if multiplier == "1.0" else f"{logit} * {atom(multiplier)} - {lse}"
    if not plan.fast_math:  # a probability is at most 1, however large the logit is that was rounded
        argument = f"tl.minimum({argument}, 0.0, propagate_nan=tl.PropagateNan.ALL)"
    lines = [f"p = tl.exp2({argument})"]
    varying = None if slope.varying is None else atom(scored.results[2])
    derivatives = [slope.varying, *(derivative for _, derivative in slope.loads)]
    certain = all(is_finite(derivative) for derivative in derivatives if derivative is not None)
    value = f"p * (dp - {delta})"
    if not tensors:
        value = value if varying is None else f"{value} * {varying}"
        return [*lines, f"ds = {value if certain else f'tl.where(p != 0.0, {value}, 0.0)'}"]
    # rows behind the last one must not add to what is shared
    guard = "(q_index[:, None] < seqlen_q) & (p != 0.0)"
    lines.append(f"dlogit = tl.where({guard}, {value}, 0.0)")
    lines += [line for tensor in tensors for line in _contribute(plan, tensor, guard)]
    lines.append("ds = dlogit" if varying is None else f"ds = tl.where({guard}, dlogit * {varying}, 0.0)")
    return lines


def _dropped(form: Form, derivative: Sequence[str]) -> list[str]:
    """Return the lines from the logit to dS with dropout: what is dropped has a dP of 0 and no part in dV."""
    unit = "b * heads + h" if form is BY_KEYS else "unit"
    found = f"kept_pairs(dropout_seed, dropout_offset, {unit}, dropout_threshold, q_start, kv_start, BLOCK_M, BLOCK_N)"
    lines = [
        f"kept = {f'tl.trans({found})' if form is BY_KEYS else found}",
        "dp = tl.where(kept, dp * dropout_scale, 0.0)",
        *derivative,
    ]
    return [*lines, "p = tl.where(kept, p, 0.0)"] if form is BY_KEYS else lines


def _elements(plan: Plan, form: Form) -> dict[str, Binding]:
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
        "kv": Binding(f"{keys}{form.key}", _KV, below=inside_k),
        "kv_global": Binding(f"kv_packed{form.key}", _KV, below=inside_k),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


# --- gradients of the variant's own tensors -----------------------------------------------------------------


def _contribute(plan: Plan, tensor: _Tensor, guard: str) -> list[str]:
    """Return the lines that add what one tile gives: to a sum of each row where the element is one of a row."""
    value = "dlogit" if tensor.derivative == "1.0" else f"tl.where({guard}, dlogit * {atom(tensor.derivative)}, 0.0)"
    if "kv" not in tensor.axes:
        return [f"{tensor.name} += tl.sum({value}, 1)"]
    if tensor.axes == _KV:
        return [_add(plan, tensor, f"tl.sum({value}, 0)[None, :]", [])]
    return [f"contribution = {value}", _add(plan, tensor, "contribution", ["(contribution != 0.0)"])]


def _finish(plan: Plan, tensor: _Tensor) -> list[str]:
    """Return the line that adds the sums of all rows to the element, or each to that of its row."""
    if tensor.axes:
        return [_add(plan, tensor, f"{tensor.name}[:, None]", ["(q_index[:, None] < seqlen_q)"])]
    return [_add(plan, tensor, f"tl.sum({tensor.name})", [])]


def _add(plan: Plan, tensor: _Tensor, value: str, tests: list[str]) -> str:
    declared = plan.variant.tensor(tensor.load.tensor)
    extents = [extent_name(declared, axis) for axis in range(len(declared.shape))]
    parts, tests = [gradient_pointer(declared.name)], list(tests)
    for axis, (index, node) in enumerate(zip(tensor.indices, tensor.load.indices, strict=True)):
        wide = index if index.lstrip("-").isdecimal() else f"{atom(index)}.to(tl.int64)"
        parts.append(" * ".join([wide, *extents[axis + 1 :]]))
        if not (isinstance(node, Var) and (node.name, declared.shape[axis]) in _NEVER_OUTSIDE):
            tests.append(f"({index} >= 0) & ({index} < {extents[axis]})")
    mask = f", mask={' & '.join(tests)}" if tests else ""
    return f'tl.atomic_add({" + ".join(parts)}, {value}{mask}, sem="relaxed")'


#: Which index is inside which extent by what it means.
_NEVER_OUTSIDE = {("b", "b"), ("h", "h"), ("h", "heads"), ("hk", "hk"), ("hk", "kv_heads")}
