"""Families of Hopper backward kernels, by what masks and scores compute for each pair: rows of a table of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attngen.lang.biases import MOST_HELD, without_biases
from attngen.lang.simplify import TRUE
from attngen.lang.tables import tables, without_tables
from attngen.lang.variant import Variant
from attngen.plan.choices import iteration_of
from attngen.plan.own_gradients import derivative
from attngen.plan.traits import (
    divides,
    is_light,
    query_loads,
    query_values_of_score,
    reads_data_per_key,
    reads_positions,
    without_distance_values,
)
from attngen.schema.kernel_spec import KernelSpec

#: Largest head dim that leaves registers beside dK and dV. Not measured: follows from registers.
NARROW = 96

#: Largest head dim of a single block, whose consumers have registers for dK and dV; beyond, clusters have both. Not
#: measured: follows from registers.
BLOCK_HEAD_DIM = 128

#: Most values of each query that the loader stores beside a tile of Q: no more fit in shared memory at head dim 128.
_QUERY_VALUES = 1

#: Families of masks and scores, of which a kernel has one.
_FAMILIES = ("bounds", "light", "divided", "biased", "varying_derivative", "valued")

#: Words of ``facts_of``, by which rows of the table say what work they are for.
WORDS = (*_FAMILIES, "ranges", "classified", "tile_map", "dense", "varlen", "deterministic", "dropout", "padded_to_128")


@dataclass(frozen=True, slots=True)
class Brought:
    """Values that the loader stores beside a tile of Q, so that consumers do not load or compute them for each pair."""

    bias_bytes: int  # of tiles of biases, for each pair
    by_distance: int  # values of each distance of a query from a key
    table_bytes: int = 0  # of small tables, of which consumers hold copies


NOTHING = Brought(0, 0)


def is_wide(spec: KernelSpec) -> bool:
    """Whether dK and dV take more registers than the consumers of one block have."""
    return max(spec.head_dim_qk, spec.head_dim_v) > BLOCK_HEAD_DIM


def facts_of(spec: KernelSpec, family: str, iteration: str, qk: int, *, dropout: bool) -> frozenset[str]:
    """Facts by which the table chooses: the family, and some of the call; ``qk``: columns of Q and K, ``dropout``:
    whether rows for dropout suit."""
    holds_by_fact = {
        "deterministic": spec.deterministic,
        "dropout": dropout,
        "padded_to_128": spec.head_dim_qk < qk == BLOCK_HEAD_DIM,
    }
    return frozenset((family, iteration, spec.layout, *(name for name, holds in holds_by_fact.items() if holds)))


def query_values_of(spec: KernelSpec, variant: Variant, brought: Brought, *, bits: bool) -> int:
    """Number of values of each query that the loader stores beside its tile: those that the mask reads, else those that
    the score does; 0 if they are too many. ``variant`` is what consumers compute for each pair; with ``bits``, a tile
    map has the mask."""
    count = 0 if bits else query_loads(variant)
    if not (count or brought.bias_bytes or is_wide(spec)):
        values = query_values_of_score(
            spec.variant, fast_math=spec.fast_math, bits=bits, by_distance=brought.by_distance > 0
        )
        count = len(values)
    return count if count <= _QUERY_VALUES else 0


def traits_of(spec: KernelSpec) -> frozenset[str]:
    """Traits of a spec that the table of refusals names: those that take registers beside accumulators."""
    variant = spec.variant
    of_score = replace(variant, mask=TRUE)
    holds_by_trait = {
        "dropout": variant.dropout,
        "ordered": spec.deterministic,
        "varying_derivative": varies(spec),
        "both_read": reads_data_per_key(variant) and reads_positions(of_score),
    }
    return frozenset(name for name, holds in holds_by_trait.items() if holds)


def varies(spec: KernelSpec) -> bool:
    """Whether the derivative of the logit differs from pair to pair, or from head to head."""
    return derivative(spec.variant, fast_math=spec.fast_math).varying is not None


def per_pair_of(spec: KernelSpec, brought: Brought) -> Variant:
    """The variant without what the loader stores: what consumers load and compute for each pair."""
    variant = without_biases(spec.variant, brought.bias_bytes, MOST_HELD) if brought.bias_bytes else spec.variant
    if brought.by_distance:
        variant = without_distance_values(variant, fast_math=spec.fast_math)
    if brought.table_bytes and variant.score is not None:
        variant = replace(variant, score=without_tables(variant.score, tables(variant.score, spec.variant)))
    return variant


def family_of(spec: KernelSpec, variant: Variant, brought: Brought) -> str:
    """Family of mask and score, by what consumers compute for each pair (``variant``). Its registers decide which
    products the softmax can overlap (docs/notebook/hopper_backward.md, "Masks and scores before and after taking
    turns" and "Words of the table, timed").

    - "bounds": no score, and a mask made of comparisons of positions and scalars
    - "light": a score whose derivative is the same for all pairs, or tensors read by sequence and head alone
    - "divided": "light" with divisions
    - "biased": "light" or "divided" with biases that come as tiles
    - "varying_derivative": a score whose derivative differs from pair to pair
    - "valued": tensors are read by position
    """
    mapped = not is_wide(spec) and iteration_of(spec, "q", by_bits=True) == "tile_map"
    if mapped:  # the mask comes as bits, whatever its expression reads
        variant = replace(variant, mask=TRUE)
    if is_light(variant):
        return "bounds"
    if reads_positions(variant):
        return "valued"
    if varies(spec):
        return "varying_derivative"
    if brought.bias_bytes:
        return "biased"
    return "divided" if divides(variant) else "light"
