"""The site shows pages that there are, and the release's files agree on the version."""

from __future__ import annotations

import re

import pytest
import yaml

from attngen.formats import VERSION
from tests.docs.blocks import DOCUMENTS, ROOT

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


#: Versions of attngen, of its packages and of its tags, as docs write them.
VERSIONS = re.compile(r"(?:attngen(?:_\w+)?[ -]|\bv)(\d+\.\d+\.\d+)")

#: A release that there is not yet, in an example of a newer one.
LATER = "9.0.0"


def test_docs_name_no_other_version() -> None:
    """Wheels, tags and messages have that of attngen; history has others."""
    pages = [page for page in DOCUMENTS if page.name != "CHANGELOG.md" and "notebook" not in page.parts]
    versions = {(page.name, version) for page in pages for version in VERSIONS.findall(page.read_text())}
    assert {version for _, version in versions} <= {VERSION, LATER}, versions
