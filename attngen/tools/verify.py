"""Every kernel of a spec against the float64 reference: on the GPU that is here, else in Triton's interpreter."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attngen.arch import Arch
from attngen.errors import AttngenError, CallError, LoadError, suggest
from attngen.plan.model import Plan
from attngen.render import render
from attngen.runtime import driver as drivers
from attngen.runtime.arguments import Call
from attngen.runtime.module import Kernel, read_kernel
from attngen.runtime.pinned import Buffers, Pinned
from attngen.spec import load_spec
from attngen.store.jobs import Job, run_jobs
from attngen.store.limits import job_limit
from attngen.store.store import Store
from attngen.tools import interpreter
from attngen.tools.build import Prepared, compile_kernels, prepare
from attngen.tools.retarget import arch_of, retarget
from attngen.tools.trial import CaseResult, Trial, facts_of, try_kernel

#: Called with the name of each kernel when it is done, and with how many there are.
Observer = Callable[[str, int], None]

_MAX_SEED = 2**31


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one kernel. Without a trial, ``reason`` says why it was not run, or why it failed before.

    ``remark`` says what differs between the kernel of the spec and what ran.
    """

    plan: Plan
    trial: Trial | None = None
    reason: str | None = None
    failed_before: bool = False  # it did not even compile
    remark: str | None = None

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        if self.trial is None:
            return "failed" if self.failed_before else "not run"
        return "failed" if self.trial.problems else "passed"

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the kernel, a line each."""
        if self.trial is None:
            return (self.reason or "",) if self.failed_before else ()
        return self.trial.problems

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``attngen verify --json`` prints it."""
        row: dict[str, Any] = {
            "name": self.plan.name,
            "variant": self.plan.variant.name,
            "arch": self.plan.arch_name,
            "dtype": self.plan.dtype_name,
            "status": self.status,
            "reason": self.reason,
            "remark": self.remark,
            "facts": facts_of(self.plan.variant),
            "problems": list(self.problems),
        }
        if self.trial is not None:
            row |= _figures(self.trial)
        return row


def _figures(trial: Trial) -> dict[str, Any]:
    tally = trial.tally
    worst = tally.worst
    return {
        "max_error": _finite(worst and worst.max_error),
        "max_error_allowed": _finite(worst and worst.max_allowed),
        "rmse": _finite(tally.rmse),
        "rmse_allowed": _finite(tally.rmse_allowed),
        "dead_rows": tally.dead_rows,
        "cases": [_case(result) for result in trial.results],
    }


def _case(result: CaseResult) -> dict[str, Any]:
    found = result.deviation
    return {
        "case": result.case,
        "seed": result.seed,
        "ok": result.ok,
        "skipped": result.skipped,
        "max_error": _finite(found and found.max_error),
        "max_error_allowed": _finite(found and found.max_allowed),
        "lse_error": _finite(found and found.lse_error),
        "lse_error_allowed": _finite(found and found.lse_allowed),
    }


def _finite(value: Any) -> float | None:
    """Return a number that JSON has; an error of infinity stands for NaN in a result, which ``problems`` tells."""
    return value if isinstance(value, float) and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdicts on a spec's kernels; ``device`` names what ran them."""

    spec: str
    package: str
    device: str
    seed: int
    verdicts: tuple[Verdict, ...]

    def with_status(self, status: str) -> tuple[Verdict, ...]:
        """Return the verdicts of one status."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == status)

    @property
    def ok(self) -> bool:
        """Whether no kernel failed, and at least one was run."""
        return bool(self.with_status("passed")) and not self.with_status("failed")

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``attngen verify --json`` prints it."""
        counts = {status: len(self.with_status(status)) for status in ("passed", "failed", "not run")}
        return {
            "spec": self.spec,
            "package": self.package,
            "device": self.device,
            "seed": self.seed,
            "ok": self.ok,
            **{status.replace(" ", "_"): count for status, count in counts.items()},
            "kernels": [verdict.to_dict() for verdict in self.verdicts],
        }


def verify(
    spec: str | Path,
    *,
    only: str | None = None,
    retargeted: bool = False,
    interpret: bool | None = None,
    seed: int | None = None,
    jobs: int | None = None,
    observer: Observer | None = None,
) -> VerifyReport:
    """Run every kernel of a spec, or those whose name contains ``only``, on shapes of all kinds.

    On a GPU, kernels that the cache lacks are compiled first; those for other GPUs are left out, or with
    ``retargeted`` planned anew for this one. Without a GPU, or with ``interpret``, the rendered sources run in
    Triton's interpreter, in processes of their own. ``seed`` repeats a run; without one, inputs are new each time.

    Raises SpecError if the spec is wrong, CallError if ``only`` names nothing.
    """
    loaded = load_spec(spec)
    prepared = prepare(loaded)
    if only is not None:
        chosen = [kernel for kernel in prepared if only in kernel.plan.name]
        if not chosen:
            known = [kernel.plan.name for kernel in prepared]
            raise CallError(f"{spec} has no kernel '{only}'{suggest(only, known)}")
        prepared = chosen
    seed = secrets.randbelow(_MAX_SEED) if seed is None else seed
    watched = observer or (lambda name, total: None)
    if interpret is None:
        interpret = not torch.cuda.is_available()
    if interpret:
        device, verdicts = "Triton's interpreter", _interpret(prepared, seed, jobs, watched)
    else:
        capability = drivers.current().capability(torch.cuda.current_device())
        device = f"{torch.cuda.get_device_name()} (sm{capability})"
        verdicts = _on_gpu(prepared, seed, jobs, watched, capability, retargeted)
    by_name = {verdict.plan.name: verdict for verdict in verdicts}
    ordered = tuple(by_name[kernel.plan.name] for kernel in prepared)
    return VerifyReport(str(spec), loaded.package, device, seed, ordered)


# --- on a GPU -----------------------------------------------------------------------------------------------


def _on_gpu(
    prepared: Sequence[Prepared],
    seed: int,
    jobs: int | None,
    observer: Observer,
    capability: int,
    retargeted: bool,
) -> Iterator[Verdict]:
    present = arch_of(capability)
    todo: list[tuple[Prepared, Prepared, str | None]] = []  # of the spec, as run, remark
    for kernel in prepared:
        reason = _reason_against_device(kernel.plan, capability)
        if reason is None:
            todo.append((kernel, kernel, None))
        elif not retargeted or present is None:
            hint = "" if retargeted else "; --retarget plans it anew for this one"
            yield Verdict(kernel.plan, reason=reason + hint)
        else:
            try:
                moved = retarget(kernel, present)
            except AttngenError as error:
                yield Verdict(kernel.plan, reason=f"cannot be retargeted to {present.name}: {error}")
                continue
            todo.append((kernel, moved, f"retargeted: ran as {moved.plan.name}"))
    to_compile = {moved.plan.name: moved for _, moved, _ in todo}
    store = Store()
    compiled, failures = compile_kernels(list(to_compile.values()), store=store, jobs=jobs)
    errors = {failure.name: str(failure.error) for failure in failures}
    lost: str | None = None
    for kernel, moved, remark in todo:
        name = moved.plan.name
        if lost is not None:
            yield Verdict(kernel.plan, reason=f"the GPU does not answer since {lost} ran", remark=remark)
        elif name not in compiled:
            yield Verdict(kernel.plan, reason=errors.get(name, "not compiled"), failed_before=True, remark=remark)
        else:
            trial = _try_on_gpu(read_kernel(store.path(compiled[name].key)), seed)
            yield Verdict(kernel.plan, trial, remark=remark)
            lost = None if _answers() else name
        observer(kernel.plan.name, len(todo))


def _reason_against_device(plan: Plan, capability: int) -> str | None:
    arch: Arch = plan.arch
    if not arch.runs_on(capability):
        return f"built for {arch.name}, this GPU is sm{capability}"
    return None


def _try_on_gpu(kernel: Kernel, seed: int) -> Trial:
    def launch(call: Call, buffers: Buffers) -> None:
        Pinned(kernel, call, buffers)()

    return try_kernel(kernel, launch, torch.device("cuda", torch.cuda.current_device()), seed, small=False)


def _answers() -> bool:
    """Whether the GPU still works: an illegal access makes every later call fail."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# --- without one --------------------------------------------------------------------------------------------


def _interpret(prepared: Sequence[Prepared], seed: int, jobs: int | None, observer: Observer) -> Iterator[Verdict]:
    todo: list[tuple[Plan, str | None]] = []
    calls: list[Job] = []
    for kernel in prepared:
        reason = interpreter.reason_against(kernel.plan)
        if reason is not None:
            yield Verdict(kernel.plan, reason=reason)
            continue
        text, remark = interpretable(kernel)
        todo.append((kernel.plan, remark))
        calls.append(Job(kernel.plan.name, f"{__name__}:interpret_one", (kernel.plan, text, seed)))
    for result in run_jobs(calls, job_limit(jobs)):
        plan, remark = todo[result.index]
        if result.error is not None:
            reason = str(result.error).replace("its compiler process", "its process")
            yield Verdict(plan, reason=reason, failed_before=True, remark=remark)
        else:
            yield Verdict(plan, result.value, remark=remark)
        observer(plan.name, len(todo))


def interpretable(kernel: Prepared) -> tuple[str, str | None]:
    """Return the source that the interpreter runs, and a remark where it is not the very one that is compiled."""
    if "inline_asm" not in kernel.source.text:
        return kernel.source.text, None
    exact = render(replace(kernel.plan, fast_math=False))
    return exact.text, "ran with exact functions: the interpreter has no inline assembly"


def interpret_one(plan: Plan, text: str, seed: int, last: bool) -> Trial:
    """Try one kernel in this process, which becomes an interpreter. A job of ``attngen.store.jobs``."""
    interpreter.prepare_process()
    try:
        run = interpreter.Interpreted(plan, text)
    except Exception as error:
        raise LoadError(f"the source is no valid module: {error}") from error
    return try_kernel(run.kernel, run, "cpu", seed, small=True)
