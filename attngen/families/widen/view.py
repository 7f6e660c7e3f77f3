"""View of the kernel that widens a cache of 8 bits."""

from __future__ import annotations

from attngen.families.widen.schedule import WRITTEN
from attngen.parts.rows_view import HelperView, _view
from attngen.plan.model import Plan


def widen_view(plan: Plan, template: str) -> HelperView:
    """Return the view of a plan that widens caches."""
    summary = f"Used keys and values of a cache in 8 bits in {plan.dtype_name}, times their scales."
    return _view(plan, template, summary, WRITTEN)
