"""Entries: what is put is what is got, or nothing is got."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import CompileError, StoreError
from attngen.store import Store, StoreWarning, default_root
from attngen.store import files as store_files
from attngen.store import store as store_module
from tests.sampling import few, sampled
from tests.store.as_user import as_user
from tests.store.fakes import artifact, builder, key_of

KEY = key_of("one")
HEX = "0123456789ab"  # the end of a temporary name


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def left_over(store: Store) -> list[str]:
    return [
        f"{folder}/{name}"
        for folder in ("locks", "tmp")
        if (store.root / folder).is_dir()
        for name in os.listdir(store.root / folder)
    ]


def fetch(store: Store, name: str = "one") -> str:
    fetched = store.fetch(key_of(name), lambda: artifact(name))
    assert fetched is not None
    assert fetched.artifact.cubin == artifact(name).cubin
    return fetched.origin


def test_the_root_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.setenv("ATTNGEN_CACHE", "")
    assert default_root().name == "attngen"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("x" * 300, "cannot use the cache .*: File name too long; set ATTNGEN_CACHE to a folder"),
        ("~nobody-at-all/cache", "ATTNGEN_CACHE is '~nobody-at-all/cache', of no user; set it to a folder"),
    ],
    ids=["long", "no such user"],
)
def test_a_root_that_no_folder_can_be(monkeypatch: pytest.MonkeyPatch, chosen: str, message: str) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE", chosen)
    with pytest.raises(StoreError, match=message):
        default_root()


@pytest.mark.parametrize("classifier", [False, True])
def test_an_entry_that_is_put_can_be_read(store: Store, classifier: bool) -> None:
    assert store.get(KEY) is None
    put = artifact("one", classifier=classifier)
    store.put(KEY, put)
    got = store.get(KEY)
    assert got is not None
    assert (got.cubin, got.others, dict(got.manifest)) == (put.cubin, put.others, dict(put.manifest))
    assert {name: store.text(KEY, name) for name in put.texts} == put.texts
    assert store.text(KEY, "sass") is None
    assert store.all_keys() == [KEY]
    assert store.verify() == []
    assert left_over(store) == []


def test_an_entry_is_plain_files(store: Store) -> None:
    store.put(KEY, artifact("one"))
    names = {"kernel.cubin", "manifest.json", "source.py", "ptx", "ttgir", "SHA256SUMS"}
    assert {path.name for path in store.path(KEY).iterdir()} == names
    assert (store.path(KEY) / "kernel.cubin").read_bytes() == artifact("one").cubin
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=store.path(KEY), capture_output=True, check=False)
    assert check.returncode == 0


def test_fetch_builds_once(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    origins = [store.fetch(KEY, builder("one", log)).origin for _ in range(3)]  # type: ignore[union-attr]
    assert origins == ["built", "cached", "cached"]
    assert log.read_text() == "one\n"
    assert left_over(store) == []


def test_a_failed_build_leaves_nothing(store: Store) -> None:
    def fail() -> Any:
        raise CompileError("no")

    with pytest.raises(CompileError):
        store.fetch(KEY, fail)
    assert left_over(store) == []
    assert fetch(store) == "built"


def test_an_oserror_of_the_build_is_not_taken_for_one_of_the_cache(store: Store) -> None:
    calls = []

    def fail() -> Any:
        calls.append(1)
        raise OSError(errno.ENOSPC, "in the compiler")

    with pytest.raises(OSError, match="in the compiler"):
        store.fetch(KEY, fail)
    assert len(calls) == 1


def test_a_key_that_another_builds_can_be_left_for_later(store: Store) -> None:
    with store.locked(KEY) as held:
        assert held
        assert store.fetch(KEY, lambda: artifact("one"), wait=False) is None
    assert left_over(store) == []


def test_a_lock_that_is_never_released_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_SECONDS", 0.05)
    with store.locked(KEY), pytest.raises(StoreError, match="seems to hang"):
        store.fetch(KEY, lambda: artifact("one"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path: Path) -> None:
    path.unlink()


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = [truncate, empty, flip, lengthen, remove, become_a_folder, dangle]


@few("name", ["kernel.cubin", "manifest.json", "classify.cubin", "SHA256SUMS"], always=range(0, 999, 3))
@few("damage", DAMAGES, ids=lambda damage: damage.__name__, always=range(0, 999, 5))
def test_a_damaged_entry_is_never_loaded_and_built_again(
    store: Store, name: str, damage: Callable[[Path], None]
) -> None:
    store.put(KEY, artifact("one", classifier=True))
    damage(store.path(KEY) / name)
    if damage is lengthen and name == "SHA256SUMS":
        # one more line that is no checksum: every file is still what was written
        assert store.get(KEY) is not None
        assert [d.key for d in store.verify()] == [KEY]
        return
    with pytest.warns(StoreWarning, match="damaged"):
        assert store.get(KEY) is None
    assert [d.key for d in store.verify()] == [KEY]
    with pytest.warns(StoreWarning, match="damaged"):
        assert fetch(store) == "built"
    assert store.verify() == []
    assert left_over(store) == []


@pytest.mark.parametrize("name", ["source.py", "ptx", "ttgir"])
def test_a_damaged_text_is_not_shown(store: Store, name: str) -> None:
    store.put(KEY, artifact("one"))
    flip(store.path(KEY) / name)
    assert store.get(KEY) is not None  # a call does not read it
    assert [d.key for d in store.verify()] == [KEY]
    with pytest.raises(StoreError, match="checksum"):
        store.text(KEY, name)


def test_every_flipped_bit_is_noticed(store: Store) -> None:
    store.put(KEY, artifact("one", size=256))
    for path in sorted(store.path(KEY).iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), 7):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            assert store.verify(), f"{path.name} at {at}"
        path.write_bytes(whole)
    assert store.verify() == []


def test_an_empty_folder_is_damage(store: Store) -> None:
    store.path(KEY).mkdir(parents=True)
    with pytest.warns(StoreWarning):
        assert fetch(store) == "built"


def test_a_read_only_cache_is_read(store: Store) -> None:
    store.put(KEY, artifact("one"))

    def use() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            origins = [fetch(store), fetch(store, "two")]
            with pytest.raises(StoreError, match="ATTNGEN_CACHE"):
                store.require_writable()
            with pytest.raises(StoreError, match="cannot write"):
                store.put(key_of("two"), artifact("two"))
            store.sweep()
        return origins + [str(w.message) for w in caught]

    origins = as_user(use, store.root)
    assert origins[:2] == ["cached", "uncached"]
    assert "cannot lock the cache" in origins[2]
    assert store.all_keys() == [KEY]


def test_a_root_that_cannot_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    assert store.get(KEY) is None
    assert store.all_keys() == []
    assert store.verify() == []
    with pytest.raises(StoreError, match="cannot write to the cache"):
        store.require_writable()
    with pytest.warns(StoreWarning, match="cannot lock the cache"):
        assert fetch(store) == "uncached"


def test_a_full_disk_in_reality(store: Store) -> None:
    """A limit on file sizes is what a process can impose on itself; the kernel reports it as a full disk does."""
    import resource

    def use() -> list[str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return [fetch(store), *[str(w.message) for w in caught], *left_over(store)]

    store.require_writable()
    origin, message = as_user(use, store.root, writable=True)
    assert origin == "uncached"
    assert "cannot write to the cache" in message
    assert store.all_keys() == []


@sampled(code=[errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], call=range(12))
def test_a_fault_at_any_step(store: Store, monkeypatch: pytest.MonkeyPatch, code: int, call: int) -> None:
    """Every system call that writes fails in its turn; the kernel is returned all the same."""
    count = 0

    def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == call + 1:
                raise OSError(code, os.strerror(code))
            return function(*arguments, **named)

        return wrapped

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("fsync", "rename"):
            patch.setattr(os, name, faulty(getattr(os, name)))
        patch.setattr(store_files, "open", faulty(open), raising=False)
        origin = fetch(store)
    assert (origin == "uncached") == bool(caught)
    assert store.verify() == []
    assert left_over(store) == []
    if origin == "uncached" and code == errno.ENOSPC:
        assert "free some space" in str(caught[0].message)
    assert fetch(store) in ("built", "cached")


def test_bytes_lost_by_the_disk_are_noticed_before_the_entry_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(path: Path, data: bytes) -> None:
        path.write_bytes(data[:-1])

    monkeypatch.setattr(store_files, "write_synced", lossy)
    with pytest.raises(StoreError, match="is the disk sound"):
        store.put(KEY, artifact("one"))
    assert store.all_keys() == []


def test_small_files_are_replaced_whole(store: Store) -> None:
    store.write("builds", "a.json", b"one")
    store.write("builds", "a.json", b"two")
    assert (store.root / "builds" / "a.json").read_bytes() == b"two"
    assert left_over(store) == []


def test_sweep_takes_what_nobody_holds(store: Store) -> None:
    store.put(KEY, artifact("one"))
    (store.root / "locks").mkdir(exist_ok=True)
    (store.root / "locks" / key_of("killed")).touch()
    (store.root / "tmp" / f"{key_of('killed')}-{HEX}").mkdir()
    (store.root / "tmp" / f"builds.fake.json-{HEX}").touch()
    (store.root / "tmp" / f"{key_of('busy')}-{HEX}").mkdir()
    with store.locked(key_of("busy")):
        store.sweep()
        assert sorted(left_over(store)) == sorted([f"locks/{key_of('busy')}", f"tmp/{key_of('busy')}-{HEX}"])
    store.sweep()
    assert left_over(store) == []
    assert store.all_keys() == [KEY]


def test_removing(store: Store) -> None:
    store.put(KEY, artifact("one"))
    store.remove(KEY)
    store.remove(key_of("never"))
    assert store.all_keys() == []
    assert left_over(store) == []
