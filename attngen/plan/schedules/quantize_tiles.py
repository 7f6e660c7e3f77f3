"""The kernel that quantizes queries, keys and values of one head_dim, by TMA and matrix products.

It does what the kernel of schedule ``quantize`` does, for scales of blocks of tokens, rows that are transformed or
rotated, and tensors with rows of 64 or 128 numbers that TMA can read. Tiles arrive in shared memory while others are
worked on, which takes no registers, and ``wgmma`` with a Hadamard matrix takes no instructions of the threads that
round. So memory binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.formats import QUANTIZE
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import refuse
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.schedules import quantize
from attngen.schema.expand import QUANTIZED_IN_TILES, KernelSpec

#: What a unit of work is: a tile, the tokens of one head or of two, which four warps hold in registers.
GRID = "row_tiles"

#: Groups of four warps in a block, of which a multiprocessor has one: 128 registers a thread. Tiles in shared memory
#: for each of them, fewer where angles lie beside them; tokens of a tile, boxes of a tile, bytes of a row of a box.
GROUPS, STAGES, ROTATED_STAGES, ROWS, BOXES, BOX_BYTES = 4, 3, 2, 64, 2, 128

#: Bytes for what threads tell each other, more than they need.
_TOLD = 1024

_ROUNDED = ("q_out", "k_out", "v_out")
_SCALES = ("q_descale", "k_descale", "v_descale", "signs")
_TABLES = ("rotary_cos", "rotary_sin")

#: Numbers of a call, and those by which the kernel divides.
_SIZES = ("heads", "kv_heads", "seqlen_q", "seqlen_k", "units", "units_q", "units_k", "sharers", "e5m2_out")
_DIVISORS = ("heads_q", "heads_k", "tiles_q", "tiles_k")

#: The same of a kernel that rotates, too.
_ROTATION = ("rotates", "hadamard", "bands_q", "bands_k", "positions", "rotary_form", "angle_bytes")
_ROTATION_DIVISORS = ("turns_q", "turns_k")


def rotates(plan: Plan) -> bool:
    """Whether it rotates rows, too. At head_dim 64 that was not faster than the general kernel."""
    return plan.head_dim_qk == 128


def angle_pitch(plan: Plan) -> int:
    """Return the bytes from the angles of one row to the next in shared memory: float32, padded by 16 so that
    neighbouring rows lie in different banks."""
    return plan.head_dim_qk // 2 * 4 + CHUNK_BYTES


def operand_bytes(plan: Plan) -> int:
    """Return the shared memory of tiles and of what they are worked on with: the Hadamard matrix, or, where rows are
    rotated, two tables of cosines and sines."""
    tiles = GROUPS * BOXES * ROWS * BOX_BYTES
    multiplied = STAGES * tiles + plan.head_dim_qk**2 * plan.operands.q.bytes
    return max(multiplied, ROTATED_STAGES * tiles + 2 * 2 * ROWS * angle_pitch(plan) if rotates(plan) else 0)


def shared_bytes(plan: Plan) -> int:
    """Return the shared memory of a block."""
    return operand_bytes(plan) + _TOLD


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if not spec.head_dim_qk == spec.head_dim_v in QUANTIZED_IN_TILES:
        allowed = " or ".join(map(str, QUANTIZED_IN_TILES))
        raise refuse(spec, "head_dim", f"tiles have rows of {allowed}, q, k and v alike")
    planned = replace(
        quantize.planned(spec, arch),
        name=naming.quantize_name(arch=spec.arch, dtype=spec.dtype, head_dim=spec.head_dim_qk),
        schedule="quantize_tiles",
        loads="descriptor",
        q_operand="shared",
        tile_m=ROWS,
        stages=STAGES,
        num_warps=4 * GROUPS,
    )
    row = Launch(
        QUANTIZE, planned.name, GRID, ROWS, 1, STAGES, 4 * GROUPS, arguments=tuple(_arguments(planned)),
        max_spills=SPILLS.bytes, products=BOXES * BOX_BYTES // 32, shared_bytes=shared_bytes(planned), pdl=arch.pdl,
    )  # fmt: skip
    return planned.with_launches(row)


def _arguments(plan: Plan) -> Iterator[Argument]:
    for name in ("q", "k", "v"):
        yield Argument(
            f"{name}_map", "descriptor", "tensor_map", of=name,
            box=(1, ROWS, 1, BOX_BYTES // plan.operands.q.bytes), swizzle=BOX_BYTES,
        )  # fmt: skip
    for name in _ROUNDED:
        yield Argument(f"{name}_ptr", "pointer", "*u8", of=name, divisibility=CHUNK_BYTES)
    for name in _SCALES:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    if rotates(plan):
        for name in _TABLES:
            yield Argument(f"{name}_ptr", "pointer", "*void", of=name)
        yield Argument("rotary_offsets_ptr", "pointer", "*i32", of="rotary_offsets", divisibility=4)
    for name in _ROUNDED:
        for axis in ("b", "s", "h"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    if rotates(plan):
        for name in ("cos", "sin"):
            yield arguments.size(f"{name}_row_bytes", form="i64")
    for word in range(2):
        yield arguments.size(f"sign_bits_{word}", form="i64")
    divisors = (*_DIVISORS, *(_ROTATION_DIVISORS if rotates(plan) else ()))
    yield from map(arguments.size, (*_SIZES, *(_ROTATION if rotates(plan) else ()), *divisors))
    yield from arguments.reciprocals(*divisors)
    yield arguments.size("norm", form="fp32")


SCHEDULE = Schedule(
    name="quantize_tiles",
    backend="cuda",
    direction=QUANTIZE,
    template="cuda/quantize/tiles.cu.j2",
    view="attngen.render.views.quantize:tiles_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    alternatives=lambda spec, first: iter(()),
    suits=lambda spec: spec.loads == "descriptor",
    layouts=("dense",),
)
