"""Choices of the Hopper backward by work: rows of ``tuned/hopper_backward.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import ConfigDict, Field

from attngen.families.hopper_backward.kinds import WORDS
from attngen.schema.fields import Many, OneOf
from attngen.schema.kernel_spec import Gradient
from attngen.schema.measured import ChoiceTable, RowModel, TableModel
from attngen.schema.models import ChosenStages, Model, Overlap

_Word = Annotated[str, OneOf(WORDS)]

#: Queries of a step, and the most columns that a kernel has. Not measured: those that kernels are written for.
_QUERIES, _COLUMNS = (64, 128), 512

#: Labels in kernel names of the products that the softmax overlaps.
LABELS = {
    "gradients": (), "pingpong": ("pingpong",), "nothing": ("nooverlap",), "roles": (), "dv": ("dvoverlap",),
}  # fmt: skip

#: (overlap, queries of a step) -> ``packed``, ``q_stages`` and ``rows_ahead`` where nothing else says them; kernels'
#: names have others as labels. They are those of the rows that were measured first.
USUAL: Mapping[tuple[str, int], tuple[bool, int, int]] = MappingProxyType({
    ("pingpong", 128): (True, 2, 2), ("pingpong", 64): (True, 3, 2), ("gradients", 128): (True, 2, 0),
    ("gradients", 64): (False, 3, 4), ("nothing", 128): (True, 2, 0), ("nothing", 64): (True, 2, 0),
    ("roles", 64): (False, 3, 0), ("dv", 64): (False, 3, 0),
})  # fmt: skip
#: Orders of single blocks, and of clusters.
BLOCK_OVERLAPS, CLUSTER_OVERLAPS = ("pingpong", "gradients", "nothing"), ("roles", "dv")


class QueriesOfTile(Model):
    """Queries of a step."""

    model_config = ConfigDict(defer_build=True)

    m: Annotated[int, OneOf(_QUERIES)]


class BackwardChoice(RowModel):
    """A row of the table; see ``HopperBackward`` for the fields."""

    work: Many[_Word] = ()
    without: Many[_Word] = ()
    tile: QueriesOfTile
    overlap: Overlap
    packed: bool
    q_stages: Annotated[int, Field(ge=2, le=4)]
    rows_ahead: Annotated[int, Field(ge=0, le=4)] = 0
    pipeline: ChosenStages | None = None  # of dO; else as many as two steps take, or one where memory is short

    @property
    def order(self) -> tuple[str, int]:
        """The key of ``USUAL``."""
        return self.overlap, self.tile.m

    def completed(self, given: Gradient, *, varies: bool, few_rows: bool) -> BackwardChoice:
        """The same with what a spec fixes, of an order in ``USUAL``: a row says nothing about another than its own."""
        order = given.overlap or self.overlap, given.tile_m or self.tile.m
        row = self if order == self.order else usual(*order, varies=varies, few_rows=few_rows)
        return row.model_copy(update=given.of_roles)


class BackwardChoices(TableModel):
    """A table of tiles and overlaps."""

    choices: Many[BackwardChoice]


def usual(overlap: str, m: int, *, varies: bool, few_rows: bool) -> BackwardChoice:
    """The choice of a kernel of which an order of ``USUAL`` and the queries of a step are all that is known.

    ``varies``: the derivative of the logit, in a single block; ``few_rows``: consumers have registers for few rows
    ahead.
    """
    packed, q_stages, rows_ahead = USUAL[overlap, m]
    if overlap == "pingpong" and m < max(_QUERIES) and few_rows:
        rows_ahead = 1
    return BackwardChoice(
        columns=_COLUMNS, tile=QueriesOfTile(m=m), overlap=overlap, packed=packed or varies, q_stages=q_stages,
        rows_ahead=rows_ahead,
    )  # fmt: skip


TABLE = ChoiceTable[BackwardChoice]("hopper_backward", BackwardChoices, WORDS)
