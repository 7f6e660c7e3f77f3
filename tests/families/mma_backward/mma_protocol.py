"""A model of how the warps of a backward by mma.sync hand each other Q, dO, P and dS. Warps follow
``mma_backward/_loop.cu.j2`` line by line; what a warp copies lands some time after it was issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.plan.simulation import Condition, Named, ProtocolError, Role, Simulation, all_landed


@dataclass(frozen=True)
class Rules:
    """The waits that keep what is read whole."""

    landed: bool = True  # a step begins when the warp's own copies for it have landed,
    begun: bool = True  # and all warps have come so far
    shared: bool = True  # P and dS of other warps are read when all warps have written them
    read: bool = True  # a single stage is filled again when all warps have read it
    added: bool = True  # where the order of dQ is fixed, others learn of the last step when all warps have added theirs


class Block(Simulation):
    """The warps of a block, and its shared memory: the step whose values each part of a region holds."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        self.warps, self.stages, self.steps = random.randint(2, 4), random.randint(1, 3), random.randint(1, 7)
        self.rows: list[list[int | None]] = [[None] * self.warps for _ in range(self.stages)]  # Q, dO, LSE and D
        self.pairs: list[int | None] = [None] * self.warps  # P and dS
        self.values: list[list[int | None]] = [[None] * self.warps for _ in range(2)]  # of queries, read by the mask
        self.added = [-1] * self.warps  # the last step whose dQ a warp has added
        self.barrier = Named(self.warps)
        self.roles = {f"warp {warp}": warp_of(self, warp) for warp in range(self.warps)}

    def sync(self, needed: bool) -> Iterator[Condition]:
        """``__syncthreads``."""
        if needed:
            yield from self.barrier.sync()

    def copy_step(self, step: int, warp: int) -> list[bool]:
        """Issue the copies of a warp for a step."""
        part = self.rows[step % self.stages]
        part[warp] = None

        def land() -> None:
            part[warp] = step

        return self.issue(land)

    def read_rows(self, step: int) -> None:
        held = self.rows[step % self.stages]
        if held != [step] * self.warps:
            raise ProtocolError(f"Q or dO of {held} was read in step {step}")

    def read_pairs(self, step: int) -> None:
        if self.pairs != [step] * self.warps:
            raise ProtocolError(f"P or dS of {self.pairs} was read in step {step}")

    def read_values(self, step: int) -> None:
        if self.values[step % 2] != [step] * self.warps:
            raise ProtocolError(f"values of queries of {self.values[step % 2]} were read in step {step}")

    def publish(self, step: int) -> None:
        """Say that dQ of a step is in memory."""
        if min(self.added) < step:
            raise ProtocolError(f"dQ of step {step} was published when warps had added that of {self.added}")


def warp_of(s: Block, warp: int) -> Role:
    """``mma_backward/_loop.cu.j2``."""
    rules, now = s.rules, lambda: True
    ahead = max(s.stages - 1, 1)  # steps whose copies are issued before they begin
    copies = {step: s.copy_step(step, warp) for step in range(ahead)}
    s.values[0][warp] = 0
    for step in range(s.steps):
        if rules.landed:
            yield all_landed([copies[step]])
        yield from s.sync(rules.begun)
        if warp == 0:
            s.publish(step - 1)
        s.read_rows(step)  # S
        if s.stages > 1:
            copies[step + ahead] = s.copy_step(step + ahead, warp)
        yield now
        s.read_values(step)
        yield now
        s.read_rows(step)  # dP, dV of the own queries
        s.pairs[warp] = step
        yield now
        yield from s.sync(rules.shared)
        s.read_pairs(step)  # dK, and dV of other queries
        s.read_rows(step)
        yield now
        if s.stages == 1:
            s.read_rows(step)
            yield from s.sync(rules.read)
            copies[step + 1] = s.copy_step(step + 1, warp)
        yield now
        s.read_pairs(step)  # dQ
        s.added[warp] = step
        s.values[(step + 1) % 2][warp] = step + 1
    yield from s.sync(rules.added)
    if warp == 0:
        s.publish(s.steps - 1)
