"""Only caches of the user or of root, to which nobody else may write, are used."""

from __future__ import annotations

import os
import shlex
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attngen.build.pipeline import build
from attngen.errors import StoreError
from attngen.runtime.registry.lookup import registry
from attngen.store import Store, StoreWarning
from attngen.store.mark import FOLDERS, TAG
from attngen.store.trust import distrust
from tests.runtime.support import variant, write_build
from tests.sampling import sampled
from tests.store.fakes import artifact, key_of

KEY = key_of("one")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with a build in it."""
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "the cache"))
    registry.clear()
    store = write_build("own", variant())
    store.put(KEY, artifact("one"))
    yield store.root
    registry.clear()


def use(root: Path, tmp_path: Path) -> None:
    """Demand that nothing of the cache is run, and that the reason is given with what helps."""
    registry.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not registry.find("causal").kernels  # the preset alone
            assert not registry.refresh_if_built()
    assert [warning.category for warning in caught] == [StoreWarning], "it is said once"
    assert str(root) in str(caught[0].message)
    assert "set ATTNGEN_CACHE to a folder of your own" in str(caught[0].message)
    (tmp_path / "spec.yaml").write_text(
        "schema: 1\npackage: mine\narch: sm90a\nkernels: [{variant: causal, head_dim: 64}]\n"
    )
    steps: tuple[Callable[[Store], object], ...] = (
        lambda store: store.fetch(KEY, lambda: artifact("one")),
        lambda store: store.put(KEY, artifact("one")),
        lambda store: store.write("builds", "own.json", b"{}"),
        lambda store: store.forget(),
        lambda store: build(tmp_path / "spec.yaml", store=store),
    )
    for step in steps:
        with pytest.raises(StoreError, match="is not used"):
            step(Store(root))


@sampled(always=3, folder=["", *FOLDERS], mode=[0o775, 0o757, 0o777])
def test_folders_that_others_may_write_to_are_not_used(root: Path, tmp_path: Path, folder: str, mode: int) -> None:
    (root / folder).mkdir(exist_ok=True)
    (root / folder).chmod(mode)
    use(root, tmp_path)
    reason = distrust(root)
    assert reason is not None
    remedy = reason[reason.index("'chmod") + 1 :].split("', or")[0]
    assert shlex.split(remedy)[-1] == str(root)
    subprocess.run(remedy, shell=True, check=True)
    assert registry.refresh_if_built()
    assert registry.find("causal").package == "own"


@pytest.mark.parametrize("share", ["sticky", "other files", "no cache", "another's"])
def test_modes_of_a_folder_that_is_shared_are_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """As the temporary folder and the root: the advice is a folder of one's own, never a change of this one."""
    root.chmod(0o1777 if share == "sticky" else 0o777)
    if share == "other files":
        (root / "thesis.tex").touch()
    elif share == "no cache":
        (root / TAG).unlink()
    elif share == "another's":
        owner_is(0, monkeypatch)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    use(root, tmp_path)
    reason = str(distrust(root))
    assert "chmod" not in reason
    assert reason.endswith("set ATTNGEN_CACHE to a folder of your own")


def owner_is(owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every file an owner."""
    real = os.stat

    def owned(path: Path, **named: bool) -> os.stat_result:
        fields = list(real(path, **named))
        fields[4] = owner
        return os.stat_result(fields)

    monkeypatch.setattr("attngen.store.trust.os.stat", owned)


@pytest.mark.parametrize("folder", [Path("/"), Path("/tmp")])
def test_no_mode_of_a_folder_of_the_system_is_to_be_changed(folder: Path) -> None:
    assert "chmod" not in (distrust(folder) or "")


@pytest.mark.parametrize(
    ("user", "owner", "used"),
    [(1000, 1000, True), (1000, 0, True), (1000, 1001, False), (0, 0, True), (0, 1001, True)],
)
def test_the_owner_is_oneself_or_root(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, owner: int, used: bool
) -> None:
    owner_is(owner, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if used:
        assert distrust(root) is None
        assert registry.find("causal").package == "own"
        assert Store(root).fetch(KEY, lambda: artifact("one")) is not None
    else:
        assert "belongs to another user (uid 1001)" in str(distrust(root))
        use(root, tmp_path)


def test_a_link_to_ones_own_folder_is_followed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    monkeypatch.setenv("ATTNGEN_CACHE", str(link))
    assert registry.find("causal").package == "own"
    Store().put(key_of("two"), artifact("two"))
    assert key_of("two") in Store(root).all_keys()
    root.chmod(0o777)
    use(link, tmp_path)


def test_files_of_the_cache_are_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store(tmp_path / "new")
        store.put(KEY, artifact("one"))
        store.write("builds", "own.json", b"{}")
    finally:
        os.umask(before)
    assert distrust(store.root) is None
    for path in (store.root, *store.root.rglob("*")):
        assert path.name == "CACHEDIR.TAG" or not path.stat().st_mode & 0o022, path
