"""Kernels in Triton's interpreter, in processes of their own, where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

from attngen.build.pipeline import Prepared
from attngen.errors import LoadError
from attngen.lab.verify import interpreter
from attngen.lab.verify.gpu import Observer
from attngen.lab.verify.trial import Trial, try_backward, try_jvp, try_kernel
from attngen.lab.verify.verdict import Verdict
from attngen.operations import JVP
from attngen.plan.model import Plan
from attngen.render import render
from attngen.store.jobs import Job, run_jobs
from attngen.store.limits import job_limit


def try_interpreted(prepared: Sequence[Prepared], seed: int, jobs: int | None, observer: Observer) -> Iterator[Verdict]:
    """Yield a verdict on each kernel as it finishes; kernels that cannot be interpreted first."""
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
    if calls and find_spec("numpy") is None:
        raise LoadError("Triton's interpreter, which verifies without a GPU, needs numpy: pip install numpy")
    for result in run_jobs(calls, job_limit(jobs)):
        plan, remark = todo[result.index]
        if result.error is not None:
            reason = str(result.error).replace("its compiler process", "its process")
            yield Verdict(plan, reason=reason, failed_before=True, remark=remark)
        else:
            yield Verdict(plan, result.value, remark=remark)
        observer(plan.name, len(todo))


def interpretable(kernel: Prepared) -> tuple[str, str | None]:
    """Return the source that the interpreter runs, and a remark where it differs from the compiled one."""
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
        raise LoadError(f"the source is not a valid module: {error}") from error
    if plan.direction == "backward":
        return try_backward(run.kernel, run.differentiate, "cpu", seed, small=True)
    if plan.direction == JVP:
        return try_jvp(run.kernel, run.derive, "cpu", seed, small=True)
    return try_kernel(run.kernel, run, "cpu", seed, small=True)
