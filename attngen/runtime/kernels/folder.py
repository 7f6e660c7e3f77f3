"""The file of a kernel's manifest, whole and unchanged since it was written."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from attngen.errors import REMEDY, LoadError
from attngen.files import read_regular

MANIFEST = "manifest.json"
CHECKSUMS = "SHA256SUMS"


def read_manifest(folder: Path, *, sealed: bool = False) -> Any:
    """Return the JSON value of a kernel's manifest, which may be anything: ``Kernel`` checks what it holds.

    Where the folder has ``SHA256SUMS``, as every entry of the cache (``sealed``) must, the manifest is checked against
    it. Raises LoadError.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise LoadError(f"{folder} holds no {MANIFEST}") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    expected = _checksum(folder, sealed)
    if expected is not None and sha256(data).hexdigest() != expected:
        raise LoadError(f"{path} is damaged (it does not match {CHECKSUMS}); {REMEDY}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error


def _checksum(folder: Path, sealed: bool) -> str | None:
    """Return the checksum that ``SHA256SUMS`` has of the manifest; None in a folder that has none."""
    try:
        lines = read_regular(folder / CHECKSUMS).decode("ascii", "replace").splitlines()
    except FileNotFoundError:
        if not sealed:
            return None
        raise LoadError(f"{folder} is damaged (it holds no {CHECKSUMS}); {REMEDY}") from None
    except OSError as error:
        raise LoadError(f"{folder / CHECKSUMS} cannot be read: {error.strerror}") from error
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if MANIFEST not in digests:
        raise LoadError(f"{folder} is damaged ({CHECKSUMS} does not list {MANIFEST}); {REMEDY}")
    return digests[MANIFEST]
