"""Times of the masks suite: ratios to FlexAttention, times per tile over causal's, and all of it as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attngen.tools.bench.cases import DIRECTIONS
from attngen.tools.bench.machine import Ceilings, Reading
from attngen.tools.bench.masks.cases.forms import MaskCase
from attngen.tools.bench.timing import Timing

#: The contestants. ``CONSTANTS`` has the sizes of a mask in its kernel, ``SCALARS`` takes them at the call;
#: ``UNLEARNED`` computes no gradient of the score's own tensors.
CONSTANTS, SCALARS, FRONT_END, UNLEARNED = "attngen", "attngen, scalars", "attngen, front end", "attngen, not learned"
FLEX, CAUSAL = "FlexAttention", "causal"

#: Most time for a non-empty tile, over causal's: bounds in closed form, a tile map, tensors over pairs.
CLOSED, MAPPED, PAIRS = 1.25, 1.4, 1.6

#: The same for a score, at head dim 128 or more and below.
SCORED = (1.35, 1.5)

#: Share of the copy bandwidth at which tensors over pairs are fast enough, however cheap causal is.
BANDWIDTH = 0.8

#: Most time of a backward over the same without gradients of the mask's or score's own tensors.
LEARNED = 1.3

#: Rows and columns of a tile.
TILE = 128


@dataclass(frozen=True, slots=True)
class Cell:
    """A case at one size."""

    case: MaskCase
    seqlen: int
    head_dim: int
    heads: int

    @property
    def kv_heads(self) -> int:
        """KV heads of the call."""
        return self.case.kv_heads or self.heads

    @property
    def name(self) -> str:
        """The cell in a few words, such as ``sliding window d128 8k``."""
        length = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        return f"{self.case.name} d{self.head_dim} {length}"


@dataclass(frozen=True, slots=True)
class MaskResult:
    """Outcome for one contestant in one cell.

    ``status`` is measured, compared (no times were taken), planned, unsupported or failed. ``first`` are the seconds of
    a process's first call with its gradients, compiling included, beside other compiles; ``second`` the milliseconds of
    the second forward. ``error`` is the largest difference from FlexAttention, relative by norm, of the output and the
    gradients. ``mapped`` says whether the kernels of (forward, backward) read a tile map.
    """

    contestant: str
    status: str = "planned"
    reason: str | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)
    first: float | None = None
    second: float | None = None
    error: float | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    mapped: frozenset[str] = frozenset()

    @property
    def ours(self) -> bool:
        """Whether attngen computed it."""
        return self.contestant != FLEX

    def milliseconds(self, direction: str) -> float | None:
        """Median time of a call."""
        timing = self.timings.get(direction)
        return None if timing is None else timing.milliseconds

    def to_dict(self) -> dict[str, Any]:
        """Return it as the report holds it."""
        return {
            "contestant": self.contestant,
            "status": self.status,
            "reason": self.reason,
            "first_seconds": self.first,
            "second_milliseconds": self.second,
            "relative_error": self.error if self.error is not None and math.isfinite(self.error) else None,
            **{
                direction: {
                    "milliseconds": timing.milliseconds,
                    "samples": list(timing.samples),
                    "host_bound": timing.host_bound,
                    "kernel": self.kernels.get(direction),
                    "tile_map": direction in self.mapped,
                }
                for direction, timing in self.timings.items()
            },
        }


@dataclass(frozen=True, slots=True)
class MaskRow:
    """One cell. ``tiles`` counts its non-empty tiles over all heads, ``pair_bytes`` the bytes of tensors over pairs in
    these. ``scored`` says whether the logits are changed, ``learns`` whether tensors take gradients."""

    cell: Cell
    results: tuple[MaskResult, ...]
    tiles: int = 0
    pair_bytes: int = 0
    scored: bool = False
    learns: bool = False
    reading: Reading | None = None

    def _result(self, contestant: str) -> MaskResult | None:
        return next((one for one in self.results if one.contestant == contestant), None)

    def _milliseconds(self, contestant: str, direction: str) -> float | None:
        result = self._result(contestant)
        return None if result is None else result.milliseconds(direction)

    @property
    def measured(self) -> tuple[MaskResult, ...]:
        """Results of attngen that have times, causal's left out."""
        return tuple(one for one in self.results if one.ours and one.contestant != CAUSAL and one.timings)

    @property
    def line(self) -> str:
        """Milliseconds of all contestants, forward and backward."""
        figures = [
            f"{one.contestant} " + " / ".join(f"{one.milliseconds(each):.3f}" for each in DIRECTIONS)
            for one in self.results
            if one.timings
        ]
        return f"{self.cell.name}: {', '.join(figures) or 'nothing was measured'} ms"

    def speed(self, result: MaskResult, direction: str) -> float | None:
        """Speed over FlexAttention's; None where either has no time, or computes no gradient of learned tensors."""
        flex, own = self._milliseconds(FLEX, direction), result.milliseconds(direction)
        if not flex or not own or (result.contestant == UNLEARNED and direction == "backward"):
            return None
        return flex / own

    def to_causal(self, result: MaskResult, direction: str) -> float | None:
        """Time of a non-empty tile over that of causal attention at the same sizes."""
        causal, own = self._milliseconds(CAUSAL, direction), result.milliseconds(direction)
        return own / self.tiles / (causal / self.causal_tiles) if causal and own and self.tiles else None

    @property
    def causal_tiles(self) -> int:
        """Non-empty tiles of causal attention over all heads."""
        side = -(-self.cell.seqlen // TILE)
        return side * (side + 1) // 2 * self.cell.heads

    def to_unlearned(self, result: MaskResult, direction: str) -> float | None:
        """Time of a backward over the same without gradients of learned tensors."""
        without, own = self._milliseconds(UNLEARNED, direction), result.milliseconds(direction)
        if not self.learns or direction != "backward" or result.contestant == UNLEARNED or not without or not own:
            return None
        return own / without

    def limit(self, result: MaskResult, direction: str, copy_gbps: float | None) -> float:
        """Most that ``to_causal`` should be."""
        limit = MAPPED if direction in result.mapped else CLOSED
        if self.scored:
            limit = max(limit, SCORED[self.cell.head_dim < 128])
        if self.pair_bytes:
            limit = max(limit, PAIRS)
            causal = self._milliseconds(CAUSAL, direction)
            if causal and copy_gbps and self.tiles:
                shortest = self.pair_bytes / (BANDWIDTH * copy_gbps * 1e6)
                limit = max(limit, shortest / self.tiles / (causal / self.causal_tiles))
        return limit

    def beyond(self, copy_gbps: float | None) -> list[str]:
        """Say which times exceed their limits."""
        lines = []
        for one in self.measured:
            for direction in DIRECTIONS:
                where = f"{self.cell.name}: {one.contestant}, {direction}"
                learned = self.to_unlearned(one, direction)
                if learned is not None:
                    most = max(LEARNED, PAIRS if self.pair_bytes else 0)
                    if learned > most:
                        lines.append(f"{where}: {learned:.2f} x without gradients of its tensors, limit {most:.2f}")
                    continue
                ratio, most = self.to_causal(one, direction), self.limit(one, direction, copy_gbps)
                if ratio is not None and ratio > most:
                    lines.append(f"{where}: {ratio:.2f} x causal per tile, limit {most:.2f}")
        return lines

    def slower(self) -> list[str]:
        """Say which calls take longer than FlexAttention's."""
        speeds = [(one, direction, self.speed(one, direction)) for one in self.measured for direction in DIRECTIONS]
        return [
            f"{self.cell.name}: {one.contestant}, {direction}: {speed:.2f} x"
            for one, direction, speed in speeds
            if speed is not None and speed < 1
        ]

    def to_dict(self, copy_gbps: float | None) -> dict[str, Any]:
        """Return it as the report holds it."""

        def of_each(figure: Callable[[MaskResult, str], float | None]) -> dict[str, dict[str, float | None]]:
            return {one.contestant: {each: figure(one, each) for each in DIRECTIONS} for one in self.measured}

        return {
            "name": self.cell.name,
            "case": self.cell.case.name,
            "seqlen": self.cell.seqlen,
            "head_dim": self.cell.head_dim,
            "heads": self.cell.heads,
            "kv_heads": self.cell.kv_heads,
            "tiles": self.tiles,
            "causal_tiles": self.causal_tiles,
            "pair_bytes": self.pair_bytes,
            "gpu": None if self.reading is None else {"sm_mhz": self.reading.sm_mhz, "watts": self.reading.watts},
            "speed": of_each(self.speed),
            "to_causal": of_each(self.to_causal),
            "to_causal_limit": of_each(lambda one, direction: self.limit(one, direction, copy_gbps)),
            "to_unlearned": of_each(self.to_unlearned),
            "results": [one.to_dict() for one in self.results],
        }


@dataclass(frozen=True)
class MaskReport:
    """A run so far. ``not_run`` names the cells for which there was no time, ``stopped`` says why it ended early."""

    rows: tuple[MaskRow, ...] = ()
    gpu: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    rounds: int = 0
    seed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    stopped: str | None = None

    @property
    def results(self) -> Iterable[tuple[MaskRow, MaskResult]]:
        """All results with their rows."""
        return ((row, one) for row in self.rows for one in row.results)

    @property
    def copy_gbps(self) -> float | None:
        """Bandwidth of a copy, GB/s."""
        return None if self.ceilings is None else self.ceilings.copy_gbps

    def mean(self, contestant: str, direction: str) -> tuple[float, float, int] | None:
        """Geometric mean, least, and number of the speeds over FlexAttention of one contestant."""
        speeds = [
            speed
            for row, one in self.results
            if one.contestant == contestant and (speed := row.speed(one, direction)) is not None
        ]
        return (statistics.geometric_mean(speeds), min(speeds), len(speeds)) if speeds else None

    @property
    def slower(self) -> list[str]:
        """Calls that take longer than FlexAttention's."""
        return [line for row in self.rows for line in row.slower()]

    @property
    def beyond(self) -> list[str]:
        """Times that exceed their limits."""
        return [line for row in self.rows for line in row.beyond(self.copy_gbps)]

    @property
    def failures(self) -> list[str]:
        """Contestants that failed, with reasons."""
        return [
            f"{row.cell.name}: {one.contestant}: {one.reason}" for row, one in self.results if one.status == "failed"
        ]

    @property
    def ok(self) -> bool:
        """Whether something was measured, and no kernel of attngen failed."""
        ours = [one for _, one in self.results if one.ours]
        failed = any(one.status == "failed" for one in ours)
        return self.stopped is None and not failed and any(one.status in ("measured", "compared") for one in ours)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        means = {
            contestant: {
                direction: dict(zip(("mean", "least", "cells"), figures, strict=True))
                for direction in DIRECTIONS
                if (figures := self.mean(contestant, direction)) is not None
            }
            for contestant in (CONSTANTS, SCALARS, FRONT_END)
        }
        return {
            "suite": "masks",
            "gpu": self.gpu,
            "versions": dict(self.versions),
            "ceilings": self.ceilings and {
                "matrix_tflops": self.ceilings.matrix_tflops, "copy_gbps": self.ceilings.copy_gbps
            },
            "rounds": self.rounds,
            "seed": self.seed,
            "seconds": dict(self.seconds),
            "means": means,
            "slower": self.slower,
            "beyond": self.beyond,
            "failures": self.failures,
            "not_run": list(self.not_run),
            "stopped": self.stopped,
            "rows": [row.to_dict(self.copy_gbps) for row in self.rows],
        }  # fmt: skip
