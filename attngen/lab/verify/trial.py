"""One kernel on all of its cases: fresh inputs, poisoned results, and the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from attngen.dtypes import QUANTIZED_DTYPES
from attngen.errors import AttngenError
from attngen.inspect.cases import Case, cases_of
from attngen.inspect.contract import Deviation, Expected, Tally, deviation, expected
from attngen.inspect.gradient_contract import expected_gradients, gradient_deviation
from attngen.inspect.jvp_contract import expected_tangents, tangent_deviation
from attngen.lab.verify.inputs import Element, Inputs, make_inputs
from attngen.lab.verify.poison import poisoned, poisoned_gradients, poisoned_tangents
from attngen.lang.variant import Bound, Variant
from attngen.runtime.arguments import debug
from attngen.runtime.arguments.checked import TORCH_DTYPES, Call
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.launch.gradients import GradientBuffers
from attngen.runtime.launch.pinned import Buffers
from attngen.runtime.launch.prepared_jvp import tangents_of

#: Runs one kernel, of the forward or of the backward, on one call; returns when the results are there or on their way.
Launch = Callable[[Call, Buffers], None]
GradientLaunch = Callable[[Call, GradientBuffers], None]
#: Runs one launch, by its name, of a forward-mode derivative.
TangentLaunch = Callable[[Call, GradientBuffers, str], None]

#: Factors by which integer tensors without a declared range are narrowed, step by step, until no index leaves its
#: extent.
_CALM = (1.0, 0.5, 0.0)


_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case: a deviation, or the reason why there is none."""

    case: str
    seed: int
    deviation: Deviation | None = None
    error: str | None = None  # the kernel failed
    broken: bool = False  # the process cannot be used any more: after a fault, every later call of CUDA fails
    skipped: str | None = None  # the case is not a legal call of this variant

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as one case can tell."""
        return self.error is None and (self.deviation is None or self.deviation.ok)

    def describe(self) -> str:
        """The faults in words."""
        if self.error is not None:
            return f"crashed: {self.error}" if self.broken else self.error
        deviation = self.deviation
        assert deviation is not None
        parts = list(deviation.wrong)
        if not deviation.max_error <= deviation.max_allowed:
            parts.append(f"largest error {deviation.max_error:.2e} exceeds {deviation.max_allowed:.2e}")
        if not deviation.lse_error <= deviation.lse_allowed:
            parts.append(f"log-sum-exp error {deviation.lse_error:.2e} exceeds {deviation.lse_allowed:.2e}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of all cases of a kernel."""

    results: tuple[CaseResult, ...]

    @property
    def broken(self) -> bool:
        """Whether a case broke the process for later ones."""
        return any(result.broken for result in self.results)

    @property
    def tally(self) -> Tally:
        """The deviations of the cases that ran."""
        return Tally([r.deviation for r in self.results if r.deviation is not None])

    @property
    def problems(self) -> tuple[str, ...]:
        """The faults, a line each; empty if the kernel keeps its contract."""
        lines = [f"{r.case} (seed {r.seed}): {r.describe()}" for r in self.results if not r.ok]
        tally = self.tally
        if not tally.deviations and not lines:
            lines.append(f"no case is a legal call: {self.results[0].skipped}")
        if not tally.rmse <= tally.rmse_allowed:
            lines.append(f"rmse {tally.rmse:.2e} over all cases exceeds {tally.rmse_allowed:.2e}")
        return tuple(lines)


def try_kernel(
    kernel: Kernel, launch: Launch, device: torch.device | str, seed: int, *, small: bool, part: slice = _ALL
) -> Trial:
    """Run a kernel on the cases of its layout, or a part of them; ``small`` picks those that suit an interpreter."""
    cases = cases_of(kernel.layout, kernel.tile_m, kernel.tile_n, small=small)[part]
    return _trial(_try_case(kernel, launch, case, device, seed + index) for index, case in enumerate(cases))


def try_backward(
    kernel: Kernel, launch: GradientLaunch, device: torch.device | str, seed: int, *, small: bool, part: slice = _ALL
) -> Trial:
    """Run a backward on every case of its layout, as ``try_kernel`` does a forward."""
    cases = cases_of(kernel.layout, kernel.tile_m, kernel.tile_n, small=small)[part]
    return _trial(_try_gradients(kernel, launch, case, device, seed + index) for index, case in enumerate(cases))


def try_jvp(
    kernel: Kernel, launch: TangentLaunch, device: torch.device | str, seed: int, *, small: bool, part: slice = _ALL
) -> Trial:
    """Run each launch of a forward-mode derivative on every case of its layout, as ``try_kernel`` does a forward."""
    cases = cases_of(kernel.layout, kernel.tile_m, kernel.tile_n, small=small)[part]
    return _trial(_try_tangents(kernel, launch, case, device, seed + index) for index, case in enumerate(cases))


def try_cases(cases: Iterable[tuple[str, Callable[..., Deviation]]], seed: int) -> Trial:
    """Run cases of other kernels: each has a name, and returns its deviation for a ``seed`` of its own."""
    return _trial(_try(name, run, seed + number) for number, (name, run) in enumerate(cases))


def _try(name: str, run: Callable[..., Deviation], seed: int) -> CaseResult:
    try:
        return CaseResult(name, seed, run(seed=seed))
    except (AttngenError, RuntimeError) as error:  # a RuntimeError of CUDA comes back at every later call
        return CaseResult(name, seed, error=str(error), broken=not isinstance(error, AttngenError))


def _trial(results: Iterable[CaseResult]) -> Trial:
    """Take results until a kernel breaks."""
    taken: list[CaseResult] = []
    for result in results:
        taken.append(result)
        if result.broken:
            break
    return Trial(tuple(taken))


def _try_tangents(
    kernel: Kernel, launch: TangentLaunch, case: Case, device: torch.device | str, seed: int
) -> CaseResult:
    try:
        inputs, call = _inputs_in_extent(kernel, case, device, seed)
    except IndexError as error:
        return CaseResult(case.name, seed, skipped=str(error))
    given = inputs.q, inputs.k, inputs.v
    deviations = []
    try:
        for name in [one.name for one in kernel.launches if not one.classifies]:
            wanted = expected_tangents(call, *given, tangents_of(kernel, name), torch.Generator().manual_seed(seed))
            buffers, memory = poisoned_tangents(kernel, call, given, wanted.directions)
            launch(call, buffers, name)
            measured = tangent_deviation(call, buffers, wanted)
            deviations.append(replace(measured, wrong=measured.wrong + memory.overrun()))
    except AttngenError as error:
        return CaseResult(case.name, seed, error=str(error))
    except Exception as error:  # anything that a broken kernel makes CUDA or the interpreter raise
        return CaseResult(case.name, seed, error=f"{type(error).__name__}: {error}", broken=True)
    faulty = [one for one in deviations if not one.ok]
    return CaseResult(case.name, seed, (faulty or deviations)[0])


def _try_gradients(
    kernel: Kernel, launch: GradientLaunch, case: Case, device: torch.device | str, seed: int
) -> CaseResult:
    try:
        inputs, call = _inputs_in_extent(kernel, case, device, seed)
    except IndexError as error:
        return CaseResult(case.name, seed, skipped=str(error))
    wanted = expected_gradients(call, inputs.q, inputs.k, inputs.v, torch.Generator().manual_seed(seed))
    if kernel.v_of_key:
        wanted = wanted.of_keys()
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": wanted.out, "lse": wanted.lse, "dout": wanted.dout}
    buffers, memory = poisoned_gradients(kernel, call, given, wanted.dlse.contiguous())
    try:
        launch(call, buffers)
        measured = gradient_deviation(call, buffers, wanted)
        return CaseResult(case.name, seed, replace(measured, wrong=measured.wrong + memory.overrun()))
    except AttngenError as error:
        return CaseResult(case.name, seed, error=str(error))
    except Exception as error:  # anything that a broken kernel makes CUDA or the interpreter raise
        return CaseResult(case.name, seed, error=f"{type(error).__name__}: {error}", broken=True)


def _inputs_in_extent(kernel: Kernel, case: Case, device: torch.device | str, seed: int) -> tuple[Inputs, Call]:
    """Inputs that no load reads out of extent, and the call. Raises IndexError if there are none."""
    inputs, call, _ = prepare_case(kernel, case, device, seed)
    return inputs, call


def _try_case(kernel: Kernel, launch: Launch, case: Case, device: torch.device | str, seed: int) -> CaseResult:
    try:
        inputs, call, wanted = prepare_case(kernel, case, device, seed)
    except IndexError as error:
        return CaseResult(case.name, seed, skipped=str(error))
    memory = poisoned(kernel, call, inputs.q, inputs.k, inputs.v)
    buffers = memory.buffers
    assert buffers.lse is not None
    try:
        launch(call, buffers)
        measured = deviation(call, *in_rows(call, buffers.out, buffers.lse), wanted)
        return CaseResult(case.name, seed, replace(measured, wrong=measured.wrong + memory.overrun()))
    except AttngenError as error:
        return CaseResult(case.name, seed, error=str(error))
    except Exception as error:  # anything that a broken kernel makes CUDA or the interpreter raise
        return CaseResult(case.name, seed, error=f"{type(error).__name__}: {error}", broken=True)


def in_rows(call: Call, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results as the rows of all sequences, (total_q, heads, head_dim) and (heads, total_q), where kernels see
    them so; as they are where not."""
    if call.ragged and call.order != "thd":
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    return out, lse


def element_of(kernel: Kernel) -> Element:
    """The format of q, k and v of a kernel."""
    out = kernel.dtype_of("out").name if kernel.dtype in QUANTIZED_DTYPES else ""
    return Element(
        kernel.dtype, kernel.head_dim_qk, kernel.head_dim_v, kernel.scale_block, kernel.dtype_of("k").name, out,
        kernel.transposed_v, kernel.grouped_v, kernel.v_of_key,
    )  # fmt: skip


def prepare_case(kernel: Kernel, case: Case, device: torch.device | str, seed: int) -> tuple[Inputs, Call, Expected]:
    """Inputs that keep every declared fact, the call, and its expected results.

    Raises IndexError if mask or score read a tensor out of its extent, however its integers are chosen.
    """
    element = element_of(kernel)
    if kernel.transposed_v:
        case = replace(case, used=None)
    if element.latent_rows:
        case = replace(case, kv_heads=1)
    kv_dtype, p = kernel.dtype_of("k"), kernel.dtype_of("p")
    probabilities = TORCH_DTYPES[p.name] if p.bytes > kv_dtype.bytes else None  # products widen k and v
    raised: IndexError | None = None
    for calm in _CALM:
        inputs = make_inputs(kernel.variant, case, kernel.layout, element, device, seed, calm=calm)
        call = inputs.bind(kernel.variant)
        debug.check(call)
        plain = inputs.packed or inputs  # the yardsticks know no pages
        try:
            return inputs, call, expected(plain.bind(kernel.variant), plain.q, plain.k, plain.v, probabilities)
        except IndexError as error:
            raised = error
    assert raised is not None
    raise raised


def facts_of(variant: Variant) -> list[str]:
    """The declared facts of a variant in words: a kernel trusts them, and every input of a trial keeps them."""
    facts = []
    for scalar in variant.scalars:
        if scalar.min is not None or scalar.max is not None:
            facts.append(_span(scalar.name, scalar.min, scalar.max))
    for tensor in variant.tensors:
        if tensor.monotone is not None:
            facts.append(f"{tensor.name} {tensor.monotone.summary()}")
        if tensor.range is not None:
            facts.append(_span(tensor.name, *tensor.range))
    return facts


def _span(name: str, low: Bound, high: Bound) -> str:
    if high is None:
        return f"{name} >= {low}"
    return f"{name} <= {high}" if low is None else f"{low} <= {name} <= {high}"
