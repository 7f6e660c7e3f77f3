"""The common part of all plans: everything that the spec decides and no schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attngen.plan import naming
from attngen.plan.choices import map_axes
from attngen.plan.model import Argument, Launch, Plan, TileMapAxes, Workspace
from attngen.plan.operands import operands_of
from attngen.plan.traits import mask_block
from attngen.schema.kernel_spec import KernelSpec

#: Warps of a classifier block, which makes one word (32 tiles) of a tile map: as many as a tile of 128 x 128 has cells,
#: so that they keep a multiprocessor busy even if the map has few words (docs/notebook/softmax_and_masks.md, "How long
#: a map takes").
CLASSIFIER_WARPS = 16

#: The same where a mask is constant on blocks, which decide nearly all tiles: many blocks find room. Not measured
#: against other numbers.
_FEW_CLASSIFIER_WARPS = 4


def classifier_warps(planned: Plan) -> int:
    """Warps of a classifier block of a CUDA kernel."""
    blocks = mask_block(planned.variant, (planned.tile_m, planned.tile_n))
    return _FEW_CLASSIFIER_WARPS if planned.structure.map_rows or blocks else CLASSIFIER_WARPS


def drafted(
    spec: KernelSpec, *, label: str, width: str, tile_map: bool, alignment: int, choices: tuple[str, ...] = (),
    **decided: Any,
) -> Plan:  # fmt: skip
    """Plan of a kernel without its launches: the choices of the spec, and those that a schedule ``decided``.

    ``label``, ``width`` and ``choices`` go into its name (``naming.kernel_name``).
    """
    name = naming.kernel_name(
        direction=spec.direction,
        arch=spec.arch,
        schedule=label,
        dtype=naming.dtype_label(spec.dtype, spec.kv_dtype, spec.out_dtype),
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        variant=spec.variant.name,
        layout=spec.layout,
        tile_m=decided["tile_m"],
        tile_n=decided["tile_n"],
        stages=decided["stages"],
        width=width,
        fast_math=spec.fast_math,
        aligned=alignment == 16,
        tile_map=tile_map,
        choices=choices,
    )
    return named(spec, name, alignment=alignment, **decided)


def named(spec: KernelSpec, name: str, *, alignment: int, **decided: Any) -> Plan:
    """Plan of a kernel of that name: the choices of the spec, and those that a schedule ``decided``."""
    return Plan(
        name=name,
        package=spec.package,
        spec_file=spec.spec_file,
        variant=spec.variant,
        arch_name=spec.arch,
        dtype_name=spec.dtype,
        operands=operands_of(spec),
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        layout=spec.layout,
        split_kv=spec.split_kv,
        v_of_key=spec.v_of_key,
        scale_block=spec.scale_block,
        transposed_v=spec.transposed_v,
        grouped_v=spec.grouped_v,
        direction=spec.direction,
        alignment=alignment,
        fast_math=spec.fast_math,
        allow=decided.pop("allow", spec.allow),
        **decided,
    )


def row_workspaces() -> Iterator[Workspace]:
    """Yield the row statistics that a backward computes first: the log-sum-exp in units of log2, and D."""
    for name in ("lse_log2", "delta"):
        yield Workspace(name, "fp32", (("lse_rows",),))


def axes_of(planned: Plan, owner: str) -> TileMapAxes:
    """Return the tile map that the launch ``owner`` reads."""
    batch, heads = map_axes(planned.variant, ragged=planned.ragged_queries)
    rows, columns = planned.structure.map_rows, planned.structure.block_keys
    slots = planned.backend == "cuda" and not rows
    return TileMapAxes(owner, batch, heads, slots=slots, bits=planned.map_bits, rows=rows, columns=columns)


def forward_launches(
    planned: Plan, forward: tuple[Argument, ...], classify: Callable[[], tuple[Argument, ...]], *,
    workspaces: tuple[Workspace, ...] = (), **decided: Any,
) -> Plan:  # fmt: skip
    """Return the plan of a forward of one launch, after the one that computes its tile map if it reads one.

    ``forward`` and ``classify`` are the arguments of both; ``decided`` says the rest of the first.
    """
    axes = axes_of(planned, "forward") if planned.iteration == "tile_map" else None
    own = Launch(
        "forward", planned.name, decided.pop("grid", "queries"), planned.tile_m, planned.tile_n, planned.stages,
        planned.num_warps, planned.iteration, forward, tile_map=axes, max_registers=planned.max_registers, **decided,
    )  # fmt: skip
    if axes is None:
        return planned.with_launches(own, workspaces=workspaces)
    grid = "query_map_rows" if axes.rows else "query_words"
    tile = axes.rows or planned.tile_m, axes.columns or planned.tile_n
    classifier = Launch(
        "classify", naming.classifier_name(planned.name), grid, *tile, 1,
        classifier_warps(planned) if planned.backend == "cuda" else 4, "tile_map", classify(), tile_map=axes,
        pdl=own.pdl,
    )  # fmt: skip
    return planned.with_launches(classifier, own, workspaces=workspaces)
