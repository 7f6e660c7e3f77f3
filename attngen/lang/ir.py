"""The intermediate representation of masks and scores: five node kinds, one table of operators, one walker.

Every consumer (type check, intervals, bands, derivative, emitters, reference) walks these nodes; none of them
keeps a second description of the language. Nodes are frozen values, compared and hashed by content, so that a
common subexpression is one dictionary entry.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar


class Type(enum.Enum):
    """Type of a value in an expression. INT is int32 (``Op.wide`` marks int64), FLOAT is float32."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"

    __hash__ = object.__hash__  # members are single objects; Enum would hash the name each time


_Class = TypeVar("_Class", bound=type)


def _remembers_hash(cls: _Class) -> _Class:
    """Compute the hash of each value once: tables of expressions would otherwise walk the whole tree at each lookup.

    It is not a field, so it is neither compared nor pickled: the hash of a string differs between processes.
    """
    computed: Any = cls.__hash__

    def remembered(self: Any) -> int:
        try:
            content_hash: int = self._hash
        except AttributeError:
            content_hash = computed(self)
            object.__setattr__(self, "_hash", content_hash)
        return content_hash

    cls.__hash__ = remembered  # type: ignore[method-assign,assignment]
    return cls


class _Node:
    __slots__ = ("_hash",)


def identity_of(number: Any) -> Any:
    """A key of a number, the same for 1 and 1.0, that tells -0.0 from 0.0 and makes NaN equal to itself."""
    if number != number:
        return "nan"
    return "-0.0" if number == 0 and math.copysign(1.0, number) < 0 else number


@_remembers_hash
@dataclass(frozen=True, slots=True, eq=False)
class Const(_Node):
    """A literal. ``inf`` is ``Const(math.inf, Type.FLOAT)``; 0.0 and -0.0 are two literals, NaN is one."""

    value: bool | int | float
    type: Type

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Const):
            return NotImplemented
        return self.type is other.type and identity_of(self.value) == identity_of(other.value)

    def __hash__(self) -> int:
        return hash((identity_of(self.value), self.type))


def is_zero(node: Expr) -> bool:
    """Whether a node is the literal 0, 0.0 or -0.0."""
    return isinstance(node, Const) and node.value == 0


@_remembers_hash
@dataclass(frozen=True, slots=True)
class Var(_Node):
    """A name: an index (``q``, ``kv``, ``b``, ``h`` …), a length, the logit ``s``, or a declared scalar."""

    name: str
    type: Type


#: Prefix of the names of the analysis's own symbols; no name of a spec can have it.
_OWN = "."
#: Prefix, after that, of those that stand for divisors.
DIVISOR = "by_"


def own(name: str, type: Type = Type.INT) -> Var:
    """Return a symbol of the analysis's own, which cannot clash with a name of a variant."""
    return Var(f"{_OWN}{name}", type)


def spelled(name: str) -> str:
    """Return a name as it appears in texts: without the prefix of the analysis's own symbols."""
    return name.removeprefix(_OWN)


#: Position of a row, in kernels that compute it for a tile of rows (``lang.runs``).
POSITION = own("position")


@_remembers_hash
@dataclass(frozen=True, slots=True)
class Load(_Node):
    """One element of a declared tensor; a 0-d tensor has no indices."""

    tensor: str
    indices: tuple[Expr, ...]
    type: Type


@_remembers_hash
@dataclass(frozen=True, slots=True)
class Op(_Node):
    """An operator of ``OPERATORS`` applied to ``args``; ``wide`` computes in int64."""

    op: str
    args: tuple[Expr, ...]
    type: Type
    wide: bool = False


@_remembers_hash
@dataclass(frozen=True, slots=True)
class Search(_Node):
    """Position of the first element ``>= value`` (``> value`` if ``strict``) along ``axis`` of a monotone tensor.

    The tensor is nondecreasing along ``axis``; ``indices`` holds the other indices in order (the entry at
    ``axis`` is ignored and kept as ``Const(0)``). ``length`` bounds the search: the result lies in [0, length].
    Produced by the band analysis only, never by the parser.
    """

    tensor: str
    axis: int
    indices: tuple[Expr, ...]
    value: Expr
    strict: bool
    length: Expr
    type: Type = Type.INT


Expr = Const | Var | Load | Op | Search


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """Arity of an operator, and the type of its result.

    ``result`` is a fixed type, or None when the result has the promoted type of the arguments.
    ``float_args`` converts integer arguments to float32 first.
    """

    arity: tuple[int, int]  # least, most; -1 is unbounded
    result: Type | None = None
    float_args: bool = False


#: Every operator that an expression may hold. Emitters and rules are tables over exactly these keys.
OPERATORS: dict[str, OperatorInfo] = {
    # arithmetic
    "add": OperatorInfo((2, 2)),
    "sub": OperatorInfo((2, 2)),
    "mul": OperatorInfo((2, 2)),
    "neg": OperatorInfo((1, 1)),
    "truediv": OperatorInfo((2, 2), Type.FLOAT, float_args=True),
    "floordiv": OperatorInfo((2, 2)),
    "mod": OperatorInfo((2, 2)),
    "pow": OperatorInfo((2, 2)),  # INT only with a constant exponent
    # bits (on INT; and/or/xor/invert on BOOL are the logical ones below)
    "bitand": OperatorInfo((2, 2), Type.INT),
    "bitor": OperatorInfo((2, 2), Type.INT),
    "bitxor": OperatorInfo((2, 2), Type.INT),
    "invert": OperatorInfo((1, 1), Type.INT),
    "lshift": OperatorInfo((2, 2), Type.INT),
    "rshift": OperatorInfo((2, 2), Type.INT),
    # comparisons: chains become "and" of pairs
    "lt": OperatorInfo((2, 2), Type.BOOL),
    "le": OperatorInfo((2, 2), Type.BOOL),
    "gt": OperatorInfo((2, 2), Type.BOOL),
    "ge": OperatorInfo((2, 2), Type.BOOL),
    "eq": OperatorInfo((2, 2), Type.BOOL),
    "ne": OperatorInfo((2, 2), Type.BOOL),
    # logic; the right side of "and"/"or" and the arms of "select" are guarded
    "and": OperatorInfo((2, 2), Type.BOOL),
    "or": OperatorInfo((2, 2), Type.BOOL),
    "xor": OperatorInfo((2, 2), Type.BOOL),
    "not": OperatorInfo((1, 1), Type.BOOL),
    "select": OperatorInfo((3, 3)),  # condition, value if true, value if false
    # functions
    "min": OperatorInfo((2, 2)),
    "max": OperatorInfo((2, 2)),
    "abs": OperatorInfo((1, 1)),
    "floor": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "ceil": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "trunc": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "round": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "exp": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "exp2": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "log": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "log2": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "expm1": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "log1p": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "erf": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "tanh": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "sigmoid": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "silu": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "sqrt": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "rsqrt": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "sin": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "cos": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "tan": OperatorInfo((1, 1), Type.FLOAT, float_args=True),
    "atan2": OperatorInfo((2, 2), Type.FLOAT, float_args=True),
    "to_float": OperatorInfo((1, 1), Type.FLOAT),  # inserted by the type check
    "to_int": OperatorInfo((1, 1), Type.INT),  # of a BOOL, inserted by the type check; of a FLOAT, saturated to int32
}

#: The largest sequence length and packed length that an expression may see: keeps ``q_pos - kv`` within int32.
MAX_SEQLEN = 2**30 - 1

#: Names that every expression may use; all are INT. Scores may also use ``s``, the scaled logit (FLOAT).
INDEX_NAMES: tuple[str, ...] = (
    "b", "h", "hk", "q", "kv", "q_pos", "q_global", "kv_global",
    "seqlen_q", "seqlen_k", "total_q", "total_k", "heads", "kv_heads",
)  # fmt: skip


def children(node: Expr) -> tuple[Expr, ...]:
    """Return the direct subexpressions of a node."""
    match node:
        case Op(args=args):
            return args
        case Load(indices=indices):
            return indices
        case Search(indices=indices, value=value, length=length):
            return (*indices, value, length)
        case _:
            return ()


def walk(node: Expr) -> Iterator[Expr]:
    """Yield a node and everything below it, parents first; a shared subexpression is yielded each time."""
    yield node
    for child in children(node):
        yield from walk(child)


def rewrite(node: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuild an expression bottom up; ``rule`` returns a replacement for a node, or None to keep it."""
    before = children(node)
    after = tuple([rewrite(child, rule) for child in before])
    if any(new is not old for new, old in zip(after, before, strict=True)):
        match node:
            case Op():
                node = Op(node.op, after, node.type, node.wide)
            case Load():
                node = Load(node.tensor, after, node.type)
            case Search():
                *indices, value, length = after
                node = replace(node, indices=tuple(indices), value=value, length=length)
    replacement = rule(node)
    return node if replacement is None else replacement


def names(node: Expr) -> frozenset[str]:
    """Return the names of all variables in an expression."""
    return frozenset(n.name for n in walk(node) if isinstance(n, Var))


def tensors(node: Expr) -> frozenset[str]:
    """Return the names of all tensors that an expression reads."""
    return frozenset(n.tensor for n in walk(node) if isinstance(n, Load | Search))


def holds_int64(node: Expr) -> bool:
    """Whether the value of an integer node is an int64 in languages that promote, since it or a part of it is wide."""
    if not isinstance(node, Op) or node.type is not Type.INT:
        return False
    return node.wide or (node.op != "to_int" and any(holds_int64(argument) for argument in node.args))
