"""The keys that queries of a variant see, for given sizes and values: every pair is evaluated, nothing assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attngen.errors import CallError, suggest
from attngen.inspect.assumed import HEAD_NAMES
from attngen.inspect.explanation import Band
from attngen.lang.bands import bands
from attngen.lang.dropout import DROPOUT_P, RNG_STATE
from attngen.lang.eager import evaluate
from attngen.lang.facts import Facts
from attngen.lang.ranges import EXTENTS
from attngen.lang.variant import Variant
from attngen.runtime.arguments import debug as debugging
from attngen.runtime.arguments.checked import Call
from attngen.runtime.arguments.shapes import bind
from attngen.runtime.reference.eager import names_of

#: Queries and keys as one number, (queries, keys), or (batch, heads, queries, keys).
Sizes = int | tuple[int, ...]

#: Features of variants beside which the mask alone decides what is seen.
SERVES = ("mask", "score", "sink", "dropout", "sink_in_lse", "weights")

#: Rows and columns of the tiles that are counted: those of most kernels.
TILE = 128


@dataclass(frozen=True)
class Counted:
    """Visible pairs and tiles over the heads and sequences that ``sizes`` counts; ``place`` names these
    where not all are counted."""

    sizes: tuple[int, int, int, int]  # batch, heads, queries, keys
    visible: int
    full: int
    partial: int
    empty: int
    place: str = ""

    @property
    def pairs(self) -> int:
        """All pairs of a query and a key."""
        batch, heads, queries, keys = self.sizes
        return batch * heads * queries * keys


@dataclass(frozen=True)
class SeenKeys:
    """The keys that a tile of queries sees. ``counted`` is None where ``missing`` names absent arguments."""

    variant: Variant
    visible: tuple[Band, ...]
    full: tuple[Band, ...]
    exact: bool
    counted: Counted | None
    missing: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.variant.name}: keys that the queries q_lo to q_hi see; q_pos_lo and q_pos_hi are their positions"
        ]
        for label, sides in (("some query sees", self.visible), ("all queries see", self.full)):
            lines += [f"  {label if n == 0 else 'or':16s} {band}" for n, band in enumerate(sides)]
            lines += [] if sides else [f"  {label:16s} no key for certain"]
        if not self.exact:
            lines.append("  bands cannot express all of the mask: tiles are classified one by one")
        if self.counted is None:
            lines.append(f"  how many that are depends on what was not given: {', '.join(self.missing)}")
            return "\n".join(lines)
        count, (batch, heads, queries, keys) = self.counted, self.counted.sizes
        share = 100 * count.visible / count.pairs if count.pairs else 0.0
        where = count.place or f"batch {batch}, {heads} heads"
        lines.append(f"  {where}, {queries} queries, {keys} keys: {share:.1f} % of pairs visible")
        lines.append(f"  tiles of {TILE} x {TILE}: {count.full} full, {count.partial} partial, {count.empty} empty")
        return "\n".join(lines)

    __repr__ = __str__


def seen(variant: Variant, sizes: Sizes, kv_heads: int | None, arguments: Mapping[str, Any]) -> Tensor:
    """The keys that each query sees: bools (batch, heads, queries, keys). Raises CallError."""
    _check(variant, arguments)
    known, unknown = _resolved(variant, sizes, arguments)
    if unknown:
        raise CallError(f"{variant.name}: what is seen depends on {' and '.join(unknown)}; {_SAY_SIZES}")
    call = _bound(variant, known, kv_heads, arguments)
    visible = torch.empty(
        (call.batch, call.heads, call.seqlen_q, call.seqlen_k), dtype=torch.bool, device=call.device
    )  # fmt: skip
    for b in range(call.batch):
        offsets = b * call.seqlen_q, b * call.seqlen_k
        names = names_of(call, b, slice(0, call.seqlen_q), call.seqlen_q, call.seqlen_k, *offsets)
        value = evaluate(call.variant.mask, names, dict(call.tensors), float_dtype=torch.float32)
        visible[b] = torch.as_tensor(value, dtype=torch.bool, device=call.device)
    return visible


def seen_keys(
    variant: Variant,
    sizes: Sizes | None,
    kv_heads: int | None,
    arguments: Mapping[str, Any],
    b: int | None = None,
    h: int | None = None,
) -> SeenKeys:
    """Return the bands of a variant, and what is seen where sizes and all that the mask reads are given: in sequence
    ``b`` by head ``h``, or in all of them."""
    _check(variant, arguments)
    of_mask = bands(variant.mask, Facts.of(variant), over="kv")
    visible, full = (tuple(map(Band.of, part)) for part in (of_mask.visible, of_mask.full))
    missing = [] if sizes is not None else ["sizes"]
    read = _of_mask(variant, ())
    missing += [tensor.name for tensor in read.tensors if tensor.name not in arguments]
    missing += [s.name for s in read.arguments if s.default is None and s.name not in arguments]
    if sizes is not None:
        missing += [f"{what} ({_SAY_SIZES})" for what in _resolved(variant, sizes, arguments)[1]]
    counted = None
    if sizes is not None and not missing:
        mask, place = at_place(seen(variant, sizes, kv_heads, arguments), b, h)
        counted = replace(_count(mask), place="" if b is None and h is None else place)
    return SeenKeys(variant, visible, full, of_mask.exact, counted, tuple(missing))


def _check(variant: Variant, arguments: Mapping[str, Any]) -> None:
    """Raise CallError for a variant whose mask alone does not decide, and a keyword that it does not declare."""
    variant.require(SERVES, "the mask of a variant, which alone decides what is seen,")
    declared = [*(tensor.name for tensor in variant.tensors), *(scalar.name for scalar in variant.arguments)]
    for name in arguments:
        if name in declared or name in (DROPOUT_P.name, RNG_STATE.name):
            continue
        if name in ("b", "h", "hk", "batch", "heads", "queries", "keys", "seqlen", "seqlen_q", "seqlen_k"):
            hint = "; sizes say it, as in (batch, heads, queries, keys)"
        else:
            hint = suggest(name, (*declared, "kv_heads"))
        takes = f"; it takes {', '.join(declared)}" if declared else "; it takes no arguments of its own"
        raise CallError(f"{variant.name}: unknown argument '{name}'{hint}{takes}")


def at_place(mask: Tensor, b: int | None, h: int | None) -> tuple[Tensor, str]:
    """Return the part of a mask of one sequence, or one head, or both, and which it is, in words. Raises CallError."""
    batch, heads = mask.shape[:2]
    for label, place, extent in (("b", b, batch), ("h", h, heads)):
        if place is not None and (type(place) is not int or not 0 <= place < extent):
            raise CallError(
                f"{label} must be 0 to {extent - 1}, got {place!r}; sizes may be (batch, heads, queries, keys)"
            )
    sequence = f"sequence {b}" if b is not None else f"all {batch} sequences" if batch > 1 else "sequence 0"
    head = f"head {h}" if h is not None else f"all {heads} heads" if heads > 1 else "head 0"
    some = mask if b is None else mask[b : b + 1]
    return some if h is None else some[:, h : h + 1], f"{sequence}, {head}"


def _count(mask: Tensor) -> Counted:
    batch, heads, queries, keys = mask.shape
    full = partial = empty = 0
    for rows in mask.split(TILE, dim=2):
        for tile in rows.split(TILE, dim=3):
            every, some = int(tile.all(3).all(2).sum()), int(tile.any(3).any(2).sum())
            full, partial, empty = full + every, partial + some - every, empty + batch * heads - some
    return Counted((batch, heads, queries, keys), int(mask.sum()), full, partial, empty)


#: Advice where a mask differs by head or by sequence and no tensor tells the sizes.
_SAY_SIZES = "pass sizes as (batch, heads, queries, keys)"


def _resolved(variant: Variant, sizes: Any, given: Mapping[str, Any]) -> tuple[tuple[int, int, int, int], list[str]]:
    """Return batch, heads, queries and keys, and which of the first two neither sizes nor tensors say, though the mask
    depends on them. Raises CallError."""
    batch, heads, queries, keys = _sizes(sizes)
    lengths = {
        extent: length
        for declared in variant.tensors
        if isinstance(given.get(declared.name), Tensor) and given[declared.name].dim() == len(declared.shape)
        for extent, length in zip(declared.shape, given[declared.name].shape, strict=True)
    }
    read, loaded = variant.uses(variant.mask)
    extents = {extent for name in loaded for extent in variant.tensor(name).shape}
    unknown = []
    if batch is None:
        batch = lengths.get("b", 1)
        unknown += ["the number of sequences"] if "b" in read - extents else []
    if heads is None:
        heads = lengths.get("h", lengths.get("hk", 1))
        unknown += ["the number of heads"] if read & HEAD_NAMES and not extents & {"h", "hk"} else []
    return (batch, heads, queries, keys), unknown


def _sizes(sizes: Any) -> tuple[int | None, int | None, int, int]:
    """Return batch, heads, queries and keys; None for what is not said. Raises CallError."""
    given = tuple(sizes) if isinstance(sizes, tuple | list) else (sizes, sizes)
    whole = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**31 for size in given)
    if len(given) not in (2, 4) or not whole:
        raise CallError(
            "sizes must be a number of queries and keys, (queries, keys), or (batch, heads, queries, keys), "
            f"got {sizes!r}"
        )
    batch, heads, queries, keys = (None, None, *given) if len(given) == 2 else given
    return batch, heads, queries, keys


def _of_mask(variant: Variant, given: Any) -> Variant:
    """The part of a variant that its mask reads, the ``given`` arguments, and the names in their bounds."""
    variables, loaded = variant.uses(variant.mask)
    scalars = [s for s in variant.scalars if s.name in variables or s.name in given or s.const is not None]
    tensors = [t for t in variant.tensors if t.name in loaded or t.name in given]
    bounds = {bound for s in scalars for bound in (s.min, s.max)} | {b for t in tensors for b in t.range or ()}
    known = {extent for t in tensors for extent in t.shape}.union(EXTENTS)  # those of a call, and what it passes
    tensors = [t for t in variant.tensors if t in tensors or (bounds - known) & set(t.shape)]
    return Variant(variant.name, variant.mask, None, tuple(scalars), tuple(tensors))


def _bound(
    variant: Variant, sizes: tuple[int, int, int, int], kv_heads: int | None, arguments: Mapping[str, Any]
) -> Call:
    """Return a call of these sizes whose arguments are checked, their values against the declarations, too."""
    batch, heads, queries, keys = sizes
    if kv_heads is not None and (type(kv_heads) is not int or not 0 < kv_heads < 2**31):
        raise CallError(f"kv_heads must be a number of heads, at least 1, got {kv_heads!r}")
    device = next((value.device for value in arguments.values() if isinstance(value, Tensor)), torch.device("cpu"))
    row = torch.zeros(8, device=device, dtype=torch.float32)
    q, k = row.expand(batch, queries, heads, 8), row.expand(batch, keys, heads if kv_heads is None else kv_heads, 8)
    own = {name: value for name, value in arguments.items() if name not in (DROPOUT_P.name, RNG_STATE.name)}
    call = bind(
        _of_mask(variant, own), q, k, k, None, softmax_scale=None, seqused_k=None, return_lse=False, layout="bshd",
        arguments=own,
    )  # fmt: skip
    debugging.check_facts(call)
    return call
