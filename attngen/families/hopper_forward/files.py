"""The parts of a Hopper forward: which file of ``templates/cuda/hopper_forward`` each choice of the plan is."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.families.hopper_forward.kinds import kind_of_plan
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.model import Plan

_FOLDER = "cuda/hopper_forward"


@dataclass(frozen=True, slots=True)
class Parts:
    """Files that the templates include, or whose macros they call."""

    keys: str  # where the keys of a sequence lie
    visits: str  # how the tiles of keys that rows see are found
    scheduler: str
    records: str  # how the scheduler hands over work tiles
    queries: str  # how Q of a work tile is copied
    loader: str  # of K, and of V if that has none of its own
    values: str  # how V follows K
    consumer: str  # the loop over work tiles, or the one tile of a block that shares its keys
    turns: str  # how consumers share the tensor cores
    tiles: str  # whether a consumer skips tiles of keys
    work: str  # how a consumer reads the record of a work tile
    matrices: str  # what a consumer multiplies, and holds in registers
    step: str  # how the products of a step follow each other
    logits: str  # how products become logits
    softmax: str
    store: str  # how O leaves
    outputs: str  # where it goes
    lse: str


def parts_of(plan: Plan, forward: HopperForward) -> Parts:
    """Return the parts of a plan."""
    several = "_entries" if forward.entries > 1 else ""
    own = "_own" if forward.map_rows else ""
    work = "work_in_place" if forward.v_by_columns else "work_shared" if forward.shares else f"work{own or several}"
    values = (
        "values_for_transposers" if forward.transposes else "values_by_columns" if forward.v_by_columns else "values"
    )
    kind = kind_of_plan(plan)
    return Parts(
        keys=_file(f"keys/{'blocks' if forward.map_rows else plan.key_access}"),
        visits=_file(f"visits/{_visits(plan, forward)}"),
        scheduler=_file("_scheduler_shared" if forward.shares else f"_scheduler{several}"),
        records=_file("scheduler/records_counted" if forward.transposes else "scheduler/records"),
        queries=_file(f"loader/queries{several}"),
        loader=_file(f"_loader{'_pages_k' if forward.value_loader else own or several}"),
        values=_file(f"loader/{values}"),
        consumer=_file(f"_consumer{'_shared' if forward.shares else own}"),
        turns=_file("consumer/turns_pingpong" if forward.pingpong else "consumer/turns_cooperative"),
        tiles=_file(f"consumer/{_tiles(forward)}"),
        work=_file(f"consumer/{work}"),
        matrices=_file(f"consumer/matrices{several}"),
        step=_file(f"consumer/{_step(forward)}"),
        logits=_file(f"logits/{kind.logits}"),
        softmax=_file(f"softmax/{kind.file}"),
        store=_file("consumer/store_staged" if forward.staged else "consumer/store_direct"),
        outputs=_file(f"_epilogue{several}"),
        lse=_file(f"_lse{several}"),
    )


def _visits(plan: Plan, forward: HopperForward) -> str:
    if forward.entries > 1:
        return "entries"
    if plan.iteration == "ranges":
        return "ranges"
    return "own_blocks" if plan.structure.map_rows else "words"


def _step(forward: HopperForward) -> str:
    return "step_overlapped" if forward.overlap else "step_in_order"


def _tiles(forward: HopperForward) -> str:
    if forward.map_rows:
        return "tiles_own"
    return "tiles_skipped" if forward.skips else "tiles_all"


def _file(name: str) -> str:
    return f"{_FOLDER}/{name}.cu.j2"
