"""Scores in units of log2, with what is constant over a tile folded together: exp2 then needs no further multiply.

A kernel computes ``p = exp2(x * multiplier - max)``. Without a score, x is the raw product q·k and the multiplier is
``softmax_scale * log2(e)``. A score is brought into the same form where algebra allows: a constant factor that is
never negative becomes the multiplier (soft-capping), a sum is scaled term by term (ALiBi, biases). Products are
regrouped so that each element is multiplied once by everything that does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from attngen.lang.bands import Heads
from attngen.lang.biases import is_of_pair
from attngen.lang.derivative import differentiate, differentiate_loads
from attngen.lang.intervals import bounds
from attngen.lang.ir import POSITION, Const, Expr, Load, Op, Type, Var, names, own, rewrite, walk
from attngen.lang.ranges import Range
from attngen.lang.runs import score_by_position
from attngen.lang.simplify import mul, truediv
from attngen.lang.usage import decides, reads_sign
from attngen.lang.variant import Variant

#: The raw product of a query row and a key row, before the scale.
PRODUCT = own("qk", Type.FLOAT)
SOFTMAX_SCALE = Var("softmax_scale", Type.FLOAT)
LOG2E = own("LOG2E", Type.FLOAT)
#: The first key of a lane, in kernels whose threads hold elements of known places, and the distance of a key from it.
KV_FIRST, KEY = own("kv_first"), Var("key", Type.INT)
#: The same of queries: the first one as a row and as a position, and the distance of a query from it.
Q_FIRST, Q_POS_FIRST, QUERY = own("q_first"), own("q_pos_first"), own("query of a lane")
POSITION_FIRST = own("position_first")
_FIRST = {"q": Q_FIRST, "q_pos": Q_POS_FIRST, POSITION.name: POSITION_FIRST}
ONE = Const(1.0, Type.FLOAT)
#: The least finite logit of scores that may add the least value of a dtype. A row of which each logit is below has the
#: mean of its values: float32 would have no digits left for the number of its keys, which its log-sum-exp holds. It is
#: below the least value of fp16, and its product with log2(e) is a float32.
LEAST_LOGIT = Const(-(2.0**17), Type.FLOAT)
#: A factor for which no finite float32 changes a logit that it is added to, while -inf stays what it is.
_VANISHING = Const(2.0**-126, Type.FLOAT)
#: Dtypes whose least value is above ``LEAST_LOGIT``.
_NARROW = frozenset({"fp16"})
#: Prefixes of the names of values that are computed once for a key, for a query, and for the distance of a pair.
_OF_KEY, _OF_QUERY, _OF_DISTANCE = "of key ", "of query ", "of distance "

_ROWS = frozenset({"q", "q_pos", "q_global", POSITION.name})
_KEYS = frozenset({"kv", "kv_global"})
_KV = Var("kv", Type.INT)
#: Names whose values differ from element to element of a tile.
_VARYING = _ROWS | _KEYS | {"s", PRODUCT.name}


@dataclass(frozen=True, slots=True)
class Logit:
    """``value * multiplier`` is the logit in units of log2; the multiplier is the same for a whole tile of rows.

    ``natural`` is the logit as it was written; its comparisons switch at the same numbers as the score's. ``falls``:
    the value may be below ``LEAST_LOGIT``, and the kernel bounds the logits of a tile together.
    """

    value: Expr
    multiplier: Expr
    natural: Expr
    falls: bool = False


def fold_logit(score: Expr | None, ranges: dict[str, Range], *, fast_math: bool, heads: Heads = "single") -> Logit:
    """Return the form that a kernel evaluates; without ``fast_math`` nothing is reassociated.

    ``heads="packed"`` means that the rows of a tile belong to several heads, so that no multiplier contains ``h``.
    """
    unit = _product([SOFTMAX_SCALE, LOG2E])
    if score is None:
        return Logit(PRODUCT, unit, mul(PRODUCT, SOFTMAX_SCALE))
    scaled = _with_products(score)
    if not fast_math:
        return Logit(scaled, LOG2E, scaled)
    grouped = _rewrite_values(scaled, _regroup)
    constant, varying = _factors(grouped)
    if heads == "packed":
        varying += [factor for factor in constant if "h" in names(factor)]
        constant = [factor for factor in constant if "h" not in names(factor)]
    if constant and _holds(constant) and bounds(_product(constant), ranges)[0] >= 0:
        return Logit(_product(varying), _product([*constant, LOG2E]), scaled)
    others = [factor for factor in varying if factor != PRODUCT]
    if constant and others and not any(PRODUCT.name in names(factor) for factor in others):
        # constants go to the factor of a key or a distance, which is computed once for many pairs
        return Logit(mul(PRODUCT, _product([*others, _product([*constant, LOG2E])])), ONE, scaled)
    if isinstance(grouped, Op) and grouped.op in ("add", "sub") and not _adds_elements(grouped):
        return Logit(_scale_terms(grouped), ONE, scaled)
    return Logit(grouped, LOG2E, scaled)


def fold_variant(
    variant: Variant, *, fast_math: bool, heads: Heads = "single", by_position: bool = False, by_tile: bool = False
) -> Logit:
    """Return the form of a variant's score that a kernel evaluates; ``by_position`` as in ``score_by_position``.

    A logit is at least ``LEAST_LOGIT`` where the score may add the least value of a dtype, by which float masks hide
    keys. It then stays in natural units, in which that is finite. The bound takes part in no derivative. ``by_tile``:
    the kernel can bound all logits of a tile itself, where that makes a difference.
    """
    score = score_by_position(variant) if by_position else variant.score
    may_fall = _MayFall(variant)
    if score is None or not may_fall(score):
        return fold_logit(score, variant.ranges, fast_math=fast_math, heads=heads)
    natural = _with_products(score)
    value = _rewrite_values(natural, _regroup) if fast_math else natural
    if by_tile and not (isinstance(value, Op) and value.op == "select"):  # of which an arm may fall, and others not
        return Logit(value, LOG2E, natural, falls=True)
    return Logit(_bounded(value, may_fall), LOG2E, natural)


class _MayFall:
    """Whether a term or an arm of a score, or a factor of constants there, is a literal below ``LEAST_LOGIT``, or an
    element of a float mask, which may be: one for each pair. Elements of keys do not count: sums of decays get as far.
    """

    def __init__(self, variant: Variant) -> None:
        least = float(LEAST_LOGIT.value)
        self._masks = {
            tensor.name
            for tensor in variant.tensors
            if tensor.dtype not in _NARROW and variant.ranges[tensor.name][0] < least
        }

    def __call__(self, node: Expr) -> bool:
        match node:
            case Op(op="add" | "sub", args=args, type=Type.FLOAT):
                return any(map(self, args))
            case Op(op="select", args=(_, a, b), type=Type.FLOAT):
                return self(a) or self(b)
            case Op(op="mul", args=(a, b)) if not (_varies(a) and _varies(b)):
                return self(a) or self(b)
            case Load(tensor=tensor, type=Type.FLOAT) if is_of_pair(node):
                return tensor in self._masks
            case Const(value=value, type=Type.FLOAT):
                return -math.inf < value < float(LEAST_LOGIT.value)
        return False


def _bounded(logit: Expr, may_fall: Callable[[Expr], bool]) -> Expr:
    """The larger of a logit and ``LEAST_LOGIT`` in the arms that may fall; -inf and NaN stay what they are."""
    match logit:
        case Op(op="select", args=(condition, a, b)):
            return replace(logit, args=(condition, _bounded(a, may_fall), _bounded(b, may_fall)))
        case Const() if may_fall(logit):
            return LEAST_LOGIT
    if not may_fall(logit):
        return logit
    raised = Op("max", (logit, LEAST_LOGIT), Type.FLOAT)
    return Op("add", (Op("mul", (logit, _VANISHING), Type.FLOAT), raised), Type.FLOAT)


def _with_products(score: Expr) -> Expr:
    """A score over the products of queries and keys."""
    return rewrite(score, lambda node: mul(PRODUCT, SOFTMAX_SCALE) if node == Var("s", Type.FLOAT) else None)


def _adds_elements(value: Expr) -> bool:
    """Whether all terms without the product are elements at ``[..., q, kv]``: to scale them would cost a multiply for
    each."""
    others = [term for term in _terms(value) if PRODUCT.name not in names(term)]
    return bool(others) and all(is_of_pair(term) for term in others)


def _terms(value: Expr) -> list[Expr]:
    if isinstance(value, Op) and value.op in ("add", "sub"):
        return [term for part in value.args for term in _terms(part)]
    return [value]


def cap_scale(logit: Logit, heads: Heads = "single") -> Expr | None:
    """Return ``scale`` of a value that is ``tanh(product * scale)``, the same for a tile of rows; None of any other."""
    match logit.value:
        case Op(op="tanh", args=(Op(op="mul", args=(product, scale)),)) if product == PRODUCT and not _varies(scale):
            return None if heads == "packed" and "h" in names(scale) else scale
    return None


def value_of_key(number: int, type: Type) -> Var:
    """The symbol of a value that is computed once for a key, and stands in a score in its place."""
    return own(f"{_OF_KEY}{number}", type)


def value_of_query(number: int, type: Type) -> Var:
    """The symbol of a value that is computed once for a query."""
    return own(f"{_OF_QUERY}{number}", type)


def value_of_distance(number: int, type: Type) -> Var:
    """The symbol of a value that is computed once for a distance."""
    return own(f"{_OF_DISTANCE}{number}", type)


def _of_keys(node: Expr, key: Var = KEY) -> bool:
    """Whether an expression differs from key to key."""
    read, held = names(node), (own(_OF_KEY).name, own(_OF_DISTANCE).name)
    return bool(read & {*_KEYS, key.name}) or any(name.startswith(held) for name in read)


def subtract(value: Expr, subtrahend: Expr, sign: str = "sub") -> Expr | None:
    """``value - subtrahend``, subtracted from a term of a sum that is the same for all keys of a lane.

    It then costs no operation for each key. None if ``value`` is no sum with such a term. The sign ``add`` adds
    instead.
    """
    if PRODUCT.name not in names(value) and not _of_keys(value):
        return Op(sign, (value, subtrahend), Type.FLOAT)
    if not isinstance(value, Op) or value.type is not Type.FLOAT or value.op not in ("add", "sub"):
        return None
    for place, own_sign in enumerate((sign, sign if value.op == "add" else {"add": "sub", "sub": "add"}[sign])):
        changed = subtract(value.args[place], subtrahend, own_sign)
        if changed is not None:
            return replace(value, args=(changed, value.args[1]) if place == 0 else (value.args[0], changed))
    return None


def split_keys(value: Expr, first: Var = KV_FIRST, key: Var = KEY) -> Expr:
    """Return ``value`` with ``float(kv)`` as ``float(first) + float(key)``, the terms without ``key`` apart.

    For kernels that know ``key`` at compile time: ``(kv - q) * slope`` becomes ``(first - q) * slope + key * slope``,
    one multiply-add for each element. It reassociates: for ``fast_math`` only.
    """
    lane, tile = (Op("to_float", (name,), Type.FLOAT) for name in (key, first))

    def rule(node: Expr) -> Expr | None:
        match node:
            case Op(op="to_float", args=(Var(name="kv"),)):
                return Op("add", (tile, lane), Type.FLOAT)
            case Op(op="add" | "sub" as op, args=(Op(op="add", args=(a, b)), c)) if _ends_in(b, lane) and _fixed(c):
                return Op("add", (Op(op, (a, c), Type.FLOAT), b), Type.FLOAT)
            case Op(op="mul", args=(Op(op="add", args=(a, b)), c)) if _ends_in(b, lane) and _fixed(c):
                return Op("add", (mul(a, c), mul(b, c)), Type.FLOAT)
        return None

    def _fixed(node: Expr) -> bool:
        return PRODUCT.name not in names(node) and not _of_keys(node, key)

    def _ends_in(node: Expr, lane: Expr) -> bool:
        return node == lane or (isinstance(node, Op) and node.op == "mul" and node.args[0] == lane)

    return _rewrite_values(value, rule)


def split_queries(value: Expr) -> Expr:
    """Return ``value`` with ``float(q_pos)`` as ``float(q_pos_first) + float(query)``, the terms with ``query`` apart.

    The mirror image of ``split_keys``: ``(kv - q) * slope`` becomes ``(kv - first) * slope - query * slope``.
    """
    lane = Op("to_float", (QUERY,), Type.FLOAT)

    def rule(node: Expr) -> Expr | None:
        match node:
            case Op(op="to_float", args=(Var(name=name),)) if name in _FIRST:
                return Op("add", (Op("to_float", (_FIRST[name],), Type.FLOAT), lane), Type.FLOAT)
            case Op(op="add" | "sub" as op, args=(c, Op(op="add", args=(a, b)))) if _ends(b) and not _of_query(c):
                return Op(op, (Op(op, (c, a), Type.FLOAT), b), Type.FLOAT)
            case Op(op="add" | "sub" as op, args=(Op(op="add", args=(a, b)), c)) if _ends(b) and not _of_query(c):
                return Op("add", (Op(op, (a, c), Type.FLOAT), b), Type.FLOAT)
            case Op(op="mul", args=(Op(op="add" | "sub" as op, args=(a, b)), c)) if _ends(b) and not _varies(c):
                return Op(op, (mul(a, c), mul(b, c)), Type.FLOAT)
        return None

    def _of_query(node: Expr) -> bool:
        read = names(node)
        held = (own(_OF_QUERY).name, own(_OF_DISTANCE).name)
        return bool(read & {*_ROWS, QUERY.name, PRODUCT.name}) or any(name.startswith(held) for name in read)

    def _ends(node: Expr) -> bool:
        return node == lane or (isinstance(node, Op) and node.op == "mul" and node.args[0] == lane)

    return _rewrite_values(value, rule)


def split_slope(value: Expr, key: Var = KEY) -> tuple[Expr, Expr] | None:
    """Return ``rest`` and ``slope`` of a sum that is ``rest + float(key) * slope``; None of anything else."""
    match value:
        case Op(op="add", args=(rest, Op(op="mul", args=(Op(op="to_float", args=(place,)), slope)))) if place == key:
            return rest, slope
        case Op(op="add", args=(other, last)) if (below := split_slope(last, key)) is not None:
            return Op("add", (other, below[0]), Type.FLOAT), below[1]
        case Op(op="add" | "sub", args=(first, other)) if (below := split_slope(first, key)) is not None:
            return replace(value, args=(below[0], other)), below[1]
    return None


@dataclass(frozen=True, slots=True)
class Slope:
    """``varying * factor`` is the derivative of the logit with respect to the raw product q·k.

    ``factor`` is the same for a whole tile; ``varying`` is None where nothing varies. ``loads`` holds, for the tensors
    that get a gradient, each element that the score reads, and the derivative of the logit with respect to it.
    """

    factor: Expr
    varying: Expr | None
    loads: tuple[tuple[Load, Expr], ...] = ()


def fold_slope(logit: Logit, tensors: Iterable[str] = (), *, fast_math: bool) -> Slope:
    """Return the derivatives of a folded logit with respect to the product and to the elements of ``tensors``.

    They are those of the natural logit: without the factor log2(e), which each form of a logit has exactly once.
    """
    loads = tuple(pair for tensor in tensors for pair in differentiate_loads(logit.natural, tensor))
    slope = differentiate(logit.natural, PRODUCT.name)
    if fast_math:
        loads = tuple((load, _rewrite_values(by_load, _regroup)) for load, by_load in loads)
    if not _varies(slope):
        return Slope(slope, None, loads)
    if not fast_math:
        return Slope(ONE, slope, loads)
    constant, varying = _slope_factors(_rewrite_values(slope, _regroup))
    return Slope(_product(constant), _product(varying), loads)


def _slope_factors(slope: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the factors of a derivative like ``_factors``, also inside a select whose other arm is 0, and in the
    numerator of what varies: 16 bits hold P times what varies, in fp16 with fewer digits the smaller it is."""
    match slope:
        case Op(op="select", args=(condition, value, Const(value=0.0) as zero), type=Type.FLOAT):
            constant, varying = _slope_factors(value)
            return constant, [Op("select", (condition, _product(varying), zero), Type.FLOAT)]
        case Op(op="truediv", args=(value, divisor), type=Type.FLOAT) if _varies(divisor):
            constant, varying = _slope_factors(value)
            if _holds(constant):
                return constant, [truediv(_product(varying), divisor)]
    return _factors(slope)


def split_slope_factors(slope: Expr) -> tuple[Expr, Expr]:
    """Return a derivative as what is the same for all pairs of a head, times what varies."""
    constant, varying = _slope_factors(slope)
    return _product(constant), _product(varying)


def is_finite(slope: Expr) -> bool:
    """Whether a derivative is finite wherever the product is: then zero times it is zero."""
    for node in walk(slope):
        if isinstance(node, Load) and node.type is Type.FLOAT:
            return False
        if isinstance(node, Const) and math.isinf(node.value):
            return False
        if isinstance(node, Op) and node.op in _SINGULAR and not _divides_by_constant(node):
            return False
    return True


#: Operators that may turn a finite number into an infinity or a NaN.
_SINGULAR = frozenset({
    "truediv", "log", "log2", "log1p", "sqrt", "rsqrt", "pow", "exp", "exp2", "expm1", "tan",
})  # fmt: skip


def _divides_by_constant(node: Op) -> bool:
    return node.op == "truediv" and not _varies(node.args[1]) and _never_zero(node.args[1])


def _never_zero(divisor: Expr) -> bool:
    """Whether the check has proven that a divisor is not 0: scalars, literals, and products of these."""
    match divisor:
        case Op(op="mul" | "truediv" | "neg", args=args):
            return all(map(_never_zero, args))
        case Op(op="to_float"):
            return True
    return isinstance(divisor, Const | Var)


def _rewrite_values(node: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild an expression bottom up like ``ir.rewrite``, but leave what is rounded or compared as it is.

    There the last bit matters: ``x / n >= 1.0`` and ``x * (1.0 / n) >= 1.0`` may differ at ``x == n``. So does the sign
    of a zero as a divisor or in ``atan2``: terms of a sum that cancel in another order may leave another one.
    """
    if not isinstance(node, Op) or node.type is not Type.FLOAT or decides(node):
        return node
    kept = [argument for argument in reads_sign(node) if _may_be_zero(argument)]
    node = replace(node, args=tuple(a if a in kept else _rewrite_values(a, rule) for a in node.args))
    replacement = rule(node)
    return node if replacement is None else replacement


def _may_be_zero(value: Expr) -> bool:
    """Whether a float may be 0, whatever scalars and elements are."""
    low, high = bounds(value, {})
    return low <= 0 <= high


def _varies(node: Expr) -> bool:
    return bool(names(node) & _VARYING)


def _regroup(node: Expr) -> Expr | None:
    """Return a product as (what is constant over the tile) * (what varies), a quotient by a constant likewise."""
    if not isinstance(node, Op) or node.type is not Type.FLOAT:
        return None
    if node.op == "to_float":
        return _split_difference(node)
    if node.op not in ("mul", "truediv"):
        return None
    constant, varying = _factors(node)
    if not constant or not varying or not _holds(constant):
        return None
    return mul(_product(varying), _product(constant))


def _split_difference(node: Op) -> Expr | None:
    """Convert rows and keys to float before subtracting them: one conversion per row and key, not per element. Of the
    magnitude of a difference, the key comes first, as ``split_keys`` takes it."""
    match node.args[0]:
        case Op(op="add" | "sub" as op, args=(a, b)) if _apart(a, b):
            return _difference_of_floats(op, a, b)
        case Op(op="abs", args=(Op(op="sub", args=(a, b)),)) if _apart(a, b) and _KV in (a, b):
            return Op("abs", (_difference_of_floats("sub", _KV, b if a == _KV else a),), Type.FLOAT)
    return None


def _apart(a: Expr, b: Expr) -> bool:
    """Whether one of two terms is of rows, the other of keys."""
    return bool(_axes(a) and _axes(b) and not _axes(a) & _axes(b))


def _difference_of_floats(op: str, a: Expr, b: Expr) -> Op:
    left, right = (Op("to_float", (x,), Type.FLOAT) for x in (a, b))
    return Op(op, (left, right), Type.FLOAT)


def _axes(node: Expr) -> frozenset[str]:
    used = names(node)
    return frozenset(axis for axis, group in (("q", _ROWS), ("kv", _KEYS)) if used & group)


def _factors(node: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the factors of a product: those constant over the tile, and the others."""
    if isinstance(node, Op) and node.type is Type.FLOAT and not _reads_integers(node):
        if node.op == "mul":
            parts = [_factors(argument) for argument in node.args]
            return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
        if node.op == "truediv" and not _varies(node.args[1]):
            constant, varying = _factors(node.args[0])
            return [*constant, truediv(ONE, node.args[1])], varying
        if node.op == "neg":
            constant, varying = _factors(node.args[0])
            return [*constant, Const(-1.0, Type.FLOAT)], varying
    return ([], [node]) if _varies(node) else ([node], [])


def _reads_integers(node: Op) -> bool:
    return any(argument.type is not Type.FLOAT for argument in node.args)


def _holds(factors: list[Expr]) -> bool:
    """Whether float32 can hold the product of the literals among the factors, so that it may replace them."""
    literal = math.prod(f.value for f in factors if isinstance(f, Const))
    return not math.isfinite(literal) or 2.0**-120 < abs(literal) < 2.0**120


def _product(factors: list[Expr]) -> Expr:
    result: Expr = ONE
    literal = math.prod(f.value for f in factors if isinstance(f, Const))
    for factor in factors:
        if isinstance(factor, Const):
            continue
        match factor:
            case Op(op="truediv", args=(Const(value=1.0), divisor)) if result != ONE:
                result = truediv(result, divisor)
            case _:
                result = mul(result, factor)
    return result if literal == 1 else mul(result, Const(float(literal), Type.FLOAT))


def _scale_terms(node: Expr) -> Expr:
    """Return ``node * LOG2E`` with the factor taken into each term of a sum."""
    if isinstance(node, Op) and node.op in ("add", "sub") and node.type is Type.FLOAT:
        return Op(node.op, tuple(_scale_terms(argument) for argument in node.args), Type.FLOAT)
    constant, varying = _factors(node)
    if not _holds(constant):
        return mul(node, LOG2E)
    constant = [*constant, LOG2E]
    return mul(_product(varying), _product(constant)) if varying else _product(constant)
