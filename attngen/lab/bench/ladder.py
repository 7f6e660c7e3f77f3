"""The ladder of a Hopper kernel: from FlashAttention-2's form to the kernel's own, one choice of the spec at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attngen.build.pipeline import Prepared
from attngen.errors import PlanError
from attngen.plan import plan as plan_kernel
from attngen.plan.model import Plan
from attngen.schema import KernelSpec
from attngen.schema.kernel_spec import Roles

#: Choices of an entry of ``kernels`` at the start of the ladder.
_START: Mapping[str, Any] = {"softmax": "exact_max", "persistent": False, "order": "natural", "epilogue": "direct"}

#: Additions of each rung to the one before, in the order of the published kernels. FlashAttention-2 copies by pointers
#: and multiplies by mma.sync; FlashAttention-3 has TMA, wgmma and roles of warps, overlaps and adds ping-pong; the lazy
#: maximum is FlashAttention-4's.
_STEPS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mma.sync", {"loads": "pointer"}),
    (
        "wgmma, warp specialization",
        {"loads": "descriptor", "producer": 1, "schedule": "cooperative", "overlap": False},
    ),
    ("overlap", {"overlap": True}),
    ("ping-pong", {"schedule": "pingpong"}),
    ("TMA store", {"epilogue": "staged"}),
    ("lazy rescale", {"softmax": "lazy"}),
    ("first max", {"softmax": "first_max"}),
    ("persistent, longest first", {"persistent": True, "order": "longest_first"}),
)
RUNGS = tuple(name for name, _ in _STEPS)

#: Choices that stand in ``warps`` of an entry.
_OF_WARPS = ("producer", "schedule", "overlap")


@dataclass(frozen=True)
class Rung:
    """A step of the ladder. ``lines`` are the entry of ``kernels`` that builds it, ``changed`` those that differ from
    the rung before. ``kernel`` is None, and ``refusal`` says why, where the plan refuses the step."""

    name: str
    lines: tuple[str, ...]
    changed: tuple[str, ...]
    kernel: Prepared | None = None
    refusal: str | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the kernel, if there is one."""
        return self.kernel.plan if self.kernel else None


@dataclass(frozen=True)
class Ladder:
    """The rungs that lead to one kernel of a spec."""

    of: Plan
    rungs: tuple[Rung, ...]

    @property
    def kernels(self) -> dict[str, Prepared]:
        """The kernels of the rungs that exist, by the names of the rungs."""
        return {rung.name: rung.kernel for rung in self.rungs if rung.kernel is not None}


def reason_against(plan: Plan) -> str | None:
    """Reason why a kernel has no ladder, or None."""
    if plan.backend != "cuda":
        return "only CUDA kernels have a ladder"
    if not plan.structure.warp_roles:
        return "a ladder leads to a kernel with warp specialization"
    return "a ladder is for kernels of single heads" if plan.pack_gqa else None


def ladders(kernels: Sequence[Prepared]) -> list[Ladder]:
    """The ladder of each kernel; kernels that differ only in fields that a ladder varies share the first one's."""
    by_rungs: dict[tuple[str, ...], Ladder] = {}
    for kernel in kernels:
        ladder = Ladder(kernel.plan, _rungs(kernel))
        by_rungs.setdefault(tuple(each.plan.name for each in ladder.kernels.values()), ladder)
    return list(by_rungs.values())


def _rungs(base: Prepared) -> tuple[Rung, ...]:
    """All rungs. A step that the plan refuses is left out of those after it."""
    choices, rungs = dict(_START), []
    before: tuple[str, ...] = ()
    for name, change in _STEPS:
        tried = {**choices, **change}
        lines = _lines(base, tried)
        changed = tuple(line for line in lines if line not in before)
        try:
            spec = _spec(base, tried)
            planned = plan_kernel(spec)
        except PlanError as error:
            rungs.append(Rung(name, lines, changed, refusal=str(error)))
            continue
        rungs.append(Rung(name, lines, changed, Prepared(spec, planned)))
        choices, before = tried, lines
    return tuple(rungs)


def _spec(base: Prepared, choices: Mapping[str, Any]) -> KernelSpec:
    """The kernel of a rung: that of the spec with these choices, and with its tile once warps have roles."""
    of_warps, others = _parted(choices)
    tile: dict[str, Any] = {"tile_m": None, "tile_n": None, "stages": None, "roles": None}
    if of_warps:
        roles = replace(base.spec.roles or Roles(), consumer=None, **of_warps)
        tile = {"tile_m": base.plan.tile_m, "tile_n": base.plan.tile_n, "stages": base.plan.stages, "roles": roles}
    return replace(base.spec, backend="cuda", **tile, **others)


def _lines(base: Prepared, choices: Mapping[str, Any]) -> tuple[str, ...]:
    """The entry of ``kernels`` that builds a rung, a field on each line."""
    spec, base_plan = base.spec, base.plan
    warps, others = _parted(choices)
    if warps and spec.roles and (spec.roles.producer_registers or spec.roles.consumer_registers):
        registers = {"producer": spec.roles.producer_registers, "consumer": spec.roles.consumer_registers}
        warps["registers"] = {role: count for role, count in registers.items() if count}
    same = spec.head_dim_qk == spec.head_dim_v
    tile: dict[str, Any] = {
        "tile": {"m": base_plan.tile_m, "n": base_plan.tile_n},
        "pipeline": {"stages": base_plan.stages},
        "warps": warps,
    }
    entry: dict[str, Any] = {
        "variant": spec.variant.name,
        "head_dim": spec.head_dim_qk if same else {"qk": spec.head_dim_qk, "v": spec.head_dim_v},
        "arch": spec.arch,
        "dtype": spec.dtype,
        "backend": "cuda",
        **(tile if warps else {}),
        **others,
        **({} if spec.fast_math else {"fast_math": False}),
        **({} if spec.tile_map == "auto" else {"tile_map": spec.tile_map}),
        **({"allow": list(spec.allow)} if spec.allow else {}),
    }
    return tuple(f"{name}: {_yaml(value)}" for name, value in entry.items())


def _parted(choices: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choices that stand in ``warps`` of an entry, none where warps have no roles; and all others."""
    of_warps = {name: choices[name] for name in _OF_WARPS if name in choices}
    return of_warps, {name: value for name, value in choices.items() if name not in of_warps}


def _yaml(value: Any) -> str:
    """Write a value as YAML in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value)
