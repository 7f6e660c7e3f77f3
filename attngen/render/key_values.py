"""What a mask loads or divides for keys, and loads for rows, when that is done once: values of keys come with a tile of
K, by its loader, and those of rows stay for a tile of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attngen.lang.folding import KV_FIRST
from attngen.lang.ir import Load, spelled
from attngen.lang.statements import Statement, declared, depending, needed, reads, statement
from attngen.plan.model import Plan
from attngen.plan.schedules.structures import HopperForward
from attngen.plan.symbols import pointer_name
from attngen.plan.traits import key_values
from attngen.render.cuda_math import Steps, row_names
from attngen.render.cuda_statements import int_constant

#: The types that values are held in; bool takes as much room as int.
HELD = {"bool": "int", "int": "int", "float": "float"}
#: What the loader calls a key, and what consumers call it.
_NUMBERS = frozenset({"key", "kv", "kv_packed"})


@dataclass(frozen=True, slots=True)
class KeyValues:
    """The values of a key that the mask reads, each with the type that it is held in; the lines that load them for the
    key ``kv``, and those that these need of a tile of work; and the same of a row."""

    fields: tuple[tuple[str, str], ...]
    lines: tuple[Statement, ...]
    work: tuple[Statement, ...]
    row_fields: tuple[tuple[str, str], ...]
    row_lines: tuple[Statement, ...]


def with_key_values(plan: Plan, steps: Steps, work: Sequence[Statement]) -> tuple[Steps, KeyValues | None]:
    """Return the steps of a partial tile that find the values of keys and of rows where they were put, and how they
    come there; the same steps, and None, if the plan has no room for values of keys. ``work`` are the lines of a tile
    of work."""
    if not isinstance(plan.structure, HopperForward) or not plan.structure.key_values:
        return steps, None
    count = plan.structure.key_values
    wanted = key_values(plan.variant, plan.box_heads)[:count]
    divided = steps.costly[: sum(not isinstance(each, Load) for each in wanted)]
    pointers = {pointer_name(tensor.name) for tensor in plan.variant.tensors}
    pointers |= {name for each in work if each.type == "const auto*" for name in each.names}
    _, fixed = depending(steps.row, {spelled(KV_FIRST.name)})
    by_row = [each for each in fixed if each.type in HELD and each.reads & pointers]
    numbers = [each for each in steps.key if {*each.names} & _NUMBERS]
    computed = [each for each in steps.key if each not in numbers]
    _, of_key = depending(computed, {"key", "x", *row_names(plan), *declared([*steps.tile, *steps.row])})
    others = needed([each for each in computed if not {*each.names} & {*divided}], steps.element)
    loads = [each for each in others if each.reads & pointers and {*each.names} & steps.of_mask]
    by_key = [each for each in of_key if each.type in HELD and (each in loads or {*each.names} & {*divided})]
    assert len(by_key) == count, f"{plan.name}: other values of keys than planned"
    lines = needed(of_key, [_user(declared(by_key))])
    packed = [int_constant("kv_packed", "{k_begin} + {kv}")] if "kv_packed" in reads(lines) else []
    values = KeyValues(
        fields=fields_of(by_key),
        lines=(*packed, *lines),
        work=needed(work, lines),
        row_fields=fields_of(by_row),
        row_lines=needed(fixed, [_user(declared(by_row))]),
    )
    row = [*taken("of_rows[row]", by_row), *(each for each in steps.row if each not in by_row)]
    key = [each for each in steps.key if each not in by_key]
    at = next(i for i, each in enumerate(key) if "key" in each.names) + 1
    key[at:at] = taken("of_key({key})", by_key)
    used = _user(name for _, name in steps.row_values)
    return replace(steps, row=needed(row, [used]), key=needed(key, steps.element)), values


def fields_of(loads: Iterable[Statement]) -> tuple[tuple[str, str], ...]:
    """Return what loads declare, each with the type that it is held in."""
    return tuple((HELD[each.type], name) for each in loads for name in each.names)


def taken(place: str, loads: Sequence[Statement]) -> list[Statement]:
    """Return the line that takes values from where they were put."""
    names = declared(loads)
    return [statement(f"const auto [{', '.join(names)}] = {place};", declares=names)] if names else []


def _user(names: Iterable[str]) -> Statement:
    """Return a statement that reads names."""
    return Statement("", frozenset(names))
