"""A model of the barriers of latent attention: loaders and consumers of a block, or of the two blocks of a cluster,
which copy keys for each other. Roles follow ``mla/_loader.cu.j2`` and ``mla/_consumer.cu.j2``, line by line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from attngen.plan.pipes import WARPGROUP, Pipes
from attngen.plan.schedules.mla_pipes import CONSUMERS, HALF_BOXES, TILES, mla_pipes
from tests.plan.simulation import WARPS, ProtocolError, Ring, Role, Simulation, named

PIPES = mla_pipes(qk=576, v=512, element=2, registers=(56, 224))


@dataclass(frozen=True)
class Rules:
    """The rules that keep tiles, P and Q whole."""

    both_release: bool = True  # each block of a cluster says to both that it has multiplied a tile
    released_after_values: bool = True  # a stage stays until its last product is complete
    wait_for_p: bool = True  # P of the other consumer is multiplied when it is published
    meet_after_sums: bool = True  # both consumers have multiplied Q when the next part's is stored
    copies_wait: bool = True  # a stage is filled again when all have released it


@dataclass(frozen=True)
class Case:
    """Parts of a cluster's range, as numbers of tiles, and its blocks."""

    parts: tuple[int, ...]
    blocks: int = 1

    @staticmethod
    def random(random: Random) -> Case:
        parts = tuple(random.randint(0, 5) for _ in range(random.randint(1, 3)))
        return Case(parts, random.randint(1, 2))


def box_of(half: int, stage: int, box: int) -> int:
    return (2 * half + stage) * HALF_BOXES + box


@dataclass
class Block:
    """Shared memory of a block; contents are tiles, each named by its operand and number."""

    pipes: Pipes
    values: Ring = field(init=False)
    more: Ring = field(init=False)
    q: object = None
    p: list[object] = field(default_factory=lambda: [None] * CONSUMERS)

    def __post_init__(self) -> None:
        self.values, self.more = Ring(self.pipes.ring("values")), Ring(self.pipes.ring("more"))
        self.meeting = named(self.pipes, "consumers")[0]
        self.published = named(self.pipes, "published")


class Latent(Simulation):
    """A cluster and its range of the list."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.case, self.rules = case, rules
        self.blocks = [Block(PIPES) for _ in range(case.blocks)]
        for rank, block in enumerate(self.blocks):
            for c in range(CONSUMERS):
                for half in range(CONSUMERS):
                    self.roles[f"loader {rank}.{half}.{c}"] = loader(self, rank, half, c)
                for warp in range(WARPS):
                    self.roles[f"consumer {rank}.{c}.{warp}"] = consumer(self, block, rank, c)

    def release(self, ring: str, stages: list[int], rank: int) -> None:
        """``release_stages``: WARPGROUP / WARPS warps at a time, to both blocks or twice to their own."""
        others = range(len(self.blocks)) if self.rules.both_release else (rank,)
        for stage in stages:
            for other in others:
                barrier = getattr(self.blocks[other], ring).empty[stage]
                for _ in range(2 * WARPGROUP // WARPS // len(others)):
                    barrier.arrive()


def loader(s: Latent, rank: int, half: int, consumer: int) -> Role:
    """``mla/_loader.cu.j2``: of half of the values of every other tile."""
    rounds = 0
    block = s.blocks[rank]
    for part, tiles in enumerate(s.case.parts):
        for number in range(consumer, tiles, TILES):
            phase, rounds = rounds & 1, rounds + 1
            loads = [("more", [consumer])] if half != consumer else []
            for ring, stages in (*loads, ("values", [box_of(half, consumer, box) for box in range(HALF_BOXES)])):
                for stage in stages:
                    if s.rules.copies_wait:
                        yield getattr(block, ring).empty[stage].done(phase ^ 1)
                    getattr(block, ring).full[stage].arrive()
                for i, stage in enumerate(stages):
                    if len(s.blocks) == 1 or (i if len(stages) > 1 else consumer) % 2 == rank:
                        copy(s, s.blocks, ring, stage, (part, number))


def copy(s: Latent, to: list[Block], ring: str, stage: int, tile: object) -> None:
    """Copies a box to blocks, where it lands at different times."""
    for block in to:
        of = getattr(block, ring)
        of.holds[stage] = None

        def land(of: Ring = of) -> None:
            of.holds[stage] = tile
            of.full[stage].arrive()

        s.issue(land)


def reads(block: Block, ring: str, stages: list[int], tile: object) -> Role:
    """A product that reads boxes for some time."""
    for _ in range(2):
        for stage in stages:
            if getattr(block, ring).holds[stage] != tile:
                raise ProtocolError(f"read {getattr(block, ring).holds[stage]} where {tile} should be")
        yield lambda: True


def reads_p(block: Block, of: int, tile: object) -> Role:
    for _ in range(2):
        if block.p[of] != tile:
            raise ProtocolError(f"read P of {block.p[of]} where {tile} should be")
        yield lambda: True


def scores(s: Latent, block: Block, part: int, number: int, half: int, phase: int, rank: int) -> Role:
    """S = Q K^T of a tile."""
    yield block.more.full[half].done(phase)
    boxes = [box_of(of, half, box) for of in range(CONSUMERS) for box in range(HALF_BOXES)]
    for stage in boxes:
        yield block.values.full[stage].done(phase)
    if block.q != part:
        raise ProtocolError(f"read Q of {block.q} where {part} should be")
    yield from reads(block, "more", [half], (part, number))
    yield from reads(block, "values", boxes, (part, number))
    s.release("more", [half], rank)


def half_of(half: int, stage: int) -> list[int]:
    return [box_of(half, stage, box) for box in range(HALF_BOXES)]


def consumer(s: Latent, block: Block, rank: int, half: int) -> Role:
    """``mla/_consumer.cu.j2``."""
    rounds = 0

    def other(part: int, number: int) -> Role:
        """Multiplies the other consumer's tile."""
        if s.rules.wait_for_p:
            yield from block.published[1 - half].sync()
        yield from reads_p(block, 1 - half, (part, number))
        yield from reads(block, "values", half_of(half, 1 - half), (part, number))

    for part, tiles in enumerate(s.case.parts):
        block.q = part
        yield from block.meeting.sync()
        for step in range(half, tiles, CONSUMERS):
            phase, rounds = rounds & 1, rounds + 1
            yield from scores(s, block, part, step, half, phase, rank)
            if half == 1:
                yield from other(part, step - 1)
            block.p[half] = (part, step)
            block.published[half].arrive()
            if half == 1:
                s.release("values", half_of(half, 0), rank)
            if not s.rules.released_after_values:
                s.release("values", half_of(half, half), rank)
            yield from reads(block, "values", half_of(half, half), (part, step))
            if s.rules.released_after_values:
                s.release("values", half_of(half, half), rank)
            if half == 0 and step + 1 < tiles:
                yield from other(part, step + 1)
                s.release("values", half_of(half, 1), rank)
        if half == 1 and tiles % CONSUMERS == 1:
            yield from other(part, tiles - 1)
            s.release("values", half_of(half, 0), rank)
        if s.rules.meet_after_sums:
            yield from block.meeting.sync()
