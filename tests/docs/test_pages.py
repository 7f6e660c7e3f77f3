"""Pages for users begin with the question that they answer, and have no long paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, paragraphs
from tests.docs.test_site import SITE, pages

#: Parts of the navigation whose pages are for users.
PARTS = ("User guide", "Cookbook", "Help", "Performance")

MOST_WORDS = 90


def of_users() -> Iterator[Path]:
    """Yield the pages of these parts."""
    for part in SITE["nav"]:
        for name, nav in part.items():
            if name in PARTS:
                yield from (ROOT / "docs" / page for page in sorted(pages(nav)))


PAGES = list(of_users())


def faults(path: Path) -> Iterator[str]:
    """Faults of a page: no question below its title, long paragraphs."""
    title, first, *_ = (line for line in path.read_text().splitlines() if line)
    if not title.startswith("# "):
        yield "the first line is no title"
    if not re.fullmatch(r"[A-Z][^*\[\]]*\?", first):
        yield f"the line below the title is no plain question, such as 'How fast is it?', but: {first}"
    for text in paragraphs(path):
        words = len(text.split())
        if words > MOST_WORDS:
            yield f"a paragraph has {words} words, more than {MOST_WORDS}: {text[:60]} ..."


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_of_users(path: Path) -> None:
    assert list(faults(path)) == []


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = " ".join(["word"] * (MOST_WORDS + 1))
    page.write_text(f"# Page\n\nSome text\n\n- {long}\n  {long}\n\n| {long} |\n|---|\n\n```text\n{long}\n```\n")
    assert [fault.partition(":")[0] for fault in faults(page)] == [
        "the line below the title is no plain question, such as 'How fast is it?', but"
    ]
    page.write_text(f"# Page\n\nWhat is it?\n\nIt is\n{long}\n")
    assert [fault.partition(",")[0] for fault in faults(page)] == [f"a paragraph has {MOST_WORDS + 3} words"]
