"""The Hopper forward of head dims beyond 256, up to 512.

O of 64 rows takes two warpgroups, a half of its columns each. A third one computes S and P, with some of Q in
registers, where shared memory has no room for it. Blocks share the keys of sequences, as in ``hopper_mla``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from attngen.arch import Arch
from attngen.dtypes import HEAD_DIM_STEP, HEAD_DIMS, KEY_VALUE_DTYPES, WIDE_HEAD_DIMS
from attngen.errors import PlanError
from attngen.families.latent.schedule import HopperMla, arguments_of_maps, plan_latent
from attngen.families.wide.pipes import BOX_COLUMNS, wide_pipes
from attngen.parts.fields import DESCRIPTORS, LAZY, SHARED_KEYS
from attngen.parts.probabilities import PROBABILITIES
from attngen.parts.promises import keep_promises
from attngen.plan.allowances import WIDE_SPILLS
from attngen.plan.choices import is_beyond_256, reads_wide_cache, refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.operands import operands_of
from attngen.plan.pipes import Pipes
from attngen.plan.schedule import Schedule
from attngen.plan.served import only
from attngen.schema.kernel_spec import KernelSpec

#: Registers of a thread of the consumers, of the scorer, and of the loaders (docs/notebook/hopper_wide.md, "What the
#: scorer waits for").
_REGISTERS = 160, 144, 48
#: Boxes of columns of Q that registers hold at most; one at least is in shared memory. With more of them the scorer has
#: spills in its loop, which cost a fifth of the speed (docs/notebook/hopper_wide.md, "What the scorer waits for").
_REGISTER_BOXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperWide(HopperMla):
    """Roles and memory of a kernel of head dims beyond 256."""

    register_boxes: int  # boxes of columns of Q that are in registers


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    return plan_latent(
        spec,
        _pipes(spec.head_dim_qk, operands_of(spec).k.bytes),
        schedule="hopper_wide",
        label="wide",
        loads="descriptor",
        softmax="lazy",
        raise_above=PROBABILITIES[spec.dtype].raise_above,
        arguments_of=partial(arguments_of_maps, mapped="kv"),
        products=(1, 2),
        widths=(_width_qk(spec.head_dim_qk), WIDE_HEAD_DIMS[-1]),
        structure_of=partial(HopperWide, register_boxes=_register_boxes(spec.head_dim_qk)),
        spills=WIDE_SPILLS,
    )


def _width_qk(head_dim: int) -> int:
    """Columns of q and k with padding: whole pairs of boxes, since a loader copies two of a tile."""
    return -(-head_dim // (2 * BOX_COLUMNS)) * 2 * BOX_COLUMNS


def _register_boxes(head_dim_qk: int) -> int:
    return min(_REGISTER_BOXES, _width_qk(head_dim_qk) // BOX_COLUMNS - 1)


def _pipes(head_dim_qk: int, element_bytes: int) -> Pipes:
    return wide_pipes(
        width_qk=_width_qk(head_dim_qk),
        element=element_bytes,
        register_boxes=_register_boxes(head_dim_qk),
        registers=_REGISTERS,
    )


def wide_pipes_of(plan: Plan) -> Pipes:
    """Pipes of a planned kernel."""
    return _pipes(plan.head_dim_qk, plan.operands.k.bytes)


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    widest = WIDE_HEAD_DIMS[-1]
    for head_dim in (spec.head_dim_qk, spec.head_dim_v):
        if head_dim % HEAD_DIM_STEP or head_dim > widest:
            nearest = min(max(round(head_dim / HEAD_DIM_STEP), 1) * HEAD_DIM_STEP, widest)
            return refuse(
                spec,
                "head_dim",
                f"head_dim {head_dim} is not a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {widest}; "
                f"nearest: {nearest}",
            )
    return None


SCHEDULE = Schedule(
    name="hopper_wide",
    backend="cuda",
    direction="forward",
    template="cuda/wide/kernel.cu.j2",
    view="attngen.families.wide.view:wide_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: is_beyond_256(spec) and not reads_wide_cache(spec),
    plan=_plan,
    keep_promises=keep_promises,
    pipes=wide_pipes_of,
    layouts=tuple(LAYOUTS),
    split_kv=True,
    serves=SHARED_KEYS | LAZY | DESCRIPTORS | {
        "kv_dtype": only(None, why=f"beyond head dim {HEAD_DIMS[-1]} the only cache in fewer bits than q is in e4m3"),
        "dtype": only(
            *KEY_VALUE_DTYPES,
            why=f"with head dims beyond {HEAD_DIMS[-1]} kernels take {' and '.join(KEY_VALUE_DTYPES)}",
        ),
    },
    explanation="attngen.parts.explained.ranges:RangesExplanation",
)  # fmt: skip
