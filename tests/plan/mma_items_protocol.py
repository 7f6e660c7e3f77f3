"""A model of persistent blocks of the forward by mma.sync: the order of tiles of work, records of these, Q of the next one,
and tiles of K and V in a ring that goes on from one to the next. Warps follow ``mma/_items.cu.j2`` and ``mma/_loop.cu.j2``
line by line; what a warp copies lands some time after it was issued.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from random import Random

from tests.plan.simulation import Condition, Named, ProtocolError, Role, Simulation, all_landed

END = -2  # no step is left


@dataclass(frozen=True)
class Rules:
    """The waits that keep what is read whole, and the sizes that leave time to read it."""

    landed: bool = True  # a half-step begins when the warp's own copies for it have landed,
    before_k: bool = True  # and all warps have come so far: before S,
    before_v: bool = True  # and before O += P V
    q_landed: bool = True  # the first step of a tile of work waits for its Q, too
    taken_known: bool = True  # the number of a tile of work is read when it is there,
    two_numbers: bool = True  # and has another place than the one before
    first_known: bool = True  # the first record is read when it is there
    spare_record: bool = True  # there is a record more than tiles of work under way
    late: bool = True  # with an even number of stages V follows K by a step


class Block(Simulation):
    """The warps of a block, and its shared memory: whose values each part of a region holds."""

    def __init__(self, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.rules = rules
        self.warps, self.stages = random.randint(2, 4), random.randint(2, 4)
        self.items = [random.choice((1, 1, 2, 4)) for _ in range(random.randint(1, 6))]  # steps of each
        self.ring: list[list[object]] = [[None] * self.warps for _ in range(self.stages)]
        self.q: list[object] = [None] * self.warps
        self.records: list[object] = [None] * (self.stages // 2 + (2 if rules.spare_record else 0))
        self.taken: list[int] = [0, 0]
        self.done: list[list[int]] = [[] for _ in range(self.warps)]
        self.barrier = Named(self.warps)
        self.roles = {f"warp {warp}": warp_of(self, warp) for warp in range(self.warps)}

    def sync(self, needed: bool = True) -> Iterator[Condition]:
        """``__syncthreads``."""
        if needed:
            yield from self.barrier.sync()

    def expect(self, held: object, what: object) -> None:
        if held != what:
            raise ProtocolError(f"{held} was read where {what} should be")


def warp_of(s: Block, warp: int) -> Role:
    """What a warp does, from the first tile of work to the last one of the block."""
    rules, now, ahead = s.rules, lambda: True, s.stages // 2
    groups: list[list[list[bool]]] = []  # copies of each half-step
    current: list[list[bool]] = []
    steps_ahead, taken, fill, stage = 0, 0, 0, 0
    source = late = -1  # the tile of work whose keys are copied, and that of the step before

    def commit() -> None:
        nonlocal fill
        fill = (fill + 1) % s.stages
        groups.append(list(current))
        current.clear()

    def wait(left: int) -> Iterator[Condition]:
        if rules.landed:
            yield all_landed([copy for group in groups[: len(groups) - left] for copy in group])

    def copy(region: list[object], place: int, what: object) -> None:
        region[place] = None

        def land() -> None:
            region[place] = what

        current.append(s.issue(land))

    def load(kind: str, listed: int, of: int) -> None:
        copy(s.ring[fill], warp, (kind, of, listed) if listed >= 0 else None)

    def next_tile() -> Generator[Condition, None, int]:
        nonlocal steps_ahead, taken, source
        if steps_ahead == 0:
            place = taken % 2 if rules.two_numbers else 0
            if warp == 0:
                s.taken[place] = taken
            yield from s.sync(rules.taken_known)
            yield now
            s.expect(s.taken[place], taken)
            if taken >= len(s.items):
                steps_ahead = -1
            else:
                source, steps_ahead = taken, s.items[taken]
                if warp == 0:
                    s.records[taken % len(s.records)] = taken
                taken += 1
        if steps_ahead < 0:
            return END
        steps_ahead -= 1
        return steps_ahead

    listed: list[int] = []
    for i in range(ahead + 1):
        late = source
        listed.append((yield from next_tile()))
        if i == 0:
            copy(s.q, warp, 0)
        for half, kind in ((2 * i, "K"), (2 * i + 1, "V")):
            if half < s.stages - 1:
                load(kind, listed[i], source)
                commit()
    yield from s.sync(rules.first_known)
    item = 0
    while listed[0] != END:
        yield now
        s.expect(s.records[item % len(s.records)], item)
        for left in range(s.items[item], 0, -1):
            s.expect(listed[0], left - 1)
            if left == s.items[item] and rules.q_landed:
                yield from wait(1 if s.stages > 3 else s.stages - 2)
            yield from wait(s.stages - 2)
            yield from s.sync(rules.before_k)
            of_v = late if rules.late else source
            if s.stages % 2:
                load("K", listed[ahead], source)
            else:
                load("V", listed[ahead - 1], of_v)
            yield now
            s.expect(s.q[warp], item)
            s.expect(s.ring[stage], [("K", item, left - 1)] * s.warps)  # S
            yield now

            def next_queries(left: int = left) -> None:
                if left == 1 and listed[1] != END:
                    s.expect(s.records[(item + 1) % len(s.records)], item + 1)
                    copy(s.q, warp, item + 1)

            if s.stages > 2:
                next_queries()
            commit()
            stage = (stage + 1) % s.stages
            yield from wait(s.stages - 2)
            yield from s.sync(rules.before_v)
            load("V" if s.stages % 2 else "K", listed[ahead], source)
            yield now
            s.expect(s.ring[stage], [("V", item, left - 1)] * s.warps)  # O += P V
            if s.stages == 2:
                next_queries()
            commit()
            stage = (stage + 1) % s.stages
            listed = listed[1:]
            late = source
            listed.append((yield from next_tile()))
        s.done[warp].append(item)
        item += 1
    s.expect(s.done[warp], list(range(len(s.items))))
