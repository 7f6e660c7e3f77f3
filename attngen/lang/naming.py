"""Names of temporaries in generated code, made from what they hold: ``doc_q_pos``, ``q_pos_minus_window``."""

from __future__ import annotations

from attngen.lang.ir import DIVISOR, Const, Expr, Load, Op, Search, Type, Var, own, spelled

_LONGEST = 32

_INFIX = {
    "add": "plus", "sub": "minus", "mul": "times", "truediv": "over", "floordiv": "div", "mod": "mod", "pow": "pow",
    "bitand": "bitand", "bitor": "bitor", "bitxor": "bitxor", "lshift": "shl", "rshift": "shr",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "and", "or": "or", "xor": "xor",
    "min": "min", "max": "max",
}  # fmt: skip
_SUFFIX = {"to_float": "float", "to_int": "int"}
_PREFIX = {"neg": "minus", "invert": "inverse"}


def describe(node: Expr, axes: frozenset[str]) -> str:
    """Return a name for a node; one that would be long or empty is replaced by its role in a tile."""
    if isinstance(node, Load) and not node.indices:
        return f"{node.tensor}_value"
    name = label(node)
    if name is not None:
        return name
    place = {"q": "row_", "kv": "column_", "": "", "kvq": "element_"}["".join(sorted(axes))]
    if isinstance(node, Load):
        return f"{node.tensor}_{place.rstrip('_') or 'element'}"
    return f"{place}{'condition' if node.type is Type.BOOL else 'value'}"


def label(node: Expr) -> str | None:
    """Return a name made from the words of a node, or None if it would be long."""
    name = _words(node)
    return name if name is not None and len(name) <= _LONGEST and name.isidentifier() else None


def _words(node: Expr) -> str | None:
    match node:
        case Var(name=name):
            return spelled(name).removeprefix(DIVISOR) if name.startswith(own(DIVISOR).name) else spelled(name)
        case Const(value=value, type=Type.INT):
            return str(value) if value >= 0 else f"minus_{-value}"
        case Const():
            return None
        case Load(tensor=tensor, indices=indices):
            # "b" says nothing: it is the same for the whole block
            named = [index for index in indices if index != Var("b", Type.INT)] or list(indices)
            return _join([tensor, *(_words(index) for index in named)])
        case Search(tensor=tensor):
            return f"{tensor}_position"
        case Op(op="select"):
            return None
        case Op(op=op, args=(a, b)) if op in _INFIX:
            return _join([_words(a), _INFIX[op], _words(b)])
        case Op(op=op, args=(a,)) if op in _SUFFIX:
            return _join([_words(a), _SUFFIX[op]])
        case Op(op=op, args=(a,)):
            return _join([_PREFIX.get(op, op), _words(a)])
        case _:
            return None


def _join(words: list[str | None]) -> str | None:
    return None if None in words else "_".join(word for word in words if word)
