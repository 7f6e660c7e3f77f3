"""A model of the barriers of the clustered CUDA backward, as ``backward_protocol`` has one of a single block.

Roles follow ``_loader``, ``_values``, ``_keys``, ``_queries`` and ``_turns`` of ``cluster``, and ``_tensor_adder`` of
``backward``, line by line, in two blocks that copy to each other's memory and arrive at each other's barriers, or in
two such pairs for half of the columns each, whose twins send each other S and dP. Bytes are counted as PTX says: those
of a phase may land before its arrivals. A product reads its operands from when all warps of a warpgroup have issued it
to when it is complete, and both times finds what it should. Who waits for a phase must find it or the next one: parity
tells no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from tests.plan import declared
from tests.plan.simulation import WARPS, Condition, Named, ProtocolError, Role, Simulation

BLOCKS = 2  # of a pair
SUMS = 8
END = "end"

#: Contents of a piece of memory, and the expected ones.
Read = tuple[list[object], object]


@dataclass(frozen=True)
class Rules:
    """The rules that keep the protocol alive. The templates obey all of them."""

    release_to_both: bool = True  # a stage of Q or dO is given back to the loaders of both blocks, which both load it
    taken_by_both: bool = True  # P goes where dS was when both blocks have multiplied it
    wait_for_place: bool = True  # and not before
    wait_for_landing: bool = True  # dS of the other block is multiplied when it is there
    all_probabilities: bool = True  # dS is computed when all warps have written P
    meet_before_ds: bool = True  # dS is passed on when all warps have written it
    q_until_dk: bool = True  # a stage of Q, with the numbers of its rows, is released after dK
    dout_until_dv: bool = True  # one of dO after dV,
    dout_until_dp: bool = True  # and after dP
    wait_for_rows: bool = True  # a stage of Q is full when the numbers of its rows are there
    end_fills_a_stage: bool = True  # the end takes a stage of Q, and arrives for the numbers of rows, too
    end_waits_its_turn: bool = True  # the end is told where dS was, when that was taken
    taken_by_reader: bool = True  # nor before the warp of tensor gradients has read dS
    dv_behind_dp: bool = True  # dV goes to the place of dO when nobody multiplies that any more
    sums_are_remembered: bool = True  # more of their places than steps by which a warpgroup may lag
    copies_land: bool = True  # what a block loads for itself is there before it leaves, though it has no step
    leave_together: bool = True  # the other block may still arrive here
    wait_for_turn: bool = True  # dQ is added when its turn has come,
    told_when_added: bool = True  # of which others are told when all warps have added theirs,
    one_turn_at_a_time: bool = True  # before the next one is waited for
    s_after_dp: bool = True  # S is sent when the twin has read dP of the step before,
    dp_after_s: bool = True  # and dP when it has read S
    part_until_read: bool = True  # of which it tells after it has read


@dataclass(frozen=True)
class Case:
    """A cluster's work, and the depths of its pipelines."""

    steps: int
    q_stages: int
    parts: int  # stages that dO of a step takes
    stages: int
    overlap: str
    ordered: bool = False  # dQ is added up in a fixed order
    reads_ds: bool = False  # a warp adds up tiles of dS
    halves: bool = False  # two pairs of blocks divide the columns

    @classmethod
    def random(cls, random: Random) -> Case:
        """Return any case that the plan allows."""
        parts = random.randint(1, 2)
        return cls(
            steps=random.choice((0, 1, 1, 2, 3, 5, 12)),
            q_stages=random.randint(2, 3),
            parts=parts,
            stages=parts + random.randint(0, 2),
            overlap=random.choice(("roles", "dv")),
            ordered=random.random() < 0.5,
            reads_ds=random.random() < 0.5,
            halves=random.random() < 0.5,
        )


class Phases:
    """An mbarrier of a block: ``count`` arrivals, and as many copies as they announce, complete a phase."""

    def __init__(self, block: Block, count: int) -> None:
        self.block, self.count = block, count
        self.arrived = self.bytes = self.complete = 0

    def arrive(self, announced: int = 0) -> None:
        self.block.check_alive("arrived at")
        self.arrived += 1
        self._add(announced)

    def land(self) -> None:
        self.block.check_alive("copied to")
        self._add(-1)

    def _add(self, announced: int) -> None:
        self.bytes += announced
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.complete = 0, self.complete + 1

    def done(self, phase: int) -> Condition:
        """Condition that a phase, counted from 0, is complete; that of -1 always is."""

        def complete() -> bool:
            if not phase <= self.complete <= phase + 1:
                raise ProtocolError(f"waits for phase {phase}, passed or far: {self.complete} are complete")
            return self.complete > phase

        return complete


class Place:
    """A stage and how often the ring came around."""

    def __init__(self, stages: int) -> None:
        self.stages, self.stage, self.phase = stages, 0, 0

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.phase = 0, self.phase + 1

    def last(self, count: int) -> list[int]:
        """Return the stages before this one."""
        return [(self.stage - part) % self.stages for part in range(1, count + 1)]


class Products:
    """Products of a warpgroup, in order."""

    def __init__(self, s: Cluster, name: str) -> None:
        self.s, self.name = s, name
        self.issued = [0] * WARPS
        self.complete = 0

    def issue(self, warp: int, reads: Iterable[Read]) -> int:
        """Issue the next one of a warp; return how many that are."""
        self.issued[warp] += 1
        number = self.issued[warp]
        if min(self.issued) == number:  # by now all have
            self.s.start(f"{self.name} {number}", self._multiply(number, list(reads)))
        return number

    def _multiply(self, number: int, reads: list[Read]) -> Role:
        expect(reads)
        yield lambda: self.complete == number - 1
        expect(reads)
        self.complete = number

    def done(self, number: int) -> Condition:
        return lambda: self.complete >= number


def expect(reads: Iterable[Read]) -> None:
    for where, wanted in reads:
        if any(held != wanted for held in where):
            raise ProtocolError(f"read {where} where {wanted} should be")


class Block:
    """Barriers and memory of one block."""

    def __init__(self, s: Cluster, rank: int) -> None:
        case, rules = s.case, s.rules
        self.half, self.rank = divmod(rank, BLOCKS)
        self.at_work = 0
        pipes = declared.cluster(case.q_stages, case.stages, WARPS, ordered=True, reads_ds=case.reads_ds)

        def arrivals(name: str, *, less: int = 0) -> int:
            return pipes.barrier(name).signal.arrivals - less

        to_one = 0 if rules.release_to_both else arrivals("q_empty") // BLOCKS  # the readers of one block alone

        def barriers(stages: int, count: int) -> list[Phases]:
            return [Phases(self, count) for _ in range(stages)]

        def pieces(stages: int, count: int) -> list[list[object]]:
            return [[None] * count for _ in range(stages)]

        def of(name: str, *, less: int = 0) -> list[Phases]:
            return barriers(pipes.barrier(name).count, arrivals(name, less=less))

        (self.k_full,), (self.v_full,), (self.other_k_full,) = of("k_full"), of("v_full"), of("other_k_full")
        self.q_full, self.q_empty = of("q_full", less=not rules.wait_for_rows), of("q_empty", less=to_one)
        self.dout_full, self.dout_empty = of("dout_full"), of("dout_empty", less=to_one)
        self.p_full = of("p_full", less=0 if rules.all_probabilities else WARPS - 1)
        self.ds_full, self.other_ds_full = of("ds_full"), of("other_ds_full")
        unread = case.reads_ds and not rules.taken_by_reader
        self.ds_empty = of("ds_empty", less=unread + (0 if rules.taken_by_both else BLOCKS - 1))
        (self.turn,), (self.added,) = of("turn"), of("added", less=0 if rules.told_when_added else WARPS - 1)
        self.s_part, self.dp_part = ((of(f"{name}_full"), of(f"{name}_empty")) for name in ("s_part", "dp_part"))
        self.part = pieces(WARPS, 1)  # of S and dP, what the twin sends
        self.turns = 0  # that have come
        self.additions = [0] * WARPS
        self.k, self.v, self.other_k = pieces(3, 1)
        self.q, self.dout = pieces(case.q_stages, BLOCKS), pieces(case.stages, BLOCKS)  # each block loads a half
        self.steps, self.rows = pieces(case.q_stages, 1), pieces(case.q_stages, 1)
        self.sums = pieces(SUMS if rules.sums_are_remembered else 2, 1)
        self.ds_steps = pieces(2, 1)
        self.ds, self.other_ds = pieces(2, WARPS), pieces(2, 1)  # a warp reads its own pairs of P, and writes dS there

    def check_alive(self, what: str) -> None:
        if self.at_work == 0:
            raise ProtocolError(f"{what} a block that has left")


class Cluster(Simulation):
    """Two blocks with a tile of keys, or two pairs of them."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.case, self.rules = case, rules
        self.blocks = [Block(self, rank) for rank in range((1 + case.halves) * BLOCKS)]
        groups = {"values": values, "keys": keys, "queries": queries}
        loaders = (load_q, load_dout, load_rows)
        self.end = Named(len(self.blocks) * (len(loaders) + case.ordered + case.reads_ds + WARPS * len(groups)))
        for block in self.blocks:
            own = {f"loader of {role.__name__[5:]}": role(self, block) for role in loaders}
            if case.ordered:
                own["turns"] = turns(self, block)
            if case.reads_ds:
                own["tensor adder"] = tensor_adder(self, block)
            for name, role in groups.items():
                products = Products(self, f"products of {name} {block.half} {block.rank}")
                named = Named(WARPS)
                own |= {f"{name}.{w}": role(self, block, w, products, named) for w in range(WARPS)}
            block.at_work = len(own)
            self.roles |= {
                f"{name} of block {block.half}.{block.rank}": self.stay(block, role) for name, role in own.items()
            }

    def pair(self, block: Block) -> list[Block]:
        """The blocks with the same columns, both of them."""
        return self.blocks[BLOCKS * block.half :][:BLOCKS]

    def twin(self, block: Block) -> Block:
        """The block with the same keys and the other columns."""
        return self.blocks[BLOCKS * (1 - block.half) + block.rank]

    def stay(self, block: Block, role: Role) -> Role:
        yield from role
        if self.rules.leave_together:
            yield from self.end.sync()
        block.at_work -= 1

    def copy(self, to: list[object], piece: int, what: object, full: Phases, source: Iterable[Read] = ()) -> None:
        """Issue a copy; until it lands, the piece holds nothing."""
        to[piece] = None

        def land() -> Role:
            for _ in range(self.random.choice((1, 1, 5, 50))):
                yield lambda: True
            expect(source)
            to[piece] = what
            full.land()

        self.land(land())

    def release(self, block: Block, empty: str, stage: int) -> None:
        """Give a stage back."""
        for to in self.pair(block) if self.rules.release_to_both else [block]:
            getattr(to, empty)[stage].arrive()


# --- loaders: _cluster_loader.cu.j2 ---------------------------------------------------------------------------


def load_q(s: Cluster, block: Block) -> Role:
    q = Place(s.case.q_stages)
    block.k_full.arrive(announced=1)
    s.copy(block.k, 0, "K", block.k_full)
    for step in range(s.case.steps):
        yield block.q_empty[q.stage].done(q.phase - 1)
        block.steps[q.stage][0] = step
        block.sums[step % len(block.sums)][0] = step
        block.q_full[q.stage].arrive(announced=BLOCKS)
        for to in s.pair(block):
            s.copy(to.q[q.stage], block.rank, step, to.q_full[q.stage])
        q.advance()
    yield block.q_empty[q.stage].done(q.phase - 1)
    block.sums[s.case.steps % len(block.sums)][0] = END
    block.steps[q.stage][0] = END
    for _ in range(block.q_full[q.stage].count if s.rules.end_fills_a_stage else 1):
        block.q_full[q.stage].arrive()
    if s.rules.copies_land:
        yield block.k_full.done(0)


def load_dout(s: Cluster, block: Block) -> Role:
    place = Place(s.case.stages)
    for what, to, full in (("V", block.v, block.v_full), ("other K", block.other_k, block.other_k_full)):
        full.arrive(announced=1)
        s.copy(to, 0, what, full)
    for step in range(s.case.steps):
        for part in range(s.case.parts):
            yield block.dout_empty[place.stage].done(place.phase - 1)
            block.dout_full[place.stage].arrive(announced=BLOCKS)
            for each in s.pair(block):
                s.copy(each.dout[place.stage], block.rank, (step, part), each.dout_full[place.stage])
            place.advance()
    if s.rules.copies_land:
        yield block.v_full.done(0)
        yield block.other_k_full.done(0)


def load_rows(s: Cluster, block: Block) -> Role:
    q = Place(s.case.q_stages)
    for step in range(s.case.steps):
        yield block.q_empty[q.stage].done(q.phase - 1)
        block.rows[q.stage][0] = step
        if s.rules.wait_for_rows:
            block.q_full[q.stage].arrive()
        q.advance()


# --- warpgroups -----------------------------------------------------------------------------------------------


class Steps:
    """The steps of a warp, and where it stands in Q and dO."""

    def __init__(self, s: Cluster, block: Block) -> None:
        self.s, self.block = s, block
        self.q, self.dout = Place(s.case.q_stages), Place(s.case.stages)
        self.step: object = -1

    def next(self) -> Role:
        """Wait for what comes after this step."""
        assert isinstance(self.step, int)
        yield self.block.q_full[self.q.stage].done(self.q.phase)
        wanted = self.step + 1 if self.step + 1 < self.s.case.steps else END
        expect([(self.block.steps[self.q.stage], wanted)])
        self.step = wanted

    @property
    def more(self) -> bool:
        return self.step != END

    def of_q(self) -> Read:
        return self.block.q[self.q.stage], self.step

    def rows(self) -> Read:
        return self.block.rows[self.q.stage], self.step

    def of_dout(self, step: object, part: int) -> Read:
        return self.block.dout[self.dout.stage], (step, part)


def add_twin(s: Cluster, block: Block, w: int, what: str, step: object) -> Role:
    """``cluster/_twin.cu.j2``."""
    twin = s.twin(block)
    (full, _), (full_there, empty_there) = (getattr(each, f"{what}_part") for each in (block, twin))
    full[w].arrive(announced=1)
    s.copy(twin.part[w], 0, (what, step), full_there[w])
    assert isinstance(step, int)
    yield full[w].done(step)
    if not s.rules.part_until_read:
        empty_there[w].arrive()
        yield lambda: True
    expect([(block.part[w], (what, step))])
    if s.rules.part_until_read:
        empty_there[w].arrive()


def values(s: Cluster, block: Block, w: int, products: Products, named: Named) -> Role:
    """``cluster/_values.cu.j2``."""
    leader, steps, buffer = w == 0, Steps(s, block), Place(2)
    pending = 0  # dV

    def issue_s() -> int:
        return products.issue(w, [(block.k, "K"), steps.of_q()] if steps.more else [])

    def issue_dv(own: object) -> Role:
        nonlocal pending
        reads = []
        for part in range(s.case.parts):
            yield block.dout_full[steps.dout.stage].done(steps.dout.phase)
            reads.append(steps.of_dout(own, part))
            steps.dout.advance()
        pending = products.issue(w, reads)
        if not s.rules.dout_until_dv:
            release_dout()

    def release_dout() -> None:
        for stage in steps.dout.last(s.case.parts) if leader else ():
            s.release(block, "dout_empty", stage)

    def finish_dv() -> Role:
        yield products.done(pending)
        if pending and s.rules.dout_until_dv:
            release_dout()

    yield from steps.next()
    if steps.more:
        yield block.k_full.done(0)
        yield products.done(issue_s())
    while steps.more:
        own = steps.step
        if s.case.halves:
            assert isinstance(own, int)
            if s.rules.s_after_dp:
                yield block.dp_part[1][w].done(own - 1)
            yield from add_twin(s, block, w, "s", own)
        expect([steps.rows()])
        if leader:
            s.release(block, "q_empty", steps.q.stage)
        if s.case.overlap == "dv":
            yield from finish_dv()
        else:
            yield from issue_dv(own)
        if s.rules.wait_for_place:
            yield block.ds_empty[buffer.stage].done(buffer.phase - 1)
        block.ds[buffer.stage][w] = ("P", own)
        if leader or s.rules.all_probabilities:
            block.p_full[buffer.stage].arrive()
        buffer.advance()
        if s.case.overlap != "dv":
            yield from finish_dv()
        steps.q.advance()
        yield from steps.next()
        following = issue_s()
        if s.case.overlap == "dv":
            yield from issue_dv(own)
        yield products.done(following)
    yield products.done(pending)
    if s.rules.dv_behind_dp:
        (last,) = buffer.last(1)
        yield block.ds_empty[last].done(buffer.phase - (buffer.stage == 0))
    yield from out(block.dout, w, named)


def keys(s: Cluster, block: Block, w: int, products: Products, named: Named) -> Role:
    """``cluster/_keys.cu.j2``."""
    leader, steps, buffer = w == 0, Steps(s, block), Place(2)
    other = s.pair(block)[1 - block.rank]

    def issue_dp() -> Role:
        reads: list[Read] = [(block.v, "V")] if steps.more else []
        for part in range(s.case.parts):
            if steps.more:
                yield block.dout_full[steps.dout.stage].done(steps.dout.phase)
                reads.append(steps.of_dout(steps.step, part))
            steps.dout.advance()
        if steps.more and not s.rules.dout_until_dp:
            release_dout()
        yield products.done(products.issue(w, reads))

    def release_dout() -> None:
        for stage in steps.dout.last(s.case.parts) if leader else ():
            s.release(block, "dout_empty", stage)

    yield from steps.next()
    if steps.more:
        yield block.v_full.done(0)
        yield from issue_dp()
    while steps.more:
        own = steps.step
        if s.rules.dout_until_dp:
            release_dout()
        if s.case.halves:
            assert isinstance(own, int)
            if s.rules.dp_after_s:
                yield block.s_part[1][w].done(own)
            yield from add_twin(s, block, w, "dp", own)
        if leader and not s.rules.q_until_dk:
            s.release(block, "q_empty", steps.q.stage)
        yield block.p_full[buffer.stage].done(buffer.phase)
        expect([([block.ds[buffer.stage][w]], ("P", own)), steps.rows()])
        yield lambda: True
        block.ds[buffer.stage][w] = ("dS", own)
        dk = products.issue(w, [steps.of_q()])
        if s.rules.meet_before_ds:
            yield from named.sync()
        if leader:
            block.ds_steps[buffer.stage][0] = own
            block.ds_full[buffer.stage].arrive()
            source = [(block.ds[buffer.stage], ("dS", own))]
            s.copy(other.other_ds[buffer.stage], 0, own, other.other_ds_full[buffer.stage], source)
        buffer.advance()
        yield products.done(dk)
        if leader and s.rules.q_until_dk:
            s.release(block, "q_empty", steps.q.stage)
        steps.q.advance()
        yield from steps.next()
        yield from issue_dp()
    if s.rules.end_waits_its_turn:
        yield block.ds_empty[buffer.stage].done(buffer.phase - 1)
    if leader:
        block.ds_steps[buffer.stage][0] = END
        block.ds_full[buffer.stage].arrive()
    yield from out(block.q[:1], w, named)


def queries(s: Cluster, block: Block, w: int, products: Products, named: Named) -> Role:
    """``cluster/_queries.cu.j2``."""
    leader, buffer = w == 0, Place(2)
    for step in range(s.case.steps + 1):
        yield block.ds_full[buffer.stage].done(buffer.phase)
        expect([(block.sums[step % len(block.sums)], step if step < s.case.steps else END)])
        if step == s.case.steps:
            break
        if leader:
            block.other_ds_full[buffer.stage].arrive(announced=1)
        if step == 0:
            yield block.k_full.done(0)
            yield block.other_k_full.done(0)
        products.issue(w, [(block.ds[buffer.stage], ("dS", step)), (block.k, "K")])
        if s.rules.wait_for_landing:
            yield block.other_ds_full[buffer.stage].done(buffer.phase)
        reads: list[Read] = [(block.other_ds[buffer.stage], step), (block.other_k, "other K")]
        yield products.done(products.issue(w, reads))
        for to in (s.pair(block) if s.rules.taken_by_both else [block]) if leader else ():
            to.ds_empty[buffer.stage].arrive()
        if s.case.ordered:
            if s.rules.wait_for_turn:
                yield block.turn.done(step)
            if block.turns != step + 1:
                raise ProtocolError(f"added dQ of step {step} in turn {block.turns - 1}")
            block.additions[w] += 1
            if leader or s.rules.told_when_added:
                block.added.arrive()
        buffer.advance()


def turns(s: Cluster, block: Block) -> Role:
    """``cluster/_turns.cu.j2``: others, who add before, are long done or take their time."""
    for step in range(s.case.steps):
        for _ in range(s.random.choice((1, 1, 5, 50))):
            yield lambda: True
        block.turns += 1
        block.turn.arrive()
        if s.rules.one_turn_at_a_time:
            yield block.added.done(step)
            if min(block.additions) <= step:
                raise ProtocolError(f"told of step {step} before all was added")


def tensor_adder(s: Cluster, block: Block) -> Role:
    """``backward/_tensor_adder.cu.j2``, of a block."""
    buffer = Place(2)
    for step in [*range(s.case.steps), END]:
        yield block.ds_full[buffer.stage].done(buffer.phase)
        expect([(block.ds_steps[buffer.stage], step)])
        if step == END:
            break
        for _ in range(s.random.choice((1, 1, 5, 50))):
            expect([(block.ds_steps[buffer.stage], step), (block.ds[buffer.stage], ("dS", step))])
            yield lambda: True
        if s.rules.taken_by_reader:
            block.ds_empty[buffer.stage].arrive()
        buffer.advance()


def out(region: list[list[object]], w: int, named: Named) -> Role:
    """``store_rows``: through memory that held other things; a warp writes some rows, and reads some of all."""
    for stage in region:
        stage[:] = ["rows"] * len(stage)
    yield from named.sync()
    expect([(stage, "rows") for stage in region])
