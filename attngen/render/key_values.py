"""Values of mask and score that are loaded or computed once for a key or a row: values of keys come with a tile of K,
by its loader, and those of rows stay for a work tile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attngen.lang.folding import KV_FIRST
from attngen.lang.ir import spelled
from attngen.lang.statements import Statement, declared, depending, needed, reads, statement
from attngen.plan.model import Plan
from attngen.plan.symbols import pointer_name
from attngen.render.cuda_math import (
    Logits,
    Steps,
    element_bindings,
    planned_key_values,
    row_names,
    score_lines,
    score_values,
)
from attngen.render.cuda_statements import int_constant

#: The types that values are held in; bool takes as much room as int.
HELD = {"bool": "int", "int": "int", "float": "float"}
#: Names of a key in the loader, and in consumers.
_NUMBERS = frozenset({"key", "kv", "kv_packed"})
#: Who reads the values of a key, by whether the mask does, and whether the score does.
_WHO = {(True, False): "the mask reads", (False, True): "the score reads", (True, True): "mask and score read"}


@dataclass(frozen=True, slots=True)
class KeyValues:
    """The values of a key that mask and score read, each with the type that it is held in; the lines that compute them
    for the key ``kv``, and those that these need of a work tile; and the same of a row. ``who`` says which of the
    two reads them."""

    who: str
    fields: tuple[tuple[str, str], ...]
    lines: tuple[Statement, ...]
    work: tuple[Statement, ...]
    row_fields: tuple[tuple[str, str], ...]
    row_lines: tuple[Statement, ...]


def with_key_values(plan: Plan, logits: Logits) -> tuple[Steps, Steps, KeyValues | None]:
    """Return the steps of partial and of full tiles that find the values of keys and of rows where they were put, and
    how they come there; the same steps, and None, if the plan has no room for values of keys."""
    wanted, steps = planned_key_values(plan), logits.partial
    if not wanted:
        return logits.partial, logits.full, None
    divided = {*steps.costly[: len(wanted.divided)]}
    pointers = {pointer_name(tensor.name) for tensor in plan.variant.tensors}
    pointers |= {name for each in logits.work if each.type == "const auto*" for name in each.names}
    _, fixed = depending(steps.row, {spelled(KV_FIRST.name)})
    by_row = [each for each in fixed if each.type in HELD and each.reads & pointers]
    computed = [each for each in steps.key if not {*each.names} & _NUMBERS]
    _, of_key = depending(computed, {"key", "x", *row_names(plan), *declared([*steps.tile, *steps.row])})
    others = needed([each for each in computed if not {*each.names} & divided], steps.element)
    loads = [each for each in others if each.reads & pointers and {*each.names} & steps.of_mask]
    by_key = [each for each in of_key if each.type in HELD and (each in loads or {*each.names} & divided)]
    assert len(by_key) == len(wanted.loads) + len(wanted.divided), f"{plan.name}: other values of keys than planned"
    lines = needed(of_key, [_user(declared(by_key))])
    work = needed(logits.work, lines)
    before, bound = declared([*work, *lines]), element_bindings(plan, ragged=True)
    more_work, more_lines, of_score = score_lines(plan, score_values(plan), bound, before)
    work, lines = (*work, *more_work), (*lines, *more_lines)
    packed = [int_constant("kv_packed", "{k_begin} + {kv}")] if "kv_packed" in reads(lines) else []
    values = KeyValues(
        who=_WHO[bool(by_key), bool(of_score)],
        fields=fields_of([*by_key, *of_score]),
        lines=(*packed, *lines),
        work=work,
        row_fields=fields_of(by_row),
        row_lines=needed(fixed, [_user(declared(by_row))]),
    )
    names = [name for _, name in values.fields]
    read = ["key"] if plan.structure.distance_values else []  # by what takes the values of distances
    full = _taking(logits.full, names if of_score else [], by_row, read)
    key = tuple(each for each in steps.key if each not in by_key)
    return _taking(replace(steps, key=key), names, by_row, read), full, values


def _taking(steps: Steps, names: Sequence[str], by_row: Sequence[Statement], read: Sequence[str]) -> Steps:
    """Return the steps of a tile that take the ``names`` of each key, and what is the same ``by_row``, from where these
    were put. ``read``: what an element reads besides."""
    row = [*taken("of_rows[row]", declared(by_row)), *(each for each in steps.row if each not in by_row)]
    key = list(steps.key)
    if names:
        at = next(i for i, each in enumerate(key) if "key" in each.names) + 1
        key[at:at] = taken("of_key({key})", names)
    used = _user(name for _, name in steps.row_values)
    return replace(steps, row=needed(row, [used]), key=needed(key, [*steps.element, _user(read)]))


def fields_of(loads: Iterable[Statement]) -> tuple[tuple[str, str], ...]:
    """Type and name of each variable that the loads declare."""
    return tuple((HELD[each.type], name) for each in loads for name in each.names)


def taken(place: str, names: Sequence[str]) -> list[Statement]:
    """Return the line that takes values from where they were put."""
    return [statement(f"const auto [{', '.join(names)}] = {place};", declares=names)] if names else []


def _user(names: Iterable[str]) -> Statement:
    """Return a statement that reads names."""
    return Statement("", frozenset(names))
