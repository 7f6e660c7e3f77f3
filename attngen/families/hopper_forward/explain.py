"""A Hopper forward in CUDA in words and numbers: roles, registers, shared memory, loop, floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from attngen.families.hopper_forward.kinds import kind_of_plan
from attngen.families.hopper_forward.structure import HopperForward
from attngen.parts.explained.base import ScheduleExplanation
from attngen.parts.explained.floor import floor_dict
from attngen.parts.floors import ROWS, floor
from attngen.plan.model import Plan
from attngen.plan.operands import fragment_registers
from attngen.plan.pipes import Pipes

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
class HopperExplanation(ScheduleExplanation):
    """The explanation of a Hopper forward."""

    @property
    def structure(self) -> HopperForward:
        """The structure of the plan."""
        assert isinstance(self.plan.structure, HopperForward)
        return self.plan.structure

    @property
    def registers(self) -> Registers:
        """Registers of each role, and how a consumer uses its own."""
        return _registers(self.plan, self.structure)

    def to_dict(self) -> dict[str, Any]:
        """Return its entries of the JSON form."""
        structure, low = self.structure, self.floor
        assert low is not None
        entries = {
            "roles": {
                "consumers": structure.consumers,
                "rows": ROWS,
                **self._warps(),
                "schedule": structure.schedule,
                "overlap": structure.overlap,
                "persistent": structure.persistent,
                "sharing": structure.sharing,
                "lookahead": structure.lookahead if structure.persistent else None,
                "order": "longest_first" if structure.longest_first else "natural",
                "epilogue": "merged" if structure.shares else "staged" if structure.staged else "direct",
                "skips": structure.skips,
                "pack_gqa": self.plan.pack_gqa,
                "entries": structure.entries,
            },
            "registers": asdict(self.registers),
            "loop": dict(self.loop()),
            "floor": floor_dict(low, self.heads),
        }
        return {"hopper": entries}

    def holds(self, region: str) -> str:
        """Contents of a region of shared memory."""
        return _holds(self.plan, self.structure, region)

    def facts(self) -> dict[str, list[str]]:
        """Return lines by label, for people."""
        total, limit = self.structure.shared_bytes, self.plan.arch.shared_memory
        return {
            "roles": list(_roles(self.plan, self.structure)),
            "registers": self._registers(),
            "shared memory": [
                f"{total} B of {limit} B; offset, bytes and what is there:",
                *(f"{r.offset:6d} {r.bytes:6d}  {r.name:10s} {self.holds(r.name)}" for r in self.structure.shared),
            ],
            "steps": [f"{name:10s} {text}" for name, text in self.loop()],
            **({"scales": _scales(self.plan), "error": list(_ERROR)} if self.plan.descaled else {}),
        }

    def grid(self, side_by_side: str) -> str:
        """The work of each block; ``side_by_side`` describes the order."""
        rows, heads = ("seqlen_q x group", "kv_heads") if self.plan.pack_gqa else ("seqlen_q", "heads")
        batch = "batch" if self.structure.entries == 1 else f"groups of {self.structure.entries} batch entries"
        tiles = f"ceil({rows} / {self.plan.tile_m}) x {heads} x {batch}"
        order = f"longest first; {side_by_side}" if self.structure.longest_first else "head by head in natural order"
        if self.structure.from_first:
            order = f"longest first, from the first queries on; {side_by_side}"
        if self.structure.shares:
            return (
                f"a cluster of up to {self.structure.sharing} blocks for each of {tiles} work tiles, whose keys "
                f"they share, as many as should take the least time; {order}"
            )
        if not self.structure.persistent:
            return f"{tiles} blocks, one for each work tile, {order}"
        return (
            f"persistent: a block for each multiprocessor, if there are as many of {tiles} work tiles; each block "
            f"takes the next from a counter until none is left, {order}"
        )

    def loop(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of a consumer's loop over keys, in order."""
        structure = self.structure
        turn, passed = ("take the turn, ", ", pass the turn") if structure.pingpong else ("", "")
        end_aligned = ", which ends with the last key that is" if structure.end_aligned else ""
        if structure.nearest_first:
            first = "the tile of keys nearest to the rows, then the others"
        elif structure.whole_first:
            first = "the last tile of keys that all rows see, then the others"
        elif structure.map_rows:
            first = "steps of blocks that both consumers see, then those that one sees alone, each"
        else:
            first = "tiles of keys"
        yield "order", f"{first} from the last that is seen{end_aligned} to the first"
        kind = kind_of_plan(self.plan)
        yield "first tile", f"{turn}QK(0){passed}, wait; {kind.first_tile} P(0)"
        if structure.overlap:
            yield "step j", f"{turn}QK(j), PV(j-1){passed}, wait for S(j), logits, wait for O, softmax"
        else:
            yield "step j", f"{turn}QK(j), wait for S(j), PV(j-1){passed}, wait for O, logits, softmax"
        yield "softmax", kind.explain(structure)
        yield "masks", _masks(self.plan)
        if structure.map_rows:
            yield (
                "skips",
                "none: a consumer visits the blocks that its own rows see, in its own ring if it alone does",
            )
        elif structure.skips:
            held = f"up to {self.plan.stages - 1} while it holds V of the last that it saw"
            yield "skips", f"a consumer skips tiles that only other consumers see, {held}"
        else:
            yield "skips", "none: every consumer multiplies every tile of the block"
        if structure.persistent and structure.map_rows:
            yield (
                "boundary",
                "O is stored after PV(last), while the other consumers work; then comes QK(0) of the next work tile",
            )
        elif structure.persistent:
            yield "boundary", "PV(last) and QK(0) of the next work tile are issued together; O is stored under QK"
        elif structure.shares:
            yield "boundary", "after PV(last) the blocks of a cluster wait for each other, and add up their results"
        else:
            yield "boundary", "none: a block has one work tile, and writes O after PV(last)"
        yield "epilogue", _epilogue(self.plan, structure)

    def _warps(self) -> dict[str, int]:
        """The warp of each role of the producer."""
        if self.pipes is None:
            return {}
        by_name = {role.name: role.first for role in self.pipes.roles}
        of_q = by_name.get("query_loader", by_name["scheduler"])
        loader = by_name["loaders" if self.structure.map_rows else "loader"]
        return {"scheduler_warp": by_name["scheduler"], "loader_warp": loader, "query_loader_warp": of_q}

    def _registers(self) -> list[str]:
        r, consumers = self.registers, self.structure.consumers
        rest = f"{r.others} for addresses, row maxima and sums" if r.others >= 0 else f"{-r.others} too few: it spills"
        total = f"{r.threads} threads x {r.launch} = {r.pool}"
        return [
            f"a consumer's thread {r.consumer}: S {r.s} + P {r.p} + O {r.o} = {r.s + r.p + r.o}, {rest}",
            f"a producer's thread {r.producer}",
            f"{_WARPGROUP} threads x ({r.producer} + {consumers} x {r.consumer}) = {r.used} of the launch's {total}",
        ]


def explain(plan: Plan, pipes: Pipes | None) -> HopperExplanation:
    """Return the explanation of a plan."""
    return HopperExplanation(plan, pipes, floor(plan, kind_of_plan(plan).exponentials))


def _registers(plan: Plan, structure: HopperForward) -> Registers:
    launch = min(plan.arch.registers // plan.threads // 8 * 8, 256)
    given = plan.operands
    keys, width_v = structure.entries * plan.tile_n, structure.entries * plan.columns_v[0].width
    s, o = (fragment_registers(columns, given.accumulator) for columns in (keys, width_v))
    p = fragment_registers(keys, given.p)
    producer = structure.registers_of("scheduler")
    consumer = structure.registers_of("consumers")
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
        used=_WARPGROUP * (producer + structure.consumers * consumer),
    )


def _roles(plan: Plan, structure: HopperForward) -> Iterator[str]:
    each = "consumer" if structure.consumers == 1 else "consumers"
    yield f"{structure.consumers} {each} of {ROWS} query rows, a warpgroup each: products, softmax and output"
    if structure.entries > 1:
        yield f"rows of {structure.entries} batch entries that share biases: each step has {plan.tile_n} keys of each"
    if plan.pack_gqa:
        yield f"rows hold all query heads of a KV head, so that their number must divide {ROWS}"
    first = {role.name: role.first for role in structure.warp_roles}
    scheduler, loader = first["scheduler"], first["loader"]
    if structure.transposes:
        turning = first["transposers"]
        yield f"producer: warp {scheduler} schedules work tiles and loads Q; {loader} loads K and V, all by TMA"
        yield f"warps {turning} and {turning + 1} transpose V, since products of 8 bits take keys along the rows only"
    else:
        of_q = first["query_loader"]
        loads = f"warp {loader} loads K and V, and {of_q} Q"
        if structure.value_loader:
            loads = f"warp {loader} loads K, {of_q} Q, and {first['value_loader']} V, a box of a page a copy"
        yield f"producer: warp {scheduler} schedules work tiles; by TMA, {loads}"
    if structure.pingpong:
        yield "ping-pong: consumers take turns at the tensor cores, the softmax of one runs under the MMAs of another"
    else:
        yield "cooperative: consumers issue their products whenever they are ready"
    yield _overlap(structure)
    if structure.persistent:
        yield f"persistent; the next work tile is taken when {structure.lookahead} steps of a tile are left to load"
    else:
        yield "not persistent: one work tile per " + ("cluster of blocks" if structure.shares else "block")


#: Of kernels in 8 bits: docs/fp8.md, "Errors".
_ERROR = (
    "P is rounded to 8 bits: for normal numbers the output is off by 2.6 % of its root mean square, besides what "
    "rounding q, k and v did",
    "products are added up with about 13 bits: log-sum-exps are off by up to 0.004",
)


def _scales(plan: Plan) -> list[str]:
    """The elements that share a scale."""
    if not plan.scale_block:
        return ["q_descale, k_descale and v_descale: one number, or (batch, kv_heads)"]
    block = f"blocks of {plan.scale_block} tokens"
    return [
        f"q_descale (batch, heads, {block}); k_descale and v_descale (batch, kv_heads, {block})",
        "those of a tile of keys come with it; P takes up that of its values as a part of its exponents",
    ]


def _overlap(structure: HopperForward) -> str:
    if structure.overlap:
        return "overlap: PV of a step runs under the logits of the next"
    return "no overlap: a warpgroup waits for all its products before its softmax"


def _epilogue(plan: Plan, structure: HopperForward) -> str:
    if structure.shares:
        return "merged: each block adds up some of the rows, from the shared memory of all, and writes them"
    if not structure.staged:
        return "direct: O goes from registers to memory, 16 bytes of a row at a time"
    return "staged: O goes through shared memory, " + ("and out by rows" if plan.ragged_queries else "and out by TMA")


def _masks(plan: Plan) -> str:
    score = "; others compute only the score" if plan.variant.score is not None else ""
    if not plan.variant.masked:
        return f"only on a ragged last tile of keys{score}"
    who = "a consumer's rows" if plan.iteration == "ranges" else "the block's rows"
    return f"only on tiles that {who} see in part{score}"


def _holds(plan: Plan, structure: HopperForward, region: str) -> str:
    """Contents of a region of shared memory."""
    width_qk, width_v = plan.columns_qk[0].width, plan.columns_v[0].width
    tiles = "1 tile" if structure.q_stages == 1 else f"{structure.q_stages} tiles"
    each = "" if structure.entries == 1 else f"{structure.entries} x "
    parts = "" if structure.out_columns == width_v else f", {width_v // structure.out_columns} parts in turn"
    return {
        "q": f"Q: {tiles} of {each}{plan.tile_m} x {width_qk}",
        "k": f"K: {plan.stages} stages of {each}{plan.tile_n} x {width_qk}",
        "v": f"V: {plan.stages} stages of {each}{plan.tile_n} x {width_v}",
        "v_rows": f"V before it is transposed: {plan.stages} stages of {plan.tile_n} x {structure.box_bytes} B",
        "tile_scales": "scales of the tile in each stage of K, of its keys and of its values",
        "key_values": "what mask and score read of the keys of two tiles in each stage of K",
        "distance_values": "what the score reads of the distances of two tiles in each stage of K",
        "biases": f"biases: {structure.bias_stages} stages of {structure.biases} x {plan.tile_m} x {plan.tile_n}",
        "tables": f"tables that the score reads: {structure.consumers} copies of {structure.table_bytes} B",
        "out": f"O for its store: {each}{plan.tile_m} x {structure.out_columns}{parts}",
        "work": "records of two work tiles: place, and ranges of KV tiles",
        "more_partials": "what partial results take in the end, beside the place of Q, K and V",
        "tile_info": "number of the tile in each stage of K, and who needs the mask",
        "taken": "number of the pair of work tiles that comes next",
    }.get(region, "barriers, 8 B each")
