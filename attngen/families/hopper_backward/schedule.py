"""The Hopper backward in CUDA: one kernel by tiles of keys computes dK and dV, and adds dQ to its accumulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from attngen.arch import Arch
from attngen.dtypes import ATTENTION_DTYPES, HEAD_DIMS, DType, dtype
from attngen.errors import PlanError
from attngen.families.hopper_backward.choices import LABELS, TABLE, BackwardChoice
from attngen.families.hopper_backward.cluster_pipes import cluster_pipes, cluster_roles
from attngen.families.hopper_backward.kinds import (
    BLOCK_HEAD_DIM,
    NARROW,
    NOTHING,
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
from attngen.parts.boxes import widest_box, widths
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
from attngen.schema.kernel_spec import Backward, KernelSpec

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

    def refusal(self, spec: KernelSpec, v: int) -> PlanError | None:
        """Return the error for a size in the spec that this tile cannot have, or None."""
        given, choice = (spec.backward or Backward()).dkdv, self.choice
        if given.tile_m not in (None, choice.tile.m):
            return refuse(spec, "backward.dkdv.tile.m", f"{given.tile_m} is not allowed; allowed: {choice.tile.m}")
        if given.tile_n not in (None, _KEYS):
            return refuse(
                spec, "backward.dkdv.tile.n", f"{given.tile_n} is not allowed; allowed: {_KEYS} (64 per consumer)"
            )
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
    iteration = iteration_of(spec, "q", by_bits=not wide)
    roles = None
    for brought in _offers(spec, relief):
        tile = _tile(spec, relief, brought, iteration, qk, v, element)
        memory = partial(_with_memory, arch, tile.choice.tile.m, tile.stages, qk, v, operands)
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
    planned = drafted(
        spec,
        label=label,
        width=f"c{_CONSUMERS}",
        tile_map=iteration == "tile_map",
        alignment=16,
        choices=(
            *LABELS[roles.overlap],
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
        tile_reason=tile.choice.origin,
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
    choice = next(TABLE.suiting(facts.__contains__, max(qk, v)))
    parts = _parts_of_dout(spec, v)
    more = not (parts > 1 and is_beyond_256(spec))  # what twins send takes the memory of another stage
    stages = (spec.backward or Backward()).dkdv.stages or parts + more
    varlen = spec.layout == "varlen"  # its loader and its consumers hold more values
    gradients = gradients_of(spec.variant, fast_math=spec.fast_math, tiles_only=wide)
    reads_ds = not all(each.in_registers or (not wide and each.by_warps(choice.tile.m)) for each in gradients)
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
        packed=choice.packed,
        rows_ahead=min(choice.rows_ahead, 1) if varlen and choice.overlap == "pingpong" else choice.rows_ahead,
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
    return _HopperTile(choice, stages, draft)


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
    return None


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
    arch: Arch, tile_m: int, stages: int, qk: int, v: int, operands: Operands, draft: HopperBackward
) -> HopperBackward | None:
    """Return the roles with as many stages of Q, and then of biases, as shared memory holds; None if it holds none."""
    layouts = _memory_layouts(tile_m, stages, qk, v, operands, draft)
    return next((roles for roles in layouts if roles.shared_bytes <= arch.shared_memory), None)


def _memory_layouts(
    tile_m: int, stages: int, qk: int, v: int, operands: Operands, draft: HopperBackward
) -> Iterator[HopperBackward]:
    """Yield the roles with their regions of shared memory, from the most stages of Q and biases to the fewest; beside
    biases, dQ may be rounded without shared memory."""
    pipes = backward_pipes if draft.cluster == 1 else cluster_pipes
    of_biases = _BIAS_STAGES if draft.biases else (0,)
    of_dq = (True, False) if draft.biases else (True,)
    for stages_dq, q_stages, bias_stages in product(of_dq, range(draft.q_stages, 1, -1), of_biases):
        roles = replace(draft, q_stages=q_stages, bias_stages=bias_stages, stages_dq=stages_dq)
        yield replace(roles, shared=pipes(roles, tile_m=tile_m, stages=stages, qk=qk, v=v, operands=operands).regions)


def _memory_refusal(spec: KernelSpec, arch: Arch, tile: _HopperTile, qk: int, v: int, operands: Operands) -> PlanError:
    """Return the error for a tile that exceeds shared memory even with the fewest stages."""
    *_, least = _memory_layouts(tile.choice.tile.m, tile.stages, qk, v, operands, tile.roles)
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
    pipes=backward_pipes_of,
    explanation="attngen.families.hopper_backward.explain:BlockExplanation",
    serves=SERVES,
)
