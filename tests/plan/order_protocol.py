"""A model of the fixed order in which the blocks of a CUDA backward add up dQ, and of who rounds it, as
``backward_protocol`` has one of a block's barriers.

Roles follow ``_gradient_loader`` with ``_gradient_visits_ordered``, ``_gradient_adder_ordered`` with ``order.cuh``, and
``_gradient_rounder``, line by line; what lies between the first two is a queue of so many steps as a block has in
flight. Additions land some time after they were issued. Blocks start when a multiprocessor is free, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.plan.protocol import ProtocolError, Role, Simulation

NONE_BEFORE = 2**31
ALL_PASSED = 2**32 - 1
LANES = 3  # of a warp, which ask that many earlier tiles at once
IN_FLIGHT = 4  # steps that the loader is ahead of the adder
PIECES = 2  # of the sums of a unit, which are rounded at once
ROLES = 3  # of a block

#: What a tile of keys goes to: turns, ascending.
Visits = tuple[int, ...]


@dataclass(frozen=True)
class Rules:
    """The rules that keep the order, and all blocks alive."""

    wait_for_turn: bool = True
    told_when_landed: bool = True  # others learn of an addition when it is in memory, not when it was read
    all_are_taken: bool = True  # the first tile of a block, too, so that all before it belong to blocks that run
    end_is_told: bool = True  # the last step of a tile of keys says that later turns need not wait for it
    empty_are_told: bool = True  # as a tile of keys does that nothing sees
    whole_chain: bool = True  # behind a tile of keys that is passed over, the one before it is asked
    for_this_turn: bool = True  # a tile of keys that begins later is passed over for earlier turns alone
    near_alone: bool = True  # what one knows that stands behind a tile which begins later is not kept for later turns
    counted_when_landed: bool = True  # those who round learn of a tile of keys when its last addition is in memory
    empty_are_counted: bool = True  # and of one that nothing sees


@dataclass(frozen=True)
class Grid:
    """A launch: the turns that each tile of keys of each unit (a KV head of a sequence) goes to."""

    units: tuple[tuple[Visits, ...], ...]
    section: int
    blocks: int
    multiprocessors: int

    @classmethod
    def random(cls, random: Random) -> Grid:
        """Return any launch: masks of bands and others, groups of heads, sections, few or many blocks."""
        kv_tiles, q_tiles, group = random.randint(1, 6), random.randint(1, 6), random.randint(1, 3)
        by_head = random.random() < 0.3
        units = tuple(_unit(random, kv_tiles, q_tiles, group, by_head=by_head) for _ in range(random.randint(1, 4)))
        tiles = kv_tiles * len(units)
        blocks = min(random.randint(1, 8), tiles)
        return cls(units, random.randint(1, len(units)), blocks, random.randint(1, blocks))

    def place(self, index: int) -> tuple[int, int]:
        """Return unit and tile of keys of an index: ``place_tile``, from the first keys to the last."""
        kv_tiles = len(self.units[0])
        before = index // (self.section * kv_tiles) * self.section
        width = min(self.section, len(self.units) - before)
        rest = index - before * kv_tiles
        return before + rest % width, rest // width

    @property
    def tiles(self) -> int:
        """Tiles of keys of all units."""
        return len(self.units) * len(self.units[0])


def _unit(random: Random, kv_tiles: int, q_tiles: int, group: int, *, by_head: bool) -> tuple[Visits, ...]:
    """Return what each tile of keys of a KV head goes to; tiles of queries are counted from the last one."""
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
        self.grid, self.order_rules, self.random = grid, rules, random
        self.taken = 0
        self.running = 0
        self.started: set[int] = set()
        self.ended = [0] * grid.blocks
        self.counters = [0] * grid.tiles
        self.done = [0] * len(grid.units)  # tiles of keys whose part of dQ is added
        self.pieces = 0  # that are taken
        self.rounded: list[int] = []
        #: The tiles of keys that were added, in their order, for each unit and turn.
        self.sums: dict[tuple[int, int], list[int]] = {}
        self.queues: list[list[tuple[int, int, bool] | None]] = [[] for _ in range(grid.blocks)]
        self.roles = {}
        for block in range(grid.blocks):
            self.roles |= {f"loader {block}": loader(self, block), f"adder {block}": adder(self, block)}
            self.roles[f"rounder {block}"] = rounder(self, block)

    def take(self) -> int:
        self.taken += 1
        return self.taken - 1

    def end(self, block: int) -> None:
        """End a role of a block, which ends with its last one."""
        self.ended[block] += 1
        self.running -= self.ended[block] == ROLES

    def wanted(self, unit: int, turn: int) -> list[int]:
        """Return the tiles of keys that a turn of a unit adds up, in their order."""
        return [kv_tile for kv_tile, visits in enumerate(self.grid.units[unit]) if turn in visits]

    def turns(self, unit: int) -> set[int]:
        """Return the turns of a unit."""
        return {turn for visits in self.grid.units[unit] for turn in visits}

    def add(self, unit: int, turn: int, kv_tile: int) -> list[bool]:
        """Issue an addition, and return what says whether it has landed."""
        landed = [False]

        def land() -> Role:
            yield lambda: True
            self.sums.setdefault((unit, turn), []).append(kv_tile)
            landed[0] = True

        self.copies += 1
        name = f"addition {self.copies}"
        self.roles[name] = land()
        self.waiting[name] = next(self.roles[name])
        return landed

    def run(self) -> None:
        """Run to the end; ProtocolError if that is not reached, or the order of a sum is another."""
        super().run()
        for unit in range(len(self.grid.units)):
            for turn in self.turns(unit):
                if self.sums[unit, turn] != self.wanted(unit, turn):
                    raise ProtocolError(f"added {self.sums[unit, turn]} for {self.wanted(unit, turn)}")
        if sorted(self.rounded) != list(range(PIECES * len(self.grid.units))):
            raise ProtocolError(f"rounded {self.rounded}")


def loader(s: Launch, block: int) -> Role:
    """``_gradient_loader.cu.j2`` of a block, from its start."""
    grid, rules, queue = s.grid, s.order_rules, s.queues[block]
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
            yield lambda: len(queue) < IN_FLIGHT
            if turn == visits[0]:
                s.counters[_counter(grid, index)] = NONE_BEFORE | turn
            queue.append((index, turn, turn == visits[-1]))
        if not visits and rules.empty_are_told:
            s.counters[_counter(grid, index)] = ALL_PASSED
        s.done[unit] += not visits and rules.empty_are_counted
        yield lambda: True
        index = s.take()
    queue.append(None)
    s.end(block)


def adder(s: Launch, block: int) -> Role:
    """``_gradient_adder_ordered.cu.j2`` of a block."""
    grid, rules, queue = s.grid, s.order_rules, s.queues[block]
    own = -1
    passed = earlier = told = 0
    while True:
        yield lambda: bool(queue)
        step = queue.pop(0)
        if step is None:
            s.end(block)
            return
        index, turn, last = step
        unit, kv_tile = grid.place(index)
        counter = _counter(grid, index)
        if counter != own:
            own, earlier, passed, told = counter, kv_tile, 0, 0
        at = earlier
        while rules.wait_for_turn and at > 0 and passed <= turn:
            tiles = [counter - kv_tile + at - 1 - lane for lane in range(min(at, LANES))]
            found = [s.counters[tile] for tile in tiles]
            own_alone = [bool(value & NONE_BEFORE) for value in found]
            asked = [not a or value - NONE_BEFORE <= turn for a, value in zip(own_alone, found, strict=True)]
            left = [
                value != ALL_PASSED if rules.for_this_turn else ask for value, ask in zip(found, asked, strict=True)
            ]
            if at == earlier:
                earlier -= _before(left)
            at -= _before(asked)
            if not rules.whole_chain and not asked[0]:
                break
            if any(asked):
                nearest = _before(asked)
                if not own_alone[nearest] and found[nearest] > turn:
                    if at == earlier or not rules.near_alone:
                        passed = found[nearest]
                    break
                watched, seen = tiles[nearest], found[nearest]
                yield lambda watched=watched, seen=seen: s.counters[watched] != seen  # type: ignore[misc]
            else:
                yield lambda: True
        if told < turn:
            s.counters[counter] = turn
        yield lambda: True
        landed = s.add(unit, turn, kv_tile)
        if not rules.counted_when_landed:
            s.done[unit] += last
        if rules.told_when_landed:
            yield lambda landed=landed: landed[0]  # type: ignore[misc]
        s.counters[counter] = ALL_PASSED if last and rules.end_is_told else turn + 1
        if rules.counted_when_landed:
            yield lambda landed=landed: landed[0]  # type: ignore[misc]
            s.done[unit] += last
        told = turn + 1


def rounder(s: Launch, block: int) -> Role:
    """``_gradient_rounder.cu.j2`` of a block: it holds a piece while it waits for the next one."""
    yield lambda: block in s.started
    arriving: int | None = None
    while True:
        piece, s.pieces = s.pieces, s.pieces + 1
        unit = piece // PIECES
        more = unit < len(s.grid.units)
        if more:
            yield lambda unit=unit: s.done[unit] >= len(s.grid.units[unit])  # type: ignore[misc]
            for turn in s.turns(unit):
                if sorted(s.sums.get((unit, turn), [])) != s.wanted(unit, turn):
                    raise ProtocolError(f"rounded {s.sums.get((unit, turn))} for {s.wanted(unit, turn)}")
        if arriving is not None:
            yield lambda: True
            s.rounded.append(arriving)
        if not more:
            s.end(block)
            return
        arriving = piece


def _before(lanes: list[bool]) -> int:
    """``lanes_before``, of so many lanes as ask."""
    return lanes.index(True) if True in lanes else len(lanes)


def _counter(grid: Grid, index: int) -> int:
    unit, kv_tile = grid.place(index)
    return unit * len(grid.units[0]) + kv_tile
