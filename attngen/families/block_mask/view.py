"""View of the kernel that makes a block mask."""

from __future__ import annotations

from attngen.parts.rows_view import HelperView, _view
from attngen.plan.model import Plan


def block_mask_view(plan: Plan, template: str) -> HelperView:
    """View of a plan that makes block masks."""
    return _view(plan, template, "A block mask: which blocks of keys the list of each block of queries names.", {"out"})
