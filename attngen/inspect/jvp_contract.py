"""The numerical contract of a forward-mode derivative: its results against the tangents of the float64 reference.

Check 1 with the factor of gradients: the largest error is at most three times that of plain PyTorch in the same dtype,
plus the rounding of the result. The root mean square error is at most 1.2 times that of plain PyTorch, whose squares
count twice: it rounds P (dS - D), where a kernel rounds P (dS - c), and c may be as far from D as one dS is. Check 5: a
row that sees no key has an output and a tangent of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.inspect.baseline import plain_tangents
from attngen.inspect.contract import SCORED_MAX_ERROR_FACTOR, Deviation, Expected, exact_float32, expected, largest
from attngen.runtime.arguments.checked import Call
from attngen.runtime.autograd.derivatives import Plain
from attngen.runtime.launch.gradients import GradientBuffers

_FLOAT32_UNIT = 2.0**-23
#: By how many of these a tangent may be off in float32: P, dS, their product and its sum are rounded.
_UNITS = 8
#: Relative error of the tangent of a log-sum-exp, a sum of products in float32 of either sign.
_LSE_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class ExpectedTangents:
    """Tangents of q, k and v, the expected results, and those of plain PyTorch."""

    directions: tuple[Tensor, Tensor, Tensor]
    primal: Expected
    dout: Tensor  # float64
    dlse: Tensor  # float64
    plain_dout: Tensor
    plain_dlse: Tensor


def expected_tangents(
    call: Call, q: Tensor, k: Tensor, v: Tensor, moves: Sequence[bool], generator: torch.Generator
) -> ExpectedTangents:
    """Compute the expected results, for random tangents of those of q, k and v that ``moves`` says. Raises IndexError
    as the reference does."""
    given = q, k, v
    made = []
    for tensor, moved in zip(given, moves, strict=True):
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
        drawn = (drawn * moved).to(tensor.device, tensor.dtype)
        made.append(torch.where(tensor.isnan(), tensor, drawn))  # what lies after the end is as in the tensor
    directions = made[0], made[1], made[2]
    primal = expected(call, q, k, v)
    with exact_float32():
        doubles = [tensor.double() for tensor in given]
        dout, dlse = Plain.of_call(call, doubles[0]).tangents(doubles, directions, torch.float64)
        plain_dout, plain_dlse = plain_tangents(call, given, directions)
    return ExpectedTangents(directions, primal, dout, dlse, plain_dout, plain_dlse)


def tangent_deviation(call: Call, buffers: GradientBuffers, wanted: ExpectedTangents) -> Deviation:
    """Compare the results of one derivative with the expected ones; the one nearest to its limit counts."""
    by_row = (lambda t: t.transpose(0, 1)) if call.ragged else (lambda t: t.transpose(1, 2))
    primal = wanted.primal
    live = primal.rows & ~primal.dead
    pairs = []
    for result, truth, plain in (
        (buffers.out, primal.out, primal.plain_out), (buffers.dout, wanted.dout, wanted.plain_dout),
    ):  # fmt: skip
        actual, exact, other = (by_row(t)[live].double() for t in (result, truth, plain))
        rounding = torch.finfo(result.dtype).eps + _UNITS * _FLOAT32_UNIT * (1 + primal.logit)
        peer = torch.where(other.isnan(), 0.0, other - exact)  # torch's derivatives: infinity times a tangent of 0
        allowed = SCORED_MAX_ERROR_FACTOR * largest(peer.abs()) + rounding * largest(exact.abs())
        pairs.append((actual - exact, allowed, peer, exact))
    # what is left of values whose weights cancel: D - c in float32, and the least numbers of the dtype of P (dS - c)
    info = torch.finfo(buffers.dout.dtype)
    weight = _UNITS * _FLOAT32_UNIT * largest(wanted.dlse[live].abs()) + 2 * info.tiny * info.eps
    values = 1 + largest(buffers.v[torch.isfinite(buffers.v)].abs())
    pairs[1] = (pairs[1][0], pairs[1][1] + weight * values, *pairs[1][2:])
    error, allowed, peer, exact = max(pairs, key=lambda pair: _share(largest(pair[0].abs()), pair[1]))
    moved = pairs[1]
    sums = live & torch.isfinite(primal.lse)
    assert buffers.dlse is not None
    of_sums = (buffers.dlse, wanted.dlse), (buffers.lse, primal.lse)
    lse_error = max(largest((result[sums].double() - truth[sums]).abs()) for result, truth in of_sums)
    plain_error = max(
        largest((result[sums].double() - truth[sums]).abs())
        for result, truth in ((wanted.plain_dlse, wanted.dlse), (primal.plain_lse, primal.lse))
    )
    size = 1 + max(largest(truth[sums].abs()) for _, truth in of_sums)
    return Deviation(
        max_error=largest(error.abs()),
        max_allowed=allowed,
        lse_error=lse_error,
        lse_allowed=_LSE_TOLERANCE * size * (1 + primal.logit) + SCORED_MAX_ERROR_FACTOR * plain_error,
        squares=float(moved[0].square().sum()),
        peer_squares=2 * float(moved[2].square().sum()),
        truth_squares=(_UNITS + primal.logit**2) * float(moved[3].square().sum()),
        elements=moved[0].numel(),
        dead_rows=int(primal.dead.sum()),
        wrong=_inexact(by_row(buffers.out), by_row(buffers.dout), live, primal.dead),
    )


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed else math.inf if error else 0.0


def _inexact(out: Tensor, dout: Tensor, live: Tensor, dead: Tensor) -> tuple[str, ...]:
    """The faults where results must be exact."""
    counts = {}
    for name, rows in (("outputs", out), ("tangents", dout)):
        counts[f"{name} that are not finite"] = ~torch.isfinite(rows[live])
        counts[f"elements of {name} of dead rows that are not 0"] = rows[dead] != 0
    return tuple(f"{int(wrong.sum())} {what}" for what, wrong in counts.items() if wrong.any())
