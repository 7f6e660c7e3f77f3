"""Many cold processes at once, and processes killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attngen.store import Store
from attngen.store.lock import Lock
from tests.sampling import few
from tests.store.fakes import artifact, builder, key_of

FORK = multiprocessing.get_context("fork")
NAMES = [f"kernel{i}" for i in range(8)]


def spawn(count: int, work: Callable[..., Any], *arguments: Any) -> None:
    """Run ``work(number, *arguments)`` in ``count`` processes and demand that all succeed."""
    processes = [FORK.Process(target=work, args=(i, *arguments)) for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * count


def wait_for(happened: Callable[[], bool], process: Any) -> None:
    """Wait until something that a process does has happened, however long it takes it."""
    while not happened():
        assert process.is_alive()
        time.sleep(0.0005)


def fill(number: int, root: Path, rounds: int, barrier: Any) -> None:
    rng = random.Random(number)
    for round_ in range(rounds):
        barrier.wait(600)
        store = Store(root / str(round_))
        names = list(NAMES)
        rng.shuffle(names)
        for name in names:
            fetched = store.fetch(key_of(name), builder(name, root / f"log{round_}", seconds=0.002))
            assert fetched is not None
            assert fetched.artifact.cubin == artifact(name).cubin


@pytest.mark.exhaustive
def test_twenty_cold_processes_build_each_key_once(tmp_path: Path) -> None:
    rounds, processes = 20, 20
    spawn(processes, fill, tmp_path, rounds, FORK.Barrier(processes))
    for round_ in range(rounds):
        built = Counter((tmp_path / f"log{round_}").read_text().split())
        assert built == Counter(NAMES)
        store = Store(tmp_path / str(round_))
        assert store.verify() == []
        assert len(store.all_keys()) == len(NAMES)
        assert os.listdir(store.root / "locks") == []
        assert os.listdir(store.root / "tmp") == []


def hold_in_turn(number: int, path: Path, rounds: int) -> None:
    """Write one's number, wait, and demand that nobody else has written meanwhile."""
    witness = path.with_name("witness")
    for _ in range(rounds):
        lock = Lock(path)
        assert lock.acquire(600)
        with lock:
            witness.write_text(str(number))
            time.sleep(0.0005)
            assert witness.read_text() == str(number)


@pytest.mark.exhaustive
def test_a_lock_has_one_holder_although_its_file_comes_and_goes(tmp_path: Path) -> None:
    spawn(8, hold_in_turn, tmp_path / "lock", 30)
    assert not (tmp_path / "lock").exists()


def test_a_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    def hold() -> None:
        assert Lock(tmp_path / "lock").acquire(0)
        (tmp_path / "held").touch()
        time.sleep(3600)

    process = FORK.Process(target=hold, daemon=True)
    process.start()
    wait_for((tmp_path / "held").exists, process)
    lock = Lock(tmp_path / "lock")
    assert not lock.acquire(0)
    process.kill()
    process.join()
    assert lock.acquire(600)
    lock.release()
    assert not (tmp_path / "lock").exists()


def counted(written: Any, number: int) -> bool:
    """Whether so many entries were written."""
    return bool(written.value >= number)


def write_forever(store: Store, written: Any) -> None:
    """Put and replace entries of several files, and count them in ``written``, until killed."""
    big = artifact("big", size=400_000, classifier=True)
    for i in range(10**9):
        key = key_of(f"big{i % 3}")
        with store.locked(key):
            store.put(key, big)
        written.value += 1
        store.write("builds", "fake.json", b"x" * 50_000)


@few("killed", [4, 24])
def test_a_killed_writer_leaves_no_damage(tmp_path: Path, killed: int) -> None:
    rng = random.Random(0)
    store = Store(tmp_path / "cache")
    entries = 0
    for moment in range(killed):
        written = FORK.RawValue("i", 0)  # without a lock, with which the process might be killed
        process = FORK.Process(target=write_forever, args=(store, written), daemon=True)
        process.start()
        wait_for(partial(counted, written, 1 + moment % 4), process)
        time.sleep(rng.uniform(0, 0.03))  # whatever it is at then
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert store.verify() == []
        index = store.root / "builds" / "fake.json"
        assert not index.exists() or len(index.read_bytes()) == 50_000
        entries += len(store.all_keys())
        # Nothing is left locked, and what was left behind goes with the next build.
        fetched = store.fetch(key_of("small"), lambda: artifact("small"), wait=False)
        assert fetched is not None
        store.sweep()
        assert os.listdir(store.root / "locks") == []
        assert os.listdir(store.root / "tmp") == []
        store.remove(key_of(f"big{moment % 3}"))
    assert entries >= killed  # each process wrote one at least


@few("wait", [True, False], always=range(0, 999, 2))
def test_waiting_for_a_builder_that_is_killed(tmp_path: Path, wait: bool) -> None:
    """Whoever waits for a key builds it once its builder is gone."""
    store = Store(tmp_path / "cache")

    def build_forever() -> Any:
        (tmp_path / "building").touch()
        time.sleep(3600)

    process = FORK.Process(target=lambda: store.fetch(key_of("one"), build_forever), daemon=True)
    process.start()
    wait_for((tmp_path / "building").exists, process)
    if not wait:
        assert store.fetch(key_of("one"), lambda: artifact("one"), wait=False) is None
    process.kill()
    fetched = store.fetch(key_of("one"), lambda: artifact("one"))
    process.join()
    assert fetched is not None
    assert fetched.origin == "built"
