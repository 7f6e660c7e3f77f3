"""A source has the headers that it includes, directly or by others, and no other: they alone are in its key."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from attngen.errors import CompileError
from attngen.plan import Plan
from attngen.render import Source, render
from attngen.render import source as rendering
from attngen.render.includes import header_folders, included
from attngen.resources import templates_dir
from attngen.store.key import key_of
from tests.plan.specs import planned

PLANS = (
    planned(backend="cuda"),
    planned(passes="backward", backend=None, backward="{backend: cuda}"),
    planned(backend="cuda", arch="sm80"),
    planned(backend="triton"),
)


def rendered(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[tuple[Plan, Source]]:
    """Kernels by a copy of all headers, to which lines are appended, or which has more of them."""
    shutil.copytree(templates_dir(), folder, ignore=lambda _, names: {name for name in names if name.endswith(".j2")})
    for name, text in texts.items():
        with open(folder / "cuda" / "include" / f"{name}.cuh", "a") as file:
            file.write(text)

    def copied(template: str, templates: Path | None = None) -> tuple[Path, ...]:
        return tuple(folder / each.relative_to(templates_dir()) for each in header_folders(template, templates))

    monkeypatch.setattr(rendering, "header_folders", copied)
    return [(plan, render(plan)) for plan in PLANS]


def test_an_unused_header_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [(plan, render(plan)) for plan in PLANS]
    assert rendered(tmp_path / "copy", monkeypatch, unheard_of="#pragma once\n") == sources


@pytest.mark.exhaustive
def test_a_header_is_in_the_keys_of_those_that_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = '#include "deep.cuh"\n'  # in a header of Hopper's kernels
    before = rendered(tmp_path / "before", monkeypatch, wgmma=link, deep="#pragma once\n")
    after = rendered(tmp_path / "after", monkeypatch, wgmma=link, deep="#pragma once\n// changed\n")
    assert all(link not in source.text for _, source in after)
    reached = ["deep.cuh" in source.headers for _, source in after]
    assert reached == [True, True, False, False]
    keys = [[key_of(*kernel) for kernel in kernels] for kernels in (before, after)]
    assert [one != other for one, other in zip(*keys, strict=True)] == reached


def test_a_source_carries_what_its_headers_include(tmp_path: Path) -> None:
    (tmp_path / "family").mkdir()
    for name, text in {
        "include/a.cuh": '#pragma once\n#include "b.cuh"\n// #include "none.cuh"\n',
        "include/b.cuh": "// of all\n",
        "include/c.cuh": "",
        "family/b.cuh": "// of the family\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = tmp_path / "family", tmp_path / "include"
    assert list(included("k", '#include "a.cuh"\n#include "b.cuh"\n', folders)) == ["a.cuh", "b.cuh"]
    assert included("k", '#include "a.cuh"\n', folders)["b.cuh"] == "// of the family\n"
    assert included("k", "int a;\n", folders) == {}


def test_a_header_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "ring.cuh").write_text('#include "barier.cuh"\n')
    (tmp_path / "barrier.cuh").write_text("")
    said = f"ring.cuh includes \"barier.cuh\", which is in none of {tmp_path.name}; did you mean 'barrier.cuh'?"
    with pytest.raises(CompileError, match=re.escape(f"kernel: {said}")):
        included("kernel", '#include "ring.cuh"\n', (tmp_path,))
    with pytest.raises(CompileError, match='kernel: the source includes "none.cuh"'):
        included("kernel", '#include "none.cuh"\n', (tmp_path,))


def test_a_circle_of_headers_is_named(tmp_path: Path) -> None:
    for name, text in {"a": '#include "b.cuh"\n', "b": '#include "c.cuh"\n', "c": '#include "b.cuh"\n'}.items():
        (tmp_path / f"{name}.cuh").write_text(text)
    with pytest.raises(CompileError, match="kernel: headers include each other in a circle: b.cuh -> c.cuh -> b.cuh"):
        included("kernel", '#include "a.cuh"\n', (tmp_path,))


def test_headers_lie_beside_the_template_of_their_family(tmp_path: Path) -> None:
    cuda = templates_dir() / "cuda"
    cluster = cuda / "hopper_backward" / "cluster"
    assert header_folders("cuda/hopper_backward/cluster/kernel.cu.j2") == (cluster, cluster.parent, cuda / "include")
    assert header_folders("own.cu.j2", tmp_path) == (tmp_path, cuda / "include")


def test_every_header_that_a_template_names_is_found() -> None:
    """Rendering looks each of them up; this covers templates of which no test renders every branch."""
    headers = set[str]()
    for path in sorted((templates_dir() / "cuda").rglob("*.j2")):
        template = path.relative_to(templates_dir()).as_posix()
        literal = "".join(line for line in path.read_text().splitlines(keepends=True) if "${" not in line)
        headers |= set(included(template, literal, header_folders(template)))
    assert len(headers) > 30  # views name the others
