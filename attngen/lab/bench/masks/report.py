"""Times of the masks suite: ratios to FlexAttention, times per tile over causal's, and all of it as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attngen.lab.bench.cases import DIRECTIONS
from attngen.lab.bench.masks.cases.forms import MaskCase
from attngen.lab.bench.report import Report, Result, Row
from attngen.lab.bench.timing import Timing

#: The contenders. ``CONSTANTS`` has the sizes of a mask in its kernel, ``SCALARS`` takes them at the call;
#: ``UNLEARNED`` computes no gradient of the score's own tensors.
CONSTANTS, SCALARS, FRONT_END, UNLEARNED = "attngen", "attngen, scalars", "attngen, front end", "attngen, not learned"
FLEX, CAUSAL = "FlexAttention", "causal"

#: Libraries that take some of the cases.
CUDNN_FLEX, CUDNN_BLOCKS, FASTVIDEO, CUEQUIVARIANCE = RIVALS = (
    "cuDNN flex", "cuDNN block sparse", "FastVideo", "cuEquivariance",
)  # fmt: skip

#: Most time for a non-empty tile, over causal's: bounds in closed form, a tile map, tensors over pairs.
CLOSED, MAPPED, PAIRS = 1.25, 1.4, 1.6

#: The same for a score, at head dim 128 or more and below.
SCORED = (1.35, 1.5)

#: Fraction of the copy bandwidth at which tensors over pairs are fast enough, however cheap causal is.
BANDWIDTH = 0.8

#: Most time of a backward over the same without gradients of the mask's or score's own tensors.
LEARNED = 1.3

#: Rows and columns of a tile.
TILE = 128

#: Query heads of a call, and KV heads unless a case shares them.
HEADS = 8


@dataclass(frozen=True, slots=True)
class MaskCell:
    """A case at one size."""

    case: MaskCase
    seqlen: int
    head_dim: int
    heads: int = HEADS

    @property
    def kv_heads(self) -> int:
        """KV heads of the call."""
        return self.case.kv_heads or self.heads

    @property
    def batch(self) -> int:
        """Sequences of the call."""
        return min(self.case.rows_of_pairs or 1, self.seqlen)

    @property
    def name(self) -> str:
        """The cell in a few words, such as ``sliding window d128 8k``."""
        length = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        return f"{self.case.name} d{self.head_dim} {length}"


@dataclass(frozen=True, kw_only=True)
class MaskResult(Result):
    """Outcome for one contender in one cell.

    ``status`` may also be compared: no times were taken. ``first`` are the seconds of a process's first call with its
    gradients, compiling included, beside other compiles; ``second`` the milliseconds of the second forward pass.
    ``error`` is the largest difference from FlexAttention, relative by norm, of the output and the gradients.
    ``mapped`` holds the directions whose kernels read a tile map, ``maps`` the milliseconds that making one takes.
    """

    timings: Mapping[str, Timing] = field(default_factory=dict)
    first: float | None = None
    second: float | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    mapped: frozenset[str] = frozenset()
    maps: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, contender: str, **fields: Any) -> MaskResult:
        """A result of a contender; FlexAttention and its rivals are the peers."""
        return cls(contender, peer=contender in (FLEX, *RIVALS), **fields)

    @classmethod
    def without(cls, contender: str, reason: str, **fields: Any) -> MaskResult:
        """A result of a contender that raised: a rival need not take a case."""
        return cls.of(contender, status="unsupported" if contender in RIVALS else "failed", reason=reason, **fields)

    def time(self, direction: str) -> float | None:
        """Median milliseconds of a call in one direction."""
        timing = self.timings.get(direction)
        return None if timing is None else timing.milliseconds

    def to_dict(self) -> dict[str, Any]:
        """See ``Result``."""
        return {
            **super().to_dict(),
            "first_seconds": self.first,
            "second_milliseconds": self.second,
            **{
                direction: {
                    "milliseconds": timing.milliseconds,
                    "samples": list(timing.samples),
                    "host_bound": timing.host_bound,
                    "kernel": self.kernels.get(direction),
                    "tile_map": direction in self.mapped,
                    "map_milliseconds": self.maps.get(direction),
                }
                for direction, timing in self.timings.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class MaskRow(Row[MaskResult]):
    """One cell. ``tiles`` counts its non-empty tiles over all heads, ``pair_bytes`` the bytes of tensors over pairs in
    these. ``scored`` says whether the logits are changed, ``learns`` whether tensors take gradients, ``reads`` whether
    the mask reads tensors, which may change with every call."""

    cell: MaskCell
    tiles: int = 0
    pair_bytes: int = 0
    scored: bool = False
    learns: bool = False
    reads: bool = False

    def _time(self, contender: str, direction: str) -> float | None:
        return next((one.time(direction) for one in self.results if one.contender == contender), None)

    @property
    def measured(self) -> tuple[MaskResult, ...]:
        """Results of attngen that have times, causal's left out."""
        return tuple(one for one in self.results if not one.peer and one.contender != CAUSAL and one.timings)

    @property
    def name(self) -> str:
        """See ``Row``."""
        return self.cell.name

    @property
    def line(self) -> str:
        """See ``Row``; milliseconds, forward and backward."""
        figures = [
            f"{one.contender} " + " / ".join(f"{one.time(each):.3f}" for each in DIRECTIONS)
            for one in self.results
            if one.timings
        ]
        return f"{self.name}: {', '.join(figures) or 'nothing was measured'} ms"

    def speed(self, result: MaskResult, direction: str) -> float | None:
        """Speed over FlexAttention's; None where either has no time, or computes no gradient of learned tensors."""
        flex, own = self._time(FLEX, direction), result.time(direction)
        if not flex or not own or (result.contender == UNLEARNED and direction == "backward"):
            return None
        return flex / own

    def to_causal(self, result: MaskResult, direction: str) -> float | None:
        """Time of a non-empty tile over that of causal attention at the same sizes."""
        causal, own = self._time(CAUSAL, direction), result.time(direction)
        return own / self.tiles / (causal / self.causal_tiles) if causal and own and self.tiles else None

    @property
    def causal_tiles(self) -> int:
        """Non-empty tiles of causal attention over all heads."""
        side = -(-self.cell.seqlen // TILE)
        return side * (side + 1) // 2 * self.cell.heads

    def to_unlearned(self, result: MaskResult, direction: str) -> float | None:
        """Time of a backward over the same without gradients of learned tensors."""
        without, own = self._time(UNLEARNED, direction), result.time(direction)
        if not self.learns or direction != "backward" or result.contender == UNLEARNED or not without or not own:
            return None
        return own / without

    def limit(self, result: MaskResult, direction: str, copy_gbps: float | None) -> float:
        """Most that ``to_causal`` should be."""
        limit = MAPPED if direction in result.mapped else CLOSED
        if self.scored:
            limit = max(limit, SCORED[self.cell.head_dim < 128])
        if self.pair_bytes:
            limit = max(limit, PAIRS)
            causal = self._time(CAUSAL, direction)
            if causal and copy_gbps and self.tiles:
                shortest = self.pair_bytes / (BANDWIDTH * copy_gbps * 1e6)
                limit = max(limit, shortest / self.tiles / (causal / self.causal_tiles))
        return limit

    def beyond(self, copy_gbps: float | None) -> list[str]:
        """Times that exceed their limits, a line each."""
        lines = []
        for one in self.measured:
            for direction in DIRECTIONS:
                where = f"{self.cell.name}: {one.contender}, {direction}"
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
        """Calls that take longer than FlexAttention's, a line each."""
        speeds = [(one, direction, self.speed(one, direction)) for one in self.measured for direction in DIRECTIONS]
        return [
            f"{self.cell.name}: {one.contender}, {direction}: {speed:.2f} x"
            for one, direction, speed in speeds
            if speed is not None and speed < 1
        ]

    def figures(self, copy_gbps: float | None) -> dict[str, Any]:
        """The ratios and limits of the row in the document."""

        def of_each(figure: Callable[[MaskResult, str], float | None]) -> dict[str, dict[str, float | None]]:
            return {one.contender: {each: figure(one, each) for each in DIRECTIONS} for one in self.measured}

        return {
            "case": self.cell.case.name,
            "seqlen": self.cell.seqlen,
            "head_dim": self.cell.head_dim,
            "heads": self.cell.heads,
            "kv_heads": self.cell.kv_heads,
            "batch": self.cell.batch,
            "tiles": self.tiles,
            "causal_tiles": self.causal_tiles,
            "pair_bytes": self.pair_bytes,
            "mask_reads_tensors": self.reads,
            "speed": of_each(self.speed),
            "to_causal": of_each(self.to_causal),
            "to_causal_limit": of_each(lambda one, direction: self.limit(one, direction, copy_gbps)),
            "to_unlearned": of_each(self.to_unlearned),
        }

    def result_to_dict(self, result: MaskResult) -> dict[str, Any]:
        """See ``Row``."""
        return result.to_dict()


@dataclass(frozen=True, kw_only=True)
class MaskReport(Report[MaskRow]):
    """A run of the masks suite so far.

    ``seconds`` are those of the run, and of its part before the first measurement; ``not_run`` names the cells for
    which there was no time.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()

    @property
    def _pairs(self) -> Iterable[tuple[MaskRow, MaskResult]]:
        return ((row, one) for row in self.rows for one in row.results)

    @property
    def copy_gbps(self) -> float | None:
        """Bandwidth of a copy, GB/s."""
        return None if self.ceilings is None else self.ceilings.copy_gbps

    def mean(self, contender: str, direction: str) -> tuple[float, float, int] | None:
        """Geometric mean, least, and number of the speeds over FlexAttention of one contender."""
        speeds = [
            speed
            for row, one in self._pairs
            if one.contender == contender and (speed := row.speed(one, direction)) is not None
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
    def failed(self) -> list[str]:
        """Contenders that failed, with reasons."""
        return [f"{row.name}: {one.contender}: {one.reason}" for row, one in self._pairs if one.status == "failed"]

    @property
    def ok(self) -> bool:
        """See ``Report``; a cell that was compared counts without times."""
        statuses = {one.status for _, one in self._pairs if not one.peer}
        return self.stopped is None and "failed" not in statuses and bool(statuses & {"measured", "compared"})

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        document = super().to_dict()
        means = {
            contender: {
                direction: dict(zip(("mean", "least", "cells"), figures, strict=True))
                for direction in DIRECTIONS
                if (figures := self.mean(contender, direction)) is not None
            }
            for contender in (CONSTANTS, SCALARS, FRONT_END)
        }
        return {
            **document,
            "suite": "masks",
            "seconds": dict(self.seconds),
            "means": means,
            "slower": self.slower,
            "beyond": self.beyond,
            "failures": self.failed,
            "not_run": list(self.not_run),
            "rows": [
                {**as_dict, **row.figures(self.copy_gbps)}
                for as_dict, row in zip(document["rows"], self.rows, strict=True)
            ],
        }
