"""Reading files that other users may have made, where anything but a regular file is an error; and why a file fails."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Reason why nothing more can be written, by errno.
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def cause(error: OSError) -> str:
    """The cause of a failed read or write, in words."""
    return FULL.get(error.errno or 0) or error.strerror or str(error)


def failed_write(error: OSError, *places: Path | str) -> str:
    """A failed write in words: where (one of ``places``, unless the error names a file), why, and what helps."""
    from tempfile import gettempdir  # takes longer to import than all of this module

    places = (error.filename,) if error.filename else places
    said = f"cannot write to {' or '.join(map(str, places))}: {cause(error)}"
    if error.errno not in FULL:
        return said
    temporary = any(Path(place).is_relative_to(gettempdir()) for place in places)
    return f"{said}; free some space{', or set TMPDIR to a folder with more' if temporary else ''}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError name a file, as one of a write does not: it says only that the disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


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
