"""The plan of a warp-specialized Hopper kernel in words and numbers: roles, registers, memory, barriers, loop, floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attngen.plan.floors import MEMORY_PER_CLOCK, MULTIPROCESSORS, RATES, ROWS, Floor, Product, floor
from attngen.plan.model import Hopper, Plan

if TYPE_CHECKING:
    from attngen.tools.visits import Visits

_WARPGROUP = 128  # threads


@dataclass(frozen=True, slots=True)
class Registers:
    """Registers per thread of each role, and how a consumer uses its own. ``others`` is what S, P and O leave."""

    producer: int
    consumer: int
    s: int
    p: int
    o: int
    others: int
    threads: int
    launch: int  # per thread, before roles give up and take
    pool: int  # of the launch
    used: int  # of all roles


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier in shared memory (``count`` of them) or, if ``named``, one of the hardware's for each consumer."""

    name: str
    count: int
    arrivals: int  # threads or warps that arrive in each phase; threads of a named barrier
    named: bool
    guards: str


@dataclass(frozen=True, slots=True)
class HopperExplanation:
    """Everything that ``attngen explain`` says of a Hopper kernel beside what it says of any."""

    plan: Plan
    hopper: Hopper
    registers: Registers
    barriers: tuple[Barrier, ...]
    floor: Floor

    @classmethod
    def of(cls, plan: Plan) -> HopperExplanation | None:
        """Return the explanation of a plan, or None if the plan has no roles."""
        if plan.hopper is None:
            return None
        barriers = tuple(_barriers(plan, plan.hopper))
        return cls(plan, plan.hopper, _registers(plan, plan.hopper), barriers, floor(plan))

    def to_dict(self, visits: Sequence[Visits]) -> dict[str, Any]:
        """Return it as ``attngen explain --json`` prints it; clocks are those of one multiprocessor."""
        hopper, low = self.hopper, self.floor
        return {
            "roles": {
                "consumers": hopper.consumers,
                "rows": ROWS,
                "scheduler_warp": 4 * hopper.consumers,
                "loader_warp": 4 * hopper.consumers + 1,
                "schedule": hopper.schedule,
                "overlap": hopper.overlap,
                "persistent": hopper.persistent,
                "lookahead": hopper.lookahead if hopper.persistent else None,
                "skips": hopper.skips,
            },
            "registers": asdict(self.registers),
            "barriers": [asdict(barrier) for barrier in self.barriers],
            "loop": dict(self.loop()),
            "floor": {
                "rates": [asdict(rate) for rate in RATES],
                "qk": {**asdict(low.qk), "clocks": low.qk.clocks},
                "pv": {**asdict(low.pv), "clocks": low.pv.clocks},
                "consumer": {**low.parts, "step": low.clocks},
                "block": {name: low.consumers * clocks for name, clocks in low.parts.items()} | {"step": low.block},
                "bound_by": list(low.binding),
                "exponentials": low.exponentials,
                "shared_bytes": low.shared_reads,
                "loaded_bytes": low.loaded,
                "uncached_clocks": low.uncached,
                "cached_share": low.cached_share,
                "tile_bytes": low.tile,
                "tile_clocks": low.tile_memory,
                "calls": [_call(self.plan, low, found) for found in visits],
            },
        }

    def regions(self) -> list[dict[str, Any]]:
        """Return the map of shared memory: name, offset and size in bytes, and what it holds."""
        return [{**asdict(region), "holds": _holds(self.plan, region.name)} for region in self.hopper.shared]

    def facts(self) -> dict[str, list[str]]:
        """Return lines by label, for people."""
        total, limit = self.hopper.shared_bytes, self.plan.arch.shared_memory
        regions = self.regions()
        return {
            "roles": list(_roles(self.hopper)),
            "registers": self._registers(),
            "shared memory": [
                f"{total} B of {limit} B; offset, bytes and what is there:",
                *(f"{r['offset']:6d} {r['bytes']:6d}  {r['name']:10s} {r['holds']}" for r in regions),
            ],
            "barriers": [_barrier(barrier, self.hopper.consumers) for barrier in self.barriers],
            "steps": [f"{name:10s} {text}" for name, text in self.loop()],
        }

    def grid(self, section: str) -> str:
        """Say which block does what; ``section`` says in which order."""
        tiles = f"ceil(seqlen_q / {self.plan.tile_m}) x heads x batch"
        if not self.hopper.persistent:
            return f"{tiles} blocks, one for each tile of work; {section}"
        return (
            f"persistent: a block for each multiprocessor, if there are as many of {tiles} tiles of work; each block "
            f"takes the next from a counter until none is left, longest first; {section}"
        )

    def loop(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of a consumer's loop over keys, in order."""
        hopper, plan = self.hopper, self.plan
        turn, passed = ("take the turn, ", ", pass the turn") if hopper.pingpong else ("", "")
        softmax = _SOFTMAX[plan.softmax].format(above=hopper.redo_above, growth=hopper.redo_growth.rstrip("f"))
        yield "order", "tiles of keys from the last to the first"
        yield "first tile", f"{turn}QK(0){passed}, wait; maximum and exponentials make P(0)"
        if hopper.overlap:
            yield "step j", f"{turn}QK(j), PV(j-1){passed}, wait for S(j), logits, wait for O; {softmax}"
        else:
            yield "step j", f"{turn}QK(j), wait for S(j), PV(j-1){passed}, wait for O, logits; {softmax}"
        yield "masks", _masks(plan)
        if hopper.skips:
            yield (
                "skips",
                "a consumer passes over tiles that only other consumers see, up to "
                + (f"{plan.stages - 1} while it holds V of the last one that it saw"),
            )
        else:
            yield "skips", "none: every consumer multiplies every tile of the block"
        if hopper.persistent:
            yield (
                "boundary",
                "PV(last) and QK(0) of the next tile of work go out together; O is written under the latter",
            )
        else:
            yield "boundary", "PV(last), then O is written: a block has one tile of work"

    def floor_lines(self, visits: Sequence[Visits]) -> Iterator[str]:
        """Yield the lines of the floor: its arithmetic, what binds, and whole calls."""
        low, tile_n = self.floor, self.plan.tile_n
        detail = {
            "products": f"QK {_product(low.qk)}; PV {_product(low.pv)}",
            "exponentials": f"{ROWS} x {tile_n} at 16 per clock",
            "shared memory": f"Q, K and V as operands: {low.shared_reads} B at 128 B per clock",
        }
        yield f"floor of a step, in clocks: a consumer ({ROWS} queries x {tile_n} keys), and the block that shares one chip"
        for name, clocks in low.parts.items():
            yield f"  {name:14s} {clocks:5d} {low.consumers * clocks:6d}  {detail[name]}"
        names = " and ".join(low.binding)
        yield f"  {'bound by':14s} {low.clocks:5d} {low.block:6d}  {names}"
        rate = f"{float(MEMORY_PER_CLOCK):.1f} B per clock"
        yield f"  {'K and V':14s} {'':5s} {low.uncached:6d}  {low.loaded} B at {rate} if all of it came from HBM"
        if low.cached_share:
            yield f"  {'':27s} so HBM binds unless L2 holds {100 * low.cached_share:.0f} % of it"
        yield f"floor of a tile of work of n steps: n x {low.block} clk, at least {low.tile_memory} clk for " + (
            f"{low.tile} B of Q and O"
        )
        for found in visits:
            call = _call(self.plan, low, found)
            yield f"  seqlen {found.seqlen:6d}: {call['steps']} steps of a head, {call['clocks']} clk; " + (
                f"{call['us']:.2f} us over {MULTIPROCESSORS.value} multiprocessors, at most {call['tflops']:.0f} TFLOP/s"
            )
        yield "rates: " + "; ".join(f"{rate.name} {rate.value:.6g} {rate.unit} ({rate.source})" for rate in RATES)

    def _registers(self) -> list[str]:
        r, consumers = self.registers, self.hopper.consumers
        rest = (
            f"{r.others} left for addresses, references and sums" if r.others >= 0 else f"{-r.others} too few: spills"
        )
        return [
            f"a consumer's thread {r.consumer}: S {r.s} + P {r.p} + O {r.o} = {r.s + r.p + r.o}, {rest}",
            f"a producer's thread {r.producer}",
            f"in all {_WARPGROUP} threads x ({r.producer} + {consumers} x {r.consumer}) = {r.used} of the launch's "
            f"{r.threads} threads x {r.launch} = {r.pool}",
        ]


_SOFTMAX = {
    "fixed_reference": "exponentials make P(j) from the old reference; again from a new maximum, with O rescaled, if a "
    "lane's sum exceeds {above} or {growth} times what was there before",
    "lazy": "maximum; O is rescaled only if a maximum grew by 2^8; exponentials make P(j)",
    "exact_max": "maximum, O is rescaled, exponentials make P(j)",
}


def _registers(plan: Plan, hopper: Hopper) -> Registers:
    launch = min(plan.arch.registers // plan.threads // 8 * 8, 256)
    s, p, o = plan.tile_n // 2, plan.tile_n // 4, plan.columns_v[0].width // 2
    producer, consumer = hopper.producer_registers, hopper.consumer_registers
    return Registers(
        producer=producer,
        consumer=consumer,
        s=s,
        p=p,
        o=o,
        others=consumer - s - p - o,
        threads=plan.threads,
        launch=launch,
        pool=plan.threads * launch,
        used=_WARPGROUP * (producer + hopper.consumers * consumer),
    )


def _barriers(plan: Plan, hopper: Hopper) -> Iterator[Barrier]:
    """Yield the barriers with their arrivals, as ``forward.cu.j2`` initializes them."""
    consumers = hopper.consumers
    sizes = {region.name: region.bytes // 8 for region in hopper.shared}
    scheduler = consumers + 1 if plan.driver == "ranges" else 1
    for name, arrivals, guards in (
        ("q_full", 1, "a tile of Q has landed (the loader, and its bytes)"),
        ("q_empty", consumers, "consumers have multiplied a tile of Q for the last time"),
        ("k_full", 1, "a tile of K has landed, and what each consumer does with it is written"),
        ("k_empty", consumers, "consumers are done with a tile of K"),
        ("v_full", 1, "a tile of V has landed"),
        ("v_empty", consumers, "consumers are done with a tile of V"),
        ("work_full", scheduler, "the record of a tile of work is written"),
        ("work_empty", consumers, "consumers have read a record"),
        ("work_asked", 1, "the loader nears the end of a tile: the scheduler may take the next one"),
    ):
        if name in sizes:
            yield Barrier(name, sizes[name], arrivals, named=False, guards=guards)
    together = "threads of a consumer wait for each other around records and O"
    yield Barrier("group", consumers, _WARPGROUP, named=True, guards=together)
    if hopper.pingpong:
        turns = "turns at the tensor cores: a consumer waits, the one before it arrives"
        yield Barrier("turn", consumers, 2 * _WARPGROUP, named=True, guards=turns)


def _barrier(barrier: Barrier, consumers: int) -> str:
    who = (
        f"{barrier.arrivals} threads" if barrier.named else f"{barrier.arrivals} arrival{'s' * (barrier.arrivals > 1)}"
    )
    return f"{barrier.name:10s} {barrier.count} x {who:11s}  {barrier.guards}" + (" (named)" if barrier.named else "")


def _roles(hopper: Hopper) -> Iterator[str]:
    first = 4 * hopper.consumers
    each = "consumer" if hopper.consumers == 1 else "consumers"
    yield f"{hopper.consumers} {each} of {ROWS} query rows, a warpgroup each: products, softmax and output"
    yield f"producer: warp {first} is the scheduler of tiles of work, warp {first + 1} the loader of Q, K and V by TMA"
    if hopper.pingpong:
        yield "ping-pong: consumers take turns at the tensor cores, one's softmax runs under the products of another"
    else:
        yield "cooperative: consumers issue their products whenever they are ready"
    if hopper.overlap:
        yield "overlap: PV of a step runs under the logits of the next"
    else:
        yield "no overlap: a consumer waits for all its products before its softmax"
    if hopper.persistent:
        yield f"persistent; the next tile of work is taken when {hopper.lookahead} steps of a tile are left to load"
    else:
        yield "not persistent: one tile of work per block"


def _masks(plan: Plan) -> str:
    score = "; others compute only the score" if plan.variant.score is not None else ""
    if not plan.variant.masked:
        return f"only on a ragged last tile of keys{score}"
    who = "a consumer's rows" if plan.driver == "ranges" else "the block's rows"
    return f"only on tiles that {who} see in part{score}"


def _holds(plan: Plan, region: str) -> str:
    """Say what a region of shared memory holds."""
    hopper = plan.hopper
    assert hopper is not None
    width_qk, width_v = plan.columns_qk[0].width, plan.columns_v[0].width
    tiles = "1 tile" if hopper.q_stages == 1 else f"{hopper.q_stages} tiles"
    parts = "" if hopper.out_columns == width_v else f", {width_v // hopper.out_columns} parts in turn"
    return {
        "q": f"Q: {tiles} of {plan.tile_m} x {width_qk}",
        "k": f"K: {plan.stages} stages of {plan.tile_n} x {width_qk}",
        "v": f"V: {plan.stages} stages of {plan.tile_n} x {width_v}",
        "out": f"O on its way out: {plan.tile_m} x {hopper.out_columns}{parts}",
        "work": "records of two tiles of work: place, and ranges of KV tiles",
        "tile_info": "number of the tile in each stage of K, and who needs the mask",
    }.get(region, "barriers, 8 B each")


def _product(product: Product) -> str:
    return f"{product.clocks} = {product.count} x m64n{product.n}k16 of {product.n // 2}"


def _call(plan: Plan, low: Floor, found: Visits) -> dict[str, int | float]:
    """Return the floor of one head among many: its steps, their clocks, time, and visible FLOP by it."""
    steps, tiles = found.full + found.partial, -(-found.seqlen // plan.tile_m)
    seconds = low.seconds(steps, tiles)
    flops = 2 * found.visible_pairs * (plan.head_dim_qk + plan.head_dim_v)
    return {
        "seqlen": found.seqlen,
        "steps": steps,
        "clocks": low.call(steps, tiles),
        "us": 1e6 * seconds,
        "tflops": flops / seconds / 1e12,
    }
