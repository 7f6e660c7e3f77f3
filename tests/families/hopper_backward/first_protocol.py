"""A model of how the blocks of a CUDA backward agree on who is the first to have dQ of a tile of queries: that one
stores, the others add. Roles follow ``backward/_adder.cu.j2`` with ``first_writer.cuh``, line by line; copies land some
time after they were issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.plan.simulation import ProtocolError, Role, Simulation, all_landed

CONSUMERS = 2  # each has a part of a tile of dQ
UNTOUCHED, TAKEN, STORED = range(3)


@dataclass(frozen=True)
class Rules:
    """The rules that keep sums whole."""

    wait_for_first: bool = True  # who is not the first adds when the first has stored
    told_when_landed: bool = True  # which is when both parts are in memory
    one_is_first: bool = True  # taking a tile is one operation: nobody finds it untouched meanwhile


class Firsts(Simulation):
    """Blocks that add to the same tiles, each in an order of its own; memory holds what nobody cleared."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        tiles, blocks = random.randint(1, 4), random.randint(1, 5)
        self.steps = [random.sample(range(tiles), random.randint(1, tiles)) for _ in range(blocks)]
        self.states = [UNTOUCHED] * tiles
        self.memory: dict[tuple[int, int], list[int]] = {}
        self.roles = {f"adder {block}": adder(self, block) for block in range(blocks)}

    def store(self, place: tuple[int, int], block: int) -> None:
        """Overwrite what is there."""
        self.memory[place] = [block]

    def add(self, place: tuple[int, int], block: int) -> None:
        """Add to what is there; ProtocolError if that is of nobody."""
        if place not in self.memory:
            raise ProtocolError(f"block {block} added to what was not stored")
        self.memory[place].append(block)

    def run(self) -> None:
        """Run to the end; ProtocolError if a sum lacks a block."""
        super().run()
        for tile in range(len(self.states)):
            wanted = [block for block, steps in enumerate(self.steps) if tile in steps]
            for part in range(CONSUMERS):
                summed = sorted(self.memory.get((tile, part), []))
                if summed != wanted:
                    raise ProtocolError(f"summed {summed} for {wanted}")
            if (self.states[tile] != UNTOUCHED) != bool(wanted):
                raise ProtocolError("who rounds takes sums for zeros")


def adder(s: Firsts, block: int) -> Role:
    """``backward/_adder.cu.j2``."""
    rules = s.rules
    for tile in s.steps[block]:
        first = s.states[tile] == UNTOUCHED
        if not rules.one_is_first:
            yield lambda: True
        if first:
            s.states[tile] = TAKEN
        elif rules.wait_for_first:
            yield lambda tile=tile: s.states[tile] == STORED  # type: ignore[misc]
        copies = []
        for part in range(CONSUMERS):
            yield lambda: True  # dQ of the consumer
            effect = s.store if first else s.add
            copies.append(s.issue(lambda effect=effect, tile=tile, part=part: effect((tile, part), block)))  # type: ignore[misc]
        if first and rules.told_when_landed:
            yield all_landed(copies)
        if first:
            s.states[tile] = STORED
