"""Kernels on the GPU that is here: compiled where the cache lacks them, each pinned, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attngen.arch import arch_of
from attngen.errors import AttngenError
from attngen.plan.model import Plan
from attngen.runtime import driver as drivers
from attngen.runtime.arguments import Call
from attngen.runtime.gradients import GradientBuffers
from attngen.runtime.module import Kernel, read_kernel
from attngen.runtime.pinned import Buffers, Pinned, PinnedGradients
from attngen.store.store import Store
from attngen.tools.build import Prepared, compile_kernels
from attngen.tools.retarget import retarget
from attngen.tools.trial import Trial, try_backward, try_kernel
from attngen.tools.verdict import Verdict

#: Called with the name of each kernel when it is done, and with how many there are.
Observer = Callable[[str, int], None]


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
    todo: list[tuple[Prepared, Prepared, str | None]] = []  # of the spec, as run, remark
    for kernel in prepared:
        reason = _reason_against(kernel.plan, gpu)
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
            built = compiled[name]
            trial = _try(read_kernel(store.path(built.key)), gpu, seed)
            if built.refused:
                remark = "; ".join(filter(None, [remark, f"built as {built.name}"]))
            yield Verdict(kernel.plan, trial, remark=remark)
            lost = None if gpu.answers() else name
        observer(kernel.plan.name, len(todo))


def _reason_against(plan: Plan, gpu: Gpu) -> str | None:
    arch = plan.arch
    if not arch.runs_on(gpu.capability):
        return f"built for {arch.name}, this GPU is sm{gpu.capability}"
    return None


def _try(kernel: Kernel, gpu: Gpu, seed: int) -> Trial:
    def launch(call: Call, buffers: Buffers) -> None:
        Pinned(kernel, call, buffers)()

    def differentiate(call: Call, buffers: GradientBuffers) -> None:
        PinnedGradients(kernel, call, buffers)()

    if kernel.direction == "backward":
        return try_backward(kernel, differentiate, gpu.device, seed, small=False)
    return try_kernel(kernel, launch, gpu.device, seed, small=False)
