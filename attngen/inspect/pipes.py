"""The pipes of a kernel in words and numbers: its rings, and the barriers between its warps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from attngen.plan.pipes import Pipes, Ring


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """Barriers in shared memory (``count`` of them) or, if ``named``, named barriers of the hardware."""

    name: str
    count: int
    arrivals: int  # threads or warps that arrive in each phase; threads of a named barrier
    named: bool
    guards: str


def barriers(pipes: Pipes) -> Iterator[BarrierRow]:
    """Yield the barriers as the kernel declares them."""
    for barrier in pipes.barriers:
        signal = barrier.signal
        says = f"{signal.says} ({signal.sources})"
        yield BarrierRow(barrier.name, barrier.count, signal.arrivals, named=False, guards=says)
    for one in pipes.named:
        yield BarrierRow(one.name, one.count, one.threads, named=True, guards=one.guards)


def pipes_dict(pipes: Pipes) -> dict[str, Any]:
    """Their entries in the document of ``attngen explain --json``; ``registers`` are those of a thread of each role."""
    return {
        "rings": [_ring_dict(ring) for ring in pipes.rings],
        "barriers": [asdict(barrier) for barrier in barriers(pipes)],
        "roles": [asdict(role) for role in pipes.roles],
    }


def ring_lines(pipes: Pipes) -> list[str]:
    """A line for each ring: stages, bytes of a stage, its producer and its consumers, and the data that it guards."""
    width = max(len(ring.name) for ring in pipes.rings)
    return [
        f"{ring.name:{width}s} {ring.stages} x {_stage_bytes(ring):6d} B  "
        f"{ring.writers} -> {ring.readers}: {ring.guards}"
        for ring in pipes.rings
    ]


def barrier_lines(pipes: Pipes) -> list[str]:
    """A line for each barrier: its name, count, arrivals, and the data that it guards."""
    declared = list(barriers(pipes))
    width = max(len(barrier.name) for barrier in declared)
    return [_line(barrier, width) for barrier in declared]


def _line(barrier: BarrierRow, width: int) -> str:
    who = f"{barrier.arrivals} {'threads' if barrier.named else 'arrivals' if barrier.arrivals > 1 else 'arrival'}"
    return f"{barrier.name:{width}s} {barrier.count} x {who:11s}  {barrier.guards}" + (
        " (named)" if barrier.named else ""
    )


def _ring_dict(ring: Ring) -> dict[str, Any]:
    return {
        "name": ring.name,
        "stages": ring.stages,
        "bytes": _stage_bytes(ring),
        "writers": ring.writers,
        "readers": ring.readers,
        "guards": ring.guards,
    }


def _stage_bytes(ring: Ring) -> int:
    return sum(size for _, size in ring.stored)
