"""Writing files so that a crash at any moment leaves either the old state or the new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from attngen.store.mark import FILE_MODE, FOLDER_MODE


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder of files, below one that exists, and wait until the disk has all of them."""
    path.mkdir(FOLDER_MODE)
    for name, data in files.items():
        write_synced(path / name, data)
    sync_folder(path)
