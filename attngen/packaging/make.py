"""From a spec to a wheel or a source distribution: the project is written, hatchling builds it, the result is moved."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from zipfile import ZipFile

from attngen.build.pipeline import Observer
from attngen.compile.toolchain import newer_driver_note
from attngen.drivers import drivers_text
from attngen.errors import PackageError, SettingError
from attngen.files import cause, failed_write, naming
from attngen.packaging.project import Choices, project_files
from attngen.packaging.settings import Settings
from attngen.packaging.sizes import WheelSizes, sizes_of
from attngen.packaging.view import DRIVER_LINE
from attngen.runtime.registry.shipped import INDEX
from attngen.store.temporary import TemporaryFolder


@dataclass(frozen=True, slots=True)
class PackageFiles:
    """The files that were made. ``sizes`` and ``drivers``, the oldest by arch, are those of the wheel, if there is one.

    ``note`` says if another compiler would make kernels for older drivers.
    """

    package: str
    files: tuple[Path, ...]
    sizes: WheelSizes | None = None
    drivers: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``attngen package --json`` prints it."""
        files = [{"path": str(path), "bytes": path.stat().st_size} for path in self.files]
        wheel = None if self.sizes is None else self.sizes.to_dict()
        return {"package": self.package, "files": files, "wheel": wheel, "drivers": dict(self.drivers)}


def package(
    spec: str | Path,
    out: Path,
    choices: Choices | None = None,
    *,
    targets: Iterable[str] = ("wheel",),
    max_size: int | None = None,
    jobs: int | None = None,
    observer: Observer | None = None,
) -> PackageFiles:
    """Write the wheel or the source distribution (``sdist``) of a spec's package, or both, into the folder ``out``.

    A wheel holds compiled kernels; a source distribution compiles them where it is installed, with the generator that
    it carries. Files of the same name are replaced, each as a whole and only if everything was made. Raises SpecError
    for a wrong spec, and PackageError if a kernel does not compile, a name is taken, or the wheel takes more than
    ``max_size`` bytes.
    """
    from attngen.schema import load_spec

    _check_date()
    targets = tuple(targets)
    loaded = load_spec(spec)
    with TemporaryFolder() as project:
        root = project.resolve()
        for name, data in project_files(loaded, choices or Choices(), generator="sdist" in targets).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with naming(root / name):
                (root / name).write_bytes(data)
        with _beside(out) as work:
            built = [build_target(target, root, work, jobs=jobs, observer=observer) for target in targets]
            sizes = next((sizes_of(path) for path in built if path.suffix == ".whl"), None)
            if sizes is not None and not sizes.shares:
                raise PackageError(
                    "hatchling ran without its hooks, so the wheel is empty; is HATCH_BUILD_NO_HOOKS set?"
                )
            if sizes is not None and max_size is not None:
                sizes.require(max_size, f"the wheel of {loaded.package}")
            for path in built:
                os.replace(path, out / path.name)
    paths = tuple(out / path.name for path in built)
    index = next((_index_of(path, loaded.package) for path in paths if path.suffix == ".whl"), None)
    if index is None:
        return PackageFiles(loaded.package, paths)
    note = newer_driver_note(row["arch"] for row in index["kernels"] if row["backend"] == "cuda")
    return PackageFiles(loaded.package, paths, sizes, index["drivers"], note)


def _index_of(wheel: Path, module: str) -> dict[str, Any]:
    with ZipFile(wheel) as archive:
        index: dict[str, Any] = json.loads(archive.read(f"{module}/{INDEX}"))
    return index


def _check_date() -> None:
    """Raise SettingError if ``SOURCE_DATE_EPOCH`` is not a time that archives can store."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII) or int(text) >= 2**32:
        raise SettingError(f"SOURCE_DATE_EPOCH is {text!r}; allowed: seconds since 1970, less than 2^32")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yield a temporary folder in ``out``, from which files are renamed into place. Raises PackageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = TemporaryFolder(out, prefix=".attngen-")
    except OSError as error:
        raise PackageError(f"cannot write to {out}: {cause(error)}") from error
    with folder as path:
        yield path


def build_target(
    target: str,
    root: Path,
    directory: Path,
    *,
    version: str = "standard",
    jobs: int | None = None,
    observer: Observer | None = None,
) -> Path:
    """Build one target of a project with hatchling, and return its file. Raises PackageError if that fails.

    ``version`` is hatchling's: ``standard``, or ``editable`` for a wheel.
    """
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder
    from hatchling.plugin import hookimpl
    from hatchling.plugin.manager import PluginManager

    from attngen.packaging.contents import Contents
    from attngen.packaging.hook import AttngenHook, project_contents

    contents: list[Contents] = []

    class Hook(AttngenHook):
        """The hook of this attngen, whichever one is installed; it takes what is compiled below."""

        def _contents(self, settings: Settings) -> list[Contents]:
            return contents

    class Plugin:
        @hookimpl
        def hatch_register_build_hook(self) -> type[AttngenHook]:
            return Hook

    plugins = PluginManager()
    plugins.manager.register(Plugin(), name=AttngenHook.PLUGIN_NAME)  # instead of the installed one
    builder = {"wheel": WheelBuilder, "sdist": SdistBuilder}[target](str(root), plugin_manager=plugins)
    if target == "wheel":
        settings = Settings.of(builder.metadata.config.get("tool", {}).get("attngen"))
        contents += project_contents(root, settings, builder.metadata.version, jobs=jobs, observer=observer)
    drivers = [json.loads(each.files[INDEX])["drivers"] for each in contents]
    try:
        with _named_drivers(root / "README.md", drivers):  # hatchling reads it first of all
            (path,) = builder.build(directory=str(directory), versions=[version])
    except OSError as error:
        # hatchling writes the archive among the temporary files, and moves it
        raise PackageError(f"{target}: {failed_write(error, directory, gettempdir())}") from error
    return Path(path)


@contextmanager
def _named_drivers(readme: Path, drivers: Sequence[Mapping[str, int]]) -> Iterator[None]:
    """Name the oldest drivers, if they are known, in the README of a project that ``project_files`` wrote."""
    before = readme.read_text("utf-8")
    line = f"{DRIVER_LINE}{'; '.join(map(drivers_text, drivers))}."
    try:
        if drivers:
            with naming(readme):
                readme.write_text(re.sub(rf"^{DRIVER_LINE}.*$", lambda _: line, before, flags=re.MULTILINE), "utf-8")
        yield
    finally:
        with naming(readme):
            readme.write_text(before, "utf-8")
