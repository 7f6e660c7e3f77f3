"""Running jobs in worker processes: a job that crashes, hangs or leaks fails alone.

Workers are forks of a plain subprocess (``forks.py``), not ``multiprocessing`` ones: those import the caller's main
module again, which a script without an ``if __name__ == "__main__"`` does not survive.
"""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attngen.compile.environment import is_scrubbed
from attngen.errors import AttngenError, CompileError, CrashError
from attngen.store.forks import Fork, ForkServer
from attngen.store.temporary import TemporaryFolder
from attngen.store.worker import write_request

#: Longest time for a job; a compile takes seconds, including the wait for another process's compile.
JOB_SECONDS = 900.0

_LOG_LINES, _LOG_BYTES = 15, 4096


@dataclass(frozen=True, slots=True)
class Job:
    """A call of ``function`` ("module:name") with picklable arguments; ``label`` names it in errors."""

    label: str
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job, by its position: a value or an error, and the warnings that it gave."""

    index: int
    value: Any = None
    error: AttngenError | None = None
    warnings: tuple[str, ...] = ()


@dataclass(eq=False)
class _Worker:
    process: Fork
    log: IO[bytes]
    index: int = -1  # of its job
    started: float = 0.0
    log_start: int = 0


@dataclass
class Workers:
    """Worker processes: the idle ones, and those that run a job.

    They are forks of one that calls ``load`` ("module:name") first; if that fails, it is no error.
    """

    scratch: Path  # temporary files of all of them, those that are killed too
    load: str | None = None
    idle: list[_Worker] = field(default_factory=list)
    busy: list[_Worker] = field(default_factory=list)
    _server: ForkServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self) -> None:
        """Start the process that forks, which loads while the caller does something else."""
        with self._lock:
            if self._server is None:
                self._server = self._start()

    def spawn(self) -> _Worker:
        """Start a process."""
        log = self._log()
        with self._lock:
            if self._server is None:
                self._server = self._start()
            try:
                process = self._server.fork(log)
            except OSError:  # it was killed, perhaps for lack of memory
                self._server.close()
                self._server = self._start()
                process = self._server.fork(log)
        return _Worker(process, log)

    def close(self) -> None:
        """End the processes that have no job, and the one that forks."""
        for worker in self.idle:
            worker.process.kill()  # a fork of the caller may hold the other end of what it reads, which then never ends
        for worker in self.idle:
            _close(worker)
        self.idle.clear()
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _start(self) -> ForkServer:
        environment = {name: value for name, value in os.environ.items() if not is_scrubbed(name)}
        environment["TMPDIR"] = str(self.scratch)
        with self._log() as log:
            return ForkServer(self.load, environment, log, subprocess.Popen)

    def _log(self) -> IO[bytes]:
        return open(self.scratch / f"log-{secrets.token_hex(6)}", "w+b")

    def stop(self) -> None:
        """Stop the jobs, which fail."""
        for worker in tuple(self.busy):
            worker.process.kill()


@contextmanager
def worker_processes(load: str | None = None) -> Iterator[Workers]:
    """Give processes that several calls of ``run_jobs`` share, one after the other; all have called ``load``."""
    with TemporaryFolder() as scratch:
        workers = Workers(scratch, load)
        try:
            yield workers
        finally:
            workers.close()


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    *,
    on_start: Callable[[int], None] | None = None,
    timeout: float = JOB_SECONDS,
    shared: Workers | None = None,
) -> Iterator[JobResult]:
    """Yield the result of each job as it finishes, with at most ``workers`` at once.

    ``jobs`` may grow meanwhile; appended jobs run after those before them.
    A job that returns None asks to be called again after all other jobs; its last argument is then True (False the
    first time). So a kernel that another process builds is left for the end.
    A worker that dies, or takes longer than ``timeout`` seconds, fails its job alone. Workers end with the iteration,
    but for those of ``shared``, which wait for the next one.
    """
    if shared is None:
        with worker_processes() as own:
            yield from run_jobs(jobs, workers, on_start=on_start, timeout=timeout, shared=own)
        return
    pool = _Pool(jobs, timeout, shared)
    try:
        yield from pool.run(workers, on_start)
    finally:
        pool.close()


@dataclass
class _Pool:
    jobs: Sequence[Job]
    timeout: float
    workers: Workers
    busy: dict[int, _Worker] = field(default_factory=dict)  # by the descriptor of their answers

    def run(self, workers: int, on_start: Callable[[int], None] | None) -> Iterator[JobResult]:
        pending: deque[tuple[int, bool]] = deque()
        again: list[int] = []
        taken = 0
        with selectors.DefaultSelector() as selector:
            while taken < len(self.jobs) or pending or again or self.busy:
                pending.extend((index, False) for index in range(taken, len(self.jobs)))
                taken = len(self.jobs)
                if not pending and again and not self.busy:
                    pending.extend((index, True) for index in again)
                    again.clear()
                while pending and len(self.busy) < workers:
                    index, last = pending.popleft()
                    worker = self.start(index, last)
                    selector.register(_answers(worker), selectors.EVENT_READ)
                    if on_start and not last:
                        on_start(index)
                for worker in self.wait(selector):
                    result = self.finish(worker)
                    if result.value is None and result.error is None:
                        again.append(result.index)
                    else:
                        yield result

    def start(self, index: int, last: bool) -> _Worker:
        try:
            worker = self.workers.idle.pop()
        except IndexError:  # none is idle, or another thread took the last one
            worker = self.workers.spawn()
        job = self.jobs[index]
        worker.index, worker.started = index, time.monotonic()
        worker.log_start = os.fstat(worker.log.fileno()).st_size
        self.busy[_answers(worker)] = worker
        self.workers.busy.append(worker)
        with suppress(BrokenPipeError):  # it has died: reading its answer tells why
            write_request(worker.process.stdin, (job.function, (*job.arguments, last)))
        return worker

    def wait(self, selector: selectors.BaseSelector) -> list[_Worker]:
        """Return the workers that answered, died or ran out of time; blocks until there is one."""
        deadline = min(worker.started for worker in self.busy.values()) + self.timeout
        ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
        if not ready:
            ready = [fd for fd, w in self.busy.items() if time.monotonic() - w.started >= self.timeout]
            for fd in ready:
                self.busy[fd].process.kill()
        for fd in ready:
            selector.unregister(fd)
        return [self.busy.pop(fd) for fd in ready]

    def finish(self, worker: _Worker) -> JobResult:
        self.workers.busy.remove(worker)
        try:
            ok, value, messages, retired = pickle.load(worker.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            return JobResult(worker.index, error=self.dead(worker))
        if isinstance(value, CompileError) and not ok:  # LLVM and MLIR print their reasons
            value.args = (f"{value}{_said(worker)}",)
        if retired:
            _close(worker)
        else:
            self.workers.idle.append(worker)
        warnings = tuple(messages)
        if ok:
            return JobResult(worker.index, value=value, warnings=warnings)
        return JobResult(worker.index, error=value, warnings=warnings)

    def dead(self, worker: _Worker) -> CompileError:
        """Error of a worker that gave no answer."""
        late = time.monotonic() - worker.started >= self.timeout
        code = worker.process.wait()
        reason = f"exited with {code}"
        if late:
            reason = f"took longer than {self.timeout:.0f} s and was stopped"
        elif code < 0:
            reason = f"died of {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                reason += ", probably for lack of memory; fewer --jobs need less"
        # a compiler that crashed may still compile another plan; a timeout says nothing about that
        crashed = code < 0 and code != -signal.SIGKILL
        kind = CrashError if crashed else CompileError
        error = kind(f"{self.jobs[worker.index].label}: its compiler process {reason}{_said(worker)}")
        _close(worker)
        return error

    def close(self) -> None:
        for worker in self.busy.values():
            self.workers.busy.remove(worker)
            worker.process.kill()
            _close(worker)


def _answers(worker: _Worker) -> int:
    return worker.process.stdout.fileno()


def _said(worker: _Worker) -> str:
    """Return the end of what a worker printed during its job, on lines of their own; often nothing."""
    start = max(worker.log_start, os.fstat(worker.log.fileno()).st_size - _LOG_BYTES)
    text = os.pread(worker.log.fileno(), _LOG_BYTES, start).decode("utf-8", "replace")
    return "".join(f"\n  {line}" for line in text.splitlines()[-_LOG_LINES:])


def _close(worker: _Worker) -> None:
    worker.process.close()
    worker.log.close()
