"""The other end of ``jobs``: a process that calls one function per request until its parent goes away.

An answer says whether the job succeeded, its value or error, its warnings, and whether the process ends with it.

Requests come as pickles on standard input, each after its length; answers go as pickles to what was standard output.
Whatever a job prints goes to standard error, so that it cannot break the conversation.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import IO, Any

from attngen.errors import AttngenError, DiskFullError, internal_error
from attngen.files import FULL, failed_write

#: Bytes of the length that precedes a request.
_LENGTH = 8

_retired = False


def retire() -> None:
    """End this process after its current job, which left something harmful to others, such as a broken CUDA context."""
    global _retired
    _retired = True


def write_request(stream: IO[bytes], request: tuple[str, tuple[Any, ...]]) -> None:
    """Send a request. It is longer than a pipe holds, so it blocks until the worker takes it."""
    data = pickle.dumps(request)
    stream.write(len(data).to_bytes(_LENGTH, "little") + data)
    stream.flush()


def _read_request(stream: IO[bytes]) -> tuple[str, tuple[Any, ...]]:
    """Take a request whole, then unpickle it: that imports modules, for which the parent does not wait."""
    length = int.from_bytes(stream.read(_LENGTH), "little")
    data = stream.read(length)
    if len(data) < max(length, 1):
        raise EOFError
    function, arguments = pickle.loads(data)
    return function, arguments


def main() -> None:
    """Serve requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a terminal sends it to the whole group
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = _read_request(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # exit handlers of libraries take time, and may hang
        answer = _answer(function, arguments)
        try:
            pickle.dump((*answer, _retired), answers)
            answers.flush()
        except BrokenPipeError:
            return  # nobody listens any more
        if _retired:
            os._exit(0)


def _full(error: BaseException) -> DiskFullError | None:
    """The error of a job that had no room for its temporary files, or None.

    Otherwise a compiler that cannot write would count as one that refuses the plan, and a slower plan would follow.
    """
    if isinstance(error, DiskFullError):
        return None
    said = str(error)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in FULL:
            return DiskFullError(failed_write(link, tempfile.gettempdir()))
        for code in FULL:
            if os.strerror(code) in said:  # as a compiler that is a program of its own reports it
                return DiskFullError(failed_write(OSError(code, said), tempfile.gettempdir()))
        link = link.__cause__ or link.__context__
    return None


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    value: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return value


def _answer(function: str, arguments: tuple[Any, ...]) -> tuple[bool, Any, list[str]]:
    """(success, value or error, warnings) of a job."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ok, value = True, _named(function)(*arguments)
            pickle.dumps(value)
        except AttngenError as error:
            ok, value = False, _full(error) or error
        except Exception as error:
            ok, value = False, _full(error) or internal_error(function, error)
    # A user needs attngen's own warnings, not the deprecations of libraries.
    messages = [str(w.message) for w in caught if w.category.__module__.startswith("attngen.")]
    return ok, value, messages
