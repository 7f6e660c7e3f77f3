"""One kernel on disk: a folder of plain files and their checksums, which ``sha256sum -c`` understands too.

The cubin is kept raw, so that ``cuobjdump`` and ``nvdisasm`` work on the cache itself.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path

from attngen.compile.artifact import Artifact
from attngen.files import read_regular
from attngen.records import is_name, shown

CUBIN = "kernel.cubin"
MANIFEST = "manifest.json"
CHECKSUMS = "SHA256SUMS"

#: Files of an entry lie in its folder: no other path is ever opened.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")


class DamagedEntryError(Exception):
    """An entry whose files differ from those that were written; the message names the file and the fault."""


def files_of(artifact: Artifact) -> dict[str, bytes]:
    """Return the files of an entry by name, the checksums of all others included."""
    files = {
        CUBIN: artifact.cubin,
        MANIFEST: json.dumps(artifact.manifest, indent=1, sort_keys=True).encode() + b"\n",
        **{name: text.encode() for name, text in artifact.texts.items()},
    }
    files |= {f"{name}.cubin": cubin for name, cubin in artifact.others.items()}
    lines = [f"{sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    files[CHECKSUMS] = "".join(lines).encode()
    return files


def read_checksums(folder: Path) -> dict[str, str]:
    """Return file name → SHA-256 of an entry, or raise DamagedEntryError."""
    text = _read(folder, CHECKSUMS).decode("ascii", "replace")
    checksums = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        checksums[name] = digest
    for name in (CUBIN, MANIFEST):
        if name not in checksums:
            raise DamagedEntryError(f"{CHECKSUMS} does not list {name}")
    return checksums


def read_file(folder: Path, name: str, checksums: dict[str, str]) -> bytes:
    """Return the bytes of one file of an entry, or raise DamagedEntryError if they are not those that were written."""
    if name not in checksums:
        raise DamagedEntryError(f"{CHECKSUMS} does not list {name}")
    if not _FILE.fullmatch(name):
        raise DamagedEntryError(f"{CHECKSUMS} lists {shown(name)}, which is not the name of a file of a kernel")
    data = _read(folder, name)
    if sha256(data).hexdigest() != checksums[name]:
        raise DamagedEntryError(f"{name} ({len(data)} bytes) does not match its checksum")
    return data


def read_entry(folder: Path) -> Artifact:
    """The artifact of a folder, without texts: all that is needed to run its kernel. Raises DamagedEntryError."""
    checksums = read_checksums(folder)
    try:
        manifest = json.loads(read_file(folder, MANIFEST, checksums))
    except (ValueError, RecursionError) as error:
        raise DamagedEntryError(f"{MANIFEST} is not JSON ({error})") from None
    rows = manifest.get("launches") if isinstance(manifest, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and is_name(r.get("name")) for r in (manifest, *rows)):
        raise DamagedEntryError(f"{MANIFEST} is not the manifest of a kernel")
    names = [row["name"] for row in rows if f"{row['name']}.cubin" in checksums]
    others = {name: read_file(folder, f"{name}.cubin", checksums) for name in names}
    return Artifact(read_file(folder, CUBIN, checksums), manifest, others=others)


def verify_entry(folder: Path) -> None:
    """Raise DamagedEntryError unless every file of an entry is what was written."""
    checksums = read_checksums(folder)
    for name in checksums:
        read_file(folder, name, checksums)


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_regular(folder / name)
    except OSError as error:
        raise DamagedEntryError(f"{name}: {error.strerror}") from error
