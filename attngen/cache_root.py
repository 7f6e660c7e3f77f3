"""The folder of the cache, which a call asks for before it reads any of it; and the error of its files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from attngen.errors import DiskFullError, StoreError
from attngen.files import FULL, cause


def default_root() -> Path:
    """Return the folder of the cache: ``ATTNGEN_CACHE``, or the place that the platform gives to caches.

    Raises StoreError for a name that no folder can have: one that is too long, or below the home of an unknown user.
    """
    chosen = os.environ.get("ATTNGEN_CACHE")
    if chosen:
        try:
            root = Path(chosen).expanduser().absolute()
            os.lstat(root)
        except RuntimeError:
            raise StoreError(
                f"ATTNGEN_CACHE is {chosen!r}, of no user; set it to a folder that can be written"
            ) from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise store_error("use the cache", root, error) from None
        return root
    from platformdirs import user_cache_path

    return user_cache_path("attngen", appauthor=False)


def store_error(action: str, path: Path, error: OSError) -> StoreError:
    """Return the StoreError that explains an OSError: what failed, why, and what the user can do."""
    advice = "set ATTNGEN_CACHE to a folder that can be written"
    if error.errno not in FULL:
        return StoreError(f"cannot {action} {path}: {cause(error)}; {advice}")
    return DiskFullError(
        f"cannot {action} {path}: {cause(error)}; free some space ('attngen cache clear' empties the cache), or "
        f"{advice}"
    )
