"""Spec → Plan: the schedules are asked in order, and the first that can do all that the spec asks for plans it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.dtypes import HEAD_DIMS, QUANTIZED_DTYPES
from attngen.errors import PlanError
from attngen.lang.constant_conditions import fold_conditions
from attngen.operations import HELPERS
from attngen.plan.catalogue import backends, candidates, schedules
from attngen.plan.choices import is_beyond_256, refuse
from attngen.plan.layouts import LAYOUTS
from attngen.plan.model import Plan
from attngen.plan.schedule import Schedule
from attngen.plan.served import check_together, unserved
from attngen.schema.kernel_spec import KernelSpec


def plan(spec: KernelSpec) -> Plan:
    """Return the plan of one kernel; PlanError names the field, the arithmetic, the nearest legal choice, and other
    arches that have such a kernel."""
    arch = ARCHES[spec.arch]
    spec = replace(spec, variant=fold_conditions(spec.variant))
    check_together(spec)
    try:
        if spec.backend is None:
            return _fastest(spec, arch)
        return replace(_of_backend(spec, arch), backend_reason="the spec names it")
    except PlanError as error:
        raise _beside_arches(error, spec) from None


def _fastest(spec: KernelSpec, arch: Arch) -> Plan:
    """Return the plan of the fastest backend that can do all that a spec asks for, and why it is that one."""
    offered = backends(arch, spec.direction) or backends(None, spec.direction)
    refusals: list[PlanError] = []
    for backend in offered:
        try:
            planned = _of_backend(replace(spec, backend=backend), arch, named=False)
        except PlanError as error:
            refusals.append(error)
            continue
        others = [f"not {other}: {error.message}" for other, error in zip(offered, refusals, strict=False)]
        return replace(planned, backend_reason="; ".join(others) or f"the fastest on {arch.name}")
    raise _together(refusals, offered)


def _of_backend(spec: KernelSpec, arch: Arch, *, named: bool = True) -> Plan:
    """Return the plan of the first schedule of a spec's backend that takes it. ``named``: the spec names the backend,
    which accepts what another one would do more exactly."""
    refusals: list[PlanError] = []
    schedules = candidates(spec, spec.backend or "")
    if not schedules:
        raise _without_schedule(spec, arch)
    for schedule in schedules:
        try:
            _check(spec, schedule)
            if not named:
                schedule.keep_promises(spec)
            return schedule.plan(spec, arch)
        except PlanError as error:
            if error.message not in {refusal.message for refusal in refusals}:
                refusals.append(error)
    raise _together(refusals)


def _without_schedule(spec: KernelSpec, arch: Arch) -> PlanError:
    """The error for a kernel that no schedule of a spec's backend has on an arch: it names the condition that all of
    them fail, and what the backend, or another one, takes there."""
    backend = str(spec.backend)
    asked = _forms(spec) if schedules(spec.direction, arch, backend) else []
    failed = [each for each in asked if candidates(each.without, backend)] or asked
    elsewhere = any(candidates(replace(spec, arch=name), backend) for name in ARCHES)
    instead = (each.instead for each in failed if each.instead and _takes(each.without, backend, arch))
    others = (f"backend: {other}" for other in backends(arch, spec.direction) if _takes(spec, other, arch))
    allowed = ", ".join((*instead, *others))
    form = "".join(each.words for each in failed).replace("' with '", "' and '")
    kind = f"{spec.direction} kernel" if spec.direction in HELPERS else spec.direction
    field = failed[-1].field if failed else "backward" if spec.direction == "backward" else "backend"
    return refuse(
        spec, field, f"{backend} has no {kind}{form}"
        f"{f' for {arch.name}' if elsewhere else ''}{'; allowed: ' if allowed else ''}{allowed}"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Form:
    """A condition by which schedules are chosen: its field, in words, the spec without it, and what then to write."""

    field: str
    words: str
    without: KernelSpec
    instead: str = ""


def _forms(spec: KernelSpec) -> list[_Form]:
    """The conditions of a spec by which schedules are chosen."""
    narrow = {name: min(getattr(spec, name), HEAD_DIMS[-1]) for name in ("head_dim_qk", "head_dim_v")}

    def without(**changed: Any) -> KernelSpec:
        bare = replace(spec, **changed)
        shares = bare.v_of_key or bare.variant.keys is not None or is_beyond_256(bare)
        return replace(bare, split_kv=bare.direction == "forward" and shares)

    forms = []
    if spec.variant.keys is not None:
        unlisted = without(variant=replace(spec.variant, keys=None))
        forms.append(_Form("variant", f" with 'keys: {spec.variant.keys}'", unlisted))
    if spec.v_of_key:
        forms.append(_Form("v", " with 'v: key'", without(v_of_key=False, **narrow)))
    elif is_beyond_256(spec):
        forms.append(
            _Form("head_dim", f" of head dims beyond {HEAD_DIMS[-1]}", without(**narrow), f"head_dim {HEAD_DIMS[-1]}")
        )
    elif spec.split_kv and spec.variant.keys is None:
        forms.append(_Form("split_kv", " whose blocks share the keys of a sequence", without(), "split_kv: false"))
    if spec.split_tiles:
        if spec.dtype in QUANTIZED_DTYPES:
            usual = QUANTIZED_DTYPES[spec.dtype]
            forms.append(_Form("dtype", f" in {spec.dtype}", without(dtype=usual, kv_dtype=None), f"dtype: {usual}"))
        words = " whose blocks share the keys of a tile of queries"
        forms.append(_Form("split_kv", words, without(split_tiles=False), "split_kv: false"))
    return forms


def _takes(spec: KernelSpec, backend: str, arch: Arch) -> bool:
    """Whether a backend has a kernel of a spec for an arch."""
    moved = replace(spec, arch=arch.name, backend=backend)
    for schedule in candidates(moved, backend):
        try:
            _check(moved, schedule)
            schedule.plan(moved, arch)
        except PlanError:
            continue
        return True
    return False


def _beside_arches(error: PlanError, spec: KernelSpec) -> PlanError:
    """The refusal of a spec, with the arches for which the same kernel can be planned."""
    named = (spec.backend,) if spec.backend else backends(None, spec.direction)
    arches = [name for name, arch in ARCHES.items() if any(_takes(spec, backend, arch) for backend in named)]
    if not arches or spec.arch in arches:
        return error
    listed = f"{', '.join(arches)} {'takes' if len(arches) == 1 else 'take'} it"
    return PlanError(f"{error.message}; arch {listed}", location=error.location, field=error.field)


def _check(spec: KernelSpec, schedule: Schedule) -> None:
    """Raise PlanError for what a schedule does not serve: a layout, or one in which a variant has no meaning, and any
    field of the spec or of its variant."""
    if LAYOUTS[spec.layout].key_access == "paged" and (used := spec.variant.packed_keys()):
        raise refuse(
            spec,
            "layout",
            f"variant '{spec.variant.name}' reads '{used}', the place of keys in a packed tensor, which keys in pages "
            "do not have; allowed: dense, varlen",
        )
    if spec.layout not in schedule.layouts:
        form = f"{schedule.backend} {'split-KV ' * spec.split_kv}{spec.direction} kernels"
        raise refuse(spec, "layout", f"{form} do not take '{spec.layout}'; allowed: {', '.join(schedule.layouts)}")
    if refused := unserved(spec, schedule.serves, schedule.name):
        raise refused


def _together(refusals: Sequence[PlanError], names: Sequence[str] = ()) -> PlanError:
    """One error for several refusals; each begins with its name, if there are names."""
    first = refusals[0]
    if len({error.message for error in refusals}) == 1:
        return first
    lines = [error.message for error in refusals]
    if names:
        named = zip(names, lines, strict=True)
        lines = [line if line.startswith(f"{name} has no") else f"{name}: {line}" for name, line in named]
    return PlanError("; ".join(lines), location=first.location, field=first.field)
