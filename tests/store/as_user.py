"""Running a function as a user who is not root, since root may write where nobody else may."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_NOBODY = 65534


def as_user(function: Callable[[], T], root: Path, *, writable: bool = False) -> T:
    """Call ``function`` in a child process to which ``root`` is readable, and maybe its own."""
    for path in (root, *root.rglob("*")):
        if writable and os.getuid() == 0:
            os.chown(path, _NOBODY, _NOBODY)
        elif not writable:
            path.chmod(0o555 if path.is_dir() else 0o444)
    parents = [path for path in root.parents if path.stat().st_uid == os.getuid() and path != Path("/")]
    modes = [path.stat().st_mode for path in parents]
    for path, mode in zip(parents, modes, strict=True):
        path.chmod(mode | 0o111)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(_NOBODY)
            answer = True, function()
        except BaseException:
            answer = False, traceback.format_exc()
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        ok, value = pickle.load(stream)
    os.waitpid(child, 0)
    for path, mode in zip(parents, modes, strict=True):
        path.chmod(mode)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert ok, value
    return value
