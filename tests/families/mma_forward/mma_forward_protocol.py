"""A model of what the warps of a forward by mma.sync hand each other: tiles of K and V in a ring, Q in its last stage,
values of keys, and P and factors of rows in pairs of warps. Warps follow ``mma/_loads.cu.j2``, ``mma/_loop.cu.j2`` and
``mma/_epilogue.cu.j2`` line by line; what a warp copies lands some time after it was issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.plan.simulation import Condition, Named, ProtocolError, Role, Simulation, all_landed


@dataclass(frozen=True)
class Rules:
    """The waits that keep what is read whole."""

    landed: bool = True  # a half-step begins when the warp's own copies for it have landed,
    before_k: bool = True  # and all warps have come so far: before S,
    before_v: bool = True  # and before O += P V
    q_read: bool = True  # the stage in which Q lies is filled when all warps have read it
    factors_read: bool = True  # factors of the last step are overwritten when all have read them


class Block(Simulation):
    """The warps of a block, and its shared memory: whose values each part of a region holds."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        self.warps, self.stages, self.steps = 2 * random.randint(1, 2), random.randint(2, 6), random.randint(1, 7)
        self.ring: list[list[object]] = [[None] * self.warps for _ in range(self.stages)]
        self.slots: list[list[object]] = [[None] * self.warps for _ in range(self.stages // 2 + 1)]  # values of keys
        self.p: list[object] = [None] * self.warps
        self.factors: list[object] = [None] * self.warps
        self.barrier = Named(self.warps)
        self.roles = {f"warp {warp}": warp_of(self, warp) for warp in range(self.warps)}

    def sync(self, needed: bool) -> Iterator[Condition]:
        """``__syncthreads``."""
        if needed:
            yield from self.barrier.sync()

    def copy(self, stage: int, what: object, warp: int) -> list[bool]:
        """Issue the copies of a warp for a tile."""
        self.ring[stage][warp] = None

        def land() -> None:
            self.ring[stage][warp] = what

        return self.issue(land)

    def expect(self, held: list[object], what: object) -> None:
        if held != [what] * len(held):
            raise ProtocolError(f"{held} was read where {what} should be")


def warp_of(s: Block, warp: int) -> Role:
    """Half-step 2 i takes K of tile i, half-step 2 i + 1 its V."""
    rules, now, other, ahead = s.rules, lambda: True, warp ^ 1, s.stages // 2
    copies = {half: s.copy(half % s.stages, half, warp) for half in range(s.stages - 1)}
    q = s.copy(s.stages - 1, "Q", warp)
    for tile in range(ahead):
        s.slots[tile][warp] = tile

    def wait(half: int, needed: bool) -> Iterator[Condition]:
        if rules.landed:
            yield all_landed([copies[half], *([q] if half == 0 else [])])
        yield from s.sync(needed)

    def refill(half: int) -> None:
        copies[half + s.stages - 1] = s.copy((half + s.stages - 1) % s.stages, half + s.stages - 1, warp)

    for step in range(s.steps):
        yield from wait(2 * step, rules.before_k)
        if step == 0:
            s.expect(s.ring[s.stages - 1], "Q")
            yield now
            yield from s.sync(rules.q_read)
        refill(2 * step)
        yield now
        s.expect(s.ring[2 * step % s.stages], 2 * step)  # S
        s.expect(s.slots[step % len(s.slots)], step)  # the mask
        yield now
        s.p[warp] = s.factors[warp] = step
        s.slots[(step + ahead) % len(s.slots)][warp] = step + ahead
        yield now
        yield from wait(2 * step + 1, rules.before_v)
        refill(2 * step + 1)
        yield now
        s.expect([s.factors[other], s.p[other]], step)
        s.expect(s.ring[(2 * step + 1) % s.stages], 2 * step + 1)  # O += P V
        yield now
    yield from s.sync(rules.factors_read)
    s.factors[warp] = "normalization"
    yield from s.sync(True)
    s.expect([s.factors[other]], "normalization")
