"""The user's mathematics as CUDA lines: the logits of a tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from attngen.lang.emit import Binding
from attngen.lang.folding import (
    KEY,
    KV_FIRST,
    PRODUCT,
    cap_scale,
    fold_variant,
    split_keys,
    split_slope,
    subtract,
    value_of_distance,
    value_of_key,
    value_of_query,
)
from attngen.lang.ir import POSITION, Expr, Op, Type, Var, names, own, rewrite, spelled, walk
from attngen.lang.naming import label
from attngen.lang.powers import argument_of
from attngen.lang.statements import Code, Statement, declared, depending, leaf, needed, reads, statement
from attngen.plan.model import Plan
from attngen.plan.symbols import PREFIX
from attngen.plan.traits import (
    NO_KEY_VALUES,
    LoadedKeyValues,
    distance_values_of_score,
    key_values,
    query_values_of_score,
)
from attngen.render.biases import LANE, Lookup, bias_bindings, lookup_bindings, with_biases, with_lookups
from attngen.render.cuda_masking import (
    ELEMENT,
    HIDE_BY_BITS,
    HIDE_BY_BITS_OF_BLOCK,
    Case,
    bit_of,
    corners_of_block,
    hide,
    masking,
    of_rows,
    row_values,
)
from attngen.render.cuda_statements import (
    SCALE,
    constant,
    int_constant,
    log2_scale,
    number_queries,
    position_of,
    row_shift,
)
from attngen.render.expressions import CUDA, LOGIT_SCALE, emit_for, in_product, scalar_bindings, start_bindings
from attngen.render.tables import SharedTable, placed, with_tables
from attngen.render.tile_values import BINDINGS, RANGES, once_for_tile

_Q, _KV = frozenset({"q"}), frozenset({"kv"})
_QUERY_NAMES = ("q_row", "q_pos", "q_packed", "position")
#: Names of keys in the mask and the score.
_KEY_NAMES = frozenset({"kv", "kv_global"})
#: The row max that logits of a tile are relative to, in kernels whose scores subtract it.
_COUNTED_FROM = own("counted_from", Type.FLOAT)


@dataclass(frozen=True, slots=True)
class Steps:
    """Statements for the elements ``x`` of a tile: lines for the tile, for each row, each key, and each element.

    ``row_values`` are the values of a row that its elements use, each with its type. No lines for elements: nothing
    happens to them. ``cases`` are simpler lines for elements, each with the condition on a lane's two rows under which
    they do the same; the first whose condition holds for all lanes is taken. ``of_mask`` are the names that the mask
    declares, ``costly`` those of values of a key (of a query, in a backward) that it divides for.
    """

    tile: tuple[Statement, ...]
    row: tuple[Statement, ...]
    row_values: tuple[tuple[str, str], ...]
    key: tuple[Statement, ...]
    element: tuple[Statement, ...]
    cases: tuple[tuple[str, tuple[Statement, ...]], ...] = ()
    of_mask: frozenset[str] = frozenset()
    costly: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Statement, ...]:
        """All statements."""
        return (*self.tile, *self.row, *self.key, *self.element)


@dataclass(frozen=True, slots=True)
class Logits:
    """Conversion of products to logits: lines once for a work tile, the steps of partial and of full tiles, the
    factor that leads to units of log2, and whether the key alone may decide that an element's product does not count.

    ``visible``: the steps that evaluate the mask of a partial tile into bits, where it is applied by these; else None.
    """

    work: tuple[Statement, ...]
    partial: Steps
    full: Steps
    visible: Steps | None
    multiplier: Code
    drops_products: bool
    cap_scale: Code | None  # of a soft-capped score: what leads to the argument of tanh
    falls: bool  # logits may be below ``LEAST_LOGIT``, and a tile has to be bounded
    tables: tuple[SharedTable, ...]  # of which consumers hold copies


@dataclass(frozen=True, slots=True)
class ScoreValue:
    """A part of a score that is computed once for a key, or for a query: the symbol that takes its place, and its name
    in a kernel."""

    expr: Expr
    symbol: Var
    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The sink of the head of a row: the statements that compute it, and its value."""

    lines: tuple[Statement, ...]
    value: Code


def logits(plan: Plan) -> Logits:
    """Return the lines of the logits."""
    variant = plan.variant
    folded = fold_variant(
        variant, fast_math=plan.fast_math, heads=plan.box_heads, by_position=True, by_tile=plan.structure.bounds_tiles
    )
    of_key, of_distance = score_values(plan), distance_score_values(plan)

    of_tile = [*of_key, *of_distance]
    whole = [folded.value, argument_of(folded.value)]
    whole, shared_tables = with_tables(plan, whole, (each.expr for each in of_distance))
    value, argument = (with_score_values(each, of_tile) for each in whole)
    shared_tables = tuple(each.with_values(lambda place: with_score_values(place, of_key)) for each in shared_tables)
    value, argument = once_for_tile(plan, value), once_for_tile(plan, argument)
    shared_tables = tuple(each.with_values(lambda place: once_for_tile(plan, place)) for each in shared_tables)
    if plan.fast_math:
        value, argument = split_keys(value), split_keys(argument)
    if plan.structure.relative:
        value = subtract(value, _COUNTED_FROM) or value
    scale = cap_scale(folded, plan.box_heads)
    # few registers are left in 8 bits: products with the places of keys would be kept in them
    sloped = split_slope(value) if plan.structure.lane_sum_log2 else None
    value, slope = sloped or (value, None)
    more = [each for each in (scale, slope) if each is not None]
    work: dict[Statement, None] = {}
    steps = []
    multiplier = leaf("scale_log2e")
    for partial in (True, False):
        bound = element_bindings(plan, ragged=partial) | BINDINGS
        bound |= {each.symbol.name: Binding(each.name, _KV) for each in of_key}
        bound |= {each.symbol.name: Binding(each.name, _Q | _KV) for each in of_distance}
        evaluates = argument if plan.structure.takes_powers and not partial else value
        (biased,), asked = with_lookups(plan, [with_biases(plan, evaluates)])
        entries = held_entries(plan, asked, bound, lane="lane")
        bound |= lookup_bindings(plan, asked, "{i}")
        before, places = placed(plan, shared_tables, bound)
        bound |= {each.symbol.name: each.binding for each in shared_tables}
        scored = emit_for(
            plan, CUDA, [biased, folded.multiplier, *more], bound, taken=declared([*before, *places]), ranges=RANGES
        )
        entries = [*entries, *before]
        hoisted, body = [*entries, *(each for each in scored.hoisted if each not in entries)], [*places, *scored.body]
        of_mask: frozenset[str] = frozenset()
        costly: tuple[str, ...] = ()
        cases: tuple[Case, ...] = ()
        if slope is not None:
            body.append(statement("{x} = fmaf(float({key}), {}, {});", scored.results[-1], scored.results[0]))
        elif variant.score is not None:
            body.append(statement("{x} = {};", scored.results[0]))
        if partial and plan.mask_words:
            body.append(HIDE_BY_BITS_OF_BLOCK if plan.has_pairs_of_blocks else HIDE_BY_BITS)
        elif partial:
            mask = masking(plan, bound, declared([*hoisted, *body]))
            hoisted += [each for each in (*mask.hoisted, *mask.ends) if each not in hoisted]
            body += [*mask.body, hide(mask.hidden)]
            of_mask, costly = frozenset(declared([*mask.hoisted, *mask.body])), mask.costly
            if len(body) == 1:  # elements are masked, and nothing else
                cases = mask.cases
        row, tile, shared = _split(plan, hoisted)
        work |= dict.fromkeys(shared)
        held, per_pair = {each.name for each in of_key}, {each.name for each in of_distance}
        lines = _steps(plan, tile, row, body, held, per_pair)
        hidden_cases = tuple((of_rows(ends, lines.row_values), (hide(hidden),)) for ends, hidden in cases)
        steps.append(replace(lines, cases=hidden_cases, of_mask=of_mask, costly=costly))
        if variant.score is not None:
            multiplier = scored.results[1]
    statements = list(work)
    if variant.score is None:
        statements.insert(0, log2_scale(LOGIT_SCALE) if plan.scaled_logits else SCALE)
    elif not _is_leaf(multiplier):
        statements.append(constant("float", "scale_log2e", multiplier))
        multiplier = leaf("scale_log2e")
    capped = None if scale is None else scored.results[2]
    drops, seen = _drops_products(folded.value), _visible(plan) if plan.mask_words else None
    return Logits(tuple(statements), steps[0], steps[1], seen, multiplier, drops, capped, folded.falls, shared_tables)


def held_entries(
    plan: Plan, asked: Sequence[Lookup], bound: Mapping[str, Binding], *, lane: str, inner: str = "kv"
) -> list[Statement]:
    """Return the statements that compute, from small tables, the values that each lane holds for its warp."""
    if not asked:
        return []
    values = emit_for(
        plan, CUDA, [value for each in asked for value in each.values], {**bound, LANE.name: Binding(lane)},
        inner=inner, ranges={LANE.name: (0, 31)},
    )  # fmt: skip
    names = [name for each in asked for name in each.held]
    own = [constant("float", name, value) for name, value in zip(names, values.results, strict=True)]
    return [*values.hoisted, *values.body, *own]


def planned_key_values(plan: Plan) -> LoadedKeyValues:
    """Return the values of a key that a plan has room for."""
    if not plan.structure.key_values:
        return NO_KEY_VALUES
    bits = plan.mask_words > 0
    tabled = plan.structure.table_bytes > 0
    values = key_values(plan.variant, plan.box_heads, fast_math=plan.fast_math, bits=bits, tabled=tabled)
    return values.first(plan.structure.key_values)


def score_values(plan: Plan) -> tuple[ScoreValue, ...]:
    """Return the parts of the score that a plan has computed once for a key, or once for a query in a backward."""
    if plan.structure.key_values:
        exprs, symbol, role = planned_key_values(plan).score, value_of_key, "value_of_key"
    elif plan.structure.query_values:
        bits = plan.mask_words > 0
        exprs = query_values_of_score(
            plan.variant, fast_math=plan.fast_math, bits=bits, by_distance=plan.structure.distance_values > 0
        )
        symbol, role = value_of_query, "value_of_query"
    else:
        return ()
    return _named_values(exprs, symbol, role)


def distance_score_values(plan: Plan) -> tuple[ScoreValue, ...]:
    """Return the parts of the score that a plan has computed once for a distance of a query from a key."""
    if not plan.structure.distance_values:
        return ()
    exprs = distance_values_of_score(plan.variant, fast_math=plan.fast_math)
    return _named_values(exprs, value_of_distance, "value_of_distance")


def _named_values(exprs: Iterable[Expr], symbol: Callable[[int, Type], Var], role: str) -> tuple[ScoreValue, ...]:
    """Return parts of a score with a name each: of what they are, else of their ``role``."""
    values: list[ScoreValue] = []
    for number, expr in enumerate(exprs):
        name = label(expr) or role
        while any(name == other.name.removeprefix(PREFIX) for other in values):
            name = f"{name}_{number}"
        values.append(ScoreValue(expr, symbol(number, expr.type), f"{PREFIX}{name}"))
    return tuple(values)


def with_score_values(value: Expr, values: Iterable[ScoreValue]) -> Expr:
    """Return a logit with the symbols of its parts that are computed once."""
    for each in sorted(values, key=lambda each: -sum(1 for _ in walk(each.expr))):  # some are part of others
        value = rewrite(value, {each.expr: each.symbol}.get)
    return value


def score_lines(
    plan: Plan, values: Sequence[ScoreValue], bound: Mapping[str, Binding], before: Iterable[str], inner: str = "kv"
) -> tuple[tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
    """Return the statements that parts of the score need of all keys (or queries), those that compute them for one, and
    of the latter those that declare them; ``before`` are names that are not used again."""
    if not values:
        return (), (), ()
    labels = {each.expr: each.name for each in values}
    code = emit_for(plan, CUDA, [each.expr for each in values], bound, taken=before, labels=labels, inner=inner)
    lines = list(code.body)
    for each, result in zip(values, code.results, strict=True):
        if result.text != each.name:
            lines.append(constant(each.expr.type.value, each.name, result))
    wanted = {each.name for each in values}
    return code.hoisted, tuple(lines), tuple(each for each in lines if {*each.names} & wanted)


def _visible(plan: Plan) -> Steps:
    """Return the steps that evaluate the mask of a partial tile, from what a work tile has, into ``bits``."""
    mask = masking(plan, element_bindings(plan, ragged=True) | corners_of_block(plan), ())
    row, tile, work = _split(plan, [*mask.hoisted, *mask.ends])
    return _steps(plan, (*work, *tile), row, [*mask.body, bit_of(mask.hidden, ELEMENT)])


def _is_leaf(value: Code) -> bool:
    return value.text.replace(".", "").replace("_", "").isalnum()


def _drops_products(value: Expr) -> bool:
    """Whether a condition that asks for the key has an arm without the product.

    What the compiler knows of a lane's keys, such as that they are even, would decide it for half of the elements: what
    these hold, it would write between the products, and ptxas would serialize them.
    """
    return any(
        isinstance(node, Op)
        and node.op == "select"
        and names(node.args[0]) & _KEY_NAMES
        and any(PRODUCT.name not in names(arm) for arm in node.args[1:])
        for node in walk(value)
    )


def sink(plan: Plan, before: Iterable[Statement]) -> Sink | None:
    """The sink of a row of the tile ``work``, as a factor of a product; names in ``before`` are not used again."""
    if plan.variant.sink is None:
        return None
    own = {"h": "h", "hk": "{work.hk}"} if plan.pack_gqa else {"h": "{work.h}", "hk": "({work.h} / {group})"}
    bound = {name: Binding(pattern) for name, pattern in {"b": "{work.b}", **own}.items()}
    code = emit_for(plan, CUDA, [plan.variant.sink], scalar_bindings(plan, CUDA) | bound, taken=declared(before))
    return Sink((*code.hoisted, *code.body), in_product(code.results[0], CUDA))


def _steps(
    plan: Plan,
    tile: Sequence[Statement],
    row: Sequence[Statement],
    body: Sequence[Statement],
    held: Iterable[str] = (),
    per_pair: Iterable[str] = (),
) -> Steps:
    """Return the statements of a tile, each where it runs least often; ``held`` names values that come with a key, and
    ``per_pair`` those that come with the distance of a pair."""
    element, key = depending(body, {"x", "row", *row_names(plan), *declared(row), *per_pair})
    key, row = needed(key, element), needed(row, element)
    row = (*_row_lines(plan, reads([*row, *element])), *row)
    if "row_shift" in reads(row):
        tile = (*row_shift(plan), *tile)
    return Steps(
        tile=needed(tile, [*row, *key, *element]),
        row=row,
        row_values=row_values(row, element),
        key=(*_key_lines(plan, reads([*key, *element]), {*held, *per_pair}), *key),
        element=element,
    )


def element_bindings(plan: Plan, *, ragged: bool) -> dict[str, Binding]:
    """Return the bindings of an element. Rows beyond the end repeat the last one; keys may lie beyond it if ragged."""
    keys = frozenset() if ragged else frozenset({"seqlen_k", "total_k"})
    heads = {"h": Binding("h", _Q)} if plan.pack_gqa else {}
    rows = {
        "q": Binding("q_row", _Q, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", _Q, below=frozenset({"seqlen_k"})),
        "q_global": Binding("q_packed", _Q, below=frozenset({"total_q"})),
        POSITION.name: Binding("position", _Q),
        "kv": Binding("kv", _KV, below=keys),
        "kv_global": Binding("kv_packed", _KV, below=keys),
        PRODUCT.name: Binding("x", _Q | _KV),
        KV_FIRST.name: Binding("kv_first", _Q),
        KEY.name: Binding("key", _KV),
        _COUNTED_FROM.name: Binding("{counted_from}[{row}]", _Q),
        **bias_bindings(plan, "{i}"),
        **start_bindings(),
    }
    return scalar_bindings(plan, CUDA) | heads | rows


def _key_lines(plan: Plan, read: frozenset[str], held: Iterable[str]) -> list[Statement]:
    """Return the statements that say which key an element belongs to, as far as it is read, or a value of it."""
    lines = []
    if read & {"key", "kv", "kv_packed", *held}:
        if plan.variant.keys is not None:  # a tile holds keys of any places
            lines.append(int_constant("key", "{keys}[{i}]"))
            return [*lines, *_key_places(read)]
        second = "{i} % 2" if plan.structure.lane_keys_apart == 1 else f"{plan.structure.lane_keys_apart} * ({{i}} % 2)"
        lines.append(int_constant("key", f"8 * ({{i}} / 2) + {second}", comment="from the first one of the lane"))
    return [*lines, *_key_places(read, "|" if has_tables_by_bits(plan) else "+")]


def has_tables_by_bits(plan: Plan) -> bool:
    """Whether the places in tables are found from the number of a tile and that of a key in it as bits of one number,
    of which the compiler knows more than of a sum."""
    return plan.structure.table_bytes > 0 and plan.tile_n & (plan.tile_n - 1) == 0 and not plan.structure.end_aligned


def _key_places(read: frozenset[str], joined_by: str = "+") -> list[Statement]:
    """Statements that name the place of a key, as far as it is read, from its distance to the first one."""
    lines = []
    if read & {"kv", "kv_packed"}:
        lines.append(int_constant("kv", f"{{kv_first}} {joined_by} {{key}}"))
    if "kv_packed" in read:
        lines.append(int_constant("kv_packed", "{k_begin} + {kv}"))
    return lines


def queries(plan: Plan, rows: str) -> str:
    """Return the text of the number of queries in ``rows``: each has one, or all heads of a group have one."""
    return f"({rows} >> group_bits)" if plan.pack_gqa else rows


def _row_lines(plan: Plan, read: frozenset[str]) -> list[Statement]:
    """Return the statements that name the query of a row and, where rows are of several heads, its head."""
    asked = read & {*_QUERY_NAMES, "h"}
    first, lines = "{q_first} + 8 * {row}", []
    if plan.split_kv:  # groups of any size: the kernel divides once
        first = "{query}[{row}]"
        if "h" in asked:
            lines.append(int_constant("h", "{head}[{row}]"))
    elif plan.pack_gqa:
        first = "{q_first} + ({row_in_group} + 8 * {row} >> {group_bits})"
        if "h" in asked:
            lines.append(int_constant("h", "({hk} << {group_bits}) + ({row_in_group} + 8 * {row} & {group} - 1)"))
    if asked <= {"h"}:
        return lines
    lines.append(
        int_constant("q_row", f"min({first}, {{seqlen_q}} - 1)", comment="rows after the end repeat the last one")
    )
    return [*lines, *number_queries(asked, _position(plan) if "position" in asked else "")]


def _position(plan: Plan) -> str:
    """The pattern of where a row lies; rows of several heads, and those that blocks share, read it each for itself."""
    return position_of(plan, "q_row") if plan.split_kv or plan.pack_gqa else "{q_row} + {row_shift}"


def row_names(plan: Plan) -> tuple[str, ...]:
    """Return the names that differ from row to row."""
    return (*_QUERY_NAMES, "counted_from", "h") if plan.pack_gqa else (*_QUERY_NAMES, "counted_from")


def _split(
    plan: Plan, statements: Sequence[Statement]
) -> tuple[tuple[Statement, ...], tuple[Statement, ...], tuple[Statement, ...]]:
    """Return the statements that depend on the row, those that are the same for all rows of a tile of keys, and those
    that are the same for a work tile."""
    row, rest = depending(statements, row_names(plan))
    return row, *depending(rest, {spelled(KV_FIRST.name)})
