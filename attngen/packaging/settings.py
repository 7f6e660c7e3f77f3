"""The table ``[tool.attngen]`` of a project: which specs become part of its wheel, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attngen.arch import ARCHES
from attngen.build.kernel_filter import EVERYTHING, KernelFilter
from attngen.errors import SettingError, suggest

#: A package holds no code for the host's processor and links nothing, so the oldest glibc that wheels can name will do;
#: the platforms are those of torch's CUDA builds.
PLATFORMS = ("manylinux_2_17_aarch64", "manylinux_2_17_x86_64")

_PLATFORM = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+|any")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMG]i?B|B)?")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

#: Keys that select kernels, with the fields of a filter.
FILTER_KEYS = {"arch": "arch", "dtype": "dtype", "head-dim": "head_dim"}
_KEYS = ("specs", *FILTER_KEYS, "platforms", "max-size", "tuned")


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked table. ``specs`` and ``tuned`` are paths from the project's folder; ``max_size`` is in bytes."""

    specs: tuple[str, ...]
    only: KernelFilter = EVERYTHING
    platforms: tuple[str, ...] = PLATFORMS
    max_size: int | None = None
    tuned: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The tag of the wheel: any Python 3, no ABI, these platforms."""
        return f"py3-none-{'.'.join(sorted(self.platforms))}"

    @classmethod
    def of(cls, table: Any) -> Settings:
        """Return the settings of a table as TOML has it. Raises SettingError, naming the key."""
        if not isinstance(table, Mapping):
            raise SettingError(
                'pyproject.toml: there is no table [tool.attngen]; write specs = ["my_masks.yaml"] there'
            )
        for key in table:
            if key not in _KEYS:
                raise _wrong(key, f"unknown key{suggest(key, _KEYS)}; allowed: {', '.join(_KEYS)}")
        specs = _texts(table, "specs")
        if not specs:
            raise _wrong("specs", 'missing; write the files of your specs, such as ["my_masks.yaml"]')
        tuned = _texts(table, "tuned")
        for key, path in (*(("specs", spec) for spec in specs), *(("tuned", file) for file in tuned)):
            if path.startswith("/") or ".." in path.split("/"):
                raise _wrong(key, f"found {path!r}; allowed: files inside the project, by their path from its folder")
            if not path.isprintable() or '"' in path or "\\" in path:
                raise _wrong(
                    key, f"found {path!r}; allowed: a path without quotation marks, backslashes, control characters"
                )
        only = KernelFilter(**{field: _texts(table, key) for key, field in FILTER_KEYS.items()})
        for arch in only.arch:
            if arch not in ARCHES:
                raise _wrong("arch", f"found {arch!r}{suggest(arch, ARCHES)}; allowed: {', '.join(ARCHES)}")
        platforms, size = _texts(table, "platforms"), table.get("max-size")
        try:
            platforms = check_platforms(platforms) or PLATFORMS
            most = None if size is None else size_in_bytes(str(size))
        except SettingError as error:
            raise SettingError(f"pyproject.toml: [tool.attngen]: {error}") from None
        return cls(specs, only, platforms, most, tuned)


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _wrong(key, f"found {value!r}; allowed: a list of texts")
    return tuple(value)


def _wrong(key: str, message: str) -> SettingError:
    return SettingError(f"pyproject.toml: [tool.attngen] {key}: {message}")


def check_platforms(platforms: tuple[str, ...]) -> tuple[str, ...]:
    """Return the platform tags, or raise SettingError, which shows what a tag looks like."""
    for platform in platforms:
        if not _PLATFORM.fullmatch(platform):
            raise SettingError(
                f"platform {platform!r} is not a platform tag; allowed, for example: 'manylinux_2_17_x86_64' or "
                "'linux_x86_64'"
            )
    return platforms


def size_in_bytes(text: str) -> int:
    """Return the bytes that a size stands for: ``8 MB`` is 8,000,000, ``8 MiB`` 8,388,608. Raises SettingError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingError(
            f"size {text!r} is not understood; allowed: a number with kB, MB, GB, KiB, MiB, GiB, or none for bytes"
        )
    return int(float(match["number"]) * _UNITS[(match["unit"] or "B").upper()])
