"""The model of the Hopper forward for clusters of two blocks, each of which loads half of K and V for both.

A block is that of ``tests/plan/forward_protocol.py``, with a scheduler and rows of its own. What one block does in the
shared memory of the other gets there some time later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from attngen.plan import pipes
from tests.plan import declared
from tests.plan.forward_protocol import Case, Forward
from tests.plan.forward_protocol import Rules as ForwardRules
from tests.plan.simulation import WARPS, Barrier, Named, Place, ProtocolError, Ring, Role, Simulation, barriers

BLOCKS = 2


@dataclass(frozen=True)
class Rules:
    """The rules beside those of single blocks. The templates obey all of them."""

    number_until_read: bool = True  # the first block sends a number when the one before has been read
    release_to_all: bool = True  # consumers of both blocks release a stage before either block fills it
    leave_together: bool = True  # no block leaves while the other may arrive at its barriers


class Shared(Ring):
    """K or V: a stage holds a tile when the halves of both blocks have landed."""

    block: Block

    def __init__(self, declared: pipes.Ring, block: Block) -> None:
        super().__init__(declared)
        self.block = block
        for barrier in self.full:
            barrier.count += BLOCKS - 1  # bytes of the other block
        if not block.pair.rules.release_to_all:
            for barrier in self.empty:
                barrier.count //= BLOCKS
        self.halves: list[list[object]] = [[None] * BLOCKS for _ in range(self.stages)]

    def release(self, stage: int) -> None:
        self.empty[stage].arrive()
        if self.block.pair.rules.release_to_all:
            other = self.block.other
            self.block.arrive_at(other, other.ring(self.declared.name).empty[stage])


class Block(Forward):
    """One block of the pair."""

    def __init__(self, case: Case, random: Random, pair: Pair, rank: int) -> None:
        super().__init__(case, ForwardRules(), random)
        self.pair, self.rank, self.number = pair, rank, -1
        declared_pipes = declared.forward(
            case.consumers, case.q_stages, case.stages, WARPS, pingpong=case.pingpong, skips=case.skips,
            specialized=True, cluster=BLOCKS,
        )  # fmt: skip
        self.k, self.v = (Shared(declared_pipes.ring(name), self) for name in ("k", "v"))
        taken = declared_pipes.ring("taken")
        self.taken_full, self.taken_empty = barriers(taken.full, 1)[0], barriers(taken.empty, 1)[0]
        self.roles["scheduler"] = scheduler(self)
        self.inside = len(self.roles)
        self.underway = 0  # arrivals at the other block

    @property
    def other(self) -> Block:
        """The other block."""
        return self.pair.blocks[1 - self.rank]

    def ring(self, name: str) -> Shared:
        """K or V."""
        return self.k if name == "k" else self.v

    def copy(self, to: Place, what: object) -> None:
        """Issue the copy of Q, or of this block's half of K or V to both blocks."""
        stage, rank = to.stage, self.rank
        to.ring.full[stage].arrive()
        if not isinstance(to.ring, Shared):
            to.ring.holds[stage] = None

            def land() -> None:
                to.ring.holds[stage] = what
                to.ring.full[stage].arrive()

            self.pair.later(self, land)
            return
        for block in self.pair.blocks:
            ring = block.ring(to.ring.declared.name)
            ring.halves[stage][rank] = ring.holds[stage] = None
            self.pair.later(block, self._landing(ring, stage, what))

    def _landing(self, ring: Shared, stage: int, what: object) -> Callable[[], None]:
        def land() -> None:
            ring.halves[stage][self.rank] = what
            ring.holds[stage] = what if all(half == what for half in ring.halves[stage]) else None
            ring.full[stage].arrive()

        return land

    def arrive_at(self, other: Block, barrier: Barrier) -> None:
        """Arrive at a barrier of the other block, before this one says that it leaves."""
        self.underway += 1

        def arrive() -> None:
            self.underway -= 1
            barrier.arrive()

        self.pair.later(other, arrive)

    def leaving(self, role: Role) -> Role:
        """A role, after which its threads leave."""
        yield from role
        if self.pair.rules.leave_together:
            yield lambda: self.underway == 0
            yield from self.pair.leave.sync()
        self.inside -= 1


class Pair(Simulation):
    """Both blocks at work."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        self.blocks: list[Block] = []
        for rank in range(BLOCKS):
            seen = random.choice((0.2, 0.5, 0.9))
            works = tuple(
                tuple(frozenset(c for c in range(case.consumers) if random.random() < seen) for _ in work)
                for work in case.works
            )
            self.blocks.append(Block(replace(case, works=works), random, self, rank))
        self.leave = Named(sum(block.inside for block in self.blocks))
        for rank, block in enumerate(self.blocks):
            self.roles |= {f"{rank}: {name}": block.leaving(role) for name, role in block.roles.items()}

    def later(self, block: Block, act: Callable[[], None]) -> None:
        """Do something in a block at some time; it must still be there."""

        def acting() -> Role:
            yield lambda: True
            if not block.inside:
                raise ProtocolError(f"block {block.rank} has left")
            act()

        self.land(acting())


def scheduler(s: Block) -> Role:
    """``forward/_scheduler.cu.j2``: the first block takes tiles of work for both."""
    slot = phase = asked_phase = taken_phase = 0
    record: int | None = 0
    count = len(s.case.works)
    while True:
        yield s.work_empty[slot].done(phase ^ 1)
        s.records[slot] = record
        for _ in range(s.case.consumers + 1):
            s.work_full[slot].arrive()
        slot ^= 1
        phase ^= slot == 0
        if record is None:
            return
        yield s.work_asked.done(asked_phase)
        asked_phase ^= 1
        following = record + 1
        if s.rank == 0:
            if s.pair.rules.number_until_read:
                yield s.taken_empty.done(taken_phase ^ 1)
            s.pair.later(s.other, lambda number=following: _arrive_with(s.other, number))
        else:
            s.taken_full.arrive()
            yield s.taken_full.done(taken_phase)
            if s.number != following:
                raise ProtocolError(f"read {s.number} for tile of work {following}")
            s.arrive_at(s.other, s.other.taken_empty)
        taken_phase ^= 1
        record = following if following < count else None


def _arrive_with(block: Block, number: int) -> None:
    block.number = number
    block.taken_full.arrive()
