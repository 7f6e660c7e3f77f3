"""Predicted speed of plans on many ranks, from measured constants: how far a method carries before links bound it.

Work and bytes are exact, those of the plan; times follow from speeds. What overlaps is hidden up to the time of what
hides it. Nothing is sent, so any number of ranks can be looked at on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from attngen.errors import CallError
from attngen.lang.variant import Variant
from attngen.parallel.cost import Cost
from attngen.parallel.layers import PlanLayer
from attngen.parallel.making import plan
from attngen.parallel.overlap import local_tiles
from attngen.parallel.plans import Plan

#: FLOPs of a backward over those of a forward: five products and two.
_BACKWARD = 2.5

#: Methods that are simulated.
SIMULATED = ("exchange", "gather", "heads")


@dataclass(frozen=True)
class Links:
    """Speeds that a simulation takes as given: GB/s that a GPU receives, and seconds until a collective begins.

    ``node`` GPUs share a host, whose links have ``inside``; rows from other hosts come by ``between``. TFLOP/s of
    kernels are those of long sequences, forward and backward; ``copies`` is GB/s of copies on a GPU. The defaults were
    measured on H200s of one host (``docs/parallel.md``); ``between`` is a 400 Gb/s port of each GPU at 90 %.
    """

    node: int = 8
    inside: float = 300.0
    between: float = 45.0
    start: float = 30e-6
    forward: float = 650.0
    backward: float = 560.0
    copies: float = 2500.0


@dataclass(frozen=True)
class Simulated:
    """One variant and method: TFLOP/s of each GPU over visible pairs, by direction, and what bounds it."""

    variant: str
    method: str
    ranks: int
    seqlen: int
    forward: float
    backward: float
    exposed: float  # share of the forward's time in which nothing is computed
    bound: str  # "kernels" or "links"

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.variant}, {self.method}, {self.ranks} ranks of {self.seqlen // self.ranks} tokens: "
            f"{self.forward:.0f} TFLOP/s forward, {self.backward:.0f} backward; {self.exposed:.0%} of the forward is "
            f"not hidden; {self.bound} bound it"
        )


def simulate(
    variant: str | Variant, ranks: int, *, tokens: int = 8192, method: str = "exchange",
    cu_seqlens: Sequence[int] | None = None, cost: Cost | None = None, links: Links | None = None, **values: Any,
) -> Simulated:  # fmt: skip
    """Predict attention of ``ranks`` GPUs with as many ``tokens`` each. Raises CallError.

    ``cost`` has heads, head_dim and bytes of the model; its speeds are those of ``links``, as the plan weighs them.
    """
    links = links if links is not None else Links()
    if method not in SIMULATED:
        raise CallError(f"method must be one of {', '.join(SIMULATED)}, got {method!r}")
    if ranks < 1 or tokens < 1:
        raise CallError(f"ranks and tokens must be positive, got {ranks} and {tokens}")
    slow = links.inside if ranks <= links.node else links.between
    cost = replace(cost if cost is not None else Cost(), tflops=links.forward, gigabytes=slow)
    if method == "heads" and (cost.heads % ranks or cost.kv_heads % ranks):
        numbers = f"{cost.heads} heads and {cost.kv_heads} KV heads"
        raise CallError(f"{numbers} are not multiples of the number of ranks, {ranks}")
    made = plan(variant, ranks * tokens, ranks, method=method, cu_seqlens=cu_seqlens, cost=cost, **values)
    layer = made.layers[0]
    pairs = _visible_share(layer) * float(layer.visits.tiles.sum()) * made.tile**2
    flops = 4.0 * pairs * cost.head_dim * cost.heads
    forward, exposed = _seconds(made, layer, links, backward=False)
    backward, _ = _seconds(made, layer, links, backward=True)
    return Simulated(
        layer.name, method, ranks, made.seqlen,
        flops / ranks / forward / 1e12, _BACKWARD * flops / ranks / backward / 1e12,
        exposed / forward, "links" if exposed > 0.25 * forward else "kernels",
    )  # fmt: skip


def _visible_share(layer: PlanLayer) -> float:
    """About which share of the pairs of visited tiles is visible: half of those at a bound of a band."""
    visits = layer.visits
    runs = len(visits.row)
    total = float((visits.hi - visits.lo).sum())
    return max(1.0 - 0.5 * runs / total, 0.5) if total else 1.0


def _seconds(made: Plan, layer: PlanLayer, links: Links, *, backward: bool) -> tuple[float, float]:
    """Seconds of the rank that takes longest, and how many of them are not hidden by kernels."""
    cost, ranks = made.cost, made.ranks
    speed = links.backward / _BACKWARD if backward else links.forward
    of_tile = 4.0 * made.tile**2 * cost.head_dim * cost.heads / (speed * 1e12)
    if layer.method == "heads":
        work = np.full(ranks, float(layer.visits.tiles.sum()) / ranks) * of_tile
        rows = cost.rows_of_heads(made.sharding.counts, ranks)
        sending = _travel(rows, np.full((ranks, ranks), 1.0), cost, links) * (2.0 if backward else 1.0)
        hidden = np.zeros(ranks)
        copied = rows
    else:
        work = np.bincount(made.sharding.owner, weights=layer.visits.tiles, minlength=ranks) * of_tile
        rows = layer.sent.received.astype(float)
        sending = _travel(rows, _sources(made, layer), cost, links)
        if backward and layer.overlap == "heads":
            sending = 2.0 * sending  # the keys travel again, and their gradients return
        hidden = _hidden(made, layer, work, sending)
        copied = rows * (3.0 if backward else 1.0)
    copies = copied * cost.token_bytes() * 2 / (links.copies * 1e9)
    exposed = sending - hidden + copies + links.start * (2 if backward else 1)
    total = work + exposed
    worst = int(total.argmax())
    return float(total[worst]), float(exposed[worst])


def _hidden(made: Plan, layer: PlanLayer, work: np.ndarray, sending: np.ndarray) -> np.ndarray:
    """Seconds of what travels that kernels hide."""
    if layer.overlap == "rows":
        owner, visited = made.sharding.owner, layer.visits.tiles
        alone = np.where(local_tiles(layer.visits, owner), visited, 0.0)
        local, every = (np.bincount(owner, weights=tiles, minlength=made.ranks) for tiles in (alone, visited))
        share = local / np.maximum(every, 1.0)
        return np.minimum(sending, work * share)
    if layer.overlap == "heads":
        first = sending / made.cost.kv_heads
        return np.minimum(sending - first, work * (1.0 - 1.0 / made.cost.kv_heads))
    return np.zeros(made.ranks)


def _sources(made: Plan, layer: PlanLayer) -> np.ndarray:
    """Rows that each rank gets of each other one."""
    sizes, owner = made.sharding.sizes, made.sharding.owner
    rows = np.stack([
        np.bincount(owner, weights=np.where(layer.sent.tiles[rank], sizes, 0), minlength=made.ranks)
        for rank in range(made.ranks)
    ])  # fmt: skip
    np.fill_diagonal(rows, 0.0)
    return rows


def _travel(rows: np.ndarray, sources: np.ndarray, cost: Cost, links: Links) -> np.ndarray:
    """Seconds until ``rows`` have arrived, which come of other ranks in the shares of ``sources``."""
    ranks = len(rows)
    host: np.ndarray = np.arange(ranks) // links.node
    shares = sources / np.maximum(sources.sum(axis=1, keepdims=True), 1e-9)
    near = (shares * (host[:, None] == host[None, :])).sum(axis=1)
    data = rows * cost.token_bytes() / 1e9
    seconds: np.ndarray = np.maximum(data * near / links.inside, data * (1.0 - near) / links.between)
    return seconds


def table(
    variant: str | Variant, ranks: Sequence[int] = (8, 16, 32, 64), *, cost: Cost | None = None,
    links: Links | None = None, values: Mapping[str, Any] | None = None, tokens: int = 8192,
) -> list[Simulated]:  # fmt: skip
    """Simulations of all methods that the heads allow."""
    cost = cost if cost is not None else Cost()
    simulations = []
    for count in ranks:
        for method in SIMULATED:
            if method == "heads" and (cost.heads % count or cost.kv_heads % count):
                continue
            simulations.append(
                simulate(variant, count, tokens=tokens, method=method, cost=cost, links=links, **(values or {}))
            )
    return simulations
