"""A lock between processes that leaves nothing behind: held through ``flock``, so a killed process releases it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from attngen.errors import StoreError

_POLL_SECONDS = 0.02


class Lock:
    """An exclusive lock on a path, between processes and between objects of one process.

    Its file exists only while somebody holds it or waits for it. The holder removes the file before it releases the
    lock, so whoever gets a lock checks that the path still names the locked file, and otherwise starts over: two
    processes can never hold locks on two files of one name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout: float) -> bool:
        """Try for ``timeout`` seconds (0: once) and return whether the lock is held now; OSError if it cannot exist."""
        deadline = time.monotonic() + timeout
        while not self._attempt():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _attempt(self) -> bool:
        import fcntl  # absent on Windows, where nothing is built

        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(self.path).st_ino:
                self._descriptor, descriptor = descriptor, -1
                return True
        except (BlockingIOError, FileNotFoundError):
            pass  # held by another, or removed by its last holder just now
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def release(self) -> None:
        """Release the lock and remove its file. Does nothing if the lock is not held."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the folder turned read-only meanwhile: the file stays, unlocked
        finally:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        if self._descriptor is None:
            raise StoreError(f"{self.path}: acquire the lock before entering it")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
