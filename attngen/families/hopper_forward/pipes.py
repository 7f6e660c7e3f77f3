"""The pipes of the Hopper forward kernels."""

from __future__ import annotations

from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.model import Plan
from attngen.plan.operands import Operands
from attngen.plan.pipes import ROW_PADDING, WARPGROUP, Event, NamedBarrier, Pipes, Ring, Role, Signal

#: Work tiles that are known ahead (docs/notebook/hopper_forward.md, "How far ahead tiles are taken").
_SLOTS = 2
#: Bytes of the record of a work tile: its place, and up to eight ranges for each consumer and for all.
WORK_BYTES = 320
_TILE_INFO_BYTES, _SLOT_BYTES = 4, 4
_TILE_SCALES_BYTES, _SCALE_BYTES = 8, 4
#: Bytes of a value of a key or a distance, and the tiles of them that a stage has room for: a consumer reads them after
#: it has given the stage back, and is done with them when it gives back the next one.
_VALUE_BYTES, _TILES_OF_VALUES = 4, 2
_TRANSPOSERS = 2  # warps

#: Shared memory in its order: matrices first, which need the most alignment, and words last.
_ORDER = (
    "q", "k", "kv", "v_rows", "v", "biases", "more_partials", "out", "work", "barriers", "tile_scales",
    "key_values", "distance_values", "tables", "tile_info",
)  # fmt: skip


def forward_pipes(
    roles: HopperForward, *, iteration: str, tile_m: int, tile_n: int, stages: int, qk: int, v: int, operands: Operands,
    warps: int = WARPGROUP, scale_block: int = 0,
) -> Pipes:  # fmt: skip
    """Return the pipes of a forward whose matrices have ``qk`` and ``v`` columns in shared memory.

    ``warps`` is the number of a consumer's warps, which a model may have fewer of.
    """
    consumers, entries = roles.consumers, roles.entries
    each, by_q, by_k = "each consumer", "the loader of Q", "the loader of K and V"
    if roles.map_rows:
        by_k = "each loader of K and V"
    by_v = by_k
    if roles.value_loader:
        by_k, by_v = "the loader of K", "the loader of V"
    done = f"{each.removeprefix('each ')}s are done with a tile of"
    info_bytes = _TILE_INFO_BYTES + (_SLOT_BYTES if iteration == "tile_map" else 0)
    scale_bytes = _TILE_SCALES_BYTES if scale_block > 1 else _SCALE_BYTES * tile_n
    scales = (("tile_scales", scale_bytes),) if scale_block else ()
    value_bytes = _TILES_OF_VALUES * _VALUE_BYTES * entries * tile_n * roles.key_values
    values = [("key_values", value_bytes)] if roles.key_values else []
    if roles.distance_values:
        values.append(("distance_values", _TILES_OF_VALUES * _VALUE_BYTES * (tile_m + tile_n) * roles.distance_values))
    scheduler = roles.consumers + 1 if iteration == "ranges" else 1
    if entries > 1:
        scheduler = entries  # a lane writes the keys of each
    others = "the loaders of Q and V" if roles.value_loader else "the loader of Q"
    if roles.transposes:
        by_q, others = "the scheduler", "the transposers"
    transposers = _TRANSPOSERS if roles.transposes else 0
    q = Ring(
        "q", roles.q_stages, by_q, each,
        guards="a tile of Q stays until it is multiplied with every tile of K of its work tile",
        full=Signal(1, by_q, "a tile of Q has landed", bytes=True),
        empty=Signal(warps * consumers, f"each warp of {each}", "consumers are done with a work tile")
        if roles.map_rows
        else Signal(consumers, each, "consumers have multiplied a tile of Q for the last time"),
        stored=(("q", entries * tile_m * qk * operands.q.bytes),),
    )  # fmt: skip
    k = Ring(
        "k", stages, by_k, each,
        guards="a tile of K, and the word that says what each consumer does with it, stay until S is complete",
        full=Signal(1, by_k, "a tile of K has landed, and what each consumer does with it is written", bytes=True),
        empty=Signal(consumers, each, f"{done} K"),
        stored=(("k", entries * tile_n * qk * operands.k.bytes), ("tile_info", info_bytes), *scales, *values),
    )  # fmt: skip
    kv = Ring(
        "kv", stages, by_k, each, count=consumers, joined=True,
        guards="a tile of K, and the word that says what each consumer does with it, stay until S is complete; a tile "
        "of V stays until its product is added to O",
        full=Signal(1, by_k, "a tile of K or V has landed", bytes=True),
        empty=Signal(consumers, f"{each}, or one for both where the other does not read it", f"{done} K or V"),
        stored=(("kv", tile_n * max(qk * operands.k.bytes, v * operands.v.bytes)), ("tile_info", info_bytes)),
    )  # fmt: skip
    v_bytes, v_rows = entries * tile_n * v * operands.v.bytes, []
    landed = Signal(1, by_v, "a tile of V has landed", bytes=True)
    if roles.transposes:
        by_rows, by_v = by_v, "the transposers"
        of_rows = Ring(
            "v_rows", stages, by_rows, by_v,
            guards="a box of V as it lies in memory, a row for each key, stays until it is transposed",
            full=Signal(1, by_rows, "a box of V has landed", bytes=True),
            empty=Signal(transposers, by_v, "a box of V has been read"),
            stored=(("v_rows", tile_n * roles.box_bytes),),
        )  # fmt: skip
        v_rows.append(of_rows)
        landed = Signal(transposers, by_v, "a tile of V is written, a row for each column")
    of_v = Ring(
        "v", stages, by_v, each,
        guards="a tile of V stays until its product is added to O, one step after K",
        full=landed,
        empty=Signal(consumers, each, f"{done} V"),
        stored=(("v", v_bytes),),
    )  # fmt: skip
    of_biases = Ring(
        "biases", roles.bias_stages, by_k, each,
        guards="the tiles of biases that belong to a tile of K stay until its products are logits; each warp reads its "
        "own rows",
        full=Signal(1, by_k, "the tiles of biases have landed", bytes=True),
        empty=Signal(warps * consumers, f"each warp of {each}", "warps have read their rows of the biases"),
        stored=(("biases", roles.bias_bytes * tile_m * tile_n),),
    )  # fmt: skip
    work = Ring(
        "work", _SLOTS, "the scheduler", _readers_of_work(roles),
        guards=f"the record of a work tile stays until all have read it; {by_k} does not arrive: the "
        "scheduler takes another tile after its request, which follows its read, and a block with one tile has a stage "
        "for each record",
        full=Signal(scheduler, "the scheduler's lanes that write the record", "a record is written"),
        empty=Signal(
            warps * consumers + (transposers or 1 + roles.value_loader), f"each warp of the consumers, and {others}",
            f"the warps of consumers, and {others}, have read a record",
        ),
        stored=(("work", WORK_BYTES),),
        alternates=True,
    )  # fmt: skip
    asked = Event(
        "work_asked",
        Signal(
            consumers if roles.map_rows else 1,
            by_k,
            "the loader nears the end of a work tile: the scheduler may take the next one",
        ),
    )
    return Pipes(
        (
            q,
            *([kv] if roles.map_rows else [k, *v_rows, of_v]),
            *([of_biases] if roles.biases else []),
            work,
            *([asked] if roles.persistent else []),
        ),
        named=_named(roles, each),
        roles=roles.warp_roles,
        order=_ORDER,
        others=_others(roles, tile_m, tile_n, stages, qk, v, operands),
    )


def forward_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned forward."""
    assert isinstance(plan.structure, HopperForward)
    return forward_pipes(
        plan.structure, iteration=plan.iteration, tile_m=plan.tile_m, tile_n=plan.tile_n, stages=plan.stages,
        qk=plan.columns_qk[0].width, v=plan.columns_v[0].width, operands=plan.operands, scale_block=plan.scale_block,
    )  # fmt: skip


def _others(
    roles: HopperForward, tile_m: int, tile_n: int, stages: int, qk: int, v: int, operands: Operands
) -> tuple[tuple[str, int], ...]:
    """Regions that no ring hands over: tables of the score, and O for its store, or the memory of partial results
    beyond that of Q, K and V, which they reuse at the end."""
    tables = (("tables", roles.consumers * roles.table_bytes),) if roles.table_bytes else ()
    if roles.staged:
        return (("out", roles.entries * tile_m * roles.out_columns * operands.out.bytes), *tables)
    if not roles.shares:
        return tables
    places = roles.q_stages * tile_m * qk * operands.q.bytes
    places += stages * tile_n * (qk * operands.k.bytes + v * operands.v.bytes)
    more = tile_m * (v + ROW_PADDING) * operands.accumulator.bytes - places
    return (("more_partials", more),) if more > 0 else ()


def _named(roles: HopperForward, each: str) -> tuple[NamedBarrier, ...]:
    """Named barriers at which a consumer's warps meet, and those of ping-pong at the tensor cores."""
    threads, consumers = 32 * WARPGROUP, roles.consumers
    meets = [
        *(["O"] if roles.staged else []),
        *(["parts"] if roles.cuts else []),
        *(["tables"] if roles.table_bytes else []),
        *(["skipped tiles"] if roles.skips and not roles.pingpong else []),
    ]
    barriers = []
    if meets:
        who = each.removeprefix("each ")
        together = f"threads of a {who} wait for each other around {' and '.join(meets)}"
        barriers.append(NamedBarrier("group", 1, consumers, threads, together))
    if roles.pingpong:
        pingpong = "turns at the tensor cores: a consumer waits, the one before it arrives"
        barriers.append(NamedBarrier("pingpong", 1 + consumers, consumers, 2 * threads, pingpong))
    if roles.shares:
        together = "all consumers are done with Q, K and V, and partial results take their place"
        barriers.append(NamedBarrier("consumers", 1 + 2 * consumers, 1, consumers * threads, together))
    return tuple(barriers)


def _readers_of_work(roles: HopperForward) -> str:
    """Readers of the record of a work item, in words."""
    if roles.transposes:
        return "the consumers, the loader and the transposers"
    return f"the consumers and {'all' if roles.value_loader or roles.map_rows else 'both'} loaders"


def forward_roles(
    consumers: int,
    producer: int,
    consumer: int,
    *,
    value_loader: bool = False,
    transposes: bool = False,
    own: bool = False,
) -> tuple[Role, ...]:
    """Roles of the warps, with the registers of a thread of the producer and of a consumer: consumers first, then the
    producer's warps, of which the last idles unless it loads V. Where two of them transpose V, the
    scheduler loads Q. Where consumers visit their ``own`` blocks, each has a loader."""
    first, producers = WARPGROUP * consumers, ["scheduler", "loader", "query_loader"]
    if own:
        producers.remove("loader")
    if value_loader:
        producers.append("value_loader")
    if transposes:
        producers.remove("query_loader")
    alone = [Role(name, first + i, 1, producer) for i, name in enumerate(producers)]
    if own:
        alone.append(Role("loaders", first + len(alone), consumers, producer))
    if transposes:
        alone.append(Role("transposers", first + len(alone), _TRANSPOSERS, producer))
    return Role("consumers", 0, first, consumer), *alone
