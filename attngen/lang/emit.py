"""Expressions as source text: common subexpressions once, loads predicated, loop invariants hoisted, good names.

The output is a list of statements and one expression. A temporary is made for a load, for a subexpression that is
used twice, and for one that does not vary along the loop inside one that does: its statement goes before the loop.
Everything else stays one expression with the fewest parentheses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attngen.dtypes import DTYPES
from attngen.lang.facts import Facts
from attngen.lang.intervals import Numbers, bounds, never_nan
from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, children, rewrite, walk
from attngen.lang.languages import Target
from attngen.lang.literals import fold_literals
from attngen.lang.naming import describe, label
from attngen.lang.ranges import INDEX_RANGES, INT32, INT64, Range
from attngen.lang.statements import Code, Statement, joined, leaf, reads, written
from attngen.lang.usage import Usage, deciding, signed

_NO_AXES: frozenset[str] = frozenset()
#: Indices that are inside an extent by definition; rows and keys are in none, since tiles overhang the sequence.
_INSIDE = {("b", "b"), ("h", "h"), ("h", "heads"), ("hk", "hk"), ("hk", "kv_heads")}


@dataclass(frozen=True, slots=True)
class Binding:
    """Target text of a name in an expression: a name, or a text with the names that it reads in braces,
    such as ``{q_index}[:, None]``.

    ``axes`` says along which of 'q' and 'kv' the value varies; empty for a scalar. ``wide`` marks int64. ``below``
    names the extents that the value never reaches, not even in lanes that overhang the sequence. The text must be a
    name, a literal, a call or a subscript: it is never put in parentheses.
    """

    pattern: str
    axes: frozenset[str] = _NO_AXES
    wide: bool = False
    below: frozenset[str] = frozenset()

    @property
    def value(self) -> Code:
        """The text, and what it reads."""
        return written(self.pattern) if "{" in self.pattern else leaf(self.pattern)


@dataclass(frozen=True, slots=True)
class TensorBinding:
    """A tensor in the target: pointer, strides in elements and extents, one of each per axis: names, or literals.

    ``shape`` repeats the declared extents; it lets the emitter leave out bounds checks of ``b``, ``h`` and ``hk``.
    """

    pointer: str
    strides: tuple[str, ...]
    extents: tuple[str, ...]
    dtype: str
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class Emitted:
    """Statements before the loop, statements inside it, and the value. ``axes`` is where it varies."""

    hoisted: tuple[Statement, ...]
    body: tuple[Statement, ...]
    result: Code
    axes: frozenset[str]


@dataclass(frozen=True, slots=True)
class EmittedMany:
    """Like ``Emitted``, for several expressions that share their temporaries."""

    hoisted: tuple[Statement, ...]
    body: tuple[Statement, ...]
    results: tuple[Code, ...]
    axes: tuple[frozenset[str], ...]


def emit(
    expr: Expr,
    target: Target,
    names: Mapping[str, Binding],
    tensors: Mapping[str, TensorBinding] | None = None,
    *,
    prefix: str = "",
    fast_math: bool = False,
    ranges: Mapping[str, Range] | None = None,
    labels: Mapping[Expr, str] | None = None,
    taken: Iterable[str] = (),
) -> Emitted:
    """Return one expression as source text; see ``emit_many``."""
    many = emit_many(
        [expr],
        target,
        names,
        tensors,
        prefix=prefix,
        fast_math=fast_math,
        ranges=ranges,
        labels=labels,
        taken=taken,
    )
    return Emitted(many.hoisted, many.body, many.results[0], many.axes[0])


def emit_many(
    exprs: Sequence[Expr],
    target: Target,
    names: Mapping[str, Binding],
    tensors: Mapping[str, TensorBinding] | None = None,
    *,
    prefix: str = "",
    fast_math: bool = False,
    approximate: bool | None = None,
    ranges: Mapping[str, Range] | None = None,
    labels: Mapping[Expr, str] | None = None,
    taken: Iterable[str] = (),
    inner: str = "kv",
) -> EmittedMany:
    """Return expressions as source text.

    ``names`` binds every variable, ``tensors`` every tensor. Temporaries begin with ``prefix`` and avoid ``taken``
    and what the bindings read. ``ranges`` (inclusive, by name) decide where the plain forms of ``//`` and ``%``
    and unguarded loads are right. ``labels`` gives subexpressions names of their own, without
    the prefix.

    ``approximate`` says whether functions may be the hardware's approximations; left out, ``fast_math`` does.

    ``inner`` is the axis along which the loop runs, ``kv`` or ``q``: statements that vary along it are ``body``, all
    others ``hoisted``; with scalar bindings only, everything is hoisted. Raises KeyError for a name or a tensor
    without a binding.
    """
    exprs = [rewrite(expr, fold_literals) for expr in exprs]
    labels = {rewrite(expr, fold_literals): label for expr, label in (labels or {}).items()}
    emission = _Emission(exprs, target, names, tensors or {}, prefix, fast_math, ranges, labels, taken, inner)
    if approximate is not None:
        emission.approximate = approximate
    results = tuple(emission.value(expr) for expr in exprs)
    axes = tuple(emission.axes(expr) for expr in exprs)
    return EmittedMany(tuple(emission.hoisted), tuple(emission.body), results, axes)


class _Emission:
    """One run over a set of expressions; ``value`` writes what a node depends on, then returns its text."""

    def __init__(
        self,
        roots: Sequence[Expr],
        target: Target,
        names: Mapping[str, Binding],
        tensors: Mapping[str, TensorBinding],
        prefix: str,
        fast_math: bool,
        ranges: Mapping[str, Range] | None,
        labels: Mapping[Expr, str],
        taken: Iterable[str],
        inner: str,
    ) -> None:
        self.dialect = target.dialect
        self.names = names
        self.tensors = tensors
        self.prefix = prefix
        self.fast_math = self.approximate = fast_math
        self.labels = labels
        self.hoisted: list[Statement] = []
        self.body: list[Statement] = []
        self._ranges = _safe_ranges(ranges, names, tensors)
        self._bounds: dict[Expr, Range] = {}
        self._axes: dict[Expr, frozenset[str]] = {}
        self._wide: dict[Expr, bool] = {}
        self._codes: dict[Expr, Code] = {}
        self._bases: dict[tuple[str, ...], str] = {}
        self._taken = {*taken, *_read(names, tensors)}
        self._inner = inner
        self.usage = Usage(roots, self.axes, inner)
        self._deciding = deciding(roots)
        self._signed = signed(roots)

    # --- facts about a node -------------------------------------------------------------------------------

    def axes(self, node: Expr) -> frozenset[str]:
        """Return the axes along which a node varies."""
        axes = self._axes.get(node)
        if axes is None:
            if isinstance(node, Var):
                axes = self.names[node.name].axes
            else:
                axes = _NO_AXES.union(*(self.axes(child) for child in children(node)))
            self._axes[node] = axes
        return axes

    def bounds(self, node: Expr) -> Range:
        """Return the range of a node, in which a predicated load may also be 0."""
        limits = self._bounds.get(node)
        if limits is None:
            limits = self._bounds[node] = bounds(node, self._ranges)
        return limits

    def is_number(self, node: Expr) -> bool:
        """Whether a float is never NaN, also where a predicated load is 0."""
        return never_nan(node, Numbers(Facts(self._ranges), approximate=True))

    def wide(self, node: Expr) -> bool:
        """Whether an integer is an int64 in languages that promote: it was widened, or a part of it is one."""
        is_wide = self._wide.get(node)
        if is_wide is None:
            is_wide = self._wide[node] = node.type is Type.INT and self._is_wide(node)
        return is_wide

    def _is_wide(self, node: Expr) -> bool:
        match node:
            case Const(value=value):
                return not INT32[0] <= value <= INT32[1]
            case Var(name=name):
                return self.names[name].wide
            case Load(tensor=name):
                return DTYPES[self.tensors[name].dtype].bytes == 8
            case Op():
                parts = node.args[1:] if node.op == "select" else node.args
                return node.wide or (node.op != "to_int" and any(map(self.wide, parts)))
        return False

    def exact(self, node: Expr) -> bool:
        """Whether a quotient or a root must be the nearest float32."""
        return not self.fast_math or node in self._deciding

    def signed(self, node: Expr) -> bool:
        """Whether the sign of a float matters where it is 0."""
        return node in self._signed

    # --- writing ------------------------------------------------------------------------------------------

    def value(self, node: Expr) -> Code:
        """Return the text of a node, after writing the statements that it needs."""
        code = self._codes.get(node)
        if code is None:
            code = self._write(node)
            if isinstance(node, Op) and self._deserves_name(node):
                code = self._declare(node, code)
            self._codes[node] = code
        return code

    def named(self, node: Expr) -> Code:
        """Return a node as a name or a literal."""
        code = self.value(node)
        if isinstance(node, Op) and (code.strength < self.dialect.atom or "(" in code.text):
            code = self._codes[node] = self._declare(node, code)
        return code

    def temporary(self, node: Expr, role: str, value: Code) -> Code:
        """Store an intermediate result of a node."""
        name = self._fresh(f"{self.prefix}{role}")
        return self._store(node, name, self.dialect.declare(name, node.type, self.wide(node), value))

    def _write(self, node: Expr) -> Code:
        match node:
            case Const():
                return self.dialect.constant(node)
            case Var(name=name):
                value = self.names[name].value
                return Code(value.text, self.dialect.atom, value.reads)
            case Load():
                return self._load(node)
            case Search():
                return self._search(node)
            case Op(args=args):
                return self.dialect.operator(node, tuple(self.value(arg) for arg in args), self)

    def _deserves_name(self, node: Op) -> bool:
        if _trivial(node):
            return False
        return self.usage.count[node] > 1 or node in self.labels or self.usage.invariant(node)

    def _declare(self, node: Expr, value: Code) -> Code:
        name = self._fresh(self.labels.get(node) or self._described(node))
        return self._store(node, name, self.dialect.declare(name, node.type, self.wide(node), value))

    def _store(self, node: Expr, name: str, statement: Statement) -> Code:
        """Append a statement to the loop or before it, as its node varies; return the name that it declares."""
        (self.body if self._inner in self.axes(node) else self.hoisted).append(statement)
        return leaf(name, self.dialect.atom)

    def _load(self, node: Load) -> Code:
        tensor = self.tensors[node.tensor]
        indices = [self.value(index) for index in node.indices]
        tests = [
            self._test(node, condition, self.value(condition if holds else Op("not", (condition,), Type.BOOL)))
            for condition, holds in self.usage.guards(node)
        ]
        for axis, index in enumerate(node.indices):
            low, high = self._may_leave(index, tensor, axis)
            if low or high:
                code = indices[axis] = self.named(index)  # the offset uses it, too
                test = self.dialect.within(code, leaf(tensor.extents[axis]), low=low, high=high)
                tests.append(self._test(node, index, test))
        guard = self.dialect.conjunction(tests) if tests else None
        base, offsets = self._address(node, indices)
        name = self._fresh(self._described(node))
        return self._store(node, name, self.dialect.load(name, tensor.dtype, base, offsets, guard))

    def _test(self, load: Load, source: Expr, test: Code) -> Code:
        """Lift the condition of a load if it is a scalar and the load is not."""
        return self.dialect.lifted(test) if self.axes(load) and not self.axes(source) else test

    def _address(self, node: Load, indices: Sequence[Code]) -> tuple[Code, list[Code]]:
        """Base and offsets of a load; terms that are the same for a whole block are added up once.

        A load whose guard has passed has no negative index. Where several indices are computed for each pair, 64-bit
        arithmetic is most of the load, so that these are multiplied as numbers without a sign.
        """
        tensor = self.tensors[node.tensor]
        fixed = [axis for axis, index in enumerate(node.indices) if not self.axes(index)]
        moving = [axis for axis in range(len(indices)) if axis not in fixed]
        computed = len(moving) > 1 and not any(isinstance(node.indices[axis], Var) for axis in moving)
        offsets = [
            self._offset(code, stride, natural=computed and axis in moving and not self.wide(node.indices[axis]))
            for axis, (code, stride) in enumerate(zip(indices, tensor.strides, strict=True))
        ]
        shared = [offset for axis in fixed for offset in offsets[axis]]
        if not moving or not shared:
            return leaf(tensor.pointer), [offset for each in offsets for offset in each]
        key = (tensor.pointer, *(offset.text for offset in shared))
        if key not in self._bases:
            part = Load(node.tensor, tuple(node.indices[axis] for axis in fixed), node.type)
            self._bases[key] = self._fresh(f"{self.prefix}{label(part) or node.tensor + '_base'}")
            self.hoisted.append(self.dialect.pointer(self._bases[key], leaf(tensor.pointer), shared, kept=computed))
        return leaf(self._bases[key]), [offset for axis in moving for offset in offsets[axis]]

    def _offset(self, index: Code, stride: str, *, natural: bool = False) -> list[Code]:
        return [] if index.text == "0" else [self.dialect.offset(index, leaf(stride), natural=natural)]

    def _search(self, node: Search) -> Code:
        tensor = self.tensors[node.tensor]
        indices = [self.value(index) for index in node.indices]
        parts = zip(indices, tensor.strides, strict=True)
        offsets = [t for axis, (i, n) in enumerate(parts) if axis != node.axis for t in self._offset(i, n)]
        call = self.dialect.search(
            joined(" + ", [leaf(tensor.pointer), *offsets]),
            leaf(tensor.strides[node.axis]),
            self.value(node.length),
            self.value(node.value),
            node.strict,
        )
        name = self._fresh(f"{self.prefix}{node.tensor}_{'after' if node.strict else 'from'}")
        return self._store(node, name, self.dialect.declare(name, Type.INT, False, call))

    def _may_leave(self, index: Expr, tensor: TensorBinding, axis: int) -> tuple[bool, bool]:
        """Two flags: the index may be negative, and it may reach the extent."""
        low, high = self.bounds(index) if self._holds(index) else (-math.inf, math.inf)
        extent = tensor.shape[axis] if tensor.shape else None
        if isinstance(index, Var) and (index.name, extent) in _INSIDE:
            return False, False
        if isinstance(index, Var) and extent in self.names[index.name].below:
            return low < 0, False
        return low < 0, not (isinstance(extent, int) and high < extent)

    def _holds(self, index: Expr) -> bool:
        """Whether no part of an integer exceeds its type, not even in lanes that overhang, where loads read 0."""
        for node in walk(index):
            if isinstance(node, Op) and node.type is Type.INT:
                (low, high), (least, most) = self.bounds(node), INT64 if self.wide(node) else INT32
                if not (least <= low and high <= most):
                    return False
        return True

    # --- names --------------------------------------------------------------------------------------------

    def _described(self, node: Expr) -> str:
        return f"{self.prefix}{describe(node, self.axes(node))}"

    def _fresh(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


def _trivial(node: Op) -> bool:
    """Whether repeating a node costs nothing: the negative of a leaf."""
    return node.op in ("neg", "not") and isinstance(node.args[0], Var | Const)


def _read(names: Mapping[str, Binding], tensors: Mapping[str, TensorBinding]) -> frozenset[str]:
    """Return the names of the target that expressions read."""
    of_tensors = [(each.pointer, *each.strides, *each.extents) for each in tensors.values()]
    return reads(binding.value for binding in names.values()).union(*of_tensors)


def _safe_ranges(
    ranges: Mapping[str, Range] | None, names: Mapping[str, Binding], tensors: Mapping[str, TensorBinding]
) -> dict[str, Range]:
    """Ranges that hold in overhanging lanes as well, where loads read 0."""
    known = dict(INDEX_RANGES if ranges is None else ranges)
    for name in names:
        known.setdefault(name, INT32)
    for name in tensors:
        if name in known:
            low, high = known[name]
            known[name] = (min(low, 0), max(high, 0))
    return known
