"""Tile efficiency of a plan: which share of the pairs in the tiles that its kernel visits is visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

import torch

from attngen.errors import CallError
from attngen.inspect.assumed import Assumed, Heads, assume, read_by
from attngen.inspect.values import Number
from attngen.inspect.visits import Visits, most_places, tile_kinds, visits
from attngen.lang.dropout import DROPOUT_P
from attngen.lang.variant import Bound, Scalar, Variant
from attngen.plan.model import Plan

#: The assumed value of an integer scalar with neither a default nor a given value: a window, a chunk, a width.
_ASSUMED = 256


def scalars_of(variant: Variant, given: Mapping[str, Number]) -> dict[str, Number]:
    """Return a value for each scalar of a call: the given one, else its default, else one of middling size."""
    return {s.name: given.get(s.name, assumed(s)) for s in variant.arguments}


def assumed(scalar: Scalar) -> Number:
    """Return the default of a scalar, or a value of middling size within its range."""
    if scalar.default is not None:
        return scalar.default
    if scalar == DROPOUT_P:
        return 0.1
    if scalar.dtype == "bool":
        return True
    value = 1.0 if scalar.dtype == "fp32" else _ASSUMED
    low, high = _number(scalar.min), _number(scalar.max)
    value = value if low is None else max(value, low)
    value = value if high is None else min(value, high)
    return float(value) if scalar.dtype == "fp32" else int(value)


def _number(bound: Bound) -> int | float | None:
    return None if isinstance(bound, str) else bound


def efficiency(
    plan: Plan,
    seqlens: Sequence[int],
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    b: int | None = None,
    h: int | None = None,
) -> tuple[Visits, ...]:
    """Count tiles and pairs at each length; tensors that are not given hold what ``assumed`` says.

    Heads and sequences that the mask tells apart are added up, or sequence ``b`` and head ``h`` are looked at. Where
    that would take too long, some of them stand for all.
    """
    given = tensors or {}
    places = Heads.of(plan.variant, given).places(plan.variant, b, h)
    counts = []
    for seqlen in seqlens:
        arguments = {**scalars, **assume(plan.variant, seqlen, scalars, given, seed)}
        count = min(len(places), most_places(plan, seqlen))
        some = [places[(2 * n + 1) * len(places) // (2 * count)] for n in range(count)]
        counted = reduce(add, (visits(plan, seqlen, arguments, place, count) for place in some))
        counts.append(counted.of_heads(len(places)) if count < len(places) else counted)
    return tuple(counts)


def kinds_of_tiles(
    plan: Plan,
    seqlen: int,
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    b: int | None = None,
    h: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Kinds of the tiles of sequence ``b`` and head ``h``, or of the first ones: see ``visits.tile_kinds``."""
    arguments = {**scalars, **assume(plan.variant, seqlen, scalars, tensors or {}, seed)}
    return tile_kinds(plan, seqlen, arguments, (b or 0, h or 0))


def tensor_values(
    plan: Plan,
    seqlen: int,
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Return, for each tensor that the mask reads, the sentence that says what it holds."""
    tensors_read = assume(plan.variant, seqlen, scalars, tensors or {}, seed)
    texts = {}
    for declared in read_by(plan.variant):
        value = tensors_read[declared.name]
        shape = f"{declared.dtype} [{', '.join(map(str, value.shape))}]"
        texts[declared.name] = f"{shape}, {value if isinstance(value, Assumed) else 'as given'}"
    return texts


def length_of(variant: Variant, tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The length of the sequences of given tensors, None where their shapes name none.

    Raises CallError where two of their extents disagree.
    """
    lengths = {
        (declared.name, extent): length
        for declared in read_by(variant)
        if declared.name in tensors
        for extent, length in zip(declared.shape, tensors[declared.name].shape, strict=True)
        if extent in _LENGTHS
    }
    if len(set(lengths.values())) > 1:
        named = ", ".join(f"{extent} {length} of {name}" for (name, extent), length in lengths.items())
        raise CallError(f"explain takes as many queries as keys, of one sequence; the tensors have {named}")
    return next(iter(lengths.values()), None)


#: Extents that are as long as the sequence.
_LENGTHS = ("seqlen_q", "seqlen_k", "total_q", "total_k")
