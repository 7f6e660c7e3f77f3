"""The committed sources are what the templates and specs give: ``attngen build SPEC --render-only`` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.build.generate import generate
from attngen.resources import root, specs_dir
from tests.render.sources import GOLDEN, SHIPPED

GENERATED = root() / "generated"
MAX_BYTES = 14 * 2**20


def files(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".py", ".cu")}


@pytest.mark.parametrize("name", GOLDEN)
def test_generated_sources_are_up_to_date(name: str, tmp_path: Path) -> None:
    generate(specs_dir() / f"{name}.yaml", tmp_path)
    fresh, kept = files(tmp_path / name), files(GENERATED / name)
    command = f"attngen build specs/{name}.yaml --render-only"
    assert sorted(fresh) == sorted(kept), f"other kernels than in generated/{name}: run {command}"
    stale = [file for file, content in fresh.items() if kept[file] != content]
    assert not stale, f"{len(stale)} files of generated/{name} are stale: run {command}; the first is {stale[0]}"


def test_generated_holds_nothing_else() -> None:
    folders = {path.name for path in GENERATED.iterdir() if path.is_dir()}
    assert folders <= set(SHIPPED)
    paths = [path for path in GENERATED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < MAX_BYTES
    assert {path.suffix for path in paths} <= {".py", ".cu", ".md"}


def test_rendering_again_changes_nothing(tmp_path: Path) -> None:
    first = generate(specs_dir() / "portable.yaml", tmp_path)
    assert len(first.changed) == len(first.kernels)
    again = generate(specs_dir() / "portable.yaml", tmp_path)
    assert again.changed == ()
    assert again.removed == ()
