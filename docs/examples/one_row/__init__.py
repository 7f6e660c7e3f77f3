"""A schedule that attngen does not know: a warp computes one row, key by key, for any mask and score.

It is as plain as a forward kernel can be, without tensor cores, and shows what every schedule has: a plan, a view, a
template (``one_row.cu.j2``) and the value ``SCHEDULE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attngen.arch import Arch
from attngen.lang.emit import Binding
from attngen.lang.ir import Type, Var
from attngen.lang.statements import lines
from attngen.plan import Plan, arguments, naming
from attngen.plan.draft import drafted
from attngen.plan.model import Argument, Columns, Launch, Structure
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY, only
from attngen.render.cuda_arguments import argument_lines
from attngen.render.expressions import CUDA, emit_for, scalar_bindings
from attngen.render.header import summary
from attngen.schema.kernel_spec import KernelSpec

WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRow(Structure):
    """Choices that only this schedule makes."""

    values: int  # columns of O of a lane


# --- what it serves: the planner refuses all other values and fields, with the reason

SERVES = {
    **dict.fromkeys(("mask", "score", "fast_math"), ANY),
    "dtype": only("bf16", "fp16", why="one_row reads bf16 and fp16"),
    "softmax": only(None, "exact_max", why="one_row has the row max of each key"),
    "softmax_scale": only(None, why="the scale is an argument of the call"),
    "sink_in_lse": only(True, why="one_row has no sinks"),
    "deterministic": only(False, True, why="the same inputs give the same bits"),
}


# --- the plan: every number, every argument


def plan_one_row(spec: KernelSpec, arch: Arch) -> Plan:
    planned = drafted(
        spec,
        label="onerow",
        width=f"w{WARPS}",
        tile_map=False,
        alignment=16,
        columns_qk=(Columns(0, spec.head_dim_qk, spec.head_dim_qk),),
        columns_v=(Columns(0, spec.head_dim_v, spec.head_dim_v),),
        backend="cuda",
        schedule="one_row",
        loads="pointer",
        q_operand="registers",
        tile_m=WARPS,
        tile_n=1,
        stages=1,
        num_warps=WARPS,
        max_registers=None,
        iteration="ranges",
        mask_code="branch",
        softmax="exact_max",
        l2_bytes=2**20,
        structure=OneRow(values=-(-spec.head_dim_v // 32)),
    )
    return planned.with_launches(
        Launch(
            "forward",
            naming.launch_name(planned.name, "forward"),
            "rows",  # a block for each tile of rows, head and sequence
            arguments=arguments_of(planned),
            tile_m=WARPS,
            tile_n=1,
            stages=1,
            num_warps=WARPS,
        )
    )


def arguments_of(planned: Plan) -> tuple[Argument, ...]:
    tensors = ("q", "k", "v", "out")
    return (
        *(arguments.pointer(planned, name) for name in tensors),
        arguments.row_pointer("lse"),
        *arguments.lengths(planned),
        *arguments.tensor_pointers(planned.variant),
        *arguments.strides_of(planned, tensors),
        *arguments.tensor_shapes(planned.variant),
        *map(arguments.size, ("batch", "heads", "kv_heads", "group", "rows", "row_tiles", "seqlen_k")),
        arguments.scale(),
        *arguments.scalar_arguments(planned),
        Argument("has_seqused_k", "present", "i32", of="seqused_k"),
        Argument("write_lse", "present", "i32", of="lse"),
    )


# --- the view: the lines of the template that depend on the mask and the score


@dataclass(frozen=True, slots=True)
class OneRowView:
    template: str
    summary: str
    argument_lines: tuple[str, ...]
    row_lines: tuple[str, ...]  # before the loop over keys
    pair_lines: tuple[str, ...]  # of each pair
    visible: str
    logit: str


def view(planned: Plan, template: str) -> OneRowView:
    query, key = frozenset({"q"}), frozenset({"kv"})
    names = scalar_bindings(planned, CUDA) | {
        "q": Binding("q_row", query, below=frozenset({"seqlen_q"})),
        "q_pos": Binding("q_pos", query),
        "kv": Binding("kv", key, below=frozenset({"seqlen_k"})),
        "s": Binding("s", query | key),
        "seqlen_k": Binding("seqlen"),  # of this sequence
    }
    score = planned.variant.score or Var("s", Type.FLOAT)
    code = emit_for(planned, CUDA, [planned.variant.mask, score], names)
    visible, logit = code.results
    (launch,) = planned.launches
    parameters = argument_lines(planned, launch.arguments, written={"out", "lse"})
    return OneRowView(
        template, summary(planned), parameters, lines(code.hoisted), lines(code.body), visible.text, logit.text
    )


SCHEDULE = Schedule(
    name="one_row",
    backend="cuda",
    direction="forward",
    template="one_row.cu.j2",
    view=f"{__name__}:view",
    supports=lambda arch: True,
    plan=plan_one_row,
    layouts=("dense",),
    serves=SERVES,
    templates=Path(__file__).parent,
)
