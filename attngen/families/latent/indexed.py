"""The Hopper forward of latent attention in which a call lists the keys of each query by index.

A work item is one query with up to 128 of its heads. A tile of keys is 64 entries of the query's list, whose rows the
producer's warps gather. Consumers, work distribution and merging are those of ``hopper_mla``.
"""

from __future__ import annotations

from functools import partial

from attngen.arch import Arch
from attngen.dtypes import CACHE_DTYPES, LatentRow, row_of_keys
from attngen.errors import PlanError
from attngen.families.latent import schedule as hopper_mla
from attngen.families.latent.indexed_pipes import indexed_pipes
from attngen.lang.listed import LISTS
from attngen.lang.variant import Variant
from attngen.manifest import Argument
from attngen.parts.fields import LISTED
from attngen.parts.probabilities import PROBABILITIES
from attngen.parts.promises import keep_promises
from attngen.plan.choices import refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.operands import Operands, operands_of
from attngen.plan.pipes import Pipes
from attngen.plan.schedule import Schedule
from attngen.plan.served import ANY
from attngen.schema.kernel_spec import KernelSpec

#: Registers of a thread of the loaders, and of a consumer. Not measured one against the other.
_REGISTERS = 56, 224
#: The same where loaders convert rows of two caches, for which the follower packs partial results of the launch that
#: merges: of loaders, of the scorer, of the follower. With 160 for the follower it is 1 to 3 % slower
#: (docs/notebook/hopper_indexed.md, "A second cache").
_PACKING_REGISTERS = 136, 200, 168
#: The same where loaders convert rows from 8 bits, and hold half of a tile meanwhile (docs/notebook/hopper_indexed.md,
#: "Rows of 656 bytes").
_WIDENING_REGISTERS = 88, 208

#: Heads of a work item up to which products are transposed: with 64 rows, more than half of them would be zeros
#: (docs/notebook/hopper_indexed.md, "Few heads").
_FEW_HEADS = 16, 32


def _plan(spec: KernelSpec, arch: Arch) -> Plan:
    if refused := _refusal(spec):
        raise refused
    row = row_of_keys(spec.kv_dtype or spec.dtype, spec.head_dim_qk)
    alike, either = _alike(spec, row), row is not None and _has_extra(spec.variant)
    few = _FEW_HEADS if row is None and not spec.variant.masked and spec.variant.score is None else ()
    return hopper_mla.plan_latent(
        spec,
        _pipes(spec.head_dim_qk, spec.head_dim_v, operands_of(spec), spec.variant, alike),
        schedule="hopper_indexed",
        label="indexed",
        loads="pointer",
        softmax="lazy",
        raise_above=PROBABILITIES[spec.dtype].raise_above,
        arguments_of=_arguments,
        products=(3 + 2 * len(few), 6 + 16 * len(few)) if alike else (1, 2),
        structure_of=partial(hopper_mla.HopperMla, few_heads=few, alike=alike, merges=row is not None, either=either),
        cluster=1 if row is not None else 2,
        least_tiles=1 if _has_extra(spec.variant) and row is not None and row.scales_after_rows else 2,
    )


def _arguments(plan: Plan) -> tuple[Argument, ...]:
    """Arguments of the kernel: those of ``hopper_mla``, but with the address of k, and with ``query_rows``."""
    more = ("extra_page_size",) if _has_extra(plan.variant) else ()
    return hopper_mla.arguments_of_maps(plan, "", addressed=True, rows="query_rows", more_reciprocals=more)


def _alike(spec: KernelSpec, row: LatentRow | None) -> bool:
    """Whether each consumer computes S of every other tile: loaders then have registers for half of a tile alone, and
    no time to look up pages."""
    return row is None or (row.scales_in_row and spec.layout != "paged" and not _has_extra(spec.variant))


def _has_extra(variant: Variant) -> bool:
    """Whether calls have a second cache beside the first."""
    return variant.keys is not None and LISTS[variant.keys].extra


def _pipes(head_dim_qk: int, head_dim_v: int, operands: Operands, variant: Variant, alike: bool) -> Pipes:
    row = row_of_keys(operands.k.name, head_dim_qk)
    registers: tuple[int, ...] = _REGISTERS
    if row is not None:
        of_roles = _PACKING_REGISTERS if _has_extra(variant) else hopper_mla.WIDENING_REGISTERS
        registers = _WIDENING_REGISTERS if alike else of_roles
    return indexed_pipes(
        qk=head_dim_qk, v=head_dim_v, element=operands.q.bytes, latent_row=row, alike=alike,
        merges=row is not None,
        registers=registers,
    )  # fmt: skip


def indexed_pipes_of(plan: Plan) -> Pipes:
    """Return the pipes of a planned kernel."""
    assert isinstance(plan.structure, hopper_mla.HopperMla)
    return _pipes(plan.head_dim_qk, plan.head_dim_v, plan.operands, plan.variant, plan.structure.alike)


def _refusal(spec: KernelSpec) -> PlanError | None:
    """Reason why the schedule cannot serve a spec, or None."""
    if _has_extra(spec.variant) and spec.kv_dtype in CACHE_DTYPES:
        return refuse(spec, "kv_dtype", f"no kernel reads two caches of {spec.kv_dtype}, whose scales lie beside them")
    return hopper_mla.refusal(spec)


SCHEDULE = Schedule(
    name="hopper_indexed",
    backend="cuda",
    direction="forward",
    template="cuda/latent/kernel.cu.j2",
    view="attngen.families.latent.indexed_view:indexed_view",
    supports=lambda arch: arch.wgmma,
    plan=_plan,
    keep_promises=keep_promises,
    pipes=indexed_pipes_of,
    layouts=tuple(LAYOUTS),
    v_of_key=True,
    listed_keys=True,
    split_kv=True,
    serves=hopper_mla.LATENT | LISTED | {"keys": ANY},
)
