"""Choices that were measured on a card, for kernels whose specs leave them open: files of them, and what they change.

``attngen tune`` writes such a file, and a build takes it. A choice belongs to what a kernel computes, whichever spec
asks for it and under whatever name: to one kernel by its identity, or in the tables that ship, of a schedule each, to
all kernels of some work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from attngen import resources
from attngen.errors import Location, SpecError
from attngen.schema import tree
from attngen.schema.expand import gradients_of, roles_of
from attngen.schema.fields import Many
from attngen.schema.kernel_spec import Backward, Gradient, KernelSpec, Roles
from attngen.schema.messages import spec_error
from attngen.schema.models import BackwardModel, Model, TileModel, WarpsModel
from attngen.schema.quoting import show

#: Version of the form of these files.
FORMAT = 1

_HEAD = "# Choices measured by `attngen tune`; `attngen build SPEC --tuned FILE` takes them."


def _check_date(text: str) -> str:
    try:
        date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"found {show(text)}; allowed: a date such as 2026-11-28") from None
    return text


class Measured(Model):
    """The measurement that a choice comes from: the card, the day, and how it was made."""

    gpu: str | None = None
    date: Annotated[str, AfterValidator(_check_date)] | None = None
    method: str | None = Field(default=None, description="in words, or the page and heading of docs/ with the figures")


class ChosenStages(Model):
    """Depth of the ring of K and V tiles."""

    stages: Annotated[int, Field(ge=1, le=16)]


class ChoiceModel(Model):
    """Choices for one kernel: ``of`` is its identity, ``kernel`` describes it in words."""

    kernel: str
    of: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    speedup: Annotated[float, Field(gt=0, description="over the plan's own choice, geometric mean over the cases")]
    tile: TileModel | None = None
    pipeline: ChosenStages | None = None
    warps: WarpsModel | None = None
    backward: BackwardModel | None = None


class TunedModel(Measured):
    """A whole file of choices for single kernels, which were all measured in the same way."""

    tuned: Literal[1]
    gpu: str
    versions: dict[str, str]
    choices: Many[ChoiceModel] = ()


class RowModel(Measured):
    """Choices for all kernels of a schedule whose work has each fact of ``work`` and none of ``without``.

    ``columns``: the most that the wider one of Q and V has, padded; with ``beyond``, there are more than those. A row
    without a card was not measured: it follows from the registers and the shared memory that there are.
    """

    work: Many[str] = ()
    without: Many[str] = ()
    columns: Annotated[int, Field(ge=16, le=512)]
    beyond: Annotated[int, Field(ge=0, le=512)] = 0
    speedup: Annotated[float | None, Field(gt=0, description="over the second best choice, as measured")] = None

    @model_validator(mode="after")
    def _all_or_none(self) -> RowModel:
        given = {name: getattr(self, name) is not None for name in ("gpu", "date", "method")}
        if len({*given.values()}) > 1 or (self.speedup is not None and not all(given.values())):
            missing = [name for name, is_given in given.items() if not is_given]
            raise ValueError(f"a measured choice has gpu, date and method; missing: {', '.join(missing)}")
        return self

    @property
    def origin(self) -> str:
        """Where the choice comes from, in words."""
        if self.gpu is None:
            return "by registers and shared memory, not measured"
        faster = f", {self.speedup:g} times as fast as the second best" if self.speedup else ""
        return f"measured on {self.gpu}, {self.date}{faster} ({self.method})"

    def suits(self, holds: Callable[[str], bool], columns: int) -> bool:
        """Whether it is for a kernel of so many columns, of whose work ``holds`` tells the facts."""
        return (
            self.beyond < columns <= self.columns
            and all(map(holds, self.work))
            and not any(map(holds, self.without))
        )  # fmt: skip


Row = TypeVar("Row", bound=RowModel)


class TableModel(Model, Generic[Row]):
    """The choices of a schedule by work; the first one that suits a kernel is taken."""

    tuned: Literal[1]
    schedule: str
    choices: Annotated[Many[Row], Field(min_length=1)]


@dataclass(frozen=True)
class Tuned:
    """The choices of a file, by the kernels that they are for. ``file`` names it in messages, ``name`` in manifests."""

    file: str
    name: str
    content: bytes
    gpu: str
    choices: Mapping[str, ChoiceModel]

    @property
    def sha256(self) -> str:
        """The hash of the file."""
        return sha256(self.content).hexdigest()

    def speedup(self, kernel: KernelSpec) -> float:
        """Speedup of the file's choice for a kernel over the plan's own choice."""
        return self.choices[identity(kernel)].speedup

    def applied(self, kernel: KernelSpec) -> KernelSpec | None:
        """Return a kernel with the choices of the file, or None if it has none for it, or the spec chooses itself."""
        choice = None if kernel.fixes_choices else self.choices.get(identity(kernel))
        if choice is None:
            return None
        tile, warps = choice.tile or TileModel(), choice.warps or WarpsModel()
        return replace(
            kernel,
            tile_m=tile.m,
            tile_n=tile.n,
            stages=choice.pipeline.stages if choice.pipeline else None,
            num_warps=warps.count,
            roles=roles_of(warps),
            backward=gradients_of(choice.backward) if kernel.direction == "backward" else None,
        )


def identity(kernel: KernelSpec) -> str:
    """Hash of all fields of a kernel, except its open choices and the names of its package and variant."""
    values = replace(kernel, tile_m=None, tile_n=None, stages=None, num_warps=None, roles=None, backward=None).to_dict()
    values["variant"] = {name: value for name, value in values["variant"].items() if name != "name"}
    del values["package"]
    for row in fields(KernelSpec):  # defaults are left out, so that a new field changes no identity
        if row.name in values and values[row.name] == row.default:
            del values[row.name]
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def load_tuned(path: str | Path, *, name: str | None = None) -> Tuned:
    """Read and check a file of choices, which manifests call ``name``.

    Raises SpecError, with file, line and field, for anything that is wrong with it.
    """
    path = Path(path)
    content, node = _read(path)
    if "schedule" in node.value:
        raise SpecError(
            "a table of a schedule, which every build reads where it is installed; allowed here: a file that "
            "'attngen tune' has written",
            location=node.locate(("schedule",), key=True), field="schedule",
        )  # fmt: skip
    model = _checked(TunedModel, node)
    choices: dict[str, ChoiceModel] = {}
    for index, choice in enumerate(model.choices):
        if choices.setdefault(choice.of, choice) is not choice:
            raise SpecError(
                f"{choice.kernel} has two choices; allowed: one", location=node.locate(("choices", index)),
                field=f"choices[{index}].of",
            )  # fmt: skip
    return Tuned(str(path), name or resources.display_name(path), content, model.gpu, choices)


def load_table(path: Path, schedule: str, row: type[Row]) -> tuple[Row, ...]:
    """Read and check the choices of a schedule by work, in their order.

    Raises SpecError, with file, line and field, for anything that is wrong with the file.
    """
    _, node = _read(path)
    model = _checked(TableModel[row], node)  # type: ignore[valid-type]
    if model.schedule != schedule:
        raise SpecError(
            f"found {show(model.schedule)}; allowed: {schedule}", location=node.locate(("schedule",)), field="schedule"
        )
    return model.choices


def first_row(schedule: str, rows: Iterable[Row], holds: Callable[[str], bool], columns: int) -> Row:
    """The first row that suits a kernel (``RowModel.suits``). Raises SpecError if none does."""
    for row in rows:
        if row.suits(holds, columns):
            return row
    raise no_choice(schedule, columns)


def no_choice(schedule: str, columns: int) -> SpecError:
    """The error of a table without a row for a kernel."""
    return SpecError(
        f"no choice for the work of this kernel, at {columns} columns; a last row without 'work' is for all",
        location=Location(str(resources.tuned_dir() / f"{schedule}.yaml")), field="choices",
    )  # fmt: skip


_M = TypeVar("_M", bound=BaseModel)


def _read(path: Path) -> tuple[bytes, tree.Node]:
    """Content and tree of a file of choices."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {str(path)!r}: {error}", location=Location(str(path))) from error
    node = tree.parse(content, str(path))
    if not isinstance(node.value, dict) or "tuned" not in node.value:
        raise SpecError(
            f"no file of choices, which is a mapping that starts with 'tuned: {FORMAT}'", location=node.location
        )
    return content, node


def _checked(model: type[_M], node: tree.Node) -> _M:
    try:
        return model.model_validate(node.plain())
    except ValidationError as error:
        raise spec_error(error, node, model) from error


def fields_of(kernel: KernelSpec) -> dict[str, Any]:
    """Return the choices of a kernel as an entry of a spec, or of a file of choices, says them."""
    choices: dict[str, Any] = {"tile": _tile(kernel.tile_m, kernel.tile_n)}
    if kernel.stages is not None:
        choices["pipeline"] = {"stages": kernel.stages}
    roles = kernel.roles or Roles()
    registers = _given(producer=roles.producer_registers, consumer=roles.consumer_registers)
    choices["warps"] = _given(
        count=kernel.num_warps, producer=roles.producer, consumer=roles.consumer, schedule=roles.schedule,
        overlap=roles.overlap, registers=registers or None,
    )  # fmt: skip
    given = kernel.backward or Backward()
    choices["backward"] = {name: _gradient(getattr(given, name)) for name in ("dkdv", "dq")}
    choices["backward"] = {name: fields for name, fields in choices["backward"].items() if fields}
    return {name: fields for name, fields in choices.items() if fields}


def tuned_text(gpu: str, versions: Mapping[str, str], choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a file of choices; ``choices`` have the fields of ``ChoiceModel``."""
    content = {"tuned": FORMAT, "gpu": gpu, "versions": dict(versions), "choices": [dict(one) for one in choices]}
    return f"{_HEAD}\n" + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)


def _gradient(given: Gradient) -> dict[str, Any]:
    tile = _tile(given.tile_m, given.tile_n)
    return _given(tile=tile or None, stages=given.stages, warps=given.num_warps)


def _tile(m: int | None, n: int | None) -> dict[str, Any]:
    return _given(m=m, n=n)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
