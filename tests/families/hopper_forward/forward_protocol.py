"""A small model of the Hopper forward's barriers: who waits for whom, and what each stage holds when it is read.

Roles follow the templates ``_scheduler``, the loaders, and ``_consumer`` with ``_step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.plan import declared
from tests.plan.simulation import WARPS, Named, Place, ProtocolError, Ring, Role, Simulation, barriers, named

Tile = tuple[int, int]  # work tile, and place among its tiles


@dataclass(frozen=True)
class Rules:
    """The rules that keep the protocol alive. The templates obey all of them."""

    last_product_before_skips: bool = True  # P V of the last tile goes out in the first turn of the next work tile
    turn_for_skipped: bool = True  # a skipped tile takes its turn, too
    meet_before_release: bool = True  # without turns, the warps of a consumer meet before it lets go of a skipped tile
    skips_are_bounded: bool = True  # no more than stages - 1 while a tile of V is held
    only_leader_awaits_skipped: bool = True  # of V, so that no other warp can wait for a phase that is long over
    v_until_product: bool = True  # V is released when its product is complete
    value_loader_says_so: bool = True  # a loader of V of its own releases the record that it has read
    two_tiles_of_values: bool = (
        True  # a stage of K has room for values of the keys of two tiles, read after its release
    )
    warps_release_biases: bool = True  # each for itself, when it has read them
    skipped_biases: bool = True  # those of a skipped tile are awaited and released, too
    meet_before_partials: bool = True  # consumers are all done with Q, K and V when partial results take their place


@dataclass(frozen=True)
class Case:
    """A block's work: for each work tile, in the order of its KV tiles, which consumers see each of these. One that
    ``shares`` the keys of its only work tile with other blocks may have none of them."""

    works: tuple[tuple[frozenset[int], ...], ...]
    consumers: int
    stages: int
    q_stages: int
    lookahead: int
    pingpong: bool
    overlap: bool
    skips: bool
    value_loader: bool = False  # K and V are loaded by a warp each
    keeps_turn: bool = False  # it is passed when the products of a step are complete
    keeps_masked_turn: bool = False  # it is so in steps of some tiles, which may differ between consumers
    shares: bool = False  # its one work tile, with the other blocks of a cluster
    bias_stages: int = 0  # tiles of biases come with those of K; 0: none

    @classmethod
    def random(cls, random: Random) -> Case:
        """Return any case that the plan allows, and patterns of tiles beyond those that masks make."""
        consumers = random.randint(1, 3)
        share = random.choice((0.2, 0.5, 0.9))
        works = tuple(
            tuple(
                frozenset(c for c in range(consumers) if random.random() < share) for _ in range(random.randint(1, 7))
            )
            for _ in range(random.randint(1, 4))
        )
        value_loader = random.random() < 0.4
        return cls(
            works,
            consumers,
            stages=random.randint(2, 4),
            q_stages=random.randint(1, 2),
            lookahead=random.choice((2, 6)),
            pingpong=consumers > 1 and random.random() < 0.6,
            overlap=random.random() < 0.5,
            skips=random.random() < 0.7,
            value_loader=value_loader,
            bias_stages=0 if value_loader else random.choice((0, 2, 3)),
            keeps_turn=random.random() < 0.3,
            keeps_masked_turn=random.random() < 0.3,
        )

    def skipped(self, tile: Tile, consumer: int) -> bool:
        """Whether a consumer may pass over a tile: it sees some of the others, and not this one."""
        work = self.works[tile[0]]
        return self.skips and any(consumer in seen for seen in work) and consumer not in work[tile[1]]


class Forward(Simulation):
    """A block of a kernel: its barriers, its shared memory, and its roles."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.case, self.rules = case, rules
        consumers = case.consumers
        pipes = declared.forward(
            consumers, case.q_stages, case.stages, WARPS, pingpong=case.pingpong, skips=case.skips,
            value_loader=case.value_loader, shares=case.shares, bias_stages=case.bias_stages,
        )  # fmt: skip
        self.q, self.k, self.v = (Ring(pipes.ring(name)) for name in ("q", "k", "v"))
        if case.bias_stages:
            self.biases = Ring(pipes.ring("biases"))
            if not rules.warps_release_biases:
                for barrier in self.biases.empty:
                    barrier.count = consumers
        work = pipes.ring("work")
        self.work_full, self.work_empty = barriers(work.full, work.stages), barriers(work.empty, work.stages)
        for barrier in self.work_empty:
            barrier.count -= case.value_loader and not rules.value_loader_says_so
        if not case.shares:
            (self.work_asked,) = barriers(pipes.barrier("work_asked").signal, 1)
        self.consumers = named(pipes, "consumers")
        self.records: list[int | None] = [None, None]
        self.values: dict[tuple[int, int], Tile] = {}  # whose keys' values lie where
        self.group = [Named(WARPS) for _ in range(consumers)]  # products, too, keep a consumer's warps together
        self.turn = named(pipes, "pingpong")
        self.roles |= {"scheduler": scheduler(self), "loader": loader(self), "query loader": query_loader(self)}
        if case.value_loader:
            self.roles |= {"loader": page_loader(self, self.k), "value loader": page_loader(self, self.v)}
        self.roles |= {f"warp {c}.{w}": consumer(self, c, w) for c in range(consumers) for w in range(WARPS)}

    def of_keys(self, k: Place) -> tuple[int, int]:
        """Place of the values of the keys of a tile of K."""
        return k.stage, k.phase if self.rules.two_tiles_of_values else 0

    def put_partials(self) -> None:
        """Overwrite Q, K and V: no copy is on its way."""
        for ring in (self.q, self.k, self.v):
            if any(name.startswith("copy") for name in self.waiting):
                raise ProtocolError("partial results are written where a copy will land")
            ring.holds = ["partial results"] * ring.stages


def scheduler(s: Forward) -> Role:
    """``forward/_scheduler.cu.j2``; what no row sees never reaches the others."""
    slot = phase = asked_phase = 0
    for record in (0,) if s.case.shares else (*range(len(s.case.works)), None):
        yield s.work_empty[slot].done(phase ^ 1)
        s.records[slot] = record
        for _ in range(s.case.consumers + 1):  # a lane for the rows of each, and one for all
            s.work_full[slot].arrive()
        slot ^= 1
        phase ^= slot == 0
        if record is not None and not s.case.shares:
            yield s.work_asked.done(asked_phase)
            asked_phase ^= 1


def loader(s: Forward) -> Role:
    """``forward/_loader.cu.j2``: V one step after K."""
    slot = work_phase = 0
    k, pending = Place(s.k), Place(s.v)
    biases = Place(s.biases) if s.case.bias_stages else None
    expected = 0
    while True:
        yield s.work_full[slot].done(work_phase)
        work = s.records[slot]
        slot ^= 1
        work_phase ^= slot == 0
        if work is None:
            return
        if work != expected:
            raise ProtocolError(f"the loader read record {work} for {expected}")
        expected += 1
        count = len(s.case.works[work])
        if not count:
            return
        if count <= s.case.lookahead:
            ask(s)
        for number in range(count):
            yield k.empty()
            if count - number == s.case.lookahead < count:
                ask(s)
            s.values[s.of_keys(k)] = work, number
            s.copy(k, (work, number))
            if biases is not None:
                yield biases.empty()
                s.copy(biases, (work, number))
                biases.advance()
            if number > 0:
                yield pending.empty()
                s.copy(pending, (work, number - 1))
            pending = Place(s.v, k.stage, k.phase)
            k.advance()
        yield pending.empty()
        s.copy(pending, (work, count - 1))
        if s.case.shares:
            return


def ask(s: Forward) -> None:
    """Ask for the next work tile, where there may be one."""
    if not s.case.shares:
        s.work_asked.arrive()


def page_loader(s: Forward, ring: Ring) -> Role:
    """``forward/_page_loader.cu.j2``: K and V each have one."""
    slot = work_phase = 0
    to, of_k = Place(ring), ring is s.k
    for expected in (0,) if s.case.shares else (*range(len(s.case.works)), None):
        yield s.work_full[slot].done(work_phase)
        if s.records[slot] != expected:
            raise ProtocolError(f"the loader of {'K' if of_k else 'V'} read record {s.records[slot]} for {expected}")
        if not of_k and s.rules.value_loader_says_so:
            s.work_empty[slot].arrive()
        slot ^= 1
        work_phase ^= slot == 0
        if expected is None:
            return
        count = len(s.case.works[expected])
        if of_k and count <= s.case.lookahead:
            ask(s)
        for number in range(count):
            yield to.empty()
            if of_k and count - number == s.case.lookahead < count:
                ask(s)
            s.copy(to, (expected, number))
            to.advance()


def query_loader(s: Forward) -> Role:
    """``forward/_query_loader.cu.j2``."""
    slot = work_phase = 0
    q = Place(s.q)
    for expected in (0,) if s.case.shares else (*range(len(s.case.works)), None):
        yield s.work_full[slot].done(work_phase)
        if s.records[slot] != expected:
            raise ProtocolError(f"the loader of Q read record {s.records[slot]} for {expected}")
        s.work_empty[slot].arrive()
        slot ^= 1
        work_phase ^= slot == 0
        if expected is not None and s.case.works[expected]:
            yield q.empty()
            s.copy(q, expected)
            q.advance()


def consumer(s: Forward, c: int, w: int) -> Role:
    """``forward/_consumer.cu.j2`` and ``forward/_step.cu.j2``: one warp of a consumer."""
    case, rules, leader = s.case, s.rules, w == 0
    k, q, v, held = Place(s.k), Place(s.q), Place(s.v), Place(s.v)
    biases = Place(s.biases) if case.bias_stages else None
    work, slot, work_phase, held_for = -1, 0, 0, 0
    tile: Tile = (0, 0)  # at which K stands
    own: Tile = (0, 0)  # whose probabilities wait for V

    def pingpong_wait() -> Role:
        if case.pingpong:
            yield from s.turn[c].sync()

    def pingpong_arrive() -> None:
        if case.pingpong:
            s.turn[(c + 1) % case.consumers].arrive()

    def skip_step() -> Role:
        if case.pingpong and rules.turn_for_skipped:
            yield from pingpong_wait()
            pingpong_arrive()
        elif not case.pingpong and rules.meet_before_release:
            yield from s.group[c].sync()

    def release(place: Place) -> None:
        if leader:
            place.release()
        place.advance()

    def release_k() -> None:
        if leader and case.q_stages == 1 and tile[1] == len(case.works[work]) - 1:
            q.release()  # that was the last product of these queries
        release(k)

    def read_values(place: tuple[int, int]) -> Role:
        """Make logits, by values that came with K, which may be given back by now, and by biases."""
        yield lambda: True
        if biases is not None:
            yield biases.full()
            biases.expect(tile)
            yield lambda: True
            biases.expect(tile)
            release_biases()
        if not case.value_loader and s.values[place] != tile:
            raise ProtocolError(f"consumer {c} read values of {s.values[place]} for {tile}")

    def expect(*reads: tuple[Place, object]) -> None:
        for place, wanted in reads if leader else ():
            place.expect(wanted)

    def issue(*reads: tuple[Place, object]) -> Role:
        """Issue a product, which the warps of a consumer do together: what it reads is there."""
        yield from s.group[c].sync()
        expect(*reads)

    def complete(*reads: tuple[Place, object]) -> Role:
        """Wait for a product: until now, what it reads must have stayed."""
        yield lambda: True
        expect(*reads)

    def finish_pv(pv: tuple[Place, object]) -> Role:
        if leader and not rules.v_until_product:
            held.release()
        yield from complete(pv)
        if leader and rules.v_until_product:
            held.release()

    def hold_v() -> None:
        """Keep the tile of V that belongs to these logits until its product."""
        nonlocal held, own, held_for
        held, own, held_for = v.copy(), tile, 0
        v.advance()

    def release_biases() -> None:
        assert biases is not None
        if leader or rules.warps_release_biases:
            biases.release()
        biases.advance()

    def skip_biases() -> Role:
        if biases is not None and rules.skipped_biases:
            yield biases.full()
            release_biases()

    def skip_v() -> Role:
        if leader or not rules.only_leader_awaits_skipped:
            yield v.full()
        release(v)

    def next_work() -> Role:
        nonlocal slot, work_phase, work
        yield s.work_full[slot].done(work_phase)
        work += 1
        expected = work if work < len(case.works) else None
        if s.records[slot] != expected:
            raise ProtocolError(f"consumer {c} read record {s.records[slot]} for {expected}")
        s.work_empty[slot].arrive()
        slot ^= 1
        work_phase ^= slot == 0

    def blind() -> bool:
        """Whether these rows see nothing of the tile, and there is another."""
        return case.skipped(tile, c) and tile[1] < len(case.works[work]) - 1

    def start(skipped: bool) -> Role:
        """Pass over tiles that these rows do not see, and multiply the first that they do."""
        nonlocal tile
        while blind():
            if not skipped:
                yield from skip_step()
            skipped = False
            release_k()
            yield from skip_v()
            yield from skip_biases()
            tile = (work, tile[1] + 1)
            yield k.full()
        yield from pingpong_wait()
        qk = ((k.copy(), tile), (q.copy(), work))
        yield from issue(*qk)
        pingpong_arrive()
        yield from complete(*qk)

    if c == case.consumers - 1:
        pingpong_arrive()
    yield from next_work()
    more = work < len(case.works) and bool(case.works[work])
    if more:
        yield q.full()
        yield k.full()
        yield from start(skipped=False)
    while more:
        of_keys = s.of_keys(k)
        release_k()
        hold_v()
        yield from read_values(of_keys)
        while tile[1] < len(case.works[work]) - 1:
            tile = (work, tile[1] + 1)
            yield k.full()
            if case.skipped(tile, c) and (held_for < case.stages - 1 or not rules.skips_are_bounded):
                yield from skip_step()
                release_k()
                yield from skip_v()
                yield from skip_biases()
                held_for += 1
                continue
            qk, pv, of_keys = ((k.copy(), tile), (q.copy(), work)), (held, own), s.of_keys(k)
            yield from pingpong_wait()
            yield from issue(*qk)
            if not case.overlap:
                yield from complete(*qk)
                release_k()
            yield held.full()
            yield from issue(pv)
            keeps_turn = case.keeps_turn or (case.keeps_masked_turn and (sum(tile) + c) % 2 == 0)
            if not keeps_turn:
                pingpong_arrive()
            if case.overlap:
                yield from complete(*qk)
                release_k()
                yield from read_values(of_keys)
            yield from finish_pv(pv)
            if keeps_turn:
                pingpong_arrive()
            if not case.overlap:
                yield from read_values(of_keys)
            hold_v()
        if leader and case.q_stages > 1:
            q.release()
        q.advance()
        pv = (held, own)
        if case.shares:
            yield held.full()
            yield from pingpong_wait()
            yield from issue(pv)
            pingpong_arrive()
            yield from complete(pv)
            if rules.meet_before_partials:
                yield from s.consumers[0].sync()
            s.put_partials()
            break
        yield from next_work()
        more = work < len(case.works)
        if more:
            tile = (work, 0)
            yield q.full()
            yield k.full()
        if more and blind() and not rules.last_product_before_skips:
            yield from start(skipped=False)
            yield held.full()
            yield from issue(pv)
            yield from finish_pv(pv)
            continue
        yield held.full()
        yield from pingpong_wait()
        yield from issue(pv)
        qk = ((k.copy(), tile), (q.copy(), work)) if more and not blind() else ()
        if qk:
            yield from issue(*qk)
        pingpong_arrive()
        yield from finish_pv(pv)
        if qk:
            yield from complete(*qk)
        elif more:
            yield from start(skipped=True)
    if c == 0:
        yield from pingpong_wait()
