"""The proof that a build has nothing to do, checked without loading a spec, a template or a compiler.

A receipt remembers the content of all that a build read: the spec's files, the generator itself (templates,
presets, tables of choices and Python sources), the versions of what it calls. If none of it changed, neither did the
kernels.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from attngen import resources
from attngen.arch import ARCHES
from attngen.compile.toolchain import toolchain
from attngen.files import read_regular
from attngen.records import is_name
from attngen.store.key import digest
from attngen.store.store import Store

_FOLDER = "receipts"

#: Packages that shape the rendered text; the compiler itself is identified by ``toolchain``.
_RENDERERS = ("jinja2", "pydantic", "PyYAML")


@dataclass(frozen=True, slots=True)
class Receipt:
    """Inputs and results of a build: the package and, in order, the name and key of each kernel."""

    inputs: Mapping[str, str]
    generator: str
    package: str
    kernels: tuple[tuple[str, str], ...]


def hash_files(paths: Iterable[str]) -> dict[str, str]:
    """Return path → SHA-256 of each file; OSError if one cannot be read."""
    return {path: sha256(_read(path)).hexdigest() for path in paths}


def generator_digest() -> str:
    """Return a hash over everything but the spec that decides what a build makes."""
    package = Path(__file__).resolve().parents[1]
    files = [
        *_below(package, ".py"),
        *_below(resources.templates_dir()),
        *map(str, (resources.specs_dir() / "presets").glob("*.yaml")),
        *map(str, resources.tuned_dir().glob("*.yaml")),
    ]
    return digest(
        {
            "files": hash_files(sorted(files)),
            "python": platform.python_version(),
            "renderers": {name: _version(name) for name in _RENDERERS},
            "compilers": {arch: [toolchain(backend, arch) for backend in ("triton", "cuda")] for arch in ARCHES},
        }
    )


def read_receipt(
    store: Store, spec: Path, selected: Sequence[Sequence[str]], tuned: Sequence[Path] = ()
) -> Receipt | None:
    """The receipt of a build of the part ``selected`` of ``spec`` (``KernelFilter.key``), with the choices of the
    files ``tuned``, if all that it read is unchanged, else None."""
    try:
        fields = json.loads(read_regular(store.root / _FOLDER / _name(spec, selected, tuned)))
        expected = fields.pop("digest")
        if digest(fields) != expected or not is_name(fields["package"]):
            return None
        kernels = tuple((name, key) for name, key in fields.pop("kernels"))
        receipt = Receipt(kernels=kernels, **fields)
        unchanged = hash_files(receipt.inputs) == receipt.inputs
        return receipt if unchanged and generator_digest() == receipt.generator else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def write_receipt(
    store: Store, spec: Path, selected: Sequence[Sequence[str]], receipt: Receipt, tuned: Sequence[Path] = ()
) -> None:
    """Remember a finished build. Raises StoreError if it cannot be written."""
    content: dict[str, Any] = asdict(receipt)
    content["digest"] = digest(content)
    store.write(_FOLDER, _name(spec, selected, tuned), json.dumps(content, indent=1).encode() + b"\n")


def _name(spec: Path, selected: Sequence[Sequence[str]], tuned: Sequence[Path]) -> str:
    # realpath takes links that lead to each other, too: reading the spec says what is wrong
    read = [os.path.realpath(spec), list(map(list, selected)), *map(os.path.realpath, tuned)]
    return digest(read)[:32] + ".json"


def _below(folder: Path, suffix: str = "") -> Iterator[str]:
    """Yield the paths of all files in a folder and below; there are a thousand, which ``Path`` takes long to list."""
    for name, _, files in os.walk(folder):
        yield from (os.path.join(name, file) for file in files if file.endswith(suffix))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
