"""The project that ``attngen package`` builds: a pyproject.toml, a README, a licence and the files of one spec."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import getaddresses
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from attngen.build.kernel_filter import EVERYTHING, KernelFilter
from attngen.build.pipeline import prepare
from attngen.errors import SettingError
from attngen.formats import VERSION
from attngen.packaging.contents import spec_files, view_of
from attngen.packaging.generator import FOLDER, generator_files, requirements
from attngen.packaging.settings import FILTER_KEYS, PLATFORMS
from attngen.packaging.view import DRIVER_LINE, fill
from attngen.resources import specs_dir

if TYPE_CHECKING:
    from attngen.schema import Spec


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the packager: version, which kernels, platform tags, a licence, and files of measured choices for
    kernels."""

    version: str = VERSION
    only: KernelFilter = EVERYTHING
    platforms: tuple[str, ...] = PLATFORMS
    licence: Path | None = None
    tuned: tuple[Path, ...] = ()


def project_files(spec: Spec, choices: Choices, *, generator: bool) -> Mapping[str, bytes]:
    """Return the files of a project whose wheel is the package of a spec. Nothing is compiled.

    ``generator``: the project carries attngen itself, with which other machines build it. Raises SettingError for a
    version that is none, a licence that cannot be read, and if the requirements of the generator are unknown, and
    SpecError for a wrong file of choices.
    """
    folder = PurePosixPath(spec.name).parent
    spec = replace(spec, name=(folder / Path(spec.file).name).as_posix())  # a link may have a name of its own
    specs = {(folder / name).as_posix(): data for name, data in spec_files(spec).items()}
    licence = {} if choices.licence is None else {"LICENSE": _read(choices.licence)}
    tuned = _tuned_files(choices.tuned)
    view = view_of(spec, prepare(spec, choices.only), _version(choices.version))
    project = fill(
        "pyproject.toml.j2",
        view=view,
        settings={
            "only": {key: _toml(getattr(choices.only, field)) for key, field in FILTER_KEYS.items()},
            "platforms": _toml(sorted(choices.platforms)),
            "tuned": _toml(tuned) if tuned else None,
        },
        requires=_toml(requirements() if generator else []),
        generator=FOLDER,
        files=_toml([*specs, *tuned, *([FOLDER] if generator else [])]),
        licences=_toml(licence),
    )
    return {
        "pyproject.toml": (project + _publisher(spec)).encode(),
        "README.md": fill("readme.md.j2", view=view, driver_line=DRIVER_LINE).encode(),
        **licence,
        **specs,
        **tuned,
        **(generator_files() if generator else {}),
    }


def _tuned_files(paths: Sequence[Path]) -> Mapping[str, bytes]:
    """Return files of choices by their paths in the project. Raises SettingError if two of them have one name."""
    from attngen.schema.tuned import load_tuned

    files: dict[str, bytes] = {}
    for path in paths:
        tuned = load_tuned(path)
        if files.setdefault(f"tuned/{path.name}", tuned.content) != tuned.content:
            raise SettingError(f"two files of choices are named {path.name!r}; give one of them another name")
    return files


def _publisher(spec: Spec) -> str:
    """Tables of a pyproject.toml: authors and URLs of the installed attngen for a shipped spec, else nothing."""
    if not Path(spec.file).resolve().is_relative_to(specs_dir()):
        return ""
    try:
        attngen = metadata.metadata("attngen")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return ""
    authors = [{"name": name} for name in attngen.get_all("Author", [])]
    authors += [{"name": name, "email": email} for name, email in getaddresses(attngen.get_all("Author-email", []))]
    urls = dict(label.split(", ", 1) for label in attngen.get_all("Project-URL", []))
    tables = [("[[project.authors]]", author) for author in authors] + ([("[project.urls]", urls)] if urls else [])
    return "".join(
        "\n".join(["", head, *(f"{json.dumps(name)} = {json.dumps(text)}" for name, text in table.items()), ""])
        for head, table in tables
    )


def _toml(values: object) -> str:
    """Return a list of texts as TOML writes it; JSON's form is legal there."""
    return json.dumps(list(values))  # type: ignore[call-overload]


def _version(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text))
    except InvalidVersion:
        raise SettingError(f"version {text!r} is not one that pip understands; allowed, for example: '1.0.0'") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"licence {path} cannot be read: {error.strerror or error}") from error
