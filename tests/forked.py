"""Processes that start in no time: forks of one that has imported torch and attngen, which takes seconds of each.

What they run sees a fresh ``__main__``, and its own environment, search path, folder and streams. ``Popen`` stands for
that of ``subprocess`` where a Python program is started; what ``Preload`` does not import, it imports itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).parents[1]

#: Modules that most processes of tests need, but no Triton: whether it interprets is settled when it is imported.
ATTNGEN = (
    "from tests.forked import hold_nvrtc; hold_nvrtc()\n"
    "import torch\n"
    "import attngen.compile.cuda, attngen.compile.triton, attngen.plan, attngen.render, attngen.schema\n"
    "import attngen.build.pipeline, attngen.lab.verify.interpreted\n"
)

#: The same without torch, whose forks take twice as long: for jobs that compile nothing.
WITHOUT_TORCH = ATTNGEN.replace("import torch\n", "").replace(", attngen.lab.verify.interpreted", "")


def hold_nvrtc() -> None:
    """Have CuPy call the NVRTC that compiles, where another one is installed that an import of torch may load first.

    Processes of tests compile although they import torch; those of attngen that compile do not.
    """
    from attngen.compile import cuda, toolchain  # not by processes that have to see another attngen
    from attngen.errors import ToolchainError

    if len(toolchain.installed_nvrtc()) > 1:
        with suppress(ToolchainError):  # the tests that compile say what is wrong
            cuda.load_compiler()
    toolchain.installed_nvrtc.cache_clear()  # forks may have others on their search paths


class Preload:
    """A process that forks. ``program``: what it runs first, with ``places`` in front of its search path."""

    def __init__(self, program: str = ATTNGEN, places: Sequence[Path] = (ROOT,)) -> None:
        self.channel, theirs = socket.socketpair()
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}
        code = f"import sys; sys.path.remove({str(ROOT)!r}); sys.path[:0] = {list(map(str, places))!r}\n{program}"
        main = f"from tests.forked import serve; serve({theirs.fileno()}, {code!r}, {list(map(str, places))!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", main], env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def close(self) -> None:
        """End the process; its forks go on."""
        self.channel.close()
        self._process.wait(timeout=30)

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Popen:
        """Start ``python -c program …`` or ``python file …``."""
        return Popen(self, [os.fspath(part) for part in command[1:]], (stdin, stdout, stderr), env, cwd)

    def run(
        self, command: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str], cwd: str | Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, and return what it printed."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self.popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd).wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(command), code, out.read().decode(), err.read().decode())


_STARTED: list[Preload] = []


@cache
def preload(program: str = ATTNGEN, places: Sequence[Path] = (ROOT,)) -> Preload:
    """Return the process of this session that has run a program; it is started when it is first asked for."""
    _STARTED.append(Preload(program, places))
    return _STARTED[-1]


def close() -> None:
    """End the processes of this session."""
    while _STARTED:
        _STARTED.pop().close()
    preload.cache_clear()


def popen(command: Sequence[str | os.PathLike[str]], program: str = ATTNGEN, **options: Any) -> Popen:
    """Start a program in a fork, as ``subprocess.Popen`` does in a fresh process."""
    return preload(program).popen(command, **options)


def starting(program: str) -> SimpleNamespace:
    """In place of the module ``subprocess``: forks of a process that has run a program."""
    return SimpleNamespace(Popen=partial(popen, program=program), PIPE=subprocess.PIPE)


class Popen:
    """The part of ``subprocess.Popen`` that callers use, for a fork of a ``Preload``."""

    def __init__(
        self,
        preload: Preload,
        arguments: list[str],
        streams: Sequence[int | IO[bytes] | None],
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair()
        passed, closed = [theirs.fileno()], [theirs.fileno()]
        for number, (name, stream) in enumerate(zip(("stdin", "stdout", "stderr"), streams, strict=True)):
            if stream == subprocess.PIPE:
                ends = os.pipe()
                theirs_, ours = ends if name == "stdin" else ends[::-1]
                setattr(self, name, os.fdopen(ours, "wb" if name == "stdin" else "rb"))
                passed.append(theirs_)
                closed.append(theirs_)
            elif stream == subprocess.DEVNULL:
                passed.append(os.open(os.devnull, os.O_RDWR))
                closed.append(passed[-1])
            else:
                passed.append(number if stream is None else stream if isinstance(stream, int) else stream.fileno())
        request = {
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
        }
        body = json.dumps(request).encode()
        socket.send_fds(preload.channel, [len(body).to_bytes(8, "little")], passed)
        preload.channel.sendall(body)
        theirs.detach()
        for descriptor in closed:
            os.close(descriptor)
        self.pid = int.from_bytes(self._receive(8), "little")

    def _receive(self, length: int) -> bytes:
        received = b""
        while len(received) < length:
            part = self._status.recv(length - len(received))
            if not part:
                raise OSError("the process that forks has ended")
            received += part
        return received

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self.wait(timeout=1e-6)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status: negative for a signal, as that of ``subprocess``."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._receive(8), "little", signed=True)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0) from None
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may end, and be waited for, in between
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


# --- the process that forks ------------------------------------------------------------------------------------------


def serve(descriptor: int, program: str, places: list[str]) -> None:
    """Run a program, then fork for each request until the other end is closed."""
    gc.disable()  # nothing of a module is garbage
    exec(compile(program, "<preload>", "exec"), {"__name__": "__preload__"})
    gc.freeze()  # a collection in a fork would copy all pages that it shares
    gc.enable()
    base = [path for path in sys.path if path not in places and path]
    channel = socket.socket(fileno=descriptor)
    waiting: dict[int, socket.socket] = {}
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    import select

    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            while waiting:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                told = waiting.pop(pid)
                with suppress(OSError):  # nobody waits for it any more
                    told.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
                told.close()
        if channel not in ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(channel, 8, 4)
        if not head:
            return
        length, body = int.from_bytes(head, "little"), b""
        while len(body) < length:
            body += channel.recv(length - len(body))
        told = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            for other in (channel, wake, woken, told, *waiting.values()):
                other.close()
            _become(json.loads(body), descriptors[1:], base)
        for other in descriptors[1:]:
            os.close(other)
        waiting[pid] = told
        told.sendall(pid.to_bytes(8, "little"))


def _become(request: dict[str, Any], streams: list[int], base: list[str]) -> None:
    """Run a program in this fork, as Python would in a fresh process; never returns."""
    import atexit
    import runpy
    import traceback
    import types
    import warnings

    atexit._clear()  # what the program registered is for its own end
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    first, *arguments = request["arguments"]
    searched = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        if first == "-c":
            sys.argv, sys.path[:] = ["-c", *arguments[1:]], ["", *searched, *base]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[0], "<string>", "exec"), vars(main))
        else:
            sys.argv, sys.path[:] = [first, *arguments], [os.path.dirname(first), *searched, *base]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
