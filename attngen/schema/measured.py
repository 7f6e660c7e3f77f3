"""Measured choices of a schedule, by what kernels compute: tables that ship in ``tuned/``, which the planner reads.

They have the form of the files that ``attngen tune`` writes (``tuned``), whose choices are for single kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from attngen import resources
from attngen.errors import Location, SpecError
from attngen.schema import tree
from attngen.schema.fields import Many
from attngen.schema.messages import spec_error
from attngen.schema.models import Model
from attngen.schema.quoting import show

#: Version of the form of these files.
FORMAT = 1

#: Columns of a line of a table.
_LINE = 138


def _check_date(text: str) -> str:
    try:
        date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"found {show(text)}; allowed: a date such as 2026-11-28") from None
    return text


Date = Annotated[str, AfterValidator(_check_date)]


class MeasuredModel(Model):
    """The measurement that a choice comes from: the card, the day, and how it was made."""

    model_config = ConfigDict(defer_build=True)  # models are built when a file is read

    gpu: str | None = None
    date: Date | None = None
    method: str | None = Field(default=None, description="in words, or the page and heading of docs/ with the figures")


class KeysOfTile(Model):
    """Keys of a step."""

    model_config = ConfigDict(defer_build=True)

    n: Annotated[int, Field(ge=16, le=256, multiple_of=16)]


class NumberOfConsumers(Model):
    """Consumers of 64 rows each."""

    model_config = ConfigDict(defer_build=True)

    consumer: Annotated[int, Field(ge=1, le=3)]


class RowModel(MeasuredModel):
    """Choices for all kernels of a schedule whose work has each fact of ``work`` and none of ``without``.

    ``columns``: the most that the wider one of Q and V has, padded; with ``beyond``, there are more than those. A row
    without a card was not measured: it follows from the registers and the shared memory that there are.
    """

    work: Many[str] = ()
    without: Many[str] = ()
    columns: Annotated[int, Field(ge=16, le=512)]
    beyond: Annotated[int, Field(ge=0, le=512)] = 0
    speedup: Annotated[
        float | None, Field(gt=0, description="over the next best choice that was measured, or the one before")
    ] = None

    @model_validator(mode="after")
    def _all_or_none(self) -> RowModel:
        given = {name: getattr(self, name) is not None for name in ("gpu", "date", "method")}
        if len({*given.values()}) > 1 or (self.speedup is not None and not all(given.values())):
            missing = [name for name, is_given in given.items() if not is_given]
            raise ValueError(f"a measured choice has gpu, date and method; missing: {', '.join(missing)}")
        return self

    @property
    def kernels(self) -> tuple[frozenset[str], frozenset[str], int, int]:
        """The kernels that it is for: rows that name the same are for the same ones."""
        return frozenset(self.work), frozenset(self.without), self.beyond, self.columns

    @property
    def origin(self) -> str:
        """Origin of the choice, in words."""
        if self.gpu is None:
            return "by registers and shared memory, not measured"
        faster = f", {self.speedup:g} times as fast as the next choice" if self.speedup else ""
        return f"measured on {self.gpu}, {self.date}{faster} ({self.method})"


Row = TypeVar("Row", bound=RowModel)


class TableModel(Model):
    """File of the choices of a schedule by work. A model of it has the rows, ``choices``, as well."""

    model_config = ConfigDict(defer_build=True)

    tuned: Literal[1]
    schedule: str


class ChoiceTable(Generic[Row]):
    """The shipped choices of a schedule by work, read at their first use; the first one that suits a kernel is taken.

    ``model`` is that of the file. ``facts`` are all that rows may name; the earlier ones are asked for first.
    """

    def __init__(self, schedule: str, model: type[TableModel], facts: Iterable[str]) -> None:
        self._schedule, self._model = schedule, model
        self._facts = {name: place for place, name in enumerate(facts)}
        self._rows: tuple[Row, ...] = ()
        self._by_columns: dict[int, list[tuple[Row, list[tuple[str, bool]]]]] = {}

    @property
    def path(self) -> Path:
        """The file."""
        return resources.tuned_dir() / f"{self._schedule}.yaml"

    def load(self) -> tuple[Row, ...]:
        """Read and check the rows, in their order.

        Raises SpecError, with file, line and field, for anything that is wrong with the file.
        """
        return self._checked(read_choices(self.path)[1])

    def _checked(self, node: tree.Node) -> tuple[Row, ...]:
        model: Any = checked(self._model, node)
        if model.schedule != self._schedule:
            raise SpecError(
                f"found {show(model.schedule)}; allowed: {self._schedule}", location=node.locate(("schedule",)),
                field="schedule",
            )  # fmt: skip
        rows: tuple[Row, ...] = model.choices
        return rows

    def suiting(self, holds: Callable[[str], bool], columns: int) -> Iterator[Row]:
        """Yield the rows that suit a kernel of so many columns, of whose work ``holds`` tells the facts; the best
        first. Raises SpecError if the file is wrong, or after the last row if there is none for all kernels."""
        rows = self._by_columns.get(columns)
        if rows is None:
            self._rows = self._rows or self.load()
            rows = [(row, self._asked(row)) for row in self._rows if row.beyond < columns <= row.columns]
            self._by_columns[columns] = rows
        for row, asked in rows:
            for fact, wanted in asked:
                if holds(fact) is not wanted:
                    break
            else:
                yield row
        if not rows or rows[-1][1]:
            raise self.error(columns)

    def _asked(self, row: Row) -> list[tuple[str, bool]]:
        """The facts that a row asks for, and whether they have to hold."""
        asked = [*((fact, True) for fact in row.work), *((fact, False) for fact in row.without)]
        return sorted(asked, key=lambda each: self._facts[each[0]])

    def error(self, columns: int) -> SpecError:
        """The error of a table without a row for a kernel."""
        return SpecError(
            f"no choice for the work of this kernel, at {columns} columns; a last row without 'work' is for all",
            location=Location(str(self.path)), field="choices",
        )  # fmt: skip

    def forget(self) -> None:
        """Read the file again at the next use."""
        self._rows = ()
        self._by_columns.clear()

    @contextmanager
    def holding(self, text: str) -> Iterator[None]:
        """Have the rows of ``text`` for a while, instead of those of the file. Raises SpecError if they are wrong."""
        rows, by_columns = self._rows, self._by_columns
        self._rows, self._by_columns = self._checked(_parsed(text.encode(), self.path)), {}
        try:
            yield
        finally:
            self._rows, self._by_columns = rows, by_columns

    def with_row(self, text: str, row: Row, chosen: Row) -> str:
        """Text of the table with one more row: right above the ``chosen`` one of its rows, which had the same kernels
        before and keeps its others; in its place if there are no others."""
        place = self._checked(_parsed(text.encode(), self.path)).index(chosen)
        lines = text.splitlines(keepends=True)
        start, end = _lines_of_row(text, place)
        lines[start : end if row.kernels == chosen.kernels else start] = [_text_of(row)]
        return "".join(lines)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A measured choice as a ``row`` of a table, and the row that the table chose for the same kernel before."""

    table: ChoiceTable[Any]
    row: RowModel
    chosen: RowModel


def _lines_of_row(text: str, place: int) -> tuple[int, int]:
    """First line of a row of a table, and the line behind it."""
    (choices,) = (value for key, value in yaml.compose(text).value if key.value == "choices")
    node = choices.value[place]
    return node.start_mark.line, node.end_mark.line + (node.end_mark.column > 0)


def _text_of(row: RowModel) -> str:
    """Lines of a row in a table: the kernels that it is for, the choice, and the measurement."""
    fields = row.model_dump(mode="json", exclude_defaults=True)
    first, last = ("work", "without", "beyond", "columns"), ("gpu", "date", "method", "speedup")
    names = [*first, *(name for name in fields if name not in (*first, *last)), *last]
    lines, line = [], "- {"
    for name in (name for name in names if name in fields):
        said = yaml.safe_dump({name: fields[name]}, default_flow_style=True, width=1_000).strip()[1:-1]
        if len(line) + len(said) > _LINE:
            lines.append(line.rstrip())
            line = "   "
        line += f"{said}, "
    return "\n".join([*lines, line.removesuffix(", ")]) + "}\n"


_M = TypeVar("_M", bound=BaseModel)


def read_choices(path: Path) -> tuple[bytes, tree.Node]:
    """Content and tree of a file of choices. Raises SpecError if it is none."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {str(path)!r}: {error}", location=Location(str(path))) from error
    return content, _parsed(content, path)


def _parsed(content: bytes, path: Path) -> tree.Node:
    """Tree of the content of a file of choices. Raises SpecError if it is none."""
    node = tree.parse(content, str(path))
    if not isinstance(node.value, dict) or "tuned" not in node.value:
        raise SpecError(
            f"no file of choices, which is a mapping that starts with 'tuned: {FORMAT}'", location=node.location
        )
    return node


def checked(model: type[_M], node: tree.Node) -> _M:
    """The tree of a file as a model. Raises SpecError, with line and field, for anything that is wrong."""
    try:
        return model.model_validate(node.plain())
    except ValidationError as error:
        raise spec_error(error, node, model) from error
