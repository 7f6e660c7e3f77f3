"""Measured choices as rows of the planner's tables, by which all kernels of the same work have them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date

from attngen.plan.candidates import as_scheduled
from attngen.plan.catalogue import named
from attngen.plan.model import Plan
from attngen.plan.planner import plan
from attngen.schema import KernelSpec


@dataclass(frozen=True)
class Searched:
    """A kernel and its fastest choice: ``fastest`` is ``spec`` with this, or without it if the plan's own is best.

    ``name`` is that of the plan's own, and ``label`` describes the kernel.
    """

    name: str
    label: str
    spec: KernelSpec
    fastest: KernelSpec
    speedup: float = 1.0


@dataclass
class TablesWithRows:
    """Texts of the tables that have new rows, by the names of their files; by kernel, the file that has its row; and
    the reasons against rows of others."""

    texts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def tables_of(searched: Sequence[Searched], *, gpu: str, method: str) -> TablesWithRows:
    """The planner's tables, with rows for the kernels that have a faster choice than theirs.

    A row is left out by which its kernel would not be planned as it was measured, or another kernel of the search
    would lose its own fastest choice.
    """
    tables = TablesWithRows()
    measurement = {"gpu": gpu, "date": date.today().isoformat(), "method": method}
    planned = _plans(searched)
    best = {one.name: planned[one.name] if one.fastest is one.spec else plan(one.fastest) for one in searched}
    with ExitStack() as held:
        for one in searched:
            fastest = best[one.name]
            schedule = named(fastest.schedule)
            if one.fastest is one.spec or schedule.measured_row is None:
                continue
            new = schedule.measured_row(as_scheduled(one.spec, fastest), fastest)
            file = new.table.path
            if planned[one.name] != fastest:  # else the row of another kernel is for this one, too
                row = new.row.model_copy(update={**measurement, "speedup": one.speedup})
                text = new.table.with_row(tables.texts.get(file.name) or file.read_text("utf-8"), row, new.chosen)
                with new.table.holding(text):
                    after = _plans(searched)
                if after[one.name] != fastest:
                    tables.left_out[one.name] = f"the planner would make {after[one.name].name} of it"
                    continue
                others = (each for each in searched if after[each.name] not in (planned[each.name], best[each.name]))
                if slower := next(others, None):
                    tables.left_out[one.name] = f"it would be for {slower.label}, too, whose fastest choice differs"
                    continue
                held.enter_context(new.table.holding(text))
                tables.texts[file.name], planned = text, after
            tables.rows[one.name] = file.name
    return tables


def _plans(searched: Sequence[Searched]) -> dict[str, Plan]:
    return {each.name: plan(each.spec) for each in searched}
