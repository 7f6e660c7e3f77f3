"""From the fields of a variant to a checked ``Variant``: declarations, types, ranges, int64, divisors.

Types are decided in ``promotion``; this module adds what needs the declared ranges. Every refusal is a SpecError
with the place, the field and a caret.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from attngen.errors import Gathered, Location, SpecError
from attngen.lang.blocks import BLOCK_MASK, with_blocks
from attngen.lang.declarations import check_declarations, check_let_name
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.facts import Facts
from attngen.lang.intervals import Numbers, bounds, evaluate
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, is_zero, names, rewrite, tensors, walk
from attngen.lang.listed import KEYS, LISTS
from attngen.lang.parser import Function, Scope, Written, lower, parse_syntax
from attngen.lang.promotion import to_float, typed
from attngen.lang.ranges import INT32, INT64, declared_ranges
from attngen.lang.source import MAX_LENGTH, ExpressionError, Snippet, locate
from attngen.lang.variant import VISIBLE, WEIGHTS, Scalar, Tensor, Variant, VariantSettings, VariantText
from attngen.records import read

#: Operators whose INT result may outgrow int32.
_GROWING = frozenset((
    "add", "sub", "mul", "neg", "abs", "pow", "floordiv", "mod", "lshift", "rshift",
    "bitand", "bitor", "bitxor", "invert", "min", "max", "select",
))  # fmt: skip
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))

#: Names that a sink may not read: those of a pair, and lengths; a sink holds for all pairs, and where there is no key.
_NOT_OF_A_SINK = frozenset((
    "s", "q", "kv", "q_pos", "q_global", "kv_global", "seqlen_q", "seqlen_k", "total_q", "total_k",
))  # fmt: skip

_HIDDEN = Const(-math.inf, Type.FLOAT)
#: The least values of float32 and of bfloat16: ``torch.finfo(dtype).min``.
_LEAST = (Const(-(2.0**128 - 2.0**104), Type.FLOAT), Const(-(2.0**128 - 2.0**120), Type.FLOAT))
_SHOWN = Const(True, Type.BOOL)

#: Canonical text of an inlined expression may be longer than what a user may write.
_RESTORED_LENGTH = 2**20


class Rules:
    """Builds checked nodes: types first, then what the declared ranges say about the result."""

    def __init__(self, scalars: Sequence[Scalar], tensors: Sequence[Tensor]) -> None:
        self.ranges = declared_ranges(scalars, tensors)
        self._numbers = Numbers(Facts(self.ranges))  # remembers the bounds of all nodes that were built
        self._int64 = {s.name for s in scalars if s.dtype == "int64"} | {t.name for t in tensors if t.dtype == "int64"}

    def build(self, op: str, args: Sequence[Expr]) -> Expr:
        """Return the typed node, marked ``wide`` where int32 may overflow.

        Raises ExpressionError for a type, a divisor that may be zero, a shift out of range or a result beyond int64.
        """
        node = typed(op, args)
        if not isinstance(node, Op):
            return node
        if node.op in ("truediv", "floordiv", "mod"):
            self._divisor(node.op, node.args[1])
        if node.op == "pow":
            self._power(node)
        if node.op in ("lshift", "rshift"):
            self._shift(node)
        if node.type is Type.INT and node.op in _GROWING:
            return self._widen(node)
        if node.op in _COMPARISONS and any(self.is_wide(arg) for arg in node.args):
            return Op(node.op, node.args, node.type, wide=True)
        return node

    def is_wide(self, value: Expr) -> bool:
        """Whether an integer value is computed or stored as int64."""
        match value:
            case Op(wide=wide, type=type):
                return wide and type is Type.INT
            case Var(name=name) | Load(tensor=name):
                return name in self._int64
            case Const(value=number, type=Type.INT):
                return not INT32[0] <= number <= INT32[1]
            case _:
                return False

    def _widen(self, node: Op) -> Op:
        low, high = evaluate(node, self._numbers)
        inherited = any(self.is_wide(arg) for arg in node.args)
        if not inherited and INT32[0] <= low and high <= INT32[1]:
            return node
        if low < INT64[0] or high > INT64[1]:
            open_ones = sorted(name for name in names(node) | tensors(node) if self.ranges.get(name) == INT64)
            of = f" of {' and '.join(map(repr, open_ones))}" if open_ones else ""
            raise ExpressionError(
                f"may reach {_number(low)} .. {_number(high)}, beyond int64; declare narrower ranges{of}"
            )
        return Op(node.op, node.args, node.type, wide=True)

    def _divisor(self, op: str, divisor: Expr) -> None:
        low, high = evaluate(divisor, self._numbers)
        if low <= 0 <= high and not _may_be_zero(divisor):
            sign = {"truediv": "/", "floordiv": "//", "mod": "%"}[op]
            raise ExpressionError(
                f"the divisor of '{sign}' may be zero: its range is {_number(low)} .. {_number(high)}; "
                f"declare a min or max that excludes zero, or write max(x, 1)",
                1,
            )

    def _power(self, node: Op) -> None:
        base, exponent = node.args
        low, high = evaluate(base, self._numbers)
        if isinstance(exponent, Const) and exponent.value < 0 and low <= 0 <= high:
            raise ExpressionError(
                "the base of '**' with a negative exponent may be zero: its range is "
                f"{_number(low)} .. {_number(high)}",
                0,
            )

    def _shift(self, node: Op) -> None:
        low, high = evaluate(node.args[1], self._numbers)
        most = 63 if self.is_wide(node.args[0]) else 31
        if low < 0 or high > most:
            raise ExpressionError(
                f"the distance of a shift must lie within 0 .. {most}: its range is "
                f"{_number(low)} .. {_number(high)}; write (x & {most}) or declare min and max",
                1,
            )


def _may_be_zero(divisor: Expr) -> bool:
    """Whether a divisor may be 0: a float that is computed or read, or the logit; the quotient is then that of torch.

    A scalar only lacks a declaration, and a converted integer may have been meant for ``//``.
    """
    match divisor:
        case Op(op=op, type=Type.FLOAT):
            return op != "to_float"
        case Load(type=Type.FLOAT):
            return True
    return divisor == Var("s", Type.FLOAT)


def _number(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 256:  # too many digits to read, and beyond the range of floats
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{int(value)}" if value == int(value) else f"{value:g}"


def compile_variant(
    name: str,
    mask: str | bool | None = None,
    score: str | None = None,
    scalars: Sequence[Scalar] = (),
    tensors: Sequence[Tensor] = (),
    let: Mapping[str, Any] | None = None,
    locate: Mapping[str, Location] | None = None,
    sink: str | float | None = None,
    written: list[Written] | None = None,
    unsure: Collection[str] = (),
    blocks: int | None = None,
    **settings: Any,
) -> Variant:
    """Return the checked variant of a spec's fields.

    ``mask`` None or True shows every key; ``score`` None is the logit itself; ``sink`` None means no sink. ``blocks``
    is the size of the blocks that a tensor ``block_mask`` of the call shows; None: no such tensor. ``settings``
    are those of ``VariantSettings``: with ``dropout`` the variant takes a rate and a state of random numbers besides
    its own arguments, and with ``keys`` the tensors of ``lang.listed.KEYS``. ``let`` maps a name to a text, or ``f(x,
    y)`` to the text of a function; values may use earlier ones. ``locate`` gives the place of a field (``mask``,
    ``score``, ``let.dist``, ``scalars.window.min`` …); the nearest enclosing field's serves otherwise. ``written``
    takes the expressions with the value of each part (see ``doubts``). Expressions that read a name of ``unsure``,
    which a declaration that cannot be read may declare, are not checked.

    Raises SpecError, with one error for each field that is wrong (``each``).
    """
    said = VariantSettings(**settings)
    keys = said.keys
    if said.weights != "softmax":
        others = {"sink": sink is not None, "keys": keys is not None, "dropout": said.dropout}
        _refuse_beside_weights(said.weights, others, locate)
    if keys is not None:
        _refuse_listed(name, tensors, keys, locate, dropout=said.dropout)
    if blocks is not None:
        _refuse_blocks(name, tensors, blocks, keys, locate)
    variant = _compile(name, mask, score, sink, scalars, tensors, let or {}, locate, MAX_LENGTH, written, unsure)
    if blocks is not None:
        variant = with_blocks(variant, blocks)
    if keys is not None and LISTS[keys].extra:
        _refuse_positions(variant, keys, locate)
    if not said.sink_in_lse:
        _refuse_sink_left_out(sink, keys, locate)
    return with_listed(replace(variant, **said.settings), keys, dropout=said.dropout)


def restore_variant(data: VariantText | Mapping[str, Any]) -> Variant:
    """Rebuild a variant from its JSON form (``Variant.to_dict``), with its texts as the user wrote them.

    Expressions are parsed and checked again, so that a damaged manifest raises SpecError.
    """
    if isinstance(data, VariantText):
        text = data
    else:
        if unknown := sorted(data.keys() - {one.name for one in fields(VariantText)}):
            raise SpecError(f"a variant has '{unknown[0]}', which this version of attngen does not know")
        text = read(VariantText, data)
    scalars, tensors = text.scalars, text.tensors
    if text.dropout:
        scalars, tensors = scalars[:-1], tensors[:-1]
    if text.keys is not None:
        if text.keys not in KEYS:
            raise SpecError(f"keys must be one of {', '.join(KEYS)}, got {text.keys!r}")
        tensors = tensors[: -len(KEYS[text.keys])]
    if text.weights not in WEIGHTS:
        raise SpecError(f"weights must be one of {', '.join(WEIGHTS)}, got {text.weights!r}")
    expressions = (text.mask, text.score, text.sink)
    variant = _compile(text.name, *expressions, scalars, tensors, text.let, None, _RESTORED_LENGTH)
    restored = replace(
        variant, mask_text=text.mask_text, score_text=text.score_text, sink_text=text.sink_text, **text.settings,
    )  # fmt: skip
    return with_listed(restored, text.keys, dropout=text.dropout)


def with_listed(variant: Variant, keys: str | None, *, dropout: bool) -> Variant:
    """The variant with the tensors that ``keys`` adds, and with dropout, if it has them."""
    if keys is not None:
        variant = replace(variant, tensors=(*variant.tensors, *KEYS[keys]), keys=keys)
    return with_dropout(variant) if dropout else variant


def _refuse_listed(
    name: str, tensors: Sequence[Tensor], keys: str, places: Mapping[str, Location] | None, *, dropout: bool
) -> None:
    """Raise SpecError if a variant with ``keys`` has dropout, or declares a tensor that ``keys`` adds."""
    if dropout:
        raise SpecError(
            "dropout draws by the position of a key, which a list may name twice; leave out 'dropout' or 'keys'",
            location=locate(places, "dropout"),
            field="dropout",
        )
    for tensor in tensors:
        if tensor.name in {own.name for own in KEYS[keys]}:
            field = f"tensors.{tensor.name}"
            raise SpecError(
                f"variant '{name}' has 'keys: {keys}', which declares {tensor.name!r} itself; leave it out",
                location=locate(places, field),
                field=field,
            )


def _refuse_blocks(
    name: str, tensors: Sequence[Tensor], blocks: int, keys: str | None, places: Mapping[str, Location] | None
) -> None:
    """Raise SpecError if a variant with ``blocks`` has ``keys``, or declares the tensor that ``blocks`` adds."""
    if keys is not None:
        raise SpecError(
            f"'keys: {keys}' lists the keys of each query, and 'blocks: {blocks}' those of each block of queries; "
            "leave out one",
            location=locate(places, "blocks"),
            field="blocks",
        )
    if any(tensor.name == BLOCK_MASK.name for tensor in tensors):
        field = f"tensors.{BLOCK_MASK.name}"
        raise SpecError(
            f"variant '{name}' has 'blocks: {blocks}', which declares {BLOCK_MASK.name!r} itself; leave it out",
            location=locate(places, field),
            field=field,
        )


def _refuse_beside_weights(weights: str, others: Mapping[str, bool], places: Mapping[str, Location] | None) -> None:
    """Raise SpecError for a field that says something about a softmax, where there is none."""
    reasons = {
        "sink": "a sink joins the sum of a row, and these weights have none",
        "keys": "no kernel over listed keys has these weights",
        "dropout": "dropout is of the probabilities of a softmax",
    }
    for field, given in others.items():
        if given:
            raise SpecError(
                f"{reasons[field]}; leave out '{field}' or 'weights: {weights}'",
                location=locate(places, field),
                field=field,
            )


def _refuse_sink_left_out(sink: object, keys: str | None, places: Mapping[str, Location] | None) -> None:
    """Raise SpecError for a variant that has no sink, or whose kernels cannot leave it out of the log-sum-exp."""
    if sink is None or keys is None:
        missing = "sink" if sink is None else "keys"
        raise SpecError(
            f"only variants with a sink and 'keys' leave the sink out of the log-sum-exp; there is no '{missing}'",
            location=locate(places, "sink_in_lse"),
            field="sink_in_lse",
        )


def _refuse_positions(variant: Variant, keys: str, places: Mapping[str, Location] | None) -> None:
    """Raise SpecError if a variant whose lists name keys of two caches has a mask or a score."""
    for field, given in (("mask", variant.masked), ("score", variant.score is not None)):
        if given:
            raise SpecError(
                f"keys of two caches have no position that a {field} could read; leave out '{field}', or take "
                "'keys: counted_index'",
                location=locate(places, field),
                field=field,
            )


def with_dropout(variant: Variant) -> Variant:
    """Return the variant with dropout, which adds a rate and a state of random numbers to its arguments."""
    scalars, tensors = (*variant.scalars, DROPOUT_P), (*variant.tensors, RNG_STATE)
    return replace(variant, scalars=scalars, tensors=tensors, dropout=True)


def _compile(
    name: str,
    mask: object,
    score: object,
    sink: object,
    scalars: Sequence[Scalar],
    tensors: Sequence[Tensor],
    let: Mapping[str, Any],
    places: Mapping[str, Location] | None,
    limit: int,
    written: list[Written] | None = None,
    unsure: Collection[str] = (),
) -> Variant:
    gathered = Gathered()
    wrong = set(unsure)  # names whose declarations or values have errors, so that what reads them cannot be checked
    with gathered:
        check_declarations(name, scalars, tensors, let, places)
    for error in gathered.errors:
        kind, _, declared = str(error.to_dict()["field"]).partition(".")
        if kind not in ("scalars", "tensors"):
            gathered.throw()
        wrong.add(declared.partition(".")[0])
    scalars = [scalar for scalar in scalars if scalar.name not in wrong]
    tensors = [tensor for tensor in tensors if tensor.name not in wrong]
    rules = Rules(scalars, tensors)
    scope = Scope(rules.build, {s.name: s for s in scalars}, {t.name: t for t in tensors}, logit=True)

    def expression(field: str, text: object) -> tuple[Expr, Snippet]:
        snippet = Snippet.of(field, _text(field, text, places), locate(places, field))
        tree = parse_syntax(snippet, limit)
        _require(tree, wrong)
        return _lowered(snippet, tree, scope, written), snippet

    for key, text in let.items():
        known = len(scope.values) + len(scope.functions)
        with gathered, suppress(_UncheckedError):
            _define(scope, key, text, places, limit, written, wrong)
        if len(scope.values) + len(scope.functions) == known:
            wrong.add(key.partition("(")[0].strip())
    visible: Expr = Const(True, Type.BOOL)
    scope.logit = False
    with gathered, suppress(_UncheckedError):
        if mask is not None and mask is not True:
            text = str(mask) if isinstance(mask, bool) else mask
            visible, snippet = expression("mask", text)
            if visible.type is not Type.BOOL:
                kind = "an integer; write it as a comparison (x != 0)" if visible.type is Type.INT else "a float"
                raise snippet.error(f"must be a condition, got {kind}", 0, len(snippet.text))
    scope.logit = True
    logit: Expr | None = None
    with gathered, suppress(_UncheckedError):
        if score is not None:
            logit, snippet = expression("score", score)
            if logit.type is Type.BOOL:
                raise snippet.error("must be a number, got a condition", 0, len(snippet.text))
            seen, logit = split_hidden(to_float(logit), rules)
            if seen is None:
                seen, logit = split_least(logit, visible, rules)
            if seen is not None:  # then the texts of mask and score no longer say what is computed
                visible = seen if visible == VISIBLE else rules.build("and", (visible, seen))
                mask = score = None
            logit = None if logit == Var("s", Type.FLOAT) else logit
    scope.logit = False
    sink_logit: Expr | None = None
    with gathered, suppress(_UncheckedError):
        if sink is not None:
            sink_logit, snippet = expression("sink", sink)
            if sink_logit.type is Type.BOOL:
                raise snippet.error("must be a number, got a condition", 0, len(snippet.text))
            if of_a_pair := sorted(names(sink_logit) & _NOT_OF_A_SINK):
                raise snippet.error(
                    f"a sink is one logit of a head, whatever its queries and keys: '{of_a_pair[0]}' is not allowed; "
                    "allowed: b, h, hk, heads, kv_heads and what is declared",
                    0,
                    len(snippet.text),
                )
            sink_logit = to_float(sink_logit)
    gathered.throw()
    present = {node for root in (visible, logit, sink_logit) if root is not None for node in walk(root)}
    return Variant(
        name,
        visible,
        logit,
        tuple(scalars),
        tuple(tensors),
        mask if isinstance(mask, str) else None,
        score if isinstance(score, str) else None,
        tuple((k, v) for k, v in scope.values.items() if v in present and not isinstance(v, Const | Var)),
        sink_logit,
        sink if isinstance(sink, str) else None,
    )


def split_hidden(score: Expr, rules: Rules) -> tuple[Expr | None, Expr]:
    """Split a score into where it is not −inf by its form, and what it is there.

    ``x if c else -inf`` shows a pair where ``c`` holds, if that does not ask for the logit; then c is a mask, which
    bounds the loops of kernels. Each arm of a choice may hide on its own. None: the form hides nothing.
    """
    match score:
        case Op(op="select", args=(condition, shown, other)) if "s" not in names(condition):
            if shown == _HIDDEN:
                condition, shown, other = rules.build("not", (condition,)), other, shown
            inner, shown = split_hidden(shown, rules)
            if other == _HIDDEN:
                return condition if inner is None else rules.build("and", (condition, inner)), shown
            outer, other = split_hidden(other, rules)
            if inner is None and outer is None:
                return None, score
            visible = rules.build("select", (condition, inner or _SHOWN, outer or _SHOWN))
            return visible, shown if shown == other else rules.build("select", (condition, shown, other))
        case Op(op="add", args=(a, b)):  # s + (0 if c else -inf); data beside it might be +inf, and the sum NaN
            for one, other in ((a, b), (b, a)):
                seen, shown = split_hidden(one, rules)
                if seen is not None and not tensors(other):
                    args = (shown, other) if one is a else (other, shown)
                    return seen, other if is_zero(shown) else rules.build("add", args)
    return None, score


def split_least(score: Expr, visible: Expr, rules: Rules) -> tuple[Expr | None, Expr]:
    """Split a score into where it is not the least value of a dtype by its form, and what it is there.

    ``x if c else least`` hides like −inf only in rows that see something: in others, softmax gives all keys the same
    weight. So it is taken for a mask where the first key is known to be seen by every row, and x is a number there
    whenever the logit is: it reads no tensor. None: it stays a score.
    """
    match score:
        case Op(op="select", args=(condition, shown, other)) if "s" not in names(condition):
            if shown in _LEAST:
                condition, shown, other = rules.build("not", (condition,)), other, shown
            infinite = any(
                isinstance(n, Const) and isinstance(n.value, float) and math.isinf(n.value) for n in walk(shown)
            )
            if other not in _LEAST or infinite or tensors(shown) or any(least in walk(shown) for least in _LEAST):
                return None, score
            asked = condition if visible == VISIBLE else rules.build("and", (visible, condition))
            first = rewrite(asked, lambda node: Const(0, Type.INT) if node == Var("kv", Type.INT) else None)
            if "kv_global" not in names(asked) and bounds(first, rules.ranges)[0] >= 1:
                return condition, shown
    return None, score


class _UncheckedError(Exception):
    """An expression that cannot be checked, since a value that it reads has an error of its own."""


def _require(tree: ast.expr, wrong: Collection[str]) -> None:
    """Raise ``_UncheckedError`` for an expression that reads a ``wrong`` value."""
    if any(isinstance(node, ast.Name) and node.id in wrong for node in ast.walk(tree)):
        raise _UncheckedError


def _lowered(snippet: Snippet, tree: ast.expr, scope: Scope, written: list[Written] | None) -> Expr:
    if written is not None:
        written.append(Written(snippet, tree))
        scope.record = written[-1].values
    return lower(snippet, tree, scope)


def _define(
    scope: Scope,
    key: str,
    text: object,
    places: Mapping[str, Location] | None,
    limit: int,
    written: list[Written] | None,
    wrong: Collection[str],
) -> None:
    """Add one ``let:`` entry to the scope; what reads a ``wrong`` one is left out."""
    field = f"let.{key}"
    name, parameters = check_let_name(key, scope, places)
    snippet = Snippet.of(field, _text(field, text, places), locate(places, field))
    tree = parse_syntax(snippet, limit)
    _require(tree, wrong)
    if parameters is None:
        scope.values[name] = _lowered(snippet, tree, scope, written)
    else:
        if written is not None:
            written.append(Written(snippet, tree))
        scope.functions[name] = Function(name, parameters, tree, snippet, dict(scope.values), dict(scope.functions))


def _text(field: str, text: object, places: Mapping[str, Location] | None) -> str:
    if isinstance(text, str):
        return text
    if isinstance(text, bool | int | float):
        return repr(text)
    raise SpecError(f"expected an expression, got {text!r}", location=locate(places, field), field=field)
