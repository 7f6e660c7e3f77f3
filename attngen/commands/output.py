"""Output of commands: tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.errors import AttngenError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


def refuse_unwritable(path: Path) -> None:
    """Raise BadParameter for a file that cannot be written at the end of long work: without a name, or a folder."""
    if not path.name:
        raise click.BadParameter("the name of a file is empty")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print rows below the names of columns, if these have any: fitted to a terminal, at full width into a pipe.

    Numbers are right-aligned.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    headed = any(columns)
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, show_header=headed
    )
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    # a pipe has no width: no line may be folded
    console(width=None if sys.stdout.isatty() else 1000).print(table)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console of rich, with colors where click prints colors."""
    from rich.console import Console

    context = click.get_current_context(silent=True)
    color = None if context is None else context.color
    return Console(stderr=stderr, width=width, force_terminal=color or None, no_color=color is False or None)


def print_json(value: Any) -> None:
    """Print a JSON value, indented."""
    click.echo(json.dumps(value, indent=2))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number and what it counts: ``1 kernel``, ``2 kernels``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def warn(message: str) -> None:
    """Print a warning to stderr, in yellow on a terminal."""
    click.secho(f"warning: {message}", fg="yellow", err=True)


class Progress:
    """A bar on a terminal, elsewhere a line for each kernel that is done.

    A build that compiles nothing shows none, and imports nothing for it.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._done, self._missing = 0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def planned(self, total: int, missing: int) -> None:
        """See ``Observer.planned``."""
        self._done, self._missing = 0, missing
        if not self._shown or not missing:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=missing)
        self._bar.start()

    def started(self, name: str) -> None:
        """See ``Observer.started``."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)

    def finished(self, name: str, error: AttngenError | None) -> None:
        """See ``Observer.finished``."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        elif not self._shown:
            self._done += 1
            click.echo(f"[{self._done}/{self._missing}] {name}{' failed' if error else ''}", err=True)
