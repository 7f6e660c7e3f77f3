"""View of the kernel that merges results."""

from __future__ import annotations

from attngen.parts.rows_view import HelperView, _view
from attngen.plan.model import Plan


def merge_view(plan: Plan, template: str) -> HelperView:
    """View of a plan that merges results."""
    summary = "Results of one query over two sets of keys become the result over both, by their log-sum-exps."
    return _view(plan, template, summary, {"out", "lse"})
