"""The floors of a Hopper backward in words and numbers: a step of each kernel, and one head of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from attngen.parts.floors import (
    CLOCK,
    EXPONENTIALS,
    MEMORY_PER_CLOCK,
    MULTIPROCESSORS,
    GradientFloor,
    gradient_floor,
    row_sums_bytes,
)
from attngen.plan.model import Launch, Plan

if TYPE_CHECKING:
    from attngen.inspect.visits import Visits

#: Columns of the five products that a backward is counted by: those of q and k three times, those of v two times.
_COUNTED = (3, 2)


@dataclass(frozen=True, slots=True)
class HeadGradientFloor:
    """The floor of the backward of one head among many: steps of each kernel, clocks of one multiprocessor,
    microseconds of the whole chip, and TFLOP/s by the five products of visible pairs."""

    seqlen: int
    steps: Mapping[str, int]
    clocks: int
    us: float
    tflops: float


@dataclass(frozen=True, slots=True)
class GradientFloors:
    """The floors of all kernels that multiply, and of heads of some lengths."""

    plan: Plan
    kernels: tuple[GradientFloor, ...]
    heads: tuple[HeadGradientFloor, ...]

    @classmethod
    def of(cls, plan: Plan, visited: Callable[[Plan], Sequence[Visits]]) -> GradientFloors | None:
        """The floors of a backward kernel, None where the rates of the chip are not known.

        ``visited`` returns the tiles that a kernel visits, at the same lengths for each.
        """
        floors = (gradient_floor(plan, launch) for launch in plan.launches)
        kernels = tuple(low for low in floors if low is not None)
        if plan.arch_name != "sm90a" or plan.operands.q.mma is None or not kernels:
            return None
        rows = zip(*(visited(plan.of_launch(low.launch)) for low in kernels), strict=True)
        return cls(plan, kernels, tuple(_head(plan, kernels, each) for each in rows))

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the document of ``attngen explain --json``; clocks are those of one multiprocessor."""
        return {
            "kernels": {
                low.launch.name: {
                    **low.parts,
                    "step": low.clocks,
                    "bound_by": list(low.binding),
                    "loaded_bytes": low.loaded,
                    "uncached_clocks": low.uncached,
                    "cached_share": low.cached_share,
                    "kept_bytes": low.kept,
                }
                for low in self.kernels
            },
            "heads": [asdict(head) for head in self.heads],
        }

    def lines(self) -> Iterator[str]:
        """Yield the arithmetic of each floor, the bound, and the floors of heads."""
        for low in self.kernels:
            m, n = low.launch.tile_m, low.launch.tile_n
            by_qk, by_v = low.products
            yield f"floor of a step of {low.launch.name} in clocks: {m} queries x {n} keys"
            flops = f"{low.flops} FLOP at {low.flops_per_clock} per clock"
            products = f"{by_qk} products of q's head_dim and {by_v} of v's: {flops}"
            detail = {"products": products, "exponentials": f"{m} x {n} at {EXPONENTIALS.value} per clock"}
            for name, clocks in low.parts.items():
                yield f"  {name:14s} {clocks:6d}  {detail[name]}"
            yield f"  {'bound by':14s} {low.clocks:6d}  {' and '.join(low.binding)}"
            share = (
                f"HBM binds unless L2 holds {100 * low.cached_share:.0f} %" if low.cached_share else "HBM never binds"
            )
            moved = "Q and dO" if low.launch.grid == "keys" else "K and V"
            rate = f"{float(MEMORY_PER_CLOCK):.1f} B per clock"
            yield f"  {moved:14s} {low.uncached:6d}  {low.loaded} B at {rate} from HBM; {share}"
        for head in self.heads:
            steps = ", ".join(f"{count} of {name}" for name, count in head.steps.items())
            whole = f"{head.us:.2f} us on {MULTIPROCESSORS.value} multiprocessors, at most {head.tflops:.0f} TFLOP/s"
            yield f"  seqlen {head.seqlen:6d}: steps {steps} for a head, {head.clocks} clocks; {whole}"


def _steps(launch: Launch, visited: Visits) -> int:
    """Return the steps of a launch, whose consumers may each visit a part of the keys of a tile."""
    return ceil((visited.full + visited.partial) * visited.step_pairs / (launch.tile_m * launch.tile_n))


def _head(plan: Plan, kernels: Sequence[GradientFloor], visited: Sequence[Visits]) -> HeadGradientFloor:
    """Return the floor of one head: the kernels run one after the other, after the row statistics."""
    seqlen, pairs = visited[0].seqlen, visited[0].visible_pairs
    steps = {low.launch.name: _steps(low.launch, each) for low, each in zip(kernels, visited, strict=True)}
    clocks = ceil(seqlen * row_sums_bytes(plan) / MEMORY_PER_CLOCK)
    for low in kernels:
        kept = low.launch.tile_n if low.launch.grid == "keys" else low.launch.tile_m
        clocks += low.call(steps[low.launch.name], ceil(seqlen / kept))
    seconds = clocks / (MULTIPROCESSORS.value * CLOCK.value)
    by_qk, by_v = _COUNTED
    flops = 2 * pairs * (by_qk * plan.head_dim_qk + by_v * plan.head_dim_v)
    return HeadGradientFloor(seqlen, steps, clocks, 1e6 * seconds, flops / seconds / 1e12)
