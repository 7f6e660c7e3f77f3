"""A sample of flash-attention's own grids on one GPU, in many processes, with kernels compiled on first call.

    python -m tests.gpu.flash_grid_runs --cases 3000 --json grids.json

Cases that run the same kernels stay in one process, so that processes compile different ones. A crash of one case stops
no other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.integrations.flash_attn.flash_families import run
from tests.integrations.flash_attn.flash_grids import GRIDS, Case, Outcome, draw

#: Seconds after which a case counts as stuck: it may compile a forward and a backward beside many others.
PATIENCE = 240

#: Cases of one kind that a process takes at a time.
GROUP = 24

#: Bytes that a process may keep in torch's allocator between cases.
KEPT = 2**31

#: Refusals that are known: flash-attention's second query, ``qv``.
EXPECTED = "qv is not supported"


def run_all(cases: Sequence[Case], processes: int, cache: Path, device: str = "cuda") -> list[tuple[Case, Outcome]]:
    """Run cases in processes, with kernels in ``cache``, and return their outcomes in the order of the cases."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        kinds[case.kind()].append(place)
    groups: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for places in sorted(kinds.values(), key=len, reverse=True):
        for first in range(0, len(places), GROUP):
            groups.put(places[first : first + GROUP])
    outcomes: dict[int, Outcome] = {}
    threads = [threading.Thread(target=_serve, args=(cases, groups, outcomes, cache, device)) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(case, outcomes[place]) for place, case in enumerate(cases)]


def _serve(
    cases: Sequence[Case], groups: queue.SimpleQueue[list[int]], outcomes: dict[int, Outcome], cache: Path, device: str
) -> None:
    """Have one process run groups of cases until there are none; start another one where it dies or hangs."""
    worker: _Worker | None = None
    while True:
        try:
            left = groups.get_nowait()
        except queue.Empty:
            break
        while left:
            worker = worker or _Worker(cache, device)
            place, left = left[0], left[1:]
            outcome = worker.ask(cases[place])
            outcomes[place] = outcome or Outcome("wrong", f"the process died, or was silent for {PATIENCE} s")
            if outcome is None or outcome.verdict == "lost":
                worker.stop()
                worker = None
                if outcome is not None:
                    outcomes[place] = Outcome("wrong", outcome.reason)
    if worker is not None:
        worker.stop()


class _Worker:
    """A process with its own CUDA context that runs one case at a time."""

    def __init__(self, cache: Path, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, str(cache), device))
        self._process.start()
        there.close()

    def ask(self, case: Case) -> Outcome | None:
        """Return the outcome of a case, or None if the process died or hangs."""
        try:
            self._here.send(case)
            return self._here.recv() if self._here.poll(PATIENCE) else None
        except (EOFError, OSError):
            return None

    def stop(self) -> None:
        self._here.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _work(there: Connection, cache: str, device: str) -> None:
    os.environ["ATTNGEN_CACHE"] = cache
    import torch

    import attngen

    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - one line for each kernel that is compiled
    attngen.jit()
    while True:
        try:
            case = there.recv()
        except EOFError:
            return
        there.send(_outcome(case, device))
        if torch.cuda.memory_reserved() > KEPT:
            torch.cuda.empty_cache()


def _outcome(case: Case, device: str) -> Outcome:
    import torch

    for attempt in range(3):
        try:
            outcome = run(case, device)
            if device == "cuda":
                torch.cuda.synchronize()
            return outcome
        except torch.OutOfMemoryError:  # other processes share the card
            torch.cuda.empty_cache()
            time.sleep(5 * (attempt + 1))
        except Exception as error:
            lost = "CUDA" in str(error) or type(error).__name__ in ("AcceleratorError", "LoadError")
            return Outcome("lost" if lost else "wrong", f"{type(error).__name__}: {error}")
    return Outcome("not run", "not enough memory on the card")


def summary(outcomes: Sequence[tuple[Case, Outcome]]) -> dict[str, dict[str, int]]:
    """Counts by family: right, wrong, refused for ``qv``, otherwise refused, not run."""
    counts: dict[str, Counter[str]] = {family: Counter() for family in GRIDS}
    for case, outcome in outcomes:
        known = outcome.verdict == "refused" and EXPECTED in outcome.reason
        counts[case.family]["refused: qv" if known else outcome.verdict] += 1
    return {family: dict(count) for family, count in counts.items()}


def unexpected(outcomes: Sequence[tuple[Case, Outcome]]) -> list[str]:
    """Lines about the cases that are neither right nor refused for ``qv``."""
    return [
        f"{outcome.verdict}: {outcome.reason.strip()}\n    {case}"
        for case, outcome in outcomes
        if outcome.verdict != "right" and not (outcome.verdict == "refused" and EXPECTED in outcome.reason)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels; default: a new one")
    parser.add_argument("--json", type=Path, help="file for the counts and for what is unexpected")
    given = parser.parse_args()
    import torch

    import attngen
    from attngen.store import Store

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cache = given.cache or Path(folder)
        outcomes = run_all(draw(given.cases, given.seed), given.processes, cache)
        kernels = len(list(Store(cache).all_keys()))
    lines, counts = unexpected(outcomes), summary(outcomes)
    record = {
        "card": torch.cuda.get_device_name(), "attngen": attngen.__version__, "torch": torch.__version__,
        "seed": given.seed, "cases": len(outcomes), "kernels": kernels, "seconds": round(time.perf_counter() - start),
        "counts": counts, "unexpected": lines,
    }  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines))
    print(json.dumps({name: value for name, value in record.items() if name != "unexpected"}, indent=1))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
