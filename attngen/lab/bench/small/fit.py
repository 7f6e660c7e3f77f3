"""The constants that predictions are made from, fitted to measured times by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngen.runtime.arguments.checked import Call
from attngen.runtime.geometry.prediction import Card, predict
from attngen.runtime.kernels.module import Kernel
from attngen.schema.measured import KeysOfTile, NumberOfConsumers
from attngen.schema.measured_times import TileTimes, measured_times

#: Times that the path is followed with the constants of the round before.
_ROUNDS = 8


@dataclass(frozen=True)
class Timed:
    """A kernel that ran a call, and the microseconds that it took."""

    kernel: Kernel
    call: Call
    microseconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Nanoseconds of a launch, those of tiles, and relative errors: root mean square and largest."""

    launch_ns: float
    rows: tuple[TileTimes, ...]
    error: float
    largest: float


def key_of(kernel: Kernel) -> tuple[int, int, int]:
    """Key of a row of the table: consumers, keys of a tile, columns."""
    manifest = kernel.manifest
    columns = max(row["width"] for name in ("columns_qk", "columns_v") for row in manifest[name])
    return manifest["structure"]["consumers"], kernel.tile_n, columns


def fit(timed: Sequence[Timed], card: Card) -> Fit:
    """Fit the constants of all kernels that were timed, on a card.

    The path of the block that finishes last depends on the constants, and is followed again with each new set of them.
    """
    keys = sorted({key_of(one.kernel) for one in timed})
    place = {key: 1 + 2 * i for i, key in enumerate(keys)}
    constants = torch.zeros(1 + 2 * len(keys), dtype=torch.float64, device="cpu")
    constants[0] = measured_times().launch_ns
    for one in timed:  # initial values
        constants[place[key_of(one.kernel)]], constants[place[key_of(one.kernel)] + 1] = one.kernel.times[1:]
    target = torch.ones(len(timed), dtype=torch.float64, device="cpu")
    for _ in range(_ROUNDS):
        rows = torch.zeros(len(timed), len(constants), dtype=torch.float64, device="cpu")
        for row, one in zip(rows, timed, strict=True):
            at = place[key_of(one.kernel)]
            prediction = predict(one.kernel, one.call, card, (constants[0].item(), *constants[at : at + 2].tolist()))
            assert prediction is not None
            row[0], row[at], row[at + 1] = 1.0, *prediction.path
            row /= 1e3 * one.microseconds
        constants = (constants + _solved(rows, target)) / 2  # halfway, since the paths change with it
    errors = rows @ constants - 1
    table = tuple(_row(key, *constants[place[key] : place[key] + 2].tolist()) for key in keys)
    return Fit(round(float(constants[0]), 1), table, float(errors.square().mean().sqrt()), float(errors.abs().max()))


def _row(key: tuple[int, int, int], tile: float, step: float) -> TileTimes:
    consumers, keys, columns = key
    return TileTimes(
        columns=columns, tile=KeysOfTile(n=keys), warps=NumberOfConsumers(consumer=consumers),
        work_tile_ns=round(tile, 1), step_ns=round(step, 1),
    )  # fmt: skip


def _solved(rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The least squares solution without negative numbers: those that would be negative are 0."""
    free = torch.ones(rows.shape[1], dtype=torch.bool, device="cpu")
    while True:
        solution = torch.zeros(rows.shape[1], dtype=rows.dtype, device="cpu")
        solution[free] = torch.linalg.lstsq(rows[:, free], target[:, None], driver="gelsd").solution[:, 0]
        if bool((solution >= 0).all()):
            return solution
        free &= solution > 0
