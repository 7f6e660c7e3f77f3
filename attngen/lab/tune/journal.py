"""The measurements so far, a line of JSON for each kernel, so that a search which was cut goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngen.errors import CallError
from attngen.files import cause


@dataclass
class Journal:
    """The rows of one search, by the kernels that they are of; ``about`` says what they are only valid for."""

    path: Path
    about: Mapping[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, path: Path, about: Mapping[str, Any], *, restart: bool) -> Journal:
        """Return the journal in a file, or a new one if there is none, or with ``restart``.

        A last line that was cut is left out. Raises CallError if it is of another search, or cannot be read.
        """
        journal = cls(path, about)
        if restart or not path.exists():
            journal._write([about])
            return journal
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CallError(f"{path} cannot be read: {error}") from error
        rows = [row for row in map(_parsed, lines) if row is not None]
        head = rows[0] if rows else {}
        for name, value in about.items():
            if head.get(name) != value:
                raise CallError(
                    f"{path} is the journal of another search: {name} was {head.get(name)!r}, now it is {value!r}; "
                    "--restart begins again, --out names another file"
                )
        journal.rows = {row["of"]: row for row in rows[1:] if "of" in row}
        journal._write([about, *journal.rows.values()])
        return journal

    def add(self, row: dict[str, Any]) -> None:
        """Add the result of one kernel. Raises CallError if it cannot be written."""
        self.rows[row["of"]] = row
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CallError(f"{self.path} cannot be written: {cause(error)}") from error

    def remove(self) -> None:
        """Delete the file: the search is done."""
        self.path.unlink(missing_ok=True)

    def _write(self, rows: list[Any]) -> None:
        unfinished = self.path.with_name(f"{self.path.name}.tmp")
        try:
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            unfinished.replace(self.path)
        except OSError as error:
            raise CallError(f"{self.path} cannot be written: {cause(error)}") from error


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
