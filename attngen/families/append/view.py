"""View of the kernel that appends to a cache."""

from __future__ import annotations

from attngen.families.append.schedule import CACHES, SCALES
from attngen.parts.rows_view import HelperView, _view
from attngen.plan.model import Plan


def append_view(plan: Plan, template: str) -> HelperView:
    """Return the view of a plan that appends to caches."""
    bits = " in 8 bits" if plan.descaled or plan.latent_row else ""
    summary = f"New keys and values go into a cache{bits}; keys and queries are rotated on the way."
    return _view(plan, template, summary, {"q_out", *CACHES, *SCALES})
