"""Other choices for a Hopper forward kernel: where the compiler refuses the first, and for tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from attngen.families.hopper_forward.candidates import key_step
from attngen.families.hopper_forward.registers import FEWER_KEYS
from attngen.families.hopper_forward.structure import HopperForward
from attngen.plan.model import Plan
from attngen.schema.kernel_spec import KernelSpec, Roles

#: Keys of a tile, stages, and orders of consumers, among which ``attngen tune`` looks for the fastest
#: (docs/notebook/tiles.md, "Searches").
_TUNED_KEYS, _TUNED_STAGES = (32, 64, 80, 96, 112, 128, 160, 176, 192), (2, 3)
_TUNED_ORDERS = ("pingpong", "cooperative")


def alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with other choices than those of its ``first`` plan, each with fewer registers:
    narrower tiles, then fewer consumers, which have more registers each, then probabilities that wait for V."""
    given, most = spec.roles or Roles(), first.structure.consumers
    fixed = given.consumer is not None or spec.tile_m is not None
    assert isinstance(first.structure, HopperForward)
    step = key_step(first.operands, first.structure.v_by_columns, spec.transposed_v and not spec.grouped_v)
    narrower = [n for n in FEWER_KEYS if n < first.tile_n and n % step == 0] if spec.tile_n is None else []
    tiles = [(most, n) for n in narrower[: 2 if most > 2 else None]]
    if not fixed:
        tiles += [(n_consumers, n) for n_consumers in range(most - 1, 0, -1) for n in (first.tile_n, *narrower)]
    for consumers, tile_n in tiles:
        yield replace(spec, tile_n=tile_n, roles=replace(given, consumer=consumers))
    if given.overlap is None and tiles:
        yield replace(spec, tile_n=tiles[-1][1], roles=replace(given, consumer=tiles[-1][0], overlap=False))
    elif given.overlap is None:
        yield replace(spec, roles=replace(given, overlap=False))


def tunable(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with each tile, depth and order of consumers that may be the fastest."""
    assert isinstance(first.structure, HopperForward)
    step = key_step(first.operands, first.structure.v_by_columns, spec.transposed_v and not spec.grouped_v)
    consumers = (1, 2) if spec.pack_gqa else (2, 3)
    keys = [n for n in _TUNED_KEYS if n % step == 0]
    for count, tile_n, stages, schedule in product(consumers, keys, _TUNED_STAGES, _TUNED_ORDERS):
        roles = Roles(consumer=count, schedule=schedule, overlap=True)
        yield replace(spec, tile_n=tile_n, stages=stages, roles=roles)
