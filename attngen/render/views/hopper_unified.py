"""Plan → what the template without warp roles is filled with: each warpgroup finds its tiles by itself."""

from __future__ import annotations

from attngen.plan.model import Plan
from attngen.render.views.hopper_forward import CudaView, forward_view


def unified_view(plan: Plan, template: str) -> CudaView:
    """Return the view of a plan."""
    return forward_view(plan, template, tile="tile", masked="partial")
