"""The site shows pages that there are, and the release's files agree on the version."""

from __future__ import annotations

import re

import pytest
import yaml

from attngen.formats import VERSION
from tests.docs.blocks import ROOT

SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)


def pages(nav: object) -> set[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(pages, nav.values() if isinstance(nav, dict) else nav))  # type: ignore[attr-defined]


def test_the_navigation_names_pages_that_there_are() -> None:
    """Pages that it does not name are added by ``docs/site_hooks.py``."""
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages(SITE["nav"]) <= there | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
def test_the_api_page_names_what_there_is(name: str) -> None:
    module, _, symbol = name.rpartition(".")
    path = ROOT / module.replace(".", "/")
    whole = ROOT / name.replace(".", "/")
    if whole.is_dir() or whole.with_suffix(".py").is_file():
        return
    assert re.search(rf"^(def|class) {symbol}\b", path.with_suffix(".py").read_text(), re.MULTILINE), name


def test_the_citation_has_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
