"""The Hopper forward in CUDA with warp roles, and the common plan of all Hopper forward kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from attngen.arch import Arch
from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import PlanError
from attngen.families.hopper_forward.alternatives import alternatives, tunable
from attngen.families.hopper_forward.candidates import ROWS, Form
from attngen.families.hopper_forward.kinds import SOFTMAXES, WEIGHTS, SoftmaxKind, kind_of_structure
from attngen.families.hopper_forward.measured import measured_row
from attngen.families.hopper_forward.pipes import forward_pipes_of
from attngen.families.hopper_forward.structure import HopperForward
from attngen.families.hopper_forward.tiles import hopper_tile
from attngen.lang.biases import biases
from attngen.lang.ir import names
from attngen.manifest import SHARES
from attngen.parts.boxes import operand_widths, widest_box
from attngen.parts.fields import ATTENTION, DESCRIPTORS
from attngen.parts.probabilities import PROBABILITIES, Probabilities
from attngen.parts.promises import keep_promises
from attngen.plan import arguments
from attngen.plan.allowances import SPILLS
from attngen.plan.choices import L2_BYTES, ONE_HEAD, check_head_dims, iteration_of, refuse
from attngen.plan.draft import drafted, forward_launches
from attngen.plan.model import Argument, Plan, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.pipes import ROW_PADDING
from attngen.plan.schedule import Schedule, plans_of
from attngen.plan.served import ANY, ServedValues, only
from attngen.plan.times import times_of, visible_keys
from attngen.schema.kernel_spec import KernelSpec

#: Columns up to which one head after the other is faster where no mask makes work tiles differ; slower for long
#: sequences at head dim 256 (docs/notebook/hopper_forward.md, "One head after the other").
_ONE_HEAD_COLUMNS = 192


def plan_forward(spec: KernelSpec, arch: Arch, form: Form) -> Plan:
    """Return the plan of a Hopper forward of that form."""
    if not spec.variant.has_lse and (refused := _without_lse(spec)):
        raise refused
    check_head_dims(spec)
    iteration = iteration_of(spec, by_bits=True)
    pack_gqa = spec.pack_gqa is True
    if pack_gqa and iteration == "tile_map":
        raise refuse(
            spec,
            "pack_gqa",
            "a tile map lists the tiles of single heads; allowed: false, or true with tile_map: never",
        )
    if pack_gqa and spec.variant.dropout:
        raise refuse(
            spec,
            "pack_gqa",
            "dropout shares random numbers among rows of one head, and packed rows belong to several; allowed: false",
        )
    operands = operands_of(spec)
    tile, columns = hopper_tile(spec, arch, iteration, form), operand_widths(spec, operands)
    roles = tile.roles
    warpgroups = roles.consumers + 1
    kind = kind_of_structure(roles, operands.p.name, max_logits=spec.variant.max_logits)
    usual = roles.schedule == ("pingpong" if roles.consumers > 1 else "cooperative")
    planned = drafted(
        spec,
        label=form.label,
        width=f"c{roles.consumers}",
        tile_map=iteration == "tile_map",
        alignment=16,
        choices=(
            *([] if usual else [roles.schedule]),
            *([] if roles.overlap else ["nooverlap"]),
            *([kind.label] if kind.label else []),
            *(["shared"] if roles.shares else []),
            *([f"entries{roles.entries}"] if roles.entries > 1 else []),
            *([] if roles.persistent or roles.shares else ["single"]),
            *([] if roles.longest_first else ["natural"]),
            *([] if roles.staged or roles.shares else ["direct"]),
            *(["pack"] if pack_gqa else []),
            *(["groupedv" if spec.grouped_v else "transposedv"] if spec.transposed_v else []),
            *([_scale_label(spec.scale_block)] if spec.scale_block else []),
        ),
        columns_qk=columns[:1],
        columns_v=columns[1:],
        backend="cuda",
        schedule=form.schedule,
        loads="descriptor",
        q_operand="shared",
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        stages=tile.stages,
        num_warps=4 * warpgroups,
        max_registers=None,
        iteration=iteration,
        mask_code="branch",
        softmax=roles.softmax,
        l2_bytes=_l2_bytes(spec, max(each.width for each in columns), roles),
        structure=roles,
        times=times_of(
            roles.consumers,
            tile.tile_n,
            max(each.width for each in columns),
            operands.q.bytes,
            shared=roles.shares,
        ),
        visible=visible_keys(spec),
        pack_gqa=pack_gqa,
        tile_reason=tile.reason,
    )
    return forward_launches(
        planned,
        _arguments(planned, roles, kind),
        lambda: arguments.classifier_signature(planned, "q_tiles", max_seqlen_k=True),
        grid=SHARES if roles.shares else "queries",
        cluster=roles.sharing,
        persistent=roles.persistent,
        pdl=True,
        shared_bytes=roles.shared_bytes,
        max_spills=SPILLS.bytes,
        products=_products(planned, roles),
        workspaces=_workspaces(planned) if roles.cuts else (),
    )


def _workspaces(plan: Plan) -> tuple[Workspace, ...]:
    """Return the memory of partial results: O, and row max and row sum for each of the four lanes of a row."""
    return (Workspace("partials", "fp32", ((plan.tile_m, plan.columns_v[0].width + ROW_PADDING, "cut_parts"),)),)


def _l2_bytes(spec: KernelSpec, width: int, roles: HopperForward) -> int:
    """Bytes of K and V of the heads that run side by side; measured for unmasked attention. Heads that share a bias run
    side by side, so that they read its tiles at a time."""
    read = biases(spec.variant, roles.bias_bytes) if roles.biases else ()
    if any(not names(load) & {"h", "hk"} for load in read):
        return L2_BYTES
    if spec.variant.masked or spec.layout != "dense" or spec.dtype in QUANTIZED_DTYPES or width > _ONE_HEAD_COLUMNS:
        return L2_BYTES
    return ONE_HEAD


def _scale_label(block: int) -> str:
    """Label in kernel names of the tokens that share a scale."""
    return "tokenscales" if block == 1 else f"scale{block}"


def _arguments(plan: Plan, roles: HopperForward, kind: SoftmaxKind) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    boxes = partial(arguments.tensor_map, plan, box_bytes=roles.box_bytes)
    staged = [boxes("out", ROWS, packed=plan.pack_gqa)] if roles.boxes_out else []
    keys = roles.block_keys or plan.tile_n
    v_map = boxes("v", keys, window=keys)
    if plan.grouped_v:
        v_map = arguments.grouped_map(plan, plan.tile_n)
    elif plan.transposed_v:
        box_bytes = widest_box(plan.tile_n * plan.operands.v.bytes)
        v_map = arguments.tensor_map(plan, "v", plan.columns_v[0].width, box_bytes=box_bytes)
    read = {load.tensor for load in biases(plan.variant, roles.bias_bytes)} if roles.biases else frozenset()
    of_biases = [
        arguments.bias_map(tensor, plan.tile_m, plan.tile_n)
        for tensor in plan.variant.tensors if tensor.name in read
    ]  # fmt: skip
    operands = (
        boxes("q", plan.tile_m, packed=plan.pack_gqa), boxes("k", keys), v_map, *staged, *of_biases,
        arguments.pointer(plan, "out"),
        *arguments.results_of_rows(plan), *arguments.descales(plan),
        *(arguments.partial_pointers() if roles.cuts else ()),
    )  # fmt: skip
    more_sizes = (
        *(("long_tiles", "short_tiles") if roles.short_early else ()),
        *(("cut_rows", "parts") if roles.cuts else ()),
        *(("least_queries", "beside") if plan.lists_sequences else ()),
    )
    return arguments.signature(
        plan, operands, tiles="q_tiles", strided=("out",), promised=False, counted=roles.persistent,
        max_seqlen_k=True, more_sizes=more_sizes,
        present=("lse", "seqused_k") if kind.has_lse else ("seqused_k",),
    )  # fmt: skip


def _products(planned: Plan, roles: HopperForward) -> int:
    """Number of wgmma instructions: Q K^T for the first tile of a block, for that of a work tile, and in
    the loop; P V in the loop and after it. Where consumers skip tiles, a work tile may begin in two ways, one of
    which needs a Q K^T of its own. Where blocks share keys, there is one work tile: Q K^T for its first step and in
    the loop. Where consumers have steps of their own, work tiles begin alike, and O += P V stands in a
    step and behind it."""
    qk, pv = planned.columns_qk[0].width // planned.operands.q.mma_k, planned.tile_n // planned.operands.p.mma_k
    qk, pv = roles.entries * qk, roles.entries * pv
    if roles.shares or roles.map_rows:
        return 2 * qk + 2 * pv
    return 4 * qk + 3 * pv if roles.skips else 3 * qk + 2 * pv


def serves(numbers: Mapping[str, Probabilities]) -> dict[str, ServedValues]:
    """Declaration of a Hopper forward with these rules for P."""
    return {
        "dtype": only(*numbers, why=f"cuda kernels take {' and '.join(numbers)}"),
        **ATTENTION, **DESCRIPTORS,
        "num_warps": only(None, why="cuda kernels have roles: give producer, consumer and schedule, not a count"),
        "softmax": only(None, *SOFTMAXES, why="these kernels have no other row max"),
        **dict.fromkeys(
            (
                "tile_m", "tile_n", "stages", "roles", "tile_map", "persistent", "order", "epilogue", "pack_gqa",
                "dropout",
            ),
            ANY,
        ),
    }  # fmt: skip


def _without_lse(spec: KernelSpec) -> PlanError | None:
    """Reason why no kernel of weights that are no softmax can serve a spec, or None."""
    weights = f"'weights: {spec.variant.weights}'"
    if spec.softmax is not None:
        return refuse(spec, "softmax", f"{weights} keeps no row max; leave it out")
    if spec.split_tiles:
        return refuse(spec, "split_kv", f"{weights} has no log-sum-exp by which blocks merge results; allowed: false")
    return None


FORM = Form(
    schedule="hopper_forward",
    label="wgmma",
    check=lambda spec, roles, iteration: None,
    numbers=PROBABILITIES,
    capped_columns=64,  # docs/notebook/softmax_and_masks.md, "Soft-capping by a polynomial where arguments are small"
)


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    return plan_forward(spec, arch, FORM)


SCHEDULE = Schedule(
    name="hopper_forward",
    backend="cuda",
    direction="forward",
    template="cuda/hopper_forward/kernel.cu.j2",
    view="attngen.families.hopper_forward.view:cuda_view",
    supports=lambda arch: arch.wgmma,
    suits=lambda spec: spec.dtype not in QUANTIZED_DTYPES,
    split_tiles=True,
    plan=_plan,
    alternatives=plans_of(alternatives, _plan),
    tunable=tunable,
    measured_row=partial(measured_row, form=FORM),
    keep_promises=keep_promises,
    pipes=forward_pipes_of,
    explanation="attngen.families.hopper_forward.explain:explain",
    layouts=("dense", "varlen", "paged"),
    serves=serves(PROBABILITIES)
    | {"weights": only(*WEIGHTS, why="these kernels have no other weights"), "max_logits": ANY},
)
