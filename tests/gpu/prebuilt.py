"""Compile what the tests of this folder call, on all cores: ``python -m tests.gpu.prebuilt``.

Each module that builds kernels in the user's cache has a function ``to_build``, which returns them; what has a cache of
its own is compiled by its tests. Kernels that are refused, or do not compile, are left for the tests to judge.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Thread

from attngen.store.jobs import Job, run_jobs, worker_processes
from attngen.store.key import key_of
from attngen.store.limits import available_cores
from attngen.store.store import Store
from attngen.tools.build.pipeline import Prepared, compile_kernels
from tests.gpu.family import for_this_gpu
from tests.gpu.packages import CALLED

FOLDER = Path(__file__).parent

#: Kernels that take longest to compile come first, so that no core ends alone.
_SECONDS = {("triton", "backward"): 4, ("triton", "forward"): 2, ("cuda", "backward"): 2}

#: Processes that plan, at most.
_PLANNERS = 16


def modules() -> list[str]:
    """Return the modules of this folder that have a function ``to_build``."""
    return [path.stem for path in sorted(FOLDER.glob("*.py")) if "\ndef to_build(" in path.read_text()]


def planned(module: str, part: str | None, last: bool = True) -> list[tuple[str, Prepared]]:
    """Return the kernels of a module's tests, or a part of them, with their keys, for the GPU that is here."""
    members = import_module(f"tests.gpu.{module}")
    kernels = [for_this_gpu(kernel) for kernel in (members.to_build() if part is None else members.called(part))]
    return [(key_of(kernel.plan, kernel.source), kernel) for kernel in kernels]


def parts_of(module: str) -> list[tuple[str, str | None]]:
    """Parts that are planned at once: a module, or each of the shipped specs."""
    return [(module, spec) for spec in CALLED] if module == "packages" else [(module, None)]


def wanted(jobs: int | None = None) -> dict[str, list[tuple[str, Prepared]]]:
    """Return the kernels of each module; planning all of them takes one core half a minute, and more processes would
    take longer to start than they save."""
    names = sorted(modules(), key=lambda name: name != "packages")  # what takes longest is begun first
    parts = [part for name in names for part in parts_of(name)]
    calls = [Job(name, "tests.gpu.prebuilt:planned", (name, part)) for name, part in parts]
    kernels: dict[str, list[tuple[str, Prepared]]] = {name: [] for name in names}
    for result in run_jobs(calls, min(jobs or available_cores(), _PLANNERS)):
        name, _ = parts[result.index]
        if result.error is not None:
            print(f"{name}: {result.error}", flush=True)
        kernels[name] += result.value or []
    return kernels


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
    """Compile what the cache lacks; return how many kernels there are now, and a line for each that there is not.

    Parts are compiled beside each other, so that no core waits for the last kernel of one.
    """
    store, done, wrong = Store(), 0, []
    parts = batches(kernels)
    cores = jobs or available_cores()
    with worker_processes() as workers, ThreadPoolExecutor(len(parts) or 1) as threads:
        shares = [max(round(cores * len(part) / len(kernels)), 1) for part in parts]
        for built, failures in threads.map(
            lambda part, share: compile_kernels(part, store=store, jobs=share, workers=workers), parts, shares
        ):
            done += len(built)
            wrong += [f"{failure.name}: {str(failure.error).splitlines()[0]}" for failure in failures]
    return done, wrong


def note(keys: Sequence[str], left: int, file: Path) -> None:
    """Write a file when no more kernels are left than that; the cache is looked at, since builds say nothing."""
    missing = set(keys)
    while len(missing) > left:
        missing = {key for key in missing if not Store().path(key).exists()}
        time.sleep(0.5)
    file.touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="say how many kernels there are, and compile none")
    parser.add_argument("--jobs", type=int, help="compiles at once; left out: as many as cores")
    parser.add_argument("--nearly", type=Path, help="a file that is written when one of twelve is left, or none")
    chosen = parser.parse_args()
    begun = time.monotonic()
    kernels_by_part = wanted(chosen.jobs)
    print(", ".join(f"{name} {len(rows)}" for name, rows in kernels_by_part.items()))
    kernels = list({key: kernel for rows in kernels_by_part.values() for key, kernel in rows}.values())
    kinds = Counter(f"{kernel.plan.backend} {kernel.plan.direction}" for kernel in kernels)
    print(f"{len(kernels)} kernels: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}", flush=True)
    if not chosen.list:
        print(f"planned and rendered after {time.monotonic() - begun:.0f} s", flush=True)
        if chosen.nearly:
            keys = [key for rows in kernels_by_part.values() for key, _ in rows]
            Thread(target=note, args=(keys, len(kernels) // 12, chosen.nearly), daemon=True).start()
        done, wrong = build(kernels, chosen.jobs)
        print(*wrong, f"{done} built, {len(wrong)} not, after {time.monotonic() - begun:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main()
