"""Sources of ``generated/``: those that are committed, to be read, and the hashes of all others.

``python -m tests.render.generated`` renders all again. What is committed stays, so that a change to one kernel moves no
other; where a kernel is gone, the source that shows most of what none shows yet takes its place. A source is committed
if it lies in the folder and ``sha256.txt`` does not list it.

``python -m tests.render.generated --diff [COMMIT]`` prints how the sources that are not committed differ from those of
a commit: by default where this branch left main, or on main the commit before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name

import pytest

from attngen.build.pipeline import prepare
from attngen.plan import Plan
from attngen.plan.catalogue import named
from attngen.resources import root, specs_dir
from attngen.schema import KernelSpec, load_spec
from tests.render.sources import GOLDEN

GENERATED = root() / "generated"
HASHES = GENERATED / "sha256.txt"
COMMAND = "python -m tests.render.generated"

#: Mark of tests that look at these sources.
needs_generated = pytest.mark.skipif(not GENERATED.is_dir(), reason="a source distribution has no generated/")

#: Specs of the rendered sources, by the names of their folders.
SPECS = {name: specs_dir() / f"{name}.yaml" for name in GOLDEN} | {"others": Path(__file__).with_name("others.yaml")}

#: Committed sources; more only where one more schedule, kind of softmax or way to visit tiles would else be missing.
KEPT = 100

#: Variants and head dims of the kernels of ``hopper.yaml`` that most calls take. The rungs of ``ladder.yaml`` are
#: compared with one another, so all are committed.
_MOST_USED = ("full", "causal", "sliding_window")
_HEAD_DIMS = (64, 128)

_PARTS = re.compile(r"[\w/]+/(?:softmax|visits)/\w+\.cu\.j2")


@dataclass(frozen=True)
class Rendered:
    """A source, and the facts that it shows beside its lines."""

    text: str
    facts: frozenset[tuple[str, str]]

    @property
    def lines(self) -> set[str]:
        """Its lines without indentation, each once."""
        return {line.strip() for line in self.text.splitlines()}


def facts_of(spec: str, kernel: KernelSpec, plan: Plan) -> frozenset[tuple[str, str]]:
    """Facts that a kernel is an example of, by kind; the templates that its view names are parts."""
    schedule = named(plan.schedule)
    view = resolve_name(schedule.view)(plan, schedule.template)
    facts = {
        ("schedule", plan.schedule), ("layout", plan.layout), ("pass", plan.direction), ("backend", plan.backend),
        ("arch", plan.arch.name), *(("part", template) for template in _PARTS.findall(repr(view))),
    }  # fmt: skip
    of_tiles = kernel.fixes_choices or kernel.pack_gqa or kernel.split_tiles
    most_used = kernel.variant.name in _MOST_USED and kernel.head_dim_qk in _HEAD_DIMS and kernel.dtype == "bf16"
    if spec == "ladder" or (spec == "hopper" and most_used and not of_tiles):
        facts.add(("kernel", f"{spec}/{plan.name}"))
    return frozenset(facts)


def rendered(spec: str) -> dict[str, Rendered]:
    """The sources of a spec, by their paths below ``generated``."""
    return {
        f"{spec}/{kernel.source.file_name}": Rendered(kernel.source.text, facts_of(spec, kernel.spec, kernel.plan))
        for kernel in prepare(load_spec(SPECS[spec]))
    }


def digest(text: str) -> str:
    """The hash of a source as ``sha256sum`` prints it."""
    return sha256(text.encode()).hexdigest()


def hashes(text: str) -> dict[str, str]:
    """Hashes by path, from the lines of ``sha256.txt``."""
    return {path: number for number, path in (line.split("  ") for line in text.splitlines())}


def listed() -> dict[str, str]:
    """Hashes of the sources that are not committed."""
    return hashes(HASHES.read_text()) if HASHES.is_file() else {}


def there() -> set[str]:
    """Paths of the sources in the folder, below it."""
    return {path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("*/*.*")}


def chosen(sources: Mapping[str, Rendered], kept: Collection[str]) -> set[str]:
    """The sources to commit: those of ``kept`` that are still rendered, and more until there are ``KEPT``, each of them
    the one that adds the most facts, then the most lines."""
    chosen = {path for path in kept if path in sources}
    facts = frozenset().union(*(source.facts for source in sources.values()))
    facts -= frozenset().union(*(sources[path].facts for path in chosen))
    rest = {path: source.lines for path, source in sources.items() if path not in chosen}
    shown = set().union(*(sources[path].lines for path in chosen))
    while rest and (facts or len(chosen) < KEPT):
        best = max(rest, key=lambda path: (len(facts & sources[path].facts), len(rest[path] - shown), path))
        shown |= rest.pop(best)
        facts -= sources[best].facts
        chosen.add(best)
    return chosen


def update() -> str:
    """Render all sources, write those that are committed and the hashes of the others, and say what changed."""
    with ProcessPoolExecutor() as pool:
        sources = {path: source for part in pool.map(rendered, SPECS) for path, source in part.items()}
    before, old = there(), listed()
    kept = chosen(sources, before - old.keys())
    others = {path: digest(source.text) for path, source in sorted(sources.items()) if path not in kept}
    for path in before - kept:
        (GENERATED / path).unlink()
    written = 0
    for path in sorted(kept):
        file, text = GENERATED / path, sources[path].text
        if not file.is_file() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            written += 1
    HASHES.write_text("".join(f"{number}  {path}\n" for path, number in others.items()))
    lines = [set().union(*(sources[path].lines for path in paths)) for paths in (kept, sources)]
    changed = sum(old.get(path) != number for path, number in others.items())
    return (
        f"{len(kept)} sources with {len(lines[0])} of {len(lines[1])} distinct lines, {written} written, "
        f"{len(before - kept)} removed; {len(others)} hashes, {changed} changed"
    )


def git(*arguments: str) -> str | None:
    """Run git; its output, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root(), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def base() -> str | None:
    """The commit where this branch left main, and on main the one before; None in a clone without it."""
    here = git("rev-parse", "HEAD")
    for command in (["merge-base", "HEAD", "origin/main"], ["rev-parse", "--verify", "--quiet", "HEAD~1"]):
        commit = git(*command)
        if commit is not None and commit != here:
            return commit.strip()
    return None


def differences(commit: str | None) -> Iterator[str]:
    """Lines that show how the sources that are not committed differ from those of a commit. Only specs are rendered of
    which a hash differs, by the generator of either side."""
    text = git("show", f"{commit}:generated/{HASHES.name}") if commit else None
    if text is None:
        where = f"commit {commit[:12]} has no generated/{HASHES.name}" if commit else "this clone has no earlier commit"
        yield f"{where}: nothing to compare sources with that are not committed"
        return
    before, now = hashes(text), listed()
    changed = sorted(path for path in before | now if before.get(path) != now.get(path))
    yield f"{len(changed)} hashes of sources that are not committed differ from those of commit {commit[:12]}"
    if not changed:
        return
    specs = {path.partition("/")[0] for path in changed}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        subprocess.run(f"git archive {commit} . ':!generated' | tar -x -C '{tree}'", shell=True, cwd=root(), check=True)
        sides = [(tree, Path(folder, "before")), (root(), Path(folder, "now"))]
        files = [SPECS[name].relative_to(root()) for name in SPECS if name in specs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failed = pool.map(lambda job: _render(*job), [(*side, file) for file in files for side in sides])
        yield from filter(None, failed)
        texts = [
            {path: Path(out, path).read_text() for path in changed if Path(out, path).is_file()} for _, out in sides
        ]
    yield from compared(*texts)


def _render(tree: Path, out: Path, file: Path) -> str:
    """Render a spec by the generator of a tree; what went wrong, if anything."""
    if not (tree / file).is_file():
        return ""
    done = subprocess.run(
        [sys.executable, "-m", "attngen", "build", file, "--render-only", "--out", out],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"{file} cannot be rendered in {out.name}: {done.stderr}" if done.returncode else ""


def compared(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """The differences of two sets of sources as unified diffs; one that several sources share is printed once."""
    alike: dict[tuple[str, ...], list[tuple[str, Sequence[str]]]] = {}
    for path in sorted(before | now):
        if path not in before or path not in now:
            yield f"only {'now' if path in now else 'before'}: {path}"
        elif before[path] != now[path]:
            lines = (text[path].splitlines() for text in (before, now))
            diff = list(unified_diff(*lines, f"before/{path}", f"now/{path}", lineterm=""))
            alike.setdefault(tuple(line for line in diff[2:] if line[0] in "+-"), []).append((path, diff))
    for (_, diff), *more in alike.values():
        yield from ("", *diff)
        if more:
            yield f"... and the same lines in {len(more)} more, such as {more[len(more) // 2][0]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--diff"]:
        print(*differences(sys.argv[2] if sys.argv[2:] else base()), sep="\n")
    else:
        print(update())
