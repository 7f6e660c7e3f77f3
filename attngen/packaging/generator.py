"""The copy of the generator in a source distribution, so that pip can build it without attngen from an index.

It is in a folder of its own, laid out like a checkout, and is the build backend of the distribution.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import attngen
from attngen import resources
from attngen.errors import PackageError

#: The folder of a source distribution that holds the generator; no package can have its name.
FOLDER = "_attngen"

#: The folder in which an installed attngen keeps what a checkout has beside the package.
_DATA = "_data"


def generator_files() -> dict[str, bytes]:
    """Return the files of the generator by their path in a source distribution: sources, templates, presets,
    tables of choices."""
    package = Path(attngen.__file__).parent
    files = {path: Path("attngen") / path.relative_to(package) for path in package.rglob("*")}
    templates, presets = resources.templates_dir(), resources.specs_dir() / "presets"
    files |= {path: Path("templates") / path.relative_to(templates) for path in templates.rglob("*")}
    files |= {path: Path("specs/presets") / path.name for path in presets.glob("*.yaml")}
    files |= {path: Path("tuned") / path.name for path in resources.tuned_dir().glob("*.yaml")}
    files[resources.licence_file()] = Path("LICENSE")
    left_out = {_DATA, "__pycache__"}
    kept = [(f"{FOLDER}/{place.as_posix()}", path) for path, place in files.items() if not left_out & {*place.parts}]
    return {place: path.read_bytes() for place, path in sorted(kept) if path.is_file()}


def requirements() -> list[str]:
    """Third-party distributions that the generator needs, sorted.

    Raises PackageError if attngen is not installed, since only its metadata lists them.
    """
    from packaging.requirements import Requirement

    try:
        listed = [Requirement(text) for text in metadata.requires("attngen") or ()]
    except metadata.PackageNotFoundError:
        raise PackageError(
            "a source distribution lists what attngen needs, which only the metadata of an installed attngen has: "
            "run 'pip install' on its folder first"
        ) from None
    # requirements without a marker are those of every installation
    needed = [each for each in listed if each.marker is None or each.marker.evaluate({"extra": "build"})]
    return sorted(f"{each.name}{each.specifier}" for each in needed)
