"""Choices that were measured on a card, for kernels whose specs leave them open: files of them, and what they change.

``attngen tune`` writes such a file, and a build takes it. A choice belongs to what a kernel computes, whichever spec
asks for it and under whatever name. What ``measured`` has are tables of the same form, for all kernels of some work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from attngen import resources
from attngen.errors import SpecError
from attngen.schema.expand import gradients_of, roles_of
from attngen.schema.fields import Many
from attngen.schema.kernel_spec import Backward, KernelSpec, Roles, fixed
from attngen.schema.measured import FORMAT, MeasuredModel, checked, read_choices
from attngen.schema.models import BackwardModel, ChosenStages, Model, TileModel, WarpsModel

_HEAD = "# Choices measured by `attngen tune`; `attngen build SPEC --tuned FILE` takes them."


class ChoiceModel(Model):
    """Choices for one kernel: ``of`` is its identity, ``kernel`` describes it in words."""

    kernel: str
    of: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    speedup: Annotated[float, Field(gt=0, description="over the plan's own choice, geometric mean over the cases")]
    tile: TileModel | None = None
    pipeline: ChosenStages | None = None
    warps: WarpsModel | None = None
    backward: BackwardModel | None = None


class TunedModel(MeasuredModel):
    """A whole file of choices for single kernels, which were all measured in the same way."""

    tuned: Literal[1]
    gpu: str
    versions: dict[str, str]
    choices: Many[ChoiceModel] = ()


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
    content, node = read_choices(path)
    for field in ("schedule", "times"):
        if field in node.value:
            raise SpecError(
                "a table that every build reads where it is installed; allowed here: a file that 'attngen tune' has "
                "written",
                location=node.locate((field,), key=True), field=field,
            )  # fmt: skip
    model = checked(TunedModel, node)
    choices: dict[str, ChoiceModel] = {}
    for index, choice in enumerate(model.choices):
        if choices.setdefault(choice.of, choice) is not choice:
            raise SpecError(
                f"{choice.kernel} has two choices; allowed: one", location=node.locate(("choices", index)),
                field=f"choices[{index}].of",
            )  # fmt: skip
    return Tuned(str(path), name or resources.display_name(path), content, model.gpu, choices)


def fields_of(kernel: KernelSpec) -> dict[str, Any]:
    """Return the choices of a kernel as an entry of a spec, or of a file of choices, says them."""
    return fixed(
        tile=fixed(m=kernel.tile_m, n=kernel.tile_n),
        pipeline=fixed(stages=kernel.stages),
        warps=fixed(count=kernel.num_warps) | (kernel.roles or Roles()).said(),
        backward=(kernel.backward or Backward()).said(),
    )


def tuned_text(
    gpu: str, versions: Mapping[str, str], choices: Sequence[Mapping[str, Any]], **measured: str
) -> str:  # fmt: skip
    """Return the text of a file of choices; ``choices`` have the fields of ``ChoiceModel``, ``measured`` may have the
    ``date`` and the ``method``."""
    head = {"tuned": FORMAT, "gpu": gpu, **measured, "versions": dict(versions)}
    content = {**head, "choices": [dict(one) for one in choices]}
    return f"{_HEAD}\n" + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
