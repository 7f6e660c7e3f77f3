"""Jobs of ``attngen.store.jobs`` over generated specs: one plans a spec, one tries a kernel on this machine's GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attngen.arch import Arch, arch_of
from attngen.build.pipeline import Prepared
from attngen.errors import AttngenError
from attngen.lab.verify.retarget import retarget
from attngen.store import worker
from tests.fuzz.legal import Legal, legal
from tests.fuzz.legal_cards import legal_for_card


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
    return _planned(seed, legal(seed))


def plan_for_card(seed: int, last: bool) -> Planned:
    """Plan and render the kernels of a seed for a card without wgmma, and again for the GPU that is here, or sm90a."""
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return _planned(seed, legal_for_card(seed), arch_of(10 * major + minor))


def _planned(seed: int, spec: Legal, here: Arch | None = None) -> Planned:
    """Plan and render the kernels of a spec; with ``here``, also those for this arch."""
    try:
        kernels = spec.prepare()
        moved = [retarget(kernel, here) for kernel in kernels] if here else []
        return Planned(seed, spec.fixed, (*kernels, *moved))
    except AttngenError as error:
        return Planned(seed, spec.fixed, verdict="plan refuses", problem=str(error))
    except Exception as error:
        return Planned(seed, spec.fixed, verdict="traceback", problem=f"{type(error).__name__}: {error}")


def try_one(folder: str, seed: int, last: bool) -> tuple[str, str]:
    """Run the kernel of a folder of the cache on small ragged cases; return a verdict and the problem in a line.

    Worker processes share the GPUs evenly. One whose CUDA context is broken ends, and the kernel counts as crashed.
    """
    import torch

    from attngen.lab.verify.gpu import Gpu, try_pinned
    from attngen.runtime.kernels.module import read_kernel

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
