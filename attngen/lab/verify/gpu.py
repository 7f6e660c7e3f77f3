"""Kernels on the GPU that is here: compiled where the cache lacks them, each pinned, one after the other.

They run in a process of their own. If a kernel ends it, or breaks its CUDA context (after an illegal access every later
call fails), only that kernel fails: the next one gets a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch

from attngen.arch import arch_of
from attngen.build.pipeline import Prepared, compile_kernels
from attngen.errors import AttngenError
from attngen.lab.verify.retarget import retarget
from attngen.lab.verify.trial import Trial, try_backward, try_jvp, try_kernel
from attngen.lab.verify.verdict import Verdict
from attngen.operations import JVP, operation_of
from attngen.plan.model import Plan
from attngen.runtime.arguments.checked import Call
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.launch.gradients import GradientBuffers
from attngen.runtime.launch.pinned import Buffers, Pinned, PinnedGradients
from attngen.store import worker
from attngen.store.jobs import Job, run_jobs
from attngen.store.store import Store

#: Called with the name of each kernel when it is done, and with how many there are.
Observer = Callable[[str, int], None]

#: The function that tries a kernel, by name, since it runs in another process.
TRIER = "attngen.lab.verify.gpu:try_one"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device that kernels run on."""

    device: torch.device
    capability: int  # 10 * major + minor
    name: str

    @classmethod
    def current(cls) -> Gpu:
        """Return torch's current device."""
        index = torch.cuda.current_device()
        return cls(torch.device("cuda", index), drivers.current().capability(index), torch.cuda.get_device_name(index))

    def answers(self) -> bool:
        """Whether the GPU still works: after an illegal access every later call fails."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


def try_on_gpu(
    prepared: Sequence[Prepared], gpu: Gpu, seed: int, jobs: int | None, observer: Observer, *, retargeted: bool
) -> Iterator[Verdict]:
    """Yield a verdict on each kernel: those that this GPU runs, or with ``retargeted`` can be made to run."""
    present = arch_of(gpu.capability)
    todo: list[tuple[Prepared, Prepared, str | None]] = []  # the spec's, the one that runs, a remark
    for kernel in prepared:
        reason = _reason_against(kernel.plan, gpu)
        if reason is None:
            todo.append((kernel, kernel, None))
        elif not retargeted or present is None:
            hint = "" if retargeted else "; --retarget plans it again for this one"
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
    jobs_of_kernels = []
    running = []
    for kernel, moved, remark in todo:
        name = moved.plan.name
        if name in compiled:
            built = compiled[name]
            if built.refused:
                remark = "; ".join(filter(None, [remark, f"built as {built.name}"]))
            running.append((kernel, remark))
            folder = store.path(built.key)
            jobs_of_kernels.append(Job(name, TRIER, (str(folder), gpu.device, seed)))
        else:
            yield Verdict(kernel.plan, reason=errors.get(name, "not compiled"), failed_before=True, remark=remark)
            observer(kernel.plan.name, len(todo))
    for result in run_jobs(jobs_of_kernels, 1):
        kernel, remark = running[result.index]
        if result.error is not None:
            reason = str(result.error).replace("its compiler process", "crashed: its process")
            yield Verdict(kernel.plan, reason=reason, failed_before=True, crashed=True, remark=remark)
        else:
            yield Verdict(kernel.plan, result.value, crashed=result.value.broken, remark=remark)
        observer(kernel.plan.name, len(todo))


def try_one(folder: str, device: torch.device, seed: int, last: bool) -> Trial:
    """Try the kernel of a folder of the cache in this process, which ends if the kernel breaks it."""
    torch.cuda.set_device(device)
    gpu = Gpu.current()
    trial = try_pinned(read_kernel(Path(folder)), gpu.device, seed, small=False)
    if trial.broken or not gpu.answers():
        worker.retire()
    return trial


def _reason_against(plan: Plan, gpu: Gpu) -> str | None:
    arch = plan.arch
    if not arch.runs_on(gpu.capability):
        return f"built for {arch.name}, this GPU is sm{gpu.capability}"
    return None


def try_pinned(kernel: Kernel, device: torch.device, seed: int, *, small: bool) -> Trial:
    """Run a kernel on all of its cases, whatever dispatch would choose for them; ``small`` picks the quick ones."""
    trial: Trial = resolve_name(operation_of(kernel.direction).trial)(kernel, device, seed, small=small)
    return trial


def try_attention(kernel: Kernel, device: torch.device, seed: int, *, small: bool) -> Trial:
    """Run a kernel of attention on the cases of its layout."""

    def launch(call: Call, buffers: Buffers) -> None:
        Pinned(kernel, call, buffers)()

    def differentiate(call: Call, buffers: GradientBuffers) -> None:
        PinnedGradients(kernel, call, buffers)()

    def derive(call: Call, buffers: GradientBuffers, only: str) -> None:
        PinnedGradients(kernel, call, buffers, only=only)()

    if kernel.direction == "backward":
        return try_backward(kernel, differentiate, device, seed, small=small)
    if kernel.direction == JVP:
        return try_jvp(kernel, derive, device, seed, small=small)
    return try_kernel(kernel, launch, device, seed, small=small)
