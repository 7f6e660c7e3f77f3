"""Choices of the Hopper backward by work: rows of ``tuned/hopper_backward.yaml``."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from attngen.families.hopper_backward.kinds import WORDS
from attngen.schema.fields import Many, OneOf
from attngen.schema.measured import ChoiceTable, RowModel, TableModel
from attngen.schema.models import Model

_Word = Annotated[str, OneOf(WORDS)]

#: Labels in kernel names of the products that the softmax overlaps.
LABELS = {
    "gradients": (), "pingpong": ("pingpong",), "nothing": ("nooverlap",), "roles": (), "dv": ("dvoverlap",),
}  # fmt: skip


class QueriesOfTile(Model):
    """Queries of a step."""

    model_config = ConfigDict(defer_build=True)

    m: Annotated[int, OneOf((64, 128))]


class BackwardChoice(RowModel):
    """A row of the table; see ``HopperBackward`` for the fields."""

    work: Many[_Word] = ()
    without: Many[_Word] = ()
    tile: QueriesOfTile
    overlap: Annotated[str, OneOf(tuple(LABELS))]
    packed: bool
    q_stages: Annotated[int, Field(ge=2, le=4)]
    rows_ahead: Annotated[int, Field(ge=0, le=4)] = 0


class BackwardChoices(TableModel):
    """A table of tiles and overlaps."""

    choices: Many[BackwardChoice]


TABLE = ChoiceTable[BackwardChoice]("hopper_backward", BackwardChoices, WORDS)
