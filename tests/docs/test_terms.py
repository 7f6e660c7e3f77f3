"""Each thing has one name: words that docs/terms.md has replaced are not used for it any more, in code and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Replaced words, as a pattern, and the term that has their place.
REPLACED = {
    r"\banew\b": "again",
    r"\bfixed reference\b": "row max",
    r"\bsections? of heads\b": "heads in L2",
    r"\bbehind (the|its|their) (end|last)\b": "after",
    r"\bone behind the other\b": "one after the other",
    r"\bsums of dQ\b(?! in global)": "dQ accumulator",
    r"\bnumbers of (their |the )?rows\b": "row statistics",
    r"\brunning maximum\b": "running max",
    r"\bleft operand\b": "A operand",
    r"\bno multiple of\b": "not a multiple of",
    r"\bof one's own\b": "a user's",
    r"\bmost special\b": "most specific",
    r"\bmaps? of tiles\b": "tile map",
    r"\bsquared error\b": "mean squared error or RMSE",
    r"\b(is|are) no (index|object|tensor|function|zero|Python integer)\b": "not a …",
}

#: Of these, the ones that are plain English.
PLAIN = {
    "again", "after", "one after the other", "not a multiple of", "a user's", "most specific",
    "mean squared error or RMSE", "not a …",
}  # fmt: skip


def texts() -> Iterator[tuple[Path, str]]:
    """Yield sources, templates and pages; the notebook tells of earlier kernels in the words of their time."""
    for folder, pattern in (("attngen", "*.py"), ("templates", "*.*"), ("docs", "*.md"), ("specs", "*.yaml")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            if path.is_file() and "notebook" not in path.parts:
                yield path, path.read_text()
    for path in sorted(ROOT.glob("*.md")):
        yield path, path.read_text()


def test_replaced_words_are_gone() -> None:
    any_of_them = re.compile(r"\b(?:" + "|".join(pattern.removeprefix(r"\b") for pattern in REPLACED) + ")")
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}; say '{instead}'"
        for path, text in texts()
        if any_of_them.search(text)
        for pattern, instead in REPLACED.items()
        if re.search(pattern, text)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert uses == []


def test_terms_are_defined() -> None:
    """The terms that take their place stand in the table, but for plain words."""
    table = (ROOT / "docs" / "terms.md").read_text()
    for term in set(REPLACED.values()) - PLAIN:
        assert term.replace("A operand", "A, B operand") in table, term
