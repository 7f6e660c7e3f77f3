"""A dtype of one byte as operands of schedules that serve two: a row of the table must suffice for what plans count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.dtypes import dtype
from attngen.families.hopper_backward import schedule as hopper_backward
from attngen.families.hopper_forward import registers as forward_registers
from attngen.families.hopper_forward import schedule as hopper_forward
from attngen.families.hopper_forward import tiles as forward_tiles
from attngen.families.triton import backward as triton_backward
from attngen.families.triton import forward as triton_forward
from attngen.plan import choices, draft
from attngen.plan.operands import Operands, operands_of
from attngen.schema import KernelSpec

E4M3 = dtype("fp8_e4m3")

READ = ("q", "k", "v", "p", "dout", "ds")


def one_byte(spec: KernelSpec) -> Operands:
    """Return the operands of a spec, of which those that are multiplied have one byte; results have as many as ever.

    A backward reads O beside dO.
    """
    read = (*READ, "out") if spec.direction == "backward" else READ
    return replace(operands_of(spec), **dict.fromkeys(read, E4M3))


def use_one_byte(patch: pytest.MonkeyPatch) -> None:
    """Have plans be made of such operands."""
    reading = (
        choices, draft, forward_registers, forward_tiles, hopper_forward, hopper_backward, triton_forward,
        triton_backward,
    )  # fmt: skip
    for module in reading:
        patch.setattr(module, "operands_of", one_byte)
