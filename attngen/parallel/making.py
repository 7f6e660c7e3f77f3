"""``attngen.parallel.plan``: from variants, lengths and values to a plan, kept for the next call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.lang.ir import Type
from attngen.lang.runs import TILE
from attngen.lang.variant import Variant
from attngen.parallel.balance import Assignment, VariantLoad, assign, is_enough, overlapped, runs_of_a_rank
from attngen.parallel.cost import Cost
from attngen.parallel.document_tiles import DocumentTiles
from attngen.parallel.groups import GroupReference, group_of
from attngen.parallel.heads import heads_are_alike
from attngen.parallel.layers import PlanLayer
from attngen.parallel.one_row import as_one_row, documents
from attngen.parallel.overlap import forward_groups, overlap
from attngen.parallel.plans import Plan
from attngen.parallel.routes import Needs
from attngen.parallel.segments import is_relative, reads_no_positions
from attngen.parallel.sharding import Sharding
from attngen.parallel.values import passed, refuse_unknown, values_of_mask
from attngen.parallel.visits import TileRuns, runs_of_tiles, visits
from attngen.runtime.registry.binding import find
from attngen.variants import PythonVariant

#: Features of variants that ranks compute.
SERVES = ("mask", "score", "sink", "dropout")

#: Ways by which keys reach the rows that see them.
METHODS = ("auto", "gather", "exchange", "heads")

#: Rows of the tiles that are dealt and sent, in order of preference: the first of which all ranks get as many. Not
#: measured.
TILES = (128, 64, 32, 16)

#: Keys of a rank that several of its segments see are copied: in all, at most so many times. Not measured.
_COPIES = 2.5

#: Most plans, and most counts of tiles, that are kept. Not measured.
_KEPT = 32

#: The visits of a variant, and the tensors of its documents, if they were needed.
_Counted = tuple[TileRuns, dict[str, Any] | None]

_plans: OrderedDict[Any, tuple[Any, Plan]] = OrderedDict()
_visits: OrderedDict[Any, tuple[Any, _Counted]] = OrderedDict()


def plan(
    variant: str | Variant | Sequence[str | Variant] | Mapping[str | Variant, float],
    seqlen: int,
    group: Any = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    method: str = "auto",
    tile: int | None = None,
    chunks: int | None = None,
    cost: Cost | None = None,
    **values: Any,
) -> Plan:
    """Deal the tokens of a sequence to ranks, so that attention is balanced, and plan what attention sends.

    ``variant`` is one variant, several of one model, or a mapping to the number of layers that have each. ``seqlen``
    counts all tokens, queries and keys alike; with ``cu_seqlens`` they are documents that are packed one after the
    other. ``group`` is a ``DeviceMesh`` of one axis, a process group of ``torch.distributed``, a number of ranks (to
    look at a plan), or None for all processes. ``values`` are the scalars and whole tensors of the variants: all that a
    mask reads, and any others.

    ``method`` says how keys come: ``gather`` brings all to every rank, ``exchange`` the tiles that its rows visit, and
    ``auto`` chooses one of these; with ``heads`` ranks exchange rows for heads (Ulysses). ``tile`` is the number of
    rows that are dealt and sent together: by default 128, or less where then all ranks get as many. ``chunks`` is how
    many runs of tiles each rank gets, by default the number with the least predicted time, which ``cost`` weighs.

    All ranks pass the same arguments and get the same plan, without communication. Plans are kept: the same arguments
    give the same one, tensors by identity and version. Reads tensors, so that it waits for a GPU that they are on.
    Raises CallError.
    """
    cost = cost if cost is not None else Cost()
    group, ranks, rank = group_of(group)
    sources = _sources(variant)
    offsets = _offsets(cu_seqlens, seqlen)
    wanted, tile = tile, _checked(seqlen, ranks, method, tile, chunks, cost)
    stated = _stated(sources, values)
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    sizes = seqlen, offsets, tile, cost, _identities(values)
    reference = None if group is None else GroupReference(group)
    key = (tuple((each, layers) for _, each, layers in stated), sizes, ranks, rank, reference, method, chunks, wanted)
    known = _plans.get(key)
    if known is not None:
        _plans.move_to_end(key)
        return known[1]
    packed, enough = None, False
    segments = all(_over_segments(each, values) and not each.dropout for _, each, _ in stated)
    if offsets is not None and segments and ranks > 1 and chunks is None and method in ("auto", "exchange"):
        packed, enough = _packed(offsets, wanted or TILES[0], ranks, cost, values, tensors, stated)
    if not enough:
        counted = [_counted(each, sizes, cost, values, tensors, None) for _, each, _ in stated]
        loads = _loads(counted, stated, values)
        assignment = assign(
            loads, -(-seqlen // tile), ranks, tile, cost, chunks=1 if method == "heads" and chunks is None else chunks,
            whole=method == "gather",
        )  # fmt: skip
        sharding = Sharding(assignment.owner, ranks, seqlen, tile)
        enough = packed is not None and packed[0].seconds <= overlapped(loads, assignment.owner, ranks, tile, cost)
    if packed is not None and enough:
        assignment, sharding, counted = packed
        tile = sharding.tile
    made = Plan(
        seqlen, ranks, rank, reference, tile, assignment.chunks, cost,
        tuple(
            _layer(source, each, layers, counts, sharding, method, offsets, values, cost)
            for (source, each, layers), counts in zip(stated, counted, strict=True)
        ),
        sharding, offsets, also,
    )  # fmt: skip
    _keep(_plans, key, (tensors, made))
    return made


def also(made: Plan, variant: str | Variant, values: Mapping[str, Any]) -> Plan:
    """A plan of another variant for the tokens of a plan. Raises CallError."""
    ((source, each, layers),) = _stated(_sources(variant), values)
    sizes = made.seqlen, made.cu_seqlens, made.tile, made.cost, _identities(values)
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    key = (id(made), each, sizes)
    known = _plans.get(key)
    if known is not None:
        _plans.move_to_end(key)
        return known[1]
    documents = None
    if made.cu_seqlens is not None and made.sharding.begins is not None:
        documents = DocumentTiles.of(made.cu_seqlens, made.tile)
        documents = None if documents is None else documents.cut(made.sharding.begins)
    counted = _counted(each, sizes, made.cost, values, tensors, documents)
    layer = _layer(source, each, layers, counted, made.sharding, "exchange", made.cu_seqlens, values, made.cost)
    other = Plan(
        made.seqlen, made.ranks, made.rank, made.group_reference, made.tile, made.chunks, made.cost, (layer,),
        made.sharding, made.cu_seqlens, also,
    )  # fmt: skip
    _keep(_plans, key, ((tensors, made), other))
    return other


def _packed(
    offsets: tuple[int, ...], tile: int, ranks: int, cost: Cost, values: Mapping[str, Any], tensors: Sequence[Tensor],
    stated: Sequence[tuple[Any, Variant, float]],
) -> tuple[tuple[Assignment, Sharding, list[_Counted]] | None, bool]:  # fmt: skip
    """Whole documents packed into ranks, in tiles of one document each, and whether no other way need be tried; None
    where there are too few or too short ones."""
    documents = DocumentTiles.of(offsets, tile)
    if documents is None:
        return None, False
    sizes = documents.seqlen, offsets, tile, cost, _identities(values)
    alone = [_counted_alone(each, sizes, cost, values, tensors) for _, each, _ in stated]
    positions = [not reads_no_positions(each) for _, each, _ in stated]
    work = sum(
        documents.work(visited, positions=by_position) * layers
        for (visited, _), by_position, (_, _, layers) in zip(alone, positions, stated, strict=True)
    )
    documents, owner = documents.packed(work, ranks)
    sharding = Sharding(owner, ranks, documents.seqlen, tile, documents.begins)
    counted = [
        (documents.visits(visited, positions=by_position), of_documents)
        for (visited, of_documents), by_position in zip(alone, positions, strict=True)
    ]
    seconds = 0.0
    for (visited, _), (_, each, layers) in zip(counted, stated, strict=True):
        received = Needs.of(sharding, visited.needs(owner, ranks)).received
        way = overlap(visited, owner, received, tile, cost, segments=True, heads_alike=_in_groups(each))
        seconds += layers * way[1]
    assignment = Assignment(owner, seconds, runs_of_a_rank(owner, ranks))
    enough = is_enough(_loads(counted, stated, values), assignment, ranks, tile, cost)
    return (assignment, sharding, counted), enough


def _loads(
    counted: Sequence[_Counted], stated: Sequence[tuple[Any, Variant, float]], values: Mapping[str, Any]
) -> list[VariantLoad]:
    """Predicted load of each variant of a plan."""
    return [
        VariantLoad(visited, layers, _over_segments(each, values), _in_groups(each))
        for (visited, _), (_, each, layers) in zip(counted, stated, strict=True)
    ]


def _stated(
    sources: Sequence[tuple[str | Variant, float]], values: Mapping[str, Any]
) -> list[tuple[str | Variant, Variant, float]]:
    """The variants of a plan. Raises CallError for one that plans do not take, and for an unknown value."""
    stated = [(source, find(source, None).variant, layers) for source, layers in sources]
    refuse_unknown({each.name: each for _, each, _ in stated}, values)
    return stated


def _identities(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, _identity(value)) for name, value in sorted(values.items()))


def _layer(
    source: str | Variant, variant: Variant, layers: float, counted: _Counted, sharding: Sharding,
    method: str, offsets: tuple[int, ...] | None, values: Mapping[str, Any], cost: Cost,
) -> PlanLayer:  # fmt: skip
    visited, of_documents = counted
    if variant.dropout:
        _check_dropout(variant, sharding, method, offsets)
    variant.require(SERVES, "a plan, which merges the results of ranks by their log-sum-exp,")
    if method == "heads" and not heads_are_alike(variant):
        raise CallError(
            f"method heads: {variant.name} reads the number of a head, or of all of them, other than to index tensors "
            "that have something for each head; allowed: gather, exchange"
        )
    seen = Needs.of(sharding, visited.needs(sharding.owner, sharding.ranks))
    everything = Needs.of_all(sharding)
    method = "exchange" if method == "auto" else method
    sent = seen if method == "exchange" and not variant.dropout else everything
    positions = not reads_no_positions(variant)
    segments = method != "heads" and sharding.ranks > 1 and _over_segments(variant, values)
    segments = segments and not variant.dropout and _few_copies(visited, sharding, sent, positions=positions)
    own = {name: values[name] for name in passed(variant) if name in values}
    one_row = offsets is not None and not segments
    tables: Callable[[], Mapping[str, Any]] = dict
    if offsets is not None and one_row:
        tables = partial(documents, offsets) if of_documents is None else partial(dict, of_documents)
    weighed = visited, sharding.owner, sent.received, sharding.tile, cost
    way, _ = overlap(*weighed, segments=segments and not sent.runs.complete, heads_alike=_in_groups(variant))
    return PlanLayer(
        variant.name, source, variant, as_one_row(variant) if one_row else variant, layers, method,
        own, visited, sent, seen, segments, positions, way,
        forward_groups(*weighed, way=way, heads_alike=_in_groups(variant)), tables,
    )  # fmt: skip


def _check_dropout(variant: Variant, sharding: Sharding, method: str, offsets: tuple[int, ...] | None) -> None:
    """Raise CallError where a rank's call would drop other pairs than one call over the whole sequence."""
    reason = (
        "method heads: random numbers are drawn by the number of a head; allowed: gather, exchange"
        if method == "heads"
        else "cu_seqlens: random numbers are drawn by the number of a sequence; allowed: sequences of one length"
        if offsets is not None
        else f"tile {sharding.tile}: random numbers follow rows by tiles of {TILE}; allowed: multiples of {TILE}"
        if sharding.ranks > 1 and sharding.tile % TILE
        else None
    )
    if reason is not None:
        raise CallError(f"{variant.name} has dropout, which cannot be combined with {reason}")


def _over_segments(variant: Variant, values: Mapping[str, Any]) -> bool:
    """Whether a variant computes the same over segments as over the whole sequence."""
    known = {s.name: values.get(s.name, s.default) for s in variant.arguments if s.type is Type.INT}
    numbers = tuple((name, value) for name, value in known.items() if type(value) is int)
    return reads_no_positions(variant) or is_relative(variant, numbers)


def _in_groups(variant: Variant) -> bool:
    """Whether calls of some heads compute what the call of all heads does."""
    return heads_are_alike(variant) and not variant.dropout


def _few_copies(visited: TileRuns, sharding: Sharding, sent: Needs, *, positions: bool) -> bool:
    """Whether segments of no rank have many times the keys that it gets."""
    if not positions:
        return True
    start, _ = runs_of_tiles(sharding.owner)
    last: np.ndarray = np.arange(1, len(start) + 1)
    # The last tile of a run counts: the run sees back to the first key of its first tile.
    ends: np.ndarray = np.append(start[1:] != start[:-1], True)
    keys = np.bincount(sharding.owner[ends], weights=(last - np.minimum(visited.first, start)[start])[ends],
                       minlength=sharding.ranks)  # fmt: skip
    return bool((keys <= _COPIES * sent.runs.counts).all())


def _counted(
    variant: Variant, sizes: Any, cost: Cost, values: Mapping[str, Any], tensors: Sequence[Tensor],
    of_tiles: DocumentTiles | None,
) -> _Counted:  # fmt: skip
    """The visits of a variant, by tiles of documents if these are given."""
    seqlen, offsets, tile, *_ = sizes
    visited, of_documents = _counted_alone(variant, sizes, cost, values, tensors)
    if offsets is None:
        return visited, of_documents
    positions = not reads_no_positions(variant)
    if not _over_segments(variant, values):
        return visited if of_tiles is None else of_tiles.covering(visited), of_documents
    if of_tiles is None:
        return visited.in_documents(offsets, tile, seqlen, positions=positions), of_documents
    return of_tiles.visits(visited, positions=positions), of_documents


def _counted_alone(
    variant: Variant, sizes: Any, cost: Cost, values: Mapping[str, Any], tensors: Sequence[Tensor]
) -> _Counted:
    """The visits of a variant in a sequence without documents, or in one that they follow one another in."""
    seqlen, offsets, tile, *_ = sizes
    key = (variant, sizes)
    known = _visits.get(key)
    if known is not None:
        _visits.move_to_end(key)
        return known[1]
    plain = offsets is None or _over_segments(variant, values)
    of_documents: dict[str, Any] | None = None if plain or offsets is None else documents(offsets)
    whole = variant if plain else as_one_row(variant)
    lengths = {
        extent: length
        for tensor in whole.tensors
        if isinstance(values.get(tensor.name), Tensor) and values[tensor.name].dim() == len(tensor.shape)
        for extent, length in zip(tensor.shape, values[tensor.name].shape, strict=True)
    }
    if offsets is not None and lengths.get("documents", len(offsets) - 1) != len(offsets) - 1:
        raise CallError(f"a tensor has {lengths['documents']} documents, cu_seqlens {len(offsets) - 1}")
    heads = lengths.get("h", cost.heads)
    kv_heads = lengths.get("hk", cost.kv_heads if heads % cost.kv_heads == 0 else heads)
    batch = lengths.get("b", 1)
    read = values_of_mask(whole, seqlen, batch, (heads, kv_heads), {**values, **(of_documents or {})})
    visited = visits(whole, seqlen, tile, read, batch, heads, kv_heads)
    _keep(_visits, key, (tensors, (visited, of_documents)))
    return visited, of_documents


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    while len(kept) > _KEPT:
        kept.popitem(last=False)


def _identity(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, Tensor) else (type(value).__name__, value)


# --- arguments ----------------------------------------------------------------------------------------------


def _sources(variant: Any) -> list[tuple[str | Variant, float]]:
    if isinstance(variant, str | Variant):
        return [(variant, 1.0)]
    if isinstance(variant, Mapping):
        for name, layers in variant.items():
            if isinstance(layers, bool) or not isinstance(layers, int | float) or not layers > 0:
                raise CallError(f"variant '{name}' must have a positive number of layers, got {layers!r}")
        each = list(variant.items())
    elif isinstance(variant, Sequence):
        each = [(one, 1.0) for one in variant]
    else:
        each = []
    if not each:
        raise CallError(f"variant must be a variant, several, or a mapping to numbers of layers, got {variant!r}")
    names = [one.name if isinstance(one, Variant | PythonVariant) else str(one) for one, _ in each]
    if len(set(names)) < len(names):
        raise CallError(f"a plan names each variant once, got {', '.join(names)}")
    return each


def _offsets(cu_seqlens: Any, seqlen: Any) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    numbers = cu_seqlens.tolist() if isinstance(cu_seqlens, (Tensor, np.ndarray)) else list(cu_seqlens)
    if len(numbers) < 2 or not all(type(n) is int for n in numbers):
        raise CallError("cu_seqlens must be a list or 1-D tensor of integers, one more than there are documents")
    falls = [i for i, (a, b) in enumerate(pairwise(numbers)) if b < a]
    if numbers[0] != 0 or falls or numbers[-1] != seqlen:
        raise CallError(
            f"cu_seqlens must begin with 0, never decrease and end with seqlen, which is {seqlen}; got {numbers[0]} to "
            f"{numbers[-1]}{f', and a decrease after place {falls[0]}' if falls else ''}"
        )
    return tuple(numbers)


def _checked(seqlen: Any, ranks: int, method: Any, tile: Any, chunks: Any, cost: Any) -> int:
    """The tile of a plan. Raises CallError for an argument that is wrong."""
    for name, value in (("seqlen", seqlen), ("tile", tile), ("chunks", chunks)):
        if (value is not None or name == "seqlen") and (type(value) is not int or not 0 < value < 2**30):
            raise CallError(f"{name} must be a positive integer, got {value!r}")
    if method not in METHODS:
        raise CallError(f"method must be one of {', '.join(METHODS)}, got {method!r}{suggest(str(method), METHODS)}")
    if not isinstance(cost, Cost):
        raise CallError(f"cost must be an attngen.parallel.Cost, got {type(cost).__name__}")
    if tile is not None:
        return int(tile)
    return next((each for each in TILES if seqlen % (each * ranks) == 0), TILES[0])
