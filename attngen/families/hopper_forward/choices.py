"""Choices of the Hopper forwards by work: rows of ``tuned/hopper_forward.yaml`` and ``tuned/hopper_fp8.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.families.hopper_forward.entries import may_share_entries
from attngen.families.hopper_forward.softmax import softmax_of, terms_of
from attngen.lang.biases import lookups, reads_integers
from attngen.parts.boxes import is_paged, operand_widths
from attngen.plan.operands import operands_of
from attngen.plan.traits import bands_of, gathers, has_global_queries, is_light, mask_block, reads_data_per_key
from attngen.schema import models
from attngen.schema.fields import Many, OneOf
from attngen.schema.kernel_spec import KernelSpec, Roles
from attngen.schema.measured import ChoiceTable, KeysOfTile, NumberOfConsumers, RowModel, TableModel
from attngen.schema.models import ChosenStages, Model

#: Intervals of keys up to which rows see few: more take so many steps that begin with a partial tile that a taller tile
#: loses (block diffusion: docs/notebook/tiles.md, "Masks that divide, at d 64").
_FEW_INTERVALS = 2

#: Columns of V up to which it leaves registers and memory for more keys than K has (docs/notebook/tiles.md, "Tiles at
#: the power limit").
_NARROW_V = 128


#: Queries and keys of the blocks that consumers visit on their own, and the keys of their steps: parts of a block, one,
#: or two, which need not be neighbours, as those of one random number are.
_BLOCK = 64
_KEYS_OF_STEPS = (_BLOCK // 4, _BLOCK // 2, _BLOCK, 2 * _BLOCK)


class ForwardWork(NamedTuple):
    """A kernel whose tile is chosen.

    ``spec`` has the variant that consumers load and compute for each pair, without a mask where a tile map brings it as
    bits; ``asked`` is the spec as it was given. ``bias_bytes`` of tiles of biases, for each pair, and values
    ``by_distance`` come with tiles of K. ``exponents`` are those that P may have (``Probabilities``).
    """

    asked: KernelSpec
    spec: KernelSpec
    iteration: str
    bias_bytes: int
    by_distance: int
    exponents: tuple[int, int] | None


def has_rows_of_one_head(spec: KernelSpec) -> bool:
    """Whether the rows of a tile are neighbouring queries of one head of a dense sequence, whose keys no blocks
    share."""
    return spec.layout == "dense" and not (spec.pack_gqa or spec.split_tiles)


def _takes_polynomial(work: ForwardWork) -> bool:
    """Whether a polynomial takes the place of exp2."""
    constant = softmax_of(work.asked, work.exponents)[1]
    columns = sum(each.width for each in operand_widths(work.asked, operands_of(work.asked)))
    return not work.by_distance and bool(terms_of(work.asked, constant, columns))


def _bounds(work: ForwardWork) -> bool:
    """Whether the mask is made of comparisons, and nothing else takes registers or time for each pair."""
    return is_light(work.spec.variant) and not work.spec.variant.dropout


def _window(work: ForwardWork) -> bool:
    """Whether what rows see ends on the left."""
    return any(interval.lo is not None for interval in bands_of(work.spec).visible)


def _biased(work: ForwardWork) -> bool:
    """Whether tiles of biases decide the tile: not those of integers where something is gathered beside them."""
    if not work.bias_bytes:
        return False
    of_bounds = _bounds(work) and work.spec.layout == "dense" and _window(work)
    integers = gathers(work.spec.variant) and reads_integers(work.asked.variant, work.bias_bytes)
    return not of_bounds and not integers


def has_own_blocks(spec: KernelSpec, iteration: str) -> bool:
    """Whether a mask is constant on blocks of one consumer's rows, but not on those of both: each may visit its own
    blocks. Consumers that take turns do not, and rows of global queries would not be cut into parts."""
    roles = spec.roles or Roles()
    if iteration != "tile_map" or spec.dtype in QUANTIZED_DTYPES or is_paged(spec) or spec.split_tiles:
        return False
    if roles.schedule == "pingpong" or roles.consumer not in (None, 2) or spec.tile_m not in (None, 2 * _BLOCK):
        return False
    if spec.tile_n not in (None, *_KEYS_OF_STEPS[: -1 if spec.variant.dropout else None]):
        return False
    of_one, of_both = ((rows, _BLOCK) for rows in (_BLOCK, 2 * _BLOCK))
    own = mask_block(spec.variant, of_one) == of_one and mask_block(spec.variant, of_both) != of_both
    return own and not has_global_queries(spec.variant)


#: Facts that rows name, those that are found out sooner first.
FACTS: Mapping[str, Callable[[ForwardWork], bool]] = MappingProxyType({
    "ranges": lambda work: work.iteration == "ranges",
    "tile_map": lambda work: work.iteration == "tile_map",
    "dense": lambda work: work.spec.layout == "dense",
    "paged": lambda work: is_paged(work.spec),
    "one_head": lambda work: has_rows_of_one_head(work.spec),
    "packed_heads": lambda work: work.spec.pack_gqa is True,
    "token_scales": lambda work: work.spec.scale_block == 1,
    "block_scales": lambda work: work.spec.scale_block > 1,
    "narrow_v": lambda work: work.spec.head_dim_v <= _NARROW_V < work.spec.head_dim_qk,
    "one_byte": lambda work: work.bias_bytes == 1,
    "dropout": lambda work: work.spec.variant.dropout,
    "scored": lambda work: work.spec.variant.score is not None or work.spec.variant.dropout,
    "bounds": _bounds,
    "biased": _biased,
    "shared_by_entries": lambda work: may_share_entries(work.asked, work.bias_bytes, work.exponents),
    "window": _window,
    "own_blocks": lambda work: not work.bias_bytes and has_own_blocks(work.asked, work.iteration),
    "few_intervals": lambda work: len(bands_of(work.spec).visible) <= _FEW_INTERVALS,
    "gathered": lambda work: gathers(work.spec.variant),
    "data_by_key": lambda work: reads_data_per_key(work.spec.variant),
    "held_entries": lambda work: bool(lookups(work.asked.variant, work.bias_bytes)),
    "polynomial": _takes_polynomial,
})  # fmt: skip


def facts_of(work: ForwardWork) -> Callable[[str], bool]:
    """Tells the facts of a kernel, each of which is computed when a row first asks for it."""
    return cache(lambda name: FACTS[name](work))


_Fact = Annotated[str, OneOf(tuple(FACTS))]


class RegistersOfRoles(Model):
    """Registers per thread of each role."""

    model_config = ConfigDict(defer_build=True)

    producer: Annotated[int, Field(ge=24, le=256, multiple_of=8)]
    consumer: Annotated[int, Field(ge=24, le=256, multiple_of=8)]


class Consumers(NumberOfConsumers):
    """Consumers of 64 rows each, and their order at the tensor cores."""

    schedule: models.Schedule
    registers: RegistersOfRoles | None = None


class ForwardChoice(RowModel):
    """A row of the table.

    ``keeps_turn``: with ping-pong, until the products of a step are done. ``entries`` of the batch lie in a work tile,
    and share tiles of biases. ``within``: the row is taken only if rows in the middle of a long sequence are predicted
    to take less than so many times the time that the next row predicts.
    """

    work: Many[_Fact] = ()
    without: Many[_Fact] = ()
    tile: KeysOfTile
    warps: Consumers
    pipeline: ChosenStages = ChosenStages(stages=2)  # of the ring of K and V with this tile; else 2
    keeps_turn: bool = False
    entries: Annotated[int, Field(ge=1, le=4)] = 1
    within: Annotated[float | None, Field(gt=0)] = None

    @property
    def owns_blocks(self) -> bool:
        """Whether each consumer visits its own blocks of keys."""
        return "own_blocks" in self.work

    @property
    def consumers(self) -> int:
        """Consumers of a block."""
        return self.warps.consumer

    @property
    def registers(self) -> tuple[int, int] | None:
        """Registers of (producer, consumer) with this tile; None: as the consumers have."""
        given = self.warps.registers
        return (given.producer, given.consumer) if given else None

    def resized(self, consumers: int, tile_n: int) -> ForwardChoice:
        """The same with a tile of another size."""
        warps = self.warps.model_copy(update={"consumer": consumers})
        return self.model_copy(update={"warps": warps, "tile": KeysOfTile(n=tile_n)})


class ForwardChoices(TableModel):
    """A table of tiles."""

    choices: Many[ForwardChoice]


#: The tables of the schedules.
TABLES = {name: ChoiceTable[ForwardChoice](name, ForwardChoices, FACTS) for name in ("hopper_forward", "hopper_fp8")}
