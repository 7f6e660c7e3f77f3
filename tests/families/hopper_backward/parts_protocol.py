"""A model of how the blocks of a CUDA backward share tiles of keys that are cut into parts, and of how dK and dV of
these come together. Roles follow ``backward/_loader.cu.j2``, ``_adder.cu.j2``, ``_rounder.cu.j2`` and the end of
``_consumer.cu.j2`` with ``parts.cuh``, line by line; what lies between them is a queue. Stores and additions land some
time after they were issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from tests.plan.simulation import ProtocolError, Role, Simulation, all_landed

CONSUMERS = 2  # each has half of the keys of a tile
STEPS = 3  # tiles of queries that see a tile of keys, of each head, at most
HEADS = 2

Step = tuple[int, int]  # a head and a tile of queries
Added = tuple[
    int, list[tuple[int, int, int]]
]  # how many parts are done then, and the tile of keys and step of each sum
Kept = tuple[int, int, list[Step]]  # a tile of keys, its part or a negative number, and the steps


@dataclass(frozen=True)
class Rules:
    """The rules that keep sums whole."""

    stored_before_counted: bool = True  # all threads have stored a part when it is counted
    one_is_last: bool = True  # to count a part and to learn how many were counted is one operation
    empty_are_stored: bool = True  # a part without a step has zeros
    whole_count_as_parts: bool = True  # who rounds dQ waits for parts, of which a tile that is not cut has as many
    in_order: bool = True  # parts are added from the first on, whoever is last


class Parts(Simulation):
    """A launch: some blocks, and tiles of keys of one KV head, the last ones cut. A sum is a list of what is in it."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        self.steps = [random.choice((0, 1, STEPS)) for _ in range(random.randint(1, 5))]
        self.cut = random.randint(0, len(self.steps))
        self.parts = random.randint(2, 4) if self.cut else 1
        self.taken = 0
        self.done = 0
        self.counted = [[0] * CONSUMERS for _ in range(self.cut)]
        self.partials: dict[tuple[int, int], list[Step]] = {}
        self.written: dict[tuple[int, int], list[list[Step]]] = {}
        self.dq: list[tuple[int, int, int]] = []
        self.rounded = False
        for block in range(random.randint(1, 4)):
            adds: list[Added | None] = []
            keeps: list[list[Kept | None]] = [[] for _ in range(CONSUMERS)]
            self.roles[f"loader {block}"] = loader(self, adds, keeps)
            self.roles[f"adder {block}"] = adder(self, adds)
            self.roles |= {f"consumer {block}.{c}": consumer(self, c, keeps[c]) for c in range(CONSUMERS)}
        self.roles["rounder"] = rounder(self)

    @property
    def uncut(self) -> int:
        """Tiles that one block has."""
        return len(self.steps) - self.cut

    def run(self) -> None:
        """Run to the end; ProtocolError if dK or dV of a tile lack a step, or are not written once."""
        super().run()
        for tile, steps in enumerate(self.steps):
            own = [share(steps, part, self.parts) for part in range(self.parts)] if tile >= self.uncut else []
            wanted = [step for part in own for step in part] if own else share(steps, 0, 1)
            for consumer in range(CONSUMERS):
                written = self.written.get((tile, consumer), [])
                if written != [wanted]:
                    raise ProtocolError(f"wrote {written} for {wanted}")


def share(steps: int, part: int, parts: int) -> list[Step]:
    """Return the steps of a part, as ``_visits.cu.j2`` goes through them: head, and tile of queries."""
    return [(h, i) for h in range(HEADS) for i in range((part + h) % parts, steps, parts)]


def loader(s: Parts, adds: list[Added | None], keeps: list[list[Kept | None]]) -> Role:
    """``backward/_loader.cu.j2``."""
    while True:
        index, s.taken = s.taken, s.taken + 1
        yield lambda: True
        if index >= s.uncut + s.cut * s.parts:
            break
        part = index - s.uncut
        tile = s.uncut + part // s.parts if part >= 0 else index
        own = share(s.steps[tile], part % s.parts, s.parts) if part >= 0 else share(s.steps[tile], 0, 1)
        done = 1 if part >= 0 or not s.rules.whole_count_as_parts else s.parts
        if own:
            adds.append((done, [(tile, h, i) for h, i in own]))
        else:
            s.done += done
        for each in keeps:
            each.append((tile, part, own))
    adds.append(None)
    for each in keeps:
        each.append(None)


def adder(s: Parts, adds: list[Added | None]) -> Role:
    """``backward/_adder.cu.j2``, without who is the first."""
    while True:
        yield lambda: bool(adds)
        item = adds.pop(0)
        if item is None:
            return
        done, steps = item
        yield all_landed([s.issue(partial(s.dq.append, step)) for step in steps])
        s.done += done


def rounder(s: Parts) -> Role:
    """``backward/_dq_blocks.cu.j2``: waits for all parts of all tiles."""
    yield lambda: s.done >= len(s.steps) * s.parts
    wanted = sorted((tile, h, i) for tile, steps in enumerate(s.steps) for h in range(HEADS) for i in range(steps))
    if sorted(s.dq) != wanted:
        raise ProtocolError(f"rounded {s.dq} for {wanted}")


def consumer(s: Parts, c: int, keeps: list[Kept | None]) -> Role:
    """The end of a work tile in ``backward/_consumer.cu.j2``: ``add_parts``."""
    while True:
        yield lambda: bool(keeps)
        item = keeps.pop(0)
        if item is None:
            return
        tile, part, own = item
        if part >= 0:
            if own or s.rules.empty_are_stored:
                store = s.issue(partial(s.partials.update, {(part, c): own}))
                if s.rules.stored_before_counted:
                    yield all_landed([store])
            counted = s.counted[tile - s.uncut]
            if s.rules.one_is_last:
                before, counted[c] = counted[c], counted[c] + 1
            else:
                counted[c] += 1
                yield lambda: True
                before = counted[c] - 1
            yield lambda: True
            if before != s.parts - 1:
                continue
            first = part // s.parts * s.parts
            numbers = list(range(first, first + s.parts))
            if not s.rules.in_order:
                numbers.sort(key=lambda number: number != part)
            own = []
            for number in numbers:
                stored = s.partials.get((number, c))
                if stored is None:
                    raise ProtocolError("added what was not stored")
                own = own + stored
        s.written.setdefault((tile, c), []).append(own)
