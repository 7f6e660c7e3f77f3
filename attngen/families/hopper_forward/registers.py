"""Registers of the Hopper forward kernels: those of each role, and the tiles that a consumer can hold."""

from __future__ import annotations

from attngen.errors import PlanError
from attngen.plan.choices import refuse
from attngen.plan.operands import Operands, fragment_registers, operands_of
from attngen.plan.traits import bands_of
from attngen.schema.kernel_spec import KernelSpec, Roles

#: Keys of a tile that are tried where those of the table take too many registers, or too much memory. Not measured:
#: half as many each time.
FEWER_KEYS = (64, 32, 16)

#: Registers per thread that a consumer needs beside S, P and O: addresses, row maxima, indices and sums. ptxas
#: keeps as many in a backward (docs/notebook/hopper_backward.md, "Fences, and turns at head dim 128").
_OTHER_REGISTERS = 24

#: Registers per thread of (producer, consumer) by number of consumers; together they are what the launch reserves. Not
#: measured one against the other.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}

#: The same where the scheduler searches for bounds, or divides by groups of heads, for which 32 registers are few, if
#: the consumers can spare them. Not measured: follows from registers.
_SEARCHING_REGISTERS = REGISTERS | {3: (56, 152)}

#: ptxas takes a wgmma of more columns than the first only where threads begin with the second's registers (C7602).
_COLUMNS_OF_FEW_REGISTERS, _REGISTERS_OF_MORE_COLUMNS = 192, 142


def registers_of(
    spec: KernelSpec, roles: Roles, consumers: int, tile_n: int, width_v: int, of_table: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the registers per thread of the producer and of a consumer: those of the spec, else those ``of_table``
    (its row for the tile), else the usual ones for the number of consumers."""
    usual = of_table
    if usual is None:
        usual = REGISTERS[consumers]
        busy = searches(spec) or spec.pack_gqa is True
        if busy and _needed_registers(tile_n, width_v, operands_of(spec)) <= _SEARCHING_REGISTERS[consumers][1]:
            usual = _SEARCHING_REGISTERS[consumers]
    return roles.producer_registers or usual[0], roles.consumer_registers or usual[1]


def register_refusal(
    spec: KernelSpec, registers: tuple[int, int], consumers: int, tile_n: int, width_v: int, entries: int = 1
) -> PlanError | None:
    """Return the error if a block cannot have these ``registers`` per thread, or a consumer, which has rows of so many
    batch ``entries``, needs more; else None."""
    producer, consumer = registers
    for value in registers:
        if value % 8 or not 24 <= value <= 256:
            return refuse(spec, "warps", f"{value} registers are not a multiple of 8 from 24 to 256")
    threads = 128 * (consumers + 1)
    launch = min(65536 // threads // 8 * 8, 256)
    total, pool = 128 * (producer + consumers * consumer), threads * launch
    if total > pool or not producer <= launch <= consumer:
        return refuse(
            spec,
            "warps",
            f"128 threads x ({producer} + {consumers} x {consumer}) = {total} registers; a launch of {threads} threads "
            f"reserves {launch} each, {pool} in all, which the producer gives up and the consumers take",
        )
    operands = operands_of(spec)
    needed = _needed_registers(entries * tile_n, entries * width_v, operands)
    if needed > consumer and "spill" not in spec.allow:
        s, p, o = _fragments(entries * tile_n, entries * width_v, operands)
        return refuse(
            spec,
            "tile",
            f"a consumer has {consumer} registers and needs {needed}: S {s} + P {p} + O {o} + "
            f"others {_OTHER_REGISTERS}; "
            + ("a smaller tile.n needs less" if tile_n > min(FEWER_KEYS) else "fewer consumers have more each"),
        )
    if max(tile_n, width_v) > _COLUMNS_OF_FEW_REGISTERS and launch < _REGISTERS_OF_MORE_COLUMNS:
        return refuse(
            spec,
            "warps",
            f"a launch of {threads} threads reserves {launch} registers each, and a wgmma of {max(tile_n, width_v)} "
            f"columns needs {_REGISTERS_OF_MORE_COLUMNS}; fewer consumers have more each",
        )
    return None


def _needed_registers(tile_n: int, width_v: int, operands: Operands) -> int:
    """Registers per thread of logits, probabilities, outputs and the rest."""
    return sum(_fragments(tile_n, width_v, operands)) + _OTHER_REGISTERS


def _fragments(tile_n: int, width_v: int, operands: Operands) -> tuple[int, int, int]:
    """Registers per thread of S, P and O."""
    logits, outputs = (fragment_registers(columns, operands.accumulator) for columns in (tile_n, width_v))
    return logits, fragment_registers(tile_n, operands.p), outputs


def searches(spec: KernelSpec) -> bool:
    """Whether the bounds of a tile are looked up in tensors, which takes some time."""
    return bool(spec.variant.uses(spec.variant.mask, spec.variant.score)[1]) and bands_of(spec).exact
