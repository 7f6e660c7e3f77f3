"""From a kernel spec to a plan: every choice made, every budget checked, the name given."""

from attngen.plan.model import Argument, Plan
from attngen.plan.planner import plan

__all__ = ["Argument", "Plan", "plan"]
