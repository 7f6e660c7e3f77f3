"""Small tables that a score reads at computed indices, of which consumers hold copies in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attngen.lang.biases import LANES, MOST_HELD, lookups
from attngen.lang.emit import Binding
from attngen.lang.folding import LOG2E, ONE
from attngen.lang.ir import Const, Expr, Load, Op, Type, Var, names, own, rewrite, walk
from attngen.lang.literals import fold_literals
from attngen.lang.simplify import mul
from attngen.lang.statements import Code, Statement
from attngen.lang.tables import ENTRY_BYTES, tables
from attngen.plan.model import Plan
from attngen.plan.symbols import PREFIX
from attngen.render.cuda_statements import int_constant
from attngen.render.expressions import CUDA, emit_for, scalar_bindings

_ENTRY = own("entry")


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table in shared memory, as expressions see it: the symbol of the entry that a pair reads, the place of that,
    and the value of an entry by its number."""

    entries: int
    symbol: Var
    places: Mapping[str, Expr]  # parts of the place, by their names
    begin: int  # bytes from the first table of a consumer
    value: Expr

    @property
    def binding(self) -> Binding:
        """The binding of the symbol."""
        *first, last = self.places
        table = " + ".join(["{tables}", *([str(self.begin)] if self.begin else []), *(f"{{{name}}}" for name in first)])
        return Binding(f"entry_at({table}, {{{last}}})", frozenset({"q", "kv"}))

    def with_values(self, change: Callable[[Expr], Expr]) -> SharedTable:
        """The same with changed parts of the place."""
        return replace(self, places={name: change(place) for name, place in self.places.items()})


@dataclass(frozen=True, slots=True)
class Fill:
    """Filling of a table: its entries, where it begins, the lines that find the value of an entry, and the value."""

    entries: int
    begin: int
    lines: tuple[Statement, ...]
    value: Code


def with_tables(
    plan: Plan, values: Sequence[Expr], computed: Iterable[Expr] = ()
) -> tuple[list[Expr], tuple[SharedTable, ...]]:
    """Expressions with symbols for the entries of tables that a plan holds in shared memory, and these tables, which
    the first expression reads. What it reads in its ``computed`` parts is not among them.

    A constant factor of an entry, such as log2(e), becomes a part of the value that is held.
    """
    if not plan.structure.table_bytes:
        return list(values), ()
    most = LANES if plan.direction == "forward" else MOST_HELD
    shuffled = lookups(plan.variant, plan.structure.bias_bytes, most) if plan.structure.biases else frozenset()
    values = [rewrite(value, fold_literals) for value in values]
    others = {node for each in computed for node in walk(rewrite(each, fold_literals)) if isinstance(node, Load)}
    of_value = tables(values[0], plan.variant, shuffled | others)
    total = ENTRY_BYTES * sum(table.entries for table in of_value)
    assert total == plan.structure.table_bytes, f"{plan.name}: other tables than planned"
    held: dict[Expr, Var] = {
        table.load: own(f"entry of table {number}", Type.FLOAT) for number, table in enumerate(of_value)
    }
    changed = [rewrite(value, held.get) for value in values]
    shared: list[SharedTable] = []
    begin = 0
    for number, table in enumerate(of_value):
        changed, factor = _without_factor(changed, held[table.load])
        name = f"{PREFIX}{table.load.tensor}_{number}_" if number else f"{PREFIX}{table.load.tensor}_"
        places = dict(zip([f"{name}row", f"{name}place"][-len(table.parts) :], table.parts, strict=True))
        value = mul(table.entry(_ENTRY), factor)
        shared.append(SharedTable(table.entries, held[table.load], places, begin, value))
        begin += table.entries * ENTRY_BYTES
    return changed, tuple(shared)


def _without_factor(values: list[Expr], symbol: Var) -> tuple[list[Expr], Expr]:
    """The values with the symbol in place of its products with a constant factor, if it has the same one wherever it
    stands, and that factor, else 1."""
    factors = {
        node.args[1]
        for value in values
        for node in walk(value)
        if isinstance(node, Op) and node.op == "mul" and node.args[0] == symbol and _is_constant(node.args[1])
    }
    if len(factors) != 1:
        return values, ONE
    (factor,) = factors
    mark = own("product", Type.FLOAT)
    product = Op("mul", (symbol, factor), Type.FLOAT)
    changed = [rewrite(value, lambda node: mark if node == product else None) for value in values]
    if any(symbol.name in names(value) for value in changed):
        return values, ONE
    return [rewrite(value, lambda node: symbol if node == mark else None) for value in changed], factor


def _is_constant(node: Expr) -> bool:
    return node == LOG2E or isinstance(node, Const)


def placed(
    plan: Plan, shared: Sequence[SharedTable], bound: Mapping[str, Binding], inner: str = "kv"
) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
    """Statements before the loop and inside it that find the place of the entry that a pair reads of each table."""
    if not shared:
        return (), ()
    places = {name: place for each in shared for name, place in each.places.items()}
    code = emit_for(plan, CUDA, list(places.values()), bound, taken=places, inner=inner)
    own_lines = [int_constant(name, value) for name, value in zip(places, code.results, strict=True)]
    return code.hoisted, (*code.body, *own_lines)


def fills(plan: Plan, shared: Sequence[SharedTable]) -> tuple[Fill, ...]:
    """Filling of the tables of a head, entry by entry."""
    bound = scalar_bindings(plan, CUDA) | {_ENTRY.name: Binding("entry")}
    filled = []
    for each in shared:
        code = emit_for(plan, CUDA, [each.value], bound, ranges={_ENTRY.name: (0, each.entries - 1)})
        filled.append(Fill(each.entries, each.begin, (*code.hoisted, *code.body), code.results[0]))
    return tuple(filled)
