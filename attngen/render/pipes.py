"""Pipes → the constants of a CUDA kernel: its rings, the names of its barriers, and how these begin."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.plan.pipes import Pipes, Ring

_WIDTH = 118  # of a line of code with its comment


@dataclass(frozen=True, slots=True)
class BarrierView:
    """A barrier: its constant, how many there are of it, and the arrivals that complete a phase, with their sources."""

    constant: str
    count: int
    arrivals: int
    sources: str


@dataclass(frozen=True, slots=True)
class PipesView:
    """The rings and barriers of a kernel: lines of constants, and what barriers begin with."""

    constants: tuple[str, ...]
    barriers: tuple[BarrierView, ...]


def pipes_view(pipes: Pipes) -> PipesView:
    """The view of a kernel's pipes."""
    return PipesView(
        constants=(
            "",
            "// Rings: who fills the stages -> who empties them.",
            *(line for ring in pipes.rings for line in _ring(ring)),
            *_named(pipes),
            *_warps(pipes),
            "",
        ),
        barriers=tuple(
            BarrierView(constant(each.name), each.count, each.signal.arrivals, each.signal.sources)
            for each in pipes.barriers
        ),
    )


def constant(name: str) -> str:
    """Return the name of a constant: ``k_full`` is ``kKFull``."""
    return f"k{_camel(name)}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _ring(ring: Ring) -> tuple[str, ...]:
    """Return its type, with a comment on who uses it: after it, or before it where lines are too long."""
    full, empty = (
        constant(f"{ring.name}_{side}") if signal else "kNoBarrier"
        for side, signal in (("full", ring.full), ("empty", ring.empty))
    )
    template = "OwnRing" if ring.joined else "Ring"
    kind = f"Pair<{full}, {empty}>" if ring.alternates else f"{template}<{full}, {empty}, {ring.stages}>"
    line, comment = f"using {_camel(ring.name)}Ring = {kind};", f"// {ring.writers} -> {ring.readers}"
    return (f"{line}  {comment}",) if len(line) + len(comment) <= _WIDTH else (comment, line)


def _named(pipes: Pipes) -> list[str]:
    """Return the enum of named barriers, each the first of its group."""
    if not pipes.named:
        return []
    lines = [f"  {constant(one.name)} = {one.first},  // {one.count} of them: {one.guards}" for one in pipes.named]
    return ["", "// Named barriers of the hardware; 0 is __syncthreads.", "enum class Named {", *lines, "};"]


def _warps(pipes: Pipes) -> list[str]:
    """Return the numbers of the warps that have a role alone."""
    alone = [f"{constant(role.name)} = {role.first}" for role in pipes.roles if role.warps == 1]
    return ["", f"constexpr int {', '.join(alone)};  // warps with a role of their own"] if alone else []
