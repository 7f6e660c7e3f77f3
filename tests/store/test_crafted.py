"""Files of the cache that somebody made: none hangs a reader, none ends in a traceback."""

from __future__ import annotations

import os
import warnings
from hashlib import sha256
from pathlib import Path

import pytest

from attngen.store.index import read_index
from attngen.store.refusals import read_refusal
from attngen.store.store import Store, StoreWarning
from tests.store.fakes import artifact, key_of

KEY = key_of("one")
CRAFTED = [b"null", b"[]", b"1e999", b'"a"', b'{"launches": 1}', b'{"launches": [1]}', b'{"launches": [{"name": []}]}',
           b"\0",
           b"\xff", b"{", b"", b"[" * 200_000, b'{"a":' * 200_000, b"9" * 10_000]  # fmt: skip


@pytest.mark.parametrize("content", CRAFTED, ids=range(len(CRAFTED)))
def test_a_crafted_manifest_with_a_right_checksum_is_damage(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.put(KEY, artifact("one"))
    folder = store.path(KEY)
    old = sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder / "manifest.json").write_bytes(content)
    sums = (folder / "SHA256SUMS").read_text()
    assert old in sums
    (folder / "SHA256SUMS").write_text(sums.replace(old, sha256(content).hexdigest()))
    entry, damage = store.read(KEY)
    assert entry is None
    assert damage is not None


@pytest.mark.parametrize("content", CRAFTED, ids=range(len(CRAFTED)))
def test_a_crafted_index_is_damage(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.write("builds", "mine.json", content)
    with pytest.warns(StoreWarning, match="damaged"):
        assert read_index(store, "mine") is None


@pytest.mark.parametrize("name", ["manifest.json", "kernel.cubin", "SHA256SUMS"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    store.put(KEY, artifact("one"))
    (store.path(KEY) / name).unlink()
    os.mkfifo(store.path(KEY) / name)
    assert "not a regular file" in (store.read(KEY)[1] or "")
    assert [damage.key for damage in store.verify()] == [KEY]


def test_a_pipe_in_place_of_an_index_does_not_hang(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("builds", "mine.json", b"{}")
    (tmp_path / "builds" / "mine.json").unlink()
    os.mkfifo(tmp_path / "builds" / "mine.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        assert read_index(store, "mine") is None


@pytest.mark.parametrize("content", [*CRAFTED, b'{"slow": [1, 1e999], "name": "", "backend": "", "reason": ""}'])
def test_a_crafted_refusal_is_ignored(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.write("refusals", f"{KEY}.json", content)
    assert read_refusal(store, KEY) is None


def test_a_pipe_in_place_of_a_refusal_does_not_hang(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("refusals", f"{KEY}.json", b"{}")
    (tmp_path / "refusals" / f"{KEY}.json").unlink()
    os.mkfifo(tmp_path / "refusals" / f"{KEY}.json")
    assert read_refusal(store, KEY) is None
