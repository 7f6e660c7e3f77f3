"""Tiles of the Hopper forward kernels: keys, rows and order of consumers by table, and others where these do not
fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attngen.arch import Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import PlanError
from attngen.families.hopper_forward.candidates import (
    BIAS_STAGES,
    FEW_TILES,
    ROWS,
    Candidate,
    Form,
    bias_keys,
    candidates,
    key_step,
)
from attngen.families.hopper_forward.choices import ForwardChoice
from attngen.families.hopper_forward.kinds import SoftmaxKind, form_of, kind_of
from attngen.families.hopper_forward.memory import fits, memory_refusal, with_memory
from attngen.families.hopper_forward.pipes import forward_roles
from attngen.families.hopper_forward.registers import REGISTERS, register_refusal, registers_of, searches
from attngen.families.hopper_forward.softmax import is_soft_capped, softmax_of, takes_row_max, terms_of
from attngen.families.hopper_forward.structure import HopperForward
from attngen.lang.biases import biases, hiding_entries
from attngen.lang.ir import MAX_SEQLEN
from attngen.lang.simplify import TRUE
from attngen.parts.boxes import is_paged, operand_widths, widest_box
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.operands import operands_of
from attngen.plan.times import first_see_many_more, first_see_most, last_see_most
from attngen.plan.traits import (
    NO_KEY_VALUES,
    bands_of,
    computes_distance_values,
    key_values,
    may_see_all_keys,
)
from attngen.schema.kernel_spec import KernelSpec, Roles

#: Alignment, in keys, of the first key of a tile that ends with the last visible key (docs/notebook/tiles.md, "Anchored
#: tiles").
END_ALIGNMENT = 16

#: Keys of a fragment of V that is transposed.
_FRAGMENT_KEYS = 16

#: Registers per thread from which on a warp that transposes V has four fragments in flight, not three: with fewer,
#: four spill (docs/notebook/hopper_fp8.md, "Where a step spends its time").
_REGISTERS_OF_FOUR = 40

#: Columns up to which registers hold the sum of a first tile. Not measured: follows from registers.
_REMEMBERED_COLUMNS = 128

#: Columns up to which row maxima of a tile map are recomputed by the number of keys; beyond, that was not measured
#: (docs/notebook/softmax_and_masks.md, "Short rows at d 64").
_COUNTED_COLUMNS = 64

#: Stages of the ring of K and V where blocks split the keys of a tile; the first that fits is taken. A block mostly
#: waits for its first loads, and has room for more of them than other kernels (docs/notebook/hopper_forward.md,
#: "Sharing the keys of a tile").
_MANY_STAGES = (4, 3, 2)

#: Stages of the ring of a consumer that has its own; as many as fit are taken, and fewer were not measured
#: (docs/notebook/hopper_forward.md, "A ring for each consumer").
_OWN_STAGES = (6, 5, 4, 3, 2)

#: The most blocks of a cluster that every Hopper card takes.
_MOST_BLOCKS = 8

#: Columns up to which query tiles may be cut into parts; beyond, kernels with tile maps would spill registers
#: (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together").
_CUT_COLUMNS = 128

#: Consumers and keys of the tiles, and columns up to which, where a tile of 128 keys of a map is partial, a turn lasts
#: until products are done: there its softmax takes longer than its products (docs/notebook/softmax_and_masks.md,
#: "What a step at d 64 waits for").
_SQUARE, _MASKED_TURN_COLUMNS = (2, 128), 64

#: Steps of a work tile that are left to load when the loader asks for the next one, and where its bounds are searched
#: for (docs/notebook/hopper_forward.md, "How far ahead tiles are taken"; docs/notebook/hopper_backward.md, "A scheduler
#: warp").
_LOOKAHEAD, _SEARCHING_LOOKAHEAD = 2, 6

#: Times as much as its sum so far that a step may add to a lane's sum before row maxima are recomputed
#: (docs/notebook/softmax_and_masks.md, "Softmax").
_RECOMPUTE_GROWTH = "4.0f"


@dataclass(frozen=True, slots=True)
class HopperTile:
    """The tile and the roles of a Hopper kernel, before its arguments are known."""

    tile_m: int
    tile_n: int
    stages: int
    roles: HopperForward
    candidate: Candidate
    reason: str  # where the tile comes from


def hopper_tile(spec: KernelSpec, arch: Arch, iteration: str, form: Form) -> HopperTile:
    """Return the tile, the roles and the memory of a kernel: those of the first candidate that fits.

    Raises PlanError if none does, with the reason against the last one, which needs the least.
    """
    refused = None
    for candidate in candidates(spec, iteration, form):
        tile = _tile(spec, arch, iteration, form, candidate)
        if isinstance(tile, HopperTile):
            return tile
        refused = tile
    assert refused is not None  # there is at least one candidate
    raise refused


def _tile(spec: KernelSpec, arch: Arch, iteration: str, form: Form, candidate: Candidate) -> HopperTile | PlanError:
    """Return the tile of a candidate, or the error that excludes it. Raises PlanError for what excludes all of them."""
    choice, tile_n = candidate.choice, candidate.tile_n
    operands = operands_of(spec)
    size = operands.bytes_of("q", "k", "v", "p")
    qk, v = (columns.width for columns in operand_widths(spec, operands))
    roles = spec.roles or Roles()
    consumers = _consumers(spec, roles, choice)
    tile_m = ROWS * consumers
    block_keys = min(ROWS, tile_n) if choice.owns_blocks else 0
    map_rows = ROWS if block_keys else 0
    if refused := _key_refusal(spec, form, candidate):
        return refused
    form.check(spec, roles, iteration)
    schedule = roles.schedule or (choice.warps.schedule if consumers > 1 else "cooperative")
    if schedule == "pingpong" and consumers == 1:
        return refuse(spec, "warps", "pingpong needs at least 2 consumers to take turns; allowed: cooperative")
    as_chosen = (consumers, tile_n) == (choice.consumers, choice.tile.n)
    registers = registers_of(spec, roles, consumers, tile_n, v, choice.registers if as_chosen else None)
    if refused := register_refusal(spec, registers, consumers, tile_n, v, candidate.entries):
        return refused
    transposes = form.transposes and not spec.transposed_v
    value_loader = is_paged(spec) and not form.transposes  # pages take many small copies
    warp_roles = forward_roles(
        consumers, *registers, value_loader=value_loader, transposes=transposes, own=map_rows > 0
    )
    usual: tuple[int, ...] = (choice.pipeline.stages if as_chosen else 2,)
    if spec.split_tiles or map_rows:
        usual = _OWN_STAGES if map_rows else _MANY_STAGES
    if spec.stages and not 2 <= spec.stages <= 8:
        raise refuse(spec, "pipeline.stages", f"{spec.stages} is not allowed; allowed: 2 to 8")
    # rings of its own for each consumer leave no room for O
    staged = spec.epilogue == "staged" if map_rows else spec.epilogue != "direct" and not spec.split_tiles
    values = key_values(
        spec.variant, "packed" if spec.pack_gqa else "single", fast_math=spec.fast_math,
        bits=iteration == "tile_map" and not map_rows, tabled=candidate.table_bytes > 0,
    )  # fmt: skip
    if is_paged(spec) or map_rows:
        values = NO_KEY_VALUES
    kind, softmax = _softmax(spec, iteration, form, candidate, widest=max(qk, v), columns=qk + v)
    fragments = 4 if warp_roles[-1].registers >= _REGISTERS_OF_FOUR else 3
    draft = HopperForward(
        consumers=consumers,
        warp_roles=warp_roles,
        pingpong=schedule == "pingpong",
        keeps_turn=schedule == "pingpong" and choice.keeps_turn,
        keeps_masked_turn=schedule == "pingpong"
        and iteration == "tile_map"
        and not (form.transposes or map_rows)
        and (consumers, tile_n) == _SQUARE
        and max(qk, v) <= _MASKED_TURN_COLUMNS,
        overlap=roles.overlap is not False,
        persistent=spec.persistent is not False and not spec.split_tiles,
        staged=staged,
        boxes_out=staged and not (LAYOUTS[spec.layout].ragged_queries and spec.pack_gqa is True),
        q_stages=1,
        box_bytes=widest_box(qk * size, v * size),
        out_columns=v,
        lookahead=_SEARCHING_LOOKAHEAD if searches(spec) and candidate.entries == 1 else _LOOKAHEAD,
        value_loader=value_loader,
        # others if there is room; consumers of several entries know no others
        key_values=len(values) if candidate.entries > 1 else len(values.loads),
        distance_values=candidate.by_distance,
        v_by_columns=form.transposes,
        transposes=transposes,
        ahead=min(fragments, tile_n // _FRAGMENT_KEYS) if transposes else 0,
        shared=(),
        sharing=_MOST_BLOCKS if spec.split_tiles else 1,
        biases=len(biases(spec.variant, candidate.bias_bytes)),
        bias_bytes=candidate.bias_bytes,
        hides_by_entries=iteration == "tile_map"
        and not map_rows
        and hiding_entries(spec.variant, candidate.bias_bytes) is not None,
        map_rows=map_rows,
        block_keys=block_keys,
        table_bytes=candidate.table_bytes,
        bias_stages=BIAS_STAGES[-1] if candidate.bias_bytes else 0,
        entries=candidate.entries,
        **softmax,
        **_order(spec, iteration, form, candidate, consumers, map_rows=map_rows, kind=kind, widest=max(qk, v)),
    )

    for stages in (spec.stages,) if spec.stages else usual:
        memory = partial(
            with_memory, arch, iteration=iteration, tile_m=tile_m, tile_n=tile_n, stages=stages, qk=qk, v=v,
            operands=operands, scale_block=spec.scale_block,
        )  # fmt: skip
        with_most = _with_most(draft, len(values), memory, arch)
        if fits(with_most, arch):
            return HopperTile(tile_m, tile_n, stages, with_most, candidate, _reason(spec, candidate, consumers))
    return memory_refusal(spec, arch, with_most, stages)


def _reason(spec: KernelSpec, candidate: Candidate, consumers: int) -> str:
    """Origin of a tile, in words."""
    row = candidate.choice
    if spec.fixes_choices:
        return f"the spec's own; what it leaves open: {row.origin}"
    if (consumers, candidate.tile_n) != (row.consumers, row.tile.n):
        return f"fewer rows or keys than those of its row of the table, {ROWS * row.consumers} x {row.tile.n}"
    if row.within is not None:
        return f"predicted to take less than {row.within:g} times the time of the next row; {row.origin}"
    return row.origin


def _key_refusal(spec: KernelSpec, form: Form, candidate: Candidate) -> PlanError | None:
    """Reason against the keys of a candidate's tile, or None."""
    tile_n, tiled = candidate.tile_n, candidate.bias_bytes
    step = key_step(operands_of(spec), form.transposes, spec.transposed_v and not spec.grouped_v)
    if spec.scale_block > 1 and spec.scale_block % tile_n:
        return refuse(
            spec,
            "tile.n",
            f"keys of a tile share a scale, and {tile_n} do not divide {spec.scale_block}; nearest: {spec.scale_block}",
        )
    if tile_n % step or not step <= tile_n <= 256:
        nearest = min(max(round(tile_n / step) * step, step), 256)
        return refuse(spec, "tile.n", f"{tile_n} is not a multiple of {step} from {step} to 256; nearest: {nearest}")
    if tiled and tile_n % (least := bias_keys(spec, tiled)):
        return refuse(spec, "tile.n", f"{tile_n} keys are no whole copies of a bias, of {least} columns")
    return None


def _is_end_aligned(spec: KernelSpec, iteration: str, tile_n: int) -> bool:
    """Whether tiles of so many keys end with the last visible key."""
    return tile_n % END_ALIGNMENT == 0 and _can_be_end_aligned(spec, iteration)


def _softmax(
    spec: KernelSpec, iteration: str, form: Form, candidate: Candidate, *, widest: int, columns: int
) -> tuple[SoftmaxKind, dict[str, Any]]:
    """The kind of softmax, and fields of ``HopperForward`` about the row max and P: how it is kept, and what a logit
    costs. ``widest``: columns of the wider one of K and V; ``columns``: those of both."""
    numbers, tiled = form.numbers[spec.dtype], candidate.bias_bytes
    softmax, constant = softmax_of(spec, numbers.exponents)
    end_aligned = _is_end_aligned(spec, iteration, candidate.tile_n)
    terms = () if tiled or candidate.by_distance else terms_of(spec, constant, columns)
    capped = (
        not terms
        and widest <= form.capped_columns
        and softmax in ("first_max", "bounded")
        and not spec.variant.max_logits
        and not spec.scale_block
        and not tiled
        and is_soft_capped(spec)
    )
    absolute = spec.scale_block or spec.variant.max_logits
    relative = softmax == "first_max" and not absolute and takes_row_max(spec)
    # rows of a tile map begin with a partial tile, in which some see few keys
    by_count = end_aligned or (iteration == "tile_map" and not relative and widest <= _COUNTED_COLUMNS)
    remembers = numbers.lane_sum_log2 and softmax == "first_max" and end_aligned and widest <= _REMEMBERED_COLUMNS
    form_ = form_of(
        terms=terms, capped=capped, relative=relative, entries=candidate.entries, softmax=softmax,
        max_logits=spec.variant.max_logits,
    )  # fmt: skip
    kind = kind_of(softmax, form_, operands_of(spec).p.name)
    fields = {
        "softmax": softmax,
        "fixed_max": "0.0f" if constant is None else f"{constant:.1f}f",
        "recompute_above": numbers.recompute_above,
        "recompute_growth": _RECOMPUTE_GROWTH,
        "recompute_below": "1.0f" if remembers else "",
        "recompute_by_count": by_count and softmax == "first_max" and not capped and not numbers.lane_sum_log2,
        "raise_above": numbers.raise_above,
        "peak": numbers.peak,
        "lane_sum_log2": numbers.lane_sum_log2,
        "terms": terms,
        "capped": capped,
        "fused": kind.logits in ("fused", "powers"),
        "relative": relative,
    }
    return kind, fields


def _order(
    spec: KernelSpec,
    iteration: str,
    form: Form,
    candidate: Candidate,
    consumers: int,
    *,
    map_rows: int,
    kind: SoftmaxKind,
    widest: int,
) -> dict[str, Any]:
    """Fields of ``HopperForward`` about the order of work tiles, and of the tiles of keys of each."""
    tile_n = candidate.tile_n
    end_aligned = _is_end_aligned(spec, iteration, tile_n)
    # where tiles end with the last visible key, the rows of all consumers see some key of nearly every tile; not so
    # tiles of many keys under a window, whose far end differs from query to query
    together = end_aligned and (not form.transposes or tile_n <= ROWS or searches(spec))
    ranges = iteration == "ranges" and spec.variant.mask != TRUE and not together
    skips = ranges and tile_n < ROWS * (consumers - 1)
    from_first = ranges and spec.order != "natural" and first_see_most(spec)
    short_early = iteration == "ranges" and consumers >= FEW_TILES and _takes_short_early(spec)
    if iteration == "tile_map":
        # with some scores, parts would spill; and they go by the order of a map with bits
        longest = may_see_all_keys(spec.variant) and spec.variant.score is None and not map_rows
    else:
        longest = from_first and not skips and not short_early and first_see_many_more(spec)
    # in 8 bits, work tiles that take equally long are cut if they end unevenly
    alike = spec.variant.mask == TRUE and spec.variant.score is None and not spec.scale_block
    # row maxima of the tile where a score by distance is largest seldom are recomputed in later ones
    nearest_first = (
        candidate.by_distance > 0
        and kind.softmax == "first_max"
        and computes_distance_values(spec.variant, fast_math=spec.fast_math)
        and (iteration == "tile_map" or (iteration == "ranges" and not skips and _sees_both_sides(spec)))
    )
    begins_whole = not (skips or nearest_first or form.numbers[spec.dtype].lane_sum_log2)
    return {
        "longest_first": spec.order != "natural",
        "from_first": from_first,
        "short_early": short_early,
        "skips": skips,
        "whole_first": ranges and begins_whole and _may_begin_whole(spec),
        "nearest_first": nearest_first,
        "end_alignment": END_ALIGNMENT if end_aligned else 0,
        "cuts": kind.cuts and (alike if form.transposes else longest) and _can_be_cut(spec, widest),
    }


def _with_most(
    draft: HopperForward, key_values: int, memory: Callable[[HopperForward], HopperForward], arch: Arch
) -> HopperForward:
    """Return the ``draft`` with its memory, and with what else fits: first more stages of biases, if all of O still has
    room, and with several batch entries the next Q; else values of each key, up to ``key_values``, if
    nothing else becomes smaller for them."""
    least = memory(draft)
    for more in BIAS_STAGES[:-1] if draft.biases else ():
        roles = memory(replace(draft, bias_stages=more))
        keeps_q = draft.entries == 1 or roles.q_stages == least.q_stages
        if fits(roles, arch) and roles.out_columns == draft.out_columns and keeps_q:
            return roles
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


def _consumers(spec: KernelSpec, roles: Roles, choice: ForwardChoice) -> int:
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
