"""The numerical contract of a kernel: how far from the float64 reference it may be, and what must be exact.

Check 1: the largest error is at most twice that of plain PyTorch in the same dtype (three times with a custom score),
plus the rounding of the output and of exp2. A custom score can make logits so large that plain PyTorch, which rounds
them to 16 bits, measures nothing or overflows; there, the arithmetic of a fused kernel is a second yardstick. It also
is for quantized tensors, whose largest probability is a power of two in plain PyTorch and seldom in a kernel. In
float32, libraries add up in parts, with a smaller error than kernels, which add one product after the other: there,
with a score or without, logits may have the usual rounding error of their size. Check 2: the root mean square error is
at most 1.2 times that of SDPA, or of plain PyTorch where SDPA has no kernel; with a score, of all yardsticks together.
Checks 3 and 4: nothing but dead rows is infinite, nothing is NaN, and a dead row, which sees no key, is exactly 0 with
a log-sum-exp of exactly −inf, or of its sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attngen.inspect.baseline import Fused, fused, plain, sdpa
from attngen.runtime.arguments.checked import Call
from attngen.runtime.reference.eager import lengths, reference

MAX_ERROR_FACTOR, SCORED_MAX_ERROR_FACTOR = 2.0, 3.0
RMSE_FACTOR = 1.2

#: The accuracy of float32 arithmetic itself: exp2 is approximate (PTX ISA, ex2.approx.f32: 2 units in the last place).
_FLOAT32_UNIT = 2.0**-23

#: Number of times that a score is computed as in fused kernels, each time with other rounding errors.
DRAWS = 2

#: Limit of a logit's change by rounding to the dtype, beyond which plain PyTorch is not a yardstick.
_LOGIT_ROUNDING = 1 / 16

#: Relative error of a log-sum-exp that float32 accumulation of exact products, exp2 and log2 explains.
LSE_TOLERANCE = 2e-5
#: The same for operands of 8 bits, whose products Hopper adds up with about 13 bits after the leading one of the
#: largest (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
QUANTIZED_LSE_TOLERANCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected results of a call, and those of the yardsticks. Rows of no sequence are not among ``rows``."""

    out: Tensor  # float64
    lse: Tensor  # float64
    plain_out: Tensor
    plain_lse: Tensor
    peer_out: Tensor | None  # SDPA's
    rows: Tensor  # bool, as lse: rows that some sequence has
    fused: tuple[Fused, ...] = ()  # of a variant with a score, or of quantized tensors
    blind: Tensor | None = None  # bool, as lse: rows that see no key; None where their log-sum-exp tells, as it is −inf
    coarse: bool = False  # products are of 8 bits
    max_logits: Tensor | None = None  # float64, as lse: the largest logits, if they are a result
    logit: float = 0.0  # the largest that matters, with a score or in float32: its rounding is an error of an exponent

    @property
    def dead(self) -> Tensor:
        """Rows of sequences that see no key."""
        return self.rows & (self.lse == -math.inf if self.blind is None else self.blind)


def expected(call: Call, q: Tensor, k: Tensor, v: Tensor, probabilities: torch.dtype | None = None) -> Expected:
    """Compute the reference and the yardsticks; ``probabilities`` of quantized tensors have 8 bits, and so have
    products, unless a dtype is given. Raises IndexError for a load out of extent that nothing guards."""
    with torch.no_grad(), exact_float32():
        out, lse = reference(call, q, k, v, compute=torch.float64)
        max_logits = None
        if call.variant.max_logits:
            lse, max_logits = lse.unbind(-1)
            call = replace(call, variant=call.variant.without_max_logits())
        plain_out, plain_lse = plain(call, q, k, v, probabilities)
        blind = None if call.variant.sink is None else rows_without_keys(call, q, k, v)
        rounds_logits = call.variant.score is not None or call.descales
        draws = tuple(fused(call, q, k, v, draw, probabilities) for draw in range(DRAWS)) if rounds_logits else ()
        rounds = draws or ((fused(call, q, k, v, 0),) if q.dtype == torch.float32 else ())
        peer = sdpa(call, q, k, v)
        coarse = bool(call.descales) and probabilities is None
        return Expected(
            out, lse, plain_out, plain_lse, peer, _rows(call, lse), draws, blind, coarse, max_logits,
            largest_logit(rounds),
        )  # fmt: skip


def rows_without_keys(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rows that see no key, in the shape of the log-sum-exp, by a reference without the sink."""
    with torch.no_grad():
        bare = replace(call, variant=replace(call.variant, sink=None, dropout=False))
        return reference(bare, q.detach(), k.detach(), v.detach(), compute=torch.float64)[1] == -math.inf


class exact_float32:  # noqa: N801 (reads as a statement)
    """Inside it, plain PyTorch's float32 products round to float32, not to TF32."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before


def _rows(call: Call, lse: Tensor) -> Tensor:
    rows = torch.ones_like(lse, dtype=torch.bool)
    if call.layout == "varlen":
        rows[:, sum(length for length, *_ in lengths(call)) :] = False
    return rows


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation of one call from the reference. ``wrong`` lists faults that no tolerance covers.

    Sums of squares and ``elements`` are kept separately, so that a kernel's rmse is that of all its calls together.
    """

    max_error: float
    max_allowed: float
    lse_error: float
    lse_allowed: float
    squares: float
    peer_squares: float
    truth_squares: float
    elements: int
    dead_rows: int
    wrong: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the call meets check 1, and is exact where it must be."""
        return not self.wrong and self.max_error <= self.max_allowed and self.lse_error <= self.lse_allowed


def deviation(call: Call, out: Tensor, lse: Tensor, wanted: Expected) -> Deviation:
    """Compare the results of a call with the expected ones; those over pages as the rows of all sequences."""
    max_logits = None
    if wanted.max_logits is not None:
        lse, max_logits = lse.unbind(-1)
    if not call.variant.has_lse:
        lse = wanted.lse.float()  # there is none to compare
    by_row = (lambda t: t.transpose(0, 1)) if call.ragged else (lambda t: t.transpose(1, 2))
    dead = wanted.dead
    live = wanted.rows & ~dead
    summed = wanted.rows & (wanted.lse != -math.inf)
    actual, truth = by_row(out)[live].double(), by_row(wanted.out)[live]
    peer = wanted.plain_out if wanted.peer_out is None else wanted.peer_out
    draws = [by_row(one.out)[live].double() - truth for one in wanted.fused]
    peers = draws + ([by_row(peer)[live].double() - truth] if measures(wanted.fused, out.dtype) else [])
    limits = draws + ([by_row(wanted.plain_out)[live].double() - truth] if measures(wanted.fused, out.dtype) else [])
    error = (actual - truth).abs()
    factor = MAX_ERROR_FACTOR if call.variant.score is None else SCORED_MAX_ERROR_FACTOR
    exponent = wanted.logit
    rounding = torch.finfo(out.dtype).eps + 2 * _FLOAT32_UNIT * (1 + exponent)
    lse_error = (lse[summed].double() - wanted.lse[summed]).abs()
    # The functions of a score may be approximate.
    lse_errors = [largest((one.lse[summed].double() - wanted.lse[summed]).abs()) for one in wanted.fused]
    tolerance = QUANTIZED_LSE_TOLERANCE if wanted.coarse else LSE_TOLERANCE
    lse_allowed = tolerance * (1 + largest(wanted.lse[summed].abs())) + factor * max(lse_errors, default=0.0)
    return Deviation(
        max_error=largest(error),
        max_allowed=factor * max(largest(limit.abs()) for limit in limits) + rounding * largest(truth.abs()),
        lse_error=largest(lse_error),
        lse_allowed=lse_allowed,
        squares=float(error.square().sum()),
        peer_squares=sum(float(one.square().sum()) for one in peers),
        truth_squares=(1 + exponent**2) * float(truth.square().sum()),
        elements=error.numel(),
        dead_rows=int(dead.sum()),
        wrong=(*_inexact(by_row(out), lse, dead, live, summed), *_wrong_max_logits(max_logits, wanted, lse_allowed)),
    )


def _wrong_max_logits(actual: Tensor | None, wanted: Expected, allowed: float) -> tuple[str, ...]:
    """The fault of largest logits that are further from the reference's than a log-sum-exp may be, or none."""
    if actual is None or wanted.max_logits is None:
        return ()
    one, other = actual[wanted.rows].double(), wanted.max_logits[wanted.rows]
    error = largest(torch.where(one == other, 0.0, (one - other).abs()))  # both may be -inf
    return (f"the largest logit of a row is off by {error:.3g}, of {allowed:.3g}",) if error > allowed else ()


def largest_logit(draws: Sequence[Fused]) -> float:
    """Return the largest scored logit that matters, whose rounding in float32 is an error of an exponent."""
    return max((one.logits for one in draws), default=0.0)


def measures(draws: Sequence[Fused], dtype: torch.dtype) -> bool:
    """Whether plain PyTorch is a yardstick: rounding to the dtype changes its logits little."""
    return torch.finfo(dtype).eps / 2 * largest_logit(draws) <= _LOGIT_ROUNDING


def largest(values: Tensor) -> float:
    """Return the largest value; infinity if one is NaN, so that it exceeds every limit."""
    return math.inf if values.isnan().any() else float(values.max()) if values.numel() else 0.0


def _inexact(out: Tensor, lse: Tensor, dead: Tensor, live: Tensor, summed: Tensor) -> tuple[str, ...]:
    """The faults where results must be exact."""
    counts = {
        "rows that are not finite": ~torch.isfinite(out[live]).all(dim=-1),
        "log-sum-exps that are not finite": ~torch.isfinite(lse[summed]),
        "dead rows that are not 0": (out[dead] != 0).any(dim=-1),
        "dead rows whose log-sum-exp is not -inf": lse[dead & ~summed] != -math.inf,
    }
    return tuple(f"{int(rows.sum())} {what}" for what, rows in counts.items() if rows.any())


@dataclass
class Tally:
    """The deviations of all calls of one kernel."""

    deviations: list[Deviation] = field(default_factory=list)

    @property
    def rmse(self) -> float:
        """Root mean square error over all calls."""
        return self._root_mean("squares")

    @property
    def rmse_allowed(self) -> float:
        """The limit of check 2, plus the accuracy of float32 arithmetic, which matters for float32 kernels only."""
        return RMSE_FACTOR * self._root_mean("peer_squares") + _FLOAT32_UNIT * self._root_mean("truth_squares")

    def _root_mean(self, squares: str) -> float:
        count = sum(d.elements for d in self.deviations)
        return math.sqrt(sum(getattr(d, squares) for d in self.deviations) / count) if count else 0.0

    @property
    def worst(self) -> Deviation | None:
        """The call whose largest error comes nearest to its limit, or exceeds it most."""
        return max(self.deviations, key=lambda d: d.max_error / (d.max_allowed or 1e-300), default=None)

    @property
    def dead_rows(self) -> int:
        """Number of dead rows in all calls."""
        return sum(d.dead_rows for d in self.deviations)

    @property
    def ok(self) -> bool:
        """Whether every call is as it must be, and all together meet check 2."""
        return all(d.ok for d in self.deviations) and self.rmse <= self.rmse_allowed
