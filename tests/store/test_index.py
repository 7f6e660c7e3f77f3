"""Indexes and receipts: what is written is what is read, or nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.operations import HELPER_VARIANTS
from attngen.store import Store, StoreWarning
from attngen.store.index import Index, IndexEntry, read_index, read_indexes, write_index
from attngen.store.receipt import Receipt, generator_digest, hash_files, read_receipt, write_receipt

ENTRY = IndexEntry("fwd_causal", "ab" * 32, "causal", "sm90a", "triton")
INDEX = Index("mine", "/specs/mine.yaml", "cd" * 32, {"/specs/mine.yaml": "ef" * 32}, (ENTRY,))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_index_there_and_back(store: Store) -> None:
    assert read_index(store, "mine") is None
    assert read_indexes(store) == []
    write_index(store, INDEX)
    assert read_index(store, "mine") == INDEX
    write_index(store, replace(INDEX, package="other"))
    assert [index.package for index in read_indexes(store)] == ["mine", "other"]
    store.forget()
    store.forget()
    assert [index.package for index in read_indexes(store)] == []


@pytest.mark.parametrize("variant", sorted(HELPER_VARIANTS))
def test_an_index_lists_kernels_beside_attention(store: Store, variant: str) -> None:
    index = replace(INDEX, kernels=(ENTRY, replace(ENTRY, variant=variant)))
    write_index(store, index)
    assert read_index(store, "mine") == index


def test_an_equal_index_is_not_written_again(store: Store) -> None:
    write_index(store, INDEX)
    path = store.root / "builds" / "mine.json"
    before = path.stat().st_ino
    write_index(store, INDEX)
    assert path.stat().st_ino == before
    write_index(store, replace(INDEX, spec_hash="00"))
    assert path.stat().st_ino != before


def test_a_damaged_index_counts_as_none(store: Store) -> None:
    write_index(store, INDEX)
    path = store.root / "builds" / "mine.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        if whole[at : at + 1].isspace():
            continue  # the only bytes that mean nothing
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.warns(StoreWarning, match="damaged"):
            assert read_index(store, "mine") is None
    for content in (b"", whole[:-20], b"[]", b"null", b'{"digest": 1}'):
        path.write_bytes(content)
        with pytest.warns(StoreWarning, match="damaged"):
            assert read_index(store, "mine") is None
    write_index(store, INDEX)
    assert read_index(store, "mine") == INDEX


def test_another_version_of_the_index_counts_as_none(store: Store) -> None:
    from attngen.store.key import digest

    write_index(store, INDEX)
    path = store.root / "builds" / "mine.json"
    content = json.loads(path.read_bytes())
    content.pop("digest")
    content["format"] += 1
    content["digest"] = digest(content)
    path.write_text(json.dumps(content))
    with pytest.warns(StoreWarning, match="another version"):
        assert read_index(store, "mine") is None


def test_a_receipt_holds_as_long_as_its_inputs(store: Store, tmp_path: Path) -> None:
    spec, mask = tmp_path / "a.yaml", tmp_path / "masks.yaml"
    spec.write_text("one")
    mask.write_text("two")
    receipt = Receipt(hash_files([str(spec), str(mask)]), generator_digest(), "mine", (("fwd", "ab"),))
    write_receipt(store, spec, [], receipt)
    assert read_receipt(store, spec, []) == receipt
    assert read_receipt(store, spec, [("sm90a",)]) is None
    assert read_receipt(store, mask, []) is None
    mask.write_text("three")
    assert read_receipt(store, spec, []) is None
    mask.unlink()
    assert read_receipt(store, spec, []) is None
    mask.write_text("two")
    assert read_receipt(store, spec, []) == receipt
    write_receipt(store, spec, [], replace(receipt, generator="another"))
    assert read_receipt(store, spec, []) is None


def test_a_damaged_receipt_counts_as_none(store: Store, tmp_path: Path) -> None:
    spec = tmp_path / "a.yaml"
    spec.write_text("one")
    write_receipt(store, spec, [], Receipt(hash_files([str(spec)]), generator_digest(), "mine", (("fwd", "ab"),)))
    (path,) = (store.root / "receipts").iterdir()
    whole = path.read_bytes()
    for content in (b"", whole[:-5], whole.replace(b"mine", b"mins"), b"[]", b'{"digest": 1}'):
        path.write_bytes(content)
        assert read_receipt(store, spec, []) is None


def test_the_generator_digest_sees_templates_sources_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen import resources
    from attngen.store import receipt

    before = generator_digest()
    assert before == generator_digest()
    toolchain = receipt.toolchain
    for updated in ("triton", "cuda"):
        monkeypatch.setattr(
            receipt, "toolchain", lambda name, arch, new=updated: {} if name == new else toolchain(name, arch)
        )
        assert generator_digest() != before
        monkeypatch.undo()
    (tmp_path / "new.j2").write_text("")
    monkeypatch.setattr(resources, "templates_dir", lambda: tmp_path)
    assert generator_digest() != before
