"""The parts of a Markdown file that tests look at: fenced blocks, tables, inline code, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SPEC, LANGUAGE, TOUR = ROOT / "docs/spec.md", ROOT / "docs/language.md", ROOT / "docs/tour.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r"<!-- (.*?) -->\n\Z")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LIST = re.compile(r"\s*([-*]|\d+\.) ")
#: First characters of lines that are no prose: tables, headings, directives of mkdocstrings, pictures, HTML.
_OTHER_LINES = ("|", "#", ":::", "    options:", "![", "<")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, its language, its text, and the comment right above it."""

    path: Path
    line: int
    language: str
    text: str
    note: str
    output: str | None  # of a program: the text block right below it

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path, language: str) -> list[Block]:
    """Return the fenced blocks of a language."""
    content, fences = path.read_text(), []
    for match in _FENCE.finditer(content):
        if match[1] == language:
            before = content[: match.start()]
            note, output = _NOTE.search(before), _OUTPUT.match(content, match.end() + 1)
            line = before.count("\n") + 1
            fences.append(Block(path, line, language, match[2], note[1] if note else "", output[1] if output else None))
    return fences


def prose(path: Path) -> str:
    """Return a file without its fenced blocks."""
    return _FENCE.sub("", path.read_text())


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a file, each on one line, without lists, tables, code, headings and comments."""
    for block in re.split(r"\n\s*\n", _COMMENT.sub("", _FENCE.sub("\n", path.read_text()))):
        lines: list[str] = []
        for line in block.strip("\n").splitlines():
            if _LIST.match(line):
                break  # the rest of the block are items
            if not line.startswith((*_OTHER_LINES, " ")):
                lines.append(line)
        if lines:
            yield " ".join(lines)


def code_spans(path: Path) -> list[str]:
    """Return the inline code outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(path))


def tables(path: Path, *header: str) -> Iterator[list[list[str]]]:
    """Yield the rows of each table with this header, cell by cell."""
    for table in re.findall(r"(?:^\|.*\|\n)+", prose(path), re.MULTILINE):
        rows = [[_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if rows[0] == list(header):
            yield rows[2:]


def _plain(cell: str) -> str:
    return cell.strip().replace("\\|", "|")


def code(cell: str) -> str:
    """Return the first piece of inline code of a cell."""
    match = re.search(r"`([^`]+)`", cell)
    assert match, f"no code in the cell {cell!r}"
    return match[1]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    """Return the targets of the links that stay in the repository."""
    return [target for target in re.findall(r"\]\(([^)]+)\)", prose(path)) if "://" not in target]
