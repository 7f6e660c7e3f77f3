"""Models of the barriers of latent attention: loaders and consumers of a block, and blocks that merge partial results.

Roles follow ``mla/_loader.cu.j2``, ``_consumer.cu.j2``, ``_few_heads_consumer.cu.j2`` and ``_merged.cu.j2``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

from attngen.families.latent.pipes import CONSUMERS, HALF_BOXES, TILES, mla_pipes
from attngen.plan.pipes import WARPGROUP, Pipes
from tests.plan.simulation import WARPS, ProtocolError, Ring, Role, Simulation, all_landed, named

PIPES = mla_pipes(qk=576, v=512, element=2, registers=(56, 224), merges=True)


@dataclass(frozen=True)
class Rules:
    """The rules that keep tiles, P and partial results whole."""

    released_after_values: bool = True  # a stage stays until its last product is complete
    wait_for_p: bool = True  # P of the other consumer is multiplied when it is published
    meet_after_sums: bool = True  # what consumers exchange at the end of a part is read before Q of the next one comes
    stored_before_counted: bool = True  # all threads have stored a partial result when it is counted
    last_does_the_rest: bool = True  # who leaves last merges what others have left
    reset_by_last: bool = True  # counters are 0 for the next launch


@dataclass(frozen=True)
class Case:
    """Parts of a block's range, as numbers of tiles, and how it multiplies them."""

    parts: tuple[int, ...]
    few: bool = False

    @staticmethod
    def random(random: Random) -> Case:
        return Case(tuple(random.randint(0, 5) for _ in range(random.randint(1, 3))), random.random() < 0.4)


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
    rounds: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values, self.more = Ring(self.pipes.ring("values")), Ring(self.pipes.ring("more"))
        self.meeting = named(self.pipes, "consumers")[0]
        self.published = named(self.pipes, "published")
        self.scored = named(self.pipes, "scored")[0]


class Latent(Simulation):
    """A block and its range of the list."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.case, self.rules = case, rules
        self.block = Block(PIPES)
        consume = few_consumer if case.few else consumer
        for c in range(CONSUMERS):
            for half in range(CONSUMERS):
                self.roles[f"loader {half}.{c}"] = loader(self, half, c)
            for warp in range(WARPS):
                self.roles[f"consumer {c}.{warp}"] = consume(self, self.block, c)

    def release(self, ring: str, stages: list[int]) -> None:
        """WARPGROUP / WARPS warps at a time."""
        for stage in stages:
            for _ in range(WARPGROUP // WARPS):
                getattr(self.block, ring).empty[stage].arrive()


def loader(s: Latent, half: int, consumer: int) -> Role:
    """``mla/_loader.cu.j2``: of half of the values of every other tile."""
    rounds = 0
    block = s.block
    for part, tiles in enumerate(s.case.parts):
        for number in range(consumer, tiles, TILES):
            phase, rounds = rounds & 1, rounds + 1
            loads = [("more", [consumer])] if half != consumer else []
            for ring, stages in (*loads, ("values", [box_of(half, consumer, box) for box in range(HALF_BOXES)])):
                for stage in stages:
                    yield getattr(block, ring).empty[stage].done(phase ^ 1)
                for stage in stages:
                    copy(s, getattr(block, ring), stage, (part, number))
                yield lambda: True  # copies may land before their bytes are announced
                for stage in stages:
                    getattr(block, ring).full[stage].arrive()


def copy(s: Latent, ring: Ring, stage: int, tile: object) -> None:
    """Copies a box, which lands later."""
    ring.holds[stage] = None

    def land() -> None:
        ring.holds[stage] = tile
        ring.full[stage].arrive()

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


def scores(s: Latent, block: Block, part: int, number: int, half: int, phase: int) -> Role:
    """S = Q K^T of a tile."""
    yield block.more.full[half].done(phase)
    boxes = [box_of(of, half, box) for of in range(CONSUMERS) for box in range(HALF_BOXES)]
    for stage in boxes:
        yield block.values.full[stage].done(phase)
    if block.q != part:
        raise ProtocolError(f"read Q of {block.q} where {part} should be")
    yield from reads(block, "more", [half], (part, number))
    yield from reads(block, "values", boxes, (part, number))
    s.release("more", [half])


def half_of(half: int, stage: int) -> list[int]:
    return [box_of(half, stage, box) for box in range(HALF_BOXES)]


def consumer(s: Latent, block: Block, half: int) -> Role:
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
            if half == 1:
                yield from block.scored.sync()
            yield from scores(s, block, part, step, half, phase)
            if half == 0 and step + 1 < tiles:
                block.scored.arrive()
            if half == 1:
                yield from other(part, step - 1)
            block.p[half] = (part, step)
            block.published[half].arrive()
            if half == 1:
                s.release("values", half_of(half, 0))
            if not s.rules.released_after_values:
                s.release("values", half_of(half, half))
            yield from reads(block, "values", half_of(half, half), (part, step))
            if s.rules.released_after_values:
                s.release("values", half_of(half, half))
            if half == 0 and step + 1 < tiles:
                yield from other(part, step + 1)
                s.release("values", half_of(half, 1))
        if half == 1 and tiles % CONSUMERS == 1:
            yield from other(part, tiles - 1)
            s.release("values", half_of(half, 0))
        yield from block.meeting.sync()


def few_consumer(s: Latent, block: Block, half: int) -> Role:
    """``mla/_few_heads_consumer.cu.j2``."""
    rounds = 0
    for part, tiles in enumerate(s.case.parts):
        if s.rules.meet_after_sums:
            yield from block.meeting.sync()
        block.q = part
        yield from block.meeting.sync()
        for step in range(half, tiles, CONSUMERS):
            phase, rounds = rounds & 1, rounds + 1
            yield from scores(s, block, part, step, half, phase)
            boxes = [*half_of(0, half), *half_of(1, half)]
            if not s.rules.released_after_values:
                s.release("values", boxes)
            yield from reads(block, "values", boxes, (part, step))
            if s.rules.released_after_values:
                s.release("values", boxes)
        yield from block.meeting.sync()
        block.q = exchanged = ("exchanged", part)  # O of both consumers, in the place of Q
        yield from block.meeting.sync()
        if block.q != exchanged:
            raise ProtocolError(f"read {block.q} where {exchanged} should be")


class Merging(Simulation):
    """Blocks that have parts of work items, of which some start only when others have ended."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        lengths = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
        # A list of chunks, cut into ranges of two: each block has parts of up to two items.
        chunks = [item for item, length in enumerate(lengths) for _ in range(length)]
        ranges = [chunks[i : i + 2] for i in range(0, len(chunks), 2)]
        self.holders = {item: [b for b, own in enumerate(ranges) if item in own] for item in range(len(lengths))}
        self.there = dict.fromkeys(self.holders, 0)
        self.left = dict.fromkeys(self.holders, 0)
        self.gave_up = dict.fromkeys(self.holders, 0)
        self.stored: dict[int, set[int]] = {item: set() for item in self.holders}
        self.merged: dict[int, set[int]] = {item: set() for item in self.holders}
        self.ended = 0
        resident = random.randint(1, len(ranges))
        for b, own in enumerate(ranges):
            self.roles[f"block {b}"] = merging_block(self, b, sorted(set(own)), max(b + 1 - resident, 0))

    def run(self) -> None:
        super().run()
        for item, holders in self.holders.items():
            if len(holders) > 1 and self.merged[item] != set(range(len(holders))):
                raise ProtocolError(f"merged {self.merged[item]} of {len(holders)} shares")
            if self.there[item] or self.left[item] or self.gave_up[item]:
                raise ProtocolError("counters are not 0")


def merging_block(s: Merging, b: int, items: list[int], after: int) -> Role:
    """A block that starts when so many others have ended: ``_last_part.cu.j2``, then ``_merged.cu.j2``."""
    yield lambda: s.ended >= after
    shared = [item for item in items if len(s.holders[item]) > 1]
    for item in shared:
        store = s.issue(partial(s.stored[item].add, b))
        if s.rules.stored_before_counted:
            yield all_landed([store])
        s.there[item] += 1
        yield lambda: True
    for item in shared:
        holders = s.holders[item]
        patience = s.random.randint(0, 20)
        while s.there[item] < len(holders) and patience:
            patience -= 1
            yield lambda: True
        there = s.there[item] == len(holders)
        if there:
            yield from merge(s, item, [holders.index(b)])
        yield lambda: True
        s.left[item] += 1
        s.gave_up[item] += not there
        if s.left[item] == len(holders):
            rest = s.gave_up[item] > 0
            if s.rules.reset_by_last:
                s.there[item] = s.left[item] = s.gave_up[item] = 0
            if rest and s.rules.last_does_the_rest:
                yield from merge(s, item, list(range(len(holders))))
    s.ended += 1


def merge(s: Merging, item: int, shares: list[int]) -> Role:
    if s.stored[item] != set(s.holders[item]):
        raise ProtocolError(f"read partial results of {s.stored[item]}")
    yield lambda: True
    s.merged[item].update(shares)
