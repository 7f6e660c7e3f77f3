"""The numerical contract of a backward kernel: its gradients against autograd of the float64 reference.

Checks 1 and 2 with the factor of gradients: the largest error is at most three times that of plain PyTorch's autograd
in the same dtype, plus the rounding of the result; for a variant's own tensors, twenty times, plus six times the root
mean square of what rounding all terms to the dtype changes. With a custom score, the arithmetic of a fused backward is
a second yardstick, as in ``contract``. The root mean square error is at most 1.2 times that of plain PyTorch. Check 5:
a row that sees no key has a dQ of exactly 0. Rows of no sequence, and keys after the used ones, have gradients of
exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attngen.inspect.baseline import (
    Fused,
    fused,
    fused_gradients,
    gradients_of,
    plain_gradients,
    roundings_of_terms,
)
from attngen.inspect.contract import (
    DRAWS,
    SCORED_MAX_ERROR_FACTOR,
    Deviation,
    exact_float32,
    largest,
    largest_logit,
    measures,
    rows_without_keys,
)
from attngen.runtime.arguments.checked import Call
from attngen.runtime.launch.gradients import GradientBuffers, differentiable
from attngen.runtime.reference.eager import lengths, reference

#: An element of a variant's own tensor sums over all pairs that read it, and so over the roundings of O and of the
#: log-sum-exp, which plain PyTorch does not take from memory.
OWN_MAX_ERROR_FACTOR = 20.0
#: Largest error of a sum, in units of the root mean square that the rounding of its terms makes.
_DEVIATIONS = 6.0

_FLOAT32_UNIT = 2.0**-23
#: By how many of these a gradient may be off in float32: P, dP, D and the product are rounded.
_UNITS = 4
#: And by how many more per square root of the number of terms, which kernels add up one after the other: each partial
#: sum is rounded by half a unit at most, at random, so the errors grow with the root. Libraries add up in parts, with a
#: smaller error.
_UNITS_OF_SUMS = 0.2


@dataclass(frozen=True, slots=True)
class ExpectedGradients:
    """Inputs of a backward, its expected gradients, and those of plain PyTorch: by name, in float64."""

    out: Tensor  # of q's dtype, as the forward stores it
    lse: Tensor  # float32
    dout: Tensor
    dlse: Tensor
    truth: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    dead: Tensor  # as lse: rows that see no key
    row_errors: Mapping[str, float]  # what gradients lose with D = rowsum(dO * O)
    fused: tuple[Mapping[str, Tensor], ...] = ()  # as ``plain``, of a variant with a score
    forwards: tuple[Fused, ...] = ()  # of the same draws
    roundings: Mapping[str, float] = field(default_factory=dict)  # of terms, in gradients of the variant's tensors

    def of_keys(self) -> ExpectedGradients:
        """The same where v is the first columns of k, whose gradient then has that of v."""
        fused = tuple(map(_with_values, self.fused))
        return replace(self, truth=_with_values(self.truth), plain=_with_values(self.plain), fused=fused)


def _with_values(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of which that of k has that of v, too, in its first columns."""
    both = gradients["k"].clone()
    both[..., : gradients["v"].shape[-1]] += gradients["v"]
    return {name: both if name == "k" else gradient for name, gradient in gradients.items() if name != "v"}


def expected_gradients(call: Call, q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> ExpectedGradients:
    """Compute the expected gradients, for random gradients of the results. Raises IndexError as the reference does.

    The gradients of dead rows' outputs are large: they must not matter.
    """
    names = differentiable(call)
    with torch.enable_grad(), exact_float32():
        given = zip("qkv", (q, k, v), strict=True)
        leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in given}
        own = {n: t.detach().double() if t.is_floating_point() else t for n, t in call.tensors.items()}
        leaves |= {name: own[name].requires_grad_() for name in names}
        precise = replace(call, tensors=own)
        out, lse = reference(precise, leaves["q"], leaves["k"], leaves["v"], compute=torch.float64)
        bare = lse == -math.inf  # nothing to differentiate
        dead = bare if call.variant.sink is None else rows_without_keys(call, q, k, v)
        dout = torch.randn(out.shape, generator=generator, dtype=torch.float32, device="cpu").to(q.device, q.dtype)
        dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float32, device="cpu").to(q.device)
        loud = dead.transpose(0, 1) if call.layout == "varlen" else dead.transpose(1, 2)
        dout = torch.where(loud[..., None], 1e4, dout.float()).to(q.dtype)
        finite = torch.where(bare, 0.0, lse)
        above = (dout.double(), torch.where(bare, 0.0, dlse).double())
        gradients = gradients_of((out, finite), list(leaves.values()), above, keep=True)
        truth = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }
        plain = plain_gradients(call, q, k, v, dout, dlse, names)
        stored = out.detach().to(q.dtype).contiguous()
        row_errors = _row_errors(call, leaves, finite, dout, out.detach(), stored, loud)
        stored_lse = lse.detach().float().contiguous()
        taken = {"q": q, "k": k, "v": v, "out": stored, "lse": stored_lse}
        draws = range(0 if call.variant.score is None else DRAWS)
        with torch.no_grad():
            forwards = tuple(fused(call, q, k, v, draw) for draw in draws)
            backwards = tuple(fused_gradients(call, taken, dout, dlse, names, draw) for draw in draws)
            roundings = roundings_of_terms(call, taken, dout, dlse, names)
    return ExpectedGradients(
        stored, stored_lse, dout, dlse, truth, plain, dead, row_errors, backwards, forwards, roundings,
    )  # fmt: skip


def _row_errors(
    call: Call, leaves: Mapping[str, Tensor], lse: Tensor, dout: Tensor, out: Tensor, stored: Tensor, dead: Tensor
) -> dict[str, float]:
    """Return the errors of gradients that come from D as a sum of products with O as ``stored``.

    Plain PyTorch sums P dP instead, whose errors cancel those of dP. In 16 bits its own rounding errors are larger,
    except where probabilities do not add up to 1, so that D is left of a sum whose terms it rounds alike, and except
    for few elements, such as the sink of one head, whose error may happen to be small. D enters like the gradient of
    the log-sum-exp.
    """
    if dout.dtype == torch.float32:
        size = max(largest(t[torch.isfinite(t)].abs()) for t in (leaves["q"], leaves["k"])) * call.scale
        terms = (dout.double() * out)[~dead]
        return dict.fromkeys("qk", 4 * _FLOAT32_UNIT * largest(terms.abs().sum(-1)) * size)
    if call.variant.sink is None and not call.variant.dropout:
        return {}
    lost = ((stored.double() - out) * dout.double()).sum(-1).masked_fill(dead, 0.0)
    lost = lost.transpose(0, 1) if call.layout == "varlen" else lost.transpose(1, 2)
    concerned = {name: leaf for name, leaf in leaves.items() if name != "v"}
    gradients = gradients_of((lse,), list(concerned.values()), (lost,))
    return {name: 0.0 if g is None else largest(g.abs()) for name, g in zip(concerned, gradients, strict=True)}


def gradient_deviation(call: Call, buffers: GradientBuffers, wanted: ExpectedGradients) -> Deviation:
    """Compare the gradients of one backward with the expected ones; the one nearest to its limit counts."""
    results = {"q": buffers.dq, "k": buffers.dk, "v": buffers.dv, **buffers.gradients}
    results = {name: gradient for name, gradient in results.items() if name in wanted.truth}
    worst = (0.0, 1.0)
    squares = peer_squares = truth_squares = 0.0
    elements = 0
    # Probabilities are computed from a float32 log-sum-exp, whose rounding is an error of the exponent.
    exponent = 2 * _FLOAT32_UNIT * largest(wanted.lse[torch.isfinite(wanted.lse)].abs())
    logit = largest_logit(wanted.forwards)
    plain = [wanted.plain] if measures(wanted.forwards, buffers.q.dtype) else []
    sums = units_of_sums(call)
    products = _errors_of_products(call, wanted)
    for name, gradient in results.items():
        truth = wanted.truth[name]
        error = (gradient.double() - truth).abs()
        peers = [one[name].double() - truth for one in (*wanted.fused, *plain)]
        factor, units = (SCORED_MAX_ERROR_FACTOR, _UNITS) if name in "qkv" else (OWN_MAX_ERROR_FACTOR, 64)
        rounding = torch.finfo(gradient.dtype).eps + (units + sums) * _FLOAT32_UNIT + exponent
        allowed = (
            factor * max(largest(one.abs()) for one in peers)
            + rounding * largest(truth.abs())
            + wanted.row_errors.get(name, 0.0)
            + (0.0 if name in "qkv" else products + _DEVIATIONS * wanted.roundings.get(name, 0.0))
        )
        pair = (largest(error), allowed)
        if pair[0] * worst[1] >= worst[0] * pair[1]:
            worst = pair
        if name in "qkv":
            squares += float(error.square().sum())
            peer_squares += sum(float(one.square().sum()) for one in peers)
            truth_squares += (_UNITS**2 + logit**2 + sums**2) * float(truth.square().sum())
            elements += error.numel()
    return Deviation(
        max_error=worst[0],
        max_allowed=worst[1],
        lse_error=0.0,
        lse_allowed=0.0,
        squares=squares,
        peer_squares=peer_squares,
        truth_squares=truth_squares,
        elements=elements,
        dead_rows=int(wanted.dead.sum()),
        wrong=_inexact(call, results, wanted.dead),
    )


def _errors_of_products(call: Call, wanted: ExpectedGradients) -> float:
    """Bound of the error of the sum of dP - D over the rows of all heads of a group, where the exact sum is 0.

    That is so for the bias of a single key. Matrix products round toward zero once for each 16 columns, so that the
    errors of dP have one sign and add up.
    """
    terms = (wanted.dout.double() * wanted.out.double()).abs().sum(-1)
    rows = max((rows for rows, *_ in lengths(call)), default=0) * call.heads // call.kv_heads
    return rows * -(-call.head_dim_v // 16) * _FLOAT32_UNIT * largest(terms)


def units_of_sums(call: Call) -> float:
    """Units of float32 by which the longest sum of a gradient may be off: over keys, or over the rows of all
    heads of a group."""
    group = call.heads // call.kv_heads
    terms = max((max(group * rows, keys) for rows, keys, *_ in lengths(call)), default=0)
    return _UNITS_OF_SUMS * math.sqrt(terms)


def _inexact(call: Call, results: Mapping[str, Tensor], dead: Tensor) -> tuple[str, ...]:
    """The faults where gradients must be exact."""
    by_row = results["q"].transpose(1, 2) if call.order == "bhsd" else results["q"]
    rows = dead.transpose(0, 1) if call.layout == "varlen" else dead.transpose(1, 2)
    counts = {
        f"gradients of {name} that are not finite": ~torch.isfinite(gradient) for name, gradient in results.items()
    }
    counts["elements of dQ of dead rows that are not 0"] = by_row[rows] != 0
    unused = _unused_keys(call, results["k"].device)
    for name in sorted(results.keys() & {"k", "v"}):
        by_key = results[name].transpose(1, 2) if call.order == "bhsd" else results[name]
        counts[f"gradients of unused keys in d{name.upper()} that are not 0"] = by_key[unused] != 0
    return tuple(f"{int(wrong.sum())} {what}" for what, wrong in counts.items() if wrong.any())


def _unused_keys(call: Call, device: torch.device) -> Tensor:
    """The rows of k that are not a key of any sequence, or come after its used ones."""
    shape = (call.total_k,) if call.layout == "varlen" else (call.batch, call.seqlen_k)
    unused = torch.ones(shape, dtype=torch.bool, device=device)
    for b, (_, keys, _, k_offset) in enumerate(lengths(call)):
        if call.layout == "varlen":
            unused[k_offset : k_offset + keys] = False
        else:
            unused[b, :keys] = False
    return unused
