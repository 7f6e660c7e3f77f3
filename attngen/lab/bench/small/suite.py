"""The suite of small calls: the kernels of a spec, as the dispatcher takes them, beside the libraries that are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from attngen.build.pipeline import Prepared, prepare_unrendered
from attngen.errors import CallError
from attngen.lab.bench.cases import BenchCase
from attngen.lab.bench.check import TOLERANCE
from attngen.lab.bench.graphs import Replays
from attngen.lab.bench.kernels import chosen, compiled
from attngen.lab.bench.peers import FlashAttention3, FlashAttention4, Peer, Sdpa, Tensors, named, reason_against
from attngen.lab.bench.report import Result
from attngen.lab.bench.runner import Bench, BenchOptions, Observer, ReadyContender, Suite, by_parts
from attngen.lab.bench.small.inputs import SmallInputs
from attngen.lab.bench.small.report import OWN, SmallReport, SmallRow
from attngen.lab.bench.small.shapes import DTYPE, Shape, small_shapes
from attngen.lab.bench.timing import Contender, Sampler
from attngen.lab.bench.workloads import Workload, terms_of
from attngen.lab.verify.gpu import Gpu
from attngen.runtime.operations.attention.introspection import explain
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import load_spec, preset


def small_peers() -> tuple[Peer, ...]:
    """The libraries in the order of their columns."""
    return (
        Sdpa("SDPA flash", "FLASH_ATTENTION"),
        Sdpa("SDPA cuDNN", "CUDNN_ATTENTION"),
        FlashAttention3(),
        FlashAttention4(),
    )


class SmallSuite(Suite[Shape, SmallReport]):
    """Calls of little work.

    Raises SpecError if the spec is wrong, CallError if the options name no kernel, no call or no library.
    """

    noun = "call"

    def __init__(self, spec: str | Path, options: BenchOptions, capability: int | None) -> None:
        self.options = options
        loaded = load_spec(spec)
        self.kernels = _kernels(prepare_unrendered(loaded), options.part, capability)
        known = {(kernel.plan.variant.name, kernel.plan.head_dim_qk) for kernel in self.kernels}
        shapes = by_parts(small_shapes(), options.cells, "call", lambda shape: shape.name)
        self.cases = [shape for shape in shapes if (shape.variant, shape.head_dim) in known]
        self.peers = named(small_peers(), options.peers)
        self.report = SmallReport(spec=str(spec), package=loaded.package, sustained=options.sustained)

    def planned(self, case: Shape) -> SmallRow:
        """See ``Suite``."""
        return SmallRow(results=(*(_result_of(peer, case) for peer in self.peers), Result(OWN)), shape=case)

    def compiled(self, gpu: Gpu, observer: Observer) -> SmallReport:
        """See ``Suite``; kernels that compiled are registered as the package of their spec."""
        kernels, failures = compiled(self.kernels, self.options.jobs)
        if kernels:
            registry.add(package_of_kernels(list(kernels.values()), self.report.spec))
        return replace(self.report, failures=failures)

    def measured(self, bench: Bench, case: Shape) -> SmallRow:
        """See ``Suite``."""
        package = self.report.package
        inputs = SmallInputs(case, bench.device, bench.l2_bytes, bench.generator)

        def enter(result: Result, make: Callable[[], Contender]) -> tuple[Result, Sampler | None]:
            def entry() -> ReadyContender:
                return ReadyContender(Replays(make(), bench.clock, bench.capture), inputs.error, TOLERANCE[DTYPE])

            return bench.enter(replace(result, flops=case.flops), entry)

        entered: list[tuple[Result, Sampler | None]] = []
        for peer in self.peers:
            result = _result_of(peer, case)
            if result.status == "planned":
                entered.append(enter(result, partial(_calls_of_peer, peer, inputs)))
            else:
                entered.append((result, None))
        kernel = explain(*inputs.sets[0], variant=case.variant, package=package, **case.arguments).to_dict()["kernel"]
        entered.append(enter(Result(OWN, kernel), lambda: Contender(OWN, inputs.calls(package))))
        results, reading = bench.measure(entered)
        return SmallRow(results=results, shape=case, input_sets=len(inputs.sets), reading=reading)


def _kernels(prepared: Sequence[Prepared], part: str | None, capability: int | None) -> list[Prepared]:
    """The kernels that calls may run on. Raises CallError if there is none."""
    known = {(shape.variant, shape.head_dim) for shape in small_shapes()}
    kept = [
        kernel
        for kernel in chosen(prepared, part, ())
        if kernel.plan.direction == "forward"
        and kernel.plan.layout == "dense"
        and kernel.plan.dtype_name == DTYPE
        and kernel.plan.head_dim_qk == kernel.plan.head_dim_v
        and (kernel.plan.variant.name, kernel.plan.head_dim_qk) in known
        and kernel.plan.variant == preset(kernel.plan.variant.name)
        and (capability is None or kernel.plan.arch.runs_on(capability))
    ]
    if not kept:
        here = "" if capability is None else f", which sm{capability} would run"
        raise CallError(
            f"the suite of small calls takes dense forward kernels of full and causal in {DTYPE} at head_dim 64 and "
            f"128; the spec has none{here}"
        )
    return kept


def _case(shape: Shape) -> BenchCase:
    return BenchCase(
        "small", shape.variant, DTYPE, shape.head_dim, shape.head_dim, shape.batch, shape.seqlen_k, shape.heads,
        shape.kv_heads,
    )  # fmt: skip


def _result_of(peer: Peer, shape: Shape) -> Result:
    """The result of a library before it is called: unsupported where it is known not to make the call."""
    reason = reason_against(peer, _case(shape), terms_of(preset(shape.variant), _case(shape), "cpu"))
    if reason is None and isinstance(peer, Sdpa) and shape.variant != "full" and shape.seqlen_q != shape.seqlen_k:
        reason = "its causal mask begins at the first key"
    return Result(peer.name, status="planned" if reason is None else "unsupported", reason=reason, peer=True)


def _calls_of_peer(peer: Peer, inputs: SmallInputs) -> Contender:
    shape, case = inputs.shape, _case(inputs.shape)
    terms = terms_of(preset(shape.variant), case, inputs.sets[0][0].device)
    assert terms is not None
    work = Workload(case, preset(shape.variant), shape.arguments, shape.pairs, terms)
    return peer.enter(work, terms, [Tensors(*each) for each in inputs.sets])
