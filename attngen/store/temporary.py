"""Temporary folders of which none stays for ever: a killed process leaves its own, and the next one removes it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from attngen.store.lock import Lock

#: Seconds to wait for the lock of a new name, which only a process that cleans up can hold, for a moment.
_SECONDS = 10.0

_LOCK = ".lock"


class TemporaryFolder:
    """A new folder, by default where temporary files go, removed with all that it holds at the end of a ``with``.

    Its process holds a lock beside it meanwhile. Where nobody holds the lock of such a folder, its process was killed,
    and whoever makes the next one in the same place removes it. One that nobody refers to any more is removed as well,
    but not by a fork of the process. Raises OSError.
    """

    def __init__(self, parent: Path | None = None, *, prefix: str = "attngen-") -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        _sweep(parent, prefix)
        self.path = parent / f"{prefix}{secrets.token_hex(6)}"
        lock = Lock(parent / f"{self.path.name}{_LOCK}")
        try:
            lock.acquire(_SECONDS)
        except OSError:  # a file system without locks: what is killed there stays
            lock.path.unlink(missing_ok=True)
        try:
            os.mkdir(self.path, 0o700)
        except OSError:
            lock.release()
            raise
        self._remove = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, unless this is a fork of the process that made it."""
        self._remove()


def _remove_own(path: Path, lock: Lock, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that were killed, as far as they are this user's."""
    name = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{12}}{re.escape(_LOCK)}")
    with suppress(OSError):
        for left in [entry for entry in os.listdir(parent) if name.fullmatch(entry)]:
            with suppress(OSError):  # another user's, or gone meanwhile
                _remove_dead(parent / left)


def _remove_dead(lock_path: Path) -> None:
    if os.lstat(lock_path).st_uid != os.geteuid():
        return
    lock = Lock(lock_path)
    if lock.acquire(0.0):
        shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
        lock.release()
