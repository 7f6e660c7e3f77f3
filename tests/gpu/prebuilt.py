"""Compile what the tests of this folder call, on all cores: ``python -m tests.gpu.prebuilt``.

Each module that builds kernels in the user's cache has a function ``to_build``, which returns them; what has a cache of
its own is compiled by its tests. Kernels that are refused, or do not compile, are left for the tests to judge.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from attngen.store.jobs import Job, run_jobs, worker_processes
from attngen.store.key import key_of
from attngen.store.limits import available_cores
from attngen.store.store import Store
from attngen.tools.build.pipeline import Prepared, compile_kernels
from tests.gpu.family import for_this_gpu

FOLDER = Path(__file__).parent

#: Kernels that take longest to compile come first, so that no core ends alone.
_SECONDS = {("triton", "backward"): 4, ("triton", "forward"): 2, ("cuda", "backward"): 2}


def modules() -> list[str]:
    """Return the modules of this folder that have a function ``to_build``."""
    return [path.stem for path in sorted(FOLDER.glob("*.py")) if "\ndef to_build(" in path.read_text()]


def planned(module: str, last: bool = True) -> list[tuple[str, Prepared]]:
    """Return the kernels of a module's tests with their keys in the cache, for the GPU that is here."""
    kernels = [for_this_gpu(kernel) for kernel in import_module(f"tests.gpu.{module}").to_build()]
    return [(key_of(kernel.plan, kernel.source), kernel) for kernel in kernels]


def wanted(jobs: int | None = None) -> dict[str, list[tuple[str, Prepared]]]:
    """Return the kernels of each module; planning all of them takes one core half a minute."""
    names = modules()
    calls = [Job(name, "tests.gpu.prebuilt:planned", (name,)) for name in names]
    found = {names[result.index]: result for result in run_jobs(calls, jobs or available_cores())}
    for name, result in found.items():
        if result.error is not None:
            print(f"{name}: {result.error}", flush=True)
    return {name: found[name].value or [] for name in names}


def batches(kernels: Sequence[Prepared]) -> list[list[Prepared]]:
    """Cut kernels into parts in which no name occurs twice: several specs have a kernel of one name."""
    parts: list[list[Prepared]] = []
    seen: Counter[str] = Counter()
    for kernel in sorted(kernels, key=lambda one: -_SECONDS.get((one.plan.backend, one.plan.direction), 1)):
        number = seen[kernel.plan.name]
        seen[kernel.plan.name] += 1
        if number == len(parts):
            parts.append([])
        parts[number].append(kernel)
    return parts


def build(kernels: Sequence[Prepared], jobs: int | None = None) -> tuple[int, list[str]]:
    """Compile what the cache lacks; return how many kernels there are now, and a line for each that there is not."""
    store, done, wrong = Store(), 0, []
    with worker_processes() as workers:
        for part in batches(kernels):
            built, failures = compile_kernels(part, store=store, jobs=jobs, workers=workers)
            done += len(built)
            wrong += [f"{failure.name}: {str(failure.error).splitlines()[0]}" for failure in failures]
    return done, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="say how many kernels there are, and compile none")
    parser.add_argument("--jobs", type=int, help="compiles at once; left out: as many as cores")
    chosen = parser.parse_args()
    begun = time.monotonic()
    found = wanted(chosen.jobs)
    print(", ".join(f"{name} {len(rows)}" for name, rows in found.items()))
    kernels = list({key: kernel for rows in found.values() for key, kernel in rows}.values())
    kinds = Counter(f"{kernel.plan.backend} {kernel.plan.direction}" for kernel in kernels)
    print(f"{len(kernels)} kernels: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}", flush=True)
    if not chosen.list:
        print(f"planned and rendered after {time.monotonic() - begun:.0f} s", flush=True)
        done, wrong = build(kernels, chosen.jobs)
        print(*wrong, f"{done} built, {len(wrong)} not, after {time.monotonic() - begun:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main()
