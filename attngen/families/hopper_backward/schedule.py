"""The Hopper backward in CUDA: one kernel by tiles of keys computes dK and dV, and adds dQ to its accumulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from attngen.arch import Arch
from attngen.dtypes import ATTENTION_DTYPES, HEAD_DIMS, DType, dtype
from attngen.errors import PlanError
from attngen.families.hopper_backward.choices import (
    BLOCK_OVERLAPS,
    CLUSTER_OVERLAPS,
    LABELS,
    TABLE,
    USUAL,
    BackwardChoice,
    QueriesOfTile,
    usual,
)
from attngen.families.hopper_backward.cluster_pipes import cluster_pipes, cluster_roles
from attngen.families.hopper_backward.kinds import (
    BLOCK_HEAD_DIM,
    NARROW,
    NOTHING,
    WORDS,
    Brought,
    facts_of,
    family_of,
    is_wide,
    per_pair_of,
    query_values_of,
    traits_of,
    varies,
)
from attngen.families.hopper_backward.launches import launches, workspaces
from attngen.families.hopper_backward.pipes import backward_pipes, backward_pipes_of, backward_roles
from attngen.families.hopper_backward.structure import HopperBackward
from attngen.lang.biases import MOST_HELD, biases, hiding_entries, rooms
from attngen.lang.distances import is_slight
from attngen.lang.printing import canonical
from attngen.lang.tables import ENTRY_BYTES, tables
from attngen.parts.boxes import BOX_BYTES, widest_box, widths
from attngen.parts.fields import ATTENTION, DESCRIPTORS, FUSED
from attngen.parts.heads import by_head
from attngen.plan.allowances import ALL_OF_DQ, left_to_others
from attngen.plan.choices import check_head_dims, is_beyond_256, iteration_of, refuse
from attngen.plan.draft import drafted
from attngen.plan.model import Plan
from attngen.plan.operands import Operands, operands_of
from attngen.plan.own_gradients import Way, differentiable_of, gradients_of
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.plan.times import first_seen_most, visible_queries
from attngen.plan.traits import (
    bands_of,
    costly_query_values,
    distance_values_of_score,
    is_light,
    reads_positions,
)
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec
from attngen.schema.measured import MeasuredRow
from attngen.schema.models import ChosenStages

#: P and dS pass from products to products in pairs that fill a register, and by stmatrix, which moves 16 bits.
_DTYPES = tuple(name for name in ATTENTION_DTYPES if dtype(name).mma is not None and dtype(name).register_elements == 2)
_CONSUMERS = 2
_KEYS = 64 * _CONSUMERS
#: Registers of a thread of the producer and of a consumer, up to head dim ``NARROW`` and beyond: dK and dV take most.
#: Not measured: follows from registers.
_NARROW_REGISTERS, _WIDE_REGISTERS = (40, 232), (24, 240)

#: Bytes of Q, dO and the dQ accumulator of the heads that run side by side: about half of the L2
#: (docs/notebook/hopper_backward.md, "The first kernel").
_L2_BYTES = 24 * 2**20
#: Least number of KV heads that run side by side where the mask reads tensors by position, as document masks do. A tile
#: sees few queries there, which stay in L2 in any case, and tiles differ in their number of steps: if heads ran one
#: after the other, the tiles of the last one would end unevenly (docs/notebook/hopper_backward.md, "Windows, documents
#: and scores beside causal, again" and "What short rows wait for").
_LEAST_HEADS_IN_L2 = 8

#: Most values of each distance of a query from a key that the loader stores beside a tile of Q. The limit was not
#: measured; one value was (docs/notebook/softmax_and_masks.md, "Values of distances in scores").
_DISTANCE_VALUES = 2
#: Most values of each query for which the mask divides; the loader stores them, too, if shared memory has room
#: (docs/notebook/softmax_and_masks.md, "Divisions by scalars").
_COSTLY_VALUES = 2

#: Stages of each consumer's ring of bias tiles; the first number that fits is taken (docs/notebook/hopper_backward.md,
#: "Tiles of biases").
_BIAS_STAGES = (2, 1)

#: Columns up to which consumers that take turns have registers for as many rows ahead where the derivative varies as
#: elsewhere. Not measured: the table says so.
_FEW_COLUMNS = 64

#: Tiles of Q and of dO in flight, and rows that are loaded ahead, among which ``attngen tune`` looks for the fastest:
#: those that rows of the table have, and their neighbours. Not measured.
_TUNED_Q_STAGES, _TUNED_STAGES, _TUNED_ROWS = (2, 3, 4), (1, 2, 3, 4), (0, 1, 2, 4)

#: Query tiles that all heads of a group visit before the next ones (docs/notebook/hopper_backward.md, "Stripes").
_QUERY_CHUNK = 8


#: Blocks of a cluster, which computes wide heads, and in which warpgroups have roles: dK and dV of 64 keys take the
#: registers of one each. Beyond head dim 256 two such pairs divide the columns of all matrices.
_CLUSTER = 2
#: Registers per thread of the four warpgroups of such a block, 512 in all: the producer, either one that keeps dK or
#: dV, and the one that multiplies dQ. The latter multiplies all columns of dQ at once up to head dim ``ALL_OF_DQ``, and
#: beyond it so many at a time; with fewer, the producer has more registers to find tiles
#: (docs/notebook/hopper_backward_wide.md, "What was run").
_ALL_REGISTERS = (40, 192, 88)
_REGISTERS_OF_PART = {64: (32, 208, 64), 32: (48, 208, 48)}


@dataclass(frozen=True, slots=True)
class Relief:
    """Ways in which a plan saves registers, after ptxas has refused a plan without them.

    ``rows_of_dropout``: rows of the table for dropout are taken, which need the fewest registers. ``lean``: the loader
    keeps as little in registers as it can. ``gathers``: consumers load biases and compute values of distances for each
    pair, although the loader could store them in shared memory. ``divides``: consumers divide for each query, not the
    loader. ``late``: the loader reads row statistics of a step when there is a stage for them.
    """

    rows_of_dropout: bool = False
    lean: bool = False
    gathers: bool = False
    divides: bool = False
    late: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Its labels in kernel names."""
        return tuple(name for name in ("lean", "gathers", "divides", "late") if getattr(self, name))


@dataclass(frozen=True, slots=True)
class _HopperTile:
    """Tile, stages of dO and roles of a kernel, before its shared memory is known."""

    choice: BackwardChoice
    stages: int
    roles: HopperBackward
    known: BackwardChoice  # where no table nor spec says another one of the same order
    origin: str  # of the choice, in words

    def labels(self, roles: HopperBackward, q_stages: int) -> Iterator[str]:
        """Labels in a kernel's name for what is not usual; ``q_stages`` of the usual ones fit."""
        yield from LABELS[roles.overlap]
        if self.choice.packed != self.known.packed:
            yield "packed" if self.choice.packed else "unpacked"
        if roles.q_stages != q_stages:
            yield f"q{roles.q_stages}"
        if self.choice.rows_ahead != self.known.rows_ahead:
            yield f"rows{self.choice.rows_ahead}"

    def refusal(self, spec: KernelSpec, v: int) -> PlanError | None:
        """Return the error for a choice in the spec that this tile cannot have, or None."""
        given, choice = (spec.backward or Backward()).dkdv, self.choice
        if given.rows_ahead is not None and given.rows_ahead != self.roles.rows_ahead:
            allowed = f"allowed: {_one_of(_rows_ahead(spec, choice.overlap))} with 'overlap: {choice.overlap}'"
            packed = " and packed sequences" if spec.layout == "varlen" else ""
            return refuse(spec, "backward.dkdv.rows_ahead", f"{given.rows_ahead} is not allowed; {allowed}{packed}")
        if given.packed is not None and is_wide(spec):
            return refuse(spec, "backward.dkdv.packed", "blocks of a cluster multiply P in 16 bits; leave it out")
        if given.packed not in (None, self.roles.packed):
            why = "P times the derivative of the logit has 16 bits where that differs from pair to pair"
            return refuse(spec, "backward.dkdv.packed", f"{why}; allowed: true")
        if self.stages < (least := _parts_of_dout(spec, v)):
            return refuse(
                spec,
                "backward.dkdv.stages",
                f"{self.stages} is not allowed: dO of a step takes {least} stages; nearest: {least}",
            )
        # With one stage, one consumer would wait for dO in its turn, and the other one, which has it, for its turn.
        if choice.overlap == "pingpong" and self.stages < 2:
            return refuse(
                spec,
                "backward.dkdv.stages",
                f"{self.stages} is not allowed: ping-pong consumers need dO of two steps; nearest: 2",
            )
        return None


def plan_backward(spec: KernelSpec, arch: Arch, schedule: str, label: str, relief: Relief = Relief()) -> Plan:
    """Return the plan of a backward, by single blocks or, for wide heads, by clusters.

    The loader stores as much beside a tile of Q as shared memory has room for (``_offers``). Raises PlanError.
    """
    check_backward(spec)
    check_head_dims(spec)
    wide = is_wide(spec)
    operands = operands_of(spec)
    element = operands.shared("q", "k", "v", "dout", "p", "ds")
    # each of two blocks of a cluster has half of their columns of dQ, and loads half of their dO
    column_blocks = _column_blocks(spec)
    parts = column_blocks * (_CLUSTER if wide else 1)
    columns_qk, columns_v = (widths(head_dim, element, parts) for head_dim in (spec.head_dim_qk, spec.head_dim_v))
    qk, v = columns_qk.width // column_blocks, columns_v.width // column_blocks
    iteration, given = iteration_of(spec, "q", by_bits=not wide), (spec.backward or Backward()).dkdv
    roles = None
    for brought in _offers(spec, relief):
        tile = _tile(spec, relief, brought, iteration, qk, v, element)
        fitting = partial(_with_memory, arch, tile.choice.tile.m, tile.stages, qk, v, operands)
        memory = partial(fitting, given.q_stages)
        refused = tile.refusal(spec, v)
        if refused is None and (roles := memory(tile.roles)) is not None:
            break
    if roles is None:
        raise refused or _memory_refusal(spec, arch, tile, qk, v, operands)
    if not (wide or iteration == "tile_map" or roles.query_values or relief.divides or relief.lean):
        costly = min(len(costly_query_values(spec.variant)), _COSTLY_VALUES)
        for count in range(costly, 0, -1):
            valued = memory(replace(tile.roles, query_values=count))
            if valued and replace(valued, query_values=0, shared=roles.shared) == roles:  # at the cost of no stage
                roles = valued
                break
    known = fitting(None, replace(tile.roles, q_stages=tile.known.q_stages))
    planned = drafted(
        spec,
        label=label,
        width=f"c{_CONSUMERS}",
        tile_map=iteration == "tile_map",
        alignment=16,
        choices=(
            *tile.labels(roles, known.q_stages if known else 0),
            *(["deterministic"] if roles.ordered else []),
            *relief.labels,
        ),
        columns_qk=(columns_qk,),
        columns_v=(columns_v,),
        backend="cuda",
        schedule=schedule,
        loads="descriptor",
        q_operand="shared",
        tile_m=tile.choice.tile.m,
        tile_n=_KEYS,
        stages=tile.stages,
        num_warps=4 * (_CONSUMERS + (2 if wide else 1)),
        max_registers=None,
        iteration=iteration,
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=_L2_BYTES,
        least_heads_in_l2=_LEAST_HEADS_IN_L2 if _is_uneven(spec, iteration) else 1,
        structure=roles,
        main="dqkv",
        sum_columns=roles.sum_columns,
        ordered=roles.ordered,
        visible=visible_queries(spec) if roles.cuts else (),
        tile_reason=tile.origin,
    )
    return planned.with_launches(*launches(planned, roles), workspaces=tuple(workspaces(planned, roles)))


def _offers(spec: KernelSpec, relief: Relief) -> Iterator[Brought]:
    """Yield the values that the loader may store beside a tile of Q, the most first; in a cluster none.

    It computes values of a distance only if they are few and the derivative of the logit is the same for all pairs; and
    beyond head dim 96, where they leave too few registers, only if they are more than a magnitude
    (docs/notebook/softmax_and_masks.md, "Magnitudes of distances").
    """
    brings = not (relief.gathers or is_wide(spec))
    tiled = rooms(spec.variant) if brings else ()
    values = 0
    if brings and spec.variant.score is not None and not varies(spec):
        by_distance = distance_values_of_score(spec.variant, fast_math=spec.fast_math)
        narrow = max(spec.head_dim_qk, spec.head_dim_v) <= NARROW
        values = 0 if not narrow and all(map(is_slight, by_distance)) else len(by_distance)
    for counts in dict.fromkeys(product((*tiled, 0), (values if values <= _DISTANCE_VALUES else 0, 0))):
        brought = Brought(*counts)
        score = per_pair_of(spec, brought).score
        if brings and score is not None and (held := tables(score, spec.variant)):
            yield replace(brought, table_bytes=ENTRY_BYTES * sum(each.entries for each in held))
        yield brought


def _parts_of_dout(spec: KernelSpec, v: int) -> int:
    """Return the stages that dO of one step takes: wide heads have it in parts."""
    return HopperBackward.parts_of(v) if is_wide(spec) else 1


def _tile(
    spec: KernelSpec, relief: Relief, brought: Brought, iteration: str, qk: int, v: int, element: DType
) -> _HopperTile:
    """Return the tile and the roles for what the loader stores; ``_with_memory`` decides the stages of Q and biases."""
    wide = is_wide(spec)
    per_pair = per_pair_of(spec, brought)
    family = family_of(spec, per_pair, brought)
    facts = facts_of(spec, family, iteration, qk, dropout=spec.variant.dropout or relief.rows_of_dropout)
    row, given = next(TABLE.suiting(facts.__contains__, max(qk, v))), (spec.backward or Backward()).dkdv
    # P times a derivative that varies has 16 bits, and takes registers beside wide tiles
    of_derivative = varies(spec) and not wide
    few_rows = family == "varying_derivative" and max(qk, v) > _FEW_COLUMNS
    choice = row.completed(given, varies=of_derivative, few_rows=few_rows)
    parts = _parts_of_dout(spec, v)
    more = not (parts > 1 and is_beyond_256(spec))  # what twins send takes the memory of another stage
    stages = given.stages or (choice.pipeline.stages if choice.pipeline else parts + more)
    varlen, rows = spec.layout == "varlen", _rows_ahead(spec, choice.overlap)
    gradients = gradients_of(spec.variant, fast_math=spec.fast_math, tiles_only=wide)
    reads_ds = not all(each.in_registers or (not wide and each.by_warps) for each in gradients)
    # consumers need 240 registers
    crowded = choice.overlap == "pingpong" and not varlen
    narrow = max(qk, v) <= NARROW and (brought.bias_bytes > 0 or reads_ds or not crowded)
    registers = _NARROW_REGISTERS if narrow else _WIDE_REGISTERS
    by_rows = choice.tile.m == _KEYS
    own_spans = _has_own_spans(spec, choice, family, iteration) and not relief.lean
    cuts = not relief.lean and _cuts(
        spec,
        crowded=(varlen and not is_light(spec.variant)) or (own_spans and spec.head_dim_qk < qk)
        or (iteration == "tile_map" and brought.bias_bytes > 0 and not narrow),
    )  # fmt: skip
    draft = HopperBackward(
        consumers=_CONSUMERS,
        warp_roles=backward_roles(_CONSUMERS, *registers, reads_ds=reads_ds),
        overlap=choice.overlap,
        packed=choice.packed or of_derivative,
        rows_ahead=min(max(choice.rows_ahead, rows[0]), rows[-1]),
        rows_early=choice.rows_ahead > 0 and (by_rows or not varlen) and not relief.lean and not relief.late,
        q_stages=choice.q_stages,
        box_bytes=widest_box(
            *(columns * element.bytes for columns in (qk, v, *([] if by_rows else [_dq_columns(qk)])))
        ),
        dq_columns=qk if by_rows else _dq_columns(qk),
        dq_by_rows=by_rows,
        ordered=spec.deterministic,
        own_spans=own_spans,
        query_values=query_values_of(spec, per_pair, brought, bits=iteration == "tile_map")
        if family == "valued" and not wide
        else 0,
        distance_values=brought.by_distance,
        cuts=cuts,
        cuts_first=cuts and (iteration == "tile_map" or first_seen_most(spec)),
        uneven=_by_data(spec, iteration),
        query_chunk=_QUERY_CHUNK if cuts and not own_spans and _goes_by_chunks(spec, choice, iteration) else 0,
        slots=iteration == "tile_map" and not wide,
        biases=len(biases(spec.variant, brought.bias_bytes)),
        bias_bytes=brought.bias_bytes,
        hides_by_entries=iteration == "tile_map"
        and brought.bias_bytes > 0
        and hiding_entries(spec.variant, brought.bias_bytes, MOST_HELD) is not None,
        table_bytes=brought.table_bytes,
        reads_ds=reads_ds,
        clears=not (wide or varlen or relief.lean)
        and spec.variant.masked
        and any(each.way is Way.PAIR for each in gradients),
        shared=(),
    )
    if wide:
        heavy = not is_light(replace(spec.variant, score=None)) and not reads_positions(spec.variant)
        divides = heavy and family in ("light", "divided")
        draft = _clustered(draft, qk, v, element, _column_blocks(spec), divides=divides)
    known = usual(*choice.order, varies=of_derivative, few_rows=few_rows)
    own = "" if choice == row else "the spec's own; what it leaves open: "
    return _HopperTile(choice, stages, draft, known, f"{own}{row.origin}")


def tunable(spec: KernelSpec, first: Plan) -> Iterator[KernelSpec]:
    """Yield the spec of a backward with each order and the queries that a step of it may have, and with each other
    value of one choice of the ``first`` plan."""
    roles = first.structure
    assert isinstance(roles, HopperBackward)
    own = Gradient(first.tile_m, stages=first.stages, overlap=roles.overlap, q_stages=roles.q_stages)
    if not is_wide(spec):
        own = replace(own, packed=roles.packed, rows_ahead=roles.rows_ahead)
    others = [Gradient(m, overlap=overlap) for overlap, m in _orders(spec)]
    choices = [one for one in others if (one.overlap, one.tile_m) != (own.overlap, own.tile_m)]
    choices += [replace(own, q_stages=n) for n in _TUNED_Q_STAGES]
    choices += [replace(own, stages=n) for n in _TUNED_STAGES]
    if not is_wide(spec):
        choices += [replace(own, packed=not roles.packed), *(replace(own, rows_ahead=n) for n in _TUNED_ROWS)]
    for choice in choices:
        if choice != own:
            yield replace(spec, backward=Backward(choice))


def measured_row(spec: KernelSpec, fastest: Plan) -> MeasuredRow:
    """The row for kernels of just the work of a spec, with the choices of its ``fastest`` plan.

    It names every fact of the spec, those that do not hold as ``without``, and has its columns alone: which of these
    matter was not measured. Raises PlanError if the schedule does not take the spec.
    """
    roles = fastest.structure
    assert isinstance(roles, HopperBackward)
    wide, element = is_wide(spec), operands_of(spec).shared("q", "k", "v", "dout", "p", "ds")
    brought = Brought(roles.bias_bytes, roles.distance_values, roles.table_bytes)
    columns = max(each.width for each in (*fastest.columns_qk, *fastest.columns_v)) // roles.column_blocks
    qk = fastest.columns_qk[0].width // roles.column_blocks
    family = family_of(spec, per_pair_of(spec, brought), brought)
    iteration = iteration_of(spec, "q", by_bits=not wide)
    facts = facts_of(spec, family, iteration, qk, dropout=spec.variant.dropout)
    row = BackwardChoice(
        work=tuple(name for name in WORDS if name in facts),
        without=tuple(name for name in WORDS if name not in facts),
        beyond=columns - BOX_BYTES[-1] // element.bytes,
        columns=columns,
        tile=QueriesOfTile(m=fastest.tile_m),
        overlap=roles.overlap,
        packed=roles.packed,
        q_stages=roles.q_stages,
        rows_ahead=roles.rows_ahead,
        pipeline=ChosenStages(stages=fastest.stages),
    )
    return MeasuredRow(TABLE, row, next(TABLE.suiting(facts.__contains__, columns)))


def alternatives(spec: KernelSpec, arch: Arch, first: Plan) -> Iterator[Plan]:
    """Yield plans that save more and more registers, for a ``first`` plan that ptxas has refused."""
    label = "cluster" if is_wide(spec) else "wgmma"
    for relief in _reliefs(spec, first):
        with suppress(PlanError):
            planned = plan_backward(spec, arch, first.schedule, label, relief)
            yield planned


def _reliefs(spec: KernelSpec, first: Plan) -> Iterator[Relief]:
    """Yield ways to save registers, in the order in which they are tried.

    First the loader of a map reads row statistics late; and consumers divide, if the loader did. Then come the rows of
    dropout, which take the fewest registers; then a lean loader in single blocks, since masks of many ranges or
    searches exceed its few registers; then the same with consumers that gather, if the loader of the ``first`` plan
    stores anything for them.
    """
    assert isinstance(first.structure, HopperBackward)
    brought = Brought(first.structure.bias_bytes, first.structure.distance_values, first.structure.table_bytes)
    if first.structure.rows_early and (first.iteration == "tile_map" or first.varlen):
        yield Relief(late=True)
    if first.structure.query_values and costly_query_values(spec.variant):
        yield Relief(divides=True)
    for gathers in (False, True) if brought != NOTHING else (False,):
        for lean in (False,) if is_wide(spec) else (False, True):
            for rows_of_dropout in (False, True):
                yield Relief(rows_of_dropout, lean, gathers)


def _has_own_spans(spec: KernelSpec, choice: BackwardChoice, family: str, iteration: str) -> bool:
    """Whether each consumer finds the queries that see its own half of the keys, and skips the others. It pays where
    few queries see a tile of keys, and takes registers, which kernels whose derivative varies do not have
    (docs/notebook/hopper_backward.md, "Windows, documents and scores beside causal, again")."""
    visible = bands_of(spec, "q").visible
    few = len(visible) == 1 and (spec.layout == "varlen" or visible[0].hi is not None)
    halves = choice.overlap == "pingpong" and choice.tile.m < _KEYS and family != "varying_derivative"
    return few and halves and iteration == "ranges" and not spec.deterministic


def _cuts(spec: KernelSpec, *, crowded: bool) -> bool:
    """Whether several blocks may split one of the last tiles of keys. Clusters may not, since the hardware hands out
    their tiles; nor kernels with a fixed order of dQ, whose parts would wait for one another; nor kernels whose loader
    is ``crowded``, and would spill the bounds of a part (docs/notebook/hopper_backward.md, "Parts of the last tiles"
    and "What short rows wait for")."""
    return not is_wide(spec) and not spec.deterministic and not crowded


def _goes_by_chunks(spec: KernelSpec, choice: BackwardChoice, iteration: str) -> bool:
    """Whether all heads of a group visit some query tiles before the next ones: for short steps and equal masks
    (docs/notebook/hopper_backward.md, "Stripes")."""
    return choice.tile.m < _KEYS and iteration == "ranges" and not by_head(spec.variant)


def _by_data(spec: KernelSpec, iteration: str) -> bool:
    """Whether data decide which queries see a tile of keys."""
    return iteration == "tile_map" or reads_positions(replace(spec.variant, score=None))


def _is_uneven(spec: KernelSpec, iteration: str) -> bool:
    """Whether data decide how many steps each tile of keys of a sequence takes, in a kernel whose blocks take tiles."""
    return iteration == "ranges" and _by_data(spec, iteration) and spec.layout == "dense" and not is_wide(spec)


def _column_blocks(spec: KernelSpec) -> int:
    """Blocks of a cluster that divide the columns of all matrices."""
    return 2 if is_beyond_256(spec) else 1


def _clustered(
    draft: HopperBackward, qk: int, v: int, element: DType, column_blocks: int, *, divides: bool
) -> HopperBackward:
    """Return the roles of a block of a cluster, which has ``qk`` and ``v`` columns. A mask that ``divides`` needs more
    registers in the producer."""
    all_of_dq, columns = max(qk, v) <= ALL_OF_DQ, qk // _CLUSTER
    parts = [part for part in _REGISTERS_OF_PART if columns % part == 0]
    part = columns if all_of_dq else parts[-1 if divides else 0]
    registers = _ALL_REGISTERS if all_of_dq else _REGISTERS_OF_PART[part]
    return replace(
        draft,
        overlap="roles" if column_blocks > 1 else draft.overlap,
        cluster=_CLUSTER * column_blocks,
        column_blocks=column_blocks,
        warp_roles=cluster_roles(*registers, ordered=draft.ordered, reads_ds=draft.reads_ds),
        box_bytes=widest_box(part * element.bytes),  # of which V has a whole number in any case
        dq_columns=columns,
        dq_part=part,
        dq_by_rows=False,
    )


def _dq_columns(qk: int) -> int:
    """Number of columns of dQ of each consumer where consumers divide its columns, not its rows."""
    return 64 if qk > 64 else 32


def check_backward(spec: KernelSpec) -> None:
    """Raise PlanError for a spec that no backward in CUDA can serve."""
    if refused := _refusal(spec):
        raise refused


def _refusal(spec: KernelSpec) -> PlanError | None:
    if differentiable_of(spec.variant) and (reason := _why_no_tensor_gradients(spec)):
        own = "gradients of a variant's own tensors (grad: true)"
        return refuse(spec, "backward", f"a backward in cuda gives no {own} {reason}; allowed: triton")
    for row in left_to_others("CUDA backward kernels", max(spec.head_dim_qk, spec.head_dim_v), traits_of(spec)):
        return refuse(spec, "backward", f"{row.says}; allowed: triton")
    given = spec.backward or Backward()
    if given.dq != type(given.dq)():
        return refuse(spec, "backward.dq", "in cuda the kernel by tiles of keys computes dQ, too; leave it out")
    if given.dkdv.num_warps is not None:
        return refuse(spec, "backward.dkdv.warps", "a backward in cuda has roles; leave it out")
    if given.dkdv.tile_n not in (None, _KEYS):
        return refuse(
            spec, "backward.dkdv.tile.n", f"{given.dkdv.tile_n} is not allowed; allowed: {_KEYS} (64 per consumer)"
        )
    orders, queries = (list(dict.fromkeys(one)) for one in zip(*_orders(spec), strict=True))
    for name, value, allowed in (("tile.m", given.dkdv.tile_m, queries), ("overlap", given.dkdv.overlap, orders)):
        if value is not None and value not in allowed:
            return refuse(spec, f"backward.dkdv.{name}", f"{value} is not allowed; allowed: {_one_of(allowed)}")
    return None


def _orders(spec: KernelSpec) -> list[tuple[str, int]]:
    """Orders of the products that a kernel may have, each with the queries of a step. Clusters have others than single
    blocks; four blocks just one, and so has dropout."""
    overlaps: tuple[str, ...] = ("nothing",) if spec.variant.dropout else BLOCK_OVERLAPS
    if is_wide(spec):
        overlaps = ("roles",) if spec.variant.dropout or is_beyond_256(spec) else CLUSTER_OVERLAPS
    return [order for order in USUAL if order[0] in overlaps]


def _rows_ahead(spec: KernelSpec, overlap: str) -> range:
    """Times 16 rows of statistics that consumers may load ahead. Those of packed sequences hold more values beside."""
    if overlap == "pingpong":
        return range(1, 2 if spec.layout == "varlen" else 5)
    return range(5 if overlap == "gradients" else 1)


def _one_of(allowed: Sequence[object]) -> str:
    return " or ".join(map(str, allowed))


def _why_no_tensor_gradients(spec: KernelSpec) -> str | None:
    """Say why a backward does not compute the gradients of a variant's tensors, or None if it does."""
    if is_beyond_256(spec):  # twins have the same tiles of dS
        return f"beyond head dim {HEAD_DIMS[-1]}"
    gradients = gradients_of(spec.variant, fast_math=spec.fast_math, tiles_only=True) if is_wide(spec) else ()
    if left := next((each for each in gradients if each.in_registers), None):
        return (
            f"beyond head dim {BLOCK_HEAD_DIM} that need more than tiles of dS, as that of {canonical(left.load)} does"
        )
    if spec.deterministic:
        return "in a fixed order (deterministic: true)"
    return None


def _with_memory(
    arch: Arch, tile_m: int, stages: int, qk: int, v: int, operands: Operands, fixed: int | None, draft: HopperBackward
) -> HopperBackward | None:
    """Return the roles with as many stages of Q, and then of biases, as shared memory holds; None if it holds none, or
    not the ``fixed`` ones of Q."""
    layouts = _memory_layouts(tile_m, stages, qk, v, operands, fixed, draft)
    return next((roles for roles in layouts if roles.shared_bytes <= arch.shared_memory), None)


def _memory_layouts(
    tile_m: int, stages: int, qk: int, v: int, operands: Operands, fixed: int | None, draft: HopperBackward
) -> Iterator[HopperBackward]:
    """Yield the roles with their regions of shared memory, from the most stages of Q and biases to the fewest; beside
    biases, dQ may be rounded without shared memory."""
    pipes = backward_pipes if draft.cluster == 1 else cluster_pipes
    of_biases = _BIAS_STAGES if draft.biases else (0,)
    of_dq = (True, False) if draft.biases else (True,)
    q_stages_of = (fixed,) if fixed else range(draft.q_stages, 1, -1)
    for stages_dq, q_stages, bias_stages in product(of_dq, q_stages_of, of_biases):
        roles = replace(draft, q_stages=q_stages, bias_stages=bias_stages, stages_dq=stages_dq)
        yield replace(roles, shared=pipes(roles, tile_m=tile_m, stages=stages, qk=qk, v=v, operands=operands).regions)


def _memory_refusal(spec: KernelSpec, arch: Arch, tile: _HopperTile, qk: int, v: int, operands: Operands) -> PlanError:
    """Return the error for a tile that exceeds shared memory even with the fewest stages."""
    given = (spec.backward or Backward()).dkdv
    *_, least = _memory_layouts(tile.choice.tile.m, tile.stages, qk, v, operands, given.q_stages, tile.roles)
    listed = " + ".join(
        f"{_OPERANDS[region.name]} {region.bytes}" + (f" ({tile.stages} stages)" if region.name == "dout" else "")
        for region in least.shared
        if region.name in _OPERANDS
    )
    return refuse(
        spec,
        "backward.dkdv",
        f"Shared memory {least.shared_bytes} B exceeds {arch.shared_memory} B on {arch.name}: "
        f"{listed} + barriers and rows",
    )


#: What backward kernels by wgmma serve.
SERVES = {
    "dtype": only(*_DTYPES, why=f"a backward in cuda takes {' and '.join(_DTYPES)}"),
    **ATTENTION, **DESCRIPTORS, **FUSED,
    **dict.fromkeys(("tile_map", "dropout", "backward"), ANY),
}  # fmt: skip

#: Regions that a refusal names.
_OPERANDS = {
    "k": "K", "v": "V", "other_k": "half of the other block's K", "q": "Q", "dout": "dO", "ds": "dS",
    "other_ds": "dS of the other block", "dq": "dQ", "biases": "biases",
}  # fmt: skip

SCHEDULE = Schedule(
    name="hopper_backward",
    backend="cuda",
    direction="backward",
    template="cuda/hopper_backward/kernel.cu.j2",
    view="attngen.families.hopper_backward.view:cuda_backward_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: not is_wide(spec),
    plan=lambda spec, arch: plan_backward(spec, arch, "hopper_backward", "wgmma"),
    alternatives=alternatives,
    tunable=tunable,
    measured_row=measured_row,
    pipes=backward_pipes_of,
    explanation="attngen.families.hopper_backward.explain:BlockExplanation",
    serves=SERVES,
)
