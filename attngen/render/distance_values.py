"""Values of a score that depend on the distance of a pair alone, q - kv: once for each diagonal of a tile, by its
loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attngen.lang.distances import DISTANCE, POS_DISTANCE, by_distance
from attngen.lang.emit import Binding
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.statements import Statement, declared, reads
from attngen.plan.model import Plan
from attngen.plan.symbols import PREFIX
from attngen.render.cuda_math import Steps, distance_score_values
from attngen.render.cuda_statements import constant, int_constant
from attngen.render.expressions import CUDA, emit_for, scalar_bindings, start_bindings
from attngen.render.key_values import fields_of, taken

_KV = frozenset({"kv"})
#: Rows and keys of two tiles may lie beyond the ends of a sequence.
_RANGE = (-MAX_SEQLEN - 1024, MAX_SEQLEN + 1024)


@dataclass(frozen=True, slots=True)
class DistanceValues:
    """The values of a distance, each with the type that it is held in; the lines that compute them for the ``distance``
    of a query from a key, and those that these need of a work tile."""

    fields: tuple[tuple[str, str], ...]
    lines: tuple[Statement, ...]
    work: tuple[Statement, ...]

    @property
    def by_head(self) -> bool:
        """Whether they differ from head to head."""
        return "h" in reads([*self.work, *self.lines])


def distance_values_of(plan: Plan, before: Iterable[Statement]) -> DistanceValues | None:
    """The values that a plan has room for, or None; ``before`` are lines whose names are not used again."""
    values = distance_score_values(plan)
    if not values:
        return None
    exprs = [by_distance(each.expr) for each in values]
    own = {by_distance(expr): f"{PREFIX}{name}" for expr, name in plan.variant.labels.items()}
    labels = own | {expr: each.name for expr, each in zip(exprs, values, strict=True)}
    bound = scalar_bindings(plan, CUDA) | start_bindings()
    bound |= {DISTANCE.name: Binding("distance", _KV), POS_DISTANCE.name: Binding("pos_distance", _KV)}
    ranges = dict.fromkeys((DISTANCE.name, POS_DISTANCE.name), _RANGE)
    code = emit_for(plan, CUDA, exprs, bound, taken=declared(before), labels=labels, ranges=ranges)
    lines = list(code.body)
    for each, result in zip(values, code.results, strict=True):
        if result.text != each.name:
            lines.append(constant(each.expr.type.value, each.name, result))
    if "pos_distance" in reads(lines):
        lines.insert(0, int_constant("pos_distance", "{distance} + ({seqlen_k} - {seqlen_q})"))
    names = {each.name for each in values}
    fields = fields_of(each for each in lines if {*each.names} & names)
    return DistanceValues(fields, tuple(lines), code.hoisted)


def taking_distance_values(steps: Steps, values: DistanceValues | None, place: str) -> Steps:
    """The steps of a tile whose elements take the values of their distance from the ``place`` where the loader put
    them."""
    if values is None:
        return steps
    return replace(steps, element=(*taken(place, [name for _, name in values.fields]), *steps.element))
