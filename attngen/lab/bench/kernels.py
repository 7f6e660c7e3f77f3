"""The kernels of a spec as contenders: which of them are measured side by side, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.dtypes import DESCALES, LATENT_ROWS, QUANTIZED_DTYPES
from attngen.errors import CallError, suggest
from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.peers import Tensors, output_of
from attngen.lab.bench.timing import Contender
from attngen.lab.bench.workloads import Workload
from attngen.lab.verify.inputs import in_groups
from attngen.lang.variant import Variant
from attngen.plan.model import Plan
from attngen.runtime.arguments.checked import TORCH_DTYPES
from attngen.runtime.arguments.latent_rows import cache_of
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.operations.attention.entry import attention
from attngen.runtime.operations.attention.introspection import explain, tile_map
from attngen.runtime.registry.lookup import Package, registry
from attngen.store.store import Store

#: The column and the package of the kernel that a call takes, of all of a team.
TAKEN = "attngen"


@dataclass(frozen=True)
class Team:
    """Kernels that compute the same on the same shapes, by the names of their columns.

    ``forward_kernels`` are those that a backward kernel follows.
    """

    variant: Variant
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    members: Mapping[str, Prepared]
    direction: str = "forward"
    forward_kernels: Sequence[Prepared] = ()


def chosen(prepared: Sequence[Prepared], part: str | None, variants: Sequence[str]) -> list[Prepared]:
    """The kernels of these variants (all if none is named) whose name contains ``part``.

    Raises CallError for a variant that no kernel has, and if nothing is left.
    """
    known = list(dict.fromkeys(kernel.plan.variant.name for kernel in prepared))
    for name in variants:
        if name not in known:
            raise CallError(f"the spec has no kernel of variant '{name}'{suggest(name, known)}")
    kept = [kernel for kernel in prepared if not variants or kernel.plan.variant.name in variants]
    named = [kernel for kernel in kept if part is None or part in kernel.plan.name]
    if not named:
        raise CallError(f"the spec has no kernel '{part}'{suggest(str(part), [k.plan.name for k in kept])}")
    return named


def reason_against(plan: Plan, capability: int | None, directions: Sequence[str] = DIRECTIONS) -> str | None:
    """Reason to leave a kernel out, or None. ``capability`` is 10 * major + minor, None where there is no GPU."""
    if plan.layout != "dense":
        return "only dense calls are measured"
    if plan.split_tiles:
        return "for calls that fill less than a wave, which --suite small measures"
    if plan.direction not in directions:
        return f"only {' and '.join(directions)} kernels are measured"
    if capability is not None and not plan.arch.runs_on(capability):
        return f"built for {plan.arch.name}, this GPU is sm{capability}"
    return None


def forward_kernels_of(plan: Plan, prepared: Sequence[Prepared], capability: int | None) -> list[Prepared]:
    """The kernels whose outputs a backward kernel differentiates, and that run on the same GPU."""
    return [
        other
        for other in prepared
        if reason_against(other.plan, capability, ("forward",)) is None and _computed(other.plan) == _computed(plan)
    ]


def _computed(plan: Plan) -> tuple[str, str, int, int]:
    return plan.variant.name, plan.dtype_name, plan.head_dim_qk, plan.head_dim_v


def teams(kept: Sequence[Prepared], prepared: Sequence[Prepared] = (), capability: int | None = None) -> list[Team]:
    """Group kernels that compute the same; ``prepared`` has the forward kernels that backward ones follow."""
    groups: dict[tuple[str, tuple[str, str, int, int]], list[Prepared]] = {}
    for kernel in kept:
        groups.setdefault((kernel.plan.direction, _computed(kernel.plan)), []).append(kernel)
    return [
        Team(
            members[0].plan.variant, dtype, head_dim_qk, head_dim_v, _labelled(members), direction,
            forward_kernels_of(members[0].plan, prepared, capability) if direction == "backward" else (),
        )
        for (direction, (_, dtype, head_dim_qk, head_dim_v)), members in groups.items()
    ]  # fmt: skip


def compiled(members: Sequence[Prepared], jobs: int | None) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Compile what the cache lacks; return the kernels by name, and the errors of those that do not compile."""
    store = Store()
    built, failures = compile_kernels(list({one.plan.name: one for one in members}.values()), store=store, jobs=jobs)
    kernels = {name: read_kernel(store.path(kernel.key)) for name, kernel in built.items()}
    return kernels, {failure.name: str(failure.error) for failure in failures}


def _labelled(members: Sequence[Prepared]) -> dict[str, Prepared]:
    """Name each kernel by its backend, and, where several share one, also by what distinguishes their names."""
    labels = {}
    for member in members:
        alike = [other.plan.name for other in members if other.plan.backend == member.plan.backend]
        shared = set.intersection(*(set(name.split("_")) for name in alike))
        own = [part for part in member.plan.name.split("_") if part not in shared]
        labels[" ".join(["attngen", member.plan.backend, *(own if len(alike) > 1 else [])])] = member
    return labels


def enter(
    label: str, kernel: Kernel, work: Workload, inputs: Sequence[Tensors], forward_kernels: Sequence[Kernel] = ()
) -> Contender:
    """The forward calls of one kernel, through the dispatcher as a program makes them.

    The kernel is registered as a package of its own, a backward kernel with its forward kernels, so that no other one
    can be selected instead. The tile map of a forward kernel is computed beforehand, like the block masks of other
    libraries. Raises NoKernelError for a case that the kernel does not take.
    """
    members = (kernel, *forward_kernels)
    registry.add(Package(kernel.name, kernel.origin, {kernel.variant_name: tuple(map(reader, members))}))
    one = inputs[0]
    keywords = _keywords(kernel, kernel.name, work, one)
    if kernel.needs_tile_map:
        keywords["tile_map"] = tile_map(one.q, one.k, v=one.v, **keywords)
    if kernel.variant.max_logits:
        keywords["return_max_logits"] = True
    leaves = [each.bshd for each in inputs]
    calls = [partial(attention, *_as_read(kernel, *each), **keywords) for each in leaves]
    return Contender(label, calls, as_bshd=output_of, leaves=leaves)


def taken(team: Team, kernels: Mapping[str, Kernel], work: Workload, one: Tensors) -> dict[str, Prepared]:
    """The forward kernel of a team that a call takes, by the name of its column; all members if there is none.

    ``kernels`` holds those that compiled, by name.
    """
    running = [kernels[member.plan.name] for member in team.members.values() if member.plan.name in kernels]
    if not running:
        return dict(team.members)
    first = running[0]
    registry.add(Package(TAKEN, first.origin, {first.variant_name: tuple(map(reader, running))}))
    explanation = explain(*one.bshd, **_keywords(first, TAKEN, work, one)).to_dict()
    name = str(explanation["kernel"]).rpartition("/")[2]
    selected = [member for member in team.members.values() if member.plan.name == name]
    return {TAKEN: selected[0]} if selected else dict(team.members)


def _keywords(kernel: Kernel, package: str, work: Workload, one: Tensors) -> dict[str, Any]:
    """Keyword arguments of a call on a kernel, or on others of its variant and dtype."""
    keywords = {"variant": kernel.variant_name, "package": package, **work.arguments}
    if kernel.dtype in QUANTIZED_DTYPES:  # numbers of about 1, whose scale is 1
        keywords |= dict.fromkeys(DESCALES, torch.ones((), device=one.q.device, dtype=torch.float32))
        keywords["out_dtype"] = TORCH_DTYPES[kernel.dtype_of("out").name]
    elif kernel.v_of_key and kernel.dtype_of("k").name in QUANTIZED_DTYPES:
        keywords["k_descale"] = torch.ones((), device=one.q.device, dtype=torch.float32)
    return keywords


def _as_read(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs as a kernel reads them: some want the keys of v side by side, or k and v in other 8 bits than q."""
    name = kernel.dtype_of("k").name
    if name in LATENT_ROWS:
        cache = cache_of(name, k)
        return q, cache, cache
    kv_dtype = TORCH_DTYPES[name]
    k, v = (tensor if tensor.dtype == kv_dtype else tensor.float().to(kv_dtype) for tensor in (k, v))
    if kernel.v_of_key:
        return q, k, k[..., : kernel.head_dim_v]
    if kernel.grouped_v:
        return q, k, in_groups(v)
    return q, k, v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if kernel.transposed_v else v


def reader(kernel: Kernel) -> Callable[[], Kernel]:
    """A function that reads a kernel, as packages have one for each."""
    return lambda: kernel
