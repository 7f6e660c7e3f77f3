"""Worker processes that wait a while for the next jobs, since each takes half a second to start."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from attngen.store.jobs import Workers
from attngen.store.temporary import TemporaryFolder

#: Seconds for which processes without a job wait for one.
SECONDS = 20.0


class SpareWorkers:
    """Processes for occasional jobs. They end after a while without one, and with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what the timer touches, too
        self._workers: Workers | None = None
        self._folder: TemporaryFolder | None = None
        self._owner = 0
        self._timer: threading.Timer | None = None

    @contextmanager
    def given(self, load: str, *, ahead: bool) -> Iterator[Workers]:
        """Give the processes that wait, and those that start, to one caller at a time.

        All are forks of one that has called ``load`` ("module:name"), which starts now if it is wanted ``ahead``.
        """
        with self._lock:
            self._stop_waiting()
            workers = self._workers
            if workers is None or self._owner != os.getpid():  # those of a parent are its own
                self._folder = TemporaryFolder()
                workers = self._workers = Workers(self._folder.path, load)
                self._owner = os.getpid()
            workers.idle[:] = [worker for worker in workers.idle if worker.process.poll() is None]
            if ahead:
                workers.prepare()
        try:
            yield workers
        finally:
            with self._lock:
                self._timer = threading.Timer(SECONDS, self.close)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """End them."""
        with self._lock:
            self._stop_waiting()
            workers, self._workers = self._workers, None
            folder, self._folder = self._folder, None
            if workers is not None and folder is not None and self._owner == os.getpid():
                workers.close()
                folder.remove()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


spare = SpareWorkers()
atexit.register(spare.close)
