"""Measured times of Hopper forward kernels: ``tuned/hopper_times.yaml``, from which calls are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field

from attngen import resources
from attngen.schema.fields import Many
from attngen.schema.measured import FORMAT, Date, KeysOfTile, MeasuredModel, NumberOfConsumers, checked, read_choices
from attngen.schema.models import Model

_Nanoseconds = Annotated[float, Field(ge=0)]


class TileTimes(Model):
    """Nanoseconds of a work tile and of a step in 16 bits. ``columns``: those of the wider one of K and V, padded.
    ``method`` is given if it is not that of the file."""

    model_config = ConfigDict(defer_build=True)

    columns: Annotated[int, Field(ge=16, le=512)]
    tile: KeysOfTile
    warps: NumberOfConsumers
    work_tile_ns: _Nanoseconds
    step_ns: _Nanoseconds
    method: str | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Consumers, keys of a tile, columns."""
        return self.warps.consumer, self.tile.n, self.columns


class TimesModel(MeasuredModel):
    """The file. ``launch_ns``: nanoseconds of a launch in a CUDA graph whose kernels follow one another."""

    tuned: Literal[1]
    gpu: str
    date: Date
    method: str
    launch_ns: _Nanoseconds
    times: Annotated[Many[TileTimes], Field(min_length=1)]


@cache
def measured_times() -> TimesModel:
    """The shipped times. Raises SpecError, with file, line and field, for anything that is wrong with the file."""
    return checked(TimesModel, read_choices(resources.tuned_dir() / "hopper_times.yaml")[1])


def times_text(launch_ns: float, rows: Sequence[TileTimes], *, gpu: str, date: str, method: str) -> str:
    """Text of such a file."""
    head = {"tuned": FORMAT, "gpu": gpu, "date": date, "method": method, "launch_ns": launch_ns}
    times: list[dict[str, Any]] = [row.model_dump(exclude_none=True) for row in rows]
    return yaml.safe_dump({**head, "times": times}, sort_keys=False, default_flow_style=None, width=120)
