"""Measured choices of a schedule, by what kernels compute: tables that ship in ``tuned/``, which the planner reads.

They have the form of the files that ``attngen tune`` writes (``tuned``), whose choices are for single kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

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
    speedup: Annotated[float | None, Field(gt=0, description="over the next best choice that was measured")] = None

    @model_validator(mode="after")
    def _all_or_none(self) -> RowModel:
        given = {name: getattr(self, name) is not None for name in ("gpu", "date", "method")}
        if len({*given.values()}) > 1 or (self.speedup is not None and not all(given.values())):
            missing = [name for name, is_given in given.items() if not is_given]
            raise ValueError(f"a measured choice has gpu, date and method; missing: {', '.join(missing)}")
        return self

    @property
    def origin(self) -> str:
        """Origin of the choice, in words."""
        if self.gpu is None:
            return "by registers and shared memory, not measured"
        faster = f", {self.speedup:g} times as fast as the next best" if self.speedup else ""
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
        _, node = read_choices(self.path)
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


_M = TypeVar("_M", bound=BaseModel)


def read_choices(path: Path) -> tuple[bytes, tree.Node]:
    """Content and tree of a file of choices. Raises SpecError if it is none."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {str(path)!r}: {error}", location=Location(str(path))) from error
    node = tree.parse(content, str(path))
    if not isinstance(node.value, dict) or "tuned" not in node.value:
        raise SpecError(
            f"no file of choices, which is a mapping that starts with 'tuned: {FORMAT}'", location=node.location
        )
    return content, node


def checked(model: type[_M], node: tree.Node) -> _M:
    """The tree of a file as a model. Raises SpecError, with line and field, for anything that is wrong."""
    try:
        return model.model_validate(node.plain())
    except ValidationError as error:
        raise spec_error(error, node, model) from error
