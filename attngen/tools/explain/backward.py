"""The plan of a backward in words: its kernels, and the derivatives that its gradients are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attngen.lang.derivative import differentiate, differentiate_loads
from attngen.lang.printing import canonical
from attngen.plan.budget import GradientMemory, gradient_memory
from attngen.plan.model import Launch, Plan
from attngen.plan.own_gradients import differentiable
from attngen.plan.schedules.structures import HopperBackward
from attngen.plan.tiles import padded_width


def derivatives(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what the score is differentiated by, ``s`` first, and the derivative; then the same of the sink."""
    score, sink = plan.variant.score, plan.variant.sink
    yield "s", "1.0" if score is None else canonical(differentiate(score, "s"))
    for name, expression in (("", score), ("sink by ", sink)):
        if expression is not None:
            for tensor in (one.name for one in plan.variant.tensors if one.grad):
                for load, derivative in differentiate_loads(expression, tensor):
                    yield f"{name}{canonical(load)}", canonical(derivative)


def memory_of(plan: Plan, launch: Launch) -> GradientMemory:
    """Return the shared memory that the operands of one kernel take."""
    by_keys = launch.name == "dkdv"
    kept, moved = (launch.tile_n, launch.tile_m) if by_keys else (launch.tile_m, launch.tile_n)
    return gradient_memory(
        kept_rows=kept,
        moved_rows=moved,
        stages=launch.stages,
        width_qk=padded_width(plan.columns_qk),
        width_v=padded_width(plan.columns_v),
        operands=plan.operands,
        by_keys=by_keys,
    )


#: What dropout does, in a few words.
DROPOUT = "of pairs whose 16-bit Philox number is below dropout_p * 65536"


def _derivative(name: str, text: str) -> tuple[str, str]:
    """Return label and text of a derivative, of the score unless it says that it is of the sink."""
    of_sink = name.removeprefix("sink by ")
    return f"by {of_sink}", text if of_sink == name else f"{text}, of the sink"


_DOES = {
    "preprocess": "the log-sum-exp in units of log2, and D = rowsum(dO * O) - dLSE, of each query row",
    "classify_dkdv": "the map of the tiles of queries that each tile of keys is seen by",
    "dkdv": "dK and dV of {tile_n} keys, {tile_m} queries of each head of the group a step",
    "classify_dq": "the map of the tiles of keys that each tile of queries sees",
    "dq": "dQ of {tile_m} queries, {tile_n} keys a step",
}


_DOES_IN_CUDA = {
    "preprocess": f"{_DOES['preprocess']}; clears the dQ accumulator",
    "dkdv": f"{_DOES['dkdv']}; adds dQ to float32 sums, and rounds those that are complete",
}
_DOES_IN_CLUSTERS = {
    **_DOES_IN_CUDA,
    "dkdv": f"{_DOES['dkdv']}; adds dQ to float32 sums",
    "dq": "dQ of {tile_m} queries from its sums",
}
_OVERLAPS = {
    "gradients": "runs under dQ and dK of the one before",
    "pingpong": "runs under products of the other consumer: they take turns at the tensor cores",
    "nothing": "runs under no product of its own warpgroup",
    "roles": "runs under products of other warpgroups",
    "dv": "runs under dV of the one before, and products of other warpgroups",
    "dk": "runs under dK of the one before",
}


def backward_facts(plan: Plan) -> list[tuple[str, str]]:
    """Return label and text of everything but bands and efficiency, for people."""
    variant = plan.variant
    lines = [
        ("variant", variant.name),
        ("mask", canonical(variant.mask)),
        ("score", canonical(variant.score) if variant.score is not None else "s"),
        *([("sink", canonical(variant.sink))] if variant.sink is not None else []),
        *(_derivative(name, text) for name, text in derivatives(plan)),
        *([("dropout", DROPOUT)] if variant.dropout else []),
        ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.layout}, backward"),
        ("gradients", ", ".join(["q", "k", "v", *(tensor.name for tensor in variant.tensors if tensor.grad)])),
    ]
    roles = plan.structure if isinstance(plan.structure, HopperBackward) else None
    does = {**_DOES, **_does_in_cuda(roles)}
    for launch in plan.launches:
        order = ", those of the first keys first" if plan.ordered and launch.name == "dkdv" else ""
        lines.append((launch.name, does[launch.name].format(tile_m=launch.tile_m, tile_n=launch.tile_n) + order))
        if roles is None and launch.name in ("dkdv", "dq"):
            memory = memory_of(plan, launch)
            lines += [
                ("", f"{launch.stages} stages, {launch.num_warps} warps, loop: {launch.driver}"),
                ("", f"shared memory {memory.total} B of {plan.arch.shared_memory} B: {memory}"),
            ]
        elif roles is not None and launch.name == "dkdv":
            lines += _roles(plan, launch, roles)
    atomic = [] if plan.ordered else ["dq"] if plan.sum_columns else differentiable(plan)
    lines.append(("same bits", f"on every run, but for {', '.join(atomic)}" if atomic else "on every run"))
    return lines


def _does_in_cuda(roles: HopperBackward | None) -> Mapping[str, str]:
    if roles is None:
        return {}
    return _DOES_IN_CUDA if roles.cluster == 1 else _DOES_IN_CLUSTERS


def _roles(plan: Plan, launch: Launch, roles: HopperBackward) -> Iterator[tuple[str, str]]:
    """Yield label and text of the warpgroups of the CUDA kernel of all products, and of its shared memory."""
    for text in _warpgroups(roles) if roles.cluster == 1 else _warpgroups_of_cluster(roles):
        yield "", text
    yield "", f"loop: {launch.driver}; the softmax of a step {_OVERLAPS[roles.overlap]}"
    halved = roles.cluster > 1 and roles.parts_of(padded_width(plan.columns_v)) > 1
    yield "", f"in flight: {roles.q_stages} tiles of Q, {launch.stages} {'half ones ' if halved else ''}of dO, 2 of dS"
    sizes = ", ".join(f"{region.name} {region.bytes}" for region in roles.shared if region.bytes >= 1024)
    yield "", f"shared memory {roles.shared_bytes} B: {sizes}"


def _warpgroups(roles: HopperBackward) -> Iterator[str]:
    yield f"producer: 1 warpgroup, {roles.producer_registers} registers a thread: loads, adds up dQ and rounds it"
    yield f"consumers: {roles.consumers} warpgroups of 64 keys, {roles.consumer_registers} registers a thread"


def _warpgroups_of_cluster(roles: HopperBackward) -> Iterator[str]:
    yield f"a cluster of {roles.cluster} blocks of {roles.keys} keys, in each of which 1 warpgroup"
    order = "; a warp of it keeps the order of sums" if roles.ordered else ""
    yield f"loads: {roles.producer_registers} registers a thread; a half of Q and dO for both blocks{order}"
    yield f"multiplies S and keeps dV: {roles.consumer_registers} registers a thread"
    yield f"multiplies dP and keeps dK: {roles.consumer_registers} registers a thread"
    yield (
        f"multiplies {roles.dq_columns} columns of dQ, {roles.dq_part} at once, and adds them to sums: "
        f"{roles.queries_registers} registers a thread"
    )
