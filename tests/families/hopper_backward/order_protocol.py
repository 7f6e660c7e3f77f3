"""A model of the fixed order in which the blocks of a CUDA backward add up dQ, and of who rounds it.

Roles follow ``_gradient_loader`` with ``_gradient_visits_ordered``, ``_gradient_adder_ordered`` with ``order.cuh``, and
``_gradient_rounder``, line by line; what lies between the first two is a queue of so many steps as a block has in
flight. Additions land some time after they were issued. Blocks start when a multiprocessor is free, in any order. A
cluster, which has one tile of keys, starts as one of them (``_cluster_order``), and each of its two blocks adds to
columns of its own (``_cluster_turns``), lagging by no more than steps are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.plan.simulation import ProtocolError, Role, Simulation

NONE_BEFORE = 2**31
ALL_PASSED = 2**32 - 1
LANES = 3  # of a warp, which ask that many earlier tiles at once
IN_FLIGHT = 4  # steps that the loader is ahead of the adder
PIECES = 2  # of the sums of a unit, which are rounded at once

#: Turns of a tile of keys, ascending.
Visits = tuple[int, ...]
#: Steps in flight: the index of the tile of keys, the turn, and whether it is the last one; None is the end.
Queue = list[tuple[int, int, bool] | None]


@dataclass(frozen=True)
class Rules:
    """The rules that keep the order, and all blocks alive."""

    wait_for_turn: bool = True
    told_when_landed: bool = True  # others learn of an addition when it is in memory, not when it was read
    all_are_taken: bool = True  # the first tile of a block, too, so that all before it belong to blocks that run
    end_is_told: bool = True  # the last step of a tile of keys says that later turns need not wait for it
    empty_are_told: bool = True  # as a tile of keys does that nothing sees
    whole_chain: bool = True  # after a tile of keys that is passed over, the one before it is asked
    for_this_turn: bool = True  # a tile of keys that begins later is passed over for earlier turns alone
    near_alone: bool = True  # what is known from after a tile which begins later is not kept for later turns
    counted_when_landed: bool = True  # those who round learn of a tile of keys when its last addition is in memory
    empty_are_counted: bool = True  # and of one that nothing sees


@dataclass(frozen=True)
class Grid:
    """A launch: the turns that each tile of keys of each unit (a KV head of a sequence) goes to."""

    units: tuple[tuple[Visits, ...], ...]
    heads_in_l2: int
    blocks: int
    multiprocessors: int
    clusters: bool = False  # a tile of keys to each, whose two blocks add

    @classmethod
    def random(cls, random: Random) -> Grid:
        """Any launch: masks of bands and others, groups of heads, heads side by side, few or many blocks."""
        kv_tiles, q_tiles, group = random.randint(1, 6), random.randint(1, 6), random.randint(1, 3)
        by_head = random.random() < 0.3
        units = tuple(_unit(random, kv_tiles, q_tiles, group, by_head=by_head) for _ in range(random.randint(1, 4)))
        tiles = kv_tiles * len(units)
        clusters = random.random() < 0.5
        blocks = tiles if clusters else min(random.randint(1, 8), tiles)
        running = random.randint(1, min(blocks, 8))
        return cls(units, random.randint(1, len(units)), blocks, running, clusters)

    def place(self, index: int) -> tuple[int, int]:
        """Return unit and tile of keys of an index: ``place_tile``, from the first keys to the last."""
        kv_tiles = len(self.units[0])
        before = index // (self.heads_in_l2 * kv_tiles) * self.heads_in_l2
        width = min(self.heads_in_l2, len(self.units) - before)
        rest = index - before * kv_tiles
        return before + rest % width, rest // width

    @property
    def ranks(self) -> int:
        """Blocks that share a tile of keys."""
        return 2 if self.clusters else 1

    @property
    def tiles(self) -> int:
        """Tiles of keys of all units."""
        return len(self.units) * len(self.units[0])


def _unit(random: Random, kv_tiles: int, q_tiles: int, group: int, *, by_head: bool) -> tuple[Visits, ...]:
    """Place that each tile of keys of a KV head adds to; tiles of queries are counted from the last one."""
    kind = random.choice(("full", "causal", "window", "sink", "any", "short"))
    width = random.randint(1, 3)

    def sees(kv: int, place: int, head: int) -> bool:
        q = q_tiles - 1 - place
        return {
            "full": True, "causal": q >= kv, "window": kv <= q < kv + width, "sink": kv == 0 or kv <= q < kv + width,
            "any": Random(f"{kv} {q} {head * by_head} {width}").random() < 0.4, "short": kv < width,
        }[kind]  # fmt: skip

    seen = [[(p, h) for p in range(q_tiles) for h in range(group) if sees(kv, p, h)] for kv in range(kv_tiles)]
    return tuple(tuple(sorted(h * q_tiles + p if by_head else p * group + h for p, h in each)) for each in seen)


class Launch(Simulation):
    """All blocks of a launch."""

    def __init__(self, grid: Grid, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.grid, self.rules = grid, rules
        self.taken = 0
        self.running = 0
        self.started: set[int] = set()
        self.counters = [[0] * grid.tiles for _ in range(grid.ranks)]
        self.done = [0] * len(grid.units)  # tiles of keys whose part of dQ is added
        self.pieces = 0  # that are taken
        self.rounded: list[int] = []
        #: The tiles of keys that were added, in their order, for each half of columns, unit and turn.
        self.sums: dict[tuple[int, int, int], list[int]] = {}
        #: Steps of each block, or of each block of a cluster.
        self.queues: list[list[Queue]] = [[[] for _ in range(grid.ranks)] for _ in range(grid.blocks)]
        self.left = [grid.ranks if grid.clusters else 2] * grid.blocks  # those that add, and the one that rounds
        for block in range(grid.blocks):
            self.roles[f"loader {block}"] = loader(self, block)
            for rank in range(grid.ranks):
                adds = turns if grid.clusters else adder
                self.roles[f"adder {block}.{rank}"] = adds(self, block, rank)
            if not grid.clusters:
                self.roles[f"rounder {block}"] = rounder(self, block)

    def take(self) -> int:
        self.taken += 1
        return self.taken - 1

    def leave(self, block: int) -> None:
        """Let another block begin when all that add or round are done."""
        self.left[block] -= 1
        self.running -= self.left[block] == 0

    def wanted(self, unit: int, turn: int) -> list[int]:
        """Return the tiles of keys that a turn of a unit adds up, in their order."""
        return [kv_tile for kv_tile, visits in enumerate(self.grid.units[unit]) if turn in visits]

    def turns(self, unit: int) -> set[int]:
        """Return the turns of a unit."""
        return {turn for visits in self.grid.units[unit] for turn in visits}

    def add(self, rank: int, unit: int, turn: int, kv_tile: int) -> list[bool]:
        """Issue an addition, and return what says whether it has landed."""
        landed = [False]

        def land() -> Role:
            yield lambda: True
            self.sums.setdefault((rank, unit, turn), []).append(kv_tile)
            landed[0] = True

        self.land(land())
        return landed

    def run(self) -> None:
        """Run to the end; ProtocolError if that is not reached, or the order of a sum is another."""
        super().run()
        for unit in range(len(self.grid.units)):
            for turn in self.turns(unit):
                for rank in range(self.grid.ranks):
                    if self.sums[rank, unit, turn] != self.wanted(unit, turn):
                        raise ProtocolError(f"added {self.sums[rank, unit, turn]} for {self.wanted(unit, turn)}")
        pieces = 0 if self.grid.clusters else PIECES * len(self.grid.units)
        if sorted(self.rounded) != list(range(pieces)):
            raise ProtocolError(f"rounded {self.rounded}")


def loader(s: Launch, block: int) -> Role:
    """``backward/_loader.cu.j2`` of a block, or ``cluster/_loader.cu.j2`` of both of a cluster, from its start."""
    grid, rules, queues = s.grid, s.rules, s.queues[block]
    counters = s.counters[0]
    yield lambda: s.running < grid.multiprocessors
    s.running += 1
    s.started.add(block)
    if not rules.all_are_taken:
        s.taken = max(s.taken, grid.blocks)
    index = s.take() if rules.all_are_taken else block
    while index < grid.tiles:
        unit, kv_tile = grid.place(index)
        visits = grid.units[unit][kv_tile]
        for turn in visits:
            yield lambda: all(len(queue) < IN_FLIGHT for queue in queues)
            if turn == visits[0] and not grid.clusters:
                counters[_counter(grid, index)] = NONE_BEFORE | turn
            for queue in queues:
                queue.append((index, turn, turn == visits[-1]))
        if not visits and rules.empty_are_told:
            for of_rank in s.counters:
                of_rank[_counter(grid, index)] = ALL_PASSED
        s.done[unit] += not visits and rules.empty_are_counted
        yield lambda: True
        if grid.clusters:
            break
        index = s.take()
    for queue in queues:
        queue.append(None)


def adder(s: Launch, block: int, rank: int) -> Role:
    """``backward/_adder_ordered.cu.j2`` of a block."""
    grid, rules, queue, counters = s.grid, s.rules, s.queues[block][rank], s.counters[rank]
    own, told, known = -1, 0, Earlier(0)
    while True:
        yield lambda: bool(queue)
        step = queue.pop(0)
        if step is None:
            s.leave(block)
            return
        index, turn, last = step
        unit, kv_tile = grid.place(index)
        counter = _counter(grid, index)
        if counter != own:
            own, told, known = counter, 0, Earlier(kv_tile)
        yield from await_turn(s, counters, counter - kv_tile, known, turn)
        if told < turn:
            counters[counter] = turn
        yield lambda: True
        landed = s.add(rank, unit, turn, kv_tile)
        if not rules.counted_when_landed:
            s.done[unit] += last
        if rules.told_when_landed:
            yield lambda landed=landed: landed[0]  # type: ignore[misc]
        counters[counter] = ALL_PASSED if last and rules.end_is_told else turn + 1
        if rules.counted_when_landed:
            yield lambda landed=landed: landed[0]  # type: ignore[misc]
            s.done[unit] += last
        told = turn + 1


def rounder(s: Launch, block: int) -> Role:
    """``backward/_rounder.cu.j2`` of a block: it holds a piece while it waits for the next one."""
    yield lambda: block in s.started
    arriving: int | None = None
    while True:
        piece, s.pieces = s.pieces, s.pieces + 1
        unit = piece // PIECES
        more = unit < len(s.grid.units)
        if more:
            yield lambda unit=unit: s.done[unit] >= len(s.grid.units[unit])  # type: ignore[misc]
            for turn in s.turns(unit):
                if sorted(s.sums.get((0, unit, turn), [])) != s.wanted(unit, turn):
                    raise ProtocolError(f"rounded {s.sums.get((0, unit, turn))} for {s.wanted(unit, turn)}")
        if arriving is not None:
            yield lambda: True
            s.rounded.append(arriving)
        if not more:
            s.leave(block)
            return
        arriving = piece


def turns(s: Launch, block: int, rank: int) -> Role:
    """``cluster/_turns.cu.j2`` of a block of a cluster, and the warpgroup that adds."""
    grid, rules, queue, counters = s.grid, s.rules, s.queues[block][rank], s.counters[rank]
    counter, told, known = -1, 0, Earlier(0)
    while True:
        yield lambda: bool(queue)
        step = queue.pop(0)
        if step is None:
            break
        index, turn, _ = step
        unit, kv_tile = grid.place(index)
        if told == 0:
            counter, known = _counter(grid, index), Earlier(kv_tile)
            counters[counter] = NONE_BEFORE | turn
        yield from await_turn(s, counters, counter - kv_tile, known, turn)
        if told < turn:
            counters[counter] = turn
        yield lambda: True
        landed = s.add(rank, unit, turn, kv_tile)
        if rules.told_when_landed:
            yield lambda landed=landed: landed[0]  # type: ignore[misc]
        told = counters[counter] = turn + 1
    yield lambda: True
    if counter >= 0 and rules.end_is_told:
        counters[counter] = ALL_PASSED
    s.leave(block)


@dataclass
class Earlier:
    """A warp's knowledge of the tiles of keys before its own."""

    count: int
    passed: int = 0


def await_turn(s: Launch, counters: list[int], first: int, known: Earlier, turn: int) -> Role:
    """``await_turn`` of ``order.cuh``; the counters of the earlier tiles begin with the ``first``."""
    rules, at = s.rules, known.count
    while rules.wait_for_turn and at > 0 and known.passed <= turn:
        tiles = [first + at - 1 - lane for lane in range(min(at, LANES))]
        values = [counters[tile] for tile in tiles]
        own_alone = [bool(value & NONE_BEFORE) for value in values]
        asked = [not a or value - NONE_BEFORE <= turn for a, value in zip(own_alone, values, strict=True)]
        left = [value != ALL_PASSED if rules.for_this_turn else ask for value, ask in zip(values, asked, strict=True)]
        if at == known.count:
            known.count -= _before(left)
        at -= _before(asked)
        if not rules.whole_chain and not asked[0]:
            break
        if any(asked):
            nearest = _before(asked)
            if not own_alone[nearest] and values[nearest] > turn:
                if at == known.count or not rules.near_alone:
                    known.passed = values[nearest]
                break
            watched, seen = tiles[nearest], values[nearest]
            yield lambda watched=watched, seen=seen: counters[watched] != seen  # type: ignore[misc]
        else:
            yield lambda: True


def _before(lanes: list[bool]) -> int:
    """``lanes_before``, of so many lanes as ask."""
    return lanes.index(True) if True in lanes else len(lanes)


def _counter(grid: Grid, index: int) -> int:
    unit, kv_tile = grid.place(index)
    return unit * len(grid.units[0]) + kv_tile
