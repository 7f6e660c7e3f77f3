"""The Hopper forward in CUDA with warp roles, and what it shares with that without: tiles, memory, open choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from attngen.arch import Arch
from attngen.dtypes import QUANTIZED_DTYPES, SWIZZLE_BYTES, DType
from attngen.errors import PlanError
from attngen.lang.simplify import TRUE
from attngen.plan import arguments
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import SECTION_BYTES, check_head_dims, driver_of, refuse
from attngen.plan.draft import drafted, forward_launches
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Argument, Columns, Plan, Role
from attngen.plan.operands import Operands, fragment_registers, operands_of
from attngen.plan.schedule import Schedule
from attngen.plan.schedules.forward_pipes import forward_pipes, forward_pipes_of, forward_roles
from attngen.plan.schedules.structures import HopperForward
from attngen.plan.times import times_of, visible_keys
from attngen.plan.traits import bands_of, gathers, is_light, key_loads, reads_data_per_key
from attngen.schema.expand import KernelSpec, Roles

_SOFTMAXES = ("fixed_reference", "lazy", "exact_max")
_ROWS = 64  # query rows of a consumer: M of wgmma
#: Bytes of a row that one copy may bring, swizzled: as many as divide the rows of all operands. Rows are padded to
#: the fewest.
BOX_BYTES = (SWIZZLE_BYTES, 64)
#: Bytes of a row of V where a kernel transposes it, so that no copy brings it.
TRANSPOSED_BYTES = (*BOX_BYTES, 32)

#: Keys that N of wgmma goes by in these kernels, at least.
_LEAST_KEYS = 16
#: Registers that a consumer needs beside S, P and O: addresses, references, indices and sums.
_OTHER_REGISTERS = 24
#: Registers of (producer, consumer) by number of consumers; together they are what the launch reserves.
_REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
#: Keys of a fragment of V that is transposed.
_FRAGMENT_KEYS = 16
#: Registers with which a warp that transposes V has four fragments in flight, not three.
_REGISTERS_OF_FOUR = 40
#: The same where the scheduler searches for bounds, or divides by groups of heads, for which 32 registers are few, if
#: the consumers can spare them.
_SEARCHING_REGISTERS = _REGISTERS | {3: (56, 152)}
#: ptxas takes a wgmma of more columns than the first only where threads begin with the second's registers (C7602).
_COLUMNS_OF_FEW_REGISTERS, _REGISTERS_OF_MORE_COLUMNS = 192, 142


@dataclass(frozen=True, slots=True)
class Choice:
    """What kernels of a family get, up to ``head_dim``."""

    family: str
    head_dim: int
    consumers: int
    tile_n: int
    schedule: str
    registers: tuple[int, int] | None = None  # of (producer, consumer) with that tile; None: as the consumers have


#: First match wins. A "light" mask is made of comparisons; a "gather" loads a value for each pair of query and key,
#: whose addresses take registers; a "score" does arithmetic on every logit, as dropout does on every probability, which
#: three consumers hide better than two, and "scored" says that nothing asks for tiles of few keys beside that; a
#: "listed" mask loads a value for each key; a "window" is light and ends on the left, so that small tiles save much.
#: Measured on an H200 where docs/performance.md says so; the rest follows from budgets.
TABLE = (
    Choice("light", 64, 3, 128, "pingpong"),
    Choice("gather", 128, 2, 64, "pingpong"),
    Choice("gather", 256, 2, 32, "pingpong"),
    Choice("score", 64, 3, 64, "pingpong"),
    Choice("scored", 128, 3, 80, "pingpong"),
    Choice("score", 128, 3, 64, "pingpong"),
    Choice("listed", 128, 3, 64, "pingpong"),
    Choice("window", 128, 3, 64, "pingpong"),
    Choice("any", 128, 2, 128, "pingpong"),
    Choice("any", 192, 2, 96, "pingpong"),
    Choice("any", 256, 2, 64, "pingpong"),
)

#: Keys of a tile and stages among which the fastest are looked for.
_TUNED_KEYS, _TUNED_STAGES = (32, 64, 80, 96, 112, 128, 160, 176, 192), (2, 3)

#: Keys of a tile that are tried where those of the table take too many registers, or too much memory.
_FEWER_KEYS = (64, 32, 16)


@dataclass(frozen=True, slots=True)
class Probabilities:
    """How P stays within its dtype: the sum of a lane's probabilities that asks for a new reference, the growth of the
    running max at which a lazy reference follows, and log2 of P of the largest logit when the reference is set.
    ``settled``, where the largest P is not far above that, so that a partial first tile, or many logits that are alike,
    would ask for a new reference often: log2 of the sum at most that one leaves a lane."""

    redo_above: str
    raise_above: str = "8.0f"
    peak: int = 0
    settled: int = 0


#: Sums stay far below the largest float16, and below float32's square root for their own sake.
PROBABILITIES = {"bf16": Probabilities("0x1p40f"), "fp16": Probabilities("0x1p14f")}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """The tile and the roles of a Hopper kernel, before its arguments are known."""

    tile_m: int
    tile_n: int
    stages: int
    roles: HopperForward


@dataclass(frozen=True, slots=True)
class Form:
    """What tells the Hopper forwards apart, each from a module of its own.

    ``check`` refuses what the roles of a spec and the driver of its tiles do not allow. ``warp_roles`` returns the
    roles with their registers, for a number of consumers, keys of a tile and columns of V, and for the registers that a
    table gives, if it does. ``products`` counts the
    wgmma instructions of a kernel, from those of one Q K^T and of one P V. ``numbers`` says by dtype how probabilities
    are kept within it. ``transposes``: V has to be turned before its product.
    """

    schedule: str
    label: str
    specialized: bool
    check: Callable[[KernelSpec, Roles, str], None]
    warp_roles: Callable[[KernelSpec, Roles, int, int, int, tuple[int, int] | None], tuple[Role, ...]]
    products: Callable[[HopperForward, int, int], int]
    numbers: Mapping[str, Probabilities]
    table: tuple[Choice, ...]
    transposes: bool = False


def widths(head_dim: int, element: DType, parts: int = 1) -> Columns:
    """Return the columns that a head dim takes in shared memory: whole copies, of each of its ``parts``."""
    columns = parts * BOX_BYTES[-1] // element.bytes
    return Columns(0, -(-head_dim // columns) * columns, head_dim)


def _is_paged(spec: KernelSpec) -> bool:
    return LAYOUTS[spec.layout].key_access == "paged"


def _widths(spec: KernelSpec, operands: Operands) -> tuple[Columns, Columns]:
    """Return the columns of q and k, and those of v. A copy of a page may bring a single row, of 128 bytes then: it
    begins at a multiple of these in shared memory."""
    parts = BOX_BYTES[0] // BOX_BYTES[-1] if _is_paged(spec) else 1
    return widths(spec.head_dim_qk, operands.q, parts), widths(spec.head_dim_v, operands.v, parts)


def widest_box(*row_bytes: int, among: tuple[int, ...] = BOX_BYTES) -> int:
    """Return the bytes of a row of one copy: the most of which each of ``row_bytes`` is a whole number."""
    return next(box for box in among if all(size % box == 0 for size in row_bytes))


def plan_forward(spec: KernelSpec, arch: Arch, form: Form) -> Plan:
    """Return the plan of a Hopper forward of that form."""
    if refused := refusal(spec, arch, form.numbers):
        raise refused
    if spec.softmax_scale is not None:
        raise refuse(spec, "softmax_scale", "the scale is an argument of the call; leave it out")
    check_head_dims(spec)
    driver = driver_of(spec)
    pack_gqa = spec.pack_gqa is True
    if pack_gqa and driver == "tile_map":
        raise refuse(
            spec,
            "pack_gqa",
            "a tile map lists the tiles of single heads; allowed: false, or true with tile_map: never",
        )
    if pack_gqa and spec.variant.dropout:
        raise refuse(
            spec, "pack_gqa", "random numbers serve rows of one head, and packed rows are of several; allowed: false"
        )
    operands = operands_of(spec)
    tile, columns = hopper_tile(spec, arch, driver, form), _widths(spec, operands)
    roles = tile.roles
    warpgroups = roles.consumers + roles.specialized
    usual = roles.schedule == ("pingpong" if roles.consumers > 1 and roles.specialized else "cooperative")
    planned = drafted(
        spec,
        label=form.label,
        width=f"c{roles.consumers}" if roles.specialized else f"w{4 * warpgroups}",
        tile_map=driver == "tile_map",
        alignment=16,
        choices=(
            *([] if usual else [roles.schedule]),
            *([] if roles.overlap else ["nooverlap"]),
            *([] if roles.softmax == "fixed_reference" else [roles.softmax.replace("_", "")]),
            *([] if roles.persistent or not roles.specialized else ["single"]),
            *([] if roles.longest_first else ["natural"]),
            *([] if roles.staged else ["direct"]),
            *(["pack"] if pack_gqa else []),
            *(["transposedv"] if spec.transposed_v else []),
            *([_scale_label(spec.scale_block)] if spec.scale_block else []),
        ),
        columns_qk=columns[:1],
        columns_v=columns[1:],
        backend="cuda",
        schedule=form.schedule,
        loads="descriptor",
        q_operand="shared",
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        stages=tile.stages,
        num_warps=4 * warpgroups,
        max_registers=None,
        driver=driver,
        mask_code="branch",
        softmax=roles.softmax,
        section_bytes=SECTION_BYTES,
        structure=roles,
        times=times_of(roles.consumers, tile.tile_n, max(each.width for each in columns), operands.q.bytes),
        visible=visible_keys(spec),
        pack_gqa=pack_gqa,
    )
    return forward_launches(
        planned,
        _arguments(planned, roles),
        lambda: arguments.classifier_signature(planned, "q_tiles", max_seqlen_k=True),
        persistent=roles.persistent,
        pdl=roles.specialized,
        shared_bytes=roles.shared_bytes,
        max_spills=SPILLS.bytes,
        products=_products(planned, roles, form),
    )


def _scale_label(block: int) -> str:
    """Return how names of kernels say what shares a scale."""
    return "tokenscales" if block == 1 else f"scale{block}"


def _arguments(plan: Plan, roles: HopperForward) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    boxes = partial(arguments.tensor_map, plan, box_bytes=roles.box_bytes)
    staged = [boxes("out", _ROWS, packed=plan.pack_gqa)] if roles.boxes_out else []
    v_map = boxes("v", plan.tile_n, window=plan.tile_n)
    if plan.transposed_v:
        box_bytes = widest_box(plan.tile_n * plan.operands.v.bytes)
        v_map = arguments.tensor_map(plan, "v", plan.columns_v[0].width, box_bytes=box_bytes)
    operands = (
        boxes("q", plan.tile_m, packed=plan.pack_gqa), boxes("k", plan.tile_n), v_map, *staged,
        arguments.pointer(plan, "out"),
        arguments.row_pointer("lse"), *arguments.descales(plan),
    )  # fmt: skip
    return arguments.signature(
        plan, operands, tiles="q_tiles", strided=("out",), promised=False, counted=roles.persistent,
        max_seqlen_k=True, present=("lse", "seqused_k"),
    )  # fmt: skip


def _products(planned: Plan, roles: HopperForward, form: Form) -> int:
    """Return how many wgmma instructions the kernel has."""
    qk, pv = planned.columns_qk[0].width // planned.operands.q.mma_k, planned.tile_n // planned.operands.p.mma_k
    return form.products(roles, qk, pv)


def products_with_roles(roles: HopperForward, qk: int, pv: int) -> int:
    """Return how many there are: Q K^T for the first tile of a block, for that of a tile of work, and in the loop; P V
    in the loop and after it. Where consumers skip tiles, a tile of work may begin in two ways, one of which needs a
    Q K^T of its own."""
    return 4 * qk + 3 * pv if roles.skips else 3 * qk + 2 * pv


def hopper_tile(spec: KernelSpec, arch: Arch, driver: str, form: Form) -> HopperTile:
    """Return the tile, the roles and the memory of a kernel; PlanError with the sum if they cannot be had.

    Keys that the spec leaves open are fewer than the table's where roles that it gives leave no room for these.
    """
    qk, v = (columns.width for columns in _widths(spec, operands_of(spec)))
    families = _families(spec)
    choice = next(row for row in form.table if row.family in families and max(qk, v) <= row.head_dim)
    step = _key_step(operands_of(spec), form.transposes, spec.transposed_v)
    fewer = [n for n in _FEWER_KEYS if n < choice.tile_n and n % step == 0] if spec.roles and not spec.tile_n else []
    usual = choice.tile_n // step * step
    usual = min(usual, spec.scale_block) if spec.scale_block > 1 else usual
    *larger, least = spec.tile_n or usual, *fewer
    for tile_n in larger:
        with suppress(PlanError):
            return _tile(spec, arch, driver, form, choice, tile_n)
    return _tile(spec, arch, driver, form, choice, least)


def _tile(spec: KernelSpec, arch: Arch, driver: str, form: Form, choice: Choice, tile_n: int) -> HopperTile:
    """Return the tile of ``tile_n`` keys."""
    operands = operands_of(spec)
    size = operands.bytes_of("q", "k", "v", "p")
    qk, v = (columns.width for columns in _widths(spec, operands))
    roles = spec.roles or Roles()
    consumers = _consumers(spec, roles, choice)
    tile_m = _ROWS * consumers
    step = _key_step(operands, form.transposes, spec.transposed_v)
    if spec.scale_block > 1 and spec.scale_block % tile_n:
        raise refuse(
            spec,
            "tile.n",
            f"keys of a tile share a scale, and {tile_n} do not divide {spec.scale_block}; nearest: {spec.scale_block}",
        )
    if tile_n % step or not step <= tile_n <= 256:
        nearest = min(max(round(tile_n / step) * step, step), 256)
        raise refuse(spec, "tile.n", f"{tile_n} is not a multiple of {step} from {step} to 256; nearest: {nearest}")
    specialized = form.specialized
    form.check(spec, roles, driver)
    schedule = roles.schedule or (choice.schedule if consumers > 1 and specialized else "cooperative")
    if schedule == "pingpong" and consumers == 1:
        raise refuse(spec, "warps", "pingpong needs at least 2 consumers to take turns; allowed: cooperative")
    registers = choice.registers if (consumers, tile_n) == (choice.consumers, choice.tile_n) else None
    warp_roles = form.warp_roles(spec, roles, consumers, tile_n, v, registers)
    stages = spec.stages or 2
    if not 2 <= stages <= 8:
        raise refuse(spec, "pipeline.stages", f"{stages} is not allowed; allowed: 2 to 8")
    box = widest_box(qk * size, v * size)
    softmax, numbers = spec.softmax or _SOFTMAXES[0], form.numbers[spec.dtype]
    draft = HopperForward(
        specialized=specialized,
        consumers=consumers,
        warp_roles=warp_roles,
        pingpong=schedule == "pingpong",
        overlap=roles.overlap is not False,
        persistent=specialized and spec.persistent is not False,
        longest_first=spec.order != "natural",
        staged=spec.epilogue != "direct",
        boxes_out=spec.epilogue != "direct" and not (LAYOUTS[spec.layout].ragged_queries and spec.pack_gqa is True),
        skips=specialized and driver == "ranges" and spec.variant.mask != TRUE and tile_n < tile_m - _ROWS,
        q_stages=1,
        box_bytes=box,
        out_columns=v,
        lookahead=6 if _searches(spec) else 2,
        value_loader=_is_paged(spec) and not form.transposes,  # pages take many small copies
        key_values=key_loads(spec.variant, "packed" if spec.pack_gqa else "single")
        if specialized and not _is_paged(spec) and not form.transposes
        else 0,
        v_by_columns=form.transposes,
        transposes=form.transposes and not spec.transposed_v,
        redo_above=numbers.redo_above,
        redo_growth="4.0f",
        raise_above=numbers.raise_above,
        peak=numbers.peak,
        settled=numbers.settled,
        ahead=min(4 if warp_roles[-1].registers >= _REGISTERS_OF_FOUR else 3, tile_n // _FRAGMENT_KEYS)
        if form.transposes and not spec.transposed_v
        else 0,
        softmax=softmax,
        shared=(),
    )
    return HopperTile(
        tile_m, tile_n, stages, _with_memory(spec, arch, draft, driver, tile_m, tile_n, stages, qk, v, operands)
    )


def alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with other choices than those of its ``first`` plan, each with fewer registers taken:
    narrower tiles, then fewer consumers, which have more registers each, then probabilities that wait for V."""
    given, most = spec.roles or Roles(), first.structure.consumers
    fixed = given.consumer is not None or spec.tile_m is not None
    assert isinstance(first.structure, HopperForward)
    step = _key_step(first.operands, first.structure.v_by_columns, spec.transposed_v)
    narrower = [n for n in _FEWER_KEYS if n < first.tile_n and n % step == 0] if spec.tile_n is None else []
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
    step = _key_step(first.operands, first.structure.v_by_columns, spec.transposed_v)
    consumers = (1, 2) if spec.pack_gqa else (2, 3)
    keys = [n for n in _TUNED_KEYS if n % step == 0]
    for count, tile_n, stages, schedule in product(consumers, keys, _TUNED_STAGES, ("pingpong", "cooperative")):
        yield replace(spec, tile_n=tile_n, stages=stages, roles=Roles(consumer=count, schedule=schedule, overlap=True))


def _families(spec: KernelSpec) -> frozenset[str]:
    """Return the families of the table that a kernel belongs to."""
    found = {"any"}
    if is_light(spec.variant) and spec.layout != "varlen" and not spec.variant.dropout:
        found.add("light")
        if spec.layout == "dense" and any(interval.lo is not None for interval in bands_of(spec).visible):
            found.add("window")
    if gathers(spec.variant):
        found.add("gather")
    if spec.variant.score is not None or spec.variant.dropout:
        found.add("score")
    if reads_data_per_key(spec.variant):
        found.add("listed")
    elif _only_scores(spec):
        found.add("scored")
    if spec.pack_gqa:
        found.add("packed")
    if _is_paged(spec):
        found.add("paged")
    if spec.scale_block:
        found.add("tokens" if spec.scale_block == 1 else "blocks")
    return frozenset(found)


def _only_scores(spec: KernelSpec) -> bool:
    """Whether a kernel does arithmetic on every logit, and there is no reason for tiles of few keys."""
    plain = spec.layout == "dense" and spec.pack_gqa is not True and not spec.variant.dropout
    return plain and spec.variant.score is not None and all(each.lo is None for each in bands_of(spec).visible)


def _key_step(operands: Operands, v_by_columns: bool, transposed_v: bool) -> int:
    """Return what the keys of a tile are a multiple of; where they are columns of V, they fill swizzled rows."""
    if v_by_columns:
        return (BOX_BYTES if transposed_v else TRANSPOSED_BYTES)[-1] // operands.v.bytes
    return max(_LEAST_KEYS, operands.p.mma_k)


def refusal(spec: KernelSpec, arch: Arch, numbers: Mapping[str, Probabilities]) -> PlanError | None:
    """Return why a schedule cannot serve a spec at all, or None."""
    if not arch.wgmma:
        return refuse(spec, "backend", f"cuda kernels need wgmma, which {arch.name} lacks; allowed: triton")
    if spec.dtype not in numbers:
        return refuse(spec, "dtype", f"cuda kernels take {' and '.join(numbers)}, not {spec.dtype}")
    if spec.loads == "pointer":
        return refuse(spec, "loads", "cuda kernels load through tensor descriptors; allowed: descriptor")
    if spec.alignment not in (None, 16):
        return refuse(spec, "alignment", f"tensor descriptors need alignment 16, not {spec.alignment}")
    if spec.num_warps is not None:
        return refuse(spec, "warps", "cuda kernels have roles: give producer, consumer and schedule, not a count")
    if spec.tile_map == "always":
        return refuse(spec, "tile_map", "cuda kernels classify tiles themselves; allowed: auto, never")
    if spec.softmax not in (None, *_SOFTMAXES):
        return refuse(spec, "softmax", f"'{spec.softmax}' is not one of {', '.join(_SOFTMAXES)}")
    return None


def _consumers(spec: KernelSpec, roles: Roles, choice: Choice) -> int:
    """Return the number of consumers, which the rows of the tile and the roles must agree on."""
    if roles.producer not in (None, 0, 1):
        raise refuse(spec, "warps", f"{roles.producer} producers are not allowed; allowed: 0, 1")
    from_tile = spec.tile_m // _ROWS if spec.tile_m and spec.tile_m % _ROWS == 0 else None
    if spec.tile_m and from_tile not in _REGISTERS:
        raise refuse(spec, "tile.m", f"{spec.tile_m} is not allowed; allowed: 64, 128, 192 (64 rows per consumer)")
    # heads are packed where queries are few: the rows of one consumer hold them, and K and V bind, not the products
    by_default = 1 if spec.pack_gqa else choice.consumers
    consumers = roles.consumer or from_tile or by_default
    if consumers not in _REGISTERS:
        raise refuse(
            spec,
            "warps",
            f"{consumers} consumers are not allowed; allowed: {', '.join(map(str, _REGISTERS))}: a warp finds what the "
            f"rows of each see in {HopperForward.lanes_of_part} of its 32 lanes, and in as many what all rows see",
        )
    if from_tile not in (None, consumers):
        raise refuse(
            spec, "tile.m", f"{spec.tile_m} rows are not {consumers} consumers x {_ROWS}; nearest: {_ROWS * consumers}"
        )
    return consumers


def warp_roles(
    spec: KernelSpec, roles: Roles, consumers: int, tile_n: int, width_v: int,
    default: tuple[int, int] | None = None, *, transposes: bool = False,
) -> tuple[Role, ...]:  # fmt: skip
    """Return the roles with the registers per thread of the producer and of a consumer: what the spec gives, then the
    ``default``, then as many as suit the number of consumers."""
    if default is None:
        default = _REGISTERS[consumers]
        busy = _searches(spec) or spec.pack_gqa is True
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
    pages, turns = _is_paged(spec) and not transposes, transposes and not spec.transposed_v
    return forward_roles(consumers, producer, consumer, value_loader=pages, transposes=turns)


def _needed_registers(tile_n: int, width_v: int, operands: Operands) -> int:
    """Return what logits, probabilities, outputs and the rest take of a thread."""
    return sum(_fragments(tile_n, width_v, operands)) + _OTHER_REGISTERS


def _fragments(tile_n: int, width_v: int, operands: Operands) -> tuple[int, int, int]:
    """Return the registers of a thread that S, P and O take."""
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
            + ("a smaller tile.n needs less" if tile_n > min(_FEWER_KEYS) else "fewer consumers have more each"),
        )


def _searches(spec: KernelSpec) -> bool:
    """Whether the bounds of a tile are looked up in tensors, which takes some time."""
    return bool(spec.variant.uses(spec.variant.mask, spec.variant.score)[1]) and bands_of(spec).exact


def _with_memory(
    spec: KernelSpec,
    arch: Arch,
    draft: HopperForward,
    driver: str,
    tile_m: int,
    tile_n: int,
    stages: int,
    qk: int,
    v: int,
    operands: Operands,
) -> HopperForward:
    """Return the roles with the best use of shared memory that fits: Q twice, then all of O, then parts of O."""
    box = draft.box_bytes // operands.out.bytes
    parts = [columns for columns in (v // 2, 64, 32) if columns % box == 0 and v % columns == 0]
    choices = ((2, v), (1, v), *((1, columns) for columns in parts)) if draft.specialized else ((1, v),)
    for q_stages, out_columns in choices:
        roles = replace(draft, q_stages=q_stages, out_columns=out_columns)
        pipes = forward_pipes(
            roles, driver=driver, tile_m=tile_m, tile_n=tile_n, stages=stages, qk=qk, v=v, operands=operands,
            scale_block=spec.scale_block,
        )  # fmt: skip
        regions = pipes.regions
        # 1 KiB of the arch's limit is the system's, and stands before ours
        if regions[-1].offset + regions[-1].bytes <= arch.shared_memory:
            return replace(roles, shared=regions)
    sizes = {region.name: region.bytes for region in regions}
    total = regions[-1].offset + regions[-1].bytes
    raise refuse(
        spec,
        "tile",
        f"Shared memory {total} B exceeds {arch.shared_memory} B on {arch.name}: Q {sizes['q']} + K {sizes['k']} + "
        f"V {sizes['v']} ({stages} stages) + O {sizes.get('out', 0)} + barriers and records",
    )


def keep_promises(spec: KernelSpec) -> None:
    """Refuse what this backend would accept, and do less exactly than another: a spec has to name it for that."""
    if not spec.fast_math:
        raise refuse(
            spec, "fast_math", "the argument of exp2 is fused all the same; say 'backend: cuda' to accept that"
        )


FORM = Form(
    schedule="hopper_forward",
    label="wgmma",
    specialized=True,
    check=lambda spec, roles, driver: None,
    warp_roles=warp_roles,
    products=products_with_roles,
    numbers=PROBABILITIES,
    table=TABLE,
)

SCHEDULE = Schedule(
    name="hopper_forward",
    backend="cuda",
    direction="forward",
    template="cuda/forward/kernel.cu.j2",
    view="attngen.render.views.hopper_forward:cuda_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: spec.dtype not in QUANTIZED_DTYPES and (spec.roles is None or spec.roles.producer != 0),
    plan=lambda spec, arch: plan_forward(spec, arch, FORM),
    alternatives=alternatives,
    tunable=tunable,
    keep_promises=keep_promises,
    pipes=forward_pipes_of,
    explanation="attngen.tools.explain.hopper_forward:explain",
    layouts=("dense", "varlen", "paged"),
)
