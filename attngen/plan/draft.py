"""What plans of all schedules have in common: everything that a spec says and no schedule decides."""

from __future__ import annotations

from typing import Any

from attngen.plan import naming
from attngen.plan.choices import map_axes
from attngen.plan.model import Argument, Classifier, Plan
from attngen.schema.expand import KernelSpec


def drafted(
    spec: KernelSpec, *, label: str, width: str, tile_map: bool, alignment: int, choices: tuple[str, ...] = (),
    **decided: Any,
) -> Plan:  # fmt: skip
    """Return the plan of a kernel before its launches are known: what the spec says, and what a schedule ``decided``.

    ``label``, ``width`` and ``choices`` go into its name (``naming.kernel_name``).
    """
    name = naming.kernel_name(
        direction=spec.direction,
        arch=spec.arch,
        schedule=label,
        dtype=spec.dtype,
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
    return Plan(
        name=name,
        package=spec.package,
        spec_file=spec.spec_file,
        variant=spec.variant,
        arch_name=spec.arch,
        dtype_name=spec.dtype,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        layout=spec.layout,
        direction=spec.direction,
        alignment=alignment,
        fast_math=spec.fast_math,
        allow=decided.pop("allow", spec.allow),
        **decided,
    )


def classifier_of(planned: Plan, own: tuple[Argument, ...]) -> Classifier:
    """Return the plan of the kernel that computes the tile map."""
    batch, heads = map_axes(planned.variant, varlen=planned.varlen)
    return Classifier(name=naming.classifier_name(planned.name), arguments=own, batch=batch, heads=heads, num_warps=4)
