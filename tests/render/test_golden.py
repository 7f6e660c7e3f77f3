"""``generated/`` is what templates and specs give, and shows each schedule, softmax, layout, pass and backend."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import pytest

from attngen.build.generate import generate
from attngen.build.pipeline import plans
from attngen.plan.catalogue import schedules
from attngen.plan.layouts import LAYOUTS
from attngen.resources import templates_dir
from attngen.schema import load_spec
from tests.render import generated
from tests.render.generated import (
    COMMAND,
    GENERATED,
    HASHES,
    KEPT,
    SPECS,
    Rendered,
    base,
    chosen,
    compared,
    differences,
    digest,
    facts_of,
    listed,
    needs_generated,
    there,
)  # fmt: skip
from tests.render.sources import SHIPPED
from tests.sampling import few


@needs_generated
@few("name", SPECS, always=[*map([*SPECS].index, ("fp8", "others"))])
def test_generated_sources_are_up_to_date(name: str, tmp_path: Path) -> None:
    folder = generate(SPECS[name], tmp_path).folder
    fresh = {f"{name}/{path.name}": path.read_text() for path in folder.iterdir()}
    others = {path: number for path, number in listed().items() if path.startswith(f"{name}/")}
    kept = {path for path in there() if path.startswith(f"{name}/")}
    assert not kept & others.keys(), f"generated/{name} holds sources that {HASHES.name} lists: run {COMMAND}"
    assert fresh.keys() == kept | others.keys(), f"other kernels than in generated/{name}: run {COMMAND}"
    stale = sorted(path for path in kept if (GENERATED / path).read_text() != fresh[path])
    assert not stale, f"{len(stale)} files of generated/{name} are stale: run {COMMAND}; the first is {stale[0]}"
    stale = [path for path, number in others.items() if digest(fresh[path]) != number]
    assert not stale, f"{len(stale)} hashes of generated/{name} are stale: run {COMMAND}; the first is of {stale[0]}"


@pytest.mark.exhaustive
@needs_generated
def test_each_schedule_part_layout_pass_and_backend_is_among_the_committed_sources() -> None:
    kept = {path.rpartition(".")[0] for path in there()}
    every = [(name, *each) for name, spec in SPECS.items() for each in plans(load_spec(spec))]
    facts = [facts_of(*each) for each in every if f"{each[0]}/{each[2].name}" in kept]
    shown = frozenset().union(*facts)
    rows = [row for direction in {plan.direction for _, _, plan in every} for row in schedules(direction)]
    parts = [path for kind in ("softmax", "visits") for path in templates_dir().glob(f"**/{kind}/*.j2")]
    wanted = {
        *(("schedule", row.name) for row in rows), *(("pass", row.direction) for row in rows),
        *(("backend", row.backend) for row in rows), *(("layout", layout) for layout in LAYOUTS),
        *(("part", path.relative_to(templates_dir()).as_posix()) for path in parts if not path.name.startswith("_")),
    }  # fmt: skip
    missing = sorted(wanted - shown)
    assert not missing, f"generated/ shows no {missing}: add a kernel to {SPECS['others']}, run {COMMAND}"


@needs_generated
def test_generated_holds_nothing_else() -> None:
    assert {path.name for path in GENERATED.iterdir()} <= {*SHIPPED, "others", HASHES.name}
    assert {path.suffix for path in GENERATED.glob("*/*")} <= {".py", ".cu"}
    assert KEPT <= len(there()) <= KEPT * 1.1
    assert list(listed()) == sorted(listed())


def test_committed_sources_stay_and_one_that_is_gone_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "KEPT", 2)
    first, second = frozenset({("layout", "dense")}), frozenset({("layout", "paged")})
    sources = {
        "a": Rendered("1\n2\n3\n", first), "b": Rendered("1\n2\n", first), "c": Rendered("4\n", second),
        "d": Rendered("4\n5\n", second),
    }  # fmt: skip
    assert chosen(sources, ()) == {"a", "d"}
    assert chosen(sources, {"b", "c"}) == {"b", "c"}
    assert chosen(sources, {"b", "gone"}) == {"b", "d"}  # what shows a layout first
    assert chosen(sources, {"c", "d"}) == {"a", "c", "d"}  # and one more where a fact would else be missing


def test_a_difference_that_sources_share_is_printed_once() -> None:
    before = {"a": "x\n1\n", "b": "y\n1\n", "c": "x\n1\n", "same": "", "gone": ""}
    now = {"a": "x\n2\n", "b": "y\n2\n", "c": "x\n3\n", "same": "", "new": ""}
    assert "\n".join(compared(before, now)).split("\n\n") == [
        "only before: gone\nonly now: new",
        "--- before/a\n+++ now/a\n@@ -1,2 +1,2 @@\n x\n-1\n+2\n... and the same lines in 1 more, such as b",
        "--- before/c\n+++ now/c\n@@ -1,2 +1,2 @@\n x\n-1\n+3",
    ]


#: A generator of one source, in place of attngen's.
_GENERATOR = """
import pathlib, sys
assert sys.argv[1:5] == ["build", "specs/index.yaml", "--render-only", "--out"]
out = pathlib.Path(sys.argv[5], "index")
out.mkdir(parents=True)
(out / "kernel.cu").write_text("LINE\\n")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(which("git") is None, reason="needs git")
def test_differences_from_the_commit_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(line: str, number: str) -> None:
        for name, text in (
            ("specs/index.yaml", ""), ("attngen/__init__.py", ""),
            ("attngen/__main__.py", _GENERATOR.replace("LINE", line)),
            ("generated/sha256.txt", f"{number}  index/kernel.cu\n"),
        ):  # fmt: skip
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for command in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b commit --quiet -m next"):
            subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)

    def printed() -> list[str]:
        return "\n".join(differences(base())).splitlines()

    monkeypatch.setattr(generated, "root", lambda: tmp_path)
    monkeypatch.setattr(generated, "HASHES", tmp_path / "generated/sha256.txt")
    monkeypatch.setattr(generated, "SPECS", {"index": tmp_path / "specs/index.yaml"})
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    none = ["this clone has no earlier commit: nothing to compare sources with that are not committed"]
    assert printed() == none  # not even a repository
    commit("before", "0")
    assert printed() == none
    commit("now", "1")
    diff = ["--- before/index/kernel.cu", "+++ now/index/kernel.cu", "@@ -1 +1 @@", "-before", "+now"]
    assert printed()[1:] == ["", *diff]
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD~1"], cwd=tmp_path, check=True)
    commit("later", "1")
    assert printed()[-1] == "+later"  # the branch began before both
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], cwd=tmp_path, check=True)
    assert [line.partition(" of ")[0] for line in printed()] == ["0 hashes"]
