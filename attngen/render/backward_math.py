"""The user's mathematics in the kernels of a Triton backward: probabilities, their derivatives, and what they reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.lang.emit import Binding, EmittedMany
from attngen.lang.folding import ONE, PRODUCT, Logit, Slope, fold_logit, fold_slope, is_finite
from attngen.lang.ir import Expr, Load, Var, names
from attngen.lang.simplify import mul
from attngen.plan.arguments import extent_name
from attngen.plan.backward_arguments import differentiable, gradient_pointer
from attngen.plan.model import Plan
from attngen.render.expressions import KEYS, QUERIES, TRITON, Along, emit_for, scalar_bindings
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
class Body:
    """Lines of one step: from the product to P, from P and dP to dS, and what the variant's own tensors get."""

    probability: tuple[str, ...]
    derivative: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Everything of a kernel that depends on mask and score.

    ``factor`` multiplies the finished dQ or dK. ``before`` and ``after`` the loops stand the lines of the gradients
    of the variant's own tensors. ``by_head``: something before the loops differs from head to head.
    """

    hoisted: tuple[str, ...]
    full: Body
    partial: Body
    ragged: Body
    factor: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    by_head: bool


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
    variant = plan.variant
    logit = fold_logit(variant.score, variant.ranges, fast_math=plan.fast_math)
    own = differentiable(plan) if form is BY_QUERIES else ()
    slope = fold_slope(logit, own, fast_math=plan.fast_math)
    if form is BY_KEYS and "h" in names(slope.factor):  # dK sums over the heads of a group
        slope = Slope(ONE, mul(slope.varying or ONE, slope.factor), slope.loads)
    hoisted: dict[str, None] = {}
    bodies = {}
    tensors: list[_Tensor] = []
    factor = ""
    for kind, ragged, masked in (("full", False, False), ("partial", False, True), ("ragged", True, True)):
        step = _Step(plan, form, logit, slope, before, ragged=ragged, masked=masked)
        hoisted |= dict.fromkeys(statements(step.hoisted))
        bodies[kind] = step.body()
        tensors, factor = step.tensors, step.factor
    lines = [line for statement in hoisted for line in statement.splitlines()]
    texts = "\n".join([*lines, *(line for body in bodies.values() for line in (*body.probability, *body.derivative))])
    packed = ["q_packed = q_begin + q_row"] if form is BY_QUERIES and "q_packed" in texts else []
    packed += ["kv_packed = k_begin + kv_row"] if form is BY_KEYS and "kv_packed" in texts else []
    return Gradients(
        hoisted=(*packed, *lines),
        full=bodies["full"],
        partial=bodies["partial"],
        ragged=bodies["ragged"],
        factor=factor,
        before=tuple(f"{t.name} = tl.zeros([BLOCK_M], tl.float32)" for t in tensors if "kv" not in t.axes),
        after=tuple(line for t in tensors if "kv" not in t.axes for line in _finish(plan, t)),
        by_head=bool({"h"} & (names(variant.mask) | (names(variant.score) if variant.score is not None else set()))),
    )


class _Step:
    """The lines of one step: over a full tile, one that the mask cuts, or the ragged last one."""

    def __init__(
        self, plan: Plan, form: Form, logit: Logit, slope: Slope, before: Sequence[str], *, ragged: bool, masked: bool
    ) -> None:
        self._plan, self._form, self._slope = plan, form, slope
        self._ragged = ragged
        variant = plan.variant
        bound = _elements(plan, form, ragged=ragged)
        inner = form.along.axis
        roots: list[Expr] = [logit.value, logit.multiplier, slope.factor, slope.varying or ONE]
        for load, derivative in slope.loads:
            roots += [derivative, *load.indices]
        taken = defined(before)
        self._scored = emit_for(plan, TRITON, roots, bound, taken=taken, inner=inner)
        taken += defined([*self._scored.hoisted, *self._scored.body])
        self._masked = masked and (variant.masked or ragged)
        self._mask: EmittedMany | None = None
        if masked and variant.masked:
            self._mask = emit_for(plan, TRITON, [variant.mask], bound, taken=taken, inner=inner)
        self.hoisted = [*self._scored.hoisted, *(self._mask.hoisted if self._mask else ())]
        self.factor = self._scored.results[2]
        self.tensors = self._own_tensors()

    def _own_tensors(self) -> list[_Tensor]:
        found, place = [], 4
        for number, (load, _) in enumerate(self._slope.loads):
            end = place + 1 + len(load.indices)
            axes = frozenset[str]().union(*self._scored.axes[place + 1 : end])
            indices = self._scored.results[place + 1 : end]
            found.append(_Tensor(number, load, self._scored.results[place], axes, indices))
            place = end
        return found

    def body(self) -> Body:
        """Return the lines of the step."""
        probability = [*self._scored.body, *self._probability()]
        derivative = self._derivative()
        lines = "\n".join((*probability, *derivative))
        if self._form is BY_KEYS and "q_pos[" in lines:
            probability.insert(0, "q_pos = q_index + (seqlen_k - seqlen_q)")
        if self._form is BY_KEYS and "q_packed" in lines:
            probability.insert(0, "q_packed = q_begin + q_index")
        if self._form is BY_QUERIES and "kv_packed" in lines:
            probability.insert(0, "kv_packed = k_begin + kv_index")
        return Body(tuple(probability), tuple(derivative))

    def _probability(self) -> list[str]:
        """Return the lines from the logit to P: the log-sum-exp of a row that sees nothing is +inf here."""
        value, multiplier = self._scored.results[:2]
        value = self._grown(value, self._scored.axes[0])
        if self._plan.variant.score is None:
            multiplier = "scale_log2e"
        lse = self._form.of_row("lse_log2")
        argument = f"{_atom(value)} * {_atom(multiplier)} - {lse}" if multiplier != "1.0" else f"{value} - {lse}"
        if not self._plan.fast_math:  # a probability is at most 1, however large the logit is that was rounded
            argument = f"tl.minimum({argument}, 0.0, propagate_nan=tl.PropagateNan.ALL)"
        lines = [f"p = tl.exp2({argument})"]
        if self._masked:
            lines += [*(self._mask.body if self._mask else ()), f"visible = {self._visible()}"]
            lines.append("p = tl.where(visible, p, 0.0)")
        return lines

    def _visible(self) -> str:
        last = "q_index[None, :] < seqlen_q" if self._form is BY_KEYS else "kv_index[None, :] < seqlen_k"
        tests = [last] * self._ragged + ([self._mask.results[0]] if self._mask else [])
        return tests[0] if len(tests) == 1 else " & ".join(f"({test})" for test in tests)

    def _derivative(self) -> list[str]:
        """Return the lines from P and dP to dS, which lacks the factor; where P is selected away, so is dS."""
        delta = self._form.of_row("delta")
        difference = f"p * (dp - {delta})"
        varying = self._scored.results[3] if self._slope.varying is not None else None
        guard = self._guard()
        if not self.tensors:
            slope = "" if varying is None else f" * {_atom(varying)}"
            value = f"{difference}{slope}"
            return [f"ds = {value if guard is None else f'tl.where({guard}, {value}, 0.0)'}"]
        assert guard is not None
        lines = [f"dlogit = tl.where({guard}, {difference}, 0.0)"]
        lines += [line for tensor in self.tensors for line in _contribute(self._plan, tensor, guard)]
        lines.append("ds = dlogit" if varying is None else f"ds = tl.where({guard}, dlogit * {_atom(varying)}, 0.0)")
        return lines

    def _guard(self) -> str | None:
        """Return where a derivative counts; None where it does everywhere. A NaN counts."""
        slopes = [self._slope.varying, *(derivative for _, derivative in self._slope.loads)]
        certain = all(is_finite(slope) for slope in slopes if slope is not None)
        guard = "visible" if self._masked and certain else None if certain else "p != 0.0"
        if self.tensors:  # rows behind the last one must not add to what is shared
            inside = "(q_index[:, None] < seqlen_q)"
            return f"{inside} & ({guard})" if guard else inside
        return guard

    def _grown(self, text: str, axes: frozenset[str]) -> str:
        """Return a value of every pair, also where the score depends on row or key alone, or on none."""
        return text if axes == _ELEMENT else f"tl.zeros({self._form.tile}, tl.float32) + ({text})"


def _elements(plan: Plan, form: Form, *, ragged: bool) -> dict[str, Binding]:
    """Return the bindings inside a step. What a block keeps stays inside its sequence by repeating the last one."""
    inside_q, inside_k = frozenset({"seqlen_q"}), frozenset({"seqlen_k", "total_k"})
    nothing: frozenset[str] = frozenset()
    loose_q, loose_k = ragged and form is BY_KEYS, ragged and form is BY_QUERIES
    rows, keys = ("q_index", "kv_row") if form is BY_KEYS else ("q_row", "kv_index")
    below_k = nothing if loose_k else inside_k
    return scalar_bindings(plan, TRITON) | {
        "q": Binding(form.of_row(rows), _Q, below=nothing if loose_q else inside_q),
        "q_pos": Binding(form.of_row("q_pos"), _Q, below=nothing if loose_q else frozenset({"seqlen_k"})),
        "q_global": Binding(form.of_row("q_packed"), _Q, below=nothing if loose_q else frozenset({"total_q"})),
        "kv": Binding(f"{keys}{form.key}", _KV, below=below_k),
        "kv_global": Binding(f"kv_packed{form.key}", _KV, below=below_k),
        PRODUCT.name: Binding("s", _ELEMENT),
    }


# --- gradients of the variant's own tensors -----------------------------------------------------------------


def _contribute(plan: Plan, tensor: _Tensor, guard: str) -> list[str]:
    """Return the lines that add what one tile gives: to a sum of each row where the element is one of a row."""
    value = "dlogit" if tensor.derivative == "1.0" else f"tl.where({guard}, dlogit * {_atom(tensor.derivative)}, 0.0)"
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
        wide = index if index.lstrip("-").isdecimal() else f"{_atom(index)}.to(tl.int64)"
        parts.append(" * ".join([wide, *extents[axis + 1 :]]))
        if not (isinstance(node, Var) and (node.name, declared.shape[axis]) in _NEVER_OUTSIDE):
            tests.append(f"({index} >= 0) & ({index} < {extents[axis]})")
    mask = f", mask={' & '.join(tests)}" if tests else ""
    return f'tl.atomic_add({" + ".join(parts)}, {value}{mask}, sem="relaxed")'


#: Which index is inside which extent by what it means.
_NEVER_OUTSIDE = {("b", "b"), ("h", "h"), ("h", "heads"), ("hk", "hk"), ("hk", "kv_heads")}


def _atom(text: str) -> str:
    """Return a text as a factor: in parentheses unless it is a name, a literal, a call or a subscript."""
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth == 0 and character == " ":
            return f"({text})"
    return text if not text.startswith(("-", "~")) else f"({text})"
