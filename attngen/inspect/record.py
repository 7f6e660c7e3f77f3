"""Records of whole runs of ``tests/gpu``: one for each card, and of which sources.

``python -m tests.gpu.record`` writes them, ``attngen doctor`` and docs/limits.md quote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen import resources
from attngen.files import read_regular

#: Sources that decide the machine code of a kernel and its launches, below the folder of ``resources``.
SOURCES = (
    "templates", "tuned", "attngen/lang", "attngen/plan", "attngen/render", "attngen/parts", "attngen/families",
    "attngen/compile", "attngen/runtime",
)  # fmt: skip

#: Outcomes of a test. A kernel that the compiler compiles wrongly is refused; nothing is known of the others.
PASSED, FAILED, REFUSED, NOT_RUN = OUTCOMES = ("passed", "failed", "refused", "not run")


@dataclass(frozen=True, slots=True)
class Record:
    """One run on one card. ``families`` counts outcomes; ``not_run`` has the names of tests by the reason.

    ``sources`` has a hash for each part of ``SOURCES``. ``commit`` is None where the checkout had changes, or no
    history.
    """

    card: str
    driver: str
    date: str
    commit: str | None
    sources: Mapping[str, str]
    versions: Mapping[str, str]
    seconds: float
    families: Mapping[str, Mapping[str, int]]
    failed: Sequence[str] = ()
    refused: Sequence[str] = ()
    not_run: Mapping[str, Sequence[str]] = field(default_factory=dict)
    exhaustive: int = 0  # tests that only ``-m exhaustive`` runs

    def count(self, outcome: str) -> int:
        """Number of tests with an outcome."""
        return sum(counts.get(outcome, 0) for counts in self.families.values())

    def counts(self) -> str:
        """Return the counts as a text, those that are 0 too."""
        return ", ".join(f"{self.count(outcome)} {outcome}" for outcome in OUTCOMES)

    def changed(self) -> list[str]:
        """Return the parts of the sources that are not those of the run."""
        here = source_hashes()
        return [part for part in SOURCES if self.sources.get(part) != here[part]]


def source_hashes() -> dict[str, str]:
    """Return a hash of each part of the sources: of the names and contents of all its files."""
    package = Path(resources.__file__).parent
    folders = {part: package.parent / part for part in SOURCES}
    folders |= {"templates": resources.templates_dir(), "tuned": resources.tuned_dir()}
    return {part: folder_hash(folder) for part, folder in folders.items()}


def folder_hash(folder: Path) -> str:
    """Return a hash of the names and contents of the files below a folder, but for what Python compiled, and for the
    templates of packages, which hold no kernel."""
    digest = sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(name for name in files if "__pycache__" not in name and not name.startswith("package/")):
        content = files[name].read_bytes()
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def records(path: Path | None = None) -> list[Record]:
    """Return the records of a file, by default attngen's own: none if there is no such file.

    Raises ValueError if it holds anything else.
    """
    path = path or resources.record_file()
    if not path.is_file():
        return []
    try:
        return [Record(**row) for row in json.loads(read_regular(path))["records"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no records of GPU runs: {error}") from None


def write(path: Path, record: Record) -> None:
    """Put a record into a file, in the place of an earlier one of the same card."""
    kept = [row for row in records(path) if row.card != record.card]
    rows: list[Any] = [asdict(row) for row in sorted((*kept, record), key=lambda row: row.card)]
    path.write_text(json.dumps({"records": rows}, indent=1) + "\n")


def table(rows: Sequence[Record]) -> str:
    """Return the records as the tables of docs/limits.md."""
    if not rows:
        return "No whole run is recorded.\n"
    head = ("card", "date", "commit", *OUTCOMES, "driver", "torch", "Triton", "NVRTC", "Python")
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        tools = (row.versions.get(name, "?") for name in ("torch", "triton", "nvrtc", "python"))
        counts = (f"{row.count(outcome):,}" for outcome in OUTCOMES)
        lines.append(_line([row.card, row.date, row.commit or "with changes", *counts, row.driver, *tools]))
    families = sorted({name for row in rows for name in row.families})
    cells = {row.card: {name: _cell(row.families.get(name, {})) for name in families} for row in rows}
    lines += ["", _line(["passed, of all tests of a family", *cells]), _line(["---"] * (1 + len(cells)))]
    lines += [_line([name, *(cells[card][name] for card in cells)]) for name in families]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{counts.get(PASSED, 0):,} of {total:,}" if total else "–"
