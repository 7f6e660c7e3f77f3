"""First calls of the masks suite, in processes of their own with empty caches, as many at a time as there are cores."""

from __future__ import annotations

import gc
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from attngen import jit
from attngen.lab.bench.masks.cases import mask_cases
from attngen.lab.bench.masks.contenders import Contenders, inputs, seconds
from attngen.lab.bench.masks.report import FLEX, MaskCell
from attngen.lab.bench.report import reason_of
from attngen.store.jobs import Job, JobResult, run_jobs, worker_processes
from attngen.store.worker import retire

#: The functions of this module that processes run.
_FIRST = "attngen.lab.bench.masks.first_calls:first_calls"
_LOAD = "attngen.lab.bench.masks.first_calls:load"


@contextmanager
def compiling() -> Iterator[None]:
    """Compile what calls lack, by one process each; graphs of torch's compiler are differentiated again and again."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with functorch_config.patch(donated_buffer=False), inductor_config.patch(compile_threads=1), jit():
        yield


def load() -> None:
    """Import what first calls need, before a process is forked for each core. No GPU is touched.

    Imports of torch's compiler ask whether there is one: of CUDA, unless told otherwise, which no fork could use then.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch._inductor.compile_fx
    import torch.nn.attention.flex_attention  # noqa: F401

    import attngen.build.pipeline  # noqa: F401


def first_calls(environment: Mapping[str, str], sizes: tuple[str, int, int], last: bool) -> dict[str, float | str]:
    """Time the first call of each contender of a cell with its gradients, in seconds; the reason where it failed.

    Compiling is included, of the block mask too. Contenders that ran out of memory, beside other processes, are left
    out.
    """
    del last
    os.environ.update(environment)
    name, seqlen, head_dim = sizes
    (case,) = (one for one in mask_cases() if one.name == name)
    torch.zeros(1, device="cuda", dtype=torch.float32)  # CUDA starts
    with compiling():
        results = _call_each(MaskCell(case, seqlen, head_dim), torch.device("cuda"))
    inputs.cache_clear()
    torch.compiler.reset()
    gc.collect()
    if _answers():
        torch.cuda.empty_cache()
    else:
        retire()
    return results


def _call_each(cell: MaskCell, device: torch.device) -> dict[str, float | str]:
    """Call every contender of a cell once."""
    made: list[Contenders] = []
    results: dict[str, float | str] = {}
    mask: float | None = None
    try:
        mask = seconds(lambda: made.append(Contenders.of(cell, device)), device)
    except torch.OutOfMemoryError:
        return results
    except Exception:  # torch's compiler fails on some block masks; made without it, their first call has no figure
        made.append(Contenders.of(cell, device, quick=True))
    (contenders,) = made
    for name in contenders.names():
        try:
            took = seconds(partial(_call, contenders, name), device)
            if name != FLEX:
                results[name] = took
                continue
            if mask is not None:
                results[name] = took + mask
            contenders.make(name).forward()  # it compiles again without gradients
        except torch.OutOfMemoryError:
            continue
        except Exception as error:  # whatever a library raises for what it lacks, or a kernel on its way down
            results[name] = reason_of(error)
            if not _answers():
                break
    return results


def _call(contenders: Contenders, name: str) -> None:
    contenders.make(name).results()


def _answers() -> bool:
    """Whether CUDA still works in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def in_processes(
    cells: Sequence[MaskCell], environment: Mapping[str, str], jobs: int | None, until: Callable[[], float]
) -> Iterator[JobResult]:
    """Yield the results of ``first_calls`` for each cell, until a moment of ``time.monotonic``."""
    requests = [
        Job(cell.name, _FIRST, (dict(environment), (cell.case.name, cell.seqlen, cell.head_dim))) for cell in cells
    ]
    answers: queue.Queue[JobResult | None] = queue.Queue()
    ending = threading.Event()
    with worker_processes(_LOAD) as workers:

        def feed() -> None:
            try:
                for result in run_jobs(requests, jobs or len(os.sched_getaffinity(0)), shared=workers):
                    if ending.is_set():
                        break
                    answers.put(result)
            finally:
                answers.put(None)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            while (left := until() - time.monotonic()) > 0:
                try:
                    result = answers.get(timeout=None if math.isinf(left) else left)
                except queue.Empty:
                    break
                if result is None:
                    break
                yield result
        finally:
            ending.set()
            while thread.is_alive():
                workers.stop()  # again: the thread may be starting another job
                thread.join(0.1)
