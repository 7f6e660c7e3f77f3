"""Jobs of ``attngen.store.jobs`` over generated specs: one plans a spec, one tries a kernel on this machine's GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attngen.errors import AttngenError
from attngen.store import worker
from attngen.tools.build.pipeline import Prepared
from tests.fuzz.legal import legal


@dataclass(frozen=True, slots=True)
class Planned:
    """A spec before any compile: its kernels, or the verdict and the reason."""

    seed: int
    fixed: tuple[str, ...]
    kernels: tuple[Prepared, ...] = ()
    verdict: str | None = None
    problem: str = ""


#: Fields by which a spec says itself how a kernel is cut, and who works on it.
_CUTS = {"tile", "warps", "pipeline", "backward"}


def asked_for(fixed: Sequence[str], error: AttngenError) -> bool:
    """Whether a kernel is refused for being slow as its spec cuts it: that is for the spec to allow."""
    slow = "B of spills" in str(error) or "serialized wgmma" in str(error)
    return slow and not _CUTS.isdisjoint(fixed)


def plan_one(seed: int, last: bool) -> Planned:
    """Plan and render the kernels of a seed."""
    spec = legal(seed)
    try:
        return Planned(seed, spec.fixed, tuple(spec.prepare()))
    except AttngenError as error:
        return Planned(seed, spec.fixed, verdict="plan refuses", problem=str(error))
    except Exception as error:
        return Planned(seed, spec.fixed, verdict="traceback", problem=f"{type(error).__name__}: {error}")


def try_one(folder: str, seed: int, last: bool) -> tuple[str, str]:
    """Run the kernel of a folder of the cache on small ragged cases; return a verdict and the problem in a line.

    Worker processes share the GPUs evenly. One whose CUDA context is broken ends, and the kernel counts as crashed.
    """
    import torch

    from attngen.runtime.kernels.module import read_kernel
    from attngen.tools.verify.gpu import Gpu, try_pinned

    torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
    gpu = Gpu.current()
    try:
        trial = try_pinned(read_kernel(Path(folder)), gpu.device, seed, small=True)
    except Exception as error:
        if not gpu.answers():
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(70)
        return "traceback", f"{type(error).__name__}: {error}"
    if trial.broken or not gpu.answers():
        worker.retire()
        return "crashed", trial.problems[0] if trial.problems else "the GPU does not answer"
    if not trial.problems:
        return "passed", ""
    return ("no legal call" if not trial.tally.deviations else "wrong"), trial.problems[0]
