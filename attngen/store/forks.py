"""A fork server: worker processes that start in milliseconds, as forks of a process that has imported everything.

A worker that starts by itself spends longer on imports than many a kernel takes to compile, and as many page faults;
with a worker for each of 64 cores that is most of a build. The server is a plain subprocess with one thread, whatever
the caller is: forks of the caller itself would inherit its threads' locks, its CUDA context and its buffers.

Over a socket the server is sent streams, a status socket among them, for each worker. It writes to that the number of
the process, and how it ended.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

_FORK = b"f"
_NUMBER = 8  # bytes


class Fork:
    """A worker process: what callers need of ``subprocess.Popen``."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: socket.socket) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._status = status
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Number of the process. Waits until the server has forked it; OSError if the server ended before."""
        if self._pid is None:
            self._pid = self._read()
        return self._pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            self._status.setblocking(False)
            with suppress(BlockingIOError):
                self.wait()
            self._status.setblocking(True)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code: negative for a signal."""
        if self.returncode is None:
            try:
                assert self.pid  # comes first
                code = self._read()
            except BlockingIOError:
                raise
            except OSError:  # the server was killed, so the exit code is lost
                code = -signal.SIGKILL
            self.returncode = code
        return self.returncode

    def kill(self) -> None:
        """End the process at once, if it has not ended."""
        with suppress(OSError):
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the streams to the process, and wait for its end."""
        for stream in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):  # nobody reads the remaining output
                stream.close()
        self.wait()
        self._status.close()

    def _read(self) -> int:
        """Read a number, which comes whole."""
        data = self._status.recv(_NUMBER)
        if len(data) < _NUMBER:
            raise OSError("the process that forks workers has ended")
        return int.from_bytes(data, "little", signed=True)


class ForkServer:
    """The caller's end. ``load`` ("module:name") is called once in the server; if it fails, jobs say what is wrong."""

    def __init__(
        self, load: str | None, environment: Mapping[str, str], log: IO[bytes], popen: Callable[..., Any]
    ) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # the same interpreter and search path as here
            code = f"import sys; sys.path[:] = {sys.path!r}; from attngen.store.forks import serve; serve({load!r})"
            command = [sys.executable, "-c", code]
            self._process = popen(command, stdin=theirs.fileno(), stdout=log, stderr=log, env=environment)

    def fork(self, log: IO[bytes]) -> Fork:
        """Start a worker, which writes what it prints to ``log``. Returns at once; OSError if the server has ended."""
        status, server_end = socket.socketpair()
        read, write = os.pipe()
        answers, answer = os.pipe()
        try:
            socket.send_fds(self._channel, [_FORK], [server_end.fileno(), read, answer, log.fileno()])
        except OSError:
            for descriptor in (write, answers):
                os.close(descriptor)
            status.close()
            raise
        finally:
            server_end.close()
            for descriptor in (read, answer):
                os.close(descriptor)
        return Fork(os.fdopen(write, "wb"), os.fdopen(answers, "rb"), status)

    def close(self) -> None:
        """End the server; its workers end by themselves when their streams close."""
        self._channel.close()
        self._process.kill()  # a fork of the caller may hold the channel too, which then never ends
        self._process.wait()


# --- the server ------------------------------------------------------------------------------------------------------


def serve(load: str | None) -> None:
    """Call ``load``, and fork a worker for each request on standard input, until that ends."""
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides; a terminal sends it to the whole group
    channel = socket.socket(fileno=os.dup(0))
    if load is not None:
        module, _, name = load.partition(":")
        with suppress(Exception):
            getattr(importlib.import_module(module), name)()
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would copy all pages that it shares
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for end in (channel, woken):
            selector.register(end, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                _reap(waiting)
            if channel not in ready:
                continue
            request, descriptors, _, _ = socket.recv_fds(channel, 1, 4)
            if request != _FORK:
                os._exit(0)
            status_socket = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                selector.close()
                for other in (channel, wake, woken, status_socket, *waiting.values()):
                    other.close()
                _work(descriptors[1:])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            waiting[pid] = status_socket
            _send(status_socket, pid)


def _reap(waiting: dict[int, socket.socket]) -> None:
    """Tell the caller how workers ended."""
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        status_socket = waiting.pop(pid)
        _send(status_socket, os.waitstatus_to_exitcode(status))
        status_socket.close()


def _send(status_socket: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for it any more
        status_socket.sendall(number.to_bytes(_NUMBER, "little", signed=True))


def _work(streams: list[int]) -> None:
    """Serve jobs in a fork; never returns."""
    from attngen.store.worker import main

    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        main()
    finally:
        os._exit(1)
