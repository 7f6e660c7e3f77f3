"""A schedule of its own, in three files beside this one's folder: keys in splits, then a launch that merges these.

It is as plain as a forward can be: a warp has a query row and a split of the keys. Nothing of attngen knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attngen.arch import Arch
from attngen.lang.simplify import TRUE
from attngen.plan import Plan, arguments, naming
from attngen.plan.choices import refuse
from attngen.plan.draft import drafted
from attngen.plan.model import Argument, Columns, Launch, Structure, Workspace
from attngen.plan.schedule import Schedule
from attngen.render.header import command, summary
from attngen.render.views.hopper_forward import argument_lines
from attngen.schema.kernel_spec import KernelSpec

_WARPS = 4
_SPLIT_SIZE = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKeys(Structure):
    """Choices that only this schedule makes."""

    values: int  # columns of V of a lane


@dataclass(frozen=True, slots=True)
class SplitView:
    """Names of the template that the plan does not have."""

    template: str
    command: str
    summary: str
    partial_lines: tuple[str, ...]
    combine_lines: tuple[str, ...]


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if spec.variant.mask != TRUE or spec.variant.score is not None or spec.layout != "dense":
        raise refuse(spec, "variant", "this schedule has no mask, no score, and dense sequences alone")
    planned = drafted(
        spec,
        label="splitkeys",
        width=f"w{_WARPS}",
        tile_map=False,
        alignment=16,
        columns_qk=(Columns(0, spec.head_dim_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, spec.head_dim_v, spec.head_dim_v),),
        backend="cuda",
        schedule="split_keys",
        loads="pointer",
        q_operand="registers",
        tile_m=_WARPS,
        tile_n=_SPLIT_SIZE,
        stages=1,
        num_warps=_WARPS,
        max_registers=None,
        iteration="ranges",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=2**20,
        split_size=_SPLIT_SIZE,
        structure=SplitKeys(values=-(-spec.head_dim_v // 32)),
    )
    partial, combine = (naming.launch_name(planned.name, name) for name in ("partial", "combine"))
    rows = {"tile_m": _WARPS, "tile_n": _SPLIT_SIZE, "stages": 1, "num_warps": _WARPS}
    return planned.with_launches(
        Launch("forward", partial, "rows", split=True, arguments=_partial(planned), **rows),
        Launch("combine", combine, "rows", arguments=_combine(planned), **rows),
        workspaces=(
            Workspace("out_partial", "fp32", (("num_splits", "lse_rows", "head_dim_v"),)),
            Workspace("lse_partial", "fp32", (("num_splits", "lse_rows"),)),
        ),
    )


def _workspaces() -> Iterator[Argument]:
    for name in ("out_partial", "lse_partial"):
        yield arguments.row_pointer(name)


def _partial(plan: Plan) -> tuple[Argument, ...]:
    names = ("q", "k", "v")
    return (
        *(arguments.pointer(plan, name) for name in names),
        *_workspaces(),
        *arguments.lengths(plan),
        *arguments.strides_of(plan, names),
        *map(arguments.size, ("batch", "heads", "group", "rows", "row_tiles", "seqlen_k", "num_splits")),
        arguments.scale(),
        Argument("has_seqused_k", "present", "i32", of="seqused_k"),
    )


def _combine(plan: Plan) -> tuple[Argument, ...]:
    return (
        arguments.pointer(plan, "out"),
        arguments.row_pointer("lse"),
        *_workspaces(),
        *arguments.strides_of(plan, ("out",)),
        *map(arguments.size, ("batch", "heads", "rows", "row_tiles", "num_splits")),
        Argument("write_lse", "present", "i32", of="lse"),
    )


def view(plan: Plan, template: str) -> SplitView:
    """Values that the template is filled with."""
    written = frozenset({"out", "lse", "out_partial", "lse_partial"})
    partial, combine = (argument_lines(plan, launch.arguments, written=written) for launch in plan.launches)
    return SplitView(template, command(plan), summary(plan), partial, combine)


SCHEDULE = Schedule(
    name="split_keys",
    backend="cuda",
    direction="forward",
    template="split_keys.cu.j2",
    view=f"{__name__}:view",
    supports=lambda arch: True,
    plan=_plan,
    templates=Path(__file__).with_name("templates"),
)
