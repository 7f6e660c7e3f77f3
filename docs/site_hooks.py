"""Hooks of mkdocs: pages of the repository's root, and links that lead out of ``docs/``, on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

#: Pages of the root by their place on the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}

#: Files that links lead to and that no page shows: they are copied.
COPIED = ("LICENSE", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tuned").glob("*.yaml"))))

_LINK = re.compile(r'(\]\(|src=")([^)"#:\s]+)')
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"\[(?:docs/)?(\w+)\.md\]\(")


def on_config(config: Any) -> Any:
    """Put pages that the navigation does not name at the end of the user guide, or of the notebook."""
    known = set(_pages(config["nav"]))
    sections = {name: pages for entry in config["nav"] for name, pages in entry.items() if isinstance(pages, list)}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT / "docs").as_posix()
        if place not in known:
            sections["Notebook" if place.startswith("notebook/") else "User guide"].append(place)
    return config


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from _pages(part)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files of the root."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text("utf-8")))
    for source in COPIED:
        files.append(File.generated(config, source, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links relative to the page's place on the site, and name pages without ``.md``."""
    place = page.file.src_uri
    source = next((name for name, known in PAGES.items() if known == place), f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = "index.md" if target == "README.md" else target.removeprefix("docs/")
        return match[1] + posixpath.relpath(target, posixpath.dirname(place) or ".")

    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _FILE_NAME.sub(r"[\1](", _LINK.sub(moved, part)) for part in parts
    )
