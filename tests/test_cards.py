"""The evidence for each card: the docs say what ``attngen doctor`` says."""

from __future__ import annotations

from attngen.arch import ARCHES
from attngen.cards import SUPPORT
from attngen.resources import root


def test_every_arch_has_its_cards() -> None:
    assert list(SUPPORT) == list(ARCHES)


def test_the_docs_say_the_same() -> None:
    lines = (root() / "docs" / "cards.md").read_text("utf-8").splitlines()
    for arch, row in SUPPORT.items():
        (line,) = (line for line in lines if line.startswith(f"| {row.cards} | {arch} |"))
        assert row.evidence in line, line
