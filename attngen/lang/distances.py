"""Parts of a score that depend on a pair by its distance alone, ``q - kv`` or ``q_pos - kv``: a tile of m queries and n
keys has m n pairs, but only m + n - 1 distances, so a kernel computes each once."""

from __future__ import annotations

from attngen.lang.divisors import is_int64, wide_names
from attngen.lang.ir import POSITION, Expr, Load, Op, Type, Var, names, own, rewrite, walk
from attngen.lang.separate import MIRRORED, is_work, narrow_tensors
from attngen.lang.simplify import integer, linear, make
from attngen.lang.variant import Variant

#: The distance of a pair, by rows and by positions: ``q_pos`` is ``q + seqlen_k - seqlen_q``.
DISTANCE, POS_DISTANCE = own("q - kv"), own("q_pos - kv")
_DISTANCES = frozenset({DISTANCE.name, POS_DISTANCE.name})
_KV = Var("kv", Type.INT)
_OF_ROWS = {"q": DISTANCE, "q_pos": POS_DISTANCE}
_SUMS = ("add", "sub", "neg", "mul")


def by_distance(expr: Expr) -> Expr:
    """An expression with ``q`` as ``kv`` and a distance, where ``kv`` cancels out of sums and comparisons."""
    return rewrite(expr, _cancelled)


def _cancelled(node: Expr) -> Expr | None:
    match node:
        case Var(name="q" | "q_pos" as name):
            return Op("add", (_KV, _OF_ROWS[name]), Type.INT)
        case Op(op=op, type=Type.INT) if op in _SUMS:
            return linear(node).expr()
        case Op(op=op, args=(Op(op="to_float", args=(a,)), Op(op="to_float", args=(b,)))) if (
            op == "sub" and a.type is b.type is Type.INT
        ):  # a difference that was split into a value of the row and one of the key
            apart = linear(Op("sub", (a, b), Type.INT)).expr()
            return Op("to_float", (apart,), Type.FLOAT) if _KV.name not in names(apart) else None
        case Op(op=op, args=(a, b), type=Type.BOOL) if op in MIRRORED and a.type is b.type is Type.INT:
            apart = linear(a).plus(linear(b), -1).expr()
            return make(op, apart, integer(0)) if _KV.name in names(node) and _KV.name not in names(apart) else None
    return None


def _converts(node: Expr) -> bool:
    """Whether a node converts an integer that is no sum, so that rows and keys cannot be converted apart."""
    match node:
        case Op(op="to_float", args=(Op(op=op),)):
            return op not in _SUMS
    return False


def _is_magnitude(node: Expr) -> bool:
    """Whether a node is the magnitude of a converted difference: two operations for a pair, or one read of its value
    by distance."""
    match node:
        case Op(op="abs", args=(Op(op="to_float"),)):
            return True
    return False


def is_slight(value: Expr) -> bool:
    """Whether a value of a distance is made of no more than its magnitude, products and sums."""
    inside = [each for each in walk(by_distance(value)) if names(each) & _DISTANCES]
    return not any(is_work(each) or _converts(each) for each in inside)


def distance_values(value: Expr, variant: Variant, others: frozenset[str]) -> tuple[Expr, ...]:
    """Largest parts of a value, of 4 bytes each, that load, divide or call a function for each pair, but depend on its
    distance alone; in order. ``others`` are names that none depends on."""
    values: dict[Expr, None] = {}
    others |= wide_names(variant) | {"kv", "kv_global", "q_global", POSITION.name}
    narrow = narrow_tensors(variant)

    def collect(node: Expr) -> None:
        if not isinstance(node, Op | Load):
            return
        read = names(node)
        if not (read & _OF_ROWS.keys() and "kv" in read):
            return
        apart = by_distance(node)
        if not names(apart) & others and not (node.type is Type.INT and is_int64(apart, others)):
            inside = [each for each in walk(apart) if names(each) & _DISTANCES]
            if not any(is_work(each) or _converts(each) or _is_magnitude(each) for each in inside):
                return
            if all(each.tensor in narrow for each in inside if isinstance(each, Load)):
                values[node] = None
                return
        for child in node.args if isinstance(node, Op) else node.indices:
            collect(child)

    collect(value)
    return tuple(values)
