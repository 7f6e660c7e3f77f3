"""The result of a compile: bytes and plain values without live state, to be pickled, stored and shipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled kernel.

    ``manifest`` is plain JSON. ``cubin`` holds the main launch, and those without a cubin of their own in ``others``,
    by the names of the launches. ``texts`` maps a file name to what ``attngen show`` prints (``source.py``, ``ptx``,
    ``ttgir``); it may be empty, since nothing at run time reads it.
    """

    cubin: bytes
    manifest: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Artifact({self.name}: a cubin of {len(self.cubin)} B)"

    @property
    def name(self) -> str:
        """The kernel's name, which is its symbol too."""
        return str(self.manifest["name"])
