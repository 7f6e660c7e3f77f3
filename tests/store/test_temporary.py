"""Temporary files of killed processes go with the next run, those of living ones stay."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attngen.build import pipeline
from attngen.packaging.make import package
from attngen.store import Store
from attngen.store.mark import TAG
from attngen.store.temporary import TemporaryFolder
from tests.store.fakes import artifact, key_of
from tests.store.test_concurrency import wait_for

FORK = multiprocessing.get_context("fork")


@contextmanager
def process(work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """A process that works until it is killed."""
    running = FORK.Process(target=work, args=arguments, daemon=True)
    running.start()
    try:
        yield running
    finally:
        running.kill()
        running.join()


def fill(parent: Path) -> None:
    with TemporaryFolder(parent) as folder:
        (folder / "below").mkdir()
        (folder / "below/file").touch()
        time.sleep(3600)


def test_a_folder_goes_at_its_end(tmp_path: Path) -> None:
    with TemporaryFolder(tmp_path) as folder:
        (folder / "file").touch()
    with pytest.raises(ZeroDivisionError), TemporaryFolder(tmp_path):
        _ = 1 // 0
    assert os.listdir(tmp_path) == []


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    foreign = {"attngen-notes", "attngen-0123456789ab", ".attngen-0123456789ab.lock", "attngen.lock"}
    for name in foreign:
        (tmp_path / name).mkdir()
    with process(fill, tmp_path) as dying, process(fill, tmp_path) as living:
        wait_for(lambda: len(list(tmp_path.glob("*/below/file"))) == 2, living)
        dying.kill()
        dying.join()
        assert len(list(tmp_path.glob("*/below/file"))) == 2
        with TemporaryFolder(tmp_path) as folder:
            (kept,) = tmp_path.glob("*/below/file")
            own = {folder.name, f"{folder.name}.lock"}
        of_living = {kept.parents[1].name, f"{kept.parents[1].name}.lock"}
        assert set(os.listdir(tmp_path)) == foreign | of_living
        assert not own & set(os.listdir(tmp_path))
    with TemporaryFolder(tmp_path):
        pass
    assert set(os.listdir(tmp_path)) == foreign


@pytest.mark.exhaustive
def test_many_processes_that_come_and_go_never_remove_a_folder_in_use(tmp_path: Path) -> None:
    def come_and_go() -> None:
        for _ in range(50):
            with TemporaryFolder(tmp_path) as folder:
                (folder / "file").touch()
                time.sleep(0.0005)
                assert (folder / "file").exists()

    processes = [FORK.Process(target=come_and_go) for _ in range(8)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(600)
    assert [each.exitcode for each in processes] == [0] * 8
    assert os.listdir(tmp_path) == []


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent/attngen-0123456789ab.lock").symlink_to(outside)
    with TemporaryFolder(tmp_path / "parent"):
        pass
    assert not outside.exists()


def test_a_folder_that_is_forgotten_goes(tmp_path: Path) -> None:
    """As that of a hook of a build that failed, whose end is never called."""
    folder = TemporaryFolder(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    del folder
    assert os.listdir(tmp_path) == []


def test_a_fork_of_the_process_leaves_its_folder(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path)

    def forget() -> None:
        nonlocal folder
        del folder

    child = FORK.Process(target=forget)
    child.start()
    child.join()
    assert folder.path.is_dir()
    folder.remove()


def test_a_file_system_without_locks_still_has_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with TemporaryFolder(tmp_path) as folder:
        assert os.listdir(tmp_path) == [folder.name]
    assert os.listdir(tmp_path) == []


@pytest.mark.exhaustive
def test_a_killed_package_leaves_nothing_after_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while hatchling waits: folders of the project, of compilers and of the archive are there."""
    spec = tmp_path / "mine.yaml"
    spec.write_text("schema: 1\npackage: mine\narch: sm90a\nkernels: [{variant: causal, head_dim: 64}]\n")
    (tmp_path / "tmp").mkdir()
    program = f"""
import time
from pathlib import Path
from attngen.packaging import make
from attngen.build import pipeline
pipeline.COMPILER = "tests.store.fakes:compile_quickly"
make.sizes_of = lambda path: (Path("waiting").touch(), time.sleep(3600))
make.package({str(spec)!r}, Path("dist"), jobs=1)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "ATTNGEN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment) as killed:
        while not (tmp_path / "waiting").exists():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert list((tmp_path / "dist").glob(".attngen-*"))
    assert os.listdir(tmp_path / "tmp")
    monkeypatch.setenv("ATTNGEN_CACHE", environment["ATTNGEN_CACHE"])
    monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])
    monkeypatch.setattr(pipeline, "COMPILER", "tests.store.fakes:compile_quickly")
    package(spec, tmp_path / "dist", jobs=1)
    (wheel,) = os.listdir(tmp_path / "dist")
    assert wheel.startswith("mine-")
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("of", ["claim", "probe"])
def test_a_sweep_removes_marks_and_probes_of_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    root = tmp_path / "cache"

    def stall(*_: object, **__: object) -> None:
        time.sleep(3600)

    def work() -> None:
        if of == "claim":
            os.replace = stall  # type: ignore[assignment]
            Store(root).put(key_of("one"), artifact("one"))
        Store._remove_temporaries = stall  # type: ignore[method-assign]
        Store(root).require_writable()

    def left() -> list[Path]:
        return list(root.glob(f"{TAG}-*" if of == "claim" else "tmp/probe-*"))

    with process(work) as stalled:
        wait_for(lambda: bool(left()), stalled)
        if of == "probe":
            Store(root).sweep()
            assert left(), "its process lives"
    store = Store(root)
    store.sweep()
    assert left() == []
