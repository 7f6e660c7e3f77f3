"""Choices of the Hopper backward by work: rows of ``tuned/hopper_backward.yaml``."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import Field

from attngen import resources
from attngen.families.hopper_backward.kinds import WORDS
from attngen.schema.fields import Choice, Many
from attngen.schema.models import Model
from attngen.schema.tuned import RowModel, load_table

_Word = Annotated[str, Choice(WORDS)]

#: Labels in kernel names of the products that the softmax overlaps.
LABELS = {
    "gradients": (), "pingpong": ("pingpong",), "dk": ("dkoverlap",), "nothing": ("nooverlap",), "roles": (),
    "dv": ("dvoverlap",),
}  # fmt: skip


class QueriesOfTile(Model):
    """Queries of a step."""

    m: Annotated[int, Choice((64, 128))]


class ChoiceRow(RowModel):
    """A row of the table; see ``HopperBackward`` for the fields."""

    work: Many[_Word] = ()
    without: Many[_Word] = ()
    tile: QueriesOfTile
    overlap: Annotated[str, Choice(tuple(LABELS))]
    packed: bool
    q_stages: Annotated[int, Field(ge=2, le=4)]
    rows_ahead: Annotated[int, Field(ge=0, le=4)] = 0


@cache
def choice_rows() -> tuple[ChoiceRow, ...]:
    """The rows of the table, the first that suits a kernel first."""
    return load_table(resources.tuned_dir() / "hopper_backward.yaml", "hopper_backward", ChoiceRow)
