"""Compile what the tests of this folder call, on all cores: ``python -m tests.gpu.prebuilt``.

Each module that builds kernels in the user's cache has a function ``to_build``, which returns them; what has a cache of
its own is compiled by its tests. Kernels that are refused, or do not compile, are left for the tests to judge.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Thread

from attngen.build.pipeline import Prepared, compile_kernels
from attngen.store.jobs import Job, run_jobs, worker_processes
from attngen.store.key import key_of
from attngen.store.limits import available_cores
from attngen.store.store import Store
from tests.gpu.events import NEARLY
from tests.gpu.family import for_this_gpu
from tests.gpu.packages import CALLED

FOLDER = Path(__file__).parent

#: Parts that tests wait for which take longest: these are compiled before all others.
FIRST = (
    "test_parallel", "family", "test_decode", "test_cards", "test_divisions", "test_generated", "packages.transformers",
    "test_random_masks", "test_backward",
)  # fmt: skip

#: Of the others, kernels that take longest to compile come first, so that no core ends alone.
_SECONDS = {("triton", "backward"): 4, ("triton", "jvp"): 4, ("triton", "forward"): 2, ("cuda", "backward"): 2}

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
    """Return the kernels of each part by its name; planning all of them takes one core half a minute, and more
    processes would take longer to start than they save."""
    names = sorted(modules(), key=lambda name: name != "packages")  # what takes longest is begun first
    parts = [part for name in names for part in parts_of(name)]
    calls = [Job(name, "tests.gpu.prebuilt:planned", (name, part)) for name, part in parts]
    kernels: dict[str, list[tuple[str, Prepared]]] = {}
    for result in run_jobs(calls, min(jobs or available_cores(), _PLANNERS)):
        name = ".".join(filter(None, parts[result.index]))
        if result.error is not None:
            print(f"{name}: {result.error}", flush=True)
        kernels[name] = result.value or []
    return dict(sorted(kernels.items(), key=lambda part: part[0] not in FIRST))


def batches(kernels: Sequence[Prepared]) -> list[list[Prepared]]:
    """Cut kernels, in their order, into parts in which no name occurs twice: several specs have one of one name."""
    parts: list[list[Prepared]] = []
    seen: Counter[str] = Counter()
    for kernel in kernels:
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


def note(parts: Mapping[str, Sequence[str]], left: int, folder: Path) -> None:
    """Write a file for each part whose kernels, by their keys, are all compiled, and one when no more than ``left``
    of all are missing; the cache is looked at, since builds say nothing."""
    missing = {name: set(keys) for name, keys in parts.items()}
    while missing:
        missing = {name: {key for key in keys if not Store().path(key).exists()} for name, keys in missing.items()}
        for name in [name for name, keys in missing.items() if not keys]:
            (folder / name).touch()
            del missing[name]
        if len(set().union(*missing.values())) <= left:
            (folder / NEARLY).touch()
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="say how many kernels there are, and compile none")
    parser.add_argument("--jobs", type=int, help="compiles at once; left out: as many as cores")
    parser.add_argument("--ready", type=Path, help="a folder for files that say which parts are compiled")
    chosen = parser.parse_args()
    begun = time.monotonic()
    kernels_by_part = wanted(chosen.jobs)
    print(", ".join(f"{name} {len(rows)}" for name, rows in kernels_by_part.items()))
    by_key = {key: (name, kernel) for name, rows in reversed(kernels_by_part.items()) for key, kernel in rows}
    kernels = [kernel for _, kernel in sorted(by_key.values(), key=_place)]
    kinds = Counter(f"{kernel.plan.backend} {kernel.plan.direction}" for kernel in kernels)
    print(f"{len(kernels)} kernels: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}", flush=True)
    if not chosen.list:
        print(f"planned and rendered after {time.monotonic() - begun:.0f} s", flush=True)
        if chosen.ready:
            keys = {name: [key for key, _ in rows] for name, rows in kernels_by_part.items()}
            Thread(target=note, args=(keys, len(kernels) // 12, chosen.ready), daemon=True).start()
        done, wrong = build(kernels, chosen.jobs)
        for name in (*kernels_by_part, NEARLY) if chosen.ready else ():
            (chosen.ready / name).touch()  # tests judge what did not compile
        print(*wrong, f"{done} built, {len(wrong)} not, after {time.monotonic() - begun:.0f} s", sep="\n", flush=True)


def _place(part: tuple[str, Prepared]) -> tuple[int, int]:
    name, kernel = part
    first = FIRST.index(name) if name in FIRST else len(FIRST)
    return first, -_SECONDS.get((kernel.plan.backend, kernel.plan.direction), 1)


if __name__ == "__main__":
    main()
