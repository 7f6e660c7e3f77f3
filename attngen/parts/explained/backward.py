"""The plan of a backward in words: its kernels, and the derivatives that its gradients use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.lang.derivative import differentiate, differentiate_loads
from attngen.lang.printing import canonical
from attngen.parts.columns import padded_width
from attngen.parts.explained.base import ScheduleExplanation
from attngen.plan.budget import GradientMemory, gradient_memory
from attngen.plan.model import Launch, Plan
from attngen.plan.own_gradients import differentiable


def derivatives(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield each name that the score is differentiated by, ``s`` first, and the derivative; then those of the sink."""
    score, sink = plan.variant.score, plan.variant.sink
    yield "s", "1.0" if score is None else canonical(differentiate(score, "s"))
    for name, expression in (("", score), ("sink by ", sink)):
        if expression is not None:
            for tensor in (one.name for one in plan.variant.tensors if one.grad):
                for load, derivative in differentiate_loads(expression, tensor):
                    yield f"{name}{canonical(load)}", canonical(derivative)


def memory_of(plan: Plan, launch: Launch) -> GradientMemory:
    """Return the shared memory that the operands of one kernel take."""
    by_keys = launch.grid == "keys"
    kept, moved = (launch.tile_n, launch.tile_m) if by_keys else (launch.tile_m, launch.tile_n)
    return gradient_memory(
        kept_rows=kept,
        moved_rows=moved,
        stages=launch.stages,
        width_qk=padded_width(plan.columns_qk),
        width_v=padded_width(plan.columns_v),
        kept_bytes=plan.kept_bytes,
        operands=plan.operands,
        by_keys=by_keys,
    )


#: Description of dropout.
DROPOUT = "of pairs whose 16-bit Philox number is below dropout_p * 65536"


def _derivative(name: str, text: str) -> tuple[str, str]:
    """Label and text of a derivative: of the score, or of the sink."""
    of_sink = name.removeprefix("sink by ")
    return f"by {of_sink}", text if of_sink == name else f"{text}, of the sink"


DOES = {
    "preprocess": "the log-sum-exp in units of log2, and D = rowsum(dO * O) - dLSE, of each query row",
    "classify_dkdv": "the tile map: which tiles of queries see each tile of keys",
    "dkdv": "dK and dV of {tile_n} keys, {tile_m} queries of each head of the group a step",
    "dk": "dK of {tile_n} keys, {tile_m} queries of each head of the group a step",
    "dv": "dV of {tile_n} keys, {tile_m} queries of each head of the group a step",
    "classify_dk": "the tile map: which tiles of queries see each tile of keys, for dK",
    "classify_dv": "the same for dV",
    "classify_dq": "the tile map: which tiles of keys each tile of queries sees",
    "dq": "dQ of {tile_m} queries, {tile_n} keys a step",
    "classify_dqkv": "the tile map: which tiles of queries see each tile of keys",
    "dqkv": "dK and dV of {tile_n} keys, {tile_m} queries of each head of the group a step",
    "postprocess": "scales and rounds dQ of {tile_m} queries, from the dQ accumulator",
}


@dataclass(frozen=True, slots=True)
class BackwardExplanation(ScheduleExplanation):
    """The explanation of a backward in Triton, whose compiler lays out the kernels."""

    def launch(self, launch: Launch) -> list[str]:
        """Lines on one launch: its purpose, and the contents of shared memory where it multiplies."""
        does = [describe(launch)]
        if launch.grid not in ("keys", "queries"):
            return does
        memory = memory_of(self.plan, launch)
        return [
            *does,
            f"{launch.stages} stages, {launch.num_warps} warps, loop: {launch.iteration}",
            f"shared memory {memory.total} B of {self.plan.arch.shared_memory} B: {memory}",
        ]


def describe(launch: Launch) -> str:
    """The purpose of a launch of a backward kernel."""
    return DOES[launch.name].format(tile_m=launch.tile_m, tile_n=launch.tile_n)


def backward_facts(plan: Plan, schedule: ScheduleExplanation) -> list[tuple[str, str]]:
    """Return label and text of everything but bands and efficiency, for people."""
    variant = plan.variant
    lines = [
        ("variant", variant.name),
        ("mask", canonical(variant.mask)),
        ("score", canonical(variant.score) if variant.score is not None else "s"),
        *([("sink", canonical(variant.sink))] if variant.sink is not None else []),
        *(_derivative(name, text) for name, text in derivatives(plan)),
        *([("weights", variant.weights)] if not variant.has_lse else []),
        *([("dropout", DROPOUT)] if variant.dropout else []),
        ("target", f"{plan.arch_name}, {plan.dtype_name}, {plan.layout}, backward"),
        ("gradients", ", ".join(["q", "k", "v", *(tensor.name for tensor in variant.tensors if tensor.grad)])),
    ]
    for launch in plan.launches:
        first, *others = schedule.launch(launch)
        lines += [(launch.name, first), *(("", line) for line in others)]
    if plan.tile_reason:
        lines.append(("chosen", plan.tile_reason))
    atomic = [] if plan.ordered else [*plan.summed, *differentiable(plan)]
    lines.append(("same bits", f"on every run, but for {', '.join(atomic)}" if atomic else "on every run"))
    return lines
