"""Writing the rendered sources of a spec where they can be read and committed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.build.kernel_filter import EVERYTHING, KernelFilter
from attngen.build.pipeline import Prepared, prepare
from attngen.errors import StoreError
from attngen.files import cause

if TYPE_CHECKING:
    from attngen.schema import Spec

#: Mark in the header of every rendered source; a file without it is never removed.
_MARK = "by `attngen build "


@dataclass(frozen=True, slots=True)
class Generated:
    """Outcome of rendering into ``folder``; ``changed`` and ``removed`` are names of files in it."""

    folder: Path
    kernels: tuple[Prepared, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attngen build --render-only --json``."""
        kernels = [
            {
                "name": kernel.plan.name,
                "backend": kernel.source.backend,
                "arch": kernel.plan.arch.name,
                "file": (self.folder / kernel.source.file_name).as_posix(),
            }
            for kernel in self.kernels
        ]
        return {"kernels": kernels, "changed": list(self.changed), "removed": list(self.removed)}


def folder_of(spec: Spec, out: Path) -> Path:
    """Return the folder below ``out`` for the sources of a spec: the name of its file without the suffix."""
    return out / Path(spec.name).stem


def generate(path: str | Path, out: Path, only: KernelFilter = EVERYTHING) -> Generated:
    """Render every kernel of a spec into ``out/<spec>/``, one file each, without compiling.

    Files that would not change are left alone. Sources of kernels that the spec no longer asks for are removed, unless
    ``only`` restricts what is rendered. Raises SpecError, and StoreError if a file cannot be written.
    """
    from attngen.schema import load_spec

    spec = load_spec(path)
    kernels = prepare(spec, only)
    folder = folder_of(spec, out)
    texts = {kernel.source.file_name: kernel.source.text for kernel in kernels}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        changed = [name for name, text in texts.items() if _write(folder / name, text)]
        removed = [] if only else [name for name in _generated_files(folder) if name not in texts]
        for name in removed:
            (folder / name).unlink()
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {cause(error)}") from error
    return Generated(folder, tuple(kernels), tuple(changed), tuple(removed))


def _write(path: Path, text: str) -> bool:
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.write_bytes(data)
    return True


def _generated_files(folder: Path) -> list[str]:
    """Return the names of the rendered sources in a folder."""
    files = [path for suffix in ("*.py", "*.cu") for path in folder.glob(suffix)]
    return sorted(path.name for path in files if _MARK in path.read_text("utf-8", "replace")[:1000])
