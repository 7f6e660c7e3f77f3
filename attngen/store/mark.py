"""The mark of a cache folder and the names that belong in it: nothing else is ever removed.

The mark is a ``CACHEDIR.TAG`` (https://bford.info/cachedir/), so that backups leave the cache out, with a line of
our own. It is written when a cache is first written to.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from attngen.errors import StoreError
from attngen.store.lock import Lock

TAG = "CACHEDIR.TAG"

#: Modes of what the cache makes: others never write to it, whatever the umask leaves them; see trust.py.
FOLDER_MODE, FILE_MODE = 0o755, 0o644

#: Seconds to wait for a lock of a new name, which only a process that cleans up can hold, for a moment.
_SECONDS = 10.0

_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n"
_OWN = b"# The cache of attngen, form 1. 'attngen cache clear' empties it.\n"

_HEX12 = "[0-9a-f]{12}"
_KEY = "[0-9a-f]{64}"
_SMALL = rf"(?:(?:builds|receipts)\.\w+|refusals\.{_KEY})\.json"

KEY = re.compile(_KEY, re.ASCII)
#: Key of what is written to see whether anything can be.
PROBE = "probe"

LOCK = re.compile(f"(?:{_KEY}|{_SMALL}|{PROBE})")
TEMPORARY = re.compile(f"(?P<key>{LOCK.pattern})-{_HEX12}")

#: Allowed contents of each folder of a cache.
FOLDERS = {
    "kernels": KEY,
    "locks": LOCK,
    "tmp": TEMPORARY,
    "builds": re.compile(r"\w+\.json"),
    "receipts": re.compile(r"[0-9a-f]{32}\.json"),
    "refusals": re.compile(rf"{_KEY}\.json"),
}
_TAG_NAMES = re.compile(rf"{re.escape(TAG)}(?:-{_HEX12})?")


def is_marked(root: Path) -> bool:
    """Whether a folder carries our mark. OSError if the mark cannot be read."""
    path = root / TAG
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE) + len(_OWN)) == _SIGNATURE + _OWN


def claim(root: Path) -> None:
    """Make sure that a folder is a cache of attngen, before anything in it is written or removed.

    A folder that does not exist, is empty, or holds nothing but what a cache holds (one of an earlier version, which
    had no mark) is marked. Raises StoreError for any other folder and for a cache whose folders are symbolic links,
    and OSError where the mark cannot be read or written.
    """
    if not is_marked(root):
        root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        foreign = next(_foreign(root), None)
        if foreign and not is_marked(root):  # another process may have marked it since
            raise StoreError(
                f"{root} is not a cache of attngen: it holds '{foreign}'; nothing in it was touched; "
                "set ATTNGEN_CACHE to a folder that is empty or does not exist"
            )
        temporary = Lock(root / f"{TAG}-{secrets.token_hex(6)}")  # of its own name: others remove what nobody holds
        temporary.acquire(_SECONDS)
        try:
            temporary.path.write_bytes(_SIGNATURE + _OWN)
            os.replace(temporary.path, root / TAG)
        finally:
            temporary.release()
    for name in FOLDERS:
        if (root / name).is_symlink():
            raise StoreError(
                f"{root / name} is a symbolic link, which the cache does not follow; "
                "set ATTNGEN_CACHE to the folder that is to hold the cache"
            )


def sweep_marks(root: Path) -> None:
    """Remove marks that killed processes have not finished. OSError if that fails."""
    for name in os.listdir(root):
        if name != TAG and _TAG_NAMES.fullmatch(name):
            left = Lock(root / name)
            if left.acquire(0.0):
                left.release()


def holds_only_a_cache(root: Path) -> bool:
    """Whether a folder carries our mark, and beside it only what a cache holds. OSError if it cannot be read."""
    return is_marked(root) and all(name == TAG for name in _foreign(root))


def _foreign(root: Path) -> Iterator[str]:
    """Yield the names below ``root`` that no cache holds, one for each of its folders, and that of a mark."""
    with os.scandir(root) as entries:
        for entry in entries:
            if _TAG_NAMES.fullmatch(entry.name) and entry.name != TAG and entry.is_file(follow_symlinks=False):
                continue
            allowed = FOLDERS.get(entry.name)
            if allowed is None or not entry.is_dir(follow_symlinks=False):
                yield entry.name
                continue
            try:
                names = os.listdir(entry.path)
            except FileNotFoundError:
                continue
            yield from [f"{entry.name}/{name}" for name in names if not allowed.fullmatch(name)][:1]
