"""Header of rendered sources: what the kernel computes, from what, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

from attngen.lang.printing import canonical
from attngen.plan.model import Argument, Plan


def summary(plan: Plan) -> str:
    """One line on what the kernel computes; expressions in their canonical print, never the user's own text."""
    variant = plan.variant
    parts = [f"mask `{canonical(variant.mask)}`"]
    if variant.score is not None:
        parts.append(f"score `{canonical(variant.score)}`")
    if variant.sink is not None:
        parts.append(f"sink `{canonical(variant.sink)}`")
    if variant.weights != "softmax":
        parts.append(f"weights {variant.weights}")
    if variant.dropout:
        parts.append("dropout")
    return f"Attention {plan.direction}, variant {variant.name}: {', '.join(parts)}."


def command(plan: Plan) -> str:
    """Return the spec's file as the command in the header names it."""
    return re.sub(r"[^\w./-]", "_", plan.spec_file)


def argument_groups(
    arguments: tuple[Argument, ...], declare: Callable[[Argument], str], *, width: int
) -> tuple[str, ...]:
    """Return a parameter list, related arguments on one line of at most about ``width`` characters."""
    lines: list[str] = []
    group: tuple[str, str | None] | None = None
    for argument in arguments:
        of = argument.of if argument.kind in ("stride", "extent") else None
        text = declare(argument)
        if (argument.kind, of) == group and len(lines[-1]) + len(text) <= width:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
        group = (argument.kind, of)
    return tuple(lines)
