"""Generated specs on this machine's GPUs: ``python -m tests.gpu.generated 0:1000``, and ``--memcheck 0:200``.

``--cards`` takes specs for cards without wgmma instead. Their kernels are compiled for these cards, and for the GPU
that is here, which runs them.

All cores compile, then as many processes run what was compiled, forward and backward, against the float64 reference.
A kernel that crashes costs its process and is named. The summary counts verdicts; the failures, with their seeds,
are printed and written as JSON to ``$OUT/generated.json`` where OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from attngen.build.pipeline import compile_kernels
from attngen.errors import InternalError
from attngen.store.jobs import Job, run_jobs
from attngen.store.limits import available_cores
from attngen.store.store import Store
from tests.fuzz.legal_cards import CARDS
from tests.fuzz.trials import Planned, asked_for

#: The functions that plan a spec and that try a kernel, by name, since they run in other processes.
PLANNER, CARD_PLANNER = "tests.fuzz.trials:plan_one", "tests.fuzz.trials:plan_for_card"
TRIER = "tests.fuzz.trials:try_one"

#: Seconds that one kernel may take on its cases; one that waits for itself forever is stopped.
_TRIAL_SECONDS = 180.0

#: Specs that are compiled, and then run, before the next ones: a deadline costs no more than these.
_CHUNK = 250


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel, or a spec without kernels, and what became of it."""

    seed: int
    name: str
    verdict: str  # passed | wrong | crashed | plan refuses | compile refuses | traceback | no legal call | elsewhere
    problem: str = ""
    fixed: tuple[str, ...] = ()
    folder: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is a defect; of a spec without a legal call nothing is known."""
        return self.verdict not in ("passed", "no legal call", "slow as fixed", "compiled", "elsewhere")


def compiled(seeds: Sequence[int], jobs: int, planner: str = PLANNER) -> list[Row]:
    """Plan and compile the specs of some seeds; what compiled has the verdict ``compiled``, or ``elsewhere`` if it is
    for another card, and its folder."""
    rows: list[Row] = []
    todo: list[Planned] = []
    for result in run_jobs([Job(f"legal_{seed}", planner, (seed,)) for seed in seeds], jobs):
        seed = seeds[result.index]
        if result.error is not None:
            rows.append(Row(seed, f"legal_{seed}", "traceback", str(result.error)))
        elif result.value.verdict is not None:
            outcome = result.value
            rows.append(Row(seed, f"legal_{seed}", outcome.verdict, outcome.problem, outcome.fixed))
        else:
            todo.append(result.value)
    store = Store()
    kernels = {kernel.plan.name: spec for spec in todo for kernel in spec.kernels}
    built, failures = compile_kernels([k for spec in todo for k in spec.kernels], store=store, jobs=jobs)
    specs = {f"legal_{spec.seed}": spec for spec in todo}
    for kernel in built.values():
        spec = specs[kernel.manifest["variant"]["name"]]
        verdict = "elsewhere" if kernel.manifest["arch"] in CARDS else "compiled"
        rows.append(Row(spec.seed, kernel.name, verdict, fixed=spec.fixed, folder=str(store.path(kernel.key))))
    for failure in failures:
        spec, text = kernels[failure.name], str(failure.error)
        crashed = isinstance(failure.error, InternalError) or "its compiler process" in text
        slow = "slow as fixed" if asked_for(spec.fixed, failure.error) else "compile refuses"
        rows.append(Row(spec.seed, failure.name, "traceback" if crashed else slow, text, spec.fixed))
    return rows


def tried(rows: Sequence[Row], jobs: int) -> Iterator[Row]:
    """Run what was compiled; the other rows stay as they are."""
    yield from (row for row in rows if row.verdict != "compiled")
    todo = [row for row in rows if row.verdict == "compiled"]
    calls = [Job(row.name, TRIER, (row.folder, row.seed)) for row in todo]
    for result in run_jobs(calls, jobs, timeout=_TRIAL_SECONDS):
        row = todo[result.index]
        if result.error is not None:
            text = str(result.error)
            ours = "traceback" if isinstance(result.error, InternalError) else "crashed"
            yield Row(row.seed, row.name, ours, text, row.fixed)
        else:
            verdict, problem = result.value
            yield Row(row.seed, row.name, verdict, problem, row.fixed)


def run(
    seeds: Sequence[int], *, jobs: int | None = None, deadline: float | None = None, planner: str = PLANNER
) -> list[Row]:
    """Compile and run the specs of some seeds; after ``deadline`` seconds no further ones are begun."""
    jobs, start = jobs or available_cores(), time.monotonic()
    rows: list[Row] = []
    for first in range(0, len(seeds), _CHUNK):
        if deadline is not None and time.monotonic() - start > deadline:
            break
        chunk = seeds[first : first + _CHUNK]
        rows += tried(compiled(chunk, jobs, planner), jobs)
        report(rows, f"{min(first + _CHUNK, len(seeds))} specs after {time.monotonic() - start:.0f} s")
    return rows


def memchecked(seeds: Sequence[int], sanitizer: str, *, jobs: int | None = None, planner: str = PLANNER) -> list[Row]:
    """Compile the specs of some seeds and run them under compute-sanitizer's memcheck, some processes at once."""
    jobs = jobs or available_cores()
    outcomes = compiled(seeds, jobs, planner)
    rows = [row for row in outcomes if row.verdict != "compiled"]
    todo = [row for row in outcomes if row.verdict == "compiled"]
    shards = [todo[shard::jobs] for shard in range(min(jobs, len(todo)))]
    while any(shards):
        running = [(shard, _sanitized(shard, sanitizer)) for shard in shards if shard]
        shards = []
        for shard, process in running:
            text = process.communicate()[0]
            begun = text.count("\nbegin ")
            done = shard[:begun]
            if process.returncode != 0 and not begun:
                raise RuntimeError(text[-4000:])
            rows += [Row(row.seed, row.name, "passed", fixed=row.fixed) for row in done[: len(done) - 1]]
            if done:
                last = done[-1]
                bad = process.returncode != 0
                problem = _first_report(text) if bad else ""
                rows.append(Row(last.seed, last.name, "crashed" if bad else "passed", problem, last.fixed))
            shards.append(shard[begun:])  # the first report ended the process: the rest go on in another one
        report(rows, "memcheck")
    return rows


def _sanitized(rows: Sequence[Row], sanitizer: str) -> subprocess.Popen[str]:
    command = [
        sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "3", "--report-api-errors", "no",
        *(f"--kernel-name=kernel_substring={name}" for name in ("fwd_", "bwd_", "classify_")),
        sys.executable, "-m", "tests.gpu.generated_memory", *(row.folder for row in rows),
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def _first_report(text: str) -> str:
    """Return the first lines that the sanitizer reported, or the end of what was printed."""
    said = [line.strip("= ") for line in text.splitlines() if line.startswith("=========")]
    errors = [line for line in said if line and not line.startswith(("COMPUTE-SANITIZER", "Host Frame", "Saved host"))]
    return " | ".join(errors[:6]) or text[-600:]


def report(rows: Sequence[Row], title: str) -> None:
    """Print the counts so far, and write all failures to ``$OUT/generated.json``."""
    counts = Counter(row.verdict for row in rows)
    print(f"{title}: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}", flush=True)
    if "OUT" in os.environ:
        content = {"counts": counts, "failures": [asdict(row) for row in rows if row.verdict != "passed"]}
        Path(os.environ["OUT"], "generated.json").write_text(json.dumps(content, indent=1))


def describe(rows: Sequence[Row]) -> list[str]:
    """Return a line for each failure: its seed, its kernel and the first line of what is wrong."""
    return [
        f"seed {row.seed}, {row.name}{', fixed: ' + ' '.join(row.fixed) if row.fixed else ''}: {row.verdict}: "
        f"{(row.problem.splitlines() or [''])[0][:300]}"
        for row in sorted(rows, key=lambda row: (row.verdict, row.seed))
        if row.failed
    ]


def seeds_of(text: str) -> range:
    """Return the seeds of ``a:b``, from a up to b, or of a count."""
    first, _colon, last = text.rpartition(":")
    return range(int(first or 0), int(last))


def main() -> None:
    """Run the seeds of the command line, and exit 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="?", default=os.environ.get("ATTNGEN_FUZZ_SEEDS", "0:1000"))
    parser.add_argument("--jobs", type=int, help="processes at once; left out: as many as cores")
    parser.add_argument("--deadline", type=float, help="seconds after which no further specs are begun")
    parser.add_argument("--cards", action="store_true", help="specs for cards without wgmma")
    parser.add_argument("--memcheck", metavar="SANITIZER", nargs="?", const="compute-sanitizer")
    chosen = parser.parse_args()
    seeds, planner = seeds_of(chosen.seeds), CARD_PLANNER if chosen.cards else PLANNER
    if chosen.memcheck:
        rows = memchecked(seeds, chosen.memcheck, jobs=chosen.jobs, planner=planner)
    else:
        rows = run(seeds, jobs=chosen.jobs, deadline=chosen.deadline, planner=planner)
    lines = describe(rows)
    print("\n".join(lines))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
