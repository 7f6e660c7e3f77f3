"""Trust in cached kernels: only those in folders that nobody but this user and root can write to, as ssh requires."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from attngen.store.mark import FOLDERS, holds_only_a_cache


def distrust(root: Path) -> str | None:
    """Reason why kernels of a cache must not run, and a remedy; None for a sound or an absent folder.

    The folder (symbolic links to it are followed) and its subfolders must belong to this user or to root, and neither
    group nor others may write to them. Root accepts any owner: what is mounted into a container is not root's.
    """
    for path in (root, *(root / name for name in FOLDERS)):
        try:
            status = os.stat(path)
        except OSError:
            continue  # it is not there, or cannot be read either
        user = os.geteuid()
        if user != 0 and status.st_uid not in (0, user):
            return (
                f"the cache {root} is not used: {path} belongs to another user (uid {status.st_uid}), whose kernels "
                "would run as you; set ATTNGEN_CACHE to a folder of your own"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            remedy = f"run 'chmod -R go-w {shlex.quote(str(root))}', or " if _is_own(root) else ""
            return (
                f"the cache {root} is not used: users other than its owner may write to {path} "
                f"(mode {stat.S_IMODE(status.st_mode):04o}), and what they put there would run as you; "
                f"{remedy}set ATTNGEN_CACHE to a folder of your own"
            )
    return None


def _is_own(root: Path) -> bool:
    """Whether a folder is a cache of this user's and nothing else, so that its modes may be changed.

    A sticky bit marks a folder that users share, as the temporary one.
    """
    try:
        status = os.stat(root)
        own = os.geteuid() in (0, status.st_uid)
        return own and not status.st_mode & stat.S_ISVTX and holds_only_a_cache(root)
    except OSError:
        return False
