"""A model of the barriers of the CUDA backward, as ``forward_protocol`` has one of the forward.

Roles follow ``_gradient_loader``, ``_gradient_adder`` and ``_gradient_consumer`` with ``_gradient_steps``,
``_gradient_steps_overlap`` or ``_gradient_steps_pingpong``, line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from tests.plan import declared
from tests.plan.simulation import WARPS, Place, ProtocolError, Ring, Role, Simulation, barriers, named

CONSUMERS = 2
SUMS = 8

#: Events that come instead of a step.
END_OF_TILE, END_OF_ALL = "end of tile", "end of all"


@dataclass(frozen=True)
class Rules:
    """The rules that keep the protocol alive. The templates obey all of them."""

    wait_for_adder: bool = True  # the last dQ of a work tile was taken before dV goes to its place
    meet_before_dq: bool = True  # dS of both consumers is complete before either multiplies it
    phase_of_both: bool = True  # where consumers take turns: the buffers of dS are waited for in phases of their own
    two_buffers: bool = True  # dS of a step lies elsewhere than that of the step before
    meet_after_rows: bool = True  # dK has left the place of dS before the next work tile writes there
    keys_until_products: bool = True  # K and V are released when all products are complete
    release_end: bool = True  # the end of a tile takes a stage of Q, and gives it back
    all_see_the_end: bool = True  # before that, lest a slow warp waits for a phase that is long over
    unused_before_turn: bool = True  # all warps know that dO which they do not need has landed before it is given back
    warps_release_biases: bool = True  # each for itself, when it has read them
    biases_of_steps: bool = True  # consumers wait for biases of steps alone, not for any after the last one
    wait_for_reader: bool = True  # a warp that reads dS has done so before the step after the next one writes there
    reader_before_rows: bool = True  # and before dK goes to that place
    rows_in_next: bool = True  # consumers that take turns store dK and dV through the dS that comes next
    adder_before_end: bool = True  # and wait for their last dQ to leave before they tell that there is no more
    mark_before_end: bool = True  # where the order of sums is fixed: consumers learn of the end when the adder may, too


@dataclass(frozen=True)
class Case:
    """A block's work: the steps of each tile of keys."""

    works: tuple[int, ...]
    q_stages: int
    stages: int
    overlap: str
    bias_stages: int = 0  # of each consumer, whose biases come after dO; 0: none
    hidden: frozenset[tuple[int, int, int]] = frozenset()  # consumer, tile of keys, step: where its keys are not seen
    reads_ds: bool = False  # a warp adds up tiles of dS

    @classmethod
    def random(cls, random: Random) -> Case:
        """Return any case that the plan allows."""
        works = tuple(random.choice((0, 0, 1, 1, 2, 3, 5)) for _ in range(random.randint(1, 12)))
        overlap = random.choice(("pingpong", "gradients", "dk", "nothing"))
        steps = [(c, work, step) for c in range(CONSUMERS) for work, count in enumerate(works) for step in range(count)]
        hidden = [each for each in steps if overlap == "pingpong" and random.random() < 0.3]
        stages = random.randint(2 if overlap == "pingpong" else 1, 3)
        return cls(
            works,
            random.randint(2, 3),
            stages,
            overlap,
            random.choice((0, 1, 2)),
            frozenset(hidden),
            random.random() < 0.5,
        )


class Backward(Simulation):
    """A block of the kernel of all products."""

    def __init__(self, case: Case, rules: Rules, random: Random) -> None:
        super().__init__(random)
        self.case, self.rules = case, rules
        pipes = declared.backward(
            case.q_stages, case.stages, WARPS, case.overlap, case.bias_stages, reads_ds=case.reads_ds,
        )  # fmt: skip
        self.q, self.dout = (Ring(pipes.ring(name)) for name in ("q", "dout"))
        self.keys = {name: Ring(pipes.ring(name)) for name in (("k", "v") if case.overlap == "pingpong" else ("kv",))}
        if case.bias_stages:
            self.biases = Ring(pipes.ring("biases"))
            if not rules.warps_release_biases:
                for barrier in self.biases.empty:
                    barrier.count = 1
        self.steps: list[object] = [None] * case.q_stages
        self.works: list[int | None] = [None, None]
        self.work_empty = barriers(pipes.ring("work").empty, 2)
        self.sums: list[object] = [None] * SUMS
        self.last = [False] * SUMS  # whether that is the last step of its work tile
        dq = pipes.ring("dq")
        self.dq_full, self.dq_empty = barriers(dq.full, dq.stages), barriers(dq.empty, dq.stages)
        self.dq: list[object] = [None] * CONSUMERS
        self.ds: list[list[object]] = [[None] * CONSUMERS for _ in range(2)]  # by buffer and consumer
        self.ds_full, self.ds_empty = (barriers(side, 2) for side in (pipes.ring("ds").full, pipes.ring("ds").empty))
        self.ds_step: list[object] = [None] * 2
        self.turn, self.group = named(pipes, "pingpong"), named(pipes, "group")
        (self.all,) = named(pipes, "all")
        self.roles = {"loader": loader(self), "adder": adder(self)}
        if case.reads_ds:
            self.roles["tensor adder"] = tensor_adder(self)
        self.roles |= {f"warp {c}.{w}": consumer(self, c, w) for c in range(CONSUMERS) for w in range(WARPS)}


def loader(s: Backward) -> Role:
    """``backward/_loader.cu.j2``."""
    case: Case = s.case  # type: ignore[assignment]
    rules: Rules = s.rules  # type: ignore[assignment]
    q, dout, keys = Place(s.q), Place(s.dout), {name: Place(ring) for name, ring in s.keys.items()}
    biases = [Place(s.biases, c) for c in range(CONSUMERS)] if case.bias_stages else []
    slot = work_phase = count = 0

    def tell(what: str) -> Role:
        yield q.empty()
        s.steps[q.stage] = what
        for _ in range(3):
            s.q.full[q.stage].arrive()
        q.advance()

    for work, steps in enumerate(case.works):
        yield s.work_empty[slot].done(work_phase ^ 1)
        s.works[slot] = work
        slot ^= 1
        work_phase ^= slot == 0
        for step in range(steps):
            yield q.empty()
            s.steps[q.stage] = (work, step)
            s.sums[count % SUMS], s.last[count % SUMS] = (work, step), False
            count += 1
            s.copy(q, (work, step))
            if step == 0:
                for name in sorted(keys, reverse=True):
                    yield keys[name].empty()
                    s.copy(keys[name], work)
                    keys[name].advance()
            early = case.overlap == "pingpong" and case.q_stages <= case.stages
            for what in ("dout", "rows") if early else ("rows", "dout"):
                if what == "rows":
                    yield lambda: True
                    s.q.full[q.stage].arrive()
                else:
                    yield dout.empty()
                    s.copy(dout, (work, step))
            for c, place in enumerate(biases):
                if (c, work, step) not in case.hidden:
                    yield place.empty()
                    s.copy(place, (work, step))
                    place.advance(CONSUMERS)
            q.advance()
            dout.advance()
        if steps and rules.mark_before_end:
            s.last[(count - 1) % SUMS] = True
        yield from tell(END_OF_TILE)
        if steps and not rules.mark_before_end:
            yield lambda: True
            s.last[(count - 1) % SUMS] = True
    s.sums[count % SUMS] = END_OF_ALL
    yield from tell(END_OF_ALL)


def adder(s: Backward) -> Role:
    """``backward/_adder.cu.j2``."""
    case: Case = s.case  # type: ignore[assignment]
    phase = 0
    expected = [(work, step) for work, steps in enumerate(case.works) for step in range(steps)]
    for count, wanted in enumerate([*expected, END_OF_ALL]):
        yield s.dq_full[0].done(phase)
        if s.sums[count % SUMS] != wanted:
            raise ProtocolError(f"the adder read {s.sums[count % SUMS]} for {wanted}")
        if wanted == END_OF_ALL:
            return
        if s.last[count % SUMS] != (count + 1 == len(expected) or expected[count + 1][0] != expected[count][0]):
            raise ProtocolError(f"the adder read another end after {wanted}")
        for c in range(CONSUMERS):
            yield s.dq_full[c].done(phase)
            yield lambda: True  # the copy reads it later
            if s.dq[c] != wanted:
                raise ProtocolError(f"added {s.dq[c]} for {wanted}")
        for c in range(CONSUMERS):
            s.dq_empty[c].arrive()
        phase ^= 1


def tensor_adder(s: Backward) -> Role:
    """``backward/_tensor_adder.cu.j2``."""
    case: Case = s.case  # type: ignore[assignment]
    buffer, phase = 1, 0
    expected = [(work, step) for work, steps in enumerate(case.works) for step in range(steps)]
    for wanted in (*expected, END_OF_ALL):
        yield s.ds_full[buffer].done(phase)
        for _ in range(3):
            if s.ds_step[buffer] != wanted:
                raise ProtocolError(f"read {s.ds_step[buffer]} where {wanted} should be")
            if wanted == END_OF_ALL:
                return
            if s.ds[buffer] != [wanted] * CONSUMERS:
                raise ProtocolError(f"read {s.ds[buffer]} where dS of {wanted} should be")
            yield lambda: True
        s.ds_empty[buffer].arrive()
        phase ^= buffer ^ 1
        buffer ^= 1


def consumer(s: Backward, c: int, w: int) -> Role:
    """``backward/_consumer.cu.j2``: one warp of a consumer."""
    case: Case = s.case  # type: ignore[assignment]
    rules: Rules = s.rules  # type: ignore[assignment]
    leader = w == 0
    apart = case.overlap == "pingpong"  # each stores its gradients without meeting the other one
    q, dout, keys = Place(s.q), Place(s.dout), {name: Place(ring) for name, ring in s.keys.items()}
    k, v = (keys["k"], keys["v"]) if apart else (keys["kv"], keys["kv"])
    biases = Place(s.biases, c) if case.bias_stages else None
    slot = buffer = dq_phase = ds_phase = 0
    work = -1
    step: object = None

    Read = tuple[list[object], int, object]

    def of(place: Place, wanted: object) -> Read:
        return place.ring.holds, place.stage, wanted

    def expect(reads: Iterable[Read]) -> None:
        for where, index, wanted in reads if leader else ():
            if where[index] != wanted:
                raise ProtocolError(f"read {where[index]} where {wanted} should be")

    def issue(*reads: Read) -> Role:
        yield from s.group[c].sync()
        expect(reads)

    def complete(*reads: Read) -> Role:
        yield lambda: True
        expect(reads)

    def next_step() -> Role:
        nonlocal step
        yield q.full()
        step = s.steps[q.stage]

    def exponentiate(own: object) -> Role:
        """``_exponentiate.cu.j2``."""
        if biases is not None and (own not in (END_OF_TILE, END_OF_ALL) or not rules.biases_of_steps):
            yield biases.full()
            biases.expect(own)
            yield lambda: True
            biases.expect(own)
            if leader or rules.warps_release_biases:
                biases.release()
            biases.advance(CONSUMERS)

    def sync_consumers() -> Role:
        yield from s.all.sync()

    def store_ds(own: object) -> Role:
        nonlocal buffer, ds_phase
        buffer ^= rules.two_buffers
        if case.reads_ds:
            yield from begin_ds(own)
        if leader:
            s.ds[buffer][c] = own
        yield lambda: True
        if case.reads_ds and case.overlap != "pingpong":
            s.ds_full[buffer].arrive()
            ds_phase ^= buffer ^ 1

    def begin_ds(own: object) -> Role:
        if rules.wait_for_reader:
            yield s.ds_empty[buffer].done(ds_phase ^ 1)
        if leader and c == 0:
            s.ds_step[buffer] = own

    def store_dq(own: object) -> Role:
        nonlocal dq_phase
        yield s.dq_empty[c].done(dq_phase ^ 1)
        dq_phase ^= 1
        if leader:
            s.dq[c] = own
        s.dq_full[c].arrive()

    def release_dout() -> None:
        if leader:
            dout.release()
        dout.advance()

    def product(kind: str, at: tuple[Place, Place, int], own: object) -> tuple[Read, ...]:
        """Memory that a product of a step reads."""
        q_at, dout_at, ds_at = at
        of_k, of_v = of(k, own[0]), of(v, own[0])  # type: ignore[index]
        both = tuple((s.ds[ds_at], other, own) for other in range(CONSUMERS))
        return {
            "s": (of_k, of(q_at, own)), "dp": (of_v, of(dout_at, own)), "dv": (of(dout_at, own),),
            "dk": ((s.ds[ds_at], c, own), of(q_at, own)), "dq": (of_k, *both),
        }[kind]  # fmt: skip

    def overlapping() -> Role:
        """``backward/_steps_overlap.cu.j2``."""
        own = step
        yield from issue(*product("s", (q, dout, buffer), own))
        yield from complete(*product("s", (q, dout, buffer), own))
        yield from exponentiate(own)
        pending: tuple[Read, ...] = ()
        before: Place | None = None
        while own not in (END_OF_TILE, END_OF_ALL):
            yield dout.full()
            here = dout.copy()
            yield from issue(*product("dp", (q, here, buffer), own))
            yield from complete(*pending)
            if leader and before is not None:
                before.release()
            yield from issue(*product("dv", (q, here, buffer), own))
            yield from complete(*product("dp", (q, here, buffer), own))
            yield from store_ds(own)
            before = q.copy()
            q.advance()
            yield from next_step()
            following = step
            more = following not in (END_OF_TILE, END_OF_ALL)
            # after the last step S of whatever is there
            yield from issue(*product("s", (q, here, buffer), following) if more else ())
            yield from complete(*product("dv", (q, here, buffer), own))
            release_dout()
            if rules.meet_before_dq:
                yield from sync_consumers()
            reads = product("dq", (before, here, buffer), own)
            pending = product("dk", (before, here, buffer), own)
            yield from issue(*reads)
            yield from issue(*pending)
            of_next = product("s", (q, here, buffer), following) if more else ()
            if case.overlap == "gradients":  # the softmax comes before dQ leaves, else after it
                yield from complete(*of_next)
                yield from exponentiate(following)
            yield from complete(*reads)
            yield from store_dq(own)
            if case.overlap == "dk":
                yield from complete(*of_next)
                yield from exponentiate(following)
            own = following
        yield from complete(*pending)
        assert before is not None
        if leader:
            before.release()

    def plain() -> Role:
        """``backward/_steps.cu.j2``."""
        own = step
        yield from issue(*product("s", (q, dout, buffer), own))
        yield from complete(*product("s", (q, dout, buffer), own))
        yield from exponentiate(own)
        yield dout.full()
        yield from issue(*product("dp", (q, dout, buffer), own))
        yield from issue(*product("dv", (q, dout, buffer), own))
        yield from complete(*product("dp", (q, dout, buffer), own))
        more = True
        while more:
            here = dout.copy()
            yield from store_ds(own)
            if rules.meet_before_dq:
                yield from sync_consumers()
            used = q.copy()
            reads = product("dq", (used, here, buffer), own)
            last = product("dk", (used, here, buffer), own)
            yield from issue(*reads)
            yield from issue(*last)
            yield from complete(*product("dv", (used, here, buffer), own))
            q.advance()
            yield from next_step()
            following = step
            more = following not in (END_OF_TILE, END_OF_ALL)
            if more:
                release_dout()
            # after the last step the products of whatever is there, with probabilities of 0
            s_reads, dp_reads, dv_reads = (
                product(kind, (q, dout, buffer), following) if more else () for kind in ("s", "dp", "dv")
            )
            yield from issue(*s_reads)
            yield from complete(*reads)
            yield from store_dq(own)
            yield from complete(*last)
            yield from complete(*s_reads)
            if leader:
                used.release()
            yield from exponentiate(following)
            if more:
                yield dout.full()
            yield from issue(*dp_reads)
            yield from issue(*dv_reads)
            yield from complete(*dp_reads)
            own = following
        release_dout()

    def in_turns() -> Role:
        """``backward/_steps_pingpong.cu.j2``."""

        def pingpong_arrive() -> None:
            s.turn[1 - c].arrive()

        def multiply_dq(own: object) -> Role:
            nonlocal ds_phase
            if rules.meet_before_dq:
                yield s.ds_full[buffer].done(ds_phase)
            ds_phase ^= (buffer ^ 1) if rules.phase_of_both else buffer
            yield from issue(*product("dq", (q, dout, buffer), own))

        own = before = None
        buffer_before = buffer
        yield from s.turn[c].sync()
        more = True
        while more:
            own = step
            if (c, *own) in case.hidden:  # type: ignore[misc]
                pingpong_arrive()
                if before is not None:
                    buffer_before = buffer
                    yield from multiply_dq(before)
                yield from store_ds(own)
                if before is not None:
                    yield from complete(*product("dq", (q, dout, buffer_before), before))
                    yield from store_dq(before)
                s.ds_full[buffer].arrive()
                if rules.unused_before_turn:
                    yield dout.full()
                yield from s.turn[c].sync()
                if not rules.unused_before_turn:
                    yield dout.full()
                release_dout()
                used = q.copy()
                q.advance()
                yield from next_step()
                more = step not in (END_OF_TILE, END_OF_ALL)
                if leader:
                    used.release()
                before = own
                continue
            reads = product("s", (q, dout, buffer), own)
            yield from issue(*reads)
            yield dout.full()
            here = dout.copy()
            dp_reads = product("dp", (q, here, buffer), own)
            yield from issue(*dp_reads)
            yield from complete(*reads)
            pingpong_arrive()
            yield from exponentiate(own)
            if before is not None:
                buffer_before = buffer
                yield from multiply_dq(before)
            yield from complete(*dp_reads)
            yield from store_ds(own)
            if before is not None:
                yield from complete(*product("dq", (q, here, buffer_before), before))
                yield from store_dq(before)
            s.ds_full[buffer].arrive()
            yield from s.turn[c].sync()
            used = q.copy()
            reads = product("dv", (used, here, buffer), own)
            yield from issue(*reads)
            last = product("dk", (used, here, buffer), own)
            yield from issue(*last)
            yield from complete(*reads)
            release_dout()
            q.advance()
            yield from next_step()
            more = step not in (END_OF_TILE, END_OF_ALL)
            yield from complete(*last)
            if leader:
                used.release()
            before = own
        pingpong_arrive()
        if leader:
            v.release()
        v.advance()
        yield from multiply_dq(before)
        reads = product("dq", (q, dout, buffer), before)
        if not rules.keys_until_products and leader:
            k.release()
        yield from complete(*reads)
        yield from store_dq(before)
        if rules.keys_until_products and leader:
            k.release()
        k.advance()

    steps_of = {"pingpong": in_turns, "nothing": plain}.get(case.overlap, overlapping)
    if apart and c == 1:
        s.turn[0].arrive()
    while True:
        yield from next_step()
        if step == END_OF_ALL:
            break
        work += 1
        if step != END_OF_TILE:
            for place in keys.values():
                yield place.full()
            if apart:
                yield from in_turns()
            else:
                if not rules.keys_until_products and leader:
                    k.release()
                yield from steps_of()
                if rules.keys_until_products and leader:
                    k.release()
                k.advance()
        if leader and rules.release_end and not rules.all_see_the_end:
            q.release()
        if rules.wait_for_adder and not apart:
            yield s.dq_empty[c].done(dq_phase ^ 1)
        if case.reads_ds and rules.reader_before_rows:
            yield s.ds_empty[buffer ^ 1].done(ds_phase ^ 1)
            if not apart:
                yield s.ds_empty[buffer].done(ds_phase ^ buffer ^ 1)
        yield from s.group[c].sync() if apart else sync_consumers()
        if leader and rules.release_end and rules.all_see_the_end:
            q.release()
        q.advance()
        if s.works[slot] != work:
            raise ProtocolError(f"consumer {c} read work {s.works[slot]} for {work}")
        # the rows of dK take a buffer of dS of both, or all rows the consumer's own part of one
        places: list[tuple[list[object], int]] = [(s.ds[c], 0), (s.ds[c], 1), (s.dq, c)]
        if apart:
            places = [(s.ds[buffer ^ rules.rows_in_next], c)]
        for where, index in places if leader else ():
            where[index] = ("rows", work, c)
        yield from s.group[c].sync()
        yield from complete(*((where, index, ("rows", work, c)) for where, index in places))
        if rules.meet_after_rows:
            yield from s.group[c].sync() if apart else sync_consumers()
        if leader:
            s.work_empty[slot].arrive()
        slot ^= 1
    if case.overlap == "pingpong" and c == 0:
        yield from s.turn[0].sync()
    if case.reads_ds:
        buffer ^= 1
        yield from begin_ds(END_OF_ALL)
        yield lambda: True
        s.ds_full[buffer].arrive()
    if apart and rules.adder_before_end:
        yield s.dq_empty[c].done(dq_phase ^ 1)
    s.dq_full[c].arrive()
