"""The kernels of each package: one small JSON file for each package, written by its last build, read by lookups."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from attngen.files import read_regular
from attngen.records import MisfitError, Name, ValueKind, VariantName, read
from attngen.store.key import digest
from attngen.store.mark import KEY
from attngen.store.store import Store, StoreWarning

#: Version of the format of an index; another one is ignored with a warning.
INDEX_FORMAT = 1

_FOLDER = "builds"

_Key = Annotated[str, ValueKind("a key", lambda value: isinstance(value, str) and KEY.fullmatch(value) is not None)]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A kernel of a package: enough to choose among them without opening each manifest."""

    name: Name
    key: _Key
    variant: VariantName
    arch: str
    backend: str


@dataclass(frozen=True, slots=True)
class Index:
    """The kernels of a package, in the order of its spec.

    ``spec`` is the absolute path of the spec; ``inputs`` maps the path of each file that it was read from, includes
    too, to the SHA-256 of its content, so that a lookup can tell that a spec changed since.
    """

    package: Name
    spec: str
    spec_hash: str
    inputs: Mapping[str, str]
    kernels: tuple[IndexEntry, ...]


def write_index(store: Store, index: Index) -> None:
    """Replace the package's index by a new one; nothing is written if they are equal.

    Raises StoreError if it cannot be written.
    """
    if _parse(_read(store, index.package)) == index:
        return
    content: dict[str, Any] = {"format": INDEX_FORMAT, **asdict(index)}
    content["digest"] = digest(content)
    store.write(_FOLDER, f"{index.package}.json", json.dumps(content, indent=1).encode() + b"\n")


def read_index(store: Store, package: str) -> Index | None:
    """Return the index of a package, or None; a damaged one counts as none, with a warning."""
    content = _read(store, package)
    index = _parse(content)
    if content is not None and index is None:
        path = store.root / _FOLDER / f"{package}.json"
        warnings.warn(
            f"index {path} is damaged or of another version; build its spec again", StoreWarning, stacklevel=2
        )
    return index


def read_indexes(store: Store) -> list[Index]:
    """Return the indexes of all packages, by name."""
    names = sorted(path.stem for path in _folder(store).glob("*.json"))
    return [index for name in names if (index := read_index(store, name))]


def _folder(store: Store) -> Path:
    return store.root / _FOLDER


def _read(store: Store, package: str) -> bytes | None:
    try:
        return read_regular(_folder(store) / f"{package}.json")
    except OSError:
        return None


def _parse(content: bytes | None) -> Index | None:
    """Return the index in a file's content, or None unless it is exactly what was written."""
    if content is None:
        return None
    try:
        fields = json.loads(content)
        expected = fields.pop("digest")
        if digest(fields) != expected or fields.pop("format") != INDEX_FORMAT:
            return None
        return read(Index, fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MisfitError):
        return None
