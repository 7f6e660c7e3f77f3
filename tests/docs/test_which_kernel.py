"""docs/which_kernel.md has the tables that the planner and the declarations of schedules give."""

from __future__ import annotations

from attngen.plan.catalogue import schedules
from tests.docs.which_kernel import PAGE, PAGES, PASSES, page


def test_the_page_has_the_tables() -> None:
    """``python -m tests.docs.which_kernel`` writes them."""
    text = PAGE.read_text()
    assert text == page(text)


def test_the_links_are_of_schedules_that_there_are() -> None:
    assert PAGES.keys() <= {row.name for name in PASSES for row in schedules(name)}
