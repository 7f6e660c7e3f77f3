"""Registers of the Hopper forward kernels: those of each role, and the tiles that a consumer can hold."""

from __future__ import annotations

from attngen.plan.choices import refuse
from attngen.plan.model import Role
from attngen.plan.operands import Operands, fragment_registers, operands_of
from attngen.plan.schedules.forward_memory import is_paged
from attngen.plan.schedules.forward_pipes import forward_roles
from attngen.plan.traits import bands_of
from attngen.schema.expand import KernelSpec, Roles

#: Keys of a tile that are tried where those of the table take too many registers, or too much memory.
FEWER_KEYS = (64, 32, 16)

#: Registers that a consumer needs beside S, P and O: addresses, row maxima, indices and sums.
_OTHER_REGISTERS = 24

#: Registers of (producer, consumer) by number of consumers; together they are what the launch reserves.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}

#: The same where the scheduler searches for bounds, or divides by groups of heads, for which 32 registers are few, if
#: the consumers can spare them.
_SEARCHING_REGISTERS = REGISTERS | {3: (56, 152)}

#: ptxas takes a wgmma of more columns than the first only where threads begin with the second's registers (C7602).
_COLUMNS_OF_FEW_REGISTERS, _REGISTERS_OF_MORE_COLUMNS = 192, 142


def warp_roles(
    spec: KernelSpec, roles: Roles, consumers: int, tile_n: int, width_v: int,
    default: tuple[int, int] | None = None, *, transposes: bool = False,
) -> tuple[Role, ...]:  # fmt: skip
    """Roles with the registers per thread of the producer and of a consumer: those of the spec, else the ``default``,
    else the table's for the number of consumers."""
    if default is None:
        default = REGISTERS[consumers]
        busy = searches(spec) or spec.pack_gqa is True
        if busy and _needed_registers(tile_n, width_v, operands_of(spec)) <= _SEARCHING_REGISTERS[consumers][1]:
            default = _SEARCHING_REGISTERS[consumers]
    producer = roles.producer_registers or default[0]
    consumer = roles.consumer_registers or default[1]
    for value in (producer, consumer):
        if value % 8 or not 24 <= value <= 256:
            raise refuse(spec, "warps", f"{value} registers are not a multiple of 8 from 24 to 256")
    threads = 128 * (consumers + 1)
    launch = min(65536 // threads // 8 * 8, 256)
    total, pool = 128 * (producer + consumers * consumer), threads * launch
    if total > pool or not producer <= launch <= consumer:
        raise refuse(
            spec,
            "warps",
            f"128 threads x ({producer} + {consumers} x {consumer}) = {total} registers; a launch of {threads} threads "
            f"reserves {launch} each, {pool} in all, which the producer gives up and the consumers take",
        )
    check_registers(spec, consumer, tile_n, width_v)
    if max(tile_n, width_v) > _COLUMNS_OF_FEW_REGISTERS and launch < _REGISTERS_OF_MORE_COLUMNS:
        raise refuse(
            spec,
            "warps",
            f"a launch of {threads} threads reserves {launch} registers each, and a wgmma of {max(tile_n, width_v)} "
            f"columns needs {_REGISTERS_OF_MORE_COLUMNS}; fewer consumers have more each",
        )
    pages, turns = is_paged(spec) and not transposes, transposes and not spec.transposed_v
    return forward_roles(consumers, producer, consumer, value_loader=pages, transposes=turns)


def _needed_registers(tile_n: int, width_v: int, operands: Operands) -> int:
    """Registers per thread of logits, probabilities, outputs and the rest."""
    return sum(_fragments(tile_n, width_v, operands)) + _OTHER_REGISTERS


def _fragments(tile_n: int, width_v: int, operands: Operands) -> tuple[int, int, int]:
    """Registers per thread of S, P and O."""
    logits, outputs = (fragment_registers(columns, operands.accumulator) for columns in (tile_n, width_v))
    return logits, fragment_registers(tile_n, operands.p), outputs


def check_registers(spec: KernelSpec, consumer: int, tile_n: int, width_v: int) -> None:
    """Refuse a tile whose logits, probabilities and outputs a thread cannot hold."""
    operands = operands_of(spec)
    needed = _needed_registers(tile_n, width_v, operands)
    if needed > consumer and "spill" not in spec.allow:
        s, p, o = _fragments(tile_n, width_v, operands)
        raise refuse(
            spec,
            "tile",
            f"a consumer has {consumer} registers and needs {needed}: S {s} + P {p} + O {o} + "
            f"others {_OTHER_REGISTERS}; "
            + ("a smaller tile.n needs less" if tile_n > min(FEWER_KEYS) else "fewer consumers have more each"),
        )


def searches(spec: KernelSpec) -> bool:
    """Whether the bounds of a tile are looked up in tensors, which takes some time."""
    return bool(spec.variant.uses(spec.variant.mask, spec.variant.score)[1]) and bands_of(spec).exact
