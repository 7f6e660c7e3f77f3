"""The kernels that quantize queries, keys and values of one head_dim, by TMA and matrix products.

They do what the kernel of schedule ``quantize`` does, for rows of 64 or 128 numbers in tensors that TMA can read, and
all scales but those of tensors. Tiles arrive in shared memory while others are worked on, which takes no registers, and
``wgmma`` with a Hadamard matrix takes no instructions of the threads that round. So memory binds. There is a launch for
each kind of call: ``quantize`` for scales of blocks, ``kept`` for those of heads and tokens, and ``rotated`` for
rotated rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.arch import Arch
from attngen.dtypes import CHUNK_BYTES
from attngen.families.quantize import schedule as quantize
from attngen.operations import QUANTIZE
from attngen.plan import arguments, naming
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import refuse
from attngen.plan.model import Argument, Launch, Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.helper_kernels import QUANTIZED_IN_TILES
from attngen.schema.kernel_spec import KernelSpec

#: A work item is a tile: the tokens of one head or of two, which four warps hold in registers.
GRID = "row_tiles"

#: The launches of rows that are not transformed by blocks.
KEPT, ROTATED = "kept", "rotated"

#: The launches of scales of heads that come from a sample of rows: one finds the scales, one rounds by them.
SAMPLE, SAMPLED = "sample", "sampled"

#: The largest number of 8 bits, in root mean squares of the sample. Numbers beyond it cost a launch of ``KEPT``; those
#: below 1/448 of the root mean square are subnormal in e4m3, whose largest number is 28,672 times its least normal one.
#: Not measured.
SPAN = 64

#: Groups of four warps in a block, of which a multiprocessor has one: 128 registers a thread. Tiles in shared memory
#: for each of them, fewer where angles lie beside them; tokens of a tile, boxes of a tile, bytes of a row of a box
#: (docs/notebook/hopper_fp8.md, "Rows and products of a quantizing kernel").
GROUPS, STAGES, ROTATED_STAGES, ROWS, BOXES, BOX_BYTES = 4, 3, 2, 64, 2, 128

#: Bytes through which threads exchange values, more than they need.
_TOLD = {QUANTIZE: 1024, KEPT: 2048, SAMPLE: 256, SAMPLED: 1024, ROTATED: 1024}

#: Transforms of a tile in each launch.
_TRANSFORMS = {QUANTIZE: 1, KEPT: 2, SAMPLE: 0, SAMPLED: 1, ROTATED: 0}

_ROUNDED = ("q_out", "k_out", "v_out")
_SCALES = ("q_descale", "k_descale", "v_descale", "signs")
_TABLES = ("rotary_cos", "rotary_sin")

#: Numbers of a call that all launches have.
_SIZES = ("heads", "kv_heads", "seqlen_q", "seqlen_k", "units", "units_q", "units_k", "e5m2_out")

#: Those of one launch, and those by which it divides.
_OWN_SIZES = {
    QUANTIZE: ("sharers",),
    KEPT: ("hadamard", "lag", "units_of_tokens", "words_q", "words_k", "words_v", "tiles_q", "tiles_k", "v_groups"),
    SAMPLE: ("kv_heads", "units", "samples_q", "samples_k", "step_q", "step_k", "words"),
    SAMPLED: ("v_groups",),
    ROTATED: (
        "batch", "sharers", "hadamard", "scales", "rounds", "bands", "bands_q", "bands_k", "parts_q", "parts_k",
        "positions", "rotary_form", "angle_bytes",
    ),
}  # fmt: skip
_DIVISORS = {
    QUANTIZE: ("heads_q", "heads_k", "tiles_q", "tiles_k"),
    KEPT: (
        "group",
        "group_kv",
        "set_q",
        "set_k",
        "set_v",
        "sets_q",
        "sets_k",
        "sets_v",
        "pairs_q",
        "pairs_k",
        "pairs_v",
    ),
    SAMPLE: ("group",),
    SAMPLED: ("heads_q", "heads_k", "tiles_q", "tiles_k", "group"),
    ROTATED: ("heads_q", "heads_k", "tiles_q", "tiles_k", "turns_q", "turns_k", "group"),
}


def angle_pitch(plan: Plan) -> int:
    """Return the bytes from the angles of one row to the next in shared memory: float32, padded by 16 so that
    neighbouring rows lie in different banks."""
    return plan.head_dim_qk // 2 * 4 + CHUNK_BYTES


def angle_tables(plan: Plan) -> int:
    """Number of tables of cosines and sines of a tile's tokens in shared memory."""
    return 256 // plan.head_dim_qk


def operand_bytes(plan: Plan, launch: str) -> int:
    """Return the shared memory of tiles and of what they are worked on with: the Hadamard matrix, or, where rows are
    rotated, tables of cosines and sines. Of a sample: sums of warps."""
    if launch == SAMPLE:
        return (4 * GROUPS + 1) * plan.head_dim_qk * 4
    tiles = GROUPS * BOXES * ROWS * BOX_BYTES
    if launch == ROTATED:
        return ROTATED_STAGES * tiles + angle_tables(plan) * 2 * ROWS * angle_pitch(plan)
    return STAGES * tiles + plan.head_dim_qk**2 * plan.operands.q.bytes


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if not spec.head_dim_qk == spec.head_dim_v in QUANTIZED_IN_TILES:
        allowed = " or ".join(map(str, QUANTIZED_IN_TILES))
        raise refuse(spec, "head_dim", f"tiles have rows of {allowed}, q, k and v alike")
    planned = replace(
        quantize.planned(spec, arch),
        name=naming.operation_name(QUANTIZE, spec.arch, spec.dtype, f"d{spec.head_dim_qk}"),
        schedule="quantize_tiles",
        loads="descriptor",
        q_operand="shared",
        tile_m=ROWS,
        stages=STAGES,
        num_warps=4 * GROUPS,
    )

    def launch(name: str) -> Launch:
        symbol = planned.name if name == QUANTIZE else naming.launch_name(planned.name, name)
        return Launch(
            name, symbol, GRID, ROWS, 1, STAGES if _TRANSFORMS[name] else ROTATED_STAGES, 4 * GROUPS,
            arguments=tuple(_arguments(planned, name)), max_spills=SPILLS.bytes,
            products=_TRANSFORMS[name] * BOXES * BOX_BYTES // 32,
            shared_bytes=operand_bytes(planned, name) + _TOLD[name],
            pdl=arch.pdl, cooperative=name == KEPT,
        )  # fmt: skip

    return planned.with_launches(*map(launch, (QUANTIZE, KEPT, SAMPLE, SAMPLED, ROTATED)))


#: The mean of each KV head's keys, transformed; a null pointer where keys keep their mean.
_SHIFT = Argument("k_shift_ptr", "pointer", "*fp32", of="k_shift", divisibility=CHUNK_BYTES)

#: Words that are cleared before the launch. Of scales from a sample, the first one says that a number is too large.
_MAXIMA = Argument("maxima_ptr", "pointer", "*u32", of="maxima", divisibility=4)


def _arguments(plan: Plan, launch: str) -> Iterator[Argument]:
    if launch == SAMPLE:
        yield from _of_sample(plan)
        return
    for name in ("q", "k", "v"):
        yield Argument(
            f"{name}_map", "descriptor", "tensor_map", of=name,
            box=(1, ROWS, 1, BOX_BYTES // plan.operands.q.bytes), swizzle=BOX_BYTES,
        )  # fmt: skip
    for name in _ROUNDED:
        yield Argument(f"{name}_ptr", "pointer", "*u8", of=name, divisibility=CHUNK_BYTES)
    for name in _SCALES[:3] if launch == SAMPLED else _SCALES:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    if launch == KEPT:
        yield quantize.mean_of_keys(plan)
        yield Argument("redo_ptr", "pointer", "*u32", of="redo", divisibility=4)
    if launch == SAMPLED:
        yield _SHIFT
    if launch != QUANTIZE:
        yield _MAXIMA
    if launch == ROTATED:
        for name in _TABLES:
            yield Argument(f"{name}_ptr", "pointer", "*void", of=name)
        yield Argument("rotary_offsets_ptr", "pointer", "*i32", of="rotary_offsets", divisibility=4)
    for name in _ROUNDED:
        for axis in ("b", "s", "h"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    if launch == ROTATED:
        for name in ("cos", "sin"):
            yield arguments.size(f"{name}_row_bytes", form="i64")
    for word in range(2):
        yield arguments.size(f"sign_bits_{word}", form="i64")
    divisors = _DIVISORS[launch]
    sizes = _SIZES if launch != SAMPLED else [name for name in _SIZES if name != "e5m2_out"]
    yield from map(arguments.size, (*sizes, *_OWN_SIZES[launch], *divisors))
    yield from arguments.reciprocals(*divisors)
    yield arguments.size("norm", form="fp32")


def _of_sample(plan: Plan) -> Iterator[Argument]:
    """The arguments of the launch that finds scales from a sample."""
    for name in ("q", "k", "v"):
        yield Argument(f"{name}_ptr", "pointer", f"*{plan.operands.of(name).triton}", of=name, divisibility=CHUNK_BYTES)
    for name in _SCALES[:3]:
        yield Argument(f"{name}_ptr", "pointer", "*fp32", of=name, divisibility=4)
    of = "k_mean_out"
    yield Argument(f"{of}_ptr", "pointer", f"*{plan.operands.k.triton}", of=of, divisibility=CHUNK_BYTES)
    yield _SHIFT
    yield _MAXIMA
    for name in ("q", "k", "v"):
        for axis in ("b", "s", "h"):
            yield Argument(f"stride_{name}_{axis}", "stride", "i64", of=name, axis=axis)
    for word in range(2):
        yield arguments.size(f"sign_bits_{word}", form="i64")
    divisors = _DIVISORS[SAMPLE]
    yield from map(arguments.size, (*_OWN_SIZES[SAMPLE], *divisors))
    yield from arguments.reciprocals("kv_heads", *divisors)


SCHEDULE = Schedule(
    name="quantize_tiles",
    backend="cuda",
    direction=QUANTIZE,
    template="cuda/quantize/tiles.cu.j2",
    view="attngen.families.quantize.view:tiles_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    suits=lambda spec: spec.loads == "descriptor",
    layouts=("dense",),
    serves=dict.fromkeys(("dtype", "loads"), ANY),
)
