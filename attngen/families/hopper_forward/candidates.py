"""Tiles that a Hopper forward kernel may have, the fastest first: rows of a table, by families of masks and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.families.hopper_forward.choices import TABLES, ForwardChoice, ForwardWork, facts_of, has_own_blocks
from attngen.families.hopper_forward.registers import FEWER_KEYS
from attngen.lang.biases import element_bytes, rooms, without_biases
from attngen.lang.runs import TILE, positions
from attngen.lang.simplify import TRUE
from attngen.lang.tables import ENTRY_BYTES, Table, tables, without_tables
from attngen.lang.variant import Variant
from attngen.parts.boxes import BOX_BYTES, TRANSPOSED_BYTES, is_paged, operand_widths
from attngen.parts.probabilities import Probabilities
from attngen.plan.operands import Operands, operands_of
from attngen.plan.times import first_see_many_more, row_time
from attngen.plan.traits import (
    bands_of,
    distance_values_of_score,
    without_distance_values,
)
from attngen.schema.kernel_spec import KernelSpec, Roles

ROWS = 64  # query rows of a consumer: M of wgmma

#: Least multiple of keys in N of wgmma.
_LEAST_KEYS = 16

#: Stages of the ring of tiles of biases, the most that fit, and consumers of a block where those of the table leave no
#: room for them. Not measured one against the other: they follow from shared memory.
BIAS_STAGES, _FEW_CONSUMERS = (3, 2), 2

#: Consumers from which on tiles have so many rows that few calls end evenly
#: (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together").
FEW_TILES = 3


@dataclass(frozen=True, slots=True)
class Form:
    """Differences between the Hopper forward kernels, each from a module of its own.

    ``check`` refuses what the roles of a spec and the iteration of its tiles do not allow. ``numbers`` has the rules
    for P by dtype. ``capped_columns``: columns up to which tanh and exp2 of a logit, which share the MUFU, take longer
    than its products. ``transposes``: V is transposed before its product.
    """

    schedule: str
    label: str
    check: Callable[[KernelSpec, Roles, str], None]
    numbers: Mapping[str, Probabilities]
    capped_columns: int = 0
    transposes: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tile that a kernel may have, and what its loader stores so that consumers do not load or compute it per
    pair."""

    work: ForwardWork
    row: ForwardChoice  # of the table
    choice: ForwardChoice  # the row, or one with fewer consumers
    tile_n: int  # of the choice, or fewer
    entries: int  # of the batch, in a work tile
    bias_bytes: int  # of tiles of biases, for each pair
    by_distance: int  # values of each distance of a query from a key
    table_bytes: int  # of small tables, of which consumers hold copies


def candidates(spec: KernelSpec, iteration: str, form: Form) -> Iterator[Candidate]:
    """Yield the tiles that a kernel may have, the fastest first.

    What the loader stores counts most. Then come the keys of the table, and, if the spec names roles or biases come as
    tiles, fewer keys. With biases, fewer consumers are tried for each, since a tile of fewer rows leaves more room.
    """
    qk, v = (columns.width for columns in operand_widths(spec, operands_of(spec)))
    exponents = form.numbers[spec.dtype].exponents
    own = has_own_blocks(spec, iteration)
    for tiled, by_distance, table_bytes, per_pair in _brought(spec):
        if by_distance and own and not tiled:  # to visit fewer blocks saves more than values of distances would
            continue
        if iteration == "tile_map":
            per_pair = replace(per_pair, mask=TRUE)
        work = ForwardWork(spec, replace(spec, variant=per_pair), iteration, tiled, by_distance, exponents)
        choice = _choice(work, form, max(qk, v))
        for row in _rows_of_entries(work, form, max(qk, v)) if tiled else ():
            yield Candidate(work, row, row, row.tile.n, row.entries, tiled, by_distance, table_bytes)
        step = key_step(operands_of(spec), form.transposes, spec.transposed_v and not spec.grouped_v)
        step = max(step, bias_keys(spec, tiled) if tiled else 0)
        usual = choice.tile.n // step * step
        leaves_room = bool(spec.roles) or tiled > 0
        fewer = [n for n in FEWER_KEYS if n < usual and n % step == 0] if leaves_room and not spec.tile_n else []
        usual = min(usual, spec.scale_block) if spec.scale_block > 1 else usual
        choices = (choice, choice.resized(_FEW_CONSUMERS, choice.tile.n)) if tiled else (choice,)
        for tile_n, one in product((spec.tile_n or usual, *fewer), choices):
            yield Candidate(work, choice, one, tile_n, 1, tiled, by_distance, table_bytes)


def _brought(spec: KernelSpec) -> Iterator[tuple[int, int, int, Variant]]:
    """Yield the bytes of biases for each pair, values of each distance and bytes of tables that consumers find in
    shared memory, the most first, and the variant without these: what they load and compute for each pair."""
    for tiled, by_distance in dict.fromkeys(product((*_rooms(spec), 0), (_distance_values(spec), 0))):
        per_pair = without_biases(spec.variant, tiled) if tiled else spec.variant
        if by_distance:
            per_pair = without_distance_values(per_pair, fast_math=spec.fast_math)
        if held := _tables(spec, per_pair):
            score = without_tables(per_pair.score, held) if per_pair.score is not None else None
            yield tiled, by_distance, ENTRY_BYTES * sum(each.entries for each in held), replace(per_pair, score=score)
        yield tiled, by_distance, 0, per_pair


def _rows_of_entries(work: ForwardWork, form: Form, columns: int) -> list[ForwardChoice]:
    """The rows of the table that suit a kernel and have several batch entries in a work tile, with as many keys as the
    spec wants."""
    rows = (row for row in TABLES[form.schedule].suiting(facts_of(work), columns) if row.entries > 1)
    return [row for row in rows if work.asked.tile_n in (None, row.tile.n)]


def _choice(work: ForwardWork, form: Form, columns: int) -> ForwardChoice:
    """The first row that suits a kernel, of those ``within`` a prediction only if it holds. Where runs decide what rows
    see, tiles have to end where these do."""
    spec, table = work.asked, TABLES[form.schedule]
    rows: Iterable[ForwardChoice] = (row for row in table.suiting(facts_of(work), columns) if row.entries == 1)
    if work.iteration == "ranges" and not form.transposes and first_see_many_more(spec):
        # a tile of the first queries takes as long as many others together: the fewer its rows, the sooner it ends
        # (docs/notebook/softmax_and_masks.md, "Long rows, and blocks that end together")
        rows = list(rows)
        rows = [row for row in rows if row.within is None and row.consumers < FEW_TILES] or rows
    by_runs = _sees_ranges_by_runs(spec)
    predicted: list[ForwardChoice] = []
    for row in rows:
        if by_runs and TILE % (ROWS * row.consumers):
            continue
        if row.within is None:
            return next((each for each in predicted if _is_within(spec, each, row, columns)), row)
        predicted.append(row)
    raise table.error(columns)


def _is_within(spec: KernelSpec, row: ForwardChoice, usual: ForwardChoice, columns: int) -> bool:
    """Whether rows in the middle of a long sequence should take less than ``within`` times the time of the ``usual``
    choice (docs/notebook/tiles.md, "Narrow bands" and "Masks that divide, at d 64")."""
    time, other = (row_time(spec, each.consumers, each.tile.n, columns) for each in (row, usual))
    return bool(time and other and row.within and time < row.within * other)


def _rooms(spec: KernelSpec) -> tuple[int, ...]:
    """Bytes of biases for each pair that may come as tiles, the most first: where the rows of a tile are those of one
    head of one sequence, and one warp loads K and V."""
    if spec.dtype in QUANTIZED_DTYPES or is_paged(spec) or spec.pack_gqa or spec.split_tiles:
        return ()
    return rooms(spec.variant)


def bias_keys(spec: KernelSpec, room: int) -> int:
    """Least number of keys in one copy of a bias, of which a tile has a whole number."""
    return BOX_BYTES[-1] // min(element_bytes(spec.variant, room))


def _distance_values(spec: KernelSpec) -> int:
    """The values of a distance that the loader of K may compute: where the rows of a tile are neighbouring queries of
    one head."""
    if is_paged(spec) or spec.pack_gqa or spec.split_tiles:
        return 0
    return len(distance_values_of_score(spec.variant, fast_math=spec.fast_math))


def _tables(spec: KernelSpec, per_pair: Variant) -> tuple[Table, ...]:
    """The tables that a score still reads ``per_pair``, of which consumers may hold copies: where the rows of a tile
    are those of one head, and one block has all of their keys."""
    if spec.dtype in QUANTIZED_DTYPES or is_paged(spec) or spec.pack_gqa or spec.split_tiles or per_pair.score is None:
        return ()
    return tables(per_pair.score, spec.variant)


def _sees_ranges_by_runs(spec: KernelSpec) -> bool:
    """Whether rows lie in runs and see no keys before some place: a tile across two runs would visit all keys between
    these, so that tiles have to end where runs do."""
    return positions(spec.variant) is not None and any(each.lo is not None for each in bands_of(spec).visible)


def key_step(operands: Operands, v_by_columns: bool, transposed_v: bool) -> int:
    """Least multiple of the keys of a tile; where keys are columns of V, they fill swizzled rows, of which a copy of
    ``transposed_v`` brings no narrow ones."""
    if v_by_columns:
        return (BOX_BYTES if transposed_v else TRANSPOSED_BYTES)[-1] // operands.v.bytes
    return max(_LEAST_KEYS, operands.p.mma_k)
