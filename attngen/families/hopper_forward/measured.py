"""Rows of the tables of Hopper forwards from measurements of single kernels."""

from __future__ import annotations

from attngen.arch import ARCHES
from attngen.families.hopper_forward.candidates import Form
from attngen.families.hopper_forward.choices import FACTS, TABLES, Consumers, RegistersOfRoles, facts_of
from attngen.families.hopper_forward.structure import HopperForward
from attngen.families.hopper_forward.tiles import hopper_tile
from attngen.parts.boxes import BOX_BYTES, operand_widths
from attngen.plan.choices import iteration_of
from attngen.plan.model import Plan
from attngen.plan.operands import operands_of
from attngen.schema.kernel_spec import KernelSpec
from attngen.schema.measured import KeysOfTile, MeasuredRow
from attngen.schema.models import ChosenStages


def measured_row(spec: KernelSpec, fastest: Plan, form: Form) -> MeasuredRow:
    """The row for kernels of just the work of a spec, with the tile, roles and stages of its ``fastest`` plan.

    It names every fact of the spec, those that do not hold as ``without``, and has its columns alone: which of these
    matter was not measured. Raises PlanError if the schedule does not take the spec.
    """
    candidate = hopper_tile(spec, ARCHES[spec.arch], iteration_of(spec, by_bits=True), form).candidate
    roles, holds = fastest.structure, facts_of(candidate.work)
    assert isinstance(roles, HopperForward)
    work = [name for name in FACTS if holds(name)]
    without = [name for name in FACTS if name not in work]
    if not roles.map_rows and "own_blocks" in work:  # consumers of a row that names it have rings of their own
        work.remove("own_blocks")
    operands = operands_of(spec)
    columns = max(each.width for each in operand_widths(spec, operands))
    sizes = (roles.consumers, fastest.tile_n)
    registers = candidate.row.registers if sizes == (candidate.row.consumers, candidate.row.tile.n) else None
    row = candidate.row.model_copy(
        update={
            "work": tuple(work),
            "without": tuple(without),
            "beyond": columns - BOX_BYTES[-1] // operands.q.bytes,
            "columns": columns,
            "within": None,
            "tile": KeysOfTile(n=fastest.tile_n),
            "warps": Consumers(
                consumer=roles.consumers,
                schedule=roles.schedule,
                registers=RegistersOfRoles(producer=registers[0], consumer=registers[1]) if registers else None,
            ),
            "pipeline": ChosenStages(stages=fastest.stages),
            "keeps_turn": roles.keeps_turn,
            "entries": roles.entries,
        }
    )
    return MeasuredRow(TABLES[form.schedule], row, candidate.row)
