"""From a plan to readable source: Jinja templates filled from a view of the plan."""

from attngen.render.source import Source, render

__all__ = ["Source", "render"]
