"""Reading files that other users may have made, where anything but a regular file is an error; and why a file fails."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: Reason why nothing more can be written, by errno.
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def cause(error: OSError) -> str:
    """The cause of a failed read or write, in words."""
    return FULL.get(error.errno or 0) or error.strerror or str(error)


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. OSError for anything else: opening a pipe would wait for its writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a NUL byte in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        return file.read()
