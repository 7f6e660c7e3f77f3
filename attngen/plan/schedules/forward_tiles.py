"""Tiles of the Hopper forward kernels: keys, rows and order of consumers by table, and others where these do not
fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from attngen.arch import Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import PlanError
from attngen.lang.biases import biases, element_bytes, lookups, reads_integers, rooms, without_biases
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.runs import TILE, positions
from attngen.lang.simplify import TRUE
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.operands import Operands, operands_of
from attngen.plan.schedules.forward_memory import (
    BOX_BYTES,
    TRANSPOSED_BYTES,
    fits,
    is_paged,
    memory_refusal,
    operand_widths,
    widest_box,
    with_memory,
)
from attngen.plan.schedules.forward_pipes import forward_roles
from attngen.plan.schedules.forward_registers import FEWER_KEYS, REGISTERS, register_refusal, registers_of, searches
from attngen.plan.schedules.forward_softmax import is_soft_capped, softmax_of, takes_row_max, terms_of
from attngen.plan.schedules.structures import HopperForward
from attngen.plan.times import first_see_many_more, first_see_most, last_see_most, row_time
from attngen.plan.traits import (
    NO_KEY_VALUES,
    bands_of,
    computes_distance_values,
    distance_values_of_score,
    gathers,
    is_light,
    key_values,
    may_see_all_keys,
    reads_data_per_key,
    without_distance_values,
)
from attngen.schema.expand import KernelSpec, Roles

SOFTMAXES = ("first_max", "lazy", "exact_max", "bounded")
ROWS = 64  # query rows of a consumer: M of wgmma

#: Least multiple of keys in N of wgmma.
_LEAST_KEYS = 16

#: Alignment, in keys, of the first key of a tile that ends with the last visible key.
END_ALIGNMENT = 16

#: Keys of a fragment of V that is transposed.
_FRAGMENT_KEYS = 16

#: Registers from which a warp that transposes V has four fragments in flight, not three.
_REGISTERS_OF_FOUR = 40

#: Columns up to which registers hold the sum of a first tile.
_REMEMBERED_COLUMNS = 128

#: Columns up to which row maxima of a tile map are recomputed by the number of keys; beyond, that was not measured.
_COUNTED_COLUMNS = 64

#: Columns of V up to which it leaves registers and memory for more keys than K has.
_NARROW_V = 128

#: Stages of the ring of K and V where blocks split the keys of a tile; the first that fits is taken. A block mostly
#: waits for its first loads, and has room for more of them than other kernels.
_MANY_STAGES = (4, 3, 2)

#: Stages of the ring of tiles of biases, the most that fit, and consumers of a block where those of the table leave no
#: room for them.
_BIAS_STAGES, _FEW_CONSUMERS = (3, 2), 2

#: The most blocks of a cluster that every Hopper card takes.
_MOST_BLOCKS = 8

#: Columns up to which query tiles may be cut into parts; beyond, kernels with tile maps would spill registers.
_CUT_COLUMNS = 128

#: Consumers and keys of the tiles that windows may have instead of their usual ones, up to how many columns, and by how
#: much their rows may take longer: short calls of fewer rows in a tile end more evenly.
_WIDE, _WIDE_COLUMNS, _MORE_EVEN = (2, 128), 128, 1.045

#: Consumers and keys of the tiles that masks which divide may have instead of their usual ones, up to how many columns
#: and for how many intervals of keys, and what their rows may take at most, over the usual.
_TALL, _TALL_COLUMNS, _TALL_INTERVALS, _SOONER = (3, 128), 64, 2, 0.97

#: Columns up to which a turn lasts until products are done where a tile of 128 keys of a map is partial: there its
#: softmax takes longer than its products.
_MASKED_TURN_COLUMNS = 64

#: With this many consumers or more, tiles have so many rows that few calls end evenly.
_FEW_TILES = 3

#: Keys of a tile, stages, and orders of consumers, among which the fastest are looked for.
_TUNED_KEYS, _TUNED_STAGES = (32, 64, 80, 96, 112, 128, 160, 176, 192), (2, 3)
_TUNED_ORDERS = ("pingpong", "cooperative")


@dataclass(frozen=True, slots=True)
class Choice:
    """Tile and order of the kernels of a family, up to ``head_dim``."""

    family: str
    head_dim: int
    consumers: int
    tile_n: int
    schedule: str
    registers: tuple[int, int] | None = None  # of (producer, consumer) with that tile; None: as the consumers have
    stages: int = 2  # of the ring of K and V with that tile; else 2
    keeps_turn: bool = False  # with ping-pong: until the products of a step are done


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Rules that keep P within its dtype.

    ``recompute_above``: a lane's sum of probabilities above which the row max is recomputed. ``raise_above``: growth of
    the running max at which a lazy row max follows. ``peak``: log2 of P of the largest logit when the row max is set.
    ``lane_sum_log2``: log2 of the most that a lane may sum after that, for dtypes whose largest P is not far above
    ``peak``: a partial first tile, or many equal logits, would often exceed it; 0: no limit. ``exponents``: log2 of the
    least and of the largest P of a row where a constant replaces the row max; None: there is no such kernel.
    """

    recompute_above: str
    raise_above: str = "8.0f"
    peak: int = 0
    lane_sum_log2: int = 0
    exponents: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HopperTile:
    """The tile and the roles of a Hopper kernel, before its arguments are known."""

    tile_m: int
    tile_n: int
    stages: int
    roles: HopperForward


@dataclass(frozen=True, slots=True)
class Form:
    """Differences between the Hopper forward kernels, each from a module of its own.

    ``check`` refuses what the roles of a spec and the iteration of its tiles do not allow. ``numbers`` has the rules
    for P by dtype. ``table``: first match wins. ``capped_columns``: columns up to which tanh and exp2 of a logit, which
    share the MUFU, take longer than its products. ``transposes``: V is transposed before its product.
    """

    schedule: str
    label: str
    check: Callable[[KernelSpec, Roles, str], None]
    numbers: Mapping[str, Probabilities]
    table: tuple[Choice, ...]
    capped_columns: int = 0
    transposes: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tile that a kernel may have, and what its loader stores so that consumers do not load or compute it per
    pair."""

    choice: Choice
    tile_n: int  # of the choice, or fewer
    bias_bytes: int  # of tiles of biases, for each pair
    by_distance: int  # values of each distance of a query from a key


def hopper_tile(spec: KernelSpec, arch: Arch, iteration: str, form: Form) -> HopperTile:
    """Return the tile, the roles and the memory of a kernel: those of the first candidate that fits.

    Raises PlanError if none does, with the reason against the last one, which needs the least.
    """
    refused = None
    for candidate in _candidates(spec, iteration, form):
        tile = _tile(spec, arch, iteration, form, candidate)
        if isinstance(tile, HopperTile):
            return tile
        refused = tile
    assert refused is not None  # there is at least one candidate
    raise refused


def _candidates(spec: KernelSpec, iteration: str, form: Form) -> Iterator[Candidate]:
    """Yield the tiles that a kernel may have, the fastest first.

    What the loader stores counts most. Then come the keys of the table, and, if the spec names roles or biases come as
    tiles, fewer keys. With biases, fewer consumers are tried for each, since a tile of fewer rows leaves more room.
    """
    qk, v = (columns.width for columns in operand_widths(spec, operands_of(spec)))
    for tiled, by_distance in dict.fromkeys(product((*_rooms(spec), 0), (_distance_values(spec), 0))):
        per_pair = without_biases(spec.variant, tiled) if tiled else spec.variant
        if by_distance:
            per_pair = without_distance_values(per_pair, fast_math=spec.fast_math)
        families = _families(replace(spec, variant=per_pair), iteration)
        if tiled and "window" not in families and not ("gather" in families and reads_integers(spec.variant, tiled)):
            families |= {"biased" if tiled > 1 else "narrow_bias"}
            if tiled == 1 and iteration == "tile_map" and lookups(spec.variant, tiled):
                families |= {"held_table"}
        rows = [row for row in form.table if row.family in families and max(qk, v) <= row.head_dim]
        choice = next(row for row in rows if not (_sees_ranges_by_runs(spec) and TILE % (ROWS * row.consumers)))
        if "window" in families and not form.transposes and _has_rows_of_one_head(spec):
            choice = _faster(spec, choice, max(qk, v))
        polynomial = choice.family == "scored" and not by_distance and terms_of(spec, _constant(spec, form), qk + v)
        if polynomial and not form.transposes:
            choice = replace(choice, consumers=_WIDE[0], tile_n=_WIDE[1])
        if iteration == "ranges" and not form.transposes and "light" not in families and _has_rows_of_one_head(spec):
            choice = _taller(spec, choice, max(qk, v))
        if iteration == "ranges" and not form.transposes and first_see_many_more(spec):
            # a tile of the first queries takes as long as many others together: the fewer its rows, the sooner it ends
            choice = next((row for row in rows if row.consumers < _FEW_TILES), choice)
        step = _key_step(operands_of(spec), form.transposes, spec.transposed_v and not spec.grouped_v)
        step = max(step, _bias_keys(spec, tiled) if tiled else 0)
        usual = choice.tile_n // step * step
        leaves_room = bool(spec.roles) or tiled > 0
        fewer = [n for n in FEWER_KEYS if n < usual and n % step == 0] if leaves_room and not spec.tile_n else []
        usual = min(usual, spec.scale_block) if spec.scale_block > 1 else usual
        choices = (choice, replace(choice, consumers=_FEW_CONSUMERS)) if tiled else (choice,)
        for tile_n, one in product((spec.tile_n or usual, *fewer), choices):
            yield Candidate(one, tile_n, tiled, by_distance)


def _faster(spec: KernelSpec, usual: Choice, columns: int) -> Choice:
    """The ``usual`` choice for a mask whose bands end on the left, or tiles of 128 x 128 if rows in the middle of a
    long sequence should take little more time in these."""
    if columns > _WIDE_COLUMNS:
        return usual
    wide = replace(usual, consumers=_WIDE[0], tile_n=_WIDE[1])
    times = [row_time(spec, each.consumers, each.tile_n, columns) for each in (usual, wide)]
    return wide if times[0] and times[1] and times[1] < _MORE_EVEN * times[0] else usual


def _taller(spec: KernelSpec, usual: Choice, columns: int) -> Choice:
    """The ``usual`` choice for a mask that divides, or tiles of 192 x 128 if rows in the middle of a long sequence
    should take less time in these."""
    if columns > _TALL_COLUMNS or usual.family != "any" or len(bands_of(spec).visible) > _TALL_INTERVALS:
        return usual
    tall = replace(usual, consumers=_TALL[0], tile_n=_TALL[1])
    times = [row_time(spec, each.consumers, each.tile_n, columns) for each in (usual, tall)]
    return tall if times[0] and times[1] and times[1] < _SOONER * times[0] else usual


def _constant(spec: KernelSpec, form: Form) -> float | None:
    """The constant that replaces the row max of all rows, if there is one."""
    return softmax_of(spec, form.numbers[spec.dtype].exponents)[1]


def _has_rows_of_one_head(spec: KernelSpec) -> bool:
    """Whether the rows of a tile are neighbouring queries of one head of a dense sequence, whose keys no blocks
    share."""
    return spec.layout == "dense" and not (spec.pack_gqa or spec.split_tiles)


def _rooms(spec: KernelSpec) -> tuple[int, ...]:
    """Bytes of biases for each pair that may come as tiles, the most first: where the rows of a tile are those of one
    head of one sequence, and one warp loads K and V."""
    if spec.dtype in QUANTIZED_DTYPES or is_paged(spec) or spec.pack_gqa or spec.split_tiles:
        return ()
    return rooms(spec.variant)


def _bias_keys(spec: KernelSpec, room: int) -> int:
    """Least number of keys in one copy of a bias, of which a tile has a whole number."""
    return BOX_BYTES[-1] // min(element_bytes(spec.variant, room))


def _distance_values(spec: KernelSpec) -> int:
    """The values of a distance that the loader of K may compute: where the rows of a tile are neighbouring queries of
    one head."""
    if is_paged(spec) or spec.pack_gqa or spec.split_tiles:
        return 0
    return len(distance_values_of_score(spec.variant, fast_math=spec.fast_math))


def _tile(spec: KernelSpec, arch: Arch, iteration: str, form: Form, candidate: Candidate) -> HopperTile | PlanError:
    """Return the tile of a candidate, or the error that excludes it. Raises PlanError for what excludes all of them."""
    choice, tile_n, tiled = candidate.choice, candidate.tile_n, candidate.bias_bytes
    operands = operands_of(spec)
    size = operands.bytes_of("q", "k", "v", "p")
    qk, v = (columns.width for columns in operand_widths(spec, operands))
    roles = spec.roles or Roles()
    consumers = _consumers(spec, roles, choice)
    tile_m = ROWS * consumers
    step = _key_step(operands, form.transposes, spec.transposed_v and not spec.grouped_v)
    if spec.scale_block > 1 and spec.scale_block % tile_n:
        return refuse(
            spec,
            "tile.n",
            f"keys of a tile share a scale, and {tile_n} do not divide {spec.scale_block}; nearest: {spec.scale_block}",
        )
    if tile_n % step or not step <= tile_n <= 256:
        nearest = min(max(round(tile_n / step) * step, step), 256)
        return refuse(spec, "tile.n", f"{tile_n} is not a multiple of {step} from {step} to 256; nearest: {nearest}")
    if tiled and tile_n % (least := _bias_keys(spec, tiled)):
        return refuse(spec, "tile.n", f"{tile_n} keys are no whole copies of a bias, of {least} columns")
    form.check(spec, roles, iteration)
    schedule = roles.schedule or (choice.schedule if consumers > 1 else "cooperative")
    if schedule == "pingpong" and consumers == 1:
        return refuse(spec, "warps", "pingpong needs at least 2 consumers to take turns; allowed: cooperative")
    as_chosen = (consumers, tile_n) == (choice.consumers, choice.tile_n)
    registers = registers_of(spec, roles, consumers, tile_n, v, choice.registers if as_chosen else None)
    if refused := register_refusal(spec, registers, consumers, tile_n, v):
        return refused
    warp_roles = forward_roles(
        consumers,
        *registers,
        value_loader=is_paged(spec) and not form.transposes,
        transposes=form.transposes and not spec.transposed_v,
    )
    usual = _MANY_STAGES if spec.split_tiles else (choice.stages if as_chosen else 2,)
    if spec.stages and not 2 <= spec.stages <= 8:
        raise refuse(spec, "pipeline.stages", f"{spec.stages} is not allowed; allowed: 2 to 8")
    box = widest_box(qk * size, v * size)
    numbers = form.numbers[spec.dtype]
    softmax, constant = softmax_of(spec, numbers.exponents)
    end_aligned = tile_n % END_ALIGNMENT == 0 and _can_be_end_aligned(spec, iteration)
    terms = () if tiled or candidate.by_distance else terms_of(spec, constant, qk + v)
    capped = (
        not terms
        and max(qk, v) <= form.capped_columns
        and softmax in ("first_max", "bounded")
        and not spec.scale_block
        and not tiled
        and is_soft_capped(spec)
    )
    # where tiles end with the last visible key, the rows of all consumers see some key of nearly every tile; not so
    # tiles of many keys
    # under a window, whose far end differs from query to query
    together = end_aligned and (not form.transposes or tile_n <= ROWS or searches(spec))
    ranges = iteration == "ranges" and spec.variant.mask != TRUE and not together
    skips = ranges and tile_n < tile_m - ROWS
    staged = spec.epilogue != "direct" and not spec.split_tiles
    values = key_values(
        spec.variant, "packed" if spec.pack_gqa else "single", fast_math=spec.fast_math,
        bits=iteration == "tile_map",
    )  # fmt: skip
    if is_paged(spec):
        values = NO_KEY_VALUES
    from_first = ranges and spec.order != "natural" and first_see_most(spec)
    short_early = iteration == "ranges" and consumers >= _FEW_TILES and _takes_short_early(spec)
    if iteration == "tile_map":
        longest = may_see_all_keys(spec.variant) and spec.variant.score is None  # with some scores, parts would spill
    else:
        longest = from_first and not skips and not short_early and first_see_many_more(spec)
    # in 8 bits, work tiles that take equally long are cut if they end unevenly
    alike = spec.variant.mask == TRUE and spec.variant.score is None and not spec.scale_block
    relative = softmax == "first_max" and not spec.scale_block and takes_row_max(spec)
    # rows of a tile map begin with a partial tile, in which some see few keys
    by_count = end_aligned or (iteration == "tile_map" and not relative and max(qk, v) <= _COUNTED_COLUMNS)
    # row maxima of the tile where a score by distance is largest seldom are recomputed in later ones
    nearest_first = (
        candidate.by_distance > 0
        and softmax == "first_max"
        and computes_distance_values(spec.variant, fast_math=spec.fast_math)
        and (iteration == "tile_map" or (iteration == "ranges" and not skips and _sees_both_sides(spec)))
    )
    draft = HopperForward(
        consumers=consumers,
        warp_roles=warp_roles,
        pingpong=schedule == "pingpong",
        keeps_turn=schedule == "pingpong" and choice.keeps_turn,
        keeps_masked_turn=schedule == "pingpong"
        and iteration == "tile_map"
        and not form.transposes
        and (consumers, tile_n) == _WIDE
        and max(qk, v) <= _MASKED_TURN_COLUMNS,
        overlap=roles.overlap is not False,
        persistent=spec.persistent is not False and not spec.split_tiles,
        longest_first=spec.order != "natural",
        from_first=from_first,
        short_early=short_early,
        staged=staged,
        boxes_out=staged and not (LAYOUTS[spec.layout].ragged_queries and spec.pack_gqa is True),
        skips=skips,
        whole_first=ranges and not (skips or nearest_first or numbers.lane_sum_log2) and _may_begin_whole(spec),
        nearest_first=nearest_first,
        q_stages=1,
        box_bytes=box,
        out_columns=v,
        lookahead=6 if searches(spec) else 2,
        value_loader=is_paged(spec) and not form.transposes,  # pages take many small copies
        key_values=len(values.loads),  # others if there is room
        distance_values=candidate.by_distance,
        v_by_columns=form.transposes,
        transposes=form.transposes and not spec.transposed_v,
        recompute_above=numbers.recompute_above,
        recompute_growth="4.0f",
        raise_above=numbers.raise_above,
        peak=numbers.peak,
        lane_sum_log2=numbers.lane_sum_log2,
        ahead=min(4 if warp_roles[-1].registers >= _REGISTERS_OF_FOUR else 3, tile_n // _FRAGMENT_KEYS)
        if form.transposes and not spec.transposed_v
        else 0,
        softmax=softmax,
        recompute_below="1.0f"
        if numbers.lane_sum_log2 and softmax == "first_max" and end_aligned and max(qk, v) <= _REMEMBERED_COLUMNS
        else "",
        fixed_max="0.0f" if constant is None else f"{constant:.1f}f",
        capped=capped,
        terms=terms,
        fused=softmax == "bounded" and not capped,
        end_alignment=END_ALIGNMENT if end_aligned else 0,
        recompute_by_count=by_count and softmax == "first_max" and not capped and not numbers.lane_sum_log2,
        relative=relative,
        shared=(),
        sharing=_MOST_BLOCKS if spec.split_tiles else 1,
        biases=len(biases(spec.variant, tiled)),
        bias_bytes=tiled,
        bias_stages=_BIAS_STAGES[-1] if tiled else 0,
        cuts=(alike if form.transposes else longest and softmax != "bounded") and _can_be_cut(spec, max(qk, v)),
    )

    for stages in (spec.stages,) if spec.stages else usual:
        memory = partial(
            with_memory, arch, iteration=iteration, tile_m=tile_m, tile_n=tile_n, stages=stages, qk=qk, v=v,
            operands=operands, scale_block=spec.scale_block,
        )  # fmt: skip
        with_most = _with_most(draft, len(values), memory, arch)
        if fits(with_most, arch):
            return HopperTile(tile_m, tile_n, stages, with_most)
    return memory_refusal(spec, arch, with_most, stages)


def _with_most(
    draft: HopperForward, key_values: int, memory: Callable[[HopperForward], HopperForward], arch: Arch
) -> HopperForward:
    """Return the ``draft`` with its memory, and with what else fits: first more stages of biases, if all of O still has
    room; else values of each key, up to ``key_values``, if nothing else becomes smaller for them."""
    for more in _BIAS_STAGES[:-1] if draft.biases else ():
        roles = memory(replace(draft, bias_stages=more))
        if fits(roles, arch) and roles.out_columns == draft.out_columns:
            return roles
    least = memory(draft)
    for count in range(key_values, draft.key_values, -1) if fits(least, arch) else ():
        roles = memory(replace(draft, key_values=count))
        if fits(roles, arch) and replace(roles, key_values=draft.key_values, shared=least.shared) == least:
            return roles
    return least


def _may_begin_whole(spec: KernelSpec) -> bool:
    """Whether the keys that rows see, and those that all rows of a tile see, are an interval each, or two in a dense
    sequence."""
    bands = bands_of(spec)
    dense = spec.layout == "dense" and not spec.pack_gqa and not spec.split_tiles
    return len(bands.visible) == len(bands.full) and len(bands.visible) in ((1, 2) if dense else (1,))


def _sees_both_sides(spec: KernelSpec) -> bool:
    """Whether the keys that rows see are an interval that does not end at the rows' own position."""
    visible = bands_of(spec).visible
    return len(visible) == 1 and visible[0].hi is None


def place_bits(step: int) -> int:
    """Bits of the first key of any tile, in multiples of ``step`` keys."""
    return ((MAX_SEQLEN - 1) // step).bit_length()


def _takes_short_early(spec: KernelSpec) -> bool:
    """Whether a call may take its shortest tiles after some of the longest. Mask-only kernels keep to the longest ones
    first: they take tiles of fewer rows, which end more evenly."""
    dense = spec.layout == "dense" and not spec.pack_gqa and spec.dtype not in QUANTIZED_DTYPES
    ordered = spec.order != "natural" and spec.persistent is not False and not spec.split_tiles
    return dense and ordered and spec.variant.score is not None and last_see_most(spec)


def _can_be_cut(spec: KernelSpec, columns: int) -> bool:
    """Whether query tiles may be cut into parts. Merging them adds no sink, and the host knows no ends of packed
    sequences."""
    plain = spec.layout == "dense" and not spec.pack_gqa and not spec.split_tiles and spec.variant.sink is None
    return plain and columns <= _CUT_COLUMNS and spec.persistent is not False and spec.order != "natural"


def _can_be_end_aligned(spec: KernelSpec, iteration: str) -> bool:
    """Whether tiles of keys may begin anywhere, and rows see an interval that ends on both sides, so that it pays.

    It does where heads share rows: work tiles then end at other queries than multiples of ``tile.n``.
    """
    if not spec.pack_gqa or iteration != "ranges" or LAYOUTS[spec.layout].key_access != "contiguous":
        return False
    visible = bands_of(spec).visible
    return len(visible) == 1 and visible[0].lo is not None and visible[0].hi is not None


def _consumers(spec: KernelSpec, roles: Roles, choice: Choice) -> int:
    """Return the number of consumers, which the rows of the tile and the roles must agree on."""
    if roles.producer not in (None, 1):
        raise refuse(spec, "warps", f"{roles.producer} producers are not allowed; allowed: 1")
    from_tile = spec.tile_m // ROWS if spec.tile_m and spec.tile_m % ROWS == 0 else None
    if spec.tile_m and from_tile not in REGISTERS:
        raise refuse(spec, "tile.m", f"{spec.tile_m} is not allowed; allowed: 64, 128, 192 (64 rows per consumer)")
    # heads are packed where queries are few: the rows of one consumer hold them, and K and V bind, not the products
    by_default = 1 if spec.pack_gqa else min(choice.consumers, 2) if spec.split_tiles else choice.consumers
    consumers = roles.consumer or from_tile or by_default
    if consumers not in REGISTERS:
        raise refuse(
            spec,
            "warps",
            f"{consumers} consumers are not allowed; allowed: {', '.join(map(str, REGISTERS))}: a warp finds what the "
            f"rows of each see in {HopperForward.lanes_of_part} of its 32 lanes, and in as many what all rows see",
        )
    if from_tile not in (None, consumers):
        raise refuse(
            spec, "tile.m", f"{spec.tile_m} rows are not {consumers} consumers x {ROWS}; nearest: {ROWS * consumers}"
        )
    return consumers


def alternatives(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a forward with other choices than those of its ``first`` plan, each with fewer registers:
    narrower tiles, then fewer consumers, which have more registers each, then probabilities that wait for V."""
    given, most = spec.roles or Roles(), first.structure.consumers
    fixed = given.consumer is not None or spec.tile_m is not None
    assert isinstance(first.structure, HopperForward)
    step = _key_step(first.operands, first.structure.v_by_columns, spec.transposed_v and not spec.grouped_v)
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
    step = _key_step(first.operands, first.structure.v_by_columns, spec.transposed_v and not spec.grouped_v)
    consumers = (1, 2) if spec.pack_gqa else (2, 3)
    keys = [n for n in _TUNED_KEYS if n % step == 0]
    for count, tile_n, stages, schedule in product(consumers, keys, _TUNED_STAGES, _TUNED_ORDERS):
        roles = Roles(consumer=count, schedule=schedule, overlap=True)
        yield replace(spec, tile_n=tile_n, stages=stages, roles=roles)


def _families(spec: KernelSpec, iteration: str) -> frozenset[str]:
    """Return the families of the table that a kernel belongs to. A tile map brings the mask as bits, so that what its
    expression reads does not matter."""
    if iteration == "tile_map":
        spec = replace(spec, variant=replace(spec.variant, mask=TRUE))
    families = {"any"}
    if is_light(spec.variant) and not spec.variant.dropout:
        families.add("light")
        visible = bands_of(spec).visible
        if spec.layout == "dense" and any(interval.lo is not None for interval in visible):
            families.add("window")
        elif spec.layout == "dense" and spec.pack_gqa is not True:
            families.add("plain")
            if spec.head_dim_v <= _NARROW_V < spec.head_dim_qk:
                families.add("narrow_v")
    if gathers(spec.variant):
        families.add("gather")
    elif iteration == "tile_map":
        families.add("mapped")
    if spec.variant.score is not None or spec.variant.dropout:
        families.add("score")
    if reads_data_per_key(spec.variant):
        families.add("listed")
        if _has_rows_of_one_head(spec):
            families.add("listed_by_head")
    elif _only_scores(spec):
        families.add("scored")
    if spec.pack_gqa:
        families.add("packed")
    if is_paged(spec):
        families.add("paged")
    if spec.scale_block:
        families.add("tokens" if spec.scale_block == 1 else "blocks")
    return frozenset(families)


def _only_scores(spec: KernelSpec) -> bool:
    """Whether a kernel does arithmetic on every logit, and there is no reason for tiles of few keys."""
    plain = spec.layout == "dense" and spec.pack_gqa is not True and not spec.variant.dropout
    return plain and spec.variant.score is not None and all(each.lo is None for each in bands_of(spec).visible)


def _sees_ranges_by_runs(spec: KernelSpec) -> bool:
    """Whether rows lie in runs and see no keys before some place: a tile across two runs would visit all keys between
    these, so that tiles have to end where runs do."""
    return positions(spec.variant) is not None and any(each.lo is not None for each in bands_of(spec).visible)


def _key_step(operands: Operands, v_by_columns: bool, transposed_v: bool) -> int:
    """Least multiple of the keys of a tile; where keys are columns of V, they fill swizzled rows, of which a copy of
    ``transposed_v`` brings no narrow ones."""
    if v_by_columns:
        return (BOX_BYTES if transposed_v else TRANSPOSED_BYTES)[-1] // operands.v.bytes
    return max(_LEAST_KEYS, operands.p.mma_k)
