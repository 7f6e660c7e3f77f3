"""Files that are not the cache's own survive whatever the cache removes."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen.commands.cache import command
from attngen.errors import StoreError
from attngen.plan.model import Refused
from attngen.store.index import Index, write_index
from attngen.store.mark import FOLDERS as OWN_FOLDERS
from attngen.store.mark import TAG, is_marked
from attngen.store.receipt import Receipt, write_receipt
from attngen.store.refusals import write_refusal
from attngen.store.store import Store
from tests.sampling import sampled
from tests.store.fakes import artifact, key_of

FOLDERS = ("", "tmp", "locks", "kernels", "builds", "receipts", "refusals", "mine")
HEX = "0123456789ab"


def _plant(root: Path, rng: random.Random, outside: Path) -> None:
    """Put files, folders and links with names near the cache's own below a folder."""
    stems = ["a-b", "my-project", "notes-2024", f"{key_of('x')[:-1]}-{HEX}", f"{key_of('x')}x", "probe-1", "x.txt"]
    for _ in range(rng.randint(4, 12)):
        folder = root / rng.choice(FOLDERS)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{rng.choice(stems)}{rng.choice(['', '-', '~', '.bak'])}"
        if os.path.lexists(path):
            continue
        kind = rng.randrange(3)
        if kind == 0:
            path.write_bytes(rng.randbytes(20))
        elif kind == 1:
            path.mkdir()
            (path / "inner").write_bytes(rng.randbytes(20))
        else:
            path.symlink_to(outside)


def _tree(root: Path) -> dict[str, bytes | str]:
    """Contents of a folder: text of files, targets of links."""
    tree: dict[str, bytes | str] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            kind = os.readlink(path) if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes()
            tree[str(path.relative_to(root))] = kind
    return tree


def _use_everything(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build, sweep, verify --remove and clear; a refusal is as good."""
    store = Store(root)
    steps = (
        store.require_writable,
        lambda: store.fetch(key_of("one"), lambda: artifact("one")),
        store.sweep,
        lambda: store.remove(key_of("one")),
    )
    for step in steps:
        with suppress(StoreError):
            step()
    monkeypatch.setenv("ATTNGEN_CACHE", str(root))
    for arguments in (["verify", "--remove"], ["clear", "--yes"]):
        CliRunner().invoke(command, arguments)


@sampled(always=6, marked=[False, True], seed=range(20))
def test_foreign_files_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, marked: bool) -> None:
    rng = random.Random(seed)
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious-file").write_bytes(b"precious")
    if marked:
        Store(root).require_writable()
    _plant(root, rng, outside)
    before = _tree(tmp_path)
    _use_everything(root, monkeypatch)
    after = _tree(tmp_path)
    assert {name: after.get(name) for name in before} == before
    if not marked:
        assert after == before, "something was written to a folder that is not ours"


def test_a_cache_of_an_earlier_version_is_adopted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(key_of("one"), artifact("one"))
    (tmp_path / TAG).unlink()
    left = tmp_path / "tmp" / f"{key_of('killed')}-{HEX}"
    left.mkdir()
    Store(tmp_path).sweep()
    assert is_marked(tmp_path)
    assert not left.exists()
    assert store.all_keys() == [key_of("one")]


def test_links_in_place_of_its_own_folders_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    Store(root).require_writable()
    (root / "tmp").rmdir()
    kept = outside / f"{key_of('x')}-{HEX}"
    kept.mkdir(parents=True)
    (root / "tmp").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        Store(root).sweep()
    assert kept.exists()


def test_a_link_with_the_name_of_a_temporary_is_removed_and_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    Store(root).require_writable()
    link = root / "tmp" / f"{key_of('x')}-{HEX}"
    link.symlink_to(outside)
    Store(root).sweep()
    assert not link.is_symlink()
    assert (outside / "file").read_text() == "kept"


def test_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match="holds 'thesis.tex'.*set ATTNGEN_CACHE"):
        Store(tmp_path).require_writable()


def _cache_of_everything(root: Path) -> Store:
    """A cache as builds leave it: a kernel, an index, a receipt, a refusal."""
    store = Store(root)
    store.put(key_of("one"), artifact("one"))
    write_index(store, Index("mine", "/spec.yaml", "hash", {}, ()))
    write_receipt(store, Path("/spec.yaml"), [("sm90a",)], Receipt({}, "generator", "mine", ()))
    write_refusal(store, key_of("two"), Refused("two", "cuda", "40 B of spills"))
    return store


def test_clearing_leaves_nothing_but_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    store = _cache_of_everything(root)
    assert {folder.name for folder in root.iterdir() if folder.is_dir()} == set(OWN_FOLDERS)
    for folder in ("builds", "refusals"):
        name = "damaged.json" if folder == "builds" else f"{key_of('three')}.json"
        os.mkfifo(root / folder / name)
    monkeypatch.setenv("ATTNGEN_CACHE", str(root))
    assert CliRunner().invoke(command, ["clear", "--yes"]).exit_code == 0
    assert [path.name for path in root.rglob("*") if not path.is_dir()] == [TAG]
    assert store.all_keys() == []


def test_a_cache_with_refusals_of_an_earlier_version_is_adopted(tmp_path: Path) -> None:
    _cache_of_everything(tmp_path)
    (tmp_path / TAG).unlink()
    left = tmp_path / "tmp" / f"refusals.{key_of('killed')}.json-{HEX}"
    left.touch()
    Store(tmp_path).sweep()
    assert is_marked(tmp_path)
    assert not left.exists()


def test_clearing_a_folder_that_is_no_cache_removes_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cache_of_everything(tmp_path)
    (tmp_path / TAG).unlink()
    (tmp_path / "thesis.tex").touch()
    before = _tree(tmp_path)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))
    result = CliRunner().invoke(command, ["clear", "--yes"])
    assert isinstance(result.exception, StoreError)
    assert _tree(tmp_path) == before
