"""Random masks on this machine's GPU: ``python -m tests.gpu.random_masks --count 1000 --seed 0 --jobs 16``.

Each mask (``tests.fuzz.language``) is compiled, forward and backward, and called through the public functions on ragged
sizes: at first with its expression, then with the bits of a tile map that the calls kept, then on other sizes. Results
are compared with attention in float64 over all pairs, whose mask an evaluator of its own computes from the text, and
the words of tile maps with brute force over tiles. Processes work side by side; a kernel that crashes costs its own.

``--tool memcheck`` runs them under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch

import attngen
from attngen.build.compiles import LOAD
from attngen.build.pipeline import Prepared, compile_kernels, prepare
from attngen.errors import AttngenError, InternalError
from attngen.operations import HELPERS
from attngen.runtime.device import driver as drivers
from attngen.runtime.geometry.capacity import capacity_for
from attngen.runtime.geometry.map_shape import MapShape
from attngen.runtime.geometry.sizes import geometries, map_shapes
from attngen.runtime.kernels.module import Kernel, read_kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.store import worker
from attngen.store.jobs import Job, Workers, run_jobs, worker_processes
from attngen.store.limits import available_cores
from attngen.store.store import Store
from tests.fuzz.language import Drawn, drawn
from tests.fuzz.mask_calls import Findings, MaskCall, by_tiles

_SECONDS = 150.0


@dataclass
class Row:
    """Outcome of the mask of a seed."""

    seed: int
    line: str
    verdict: str = "passed"  # passed | wrong | crashed | plan refuses | plan fails | compile refuses | traceback
    problems: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    seconds: list[float] = field(default_factory=list)  # to plan, to compile, to run

    def describe(self) -> str:
        """Seed, mask and what is wrong, in a few lines."""
        problems = [problem[:1500] for problem in (*self.problems, *self.findings.problems)[:4]]
        return "\n    ".join([f"seed {self.seed}: {self.verdict}: {self.line}", *problems, *self.kernels])


# --- one mask -----------------------------------------------------------------------------------------------


def prepared(made: Drawn) -> list[Prepared]:
    """The kernels of a mask, planned and rendered."""
    return [one for one in prepare(made.spec) if one.plan.direction not in HELPERS]


def built(kernels: Sequence[Prepared], workers: Workers | None = None) -> list[Kernel]:
    """Compile what the cache lacks."""
    store = Store()
    artifacts, failures = compile_kernels(kernels, store=store, jobs=1, workers=workers)
    if failures:
        raise failures[0].error
    return [read_kernel(store.path(artifacts[one.plan.name].key)) for one in kernels]


_stack = ExitStack()


@cache
def _compilers() -> Workers:
    """One process that compiles, which all jobs of this process share."""
    return _stack.enter_context(worker_processes(LOAD))


def check_one(seed: int, last: bool) -> Row:
    """Compile the mask of a seed and compare all of its calls; the job of a worker process."""
    made = drawn(seed)
    row = Row(seed, made.line)
    start = time.monotonic()
    try:
        kernels = prepared(made)
    except AttngenError as error:
        row.verdict, row.problems = "plan refuses", [str(error)]
        if any(isinstance(one, InternalError) for one in error.each or (error,)):
            row.verdict = "plan fails"
        return row
    planned = time.monotonic()
    try:
        ready = built(kernels, _compilers())
    except AttngenError as error:
        row.verdict, row.problems = "compile refuses", [str(error)]
        return row
    compiled = time.monotonic()
    row.kernels = [f"{kernel.name}{' by tile map' if kernel.needs_tile_map else ''}" for kernel in ready]
    try:
        check_calls(made, ready, row.findings)
        torch.cuda.synchronize()
        row.verdict = "wrong" if row.findings.problems else "passed"
    except Exception as error:
        row.verdict, row.problems = "traceback", [f"{type(error).__name__}: {error}"]
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            row.verdict = "crashed"
            worker.retire()
    row.seconds = [round(one, 3) for one in (planned - start, compiled - planned, time.monotonic() - compiled)]
    return row


def check_calls(made: Drawn, kernels: Sequence[Kernel], findings: Findings, *, tight: bool = False) -> None:
    """Make the calls of a mask, and note what they show; ``tight`` inputs end with their memory, instead of in NaNs."""
    registry.clear()
    registry.add(package_of_kernels(list(kernels), "tests/gpu/random_masks"))
    for layout, cases in made.cases.items():
        forward = next(one for one in kernels if (one.layout, one.direction) == (layout, "forward"))
        for number, case in enumerate(cases):
            call = MaskCall(made, layout, case, 1000 * made.seed + number, tight=tight)
            check_call(call, forward, findings, again=number == 0)


def check_call(call: MaskCall, forward: Kernel, findings: Findings, *, again: bool) -> None:
    """Call, and compare with brute force; ``again``, with bits of maps that the first call kept."""
    backward = call.layout != "paged"
    first = None
    for when in ("", "on the second call, ") if again else ("",):
        out, lse, gradients = call.run(backward=backward)
        call.compare(out, lse, gradients, findings, when)
        if first is not None and not torch.equal(first, out):
            findings.problems.append(f"{call.case}: the second call gives another output")
        first = out
    if forward.needs_tile_map and backward:
        check_map(call, forward, findings)


def check_map(call: MaskCall, kernel: Kernel, findings: Findings) -> None:
    """Compare the words of a forward's tile map with brute force over its tiles, and pass the map to a call."""
    inputs = call.inputs
    tiles = attngen.tile_map(inputs.q, inputs.k, variant=call.made.name, **call.packing(), **inputs.arguments)
    if tiles.words is None:
        findings.problems.append(f"{call.case}: the kernel needs a map, but attngen.tile_map makes none")
        return
    shape = map_shape(call, kernel)
    words = tiles.words.flatten()[: shape.row_words].view(shape.batch, shape.heads, shape.rows, 2, shape.words)
    bits = (words[..., None] >> torch.arange(32, device="cuda")) & 1 == 1
    full, partial = bits.flatten(4).unbind(3)  # (batch, heads, query tiles, key tiles)
    for b, rows, keys in call.sequences():
        visible = call.visible(b, rows, keys)  # a score may hide more, of full tiles, too
        some = by_tiles(visible & call.shown_by_score(b, rows, keys), kernel.tile_m, kernel.tile_n)[0]
        every = by_tiles(visible, kernel.tile_m, kernel.tile_n)[1]
        at = slice(None), slice(some.shape[1]), slice(some.shape[2])
        f, p = (one[min(b, shape.batch - 1)].expand(call.case.heads, -1, -1)[at] for one in (full, partial))
        whole = torch.arange(some.shape[2], device="cuda") < (keys.stop - keys.start) // kernel.tile_n
        empty = some & ~f & ~p & whole  # a ragged last tile may be in no list
        wrong = (empty | f & ~every).nonzero().tolist()
        if wrong:
            findings.problems.append(
                f"sequence {b} of {call.case}: the tile map is wrong at (head, row, tile) {wrong[:4]}"
            )
        findings.note("partial tiles that are not", float((p & whole & (every | ~some)).sum()))
    out, lse, _ = call.run(backward=False, tile_map=tiles)
    call.compare(out, lse, {}, findings, "with a map of its own, ")


def map_shape(call: MaskCall, kernel: Kernel) -> MapShape:
    """The shape of the map of a forward."""
    checked = call.inputs.bind(kernel.variant)
    capacity = capacity_for(kernel, checked, drivers.current, 0)
    return map_shapes(geometries(kernel, checked, {}, capacity=capacity))["forward"]


# --- many masks ---------------------------------------------------------------------------------------------


def run(seeds: Sequence[int], jobs: int) -> Iterator[Row]:
    """Yield the outcome of each mask."""
    todo = [Job(f"random_{seed}", "tests.gpu.random_masks:check_one", (seed,)) for seed in seeds]
    for result in run_jobs(todo, jobs, timeout=_SECONDS):
        if result.error is not None:
            seed = seeds[result.index]
            yield Row(seed, drawn(seed).line, "crashed", [str(result.error)])
        else:
            yield result.value


def summary(rows: Sequence[Row]) -> str:
    """Counts of verdicts, kernels and calls, and the worst error of each result."""
    counts = Counter(row.verdict for row in rows)
    kernels = Counter(_kind(name) for row in rows for name in row.kernels)
    worst: dict[str, float] = {}
    for row in rows:
        for name, value in row.findings.worst.items():
            worst[name] = max(worst.get(name, 0.0), value)
    seconds = [sum(parts) for parts in zip(*(row.seconds for row in rows if row.seconds), strict=True)]
    shares = [share for row in rows for share in row.findings.shown]
    mixed, calls = sum(0 < share < 1 for share in shares), sum(row.findings.calls for row in rows)
    return "\n".join(
        [
            f"{len(rows)} masks: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
            f"{calls} calls; {mixed} of {len(shares)} sequences hide pairs and show pairs",
            "kernels: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kernels.items())),
            "largest error over what is allowed: " + ", ".join(f"{name} {value:.2f}" for name, value in worst.items()),
            "seconds of all processes to plan, compile, run: " + ", ".join(f"{one:.0f}" for one in seconds),
        ]
    )


def _kind(name: str) -> str:
    words = name.split("_")
    return " ".join([words[0], *(["triton"] if "tl" in name or "triton" in name else []), *name.split(" ")[1:]])


def report(rows: Sequence[Row], seconds: float) -> None:
    """Print failures and a summary; write all rows to ``$OUT/random_masks.json``."""
    for row in sorted(rows, key=lambda row: row.seed):
        if row.verdict != "passed":
            print(row.describe())
    print(f"{summary(rows)}\n{seconds:.0f} s", flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "random_masks.json").write_text(json.dumps([asdict(row) for row in rows]))


# --- compute-sanitizer --------------------------------------------------------------------------------------

#: Parts of the names of kernels that each tool judges: initcheck has to see the writes of torch's, too, and racecheck
#: takes reads of the threads that wgmma keeps together for unordered (``tests.gpu.sanitized``).
_JUDGED = {"initcheck": (), "racecheck": ("classify",)}


def sanitize(seeds: Sequence[int], tool: str, sanitizer: str, jobs: int) -> Iterator[str]:
    """Run masks under a tool, in some processes at once; yield what each reports, from the mask that it began last."""
    running = [_sanitized(shard, tool, sanitizer) for n in range(jobs) if (shard := seeds[n::jobs])]
    for process in running:
        text = process.communicate()[0]
        ended = process.returncode == 0 and "masks ran" in text and "wrong:" not in text
        if not ended:
            yield text[max(text.rfind("\nbegin "), 0) :][:4000] or f"exit code {process.returncode}"


def _sanitized(seeds: Sequence[int], tool: str, sanitizer: str) -> subprocess.Popen[str]:
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "3", "--report-api-errors", "no",
        *(f"--kernel-name=kernel_substring={name}" for name in _JUDGED.get(tool, ("fwd_", "bwd_", "classify"))),
        sys.executable, "-m", "tests.gpu.random_masks", "--plain", ",".join(map(str, seeds)),
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=root
    )


def run_plainly(seeds: Sequence[int]) -> None:
    """Make the calls of masks that are in the cache, one after the other; inputs end with their memory."""
    for seed in seeds:
        made = drawn(seed)
        ready = built(prepared(made))
        print(f"\nbegin {seed}: {made.line}", flush=True)
        findings = Findings()
        check_calls(made, ready, findings, tight=True)
        for problem in findings.problems:
            print(f"wrong: {problem}")
    torch.cuda.synchronize()
    print(f"{len(seeds)} masks ran")


def seeds_of(text: str) -> list[int]:
    """Seeds separated by commas."""
    return [int(seed) for seed in text.split(",")]


def main() -> None:
    """Run the masks of the command line, and exit 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=available_cores())
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the rest is left")
    parser.add_argument("--seeds", help="these instead, separated by commas")
    parser.add_argument("--tool", help="tools of compute-sanitizer, separated by commas")
    parser.add_argument("--plain", help="run these in this process")
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    if chosen.seeds:
        seeds = seeds_of(chosen.seeds)
    if chosen.plain:
        run_plainly(seeds_of(chosen.plain))
        return
    if chosen.tool:
        start = time.monotonic()
        for row in run(seeds, chosen.jobs):  # compiled before, so that the sanitizer sees no compiler
            if row.verdict != "passed":
                print(row.describe())
        sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
        for tool in chosen.tool.split(","):
            reports = list(sanitize(seeds, tool, sanitizer, chosen.jobs))
            print("\n".join([f"{tool}: {len(seeds)} masks, {len(reports)} reports", *reports]))
            print(f"{time.monotonic() - start:.0f} s", flush=True)
        return
    start, rows = time.monotonic(), []
    for row in run(seeds, chosen.jobs):
        rows.append(row)
        if len(rows) % 100 == 0:
            print(f"{len(rows)} masks after {time.monotonic() - start:.0f} s", flush=True)
        if time.monotonic() - start > chosen.deadline:
            break
    report(rows, time.monotonic() - start)
    sys.exit(1 if any(row.verdict != "passed" for row in rows) else 0)


if __name__ == "__main__":
    main()
