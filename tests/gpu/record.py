"""Run all tests of this folder on the card that is here, and record what it has seen: ``python -m tests.gpu.record``.

    python -m tests.gpu.record --limit 540
    python -m tests.gpu.record --docs

The first writes ``record.json``, the second quotes it in docs/limits.md. All cores compile what the tests call; tests
that need a card for themselves run meanwhile, in one process, and then all others, in one process for each core. Of
several cards, the last one is for the former alone until they have ended, and the latter begin at once on the other
cards, each test when the kernels that it calls are compiled. A test that loses the CUDA context, crashes or hangs ends
its process and fails alone. A test that found the card's memory taken by others runs again in the end. What has not
ended when the limit is reached is named as not run. ``--log`` keeps what was printed, errors and times; a run of some
files needs ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attngen.compile.toolchain import CUPY, chosen_nvrtc
from attngen.inspect.known import causes_table
from attngen.inspect.record import FAILED, NOT_RUN, PASSED, REFUSED, Record, records, source_hashes, table, write
from attngen.lab.bench.figures import clean_commit
from attngen.store.limits import available_cores
from tests.gpu.events import NEARLY

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
DOCS = ROOT / "docs" / "limits.md"

#: Seconds after which a test is taken to wait forever: its process ends, and it fails.
TEST_SECONDS = 270

#: Of the limit, what tests may take that need the card for themselves, and how long they may take after the compiles.
_ALONE_SHARE, _ALONE_LONGER = 0.45, 20.0

#: Command in front of all but these, which measure times and take long one after the other.
_BEHIND = ("nice", "-n", "5")

#: Of the limit, what is kept for those of them that did not end, at most so many seconds; how many of the rest are
#: begun again, and how many a process takes.
_REST_SHARE, _REST_SECONDS, _REST_TESTS, _REST_EACH = 0.08, 40.0, 100, 8

#: Topics of the files of tests.
FAMILIES = {
    "forward": (
        "accuracy", "hidden", "memory", "stress", "narrow", "attempts", "constants", "divisions", "divisors", "bounds",
        "looking", "calls", "waves", "shared_tiles", "mask_bits", "tile_maps", "biases", "outside", "transforms",
        "columns", "score_values", "tables", "cards", "fallback", "arrays", "block_mask", "max_logits",
    ),
    "backward": ("backward", "backward_stress", "cut_tiles", "jvp", "mla_backward"),
    "decode": (
        "decode", "mla", "mla_8_bits", "wide", "indexed", "listed", "block_lists", "decode_stress",
        "dependent_launches",
    ),
    "pages and caches": (
        "append", "cached", "merge", "paged", "pages", "serving_loop", "shared_prefix", "transformers_paged", "widen",
    ),
    "8 bits": ("fp8", "quantize", "caches_8_bits"),
    "packed heads": ("packed_heads",),
    "index scores": ("index_scores",),
    "several GPUs": ("parallel", "rows_by_tiles", "sharded"),
    "dropout and sinks": ("dropout", "sinks", "weights"),
    "integrations": (
        "integrations", "integration_gradients", "integration_more", "integration_dropout", "caches", "compiled",
        "engines", "sparse_engines", "flash_attn_4", "flash_grids", "flex_attention", "flex_looks", "model_spec",
        "models_first_call", "natten", "triangle", "trees", "block_sparse",
    ),
    "generated specs": ("fuzzed", "generated", "random_masks"),
    "commands, packages and examples": ("bench", "examples", "first_call", "package"),
}  # fmt: skip
_FAMILY = {name: family for family, names in FAMILIES.items() for name in names}


def family_of(test: str) -> str:
    """Return the family of a test, by the name of its file."""
    return _FAMILY.get(Path(test.split("::")[0]).stem.removeprefix("test_"), "others")


# --- what became of the tests ----------------------------------------------------------------------------------------


@dataclass
class Test:
    """State of a test, from the lines of ``tests.gpu.events``."""

    begun: bool = False
    ended: bool = False
    failed: bool = False
    skipped: str = ""
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    worker: str = ""

    def outcome(self) -> tuple[str, str]:
        """Return the outcome, and why the test was refused or not run."""
        if self.failed:
            return FAILED, ""
        if self.skipped:
            return (REFUSED if self.skipped.startswith("refused") else NOT_RUN), self.skipped
        if self.ended:
            return PASSED, ""
        return NOT_RUN, "cut off at the limit" if self.begun else "the limit was reached before"


@dataclass
class Suite:
    """All tests that were collected, by name, and how many only ``-m exhaustive`` runs."""

    tests: dict[str, Test] = field(default_factory=dict)
    exhaustive: int = 0

    def read(self, path: Path) -> None:
        """Take the lines of a file of events, all of them; a last one that is cut off is none."""
        self.tests.clear()
        with suppress(FileNotFoundError), path.open() as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):
                    self._take(json.loads(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "collected":
            for name in event["tests"]:
                self.tests.setdefault(name, Test())
            return
        if kind == "left out":
            self.exhaustive = max(self.exhaustive, event["exhaustive"])
            return
        test = self.tests.setdefault(event["test"], Test())
        if kind == "begins":
            test.begun, test.failed = True, False  # it may have been run before
            test.texts.clear()
        elif kind == "uncollected":
            test.failed = test.begun = test.ended = True
            test.texts.append(event["text"])
        else:
            test.seconds += event["seconds"]
            test.worker = event["worker"] or test.worker
            test.ended |= event["when"] not in ("setup", "call")
            if event["outcome"] == "failed":
                test.failed = test.ended = True
                test.texts.append(event["text"])
            elif event["outcome"] == "skipped":
                test.skipped = event["text"]

    def short_of_memory(self) -> list[str]:
        """Return the tests that failed because tests beside them had taken the memory of the card."""
        return [
            name
            for name, test in self.tests.items()
            if test.failed and any("OutOfMemoryError" in each for each in test.texts)
        ]

    def not_ended(self) -> list[str]:
        """Return the tests of which nothing is known yet."""
        return [name for name, test in self.tests.items() if not (test.ended or test.failed or test.skipped)]


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A program with its own process group, whose output goes to a file; all of it ends at a deadline."""

    process: subprocess.Popen[bytes]
    deadline: float

    @classmethod
    def start(cls, command: Sequence[str], log: Path, deadline: float, **environment: str) -> Program:
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | environment, start_new_session=True,
            )  # fmt: skip
        return cls(process, deadline)

    def wait_for(self, file: Path) -> None:
        """Wait until there is a file, the program has ended, or its deadline."""
        while self.process.poll() is None and not file.exists() and time.monotonic() < self.deadline:
            time.sleep(0.2)

    def wait(self) -> int:
        """Return the exit code, or that of the signal that ended it at the deadline."""
        try:
            self.process.wait(timeout=max(self.deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def pytest_command(tests: Sequence[str], marks: str, workers: int) -> list[str]:
    """Return the command that runs tests in workers that are replaced when they end."""
    return [
        sys.executable, "-m", "pytest", *tests, "-m", marks, "-n", str(workers), "--dist", "worksteal",
        "--max-worker-restart", "100000", "-p", "tests.gpu.events", "-p", "no:cacheprovider",
        "-p", "no:hypothesispytest", "-q", "--tb", "short", "--continue-on-collection-errors",
        "-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true",
    ]  # fmt: skip


def run(
    paths: Sequence[str], *, workers: int, limit: float | None, folder: Path, prebuild: bool = True
) -> tuple[Suite, list[str]]:
    """Run the tests of some paths; return what became of them, and what to say of each step."""
    begun = time.monotonic()
    deadline = begun + (limit if limit is not None else 24 * 3600)
    kept = min(_REST_SECONDS, _REST_SHARE * (deadline - begun))
    events, said, suite = folder / "events", [], Suite()
    cores = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "ATTNGEN_TEST_EVENTS": str(events)}
    own_card = {"CUDA_VISIBLE_DEVICES": str(cards() - 1)} if cards() > 1 else {}

    def say(what: str, code: int) -> None:
        said.append(f"{what}: {time.monotonic() - begun:.0f} s{f', exit code {code}' if code else ''}")

    ready = folder / "ready"
    ready.mkdir()
    first = None
    if prebuild:
        command = [*_BEHIND, sys.executable, "-m", "tests.gpu.prebuilt", "--ready", str(ready)]
        first = Program.start(command, folder / "prebuilt", begun + 0.8 * (deadline - begun))
    early = deadline - kept if own_card else min(deadline, begun + _ALONE_SHARE * (deadline - begun))
    command = pytest_command(paths, "alone and not exhaustive", 1)
    alone, alone_ended = Program.start(command, folder / "alone", early, **cores, **own_card), folder / "alone-ended"

    def start_others() -> Program:
        suite.read(events)
        before_rest = deadline - (kept if suite.not_ended() or own_card else 0)
        command = [*_BEHIND, *pytest_command(paths, "not alone and not exhaustive", workers)]
        shared_cards = {"ATTNGEN_TEST_ALONE": str(alone_ended)} if own_card else {}
        gates = {"ATTNGEN_TEST_READY": str(ready)} if prebuild else {}
        return Program.start(command, folder / "tests", before_rest, **cores, **shared_cards, **gates)

    others = alone_code = None
    if own_card:
        alone.wait_for(events)  # which has been written when tests are collected: the others find them compiled
        others = start_others()
        alone_code = ThreadPoolExecutor(1).submit(alone.wait)
        alone_code.add_done_callback(lambda _: alone_ended.touch())
    if first is not None:
        first.wait_for(ready / NEARLY)
        (ready / NEARLY).touch()  # whatever became of it
        say("nearly all kernels are compiled", 0)
    if others is None:
        if first is not None:
            alone.deadline = min(early, time.monotonic() + _ALONE_LONGER)
        say("tests that need the card for themselves", alone.wait())
        others = start_others()
    if first is not None:
        say("kernels are compiled", first.wait())
    say("all other tests", others.wait())
    if alone_code is not None:
        say("tests that need a card for themselves", alone_code.result())
    suite.read(events)
    rest = [*suite.short_of_memory(), *suite.not_ended()]
    if rest and deadline - time.monotonic() > kept / 4:
        again = rest[:_REST_TESTS]
        command = pytest_command(again, "not exhaustive", min(workers, -(-len(again) // _REST_EACH)))
        say("what was left", Program.start(command, folder / "rest", deadline, **cores).wait())
        suite.read(events)
    return suite, said


# --- the record ------------------------------------------------------------------------------------------------------


def record_of(suite: Suite, seconds: float, sources: Mapping[str, str], commit: str | None) -> Record:
    """Return the record of a run that has just ended."""
    families: dict[str, Counter[str]] = defaultdict(Counter)
    named: dict[str, list[str]] = defaultdict(list)
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, test in sorted(suite.tests.items()):
        outcome, why = test.outcome()
        families[family_of(name)][outcome] += 1
        if outcome == NOT_RUN:
            reasons[why.splitlines()[0][:200]].append(name)
        elif outcome != PASSED:
            named[outcome].append(name)
    card, driver = card_and_driver()
    return Record(
        card=card, driver=driver, date=datetime.now(timezone.utc).date().isoformat(), commit=commit, sources=sources,
        versions=versions(), seconds=round(seconds, 1),
        families={name: dict(counts) for name, counts in sorted(families.items())},
        failed=named[FAILED], refused=named[REFUSED], not_run=dict(reasons), exhaustive=suite.exhaustive,
    )  # fmt: skip


def card_and_driver() -> tuple[str, str]:
    """Return the names of the card and of its driver, as nvidia-smi has them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return "no card", "none"
    card, _, driver = text.splitlines()[0].partition(", ")
    return card, driver


@cache
def cards() -> int:
    """Return the number of cards, as nvidia-smi lists them; 0 without it."""
    command = ["nvidia-smi", "--list-gpus"]
    try:
        return len(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        return 0


def versions() -> dict[str, str]:
    """Return the versions of what compiles and runs kernels."""
    by_name = {"python": platform.python_version()}
    for name in ("torch", "triton", *CUPY, "transformers"):
        with suppress(metadata.PackageNotFoundError):
            by_name[name] = metadata.version(name)
    nvrtc = chosen_nvrtc()
    return by_name | ({"nvrtc": nvrtc.version} if nvrtc else {})


def report(suite: Suite, record: Record, said: Iterable[str], folder: Path) -> str:
    """Report of a run: counts, failures, times of files and of tests, and what programs printed."""
    lines = [*said, f"{record.card}: {record.counts()}, {record.exhaustive} exhaustive", ""]
    lines += [f"{family}: {dict(counts)}" for family, counts in record.families.items()]
    lines += ["", *(f"FAILED {name}" for name in record.failed)]
    lines += [f"NOT RUN, {len(names)}: {why}: {names[0]} ..." for why, names in record.not_run.items()]
    files: Counter[str] = Counter()
    for name, test in suite.tests.items():
        files[name.split("::")[0]] += test.seconds  # type: ignore[assignment]
    lines += ["", "seconds of files:", *(f"{seconds:8.1f} {name}" for name, seconds in files.most_common())]
    slowest = sorted(suite.tests.items(), key=lambda row: -row[1].seconds)[:150]
    lines += ["", "seconds of tests:", *(f"{test.seconds:8.1f} {name} {test.worker}" for name, test in slowest)]
    for name in record.failed:
        lines += ["", f"=== {name}", *(text[-3000:] for text in suite.tests[name].texts)]
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "events":
            lines += ["", f"##### {path.name}", path.read_text(errors="replace")[-400_000:]]
    return "\n".join(lines) + "\n"


def quote(path: Path = DOCS, rows: Sequence[Record] | None = None) -> str:
    """Return the text of docs/limits.md with the records in its section."""
    text = path.read_text()
    head, mark, after = text.partition("<!-- records -->\n")
    if not mark:
        raise SystemExit(f"{path} has no line '<!-- records -->'")
    _, end, tail = after.partition("<!-- end of records -->\n")
    rows = records() if rows is None else rows
    return f"{head}{mark}\n{table(rows)}\n{causes_table(rows)}\n{end}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders of tests; left out: this folder")
    parser.add_argument("--limit", type=float, help="seconds, compiling included, after which nothing goes on")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes that run tests")
    parser.add_argument("--out", type=Path, help="the file of records; left out: record.json beside the tests")
    parser.add_argument("--log", type=Path, help="a file for errors, times, and what was printed")
    parser.add_argument("--commit", help="the commit, where the checkout came without its history")
    parser.add_argument("--no-prebuild", action="store_true", help="leave kernels to the tests that call them")
    parser.add_argument("--docs", action="store_true", help="run nothing, and quote the records in docs/limits.md")
    chosen = parser.parse_args(arguments)
    if chosen.docs:
        DOCS.write_text(quote())
        return 0
    if chosen.paths and chosen.out is None:
        parser.error("a run of some files is no record of the whole suite: --out says where to write it")
    begun, sources, commit = time.monotonic(), source_hashes(), chosen.commit or clean_commit()
    with tempfile.TemporaryDirectory(prefix="attngen-record-") as scratch:
        folder = Path(scratch)
        suite, said = run(
            chosen.paths or [str(FOLDER.relative_to(ROOT))], workers=chosen.workers, limit=chosen.limit, folder=folder,
            prebuild=not chosen.no_prebuild,
        )  # fmt: skip
        record = record_of(suite, time.monotonic() - begun, sources, commit)
        if suite.tests:
            write(chosen.out or FOLDER / "record.json", record)
        text = report(suite, record, said, folder)
    if chosen.log:
        chosen.log.write_text(text)
    print("\n".join([*said, record.counts(), *(f"FAILED {name}" for name in record.failed[:50])]))
    if not suite.tests:
        print(text[-5000:], "no tests were collected", sep="\n")
    return 0 if suite.tests and not record.failed else 1


if __name__ == "__main__":
    sys.exit(main())
