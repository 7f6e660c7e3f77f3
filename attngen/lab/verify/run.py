"""Every kernel of a spec against the float64 reference: on the GPU that is here, else in Triton's interpreter."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

from attngen.build.pipeline import prepare_unrendered
from attngen.errors import CallError, suggest
from attngen.lab.verify.gpu import Gpu, Observer, try_on_gpu
from attngen.lab.verify.interpreted import try_interpreted
from attngen.lab.verify.verdict import VerifyReport
from attngen.schema import load_spec

_MAX_SEED = 2**31


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
    ``retargeted`` planned again for this one. Without a GPU, or with ``interpret``, the rendered sources run in
    Triton's interpreter, in processes of their own. ``seed`` repeats a run; without one, inputs are new each time.

    Raises SpecError if the spec is wrong, CallError if ``only`` names nothing.
    """
    loaded = load_spec(spec)
    prepared = prepare_unrendered(loaded)
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
        device, verdicts = "Triton's interpreter", try_interpreted(prepared, seed, jobs, watched)
    else:
        gpu = Gpu.current()
        device = f"{gpu.name} (sm{gpu.capability})"
        verdicts = try_on_gpu(prepared, gpu, seed, jobs, watched, retargeted=retargeted)
    by_name = {verdict.plan.name: verdict for verdict in verdicts}
    ordered = tuple(by_name[kernel.plan.name] for kernel in prepared)
    return VerifyReport(str(spec), loaded.package, device, seed, ordered)
