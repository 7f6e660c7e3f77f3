"""The build hook for hatchling: compiles a project's specs while its wheel is built, and puts their packages into it.

A project asks for it by ``[tool.hatch.build.targets.wheel.hooks.attngen]``, and says in ``[tool.attngen]`` what to
build. ``attngen package`` writes such a project itself, so that there is one way to make a wheel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from attngen.build.pipeline import Observer
from attngen.errors import PackageError
from attngen.files import naming
from attngen.packaging.contents import Contents, contents_of
from attngen.packaging.settings import Settings
from attngen.packaging.sizes import sizes_of
from attngen.runtime.registry.discovery import ENTRY_POINTS
from attngen.store.temporary import TemporaryFolder


def project_contents(
    root: Path, settings: Settings, version: str, *, jobs: int | None = None, observer: Observer | None = None
) -> list[Contents]:
    """Compile the specs of a project in ``root``, and return their packages.

    Raises PackageError for a name that is taken, before anything compiles.
    """
    from attngen.schema import load_spec
    from attngen.schema.tuned import load_tuned

    for path in settings.specs:
        if not (root / path).is_file():
            raise PackageError(
                f"pyproject.toml: [tool.attngen] specs: found {path!r}; there is no such file below {root}"
            )
    # Sources name a spec by its path in the project, so that they are the same wherever the project lies.
    specs = [replace(load_spec(root / path), name=path) for path in settings.specs]
    taken: dict[str, str] = {}
    for spec in specs:
        reason = _clash(root, spec.package, taken)
        if reason:
            raise PackageError(
                f"{spec.name}: its package would be '{spec.package}', {reason}; name another one in the spec, by "
                "'package: ...'"
            )
        taken[spec.package] = spec.name
    tuned = [load_tuned(root / path, name=path) for path in settings.tuned]
    return [contents_of(spec, version, only=settings.only, tuned=tuned, jobs=jobs, observer=observer) for spec in specs]


def _clash(root: Path, module: str, taken: dict[str, str]) -> str | None:
    """The other owner of a module's name, in words, or None."""
    if module in taken:
        return f"as that of {taken[module]}"
    for folder in (root, root / "src"):
        if (folder / module / "__init__.py").exists() or (folder / f"{module}.py").exists():
            return f"which is a module of the project itself, in {(folder / module).relative_to(root)}"
    return None


class AttngenHook(BuildHookInterface):
    """Adds the package of each spec to a wheel, also to an editable one; other targets are left as they are."""

    PLUGIN_NAME = "attngen"

    observer: Observer | None = None
    jobs: int | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, write the packages to a folder that exists during the build, and have hatchling include them."""
        if self.target_name != "wheel":
            return
        settings = self._settings()
        self._folder = TemporaryFolder()
        included = build_data["force_include"]
        if version == "editable":  # replaces all other forced inclusions, if there are any
            included = build_data["force_include_editable"]
            included.update({**self.build_config.get_force_include(), **build_data["force_include"], **included})
        for contents in self._contents(settings):
            place = self._folder.path / contents.module
            for name, data in contents.files.items():
                path = place / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with naming(path):
                    path.write_bytes(data)
            included[str(place)] = contents.module
            self._warn_if_unregistered(contents.module)
        build_data["pure_python"] = False
        if "tag" not in build_data and not build_data["infer_tag"]:
            build_data["tag"] = settings.tag

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Check the size of the wheel, and remove it if it is larger than allowed."""
        if self.target_name != "wheel":
            return
        self._folder.remove()
        most, wheel = self._settings().max_size, Path(artifact_path)
        if most is not None:
            try:
                sizes_of(wheel).require(most, wheel.name)
            except PackageError:
                wheel.unlink()
                raise

    def _settings(self) -> Settings:
        return Settings.of(self.metadata.config.get("tool", {}).get("attngen"))

    def _contents(self, settings: Settings) -> list[Contents]:
        return project_contents(
            Path(self.root), settings, self.metadata.version, jobs=self.jobs, observer=self.observer
        )

    def _warn_if_unregistered(self, module: str) -> None:
        """Warn if an attngen that is installed beside the package would not find it."""
        if module not in self.metadata.core.entry_points.get(ENTRY_POINTS, {}).values():
            self.app.display_warning(
                f"attngen.attention will not find {module}, which works by its own name; to register it, add to "
                f'pyproject.toml: [project.entry-points."{ENTRY_POINTS}"] {module} = "{module}"'
            )


@hookimpl
def hatch_register_build_hook() -> type[AttngenHook]:
    """Return the hook to hatchling, which finds this module by the entry point group ``hatch``."""
    return AttngenHook
