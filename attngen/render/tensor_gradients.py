"""Gradients of a variant's own tensors in a CUDA backward: sums of consumers in registers, and sums of a producer warp
over tiles of dS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attngen.lang.emit import Binding
from attngen.lang.folding import ONE, Slope, is_finite
from attngen.lang.intervals import bounds
from attngen.lang.ir import Expr, Var, names, spelled
from attngen.lang.simplify import mul
from attngen.lang.statements import Code, Statement, joined, leaf, reads, written
from attngen.plan.model import Plan
from attngen.plan.own_gradients import (
    APART,
    WARP_KEYS,
    TensorGradient,
    Way,
    derivative,
    gradients_of,
    is_large,
    stored_gradients,
)
from attngen.plan.symbols import cleared_name, extent_name, gradient_pointer, stored_name
from attngen.plan.traits import varies_within_head
from attngen.render.cuda_statements import int_constant, number_queries
from attngen.render.expressions import CUDA, emit_for, in_product, known_ranges, scalar_bindings

_KEY, _QUERY, _TILE = frozenset({"kv"}), frozenset({"q"}), frozenset({"q", "kv"})
#: Fields in the record of a step of dS, as expressions read them.
_OF_STEP = ("b", "h", "hk", "q_begin", "k_begin", "seqlen_q", "seqlen_k")
#: Pairs of index and extent that are inside by their meaning.
_NEVER_OUTSIDE = {("b", "b"), ("h", "h"), ("h", "heads"), ("hk", "hk"), ("hk", "kv_heads")}


@dataclass(frozen=True, slots=True)
class GradientEntry:
    """An entry of a gradient: the statements before its ``place``, which is inside the tensor if ``inside`` holds, and
    those before the ``factor`` of what is added; None: 1."""

    lines: tuple[Statement, ...]
    place: Code
    inside: Code | None
    factor_lines: tuple[Statement, ...]
    factor: Code | None

    @property
    def reads(self) -> frozenset[str]:
        """Names that it reads."""
        given = [part for part in (self.place, self.inside, self.factor) if part is not None]
        return reads([*self.lines, *self.factor_lines, *given])


@dataclass(frozen=True, slots=True)
class RegisterSum:
    """The sum of one element's gradient in registers of consumers: one, or one for each key of a thread.

    In ``runs`` it is the sum of pairs that follow each other and share an entry: ``entry`` is that of each pair, and
    otherwise that of a head or a key. ``weights`` is the array that holds P times a derivative that depends on the
    product; ``term`` is what a pair adds, by the statements of ``SumsView.element``.
    """

    name: str
    gradient: str
    by_key: bool
    runs: bool
    plain: bool  # a pair adds dlogit itself
    weights: str
    term: Code
    entry: GradientEntry
    entry_type: str


@dataclass(frozen=True, slots=True)
class SumsView:
    """Sums of consumers: ``tile`` and ``element`` are the statements of a step and of a pair; ``by_head``: the sums of
    each head are added to gradients before the next head. dS is dlogit times ``ds_factor``, which ``ds_lines``
    compute."""

    sums: tuple[RegisterSum, ...]
    tile: tuple[str, ...]
    element: tuple[Statement, ...]
    by_pair: bool  # whether there is a sum to which ``element`` adds
    by_head: bool
    work_lines: tuple[str, ...]
    ds_lines: tuple[str, ...]
    ds_factor: Code | None


@dataclass(frozen=True, slots=True)
class TileSum:
    """Reduction of a tile of dS by one warp, for one element that the score reads.

    ``entry`` is that of a query of the tile, of a diagonal, of the first pair of a block, of which ``block`` has the
    queries and keys, or of the first pair of a bias. ``stored`` is the argument
    that says whether tiles are stored, not added, ``cleared`` the one that says whether a warp also clears the others;
    "" without one. Stored entries are those of dS as they are, or ``in_float32``.
    """

    way: str
    tensor: str
    gradient: str
    entry: GradientEntry
    varies: bool = False  # the factor differs from diagonal to diagonal
    uniform: bool = False  # all diagonals have one entry
    repeats: bool = False  # diagonals may share an entry
    stored: str = ""
    cleared: str = ""
    in_float32: bool = False
    block: tuple[int, int] = (0, 0)
    rows: str = ""  # of a bias: its extents
    columns: str = ""

    @property
    def entries(self) -> str:
        """The address of a gradient whose tiles are stored."""
        return self.gradient if self.in_float32 else f"reinterpret_cast<Element*>({self.gradient})"

    @property
    def entry_type(self) -> str:
        """Type of an entry of that."""
        return "float" if self.in_float32 else "Element"


@dataclass(frozen=True, slots=True)
class TilesView:
    """Sums of parts of dS by one warp, and the lines that name what they read of a step. ``reads``: names that the sums
    read."""

    sums: tuple[TileSum, ...]
    step_lines: tuple[str, ...]
    reads: frozenset[str]


#: The first key of a row of a consumer's accumulators.
_FIRST_KEY = "{work.kv_start} + 64 * {warpgroup} + 16 * ({warp} % 4) + {lane} / 4 + 8 * {row}"


def register_sums(plan: Plan, first_key: str = _FIRST_KEY) -> SumsView | None:
    """The sums of threads; None if no gradient has one. ``first_key`` is the key of a row of their accumulators, in
    which ``row`` counts."""
    mine = [each for each in _gradients(plan) if each.in_registers]
    if not mine:
        return None
    # of each pair: the derivative, and the indices of what has an entry for each
    roots = [part for each in mine for part in _of_pair(each)]
    pairs = emit_for(plan, CUDA, roots, _bindings_of_pairs(plan), prefix="own_", inner="q")
    values = iter(pairs.results)
    sums = []
    for number, each in enumerate(mine):
        kept, plain, runs = each.of_product, each.varying == ONE, each.way is Way.EACH
        own = [next(values) for _ in _of_pair(each)]
        term = leaf("dlogit")
        if len(own) > (len(each.indices) if runs else 0):
            finite = is_finite(_of_pair(each)[0])
            pattern = "{dlogit} * {}" if finite else "({dlogit} != 0.0f ? {dlogit} * {} : 0.0f)"
            term = written(pattern, in_product(own.pop(0), CUDA))
        if runs:
            place, inside = _located(plan, each, each.indices, own)
            entry = GradientEntry((), place, inside, (), None)
        else:
            entry = _entry(plan, each, _bindings_of_keys())
        if each.way is Way.KEY:
            entry = replace(entry, lines=(*_number_keys(first_key, entry.reads), *entry.lines))
        gradient, array = gradient_pointer(each.load.tensor), f"p_weighted_{number}" if kept else ""
        by_key = each.way is not Way.HEAD
        kind = "long long" if is_large(plan.variant, each.load) else "int"
        sums.append(RegisterSum(f"tensor_sum_{number}", gradient, by_key, runs, plain, array, term, entry, kind))
    body = (*pairs.hoisted, *pairs.body)
    needs = reads([*body, *pairs.results]).union(*(each.entry.reads for each in sums if each.runs))
    factor = uniform_weight(plan)
    factored = emit_for(plan, CUDA, [factor], scalar_bindings(plan, CUDA), prefix="ds_") if factor is not None else None
    in_ds = reads([*(factored.hoisted if factored else ()), *(factored.results if factored else ())])
    return SumsView(
        sums=tuple(sums),
        tile=_work_names(plan, needs | in_ds, h="step.h", pairs=True),
        element=(*_number_pairs(needs), *body),
        by_pair=bool(roots),
        by_head=any("h" in each.reads for each in mine if each.way is not Way.EACH),
        work_lines=_work_names(
            plan, frozenset[str]().union(*(each.entry.reads for each in sums if not each.runs)), h=""
        ),
        ds_lines=tuple(str(line) for line in factored.hoisted) if factored else (),
        ds_factor=in_product(factored.results[0], CUDA) if factored else None,
    )


def _of_pair(each: TensorGradient) -> list[Expr]:
    """Expressions that consumers evaluate for each pair of a gradient."""
    if each.way is not Way.EACH:
        return [] if each.of_product or each.varying == ONE else [each.varying]
    factor = each.constant if each.of_product else mul(each.varying, each.constant)
    return [*([] if factor == ONE else [factor]), *each.indices]


def weights(plan: Plan) -> tuple[tuple[int, Expr], ...]:
    """The derivatives that depend on the product, by the number of their sum; P times these is kept."""
    mine = [each for each in _gradients(plan) if each.in_registers]
    return tuple((number, each.varying) for number, each in enumerate(mine) if each.of_product)


def weighted(number: int, varying: Expr) -> Code:
    """Return P times a derivative; zero times infinity is not zero, so it is selected."""
    name = leaf(f"weight_{number}")
    return written("{x} * {}" if is_finite(varying) else "{x} != 0.0f ? {x} * {} : 0.0f", name)


def uniform_weight(plan: Plan) -> Expr | None:
    """Return the factor from dlogit to dS where all pairs of a head share it, and consumers add up dlogit itself."""
    slope = derivative(plan.variant, fast_math=plan.fast_math)
    if slope.varying is None or varies_within_head(slope.varying):
        return None
    return slope.varying if any(each.in_registers for each in _gradients(plan)) else None


def weighted_slope(plan: Plan, slope: Slope) -> Slope:
    """Return the derivative of the logit by the product that P is multiplied by as soon as it is there."""
    return slope if uniform_weight(plan) is None else Slope(slope.factor, None, slope.loads)


def tile_sums(plan: Plan, keys: int, *, by_warps: bool = False) -> TilesView | None:
    """The sums of the warp that reads tiles of dS, of so many ``keys``; None if no gradient has one. ``by_warps``:
    without those of ``warp_sums``."""
    mine = [each for each in _gradients(plan) if not (each.in_registers or (by_warps and each.by_warps))]
    if not mine:
        return None
    sums, read = _tile_sums(plan, mine, keys)
    of_step = (name for name in _OF_STEP if name in read and (plan.varlen or name != "seqlen_q"))
    if plan.structure.in_cluster:  # the kernel's variables describe its one tile of keys
        of_step = (name for name in ("h",) if name in read)
    return TilesView(sums, tuple(f"const int {name} = step.{name};" for name in of_step), read)


def warp_sums(plan: Plan) -> TilesView | None:
    """The sums that warps of consumers add up among their lanes; None if no gradient has one."""
    mine = [each for each in _gradients(plan) if each.by_warps]
    if not mine:
        return None
    sums, read = _tile_sums(plan, mine, WARP_KEYS)
    return TilesView(sums, _work_names(plan, read, h="step.h"), read)


def _tile_sums(
    plan: Plan, gradients: Sequence[TensorGradient], keys: int
) -> tuple[tuple[TileSum, ...], frozenset[str]]:
    """Return the sums of parts of dS that have so many ``keys``, and the names that they read."""
    sums = tuple(_tile_sum(plan, each, keys) for each in gradients)
    return sums, frozenset[str]().union(*(each.entry.reads for each in sums)) | {"seqlen_q", "seqlen_k"}


def _tile_sum(plan: Plan, each: TensorGradient, keys: int) -> TileSum:
    tensor = plan.variant.tensor(each.load.tensor)
    name, gradient = tensor.name, gradient_pointer(tensor.name)
    if each.way is Way.PAIR:
        once = {one.load.tensor for one in stored_gradients(plan)}
        rows, columns = (extent_name(tensor, axis) for axis in (len(tensor.shape) - 2, len(tensor.shape) - 1))
        entry = _entry(plan, each, {}, indices=each.indices[:-2])
        flag = stored_name(name) if name in once else ""
        cleared = cleared_name(name) if plan.structure.clears_gradients and name in once else ""
        return TileSum(
            "pair", name, gradient, entry, stored=flag, cleared=cleared, in_float32=tensor.dtype == "fp32", rows=rows,
            columns=columns,
        )  # fmt: skip
    if each.way is Way.DIAGONAL:
        entry = _entry(plan, each, {APART.name: Binding(spelled(APART.name), _TILE)})
        uniform = not any(APART.name in names(index) for index in each.indices)
        varies = APART.name in names(each.varying)
        return TileSum("diagonal", name, gradient, entry, varies=varies, uniform=uniform, repeats=each.repeats)
    if each.way is Way.BLOCK:
        of_block, block = each.within((plan.tile_m, keys))
        entry = _entry(plan, of_block, {"q_lo": Binding("q_lo", _TILE), "kv_lo": Binding("kv_lo", _TILE)})
        return TileSum("block", name, gradient, entry, block=block)
    if each.way is Way.COLUMN:
        entry = _entry(plan, each, _bindings_of_keys())
        own = _number_keys("{first_key} + 2 * {own_lane} + {column}", entry.reads)
        return TileSum("column", name, gradient, replace(entry, lines=(*own, *entry.lines)))
    entry = _entry(plan, each, _bindings_of_pairs(plan))
    return TileSum("row", name, gradient, replace(entry, lines=(*number_queries(entry.reads), *entry.lines)))


# --- entries of gradients -----------------------------------------------------------------------------------


def _entry(
    plan: Plan, each: TensorGradient, bound: Mapping[str, Binding], *, indices: Sequence[Expr] | None = None
) -> GradientEntry:
    """The place of an element in its gradient, which is contiguous, and the factor of its sum."""
    indices = each.indices if indices is None else indices
    named = {**scalar_bindings(plan, CUDA), **bound}
    code = emit_for(plan, CUDA, indices, named, inner="q")
    place, inside = _located(plan, each, indices, code.results)
    scale = each.constant if each.in_registers else mul(each.varying, each.constant)
    scaled = emit_for(plan, CUDA, [scale], named, prefix="factor_", inner="q")
    return GradientEntry(
        (*code.hoisted, *code.body), place, inside,
        (*scaled.hoisted, *scaled.body), None if scale == ONE else in_product(scaled.results[0], CUDA),
    )  # fmt: skip


def _located(
    plan: Plan, each: TensorGradient, indices: Sequence[Expr], values: Sequence[Code]
) -> tuple[Code, Code | None]:
    """Return the place of an entry with these indices, as their ``values`` are in the kernel, and when it is inside."""
    tensor = plan.variant.tensor(each.load.tensor)
    # what is placed for each pair or diagonal is an int32 where that is enough
    wide = is_large(plan.variant, each.load) or each.way not in (Way.EACH, Way.DIAGONAL)
    place, tests = leaf("0"), []
    for axis, (index, node) in enumerate(zip(values, indices, strict=True)):
        factor, extent = in_product(index, CUDA), leaf(extent_name(tensor, axis))
        if axis == 0:
            place = written("static_cast<long long>({})", factor) if wide and len(indices) > 1 else factor
        else:
            place = written("({}) * {} + {}" if axis > 1 else "{} * {} + {}", place, extent, factor)
        tests += _tests(plan, node, factor, extent, tensor.shape[axis])
    return place, joined(" && ", tests) if tests else None


def _tests(plan: Plan, node: Expr, index: Code, extent: Code, declared: int | str) -> list[Code]:
    if isinstance(node, Var) and (node.name, declared) in _NEVER_OUTSIDE:
        return []
    low, high = bounds(node, known_ranges(plan))
    tests = [written("{} >= 0", index)] if low < 0 else []
    if not (isinstance(declared, int) and high < declared):
        tests.append(written("{} < {}", index, extent))
    return tests


def _gradients(plan: Plan) -> tuple[TensorGradient, ...]:
    return gradients_of(plan.variant, fast_math=plan.fast_math, tiles_only=plan.structure.in_cluster)


# --- names of pairs -----------------------------------------------------------------------------------------


def _bindings_of_pairs(plan: Plan) -> dict[str, Binding]:
    rows = {
        "q": Binding("q_row", _QUERY, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _QUERY, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _QUERY, below=frozenset({"total_q"})),
    }
    return scalar_bindings(plan, CUDA) | rows | _bindings_of_keys()


def _bindings_of_keys() -> dict[str, Binding]:
    below = frozenset({"seqlen_k", "total_k"})
    return {"kv": Binding("kv", _KEY, below=below), "kv_global": Binding("kv_packed", _KEY, below=below)}


def _number_pairs(read: frozenset[str]) -> list[Statement]:
    lines = []
    if read & {"kv", "kv_packed"}:
        lines += _number_keys("{kv_first} + 8 * {row}", read)
    if read & {"q_row", "q_pos", "q_packed"}:
        lines.append(int_constant("q_row", "min({q_first} + 8 * {i} + {j}, {seqlen_q} - 1)"))
    return lines + number_queries(read)


def _number_keys(place: str, read: frozenset[str]) -> list[Statement]:
    """Statements that number a key; keys beyond the end repeat the last one, and add nothing."""
    lines = [int_constant("kv", f"min({place}, {{seqlen_k}} - 1)")]
    if "kv_packed" in read:
        lines.append(int_constant("kv_packed", "{k_begin} + {kv}"))
    return lines


def _work_names(plan: Plan, read: frozenset[str], *, h: str, pairs: bool = False) -> tuple[str, ...]:
    """Return the lines that name what statements read of a work tile and of a step."""
    needs = {
        "kv": ("seqlen_k",), "kv_packed": ("kv", "seqlen_k", "k_begin"), "q_row": ("seqlen_q",),
        "q_pos": ("q_row", "seqlen_q", "seqlen_k"), "q_packed": ("q_row", "seqlen_q", "q_begin"),
    }  # fmt: skip
    read = read.union(*(needs.get(name, ()) for name in read))
    given = () if plan.varlen else ("seqlen_q",)  # an argument of the kernel
    of_work = ("b", "hk", "q_begin", "k_begin", "seqlen_q", "seqlen_k")
    lines = [f"const int {name} = work.{name};" for name in of_work if name in read and name not in given]
    if pairs and read & {"kv", "kv_packed"}:
        lines.append("const int kv_first = work.kv_start + 64 * warpgroup + 16 * (warp % 4) + lane / 4;")
    if pairs and read & {"q_row", "q_pos", "q_packed"}:
        lines.append("const int q_first = (step.tile & kPartial - 1) * kBlockM + 2 * (lane % 4);")
    if h and "h" in read:
        lines.append(f"const int h = {h};")
    return tuple(lines)
