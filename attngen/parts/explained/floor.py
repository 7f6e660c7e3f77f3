"""The floor of a Hopper kernel in words and numbers: a step, a work tile, and one head of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attngen.parts.floors import (
    EXPONENTIALS,
    MEMORY_PER_CLOCK,
    MULTIPROCESSORS,
    RATES,
    ROWS,
    SHARED,
    Floor,
    Product,
)
from attngen.plan.model import Plan


@dataclass(frozen=True, slots=True)
class HeadFloor:
    """The floor of one head among many: steps of its consumers, their clocks on one multiprocessor, time on the chip.

    ``tflops`` counts visible pairs; ``us`` is in microseconds at the highest clock rate.
    """

    seqlen: int
    steps: int
    clocks: int
    us: float
    tflops: float

    @classmethod
    def of(cls, plan: Plan, low: Floor, seqlen: int, steps: int, visible_pairs: int) -> HeadFloor:
        """Return the floor of ``steps`` steps of single consumers, for as many queries as keys."""
        tiles = -(-seqlen // plan.tile_m)
        seconds = low.seconds(steps, tiles)
        flops = 2 * visible_pairs * (plan.head_dim_qk + plan.head_dim_v)
        return cls(seqlen, steps, low.call(steps, tiles), 1e6 * seconds, flops / seconds / 1e12)


def floor_dict(low: Floor, heads: Sequence[HeadFloor]) -> dict[str, Any]:
    """A floor in the document of ``attngen explain --json``; clocks are those of one multiprocessor."""
    return {
        "rates": [asdict(rate) for rate in RATES],
        "qk": {**asdict(low.qk), "clocks": low.qk.clocks},
        "pv": {**asdict(low.pv), "clocks": low.pv.clocks},
        "consumer": {**low.parts, "step": low.clocks},
        "block": {**{name: low.consumers * clocks for name, clocks in low.parts.items()}, "step": low.block},
        "bound_by": list(low.binding),
        "exponentials": low.exponentials,
        "shared_bytes": low.shared_reads,
        "loaded_bytes": low.loaded,
        "uncached_clocks": low.uncached,
        "cached_share": low.cached_share,
        "tile_bytes": low.tile,
        "tile_clocks": low.tile_memory,
        "heads": [asdict(head) for head in heads],
    }


def floor_lines(plan: Plan, low: Floor, heads: Sequence[HeadFloor]) -> Iterator[str]:
    """Yield the arithmetic of a floor, the bound, and the floors of heads."""
    each = low.exponentials // (ROWS * plan.tile_n)
    detail = {
        "products": f"QK {_product(low.qk)}; PV {_product(low.pv)}",
        "exponentials": f"{ROWS} x {plan.tile_n}{f' x {each}' if each > 1 else ''} at {EXPONENTIALS.value} per clock",
        "shared memory": f"Q, K and V as operands: {low.shared_reads} B at {SHARED.value} B per clock",
    }
    yield f"floor of a step in clocks: of a consumer ({ROWS} queries x {plan.tile_n} keys) and of all {low.consumers}"
    for name, clocks in low.parts.items():
        yield f"  {name:14s} {clocks:5d} {low.consumers * clocks:6d}  {detail[name]}"
    yield f"  {'bound by':14s} {low.clocks:5d} {low.block:6d}  {' and '.join(low.binding)}"
    share = f"HBM binds unless L2 holds {100 * low.cached_share:.0f} %" if low.cached_share else "HBM never binds"
    yield f"  {'K and V':20s} {low.uncached:6d}  {low.loaded} B, shared by consumers, at {_MEMORY} from HBM; {share}"
    tile = f"Q and O, {low.tile} B at {_MEMORY} from HBM"
    yield f"floor of a work tile of n steps: n x {low.block}, and at least {low.tile_memory} for {tile}"
    for head in heads:
        whole = f"{head.us:.2f} us on {MULTIPROCESSORS.value} multiprocessors, at most {head.tflops:.0f} TFLOP/s"
        yield f"  seqlen {head.seqlen:6d}: {head.steps} steps of consumers for a head, {head.clocks} clocks; {whole}"
    yield "rates of the chip"
    for rate in RATES:
        yield f"  {rate.name:15s} {rate.value:<13.6g} {rate.unit:14s} {rate.source}"


_MEMORY = f"{float(MEMORY_PER_CLOCK):.1f} B per clock"


def _product(product: Product) -> str:
    return f"{product.clocks} = {product.count} x {product.n // 2} (m64n{product.n}k{product.k})"
